"""Where keys and values lie, for the rows of a `Book`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..kernels.step import Pool
from ..kernels.verify_attention import padded_keys
from ..kernels.verify_attention.keys import Keys
from .book import Book, Part, Placement
from .layout import Layout
from .reads import Reads, ragged, reads
from .rows import Rows

_ALIGN = 64  # slots a sequence come in multiples of this


@runtime_checkable
class Cache(Protocol):
    """Rows [0, length) of a sequence are committed; rows behind them are staged and belong to a forest.

    `stage` is called once a forward and says where its rows go, `write` once a layer that owns its keys, `view` once a
    layer. Kernels that take the rows of many sequences at once read keys where they lie: `reads` tells them of parts
    that were staged last, `keys` of a layer. Several forwards may stage before a commit. `commit` keeps the listed
    staged rows of each sequence named, in order, and forgets every other staged row, those of the sequences not named
    included; `drop` keeps none. `length`: committed rows; `room`: rows that may still be staged; `staged`: rows staged
    since the last commit, over all sequences. `nbytes`: of the tensors that committed rows lie in; `formula_bytes`: the
    same by the layout's arithmetic.
    """

    layout: Layout

    def open(self) -> int: ...
    def stage(self, rows: Rows) -> Placement: ...
    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None: ...
    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]: ...
    def reads(self, parts: Sequence[Part]) -> Reads: ...
    def keys(self, layer: int, reads: Reads) -> Keys: ...
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
        self._book = Book(layout, self.capacity, self.device, sequences)
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

    def open(self) -> int:
        sequence, again = self._book.open()
        if again:
            for storage in self._storage:
                storage[:, :, sequence].zero_()
        return sequence

    def free(self, sequence: int) -> None:
        self._book.free(sequence)

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
        return self.capacity * self._storage[0].shape[2]

    @property
    def formula_bytes(self) -> int:
        return self.layout.bytes_per_token(self._storage[0].itemsize) * self.slots

    def stage(self, rows: Rows) -> Placement:
        return self._book.stage(rows, self._book.runs(rows))

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        stop = part.slot + part.stop - part.first
        self._k[layer][part.sequence, :, part.slot : stop] = k.transpose(0, 1)
        self._v[layer][part.sequence, :, part.slot : stop] = v.transpose(0, 1)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at: the owner's first `part.keys` slots."""
        owner = self.layout.layers[layer].owner
        return self._k[owner][part.sequence, :, : part.keys], self._v[owner][part.sequence, :, : part.keys]

    def reads(self, parts: Sequence[Part]) -> Reads:
        return reads(self._book, parts, [ragged([(part.sequence,) for part in parts], 1)], self.device)

    def keys(self, layer: int, reads: Reads) -> Keys:
        """A sequence is a block."""
        owner = self.layout.layers[layer].owner
        return Keys(self._k[owner].transpose(1, 2), self._v[owner].transpose(1, 2), tables=reads.tables[0])

    @cached_property
    def pools(self) -> Any:
        """A `Pool` a layer: of what it looks at."""
        owners = [layer.owner for layer in self.layout.layers]
        pools = [Pool(self._k[owner].data_ptr(), self._v[owner].data_ptr()) for owner in owners]
        return (Pool * len(owners))(*pools)

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        for sequence, kept in keep.items():
            source = self._book.places(sequence, kept)
            if source != list(range(len(source))):
                start = self._book.length(sequence)
                at = torch.tensor(source, device=self.device) + start
                for storage in self._storage:  # indexing copies before it writes, so overlaps are safe
                    storage[:, :, sequence, :, start : start + len(source)] = storage[:, :, sequence, :, at]
        self._book.commit(keep)

    def drop(self) -> None:
        self._book.drop()
