"""Between target and draft: tokens have the law v = w p + (1 − w) q instead of p. Lossy by design.

The ensemble weight of assisted generation (transformers; DIVERSE). A node's q is the mean of its candidates' laws, each
one-hot unless the candidate brings its own, over what the processors do not forbid outright; behind the last candidate,
and where none was drafted, v is p.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import UserError
from ..draft import Draft, Shape
from ..law import BadWord, Law, LawSettings, law_of
from ..noise import Noise
from .rule import Guarantee, Verdict
from .sampling import speculative


@dataclass(frozen=True, slots=True)
class Ensemble:
    """`weight` w: 1 is speculative sampling, 0 keeps all that is drafted."""

    weight: float = 0.9
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bad_words: tuple[BadWord, ...] = ()
    min_new_tokens: int = 0

    guarantee: ClassVar[Guarantee] = "lossy"
    shapes: ClassVar[tuple[Shape, ...]] = ("chain", "tree", "forest")
    needs_q: ClassVar[bool] = True
    reads: ClassVar[Literal["path", "all rows"]] = "path"

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise UserError(f"acceptance.weight must be between 0 and 1, got {self.weight}")
        self.law()

    def law(self) -> LawSettings:
        return law_of(self, sample=True)

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        def mixed(row: int, candidates: list[int]) -> Float[Tensor, " V"] | None:
            if not candidates or self.weight == 1:
                return None
            p = law.at(row)
            q = torch.zeros_like(p)
            drawn = next((draft.q_row[c] for c in candidates if draft.q_row[c] >= 0), -1)
            for c in candidates:
                if draft.q_row[c] >= 0:  # the first one's: a later one's may follow from what was drawn before it
                    assert draft.q is not None
                    q += draft.q[drawn].to(p) / len(candidates)
                else:
                    q[draft.tokens[c]] += 1 / len(candidates)
            q *= law.allowed(row)
            if not (mass := float(q.sum())) > 0:
                return None
            return self.weight * p + (1 - self.weight) / mass * q

        return speculative(draft, law, noise, mixed)
