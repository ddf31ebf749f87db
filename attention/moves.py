"""Kept rows move to their places: those of all layers in one launch where our kernels run."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from ..kernels.commit import Owners, commit, owners
from .kept import KeptRows
from .reads import packed, unpacked

MOST = 256  # rows of a launch, each program of which holds them all


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Int32[Tensor, "..."]]:
    """In one copy."""
    return unpacked(torch.from_numpy(packed(arrays)).to(device), [array.shape for array in arrays])


class Moves:
    """From slots to others, which may be among them, of layers whose slots have the same numbers. `launched`: by the
    kernel."""

    def __init__(self, kept: Sequence[KeptRows], device: torch.device, launched: bool) -> None:
        self._kept, self._device, self._launched = kept, device, launched
        self._owners: tuple[list[int], Owners] | None = None  # and the addresses that it holds for

    def __call__(self, source: Sequence[int], to: Sequence[int]) -> None:
        if not source:
            return
        n = len(source)
        if self._launched and n <= MOST:  # a slot is a block: of slots 0 … 2n − 1, the latter half to the former
            width = 1 << (n - 1).bit_length()  # the kernel has a variant for each
            table = np.zeros((1, 2 * width))
            table[0, :n], table[0, width : width + n] = to, source
            arrays = (table, np.zeros(1), width + np.arange(width)[None], np.array([n]))
            tables, prefix, kept, count = on_device(arrays, self._device)
            commit(self._all(), prefix, kept, count, tables)
        else:
            at, there = (torch.tensor(slots, dtype=torch.int64).to(self._device) for slots in (source, to))
            for one in self._kept:
                one.move(at, there)

    def _all(self) -> Owners:
        """A layer's tensors are others once it has been resized."""
        whole = [part for one in self._kept for part in one.parts]
        where = [part.data_ptr() for part in whole]
        if self._owners is None or self._owners[0] != where:
            slots = [half.transpose(0, 1).unsqueeze(1) for part in whole for half in part]
            self._owners = where, owners(slots)
        return self._owners[1]
