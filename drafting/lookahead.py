"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): n-grams from Jacobi trajectories, verified as candidates.

A window of W columns and N − 1 levels runs beside the text. Level 0 guesses the next W tokens; the token of level l in
column j follows that of level l − 1, so a column with the target's choice behind it is an n-gram of N tokens that the
target itself produced, and goes to a pool under its first token. Candidates are what the pool holds for the last
emitted token. The window is a forest: column j of level 0 follows column j − 1, and the rows of level l those of l − 1.

Departures from the reference implementation: a full match yields N − 1 guesses and the target's own token behind them
(its loop stops one short); the pool is used from the first step, also while the window fills; equal beginnings of
candidates are one row; nothing of one prompt reaches the next unless `remember` asks for it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.noise import Noise, mix
from ..errors import UserError


@dataclass(slots=True)
class Pool:
    """For each token the `guesses` continuations of N − 1 tokens that were seen last."""

    guesses: int
    continuations: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, gram: Sequence[int]) -> None:
        known = self.continuations.setdefault(gram[0], OrderedDict())
        known[tuple(gram[1:])] = None
        known.move_to_end(tuple(gram[1:]))
        if len(known) > self.guesses:
            known.popitem(last=False)

    def after(self, token: int) -> Iterable[tuple[int, ...]]:
        """The latest first."""
        return reversed(self.continuations.get(token, {}))


@dataclass(slots=True)
class State:
    """`levels`: the window, oldest first; `columns`: how many of them the last draft verified; `candidates`: rows of
    the last draft before the window."""

    tokens: list[int]
    pool: Pool
    levels: list[list[int]]
    candidates: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Settings. `window` W, `ngram` N, `guesses` G, as in the paper: a step verifies at most (W + G)(N − 1) rows.

    `from_text`: n-grams of prompt and output enter the pool too. `remember`: the pool lives on from prompt to prompt.
    """

    window: int = 4
    ngram: int = 4
    guesses: int = 4
    from_text: bool = True
    remember: bool = False

    needs: ClassVar[Needs] = Needs(argmax=True)

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("guesses", 1)):
            if getattr(self, name) < least:
                raise UserError(f"drafting.{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def gives(self) -> Gives:
        depth = self.ngram - 1
        return Gives("forest", (self.window + self.guesses) * depth, depth)

    def check(self, target: Any) -> list[str]:
        return []

    def build(self, resources: Resources) -> "LookaheadDrafter":
        return LookaheadDrafter(self, Pool(self.guesses) if self.remember else None)


@dataclass(frozen=True, slots=True)
class LookaheadDrafter:
    """`memory`: the pool that all requests share, if they are to."""

    settings: Lookahead
    memory: Pool | None = None

    sources: ClassVar[tuple[str, ...]] = ("lookahead",)
    needs: ClassVar[Needs] = Lookahead.needs

    @property
    def gives(self) -> Gives:
        return self.settings.gives

    def forget(self) -> None:
        if self.memory is not None:
            self.memory.continuations.clear()

    def start(self, requests: Sequence[Opened]) -> list[State]:
        return [self._start(r) for r in requests]

    def _start(self, request: Opened) -> State:
        s = self.settings
        state = State([], Pool(s.guesses) if self.memory is None else self.memory, [])
        self._read(state, request.prompt)
        # level 0 begins as tokens of the prompt, drawn by a fixed hash; each step that fills a level drops a column
        width = s.window + s.ngram - 2
        state.levels = [[request.prompt[mix(j) % len(request.prompt)] for j in range(width)]]
        return state

    def _read(self, state: State, tokens: Sequence[int]) -> None:
        n = self.settings.ngram
        for token in tokens:
            state.tokens.append(token)
            if self.settings.from_text and len(state.tokens) >= n:
                state.pool.add(state.tokens[-n:])

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [self._propose(s, r) for s, r in zip(states, room, strict=True)]

    def _propose(self, s: State, room: Room) -> Draft:
        """Candidates first, then as many columns of the window as there is room for."""
        rows: dict[tuple[int, int], int] = {}  # (parent, token): row
        for guess in s.pool.after(s.tokens[-1]):
            parent = -1
            for token in guess[: room.depth]:
                if (parent, token) not in rows and len(rows) >= room.rows:
                    break
                parent = rows.setdefault((parent, token), len(rows))
        tokens, parents = [token for _, token in rows], [parent for parent, _ in rows]
        s.candidates = len(tokens)
        height = len(s.levels)
        s.columns = min(len(s.levels[0]), (room.rows - s.candidates) // height)
        for j in range(s.columns):
            for level in range(height):
                parents.append(len(tokens) - 1 if level else len(tokens) - height if j else -1)
                tokens.append(s.levels[level][j])
        window = len(tokens) - s.candidates
        return Draft(
            tokens=tuple(tokens),
            parents=tuple(parents),
            q_row=(-1,) * len(tokens),
            judged=(True,) * s.candidates + (False,) * window,
            source=(0,) * len(tokens),
        )

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            if s.columns and news.argmax is not None and not news.prefill:
                self._advance(s, news.argmax)
            s.candidates = s.columns = 0
            self._read(s, news.tokens[len(s.tokens) - news.position :])
        return list(states)

    def _advance(self, s: State, argmax: Sequence[int]) -> None:
        """The target's choices behind the columns become the next level; full columns go to the pool."""
        height = len(s.levels)
        said = [argmax[s.candidates + (j + 1) * height] for j in range(s.columns)]  # argmax[0] is the root's
        full = height == self.settings.ngram - 1
        if full:
            for j, token in enumerate(said):
                s.pool.add([*(level[j] for level in s.levels), token])
        if s.columns < len(s.levels[0]):  # there was no room for the rest: what they were guessed before stands
            said += s.levels[-1][s.columns :]
        if full:
            s.levels = [*s.levels[1:], said]
        else:
            s.levels = [level[1:] for level in (*s.levels, said)]

    def finish(self, state: State) -> None:
        pass
