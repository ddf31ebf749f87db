"""The only definitions of the numbers we report. All derive from the event log (`decoding/events.py`)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ..decoding.events import Generation, Step


def mean(values: Iterable[int | float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    return numerator / denominator if denominator else None


def tpot(g: Generation) -> float | None:
    """Seconds per output token after the first: (latency − ttft) ÷ (n − 1); None for one token."""
    return g.decode_s / (len(g.tokens) - 1) if len(g.tokens) > 1 else None


def decode_seconds(batch: Sequence[Generation]) -> float:
    """From the last prefill's end to the last token: what the steps of one batch took."""
    return max(g.latency_s for g in batch) - max(g.ttft_s for g in batch)


def timing(done: Sequence[Generation], timed: bool = True) -> dict[str, Any]:
    """Speed of one side over its prompts; all but `tokens` None where it was not timed.

    `tokens`: emitted, after the cut at the first EOS or stop and at `max_new_tokens`. `ttft_s`, `latency_s`: means over
    prompts. `tpot_s`: ratio of sums over prompts of more than one token. `itl`: gaps between deliveries (a speculative
    step delivers several tokens at once), p50 and p99, with the mean burst. `tokens_per_second`: 1 ÷ tpot.
    """
    tokens = sum(len(g.tokens) for g in done)
    if not timed:
        names = ("ttft_s", "tpot_s", "itl_p50_s", "itl_p99_s", "burst", "tokens_per_second", "latency_s")
        return {"tokens": tokens, **dict.fromkeys(names)}
    gaps = [b - a for g in done for (a, _), (b, _) in pairwise(g.delivered)]
    bursts = [n for g in done for _, n in g.delivered[1:]]
    decoded, seconds = tokens - len(done), sum(g.decode_s for g in done)
    return {
        "tokens": tokens,
        "ttft_s": mean(g.ttft_s for g in done),
        "tpot_s": ratio(seconds, decoded),
        "itl_p50_s": float(np.percentile(gaps, 50)) if gaps else None,
        "itl_p99_s": float(np.percentile(gaps, 99)) if gaps else None,
        "burst": mean(bursts),
        "tokens_per_second": ratio(decoded, seconds),
        "latency_s": mean(g.latency_s for g in done),
    }


def acceptance(steps: Sequence[Step]) -> dict[str, Any]:
    """How the drafts fared.

    `tokens_per_step` (τ): emitted by the target's forwards after prefill ÷ those forwards, steps without a draft
    included; plain decoding is 1.00. `tokens_per_drafted_step`: the same over steps that drafted. `acceptance_rate`:
    accepted ÷ longest path offered, over steps that drafted. By position i (from 1): `rate` = steps that accepted i or
    more ÷ steps that drafted; `conditional` = those ÷ steps that accepted i − 1 or more and offered i.
    """
    drafted = [s for s in steps if s.depth]
    deepest = max((s.depth for s in drafted), default=0)
    by_position = []
    for i in range(1, deepest + 1):
        kept = sum(s.accepted >= i for s in drafted)
        reached = sum(s.accepted >= i - 1 and s.depth >= i for s in drafted)
        by_position.append({"rate": ratio(kept, len(drafted)), "conditional": ratio(kept, reached), "reached": reached})
    return {
        "tokens_per_step": ratio(sum(s.emitted for s in steps), len(steps)),
        "tokens_per_drafted_step": ratio(sum(s.emitted for s in drafted), len(drafted)),
        "acceptance_rate": ratio(sum(s.accepted for s in drafted), sum(s.depth for s in drafted)),
        "acceptance_by_position": by_position,
        "drafted_per_step": ratio(sum(s.drafted for s in steps), len(steps)),
        "rows_verified_per_step": ratio(sum(s.verified for s in steps), len(steps)),
        "steps": len(steps),
        "steps_without_draft": len(steps) - len(drafted),
        "accepted_by_source": dict(Counter(source for s in steps for source in s.sources)),
        "by_source": by_source(steps),
    }


def by_source(steps: Sequence[Step]) -> dict[str, dict[str, int | None]]:
    """What each of a drafter's sources brought, those that brought nothing among them.

    `steps`: in which it drafted; `drafted`: candidates; `accepted`: of those, the tokens kept, whoever else offered
    them; `alone`: of those, what no other source offered. None where the log does not tell, as of an earlier version.
    """
    offers = [{first, *others} for s in steps for first, others in zip(s.sources, s.also_proposed, strict=True)]
    seen = dict.fromkeys([*chain(*(s.drafted_by for s in steps)), *sorted(set(chain(*offers)))])
    known = any(s.drafted_by for s in steps) or not any(s.drafted for s in steps)
    return {
        name: {
            "steps": sum(s.drafted_by.get(name, 0) > 0 for s in steps) if known else None,
            "drafted": sum(s.drafted_by.get(name, 0) for s in steps) if known else None,
            "accepted": sum(name in offered for offered in offers),
            "alone": sum(offered == {name} for offered in offers),
        }
        for name in seen
    }


def time_share(steps: Sequence[Step]) -> dict[str, float | None]:
    """Shares of the decode time by phase; a step shared by a batch counts once."""
    total = sum(s.total_s / s.batch for s in steps)
    phases = ("draft", "verify", "accept", "commit", "other")
    return {phase: ratio(sum(getattr(s, f"{phase}_s") / s.batch for s in steps), total) for phase in phases}


def decode_flops_per_token(weights: int, layers: int, heads: int, head_dim: int, context: float) -> float:
    """2 × parameters in products + 4 × layers × heads × head_dim × context (scores and their weighted sum)."""
    return 2.0 * weights + 4.0 * layers * heads * head_dim * context
