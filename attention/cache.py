"""Where keys and values lie, for the rows of a `Book`."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..kernels.commit import Owners, commit, owners
from ..kernels.dispatch import Kernels
from ..kernels.step import Lies, Place, Pool
from ..kernels.verify_attention import padded_keys
from ..kernels.verify_attention.keys import Keys
from .book import Book, Part, Placement
from .layout import Layout
from .moves import MOST, on_device
from .reads import Reads, Told, ragged, told
from .rows import Rows

_ALIGN = 64  # slots a sequence come in multiples of this


@runtime_checkable
class Cache(Protocol):
    """Rows [0, length) of a sequence are committed; rows behind them are staged and belong to a forest.

    `stage` is called once a forward and says where its rows go, `write` once a layer that owns its keys, `view` once a
    layer. Kernels that take the rows of many sequences at once read keys where they lie: `told` tells them of parts
    that were staged last, `keys` of a layer; `lies` differs once keys lie elsewhere; `lying` tells those in C++.
    Several forwards may stage before a commit. `commit` keeps the listed staged rows of each sequence named, in order,
    and forgets every other staged row, those of the sequences not named included; `drop` keeps none. `length`:
    committed rows; `room`: rows that may still be staged; `staged`: rows staged since the last commit, over all
    sequences. `nbytes`: of the tensors that committed rows lie in; `formula_bytes`: the same by the layout's
    arithmetic.
    """

    layout: Layout

    def open(self) -> int: ...
    def stage(self, rows: Rows) -> Placement: ...
    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None: ...
    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]: ...
    def told(self, parts: Sequence[Part]) -> Told: ...
    def keys(self, layer: int, reads: Reads) -> Keys: ...
    def lying(self, parts: Sequence[Part]) -> Lies: ...
    def commit(self, keep: Mapping[int, Sequence[int]]) -> None: ...
    def drop(self) -> None: ...
    def free(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def room(self, sequence: int) -> int: ...
    @property
    def lies(self) -> tuple[Hashable, ...]: ...
    @property
    def staged(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def formula_bytes(self) -> int: ...


def rounded(capacity: int) -> int:
    """Slots of a sequence that has `capacity` rows: whole steps, and as many as a view hands in for its last row."""
    return padded_keys(-(-capacity // _ALIGN) * _ALIGN)


class DenseCache:
    """Every sequence has `capacity` slots of its own, allocated at once and zeroed; windows and sinks are masks.

    Slots are zeroed, not empty, because blocked slots are still multiplied (by weight zero, which a NaN survives).
    `kernels`: that kept rows move by, where they run.
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
        for i, layer in enumerate(layout.layers):
            if layer.bits != 16:
                raise ValueError(f"layer {i} has bits={layer.bits}, and a dense cache keeps rows as they are computed")
        self.layout, self.sequences = layout, sequences
        self.capacity = rounded(capacity)
        self.device = torch.device(device)
        self._book = Book(layout, self.capacity, self.device, sequences)
        # layers with the same number of heads share one tensor [2, layers, Hkv, sequences, S, D]: a commit is one copy
        by_heads: dict[int, list[int]] = {}
        for owner in layout.owners:
            by_heads.setdefault(layout.layers[owner].kv_heads, []).append(owner)
        self._storage = [
            torch.zeros(2, len(owners), heads, sequences, self.capacity, layout.head_dim, dtype=dtype, device=device)
            for heads, owners in by_heads.items()
        ]
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        for storage, those in zip(self._storage, by_heads.values(), strict=True):
            for i, owner in enumerate(those):
                self._k[owner], self._v[owner] = storage[0, i], storage[1, i]
        self._launched = kernels.run_on(self.device, dtype)

    @cached_property
    def _owners(self) -> Owners:
        return owners([x.permute(1, 2, 0, 3) for kept in (self._k, self._v) for x in kept.values()])

    def open(self) -> int:
        sequence, again = self._book.open()
        if again:
            for storage in self._storage:
                storage[:, :, :, sequence].zero_()
        return sequence

    def free(self, sequence: int) -> None:
        self._book.free(sequence)

    @property
    def idle(self) -> bool:
        """No sequence is open, so that it may be another request's."""
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
        return sum(storage.nbytes for storage in self._storage)

    @property
    def slots(self) -> int:
        """Tokens that fit, over all sequences: `nbytes` is the layout's bytes a token times this."""
        return self.capacity * self._storage[0].shape[3]

    @cached_property
    def formula_bytes(self) -> int:
        return self.layout.bytes_per_token(self._storage[0].itemsize) * self.slots

    def stage(self, rows: Rows) -> Placement:
        return self._book.stage(rows, self._book.runs(rows))

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        stop = part.slot + part.stop - part.first
        self._k[layer][:, part.sequence, part.slot : stop] = k.transpose(0, 1)
        self._v[layer][:, part.sequence, part.slot : stop] = v.transpose(0, 1)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at: the owner's first `part.keys` slots."""
        owner = self.layout.layers[layer].owner
        return self._k[owner][:, part.sequence, : part.keys], self._v[owner][:, part.sequence, : part.keys]

    @property
    def lies(self) -> tuple[Hashable, ...]:
        return tuple((storage.data_ptr(), storage.dtype, storage.shape) for storage in self._storage)

    def told(self, parts: Sequence[Part]) -> Told:
        return told(self._book, parts, [ragged([(part.sequence,) for part in parts], 1)])

    def keys(self, layer: int, reads: Reads) -> Keys:
        """A sequence is a block."""
        owner = self.layout.layers[layer].owner
        return Keys(self._k[owner].permute(1, 2, 0, 3), self._v[owner].permute(1, 2, 0, 3), tables=reads.tables[0])

    @cached_property
    def _pools(self) -> Any:
        pools = [(self._k[layer.owner], self._v[layer.owner]) for layer in self.layout.layers]
        return (Pool * len(pools))(
            *(Pool(k.data_ptr(), v.data_ptr(), None, None, k[0, :, :, 0].numel(), 16, 0) for k, v in pools)
        )

    def lying(self, parts: Sequence[Part]) -> Lies:
        return Lies(self._pools, (Place * len(parts))(*(Place(part.sequence * self.capacity) for part in parts)))

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        moving = {sequence: self._book.places(sequence, kept) for sequence, kept in keep.items()}
        self._move({sequence: source for sequence, source in moving.items() if source != list(range(len(source)))})
        self._book.commit(keep)

    def _move(self, moving: Mapping[int, Sequence[int]]) -> None:
        """Staged rows of sequences, in order, to behind their committed ones."""
        most = max(map(len, moving.values()), default=0)
        if most and self._launched and most <= MOST:
            width = 1 << (most - 1).bit_length()  # the kernel has a variant for each
            prefix, count = np.array([*map(self.length, moving)]), np.array([*map(len, moving.values())])
            arrays = (prefix, ragged([*moving.values()], width), count, ragged([(s,) for s in moving], 1))
            commit(self._owners, *on_device(arrays, self.device))
            return
        for sequence, source in moving.items():
            start = self.length(sequence)
            at = torch.tensor(source, device=self.device) + start
            for storage in self._storage:  # indexing copies before it writes, so overlaps are safe
                storage[:, :, :, sequence, start : start + len(source)] = storage[:, :, :, sequence, at]

    def drop(self) -> None:
        self._book.drop()
