"""Speculative sampling over trees: what is emitted has the target's law.

Candidates with a q are judged first, in order, by rejection (arXiv:2211.17192, algorithm 1; for several siblings
arXiv:2305.09781 and arXiv:2402.12374): kept if u < p(x) / q(x), else p becomes norm(max(0, p − q)). Then one token y is
drawn from what is left of p, and a one-hot candidate is kept iff it is y: the position's own noise decides y, so with
one-hot candidates alone the output equals plain sampling token for token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..draft import Draft, Shape
from ..law import BadWord, Law, LawSettings, law_of, perturbed
from ..noise import Noise
from .rule import Guarantee, Verdict, walk


@dataclass(frozen=True, slots=True)
class Sampling:
    """Exact against plain sampling for one-hot candidates, of the same law for candidates with a q."""

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

    guarantee: ClassVar[Guarantee] = "same law"
    shapes: ClassVar[tuple[Shape, ...]] = ("chain", "tree", "forest")
    needs_q: ClassVar[bool] = False
    reads: ClassVar[Literal["path", "all rows"]] = "path"

    def __post_init__(self) -> None:
        self.law()

    def law(self) -> LawSettings:
        return law_of(self, sample=True)

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        return speculative(draft, law, noise, lambda row, candidates: None)


def speculative(
    draft: Draft, law: Law, noise: Noise, instead: Callable[[int, list[int]], Float[Tensor, " V"] | None]
) -> Verdict:
    """Judge so that what follows a row has its law: p, or what `instead(row, candidates)` gives in its place.

    A law in p's place follows from what was drafted, which may have been chosen by the target's own noise; so its draws
    are of a stream that no drafter sees.
    """

    def decide(row: int, offset: int, candidates: list[int]) -> tuple[int | None, int]:
        drawn = [c for c in candidates if draft.q_row[c] >= 0]
        other = instead(row, candidates)
        if drawn or other is not None:
            p, key = (law.at(row), noise.target(offset)) if other is None else (other, noise.rest(offset))
            for sibling, c in enumerate(drawn):
                assert draft.q is not None
                q, x = draft.q[draft.q_row[c]].to(p), draft.tokens[c]
                # strict, u in (0, 1): a token that p forbids is never kept (q(x) > 0, since x was drawn)
                if noise.accept(offset, sibling) * float(q[x]) < float(p[x]):
                    return c, x
                p = residual(p, q)
            token = int(perturbed(p.log(), key).argmax())
        else:
            token = law.choose(row, noise, offset)
        fixed = (c for c in candidates if draft.q_row[c] < 0 and draft.tokens[c] == token)
        return next(fixed, None), token

    return walk(draft, decide)


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """norm(max(0, p − q)); p itself where nothing is left (p = q up to rounding: a rejection then has no weight)."""
    gap = (p - q).clamp_min(0)
    mass = gap.sum()
    return torch.where(mass > 0, gap / mass.clamp_min(torch.finfo(gap.dtype).tiny), p)
