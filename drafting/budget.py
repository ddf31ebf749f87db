"""How many rows each member of a merge may draft: learnt while it runs, from what was kept and what a step costs.

The gain of a step is the tokens it is expected to emit, its price T(rows) as measured plus what the members' drafting
takes; the allocation with the most tokens a second is chosen, with rows for nobody among the choices. (The survival of
a position is the product of the estimated acceptances up to it, as in the adaptive verification of vLLM; members are
taken as independent.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from ..decoding.cost import Profile

FORGET = 0.95  # the weight of what was seen a step earlier
HOPE = 0.6  # acceptance of a drafter of which nothing is known: it is given a try
TRUST = 2.0  # observations that the hope, and the mean over positions, weigh
EACH = 3  # members of which every combination of shares is tried
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of a member's own rows


@dataclass(slots=True)
class Estimate:
    """What one member's drafts came to on one sequence. A position's acceptance is conditional: those before it kept.

    A position that was in reach and for which nothing was drafted is one that was not kept: a member that often finds
    nothing, or whose tree ends early, is worth no more than what it brought.
    Where a member was not asked, what is known of it fades towards the hope, so that it is asked again some time.
    """

    kept: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    asked: float = 0.0
    drafted: float = 0.0  # share of the rows allowed that it filled, summed
    seconds: float = 0.0

    def told(self, allowed: int, rows: int, depth: int, accepted: int, seconds: float) -> None:
        """One step: `rows` drafted of `allowed`, which reach `depth` deep; `accepted` were kept. It took `seconds`."""
        self._fade()
        if not allowed:
            return
        self.asked += 1
        self.drafted += rows / allowed
        self.seconds += seconds
        depth = max(depth, accepted)
        while len(self.tried) < depth:
            self.tried.append(0.0)
            self.kept.append(0.0)
        for position in range(min(depth, accepted + 1)):
            self.tried[position] += 1
            self.kept[position] += position < accepted

    def _fade(self) -> None:
        self.kept = [x * FORGET for x in self.kept]
        self.tried = [x * FORGET for x in self.tried]
        self.asked, self.drafted, self.seconds = (x * FORGET for x in (self.asked, self.drafted, self.seconds))

    def survival(self, depth: int) -> list[float]:
        """The chance that positions 1 … depth are kept, where it may draft so deep."""
        mean = (sum(self.kept) + TRUST * HOPE) / (sum(self.tried) + TRUST)
        out, alive = [], 1.0
        for i in range(depth):
            kept, tried = (self.kept[i], self.tried[i]) if i < len(self.tried) else (0.0, 0.0)
            alive *= (kept + TRUST * mean) / (tried + TRUST)
            out.append(alive)
        return out

    @property
    def fill(self) -> float:
        """The share of the rows that it is expected to use."""
        return (self.drafted + TRUST) / (self.asked + TRUST)

    @property
    def cost_s(self) -> float:
        """Seconds of one proposal."""
        return self.seconds / self.asked if self.asked else 0.0


def allocate(
    estimates: Sequence[Estimate],
    most: Sequence[int],
    deepest: Sequence[int],
    room: int,
    profile: Profile,
    batch: int = 1,
) -> list[int]:
    """Rows for each member. `most`, `deepest`: what it can use (rows, candidates on a path) in this step.

    Of up to three members all combinations of shares are tried. There are 5 to the power of the members of them, so of
    more members the shares are improved one by one, from nobody's and from each member alone, which may miss the best.
    """
    choices = [sorted({round(share * m) for share in SHARES}) for m in most]
    alive = [e.survival(d) for e, d in zip(estimates, deepest, strict=True)]

    def rate(rows: Sequence[int]) -> float:
        """Tokens a second."""
        used = sum(r * e.fill for r, e in zip(rows, estimates, strict=True))
        seconds = profile.at(batch * (1 + used)) + sum(e.cost_s for r, e in zip(rows, estimates, strict=True) if r)
        offered = [s[: reach(d, r, m)] for r, m, d, s in zip(rows, most, deepest, alive, strict=True) if r]
        tokens = 1.0
        for position in range(max(map(len, offered), default=0)):
            tokens += 1 - prod(1 - s[position] for s in offered if position < len(s))
        return tokens / seconds

    if len(most) <= EACH:
        return max((list(rows) for rows in product(*choices) if sum(rows) <= room), key=rate)
    alone = [[min(room, most[m]) if m == n else 0 for m in range(len(most))] for n in range(len(most))]
    return max((_climb(rows, choices, room, rate) for rows in ([0] * len(most), *alone)), key=rate)


def reach(depth: int, rows: int, most: int) -> int:
    """How deep a member may draft with `rows` of the `most` that it can use `depth` deep."""
    return max(1, round(depth * rows / most)) if rows and depth else 0


def _climb(
    rows: list[int], choices: Sequence[Sequence[int]], room: int, rate: Callable[[Sequence[int]], float]
) -> list[int]:
    """From `rows` on, the best choice of one member after the other, until none is better."""
    best, moved = rate(rows), True
    while moved:
        moved = False
        for m, of in enumerate(choices):
            for choice in of:
                other = [*rows[:m], choice, *rows[m + 1 :]]
                if sum(other) <= room and (found := rate(other)) > best:
                    rows, best, moved = other, found, True
    return rows
