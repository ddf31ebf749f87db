"""Is the output still the target's own? The verdict that every speed stands beside."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import frexp, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from ..decoding.acceptance import Acceptance, Block, Sampling
from ..decoding.draft import Drafter
from ..drafting.draft_model import ModelDrafter

Verdict = Literal["exact", "near-tie", "same law", "lossy", "broken"]

# (rule, drafter that draws from a q) whose law is proven: the rule's in tests/decoding/test_laws.py, the pair's in
# tests/experiments/test_exactness.py. A drafter of a user's own may draw from another q than it hands over. Of one-hot
# drafts, whose q is known, Block's law is proven for all.
PROVEN: frozenset[tuple[type, type]] = frozenset({(Sampling, ModelDrafter), (Block, ModelDrafter)})
NEAR = 1e-3  # float32: largest gap of a near-tie
NEAR_ULPS = 2  # bf16, fp16: in units of the top logit's last place
ONE_IN = 5  # float32: a larger share of prompts that diverge is no rounding


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's.

    `gap`: plain decoding's best score there less that of the strategy's token; `second`: only one token scores higher;
    `top_logit`: the highest raw logit. None where no scores tell: an output that ends early, a token that is forbidden.
    """

    id: str
    position: int
    expected: int | None
    got: int | None
    gap: float | None = None
    second: bool | None = None
    top_logit: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side."""
    for i, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return i
    return None if len(want) == len(got) else min(len(want), len(got))


def divergence(
    name: str,
    want: Sequence[int],
    got: Sequence[int],
    seen_at: Callable[[int], tuple[Tensor, Tensor] | None],
) -> Divergence | None:
    """Compare one output with plain decoding's. `seen_at(position)`: (scores that its choice maximises, raw logits)."""
    at = first_difference(want, got)
    if at is None:
        return None
    expected, found = (tokens[at] if at < len(tokens) else None for tokens in (want, got))
    # one output ends early: no tie explains that
    seen = None if expected is None or found is None else seen_at(at)
    if seen is None:
        return Divergence(name, at, expected, found)
    scores, logits = seen
    gap, better = float(scores.max() - scores[found]), int((scores > scores[found]).sum())
    return Divergence(name, at, expected, found, gap if isfinite(gap) else None, better <= 1, float(logits.max()))


def is_near_tie(d: Divergence, dtype: torch.dtype) -> bool:
    """The strategy's token ties with plain decoding's within the dtype's rounding; in float32 it is the second choice
    too, while in half types, whose steps are coarse, three tokens tie now and then. Never in float64."""
    if d.gap is None or d.top_logit is None or dtype == torch.float64:
        return False
    if dtype == torch.float32:
        return bool(d.second) and d.gap <= NEAR
    return d.gap <= NEAR_ULPS * ulp(d.top_logit, dtype)


def ulp(x: float, dtype: torch.dtype) -> float:
    """The distance from |x| to the next larger number of the dtype."""
    return float(torch.finfo(dtype).eps) * 2.0 ** (frexp(x)[1] - 1)


def verdict(
    divergences: Sequence[Divergence], prompts: int, drafter: Drafter[Any], rule: Acceptance, dtype: torch.dtype
) -> Verdict:
    """See the design's table of definitions."""
    if rule.guarantee == "lossy":
        return "lossy"
    sampled = drafter.gives.q == "sampled"
    if rule.law().sample and (sampled or rule.needs_q):
        proven = (type(rule), type(drafter)) in PROVEN if sampled else type(rule) is Block
        return "same law" if proven else "broken"
    if not divergences:
        return "exact"
    few = dtype != torch.float32 or ONE_IN * len(divergences) <= prompts
    return "near-tie" if few and all(is_near_tie(d, dtype) for d in divergences) else "broken"
