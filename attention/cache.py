"""Where keys and values live: a committed prefix a sequence, and rows staged behind it until a commit keeps some.

What a row sees is defined here, once. A row at position i sees the keys of its sequence's committed prefix, of the
staged rows that it descends from, and its own: all of those where its layer has no window. With window W and sinks S it
sees those of them at positions i − W + 1 … i (so W of them, its own among them) and those at positions below S.
Positions are prefix + depth: in a tree depth decides, not the place in the forward. How many rows stand beside it, of
its own sequence or of others, is nothing to it. A row that would see no key gets zeros (`verify_attention`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..kernels.verify_attention import padded_keys
from .layout import Layout, Sight
from .rows import Rows, forest, segments

# More rows of a prompt than this attend without a mask of their own (`causal_attention`).
LONG_CHAIN = 64
_ALIGN = 64  # slots a sequence come in multiples of this


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in one forward: rows `first` to `stop` of it, written from slot `slot` on.

    `keys`: how many slots rows without a window look at; layers that keep a window alone have fewer to show.
    `blocked[W, S]` [rows, B]: what a row must not see of the last B of the slots that it looks at, for layers with
    window W (None: no window) and S sinks; no entry where every row sees everything. `causal`: a long chain.
    """

    sequence: int
    first: int
    stop: int
    slot: int
    keys: int
    causal: bool
    blocked: Mapping[Sight, Bool[Tensor, "rows B"]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one forward's rows go; `positions` [T] are prefix + depth, on the cache's device."""

    positions: Int[Tensor, " T"]
    parts: tuple[Part, ...]


@runtime_checkable
class Cache(Protocol):
    """Rows [0, length) of a sequence are committed; rows behind them are staged and belong to a forest.

    `stage` is called once a forward and says where its rows go, `write` once a layer that owns its keys, `view` once a
    layer. Several forwards may stage before a commit. `commit` keeps the listed staged rows of each sequence named, in
    order, and forgets every other staged row, those of the sequences not named included. `nbytes`: of the tensors that
    committed rows lie in; `formula_bytes`: the same by the layout's arithmetic.
    """

    layout: Layout

    def open(self) -> int: ...
    def stage(self, rows: Rows) -> Placement: ...
    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None: ...
    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]: ...
    def commit(self, keep: Mapping[int, Sequence[int]]) -> None: ...
    def drop(self) -> None: ...
    def free(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def room(self, sequence: int) -> int: ...
    @property
    def staged(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def formula_bytes(self) -> int: ...


def rounded(capacity: int) -> int:
    """Slots of a sequence that has `capacity` rows: whole steps, and as many as a view hands in for its last row."""
    return padded_keys(-(-capacity // _ALIGN) * _ALIGN)


def place(
    rows: Rows,
    sequence: int,
    a: int,
    b: int,
    committed: int,
    mine: Sequence[int],
    parents: Sequence[int],
    sights: Iterable[Sight],
    device: torch.device,
    shown: Callable[[Sight], np.ndarray] | None = None,
) -> tuple[Part, np.ndarray]:
    """(rows [a, b) of `sequence` behind its `committed` ones in order of position, their positions).

    `mine`: numbers of its staged rows, these among them; `parents`: of all staged rows; `sights`: that layers have;
    `shown`: the positions of the committed rows that such layers look at, in order, −1 where there is none (default:
    all). Staged rows stand behind those.
    """
    count = b - a
    earlier = len(mine) - count
    slot = committed + earlier
    if rows.prompt and not earlier and count > LONG_CHAIN:
        return Part(sequence, a, b, slot, slot + count, True, {}), np.arange(slot, slot + count)
    keys = padded_keys(slot + count)
    if earlier or not rows.chain:
        local = {-1: -1} | {number: i for i, number in enumerate(mine)}
        shape = tuple(local[parents[number]] for number in mine)
    else:
        shape = tuple(range(-1, count - 1))
    depth, sees = forest(shape)
    depth_of = np.array(depth)
    at = committed + depth_of[earlier:]
    blocked: dict[Sight, Tensor] = {}
    for window, sink in sights:
        if window is None:
            if count == 1 and not earlier and keys == slot + count:
                continue
            hidden = np.ones((count, keys - committed), dtype=bool)
            hidden[:, : earlier + count] = ~sees[earlier:]
        else:
            before = np.arange(committed) if shown is None else shown((window, sink))
            hidden = np.ones((count, padded_keys(len(before) + earlier + count)), dtype=bool)
            at_of = np.concatenate([before, committed + depth_of])
            seen = (at_of > at[:, None] - window) | (at_of < sink)
            seen[:, : len(before)] &= before >= 0
            seen[:, len(before) :] &= sees[earlier:]
            hidden[:, : seen.shape[1]] = ~seen
        blocked[window, sink] = torch.from_numpy(hidden).to(device)
    return Part(sequence, a, b, slot, keys, False, blocked), at


class DenseCache:
    """Every sequence has `capacity` slots of its own, allocated at once and zeroed; windows and sinks are masks.

    Slots are zeroed, not empty, because blocked slots are still multiplied (by weight zero, which a NaN survives).
    """

    def __init__(
        self, layout: Layout, *, sequences: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        for i, layer in enumerate(layout.layers):
            if layer.bits != 16:
                raise ValueError(f"layer {i} has bits={layer.bits}, and a dense cache keeps rows as they are computed")
        self.layout = layout
        self.capacity = rounded(capacity)
        self.device = torch.device(device)
        self._sights = dict.fromkeys(layer.sight for layer in layout.layers)
        # layers with the same number of heads share one tensor [2, layers, sequences, Hkv, S, D]: a commit is one copy
        by_heads: dict[int, list[int]] = {}
        for owner in layout.owners:
            by_heads.setdefault(layout.layers[owner].kv_heads, []).append(owner)
        self._storage = [
            torch.zeros(2, len(owners), sequences, heads, self.capacity, layout.head_dim, dtype=dtype, device=device)
            for heads, owners in by_heads.items()
        ]
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        for storage, owners in zip(self._storage, by_heads.values(), strict=True):
            for i, owner in enumerate(owners):
                self._k[owner], self._v[owner] = storage[0, i], storage[1, i]
        self._free = list(range(sequences))[::-1]
        self._stale: set[int] = set()  # free, and holding what another request left
        self._length: dict[int, int] = {}
        self._staged_of: dict[int, list[int]] = {}  # numbers of a sequence's staged rows, in slot order
        self._parents: list[int] = []  # of all staged rows

    def open(self) -> int:
        if not self._free:
            raise ValueError(f"all {len(self._length)} sequences of the cache are in use; free one first")
        sequence = self._free.pop()
        if sequence in self._stale:
            self._stale.remove(sequence)
            for storage in self._storage:
                storage[:, :, sequence].zero_()
        self._length[sequence], self._staged_of[sequence] = 0, []
        return sequence

    def free(self, sequence: int) -> None:
        if self._staged_of[sequence]:
            raise ValueError(f"sequence {sequence} has staged rows; commit or drop them before it is freed")
        del self._length[sequence], self._staged_of[sequence]
        self._free.append(sequence)
        self._stale.add(sequence)

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

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._storage)

    @property
    def slots(self) -> int:
        """Tokens that fit, over all sequences: `nbytes` is the layout's bytes a token times this."""
        return self.capacity * self._storage[0].shape[2]

    @property
    def formula_bytes(self) -> int:
        return self.layout.bytes_per_token(self._storage[0].itemsize) * self.slots

    def stage(self, rows: Rows) -> Placement:
        if rows.first != self.staged:
            raise ValueError(f"rows are numbered from {rows.first}, but {self.staged} rows are staged")
        runs = segments(rows.sequence)
        for sequence, a, b in runs:  # all or nothing: check before anything is recorded
            if b - a > self.room(sequence):
                raise ValueError(
                    f"KV cache overflow: {b - a} rows for sequence {sequence}, which has room for "
                    f"{self.room(sequence)} of {self.capacity}; open it with prompt + max_new_tokens + the draft's rows"
                )
        self._parents += rows.parents.tolist()
        parts, positions = [], np.empty(len(rows), dtype=np.int64)
        for sequence, a, b in runs:
            mine = self._staged_of[sequence]
            mine += range(rows.first + a, rows.first + b)
            part, at = place(
                rows, sequence, a, b, self._length[sequence], mine, self._parents, self._sights, self.device
            )
            parts.append(part)
            positions[a:b] = at
        return Placement(torch.from_numpy(positions).to(self.device), tuple(parts))

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        stop = part.slot + part.stop - part.first
        self._k[layer][part.sequence, :, part.slot : stop] = k.transpose(0, 1)
        self._v[layer][part.sequence, :, part.slot : stop] = v.transpose(0, 1)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at: the owner's first `part.keys` slots."""
        owner = self.layout.layers[layer].owner
        return self._k[owner][part.sequence, :, : part.keys], self._v[owner][part.sequence, :, : part.keys]

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        for sequence, kept in keep.items():
            local = {number: i for i, number in enumerate(self._staged_of[sequence])}
            source = [local[number] for number in kept]
            start = self._length[sequence]
            if source != list(range(len(source))):
                at = torch.tensor(source, device=self.device) + start
                for storage in self._storage:  # indexing copies before it writes, so overlaps are safe
                    storage[:, :, sequence, :, start : start + len(source)] = storage[:, :, sequence, :, at]
            self._length[sequence] = start + len(source)
        self.drop()

    def drop(self) -> None:
        """Forget every staged row."""
        self._parents.clear()
        for mine in self._staged_of.values():
            mine.clear()
