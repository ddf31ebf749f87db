"""A cache in pages: sequences hold blocks of one pool, and prompts that begin alike may hold the same ones."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..kernels.dispatch import Kernels
from ..kernels.step import Lies, Place, Pool
from ..kernels.verify_attention.keys import Keys
from .book import Book, Part, Placement
from .kept import KeptRows
from .layout import Layout
from .moves import Moves
from .pages import Pages
from .reads import Reads, Told, ragged, told
from .rows import Rows

SPARE = 4  # times what is needed: so much a pool that shares keeps, where its size is not given


class PagedCache:
    """Every sequence has a table of blocks of `size` tokens; windows and sinks are masks over all of them, and save no
    memory.

    `blocks`: of the pool; None: as many as `reserve` asks for, and with `share` `SPARE` times as many. With `share`,
    full blocks of committed rows are found by later prompts that begin alike (`adopt`). A view is gathered, so that
    attention sees what it would see of a contiguous cache, bit for bit, wherever the blocks lie. `kernels`: that kept
    rows move by, where they run.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        size: int,
        blocks: int | None = None,
        share: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> None:
        self.layout, self.device, self._dtype = layout, torch.device(device), dtype
        self.pages = Pages(blocks or 0, size, share=share)
        self.peak = 0  # blocks used at most
        self._grows = blocks is None
        self._book = Book(layout, 0, self.device)
        each = {owner: layout.layers[owner] for owner in layout.owners}
        self._kept = {
            owner: KeptRows(self.slots, layer.kv_heads, layout.head_dim, layer.bits, dtype, self.device)
            for owner, layer in each.items()
        }
        self._move = Moves(tuple(self._kept.values()), self.device, kernels.run_on(self.device, dtype))
        self._tokens: list[int] = []  # of all staged rows
        self._at: dict[int, Int[Tensor, " S"]] = {}  # the slots of a sequence's rows, as of the last forward

    @property
    def capacity(self) -> int:
        """Rows that a sequence may have."""
        return self._book.capacity

    def reserve(self, sequences: int, capacity: int) -> None:
        """Room for so many sequences of so many rows, where the size of the pool is not given."""
        self._book.capacity = max(self.capacity, capacity)
        self.pages.enough = sequences * -(-self.capacity // self.pages.size)
        needed = sequences * -(-capacity // self.pages.size) * (SPARE if self.pages.share else 1)
        if self._grows and needed > self.pages.total:
            self.pages.grow(needed)
            for kept in self._kept.values():
                kept.resize(self.slots)
            self.__dict__.pop("_pools", None)  # which lie elsewhere now

    def open(self) -> int:
        sequence, _ = self._book.open()
        self.pages.open(sequence)
        return sequence

    def adopt(self, sequence: int, prompt: Sequence[int]) -> int:
        """How many tokens of its prompt are committed to an empty sequence, because they are there already; the last
        one never is, since it is computed for its logits."""
        found = self.pages.adopt(sequence, prompt)
        self._book.extend(sequence, found)
        return found

    def fork(self, sequence: int) -> int:
        """Another sequence with the same committed rows; a block is copied once one of them writes to it."""
        child = self._book.fork(sequence)
        self.pages.fork(sequence, child)
        return child

    def free(self, sequence: int) -> None:
        self._book.free(sequence)
        self.pages.free(sequence)
        self._at.pop(sequence, None)

    def length(self, sequence: int) -> int:
        return self._book.length(sequence)

    def room(self, sequence: int) -> int:
        """Rows that may still be staged, whatever the other sequences take of what is left."""
        return min(self._book.room(sequence), self.pages.room(sequence))

    @property
    def staged(self) -> int:
        return self._book.staged

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def slots(self) -> int:
        """Tokens that fit, over all sequences: `nbytes` is the layout's bytes a token times this."""
        return self.pages.total * self.pages.size

    @property
    def formula_bytes(self) -> int:
        return self._token_bytes * self.slots

    @cached_property
    def _token_bytes(self) -> int:
        return self.layout.bytes_per_token(self._dtype.itemsize)

    def stage(self, rows: Rows) -> Placement:
        runs = self._book.runs(rows)
        copies = self.pages.stage({sequence: b - a for sequence, a, b in runs})
        if copies:
            self._move(*(self._slots_of([pair[i] for pair in copies]).tolist() for i in (0, 1)))
        self.peak = max(self.peak, self.pages.used)
        self._tokens += rows.tokens.tolist()
        self._at.clear()
        return self._book.stage(rows, runs)

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        self._kept[layer].put(self._slots(part)[part.slot : part.slot + part.stop - part.first], k, v)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at: the owner's rows of the sequence, in order."""
        return self._kept[self.layout.layers[layer].owner].get(self._slots(part))

    def _slots(self, part: Part) -> Int[Tensor, " S"]:
        """Of the rows that the part looks at."""
        if (at := self._at.get(part.sequence)) is None:
            slots = self._slots_of(self.pages.table(part.sequence))[: part.slot + part.stop - part.first]
            # what is handed in for the sake of sums alone is blocked, and so may be any row that is written
            at = torch.cat([slots, slots[:1].expand(part.keys - len(slots))]).to(self.device)
            self._at[part.sequence] = at
        return at

    @property
    def lies(self) -> tuple[Hashable, ...]:
        where = ((part.data_ptr(), part.dtype, part.shape) for kept in self._kept.values() for part in kept.parts)
        return (self.pages.size, *where)

    def told(self, parts: Sequence[Part]) -> Told:
        tables = [self.pages.table(part.sequence) for part in parts]
        return told(self._book, parts, [ragged(tables, -(-self.capacity // self.pages.size))])

    def keys(self, layer: int, reads: Reads) -> Keys:
        return self._kept[self.layout.layers[layer].owner].keys(self.pages.size, reads.tables[0])

    def lying(self, parts: Sequence[Part]) -> Lies:
        tables = [np.array(self.pages.table(part.sequence), dtype=np.int32) for part in parts]
        places = (Place(0, 0, table.ctypes.data, None, self.pages.size) for table in tables)
        return Lies(self._pools, (Place * len(parts))(*places), tables)

    @cached_property
    def _pools(self) -> Any:
        pools = [self._kept[layer.owner].pool(0) for layer in self.layout.layers]
        return (Pool * len(pools))(*pools)

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        source, to = list[int](), list[int]()
        for sequence, kept in keep.items():
            places = self._book.places(sequence, kept)
            if places != list(range(len(places))):
                table, start, size = self.pages.table(sequence), self.length(sequence), self.pages.size
                for slots, rows in ((source, places), (to, range(len(places)))):
                    slots += [table[i // size] * size + i % size for i in (start + row for row in rows)]
        self._move(source, to)
        for sequence, kept in keep.items():
            self.pages.commit(sequence, [self._tokens[number] for number in kept])
        self._book.commit(keep)
        self._forget()

    def drop(self) -> None:
        self._book.drop()
        self._forget()

    def _forget(self) -> None:
        self.pages.drop()
        self._tokens.clear()

    def _slots_of(self, blocks: Sequence[int]) -> Int[Tensor, " S"]:
        """Of the blocks' tokens, on the host. int64: a block's number times its bytes is past 2³¹ in a large pool."""
        first = torch.tensor(blocks, dtype=torch.int64) * self.pages.size
        return (first[:, None] + torch.arange(self.pages.size)).flatten()
