"""Which rows there are: of each sequence a committed prefix, and rows staged behind it until a commit keeps some.

What a row sees is defined here, once. A row at position i sees the keys of its sequence's committed prefix, of the
staged rows that it descends from, and its own: all of those where its layer has no window. With window W and sinks S it
sees those of them at positions i − W + 1 … i (so W of them, its own among them) and those at positions below S.
Positions are prefix + depth: in a tree depth decides, not the place in the forward. How many rows stand beside it, of
its own sequence or of others, is nothing to it. A row that would see no key gets zeros (`verify_attention`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..kernels.verify_attention import padded_keys
from .layout import Layout, Sight
from .rows import Rows, forest, segments

# More rows of a prompt than this attend without a mask of their own (`causal_attention`).
LONG_CHAIN = 64

_NOTHING = np.zeros((0, 0), dtype=bool)

Run = tuple[int, int, int]  # (sequence, first row, row after the last) of a forward
Shown = Callable[[Sight, int], np.ndarray]


class Masks(Mapping[Sight, Tensor]):
    """By a layer's sight, each made when it is asked for: what takes the rows of all sequences at once needs none."""

    def __init__(self, sights: Collection[Sight], make: Callable[[Sight], Bool[Tensor, "rows B"]]) -> None:
        self._make = make
        self._made: dict[Sight, Tensor | None] = dict.fromkeys(sights)

    def __getitem__(self, sight: Sight) -> Bool[Tensor, "rows B"]:
        if (mask := self._made[sight]) is None:
            self._made[sight] = mask = self._make(sight)
        return mask

    def __iter__(self) -> Iterator[Sight]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in one forward: rows `first` to `stop` of it, written from slot `slot` on.

    `committed`: rows of the sequence before them, of which all see all; `sees` [staged, staged]: which of its staged
    rows, these among them, see which (nothing where `causal`). `keys`: how many slots rows without a window look at;
    layers that keep a window alone have fewer to show.
    `blocked[W, S]` [rows, B]: what a row must not see of the last B of the slots that it looks at, for layers with
    window W (None: no window) and S sinks; no entry where every row sees everything. `causal`: a long chain.
    """

    sequence: int
    first: int
    stop: int
    slot: int
    keys: int
    causal: bool
    committed: int
    sees: Bool[np.ndarray, "staged staged"]
    blocked: Mapping[Sight, Tensor]


@dataclass(frozen=True)
class Placement:
    """Where one forward's rows go. `host_positions`: prefix + depth. `prompt`: as of its `Rows`."""

    host_positions: Int[np.ndarray, " T"]
    parts: tuple[Part, ...]
    device: torch.device
    prompt: bool

    @cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """On the cache's device, once they are asked for."""
        return torch.from_numpy(self.host_positions).to(self.device)


class Book:
    """The sequences of a cache with their committed and staged rows; where those lie is the cache's affair.

    `capacity`: rows that a sequence may have. `sequences`: as many may be open at once (None: any number).
    """

    def __init__(self, layout: Layout, capacity: int, device: torch.device, sequences: int | None = None) -> None:
        self.capacity = capacity
        self.sights = dict.fromkeys(layer.sight for layer in layout.layers)
        self._device, self._most = device, sequences
        self._given, self._freed = 0, list[int]()
        self._length: dict[int, int] = {}
        self._staged_of: dict[int, list[int]] = {}  # numbers of a sequence's staged rows, in order
        self._parents: list[int] = []  # of all staged rows

    def open(self) -> tuple[int, bool]:
        """(an empty sequence, whether its number was another's before)."""
        if again := bool(self._freed):
            sequence = self._freed.pop()
        elif self._given == self._most:
            raise ValueError(f"all {self._most} sequences of the cache are in use; free one first")
        else:
            sequence, self._given = self._given, self._given + 1
        self._length[sequence], self._staged_of[sequence] = 0, []
        return sequence, again

    def fork(self, sequence: int) -> int:
        """Another sequence with as many committed rows."""
        self._settled(sequence, "forked")
        child, _ = self.open()
        self._length[child] = self._length[sequence]
        return child

    def free(self, sequence: int) -> None:
        self._settled(sequence, "freed")
        del self._length[sequence], self._staged_of[sequence]
        self._freed.append(sequence)

    def extend(self, sequence: int, rows: int) -> None:
        """So many more rows are committed, which were never staged."""
        self._length[sequence] += rows

    def _settled(self, sequence: int, what: str) -> None:
        if self._staged_of[sequence]:
            raise ValueError(f"sequence {sequence} has staged rows; commit or drop them before it is {what}")

    @property
    def idle(self) -> bool:
        """No sequence is open."""
        return not self._length

    def length(self, sequence: int) -> int:
        """Committed rows."""
        return self._length[sequence]

    def room(self, sequence: int) -> int:
        """Rows that may still be staged."""
        return self.capacity - self._length[sequence] - len(self._staged_of[sequence])

    @property
    def staged(self) -> int:
        """Rows staged since the last commit, over all sequences."""
        return len(self._parents)

    def staged_of(self, sequence: int) -> Sequence[int]:
        """Their numbers, in order."""
        return self._staged_of[sequence]

    def shape(self, sequence: int) -> tuple[int, ...]:
        """The parents of the sequence's staged rows, all counted from its first one."""
        mine = self._staged_of[sequence]
        local = {-1: -1} | {number: i for i, number in enumerate(mine)}
        return tuple(local[self._parents[number]] for number in mine)

    def runs(self, rows: Rows) -> list[Run]:
        """The rows of each sequence, or an error where they cannot all be staged."""
        if rows.first != self.staged:
            raise ValueError(f"rows are numbered from {rows.first}, but {self.staged} rows are staged")
        runs = segments(rows.sequence)
        for sequence, a, b in runs:
            if b - a > self.room(sequence):
                raise ValueError(
                    f"KV cache overflow: {b - a} rows for sequence {sequence}, which has room for "
                    f"{self.room(sequence)} of {self.capacity}; open it with prompt + max_new_tokens + the draft's rows"
                )
        return runs

    def stage(self, rows: Rows, runs: Sequence[Run], shown: Shown | None = None) -> Placement:
        """Of rows that have passed `runs`. `shown` (sight, committed rows): the positions of the committed rows that
        layers look at, in order, −1 where there is none (default: all)."""
        self._parents += rows.parents.tolist()
        parts, positions = [], np.empty(len(rows), dtype=np.int64)
        for run in runs:
            sequence, a, b = run
            self._staged_of[sequence] += range(rows.first + a, rows.first + b)
            part, positions[a:b] = self._place(rows, run, shown)
            parts.append(part)
        return Placement(positions, tuple(parts), self._device, rows.prompt)

    def _place(self, rows: Rows, run: Run, shown: Shown | None) -> tuple[Part, np.ndarray]:
        """(the part of one sequence, whose rows are in the book already, their positions). Staged rows stand behind the
        committed ones, and those in order of position."""
        sequence, a, b = run
        committed, mine = self._length[sequence], self._staged_of[sequence]
        count = b - a
        earlier = len(mine) - count
        slot = committed + earlier
        if rows.prompt and not earlier and count > LONG_CHAIN:
            long = Part(sequence, a, b, slot, slot + count, True, committed, _NOTHING, {})
            return long, np.arange(slot, slot + count)
        keys = padded_keys(slot + count)
        shape = self.shape(sequence) if earlier or not rows.chain else tuple(range(-1, count - 1))
        depth, sees = forest(shape)
        alone = count == 1 and not earlier and keys == slot + count  # which sees all that there is
        sights = [sight for sight in self.sights if sight[0] is not None or not alone]
        masks = Masks(sights, partial(self._hidden, committed, shape, count, shown))
        return Part(sequence, a, b, slot, keys, False, committed, sees, masks), committed + np.array(depth[earlier:])

    def _hidden(
        self, committed: int, shape: tuple[int, ...], count: int, shown: Shown | None, sight: Sight
    ) -> Bool[Tensor, "rows B"]:
        """What the last `count` of the staged rows must not see (`Part.blocked`)."""
        depth, sees = forest(shape)
        earlier, window = len(shape) - count, sight[0]
        if window is None:
            hidden = np.ones((count, padded_keys(committed + len(shape)) - committed), dtype=bool)
            hidden[:, : len(shape)] = ~sees[earlier:]
        else:
            before = np.arange(committed) if shown is None else shown(sight, committed)
            hidden = np.ones((count, padded_keys(len(before) + len(shape))), dtype=bool)
            at_of = np.concatenate([before, committed + np.array(depth)])
            seen = (at_of > at_of[len(before) + earlier :, None] - window) | (at_of < sight[1])
            seen[:, : len(before)] &= before >= 0
            seen[:, len(before) :] &= sees[earlier:]
            hidden[:, : seen.shape[1]] = ~seen
        return torch.from_numpy(hidden).to(self._device)

    def places(self, sequence: int, kept: Sequence[int]) -> list[int]:
        """Which of the sequence's staged rows these are, counted from its first one."""
        local = {number: i for i, number in enumerate(self._staged_of[sequence])}
        return [local[number] for number in kept]

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        for sequence, kept in keep.items():
            self._length[sequence] += len(kept)
        self.drop()

    def drop(self) -> None:
        """Forget every staged row."""
        self._parents.clear()
        for mine in self._staged_of.values():
            mine.clear()
