"""Several drafters at once: their drafts side by side in one deduplicated forest, or tried in order."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from ..decoding.cost import Profile, measure_target
from ..decoding.draft import (
    EMPTY,
    Draft,
    Drafter,
    DrafterSettings,
    Gives,
    Needs,
    Opened,
    Remembers,
    Resources,
    Room,
    Seen,
)
from ..decoding.noise import Noise
from ..errors import UserError
from .budget import Estimate, allocate, reach

Order = Literal["together", "first"]
Budget = int | Literal["auto"] | None
CONTEXT = 256  # committed tokens behind which T(k) is measured


@dataclass(frozen=True, slots=True)
class Merge:
    """Settings. `order`: together, or first: the first member that drafts anything has the step to itself.

    `budget`: the most rows a step drafts in all (null: all that the members may; members of one merge share it in the
    order given, each getting what those before it may not use). `auto`: each step's rows, and who drafts them, follow
    from online estimates of acceptance and T(k) measured when the drafter is built; nobody drafts where it cannot pay.
    What is merged is one-hot: exact whatever the members look at, and a q that a member draws from is not used.
    """

    members: tuple[DrafterSettings, ...]
    order: Order = "together"
    budget: Budget = None

    def __post_init__(self) -> None:
        if not self.members:
            raise UserError("drafting.members is empty: name drafters, such as drafting.members=[prompt_lookup,suffix]")
        if self.order not in ("together", "first"):
            raise UserError(f"drafting.order must be together or first, got {self.order!r}")
        if isinstance(self.budget, str) and self.budget != "auto":
            raise UserError(f"drafting.budget must be a number of rows, auto or null, got {self.budget!r}")
        if self.budget == "auto" and self.order == "first":
            raise UserError(
                "drafting.budget=auto shares a step among members, and order=first gives it to one: leave one out"
            )
        if isinstance(self.budget, int) and self.budget < 1:
            raise UserError(f"drafting.budget must be at least 1 row, got {self.budget}; drafting=none drafts nothing")

    @property
    def needs(self) -> Needs:
        needs = _needs([m.needs for m in self.members])
        return replace(needs, costs=needs.costs or self.budget == "auto")

    @property
    def gives(self) -> Gives:
        return _gives([m.gives for m in self.members], self.order, self.budget)

    def check(self, target: Any) -> list[str]:
        return [warning for member in self.members for warning in member.check(target)]

    def build(self, resources: Resources) -> "Merged":
        members = tuple(m.build(resources) for m in self.members)
        profile = None
        if self.budget == "auto":
            context = min(CONTEXT, resources.target.config.max_positions // 2)
            profile = measure_target(resources.target, context=context, repeats=3)
        return Merged(members, self.order, self.budget, profile)


@dataclass(slots=True)
class State:
    """`rows[m]`: for each row of member m's draft, the row of the merged draft that stands for it."""

    states: list[Any]
    estimates: list[Estimate]
    rows: list[list[int]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Merged:
    """The members with their weights."""

    members: tuple[Drafter[Any], ...]
    order: Order = "together"
    budget: Budget = None
    profile: Profile | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        names: list[str] = []
        for name in (name for m in self.members for name in m.sources):
            name = name.partition("#")[0]  # a merge of merges numbers them anew
            count = sum(n.partition("#")[0] == name for n in names)
            names.append(f"{name}#{count + 1}" if count else name)
        return tuple(names)

    @property
    def needs(self) -> Needs:
        return _needs([m.needs for m in self.members])

    @property
    def gives(self) -> Gives:
        return _gives([m.gives for m in self.members], self.order, self.budget)

    def forget(self) -> None:
        for member in self.members:
            if isinstance(member, Remembers):
                member.forget()

    def start(self, requests: Sequence[Opened]) -> list[State]:
        started = [m.start(requests) for m in self.members]
        return [State(list(states), [Estimate() for _ in self.members]) for states in zip(*started, strict=True)]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        shares = [self._shares(s, r, len(states)) for s, r in zip(states, room, strict=True)]
        for s, r, share in zip(states, room, shares, strict=True):
            s.drafts = [EMPTY] * len(self.members)
            s.allowed = [r.rows for r in share]
            s.reach = [
                reach(mine.depth, mine.rows, min(m.gives.rows, r.rows))
                for m, mine in zip(self.members, share, strict=True)
            ]
            s.seconds = [0.0] * len(self.members)
        for m, member in enumerate(self.members):
            if self.order == "first":  # rows that are no candidates settle nothing: a member has what they leave
                for s, share, r in zip(states, shares, room, strict=True):
                    left = 0 if self._settled(s, m) else r.rows - sum(map(len, s.drafts))
                    share[m] = replace(share[m], rows=min(share[m].rows, left))
            asked = [i for i, share in enumerate(shares) if share[m].rows]
            for i, s in enumerate(states):
                if i not in asked:
                    s.allowed[m] = 0
            if not asked:
                continue
            begin = time.perf_counter()
            drafts = member.propose(
                [states[i].states[m] for i in asked], [shares[i][m] for i in asked], [noise[i] for i in asked]
            )
            spent = (time.perf_counter() - begin) / len(asked)
            for i, draft in zip(asked, drafts, strict=True):
                states[i].drafts[m], states[i].seconds[m] = draft, spent
        starts = list(accumulate((len(m.sources) for m in self.members), initial=0))
        merged = []
        for s in states:
            draft, s.rows = merge(s.drafts, starts)
            merged.append(draft)
        return merged

    def _settled(self, s: State, m: int) -> bool:
        """Whether a member before has the step to itself."""
        return any(any(draft.judged) for draft in s.drafts[:m])

    def _shares(self, s: State, room: Room, batch: int) -> list[Room]:
        most = [min(m.gives.rows, room.rows) for m in self.members]
        depth = [min(m.gives.depth, room.depth) for m in self.members]
        if self.profile is not None:
            rows = allocate(s.estimates, most, depth, room.rows, self.profile, batch)
            return [Room(d, r) for d, r in zip(depth, rows, strict=True)]
        left, shares = room.rows, []
        for m, d in zip(most, depth, strict=True):
            shares.append(Room(d, min(m, left)))
            left -= 0 if self.order == "first" else shares[-1].rows
        return shares

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            if not s.rows:
                s.rows, s.drafts = [[] for _ in self.members], [EMPTY] * len(self.members)
            if not news.prefill and s.allowed:
                for m, estimate in enumerate(s.estimates):
                    draft = s.drafts[m]
                    kept = len(_own_path(draft, s.rows[m], news.own_path))
                    estimate.told(s.allowed[m], len(draft), s.reach[m], kept, s.seconds[m])
        for m, member in enumerate(self.members):
            told = [_view(news, s.drafts[m], s.rows[m], member.needs) for s, news in zip(states, seen, strict=True)]
            for s, state in zip(states, member.observe([s.states[m] for s in states], told), strict=True):
                s.states[m] = state
        for s in states:
            s.rows, s.drafts, s.allowed = [], [], []
        return list(states)

    def finish(self, state: State) -> None:
        for member, own in zip(self.members, state.states, strict=True):
            member.finish(own)


def merge(drafts: Sequence[Draft], starts: Sequence[int] | None = None) -> tuple[Draft, list[list[int]]]:
    """(one forest in which equal rows are one, for each draft the rows of it that stand for its own).

    Rows are equal if they have one token behind one row. `starts[m]`: added to the sources of draft m.
    """
    starts = range(len(drafts)) if starts is None else starts
    number: dict[tuple[int, int], int] = {}
    judged: list[bool] = []
    sources: list[list[int]] = []
    rows: list[list[int]] = []
    for draft, start in zip(drafts, starts, strict=False):
        mine: list[int] = []
        for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            row = number.setdefault((mine[parent] if parent >= 0 else -1, token), len(number))
            if row == len(judged):
                judged.append(False)
                sources.append([])
            candidate = draft.judged[i]
            source = start + draft.source[i]
            if candidate and not judged[row]:  # a window's row that is a candidate of another's is credited to that
                judged[row] = True
                sources[row] = [source]
            elif (candidate or not judged[row]) and source not in sources[row]:
                sources[row].append(source)
            mine.append(row)
        rows.append(mine)
    forest = Draft(
        tokens=tuple(token for _, token in number),
        parents=tuple(parent for parent, _ in number),
        q_row=(-1,) * len(number),
        judged=tuple(judged),
        source=tuple(s[0] for s in sources),
        also=tuple(tuple(s[1:]) for s in sources),
    )
    return forest, rows


def _own_path(draft: Draft, rows: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
    """The rows of a member's own draft that were kept, root to leaf."""
    own = {row: i for i, row in enumerate(rows) if draft.judged[i]}
    return tuple(own[row] for row in path if row in own)


def _view(seen: Seen, draft: Draft, rows: Sequence[int], needs: Needs) -> Seen:
    """What a member is told: of its own rows, in its own order."""
    at = [0, *(1 + row for row in rows)]

    def taps(values: Mapping[Any, Tensor] | None, index: Sequence[int] | None) -> dict[Any, Tensor] | None:
        if values is None or not needs.taps:
            return None
        return {tap: h if index is None else h[torch.tensor(index)] for tap, h in values.items() if tap in needs.taps}

    within = None if seen.prefill else at
    return replace(
        seen,
        own_path=_own_path(draft, rows, seen.own_path),
        argmax=tuple(seen.argmax[i] for i in at) if needs.argmax and seen.argmax is not None else None,
        choices=tuple(seen.choices[i] for i in at) if needs.choices and seen.choices is not None else None,
        topk=tuple(seen.topk[i][: needs.topk] for i in at) if needs.topk and seen.topk is not None else None,
        hidden=taps(seen.hidden, within),
        committed=taps(seen.committed, None) if needs.prefill_hidden or not seen.prefill else None,
    )


def _needs(each: Sequence[Needs]) -> Needs:
    return Needs(
        taps=tuple(dict.fromkeys(tap for n in each for tap in n.taps)),
        prefill_hidden=any(n.prefill_hidden for n in each),
        argmax=any(n.argmax for n in each),
        choices=any(n.choices for n in each),
        topk=max(n.topk for n in each),
        target_cache=any(n.target_cache for n in each),
        second_model=any(n.second_model for n in each),
        documents=any(n.documents for n in each),
        costs=any(n.costs for n in each),
    )


def _gives(each: Sequence[Gives], order: str, budget: int | str | None) -> Gives:
    """Alone, or one at a time, chains stay chains."""
    rows = max(g.rows for g in each) if order == "first" else sum(g.rows for g in each)
    if isinstance(budget, int):
        rows = min(rows, budget)
    one = len(each) == 1 or order == "first"
    shapes = {g.shape for g in each if g.rows}
    shape: Any = shapes.pop() if one and len(shapes) == 1 else "forest"
    return Gives(shape, rows, max(g.depth for g in each))
