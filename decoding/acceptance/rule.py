"""The seam of an acceptance rule, and the walk that rules of one-hot candidates share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ..draft import Draft, Shape
from ..law import Law, LawSettings
from ..noise import Noise

Guarantee = Literal["same tokens", "same law", "lossy"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path`: the kept rows of the draft, root to leaf; `next`: the token emitted behind them."""

    path: tuple[int, ...]
    next: int


@runtime_checkable
class Acceptance(Protocol):
    """A rule. `reads`: whether it walks one path from the root or looks at all rows at once."""

    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def shapes(self) -> tuple[Shape, ...]: ...
    @property
    def needs_q(self) -> bool: ...
    @property
    def reads(self) -> Literal["path", "all rows"]: ...
    def law(self) -> LawSettings: ...
    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict: ...


def children(draft: Draft) -> dict[int, list[int]]:
    """The candidates behind each row (−1: the root), in index order."""
    out: dict[int, list[int]] = {}
    for i, (parent, judged) in enumerate(zip(draft.parents, draft.judged, strict=True)):
        if judged:
            out.setdefault(parent, []).append(i)
    return out


def walk(draft: Draft, decide: Callable[[int, int, list[int]], tuple[int | None, int]]) -> Verdict:
    """From the root down. `decide(row, offset, candidates)` says (the candidate kept or None, the token if none is)."""
    below = children(draft)
    path: list[int] = []
    node = -1
    while True:
        kept, token = decide(node + 1, len(path), below.get(node, []))
        if kept is None:
            return Verdict(tuple(path), token)
        path.append(kept)
        node = kept
