"""Medusa's typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.2): keep what the target finds plausible.

A candidate x is kept if p(x) > min(ε, δ exp(−H(p))), H the entropy in nats of the target's law behind its parent. The
longest path wins, ties by the sum of log p. Lossy. (The reference implementation swaps the defaults of ε and δ in its
helper functions; its generate passes those of the paper, which are ours.)
"""

from dataclasses import dataclass
from math import exp
from typing import ClassVar, Literal

from ...errors import UserError
from ..draft import Draft, Shape
from ..law import Law, LawSettings, best, law_of
from ..noise import Noise
from .rule import Guarantee, Verdict


@dataclass(frozen=True, slots=True)
class Typical:
    """`epsilon`: ε, the hard threshold; `delta`: δ, √ε in the paper. What follows the path is the target's likeliest
    token, so that each step is sure of one that the target stands by."""

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    guarantee: ClassVar[Guarantee] = "lossy"
    shapes: ClassVar[tuple[Shape, ...]] = ("chain", "tree", "forest")
    needs_q: ClassVar[bool] = False
    reads: ClassVar[Literal["path", "all rows"]] = "all rows"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"acceptance.{name} must be above 0 and at most 1, got {getattr(self, name)}")
        self.law()

    def law(self) -> LawSettings:
        return law_of(self, sample=True)

    def threshold(self, entropy: float) -> float:
        return min(self.epsilon, self.delta * exp(-entropy))

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        thresholds: dict[int, float] = {}
        paths: list[tuple[int, float] | None] = []  # (length, Σ log p) of each row's path; None: not kept
        for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            behind = (0, 0.0) if parent < 0 else paths[parent]
            if behind is None or not draft.judged[i]:
                paths.append(None)
                continue
            p = law.at(parent + 1).double()
            if parent not in thresholds:
                thresholds[parent] = self.threshold(float(-(p * p.clamp_min(1e-300).log()).sum()))
            kept = float(p[token]) > thresholds[parent]
            paths.append((behind[0] + 1, behind[1] + float(p[token].log())) if kept else None)
        found = [(length, score, -i) for i, path in enumerate(paths) if path is not None for length, score in [path]]
        path: list[int] = []
        row = -max(found)[2] if found else -1
        while row >= 0:
            path.append(row)
            row = draft.parents[row]
        path.reverse()
        return Verdict(tuple(path), best(law.scores(path[-1] + 1 if path else 0)))
