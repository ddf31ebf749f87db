"""What a race came to, as plain data: each contender, ours against each peer, and the bars.

A speed stands only beside the right output: of ours, what the plain decoder emits on the same weights; a broken one has
no speed. Of the peers, whose arithmetic is theirs, it is counted how often speculation emits what their own greedy
decoding does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ..metrics import ratio
from ..statistics import Interval, ratio_interval, speedup_interval
from .bars import Facts, bars
from .race import Contender, Forward, Measured, differing


@dataclass(frozen=True)
class Race:
    """Who ran on what. `context`: of timed forwards; `bytes_read`: by a step
    of each of ours behind that context; `large`: whether the stored weights are."""

    contenders: Sequence[Contender]
    forwards: Sequence[Forward]
    context: int
    prompt_tokens: Mapping[str, int]
    bytes_read: Mapping[str, float]
    large: bool


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a contender, by prompt, over its rounds: `seconds` of the `tokens` behind the first delivery; `ttft`."""

    seconds: np.ndarray
    tokens: np.ndarray
    ttft: np.ndarray
    prompt_tokens: np.ndarray
    steps: int


def _sums(race: Race, measured: Measured, name: str, prompts: Sequence[str]) -> _Sums:
    turns = [measured.turns[name][prompt] for prompt in prompts]
    return _Sums(
        np.array([sum(t.decode_s for t in each) for each in turns]),
        np.array([sum(len(t.tokens) - t.first for t in each) for each in turns], float),
        np.array([sum(t.ttft_s for t in each) / len(each) for each in turns]),
        np.array([race.prompt_tokens[prompt] for prompt in prompts], float),
        sum(t.steps for each in turns for t in each),
    )


def findings(race: Race, measured: Measured) -> dict[str, Any]:
    prompts = measured.prompts()
    sums = {one.name: _sums(race, measured, one.name, prompts) for one in race.contenders}
    bandwidth = median(measured.bandwidth)
    rows: dict[str, dict[str, Any]] = {}
    for one in race.contenders:
        output = _output(measured, one, prompts)
        rows[one.name] = {
            "whose": one.whose,
            "kind": one.kind,
            "low_bit": one.low_bit,
            "settings": one.settings,
            "output": output,
            **_speed(sums[one.name], output["verdict"] == "broken"),
        }
    sound = [one for one in race.contenders if rows[one.name]["tpot_s"] is not None]
    mine, theirs = [[o for o in sound if (o.whose == "ours") == ours] for ours in (True, False)]
    plain = [one for one in mine if one.kind == "plain"]
    shares = {o.name: _share(race.bytes_read[o.name], bandwidth, sums[o.name]) for o in plain}
    ratios = {
        one.name: {
            peer.name: {"decode": asdict(_faster(sums, one, peer)), "prefill": asdict(_sooner(sums, one, peer))}
            for peer in theirs
        }
        for one in mine
    }
    forwards = {
        one.name: {
            "whose": one.whose,
            "low_bit": one.low_bit,
            "seconds": {k: median(spent) if spent else None for k, spent in measured.forwards[one.name].items()},
            "samples": measured.forwards[one.name],
        }
        for one in race.forwards
    }
    facts = Facts(
        sound,
        {one.name: rows[one.name]["tpot_s"] for one in sound},
        lambda a, b: _faster(sums, a, b),
        lambda a, b: _sooner(sums, a, b),
        [f for f in race.forwards if f.whose != "ours" or f.name in {one.forward for one in mine}],
        measured.forwards,
        shares,
        {o.name: _outside(o, measured, sums[o.name], prompts) for o in plain},
        race.large,
    )
    return {
        "prompts": len(prompts),
        "context": race.context,
        "bandwidth": {
            "median": bandwidth,
            "measured": measured.bandwidth,
            "share": {name: asdict(share) for name, share in shares.items()},
        },
        "outside": {
            o.name: {"share": asdict(facts.outside[o.name]), "bare": _bare(o, measured, sums[o.name])} for o in plain
        },
        "contenders": rows,
        "ratios": ratios,
        "forwards": forwards,
        "bars": [bar.as_dict() for bar in bars(facts)],
        "interrupted": measured.interrupted,
    }


def _faster(sums: Mapping[str, _Sums], one: Contender, peer: Contender) -> Interval:
    """Seconds per token of the peer ÷ ours, on prompts where both decoded something."""
    a, b = sums[one.name], sums[peer.name]
    both = (a.tokens > 0) & (b.tokens > 0)
    return speedup_interval(b.seconds[both], b.tokens[both], a.seconds[both], a.tokens[both])


def _sooner(sums: Mapping[str, _Sums], one: Contender, peer: Contender) -> Interval:
    """Seconds to the first token of the peer ÷ ours: both have read the same tokens."""
    return ratio_interval(sums[peer.name].ttft, sums[one.name].ttft)


def _speed(of: _Sums, broken: bool) -> dict[str, float | None]:
    """All None where the output is broken. `prefill_tokens_per_second`: of the prompt, to the first token."""
    found = {
        "tokens_per_second": ratio(of.tokens.sum(), of.seconds.sum()),
        "tpot_s": ratio(of.seconds.sum(), of.tokens.sum()),
        "tokens_per_step": ratio(of.tokens.sum(), of.steps),
        "ttft_s": float(of.ttft.mean()),
        "prefill_tokens_per_second": ratio(of.prompt_tokens.sum(), of.ttft.sum()),
    }
    return {key: None if broken or value is None else float(value) for key, value in found.items()}


def _output(measured: Measured, one: Contender, prompts: Sequence[str]) -> dict[str, Any]:
    """`identical`: prompts on which the output is the plain decoder's, of ours; its own greedy one, of a peer."""
    if one.verdict is not None:
        left = {prompt: d for prompt, d in measured.left[one.name].items() if prompt in prompts}
        found = [d.as_dict() for d in left.values()]
        verdict = one.verdict(left, len(prompts))
        same = len(prompts) - len(left)
        return {
            "verdict": verdict,
            "as": "the plain decoder",
            "identical": same,
            "prompts": len(prompts),
            "left": found,
        }
    identical = None
    if one.same_as is not None:
        identical = len(prompts) - differing(measured.turns[one.name], measured.turns[one.same_as], prompts)
    return {"verdict": None, "as": one.same_as, "identical": identical, "prompts": len(prompts), "left": []}


def _outside(one: Contender, measured: Measured, of: _Sums, prompts: Sequence[str]) -> Interval:
    """The share of decoding's time that is not the model's arithmetic."""
    turns = [measured.turns[one.name][prompt] for prompt in prompts]
    arithmetic = np.array([sum(turn.arithmetic_s or 0.0 for turn in each) for each in turns])
    return ratio_interval(of.seconds - arithmetic, of.seconds)


def _bare(one: Contender, measured: Measured, of: _Sums) -> float | None:
    """As many forwards of one row as plain decoding emitted tokens, by those timed beside it, ÷ its time."""
    single = measured.forwards[one.forward][1]
    return ratio(float(np.median(single)) * float(of.tokens.sum()), float(of.seconds.sum())) if single else None


def _share(bytes_read: float, bandwidth: float, of: _Sums) -> Interval:
    """What a step reads ÷ its seconds, of the read bandwidth."""
    return ratio_interval(of.tokens * bytes_read / bandwidth, of.seconds)
