"""What one call for the rows of many sequences is told of a cache: where slots lie, and which of them a row sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Integer
from torch import Tensor

from ..kernels.verify_attention.keys import Keys, Looks
from .book import Book, Part
from .kept import quantise
from .rows import forest

_ALIGN = 4  # of 32 bits: kernels are compiled anew for pointers that are not multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Reads:
    """Of the rows of some sequences in one forward; `tables`: the blocks of each sequence in the pools of its cache, of
    which there may be several kinds. A row is of sequence `of`, and number `own` of its keys is its own."""

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


def reads(
    book: Book, parts: Sequence[Part], tables: Sequence[Integer[np.ndarray, "N _"]], device: torch.device
) -> Reads:
    """Of parts that were staged last. The device gets one copy."""
    shapes = [book.shape(part.sequence) for part in parts]
    counts = [part.stop - part.first for part in parts]
    staged = np.array([len(shape) for shape in shapes])
    N, T, W = len(parts), sum(counts), int(staged.max())
    starts = np.concatenate([[0], np.cumsum(counts)])
    prefix = np.array([book.length(part.sequence) for part in parts])
    positions, at, blocked = np.zeros(T), np.zeros((N, W)), np.ones((T, W), dtype=bool)
    own = np.zeros(T)
    for s, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        depth, sees = forest(shape)
        mine = slice(starts[s], starts[s + 1])
        at[s, : len(shape)] = prefix[s] + np.array(depth)
        positions[mine] = at[s, len(shape) - count : len(shape)]
        blocked[mine, : len(shape)] = ~sees[len(shape) - count :]
        own[mine] = prefix[s] + np.arange(len(shape) - count, len(shape))
    of = np.repeat(np.arange(N), counts)
    numbers = [part.astype(np.int32) for part in (starts, prefix, staged, positions, at, of, own, *tables)]
    words = np.zeros(-(-blocked.size // 4), dtype=np.int32)
    words.view(np.uint8)[: blocked.size] = blocked.reshape(-1)
    first, before, behind, where, keys_at, sequence, mine_at, *there, mask = _moved([*numbers, words], device)
    seen = mask.view(torch.bool)[: blocked.size].view(T, W)
    looks = Looks(first, before, behind, where, keys_at, seen, max(counts), book.capacity)
    return Reads(looks, tuple(there), sequence, mine_at)


def ragged(tables: Sequence[Sequence[int] | Integer[np.ndarray, " _"]], width: int) -> Integer[np.ndarray, "N M"]:
    """One above the other, filled up to `width` with zeros."""
    whole = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(whole, tables, strict=True):
        row[: len(table)] = table
    return whole


def _moved(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """All in one copy."""
    ends = np.cumsum([-(-array.size // _ALIGN) * _ALIGN for array in arrays]).tolist()
    whole = np.zeros(ends[-1], dtype=np.int32)
    begins = [0, *ends[:-1]]
    for array, begin in zip(arrays, begins, strict=True):
        whole[begin : begin + array.size] = array.reshape(-1)
    there = torch.from_numpy(whole).to(device)
    return [there[b : b + array.size].view(array.shape) for array, b in zip(arrays, begins, strict=True)]
