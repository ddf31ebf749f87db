"""A cache in pages: sequences hold blocks of one pool, and prompts that begin alike may hold the same ones."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .cache import Part, Placement, place
from .layout import Layout
from .pages import Pages
from .rows import Rows, segments

SPARE = 4  # times what is needed: so much a pool that shares keeps, where its size is not given


class PagedCache:
    """Every sequence has a table of blocks of `size` tokens; windows are masks over all of them, and save no memory.

    `blocks`: of the pool; None: as many as `reserve` asks for, and with `share` `SPARE` times as many. With `share`,
    full blocks of committed rows are found by later prompts that begin alike (`adopt`). A view is gathered, so that
    attention sees what it would see of a contiguous cache, bit for bit, wherever the blocks lie.
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
    ) -> None:
        for i, layer in enumerate(layout.layers):
            if layer.sink or layer.bits != 16:
                raise ValueError(f"layer {i} has sink={layer.sink} and bits={layer.bits}; a paged cache keeps neither")
        self.layout, self.device = layout, torch.device(device)
        self.pages = Pages(blocks or 0, size, share=share)
        self.capacity = 0  # positions that a sequence may reach
        self.peak = 0  # blocks used at most
        self._grows = blocks is None
        self._windows = {layer.window for layer in layout.layers}
        heads = {owner: layout.layers[owner].kv_heads for owner in layout.owners}
        self._kv = {  # [2, Hkv, slots, D]
            owner: torch.zeros(2, h, self.slots, layout.head_dim, dtype=dtype, device=device)
            for owner, h in heads.items()
        }
        self._staged_of: dict[int, list[int]] = {}  # numbers of a sequence's staged rows, in order
        self._tokens: list[int] = []  # of all staged rows
        self._parents: list[int] = []
        self._at: dict[int, Int[Tensor, " S"]] = {}  # the slots of a sequence's rows, as of its last forward

    def reserve(self, sequences: int, capacity: int) -> None:
        """Room for so many sequences of so many rows, where the size of the pool is not given."""
        self.capacity = max(self.capacity, capacity)
        needed = sequences * -(-capacity // self.pages.size) * (SPARE if self.pages.share else 1)
        if self._grows and needed > self.pages.total:
            self.pages.grow(needed)
            for owner, kv in self._kv.items():
                more = kv.new_zeros(2, kv.shape[1], self.slots - kv.shape[2], kv.shape[3])
                self._kv[owner] = torch.cat([kv, more], 2)

    def open(self) -> int:
        sequence = self.pages.open()
        self._staged_of[sequence] = []
        return sequence

    def adopt(self, sequence: int, prompt: Sequence[int]) -> int:
        """How many tokens of its prompt are committed to an empty sequence, because they are there already; the last
        one never is, since it is computed for its logits."""
        return self.pages.adopt(sequence, prompt)

    def fork(self, sequence: int) -> int:
        """Another sequence with the same committed rows; a block is copied once one of them writes to it."""
        child = self.pages.fork(sequence)
        self._staged_of[child] = []
        return child

    def free(self, sequence: int) -> None:
        self.pages.free(sequence)
        del self._staged_of[sequence]
        self._at.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """Committed rows."""
        return self.pages.length(sequence)

    def room(self, sequence: int) -> int:
        """Rows that may still be staged, whatever the other sequences take of what is left."""
        rows = self.pages.length(sequence) + self.pages.staged(sequence)
        return min(self.capacity - rows, self.pages.room(sequence))

    @property
    def staged(self) -> int:
        """Rows staged since the last commit, over all sequences."""
        return len(self._parents)

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in self._kv.values())

    @property
    def slots(self) -> int:
        """Tokens that fit, over all sequences: `nbytes` is the layout's bytes a token times this."""
        return self.pages.total * self.pages.size

    def stage(self, rows: Rows) -> Placement:
        if rows.first != self.staged:
            raise ValueError(f"rows are numbered from {rows.first}, but {self.staged} rows are staged")
        runs = segments(rows.sequence)
        for sequence, a, b in runs:  # all or nothing: check before anything is recorded
            rest = self.capacity - self.pages.length(sequence) - self.pages.staged(sequence)
            if b - a > rest:
                raise ValueError(
                    f"KV cache overflow: {b - a} rows for sequence {sequence}, which has room for {rest} of "
                    f"{self.capacity}; reserve prompt + max_new_tokens + the draft's rows"
                )
        copies = self.pages.stage({sequence: b - a for sequence, a, b in runs})
        if copies:
            self._move(*(self._slots_of([pair[i] for pair in copies]) for i in (0, 1)))
        self.peak = max(self.peak, self.pages.used)
        self._parents += rows.parents.tolist()
        self._tokens += rows.tokens.tolist()
        parts, positions = [], np.empty(len(rows), dtype=np.int64)
        for sequence, a, b in runs:
            mine = self._staged_of[sequence]
            mine += range(rows.first + a, rows.first + b)
            committed = self.pages.length(sequence)
            part, at = place(rows, sequence, a, b, committed, mine, self._parents, self._windows, self.device)
            slots = self._slots_of(self.pages.table(sequence))[: part.slot + b - a]
            # what is handed in for the sake of sums alone is blocked, and so may be any row that is written
            self._at[sequence] = torch.cat([slots, slots[:1].expand(part.keys - len(slots))])
            parts.append(part)
            positions[a:b] = at
        return Placement(torch.from_numpy(positions).to(self.device), tuple(parts))

    def write(self, layer: int, part: Part, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        """k and v of the part's own rows, keys already rotated to their positions."""
        at = self._at[part.sequence][part.slot : part.slot + part.stop - part.first]
        self._kv[layer][0, :, at] = k.transpose(0, 1)
        self._kv[layer][1, :, at] = v.transpose(0, 1)

    def view(self, layer: int, part: Part) -> tuple[Float[Tensor, "Hkv S D"], Float[Tensor, "Hkv S D"]]:
        """What the layer's rows look at: the owner's rows of the sequence, in order."""
        k, v = self._kv[self.layout.layers[layer].owner].index_select(2, self._at[part.sequence])
        return k, v

    def commit(self, keep: Mapping[int, Sequence[int]]) -> None:
        for sequence, kept in keep.items():
            local = {number: i for i, number in enumerate(self._staged_of[sequence])}
            source = [local[number] for number in kept]
            start = self.pages.length(sequence)
            if source != list(range(len(source))):
                at = self._at[sequence]
                self._move(at[torch.tensor(source, device=self.device) + start], at[start : start + len(source)])
            self.pages.commit(sequence, [self._tokens[number] for number in kept])
        self.drop()

    def drop(self) -> None:
        """Forget every staged row."""
        self.pages.drop()
        self._parents.clear()
        self._tokens.clear()
        for mine in self._staged_of.values():
            mine.clear()

    def _slots_of(self, blocks: Sequence[int]) -> Int[Tensor, " S"]:
        """Of the blocks' tokens. int64: a block's number times its bytes is past 2³¹ in a large pool."""
        first = torch.tensor(blocks, dtype=torch.int64) * self.pages.size
        return (first[:, None] + torch.arange(self.pages.size)).flatten().to(self.device)

    def _move(self, source: Int[Tensor, " N"], to: Int[Tensor, " N"]) -> None:
        for kv in self._kv.values():
            kv[:, :, to] = kv[:, :, source]  # indexing copies before it writes, so overlaps are safe
