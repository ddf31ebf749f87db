"""Kept rows move to their places behind the committed ones: keys, values and scales of all layers in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32, Shaped
from torch import Tensor

from ..dispatch import runs_triton
from .reference import commit_reference

__all__ = ["Owners", "commit", "commit_reference", "owners"]


@dataclass(frozen=True, slots=True)
class Owners:
    """What layers that own their keys keep, each [P, B, …]: a pool's blocks and their slots, of one number of slots.

    `table` on the device: of each (address, strides of a block, a slot and a head, heads, length of a head), counted in
    units of `unit` bytes; `columns`: the most units that a slot of one has. It holds as long as the tensors lie where
    they are.
    """

    caches: tuple[Shaped[Tensor, "P B ..."], ...]
    table: Int[Tensor, "C 6"]
    unit: int
    columns: int


def owners(caches: Sequence[Tensor]) -> Owners:
    """Keys or values [P, B, H, D], any strides but for the last, or scales [P, B, H]. To be called once."""
    assert caches
    assert len({cache.shape[1] for cache in caches}) == 1
    unit = 2 if all(cache.element_size() % 2 == 0 or _even(cache) for cache in caches) else 1
    rows = []
    for cache in caches:
        whole = cache if cache.ndim == 4 else cache[..., None]
        assert whole.stride(-1) == 1 or whole.shape[-1] == 1
        assert whole.shape[1] == caches[0].shape[1]
        size = cache.element_size()
        strides = [stride * size // unit for stride in whole.stride()[:3]]
        rows.append([cache.data_ptr(), *strides, whole.shape[2], whole.shape[3] * size // unit])
    table = torch.tensor(rows, dtype=torch.int64, device=caches[0].device)
    return Owners(tuple(caches), table, unit, max(row[4] * row[5] for row in rows))


def _even(cache: Tensor) -> bool:
    """Of single bytes: whether two can be moved at a time."""
    counts = (cache.data_ptr(), cache.shape[-1], *cache.stride()[:-1])
    return cache.ndim == 4 and all(count % 2 == 0 for count in counts)


def commit(
    to: Owners,
    prefix: Int32[Tensor, " N"],
    kept: Int32[Tensor, "N A"],
    count: Int32[Tensor, " N"],
    tables: Int32[Tensor, "N M"] | None = None,
) -> None:
    """Slot prefix[s] + i of sequence s gets what slot prefix[s] + kept[s, i] holds, for i < count[s], in any order:
    all are read before one is written. Slot j is slot j % B of block tables[s, j // B] (None: of block s). No two
    sequences may share a block that is written to."""
    _op(list(to.caches), to.table, to.unit, to.columns, prefix, kept, count, tables)


@torch.library.custom_op("decodelab::commit", mutates_args=("caches",))
def _op(
    caches: list[Tensor],
    table: Tensor,
    unit: int,
    columns: int,
    prefix: Tensor,
    kept: Tensor,
    count: Tensor,
    tables: Tensor | None,
) -> None:
    if runs_triton(table):
        from .triton import moved

        moved(table, unit, columns, caches[0].shape[1], prefix, kept, count, tables)
    else:
        commit_reference(caches, tables, prefix, kept, count)


@_op.register_fake
def _(*args: object) -> None:
    return None
