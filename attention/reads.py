"""What one call for the rows of many sequences is told of a cache: where slots lie, and which of them a row sees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Integer
from torch import Tensor

from ..kernels.verify_attention.keys import Keys, Looks
from .book import Book, Part
from .kept import quantise
from .rows import forest

_ALIGN = 4  # of 32 bits: kernels are compiled anew for pointers that are not multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Reads:
    """Of the rows of some sequences in one forward, on the device; `tables`: the blocks of each in the pools of its
    cache, of which there may be several kinds. A row is of sequence `of`, and number `own` of its keys is its own."""

    looks: Looks
    tables: tuple[Int32[Tensor, "N _"], ...]
    of: Int32[Tensor, " T"]
    own: Int32[Tensor, " T"]

    def at(self, keys: Keys) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
        """(block, slot in it) of the rows' own keys."""
        assert keys.tables is not None
        of, slot = self.of.long(), self.own.long()
        if keys.ring is not None:
            slot = slot - self.looks.prefix[of] + keys.ring
        size = keys.k.shape[1]
        return keys.tables[of, slot // size].long(), slot % size


@dataclass(frozen=True, slots=True)
class Told:
    """The same on the host, where `Looks` says what is what."""

    starts: Int[np.ndarray, " N1"]
    prefix: Int[np.ndarray, " N"]
    staged: Int[np.ndarray, " N"]
    positions: Int[np.ndarray, " T"]
    key_positions: Int[np.ndarray, "N W"]
    blocked: Bool[np.ndarray, "T W"]
    of: Int[np.ndarray, " T"]
    own: Int[np.ndarray, " T"]
    tables: tuple[Integer[np.ndarray, "N _"], ...]
    max_keys: int

    @property
    def max_rows(self) -> int:
        return int(np.diff(self.starts).max())

    def padded(self, rows: int, sequences: int, width: int) -> "Told":
        """To so many rows, sequences and slots of staged keys. The last row is there again: the same is written to the
        same place, and no other row sees more for it. Further sequences have no rows; nobody sees further slots."""
        T, N, W = len(self.of), len(self.prefix), self.blocked.shape[1]
        assert 0 < T <= rows
        assert sequences >= N
        assert width >= W
        starts = np.full(sequences + 1, rows)
        starts[:N] = self.starts[:N]
        again, others = (0, rows - T), (0, sequences - N)
        blocked = np.pad(self.blocked, ((0, 0), (0, width - W)), constant_values=True)
        return Told(
            starts,
            np.pad(self.prefix, others),
            np.pad(self.staged, others),
            np.pad(self.positions, again, "edge"),
            np.pad(self.key_positions, (others, (0, width - W))),
            np.pad(blocked, (again, (0, 0)), "edge"),
            np.pad(self.of, again, "edge"),
            np.pad(self.own, again, "edge"),
            tuple(np.pad(table, (others, (0, 0))) for table in self.tables),
            self.max_keys,
        )

    def arrays(self) -> list[np.ndarray]:
        """What `reads` wants to have on the device, of 32 bits."""
        words = np.zeros(-(-self.blocked.size // 4), dtype=np.int32)
        words.view(np.uint8)[: self.blocked.size] = self.blocked.reshape(-1)
        numbers = (self.starts, self.prefix, self.staged, self.positions, self.key_positions, self.of, self.own)
        return [*numbers, words, *self.tables]

    def reads(self, there: Sequence[Int32[Tensor, "..."]], max_rows: int) -> Reads:
        """Of tensors that hold these `arrays`, or others of their shapes. `max_rows`: a bound of a sequence's."""
        starts, prefix, staged, positions, key_positions, of, own, words, *tables = there
        blocked = words.view(torch.bool)[: self.blocked.size].view(self.blocked.shape)
        looks = Looks(starts, prefix, staged, positions, key_positions, blocked, max_rows, self.max_keys)
        return Reads(looks, tuple(tables), of, own)

    def on(self, device: torch.device) -> Reads:
        arrays = self.arrays()
        whole = torch.from_numpy(packed(arrays)).to(device)
        return self.reads(unpacked(whole, [array.shape for array in arrays]), self.max_rows)


def write(
    keys: Keys,
    at: tuple[Int[Tensor, " T"], Int[Tensor, " T"]],
    k: Float[Tensor, "T Hkv D"],
    v: Float[Tensor, "T Hkv D"],
) -> None:
    """Rows of any sequences to their places."""
    if keys.k_scale is None or keys.v_scale is None:
        keys.k[at], keys.v[at] = k, v
    else:
        bits = 4 if keys.k.dtype == torch.uint8 else 8
        keys.k[at], keys.k_scale[at] = quantise(k, bits)
        keys.v[at], keys.v_scale[at] = quantise(v, bits)


def told(book: Book, parts: Sequence[Part], tables: Sequence[Integer[np.ndarray, "N _"]]) -> Told:
    """Of parts that were staged last."""
    shapes = [book.shape(part.sequence) for part in parts]
    counts = [part.stop - part.first for part in parts]
    staged = np.array([len(shape) for shape in shapes])
    N, T, W = len(parts), sum(counts), int(staged.max())
    starts = np.concatenate([[0], np.cumsum(counts)])
    prefix = np.array([book.length(part.sequence) for part in parts])
    positions, own = np.zeros(T, dtype=np.int64), np.zeros(T, dtype=np.int64)
    at, blocked = np.zeros((N, W), dtype=np.int64), np.ones((T, W), dtype=bool)
    for s, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        depth, sees = forest(shape)
        mine = slice(starts[s], starts[s + 1])
        at[s, : len(shape)] = prefix[s] + np.array(depth)
        positions[mine] = at[s, len(shape) - count : len(shape)]
        blocked[mine, : len(shape)] = ~sees[len(shape) - count :]
        own[mine] = prefix[s] + np.arange(len(shape) - count, len(shape))
    of = np.repeat(np.arange(N), counts)
    return Told(starts, prefix, staged, positions, at, blocked, of, own, tuple(tables), book.capacity)


def ragged(tables: Sequence[Sequence[int] | Integer[np.ndarray, " _"]], width: int) -> Integer[np.ndarray, "N M"]:
    """One above the other, filled up to `width` with zeros."""
    whole = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(whole, tables, strict=True):
        row[: len(table)] = table
    return whole


def packed(arrays: Sequence[np.ndarray]) -> Int32[np.ndarray, " n"]:
    """One behind the other, so that a device gets one copy of all."""
    begins, whole = _begins([array.shape for array in arrays])
    flat = np.zeros(whole, dtype=np.int32)
    for array, begin in zip(arrays, begins, strict=True):
        flat[begin : begin + array.size] = array.reshape(-1)
    return flat


def unpacked(flat: Int32[Tensor, " n"], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    begins, _ = _begins(shapes)
    return [flat[b : b + math.prod(shape)].view(shape) for b, shape in zip(begins, shapes, strict=True)]


def _begins(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """(where each begins, where the last ends)."""
    *begins, whole = accumulate((-(-math.prod(shape) // _ALIGN) * _ALIGN for shape in shapes), initial=0)
    return begins, whole
