"""A program moves all kept rows of a few columns of one tensor and sequence, and nobody else touches those columns: it
reads them all, waits for its threads, and writes."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen

_CELLS = 4096  # rows times columns that a program holds


@triton.jit(do_not_specialize=["table_width", "kept_width"])
@no_type_check  # this one is no Python
def _moved(
    table_ptr,
    tables_ptr,
    prefix_ptr,
    kept_ptr,
    count_ptr,
    table_width,
    kept_width,
    block_size,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * 6
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if UNIT == 2:  # noqa: SIM108 - of two types
        start = tl.load(entry).to(tl.pointer_type(tl.int16))
    else:
        start = tl.load(entry).to(tl.pointer_type(tl.int8))
    stride_block = tl.load(entry + 1)
    stride_slot = tl.load(entry + 2)
    stride_head = tl.load(entry + 3)
    heads = tl.load(entry + 4)
    length = tl.load(entry + 5)
    across = column // length * stride_head + column % length
    i = tl.arange(0, ROWS)
    among = i < tl.load(count_ptr + sequence)
    source = tl.load(kept_ptr + sequence * kept_width + i, mask=among, other=0)
    moves = among & (source != i)
    prefix = tl.load(prefix_ptr + sequence)
    j = prefix + source
    k = prefix + i
    here = sequence * stride_block + j * stride_slot
    there = sequence * stride_block + k * stride_slot
    if tables_ptr is not None:
        mine = tables_ptr + sequence * table_width
        here = tl.load(mine + j // block_size, mask=moves, other=0) * stride_block + j % block_size * stride_slot
        there = tl.load(mine + k // block_size, mask=moves, other=0) * stride_block + k % block_size * stride_slot
    mask = moves[:, None] & (column < heads * length)[None, :]
    rows = tl.load(start + here[:, None] + across[None, :], mask=mask, other=0)
    tl.debug_barrier()
    tl.store(start + there[:, None] + across[None, :], rows, mask=mask)


def moved(
    table: Tensor,
    unit: int,
    columns: int,
    block_size: int,
    prefix: Tensor,
    kept: Tensor,
    count: Tensor,
    tables: Tensor | None,
) -> None:
    (N, A), rows = kept.shape, max(2, triton.next_power_of_2(kept.shape[1]))
    if not (N and A):
        return
    block = max(16, min(_CELLS // rows, triton.next_power_of_2(columns)))
    _moved[(len(table), N, triton.cdiv(columns, block))](
        *(table, tables, prefix, kept.contiguous(), count, 0 if tables is None else tables.shape[1], A, block_size),
        UNIT=unit,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )


def specimens() -> list[Specimen]:
    types = {"table_ptr": "*i64"}
    types |= dict.fromkeys(("tables_ptr", "prefix_ptr", "kept_ptr", "count_ptr"), "*i32")
    types |= dict.fromkeys(("table_width", "kept_width"), "i32") | {"block_size": "i32:16"}
    constants = {"UNIT": 2, "ROWS": 8, "BLOCK": 512}
    return [Specimen("", _moved, types, constants, registers=160)]
