"""A cache in which every layer keeps what it will see again, in the bits of its entry."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..kernels.dispatch import Kernels
from ..kernels.step import Lies, Place, Pool
from ..kernels.verify_attention import BLOCK, padded_keys
from ..kernels.verify_attention.keys import Keys
from .book import Book, Part, Placement
from .cache import rounded
from .kept import KeptRows
from .layout import LayerKV, Layout, Sight
from .moves import Moves
from .reads import Reads, Told, ragged, told
from .rows import Rows

_STAGING = 64  # rows: staging grows in steps of it, and shrinks to it once a prompt is committed


@dataclass(frozen=True, slots=True)
class _Look:
    """Of one sequence in one forward: the slots that its rows look at, and those that they are written to."""

    at: Int[Tensor, " S"] | slice
    own: Int[Tensor, " T"] | slice


class LayeredCache:
    """For layouts with windows, sinks or low bits; `dtype`: of what is computed, which 16 bits stand for.

    `capacity`, the rows that a sequence may have, is rounded up as a DenseCache's. A layer that may see all of them has
    so many slots a sequence, and rows are staged behind the committed ones. A layer with W + S slots (window, sinks)
    fewer than that has just those: the first S rows and a ring of the last W. All sequences stage in slots behind them,
    one a staged row: as many as were staged at once, in steps of 64, and no longer as many as a prompt took. So
    `nbytes` is `Layout.sequence_bytes(capacity)` a sequence, and `staging_bytes` comes on top.

    A view of a ring has its keys in order of position and begins where a block of the CPU's sums does, after a block of
    sinks: as in a DenseCache, a row's sums are the same wherever the committed rows end. `kernels`: as there.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        sequences: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> None:
        self.layout, self.capacity, self.device = layout, rounded(capacity), torch.device(device)
        self._dtype, self.sequences = dtype, sequences
        self._book = Book(layout, self.capacity, self.device, sequences)
        self._kept = {
            owner: KeptRows(
                sequences * one.held(self.capacity), one.kv_heads, layout.head_dim, one.bits, dtype, self.device
            )
            for owner, one in self._owners
        }
        self._rings = [sight for sight in self._book.sights if self._is_ring(sight)]
        self._staging, self._prompted = 0, False  # rows that there is room for; whether long chains are among them
        self._looks: dict[tuple[int, Sight], _Look] = {}  # as of the last forward
        self._launched = launched = kernels.run_on(self.device, dtype)
        self._moves_of = {
            sight: Moves([self._kept[o] for o, one in self._owners if one.sight == sight], self.device, launched)
            for sight in self._book.sights
        }

    @property
    def _owners(self) -> list[tuple[int, LayerKV]]:
        return [(owner, self.layout.layers[owner]) for owner in self.layout.owners]

    def open(self) -> int:
        sequence, again = self._book.open()
        if again:
            for owner, one in self._owners:
                held = one.held(self.capacity)
                self._kept[owner].clear(slice(sequence * held, (sequence + 1) * held))
        return sequence

    def free(self, sequence: int) -> None:
        self._book.free(sequence)

    @property
    def idle(self) -> bool:
        return self._book.idle

    def length(self, sequence: int) -> int:
        return self._book.length(sequence)

    def room(self, sequence: int) -> int:
        return self._book.room(sequence)

    @property
    def staged(self) -> int:
        return self._book.staged

    @property
    def nbytes(self) -> int:
        return sum(self._kept[owner].slot_bytes * self._committed(one.sight) for owner, one in self._owners)

    @property
    def staging_bytes(self) -> int:
        """What staged rows take on top, where they do not lie behind the committed ones."""
        return sum(kept.nbytes for kept in self._kept.values()) - self.nbytes

    @cached_property
    def formula_bytes(self) -> int:
        return self.sequences * self.layout.sequence_bytes(self.capacity, self._dtype.itemsize)

    def stage(self, rows: Rows) -> Placement:
        placement = self._book.stage(rows, self._book.runs(rows), self._filled)
        if self.staged > self._staging:
            self._resize(-(-self.staged // _STAGING) * _STAGING)
        self._looks.clear()
        self._prompted |= any(part.causal for part in placement.parts)
        return placement

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        self._kept[layer].put(self._look(self.layout.layers[layer].sight, part).own, k, v)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at, as its owner keeps it."""
        one = self.layout.layers[layer]
        return self._kept[one.owner].get(self._look(one.sight, part).at)

    @property
    def lies(self) -> tuple[Hashable, ...]:
        return tuple((part.data_ptr(), part.dtype, part.shape) for kept in self._kept.values() for part in kept.parts)

    def told(self, parts: Sequence[Part]) -> Told:
        tables = [ragged([(part.sequence,) for part in parts], 1)]
        staged = [np.array(self._book.staged_of(part.sequence)) for part in parts]
        for sight in self._rings:
            rings = [self._slots(sight, part.sequence, np.arange(self._held(sight))) for part in parts]
            slots = zip(rings, (self._committed(sight) + numbers for numbers in staged), strict=True)
            tables.append(ragged([np.concatenate(both) for both in slots], self._held(sight) + self._staging))
        return told(self._book, parts, tables)

    def keys(self, layer: int, reads: Reads) -> Keys:
        """A sequence is a block, or, of a ring, which stages elsewhere, a slot is."""
        one = self.layout.layers[layer]
        if one.sight not in self._rings:
            return self._kept[one.owner].keys(self.capacity, reads.tables[0])
        return self._kept[one.owner].keys(1, reads.tables[1 + self._rings.index(one.sight)], self._held(one.sight))

    def lying(self, parts: Sequence[Part]) -> Lies:
        """Of layers that may see all rows, and of those with a ring, sight by sight."""
        places = [Place(part.sequence * self.capacity) for part in parts]
        numbers = []
        for sight in self._rings:
            window, sink = sight
            for part in parts:
                numbers.append(np.array(self._book.staged_of(part.sequence), dtype=np.int32))
                base, staging = part.sequence * self._held(sight), self._committed(sight)
                places.append(Place(base, staging, None, numbers[-1].ctypes.data, 0, window, sink))
        return Lies(self._pools, (Place * len(places))(*places), numbers)

    @cached_property
    def _pools(self) -> Any:
        kinds: list[Sight | None] = [None, *self._rings]
        pools = [
            self._kept[layer.owner].pool(kinds.index(layer.sight) if layer.sight in self._rings else 0)
            for layer in self.layout.layers
        ]
        return (Pool * len(pools))(*pools)

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        for sight in self._book.sights:
            moves = [self._moves(sight, sequence, kept) for sequence, kept in keep.items()]
            source, to = (list(chain(*(move[i] for move in moves))) for i in (0, 1))
            if source != to:
                self._moves_of[sight](source, to)
        self._book.commit(keep)
        self._shrink()

    def drop(self) -> None:
        self._book.drop()
        self._shrink()

    def _shrink(self) -> None:
        if self._prompted and not self._launched:  # where it is recorded where rows lie, they stay
            self._resize(_STAGING)
            self._prompted = False

    def _held(self, sight: Sight) -> int:
        """Slots of a sequence."""
        window, sink = sight
        return self.capacity if window is None else min(self.capacity, window + sink)

    def _committed(self, sight: Sight) -> int:
        """Slots of all sequences: those behind them are for staged rows."""
        return self.sequences * self._held(sight)

    def _is_ring(self, sight: Sight) -> bool:
        return self._held(sight) < self.capacity

    def _resize(self, staging: int) -> None:
        for owner, one in self._owners:
            if self._is_ring(one.sight):
                self._kept[owner].resize(self._committed(one.sight) + staging)
        self._staging = staging
        self.__dict__.pop("_pools", None)  # which lie elsewhere now

    def _slots(self, sight: Sight, sequence: int, positions: np.ndarray) -> np.ndarray:
        """Where a sequence's committed rows lie; for a position of −1, where one of its own does."""
        window, sink = sight
        if self._is_ring(sight):
            assert window is not None
            positions = np.where(positions < sink, positions.clip(0), sink + (positions - sink) % window)
        return sequence * self._held(sight) + positions

    def _filled(self, sight: Sight, committed: int) -> np.ndarray:
        return self._shown(sight, committed, whole_blocks=True)

    def _shown(self, sight: Sight, committed: int, whole_blocks: bool) -> np.ndarray:
        """The positions of the committed rows that a view begins with; −1: none, `whole_blocks` are filled with it."""
        window, sink = sight
        if not self._is_ring(sight):
            return np.arange(committed)
        assert window is not None
        first = np.arange(min(sink, committed))
        since = min(max(sink, committed - window + 1), committed)  # the last row but W − 1 is seen by nobody
        last = np.arange(since, committed)
        if not whole_blocks:
            return np.concatenate([first, last])
        gaps = -(-sink // BLOCK) * BLOCK - len(first), since % BLOCK
        return np.concatenate([first, np.full(sum(gaps), -1), last])

    def _look(self, sight: Sight, part: Part) -> _Look:
        if (look := self._looks.get((part.sequence, sight))) is None:
            self._looks[part.sequence, sight] = look = self._looked(sight, part)
        return look

    def _looked(self, sight: Sight, part: Part) -> _Look:
        count = part.stop - part.first
        if not self._is_ring(sight):
            start = part.sequence * self.capacity
            return _Look(slice(start, start + part.keys), slice(start + part.slot, start + part.slot + count))
        mine = self._book.staged_of(part.sequence)
        before = self._shown(sight, self.length(part.sequence), whole_blocks=not part.causal)
        at = [*self._slots(sight, part.sequence, before).tolist(), *(self._committed(sight) + n for n in mine)]
        if not part.causal:  # what is blocked is multiplied by 0, which a NaN survives: any row of its own will do
            at += [at[-1]] * (padded_keys(len(at)) - len(at))
        found = self._tensor(at)
        end = len(before) + len(mine)
        return _Look(found, found[end - count : end])

    def _moves(self, sight: Sight, sequence: int, kept: Sequence[int]) -> tuple[list[int], list[int]]:
        """(slots of the kept rows that the layers will see again, where those go)."""
        start, window, sink = self.length(sequence), *sight
        positions = np.arange(start, start + len(kept))
        if self._is_ring(sight):
            assert window is not None
            source = self._committed(sight) + np.array(kept, dtype=np.int64)
            lasting = (positions < sink) | (positions >= start + len(kept) - window)
            source, positions = source[lasting], positions[lasting]
        else:
            places = np.array(self._book.places(sequence, kept), dtype=np.int64)
            source = self._slots(sight, sequence, start + places)
        return source.tolist(), self._slots(sight, sequence, positions).tolist()

    def _tensor(self, slots: Sequence[int]) -> Int[Tensor, " n"]:
        return torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)
