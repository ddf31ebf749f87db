"""What a CPU must show: one line for each, from whatever contenders there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ..statistics import Interval, ratio_interval
from .race import Contender, Forward, Kind
from .resident import Resident

LARGE = 2**30  # bytes that a step reads, from which on it is bound by reading them
_BROAD = 8  # rows of a forward that verifies a draft

Sign = Literal["≥", "≤"]
Ratio = Callable[[Contender, Contender], Interval]


@dataclass(frozen=True, slots=True)
class Bar:
    """`ours` against `theirs` (None: against a limit); `stretch`: what comes after the rest."""

    what: str
    ours: str
    theirs: str | None
    value: Interval
    sign: Sign
    bound: float
    unit: Literal["×", "%"] = "×"
    stretch: bool = False

    @property
    def met(self) -> bool | None:
        """By the value itself, wherever its interval reaches; None without one."""
        if self.value.value is None:
            return None
        return self.value.value >= self.bound if self.sign == "≥" else self.value.value <= self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Facts:
    """Of contenders whose output is sound. `tpot`: seconds a token; `faster`, `sooner`: how many times, per token and
    to the first one; `seconds[forward][k]`: of a forward of k rows, each time; `share`: of the read bandwidth,
    `outside`: of plain decoding's time outside the model's arithmetic; `large`: whether a step is reading weights."""

    contenders: Sequence[Contender]
    tpot: Mapping[str, float]
    faster: Ratio
    sooner: Ratio
    forwards: Sequence[Forward]
    seconds: Mapping[str, Mapping[int, Sequence[float]]]
    share: Mapping[str, Interval]
    outside: Mapping[str, Interval]
    large: bool

    def ours(self, kind: Kind, low_bit: bool) -> Contender | None:
        return self._fastest(o for o in self.contenders if (o.whose, o.kind, o.low_bit) == ("ours", kind, low_bit))

    def theirs(self, whose: str, *kinds: Kind) -> Contender | None:
        return self._fastest(o for o in self.contenders if o.whose == whose and o.kind in kinds)

    def _fastest(self, of: Iterator[Contender]) -> Contender | None:
        return min(of, key=lambda one: self.tpot[one.name], default=None)


def bars(facts: Facts) -> list[Bar]:
    """Those that something was measured for."""
    return [*_decoding(facts), *_forwards(facts), *_plain(facts)]


def memory_bar(name: str, one: Resident) -> Bar:
    value = Interval((one.peak - one.before) / (one.weights + one.kv), None, None, 1)
    return Bar("resident ÷ weights and KV", name, None, value, "≤", 1.25)


def _decoding(facts: Facts) -> Iterator[Bar]:
    plain, low = facts.ours("plain", False), facts.ours("plain", True)
    hf, llama = facts.theirs("transformers", "plain"), facts.theirs("llama.cpp", "plain")
    if plain and hf and not facts.large:
        yield Bar("plain decoding", plain.name, hf.name, facts.faster(plain, hf), "≥", 3.0)
    assisted = facts.theirs("transformers", "draft")
    for low_bit in (False, True):
        if (draft := facts.ours("draft", low_bit)) and assisted:
            bound = 1.5 if not low_bit else 1.0
            yield Bar("a draft model", draft.name, assisted.name, facts.faster(draft, assisted), "≥", bound)
    lookup = facts.ours("lookup", True) or facts.ours("lookup", False)
    for peer in (facts.theirs("transformers", "lookup"), facts.theirs("llama.cpp", "plain", "lookup")):
        if lookup and peer:
            yield Bar("prompt lookup", lookup.name, peer.name, facts.faster(lookup, peer), "≥", 1.0)
    for one in filter(None, (plain, low)):
        if peers := list(filter(None, (hf, llama))):
            sooner = min(peers, key=lambda peer: facts.sooner(one, peer).value or 0.0)
            yield Bar("prefill", one.name, sooner.name, facts.sooner(one, sooner), "≥", 1.0)
    if low and llama:
        yield Bar("plain decoding", low.name, llama.name, facts.faster(low, llama), "≥", 1.0, stretch=True)


def _forwards(facts: Facts) -> Iterator[Bar]:
    """Of several of ours, the one that verifies fastest."""
    what = f"{_BROAD} rows in one forward"
    known = [one for one in facts.forwards if facts.seconds[one.name].get(_BROAD)]

    def took(one: Forward) -> float:
        return float(np.median(facts.seconds[one.name][_BROAD]))

    peers = [one for one in known if one.whose != "ours"]
    hf = [one for one in peers if one.whose == "transformers"]
    for low_bit, against, bound in ((False, hf, 1.5), (True, peers, 2.2)):
        mine = min((o for o in known if o.whose == "ours" and o.low_bit == low_bit), key=took, default=None)
        other = min(against, key=took, default=None)
        if mine and other:
            value = _ratio(facts.seconds[other.name][_BROAD], facts.seconds[mine.name][_BROAD])
            yield Bar(what, mine.name, other.name, value, "≥", bound)
        if mine and low_bit:
            value = _ratio(facts.seconds[mine.name][_BROAD], facts.seconds[mine.name][1])
            yield Bar(f"T({_BROAD}) ÷ T(1)", mine.name, None, value, "≤", 1.6)


def _ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Of what was timed side by side."""
    n = min(len(numerator), len(denominator))
    return ratio_interval(np.array(numerator[:n]), np.array(denominator[:n]))


def _plain(facts: Facts) -> Iterator[Bar]:
    plain = facts.ours("plain", False)
    if plain is None:
        return
    if facts.large and (share := facts.share.get(plain.name)) is not None:
        yield Bar("of the read bandwidth", plain.name, None, share, "≥", 0.75, "%")
    yield Bar("outside the arithmetic", plain.name, None, facts.outside[plain.name], "≤", 0.05, "%")
