"""Block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2): a chain is judged as a whole.

With r_0 = 1 and r_i = min(1, r_{i−1} p_i(x_i) / q_i(x_i)), position i ends the block with probability
h_i = S_i / (S_i + 1 − r_i), S_i = Σ max(0, r_i p_{i+1} − q_{i+1}), and h_γ = r_γ; the longest such i is kept, and the
next token drawn from norm(max(0, r_i p_{i+1} − q_{i+1})). On average never fewer
tokens than token by token, and of the same law.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..draft import Draft, Shape
from ..law import Law, LawSettings, law_of, perturbed
from ..noise import Noise
from .rule import Guarantee, Verdict
from .sampling import residual


@dataclass(frozen=True, slots=True)
class Block:
    """Judges chains alone. A one-hot candidate's q is all on its token. Reads all rows, so no stateful processors."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    guarantee: ClassVar[Guarantee] = "same law"
    shapes: ClassVar[tuple[Shape, ...]] = ("chain",)
    needs_q: ClassVar[bool] = True
    reads: ClassVar[Literal["path", "all rows"]] = "all rows"

    def __post_init__(self) -> None:
        self.law()

    def law(self) -> LawSettings:
        return law_of(self, sample=True)

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        gamma = len(draft)
        kept, left = 0, law.at(0)
        r = 1.0
        for i in range(gamma + 1):
            p = law.at(i)
            if i == gamma:
                rest, h = p, r
            else:
                rest = (r * p - _q(draft, i, p)).clamp_min(0)
                s = float(rest.sum())
                h = 1.0 if r >= 1 else s / (s + 1 - r)
            # every position is tried: the longest that holds counts. u in (0, 1), so h = 0 never holds, h = 1 always
            if noise.accept(i) < h:
                kept, left = i, residual(rest, torch.zeros_like(rest)) if float(rest.sum()) > 0 else p
            if i < gamma:
                x = draft.tokens[i]
                q = float(_q(draft, i, p)[x])
                r = min(1.0, r * float(p[x]) / q) if q > 0 else 0.0  # not drawn from q, or q is NaN: never kept
                if r == 0:  # nor is what stands behind it
                    break
        token = int(perturbed(left.log(), noise.rest(kept)).argmax())
        return Verdict(tuple(range(kept)), token)


def _q(draft: Draft, i: int, p: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    if draft.q_row[i] >= 0:
        assert draft.q is not None
        return draft.q[draft.q_row[i]].to(p)
    q = torch.zeros_like(p)
    q[draft.tokens[i]] = 1
    return q
