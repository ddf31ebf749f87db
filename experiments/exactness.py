"""Is the output still the target's own? The verdict that every speed stands beside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..decoding.acceptance import Acceptance
from ..decoding.draft import Drafter

Verdict = Literal["exact", "near-tie", "same law", "lossy", "broken"]

# (rule, what its candidates are drawn from) whose law tests/decoding/test_laws.py enumerates.
PROVEN = frozenset({("Sampling", "sampled")})
NEAR = 1e-3  # float32: largest gap of a near-tie
NEAR_ULPS = 2  # bf16, fp16: in units of the top logit's last place
MOST_NEAR = 0.2  # float32: a larger share of diverging prompts is no rounding


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs. `gap`: the plain decoder's best score less that of the strategy's token there."""

    id: str
    position: int
    expected: int | None
    got: int | None
    gap: float | None
    second: bool | None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side."""
    for i, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return i
    return None if len(want) == len(got) else min(len(want), len(got))


def divergence(
    name: str, want: Sequence[int], got: Sequence[int], scores_at: Callable[[int], Tensor]
) -> Divergence | None:
    """Compare one output. `scores_at(position)` are what plain decoding's choice maximises there."""
    at = first_difference(want, got)
    if at is None:
        return None
    expected, found = (tokens[at] if at < len(tokens) else None for tokens in (want, got))
    if expected is None or found is None:  # one output ends early: no tie explains that
        return Divergence(name, at, expected, found, None, None)
    scores = scores_at(at)
    top, order = scores.topk(2)
    return Divergence(name, at, expected, found, float(top[0] - scores[found]), int(order[1]) == found)


def is_near_tie(d: Divergence, top: float, dtype: torch.dtype) -> bool:
    """The strategy's token is plain decoding's second choice, within the dtype's rounding. Never in float64."""
    if d.gap is None or not d.second or dtype == torch.float64:
        return False
    if dtype == torch.float32:
        return d.gap <= NEAR
    return d.gap <= NEAR_ULPS * torch.finfo(dtype).eps * 2.0 ** torch.frexp(torch.tensor(abs(top)))[1].item() / 2


def verdict(
    divergences: Sequence[tuple[Divergence, float]],
    prompts: int,
    drafter: Drafter[Any],
    rule: Acceptance,
    dtype: torch.dtype,
) -> Verdict:
    """`divergences` with the top score at each. See the design's table of definitions."""
    if rule.guarantee == "lossy":
        return "lossy"
    samples_q = rule.law().sample and drafter.gives.q == "sampled"
    if samples_q:
        return "same law" if (type(rule).__name__, drafter.gives.q) in PROVEN else "broken"
    if not divergences:
        return "exact"
    few = dtype != torch.float32 or len(divergences) <= MOST_NEAR * prompts
    return "near-tie" if few and all(is_near_tie(d, top, dtype) for d, top in divergences) else "broken"
