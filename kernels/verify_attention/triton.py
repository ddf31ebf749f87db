"""Split over the keys, in two stages.

A program of the first stage holds a tile of (row, query head of one group) pairs of one sequence and reads one chunk of
its keys, once for the whole group. Chunks and tiles begin at multiples of a constant, and what a row does not see is
added as exact zeros; so a row's sums have one order, whatever stands beside it. The second stage adds the chunks up.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen
from ..dispatch import operand
from .keys import Keys, Looks

_LOG2E = 1.4426950408889634
_STAGES = 3
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
@no_type_check  # tests check the types of every other function; this one is no Python
def _load(
    stored,
    scales,
    block,
    slot,
    head,
    stride_block,
    stride_slot,
    stride_head,
    scale_block,
    scale_slot,
    scale_head,
    there,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
    DOT: tl.constexpr,
):
    """(codes or values [BLOCK_N, BLOCK_D], their scales [BLOCK_N]); zeros where nothing is."""
    at = stored + (block * stride_block + slot * stride_slot + head * stride_head)[:, None]
    if BITS == 4:
        pair = tl.arange(0, BLOCK_D // 2)
        # 0x88 is two zeros
        byte = tl.load(at + pair[None, :], mask=there[:, None] & (pair[None, :] < D // 2), other=0x88).to(tl.int32)
        values = (tl.interleave(byte & 15, byte >> 4) - 8).to(tl.float32).to(DOT)
    else:
        d = tl.arange(0, BLOCK_D)
        mask = there[:, None] & (d[None, :] < D)
        values = tl.load(at + d[None, :], mask=mask, other=0)
        if BITS == 8:
            values = values.to(tl.float32)
        values = values.to(DOT)
    scale = tl.full(block.shape, 1.0, tl.float32)
    if BITS < 16:
        where = block * scale_block + slot * scale_slot + head * scale_head
        scale = tl.load(scales + where, mask=there, other=0.0).to(tl.float32)
    return values, scale


# Not specialised by numbers that change from step to step: what is compiled anew might add in another order.
@triton.jit(do_not_specialize=["window", "sink", "table_width", "width", "tiles"])
@no_type_check  # tests check the types of every other function; this one is no Python
def _chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    starts_ptr,
    prefix_ptr,
    staged_ptr,
    positions_ptr,
    key_positions_ptr,
    blocked_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    scale_log2,
    window,
    sink,
    stride_block,
    stride_slot,
    stride_head,
    scale_block,
    scale_slot,
    scale_head,
    table_width,
    block_size,
    width,
    tiles,
    chunk,
    ring,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    RINGED: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    parts = tl.num_programs(2)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    first = tl.load(starts_ptr + sequence) + (tl.program_id(0) % tiles) * ROWS
    last = tl.load(starts_ptr + sequence + 1)
    if first < last:
        m = tl.arange(0, BLOCK_M)
        row = (first + m // GROUP).to(tl.int64)
        mine = (m < ROWS * GROUP) & (row < last)
        # of a tensor [T, Hq]: where this pair is
        pair = row * (kv_heads * GROUP) + head * GROUP + m % GROUP
        d = tl.arange(0, BLOCK_D)
        at = pair[:, None] * D + d[None, :]
        inside = mine[:, None] & (d[None, :] < D)
        q = tl.load(q_ptr + at, mask=inside, other=0.0).to(DOT)
        prefix = tl.load(prefix_ptr + sequence)
        keys = prefix + tl.load(staged_ptr + sequence)
        begin = part * chunk
        end = tl.minimum(keys, begin + chunk)
        position = tl.load(positions_ptr + row, mask=mine, other=2147483647)
        if WINDOWED:
            # committed slots before every row's window are not read, but for the sinks
            lowest = tl.minimum(tl.min(position, 0).to(tl.int32) - window + 1, prefix)
            if begin >= sink:
                begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
        mask_ptr = blocked_ptr + first.to(tl.int64) * width + (m // GROUP * width)[:, None]
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            there = j < end
            block = sequence + tl.zeros([BLOCK_N], tl.int64)
            at_slot = j
            if RINGED:
                at_slot = tl.where(j < sink, j, sink + (j - sink) % window)
                at_slot = tl.where(j < prefix, at_slot, ring + j - prefix)
            slot = at_slot.to(tl.int64)
            if tables_ptr is not None:
                found = tl.load(tables_ptr + sequence * table_width + at_slot // block_size, mask=there, other=0)
                block = found.to(tl.int64)
                slot = (at_slot % block_size).to(tl.int64)
            k, k_scale = _load(
                k_ptr, k_scale_ptr, block, slot, head, stride_block, stride_slot, stride_head,
                scale_block, scale_slot, scale_head, there, D, BLOCK_D, BITS, DOT,
            )  # fmt: skip
            # below the prefix all is seen; behind it the row's forest says what
            behind = j - prefix
            staged = there & (behind >= 0)
            near = staged & (behind < width)
            hidden = tl.load(mask_ptr + behind[None, :], mask=mine[:, None] & near[None, :], other=1)
            seen = there[None, :] & ((behind < 0)[None, :] | (hidden == 0))
            if WINDOWED:
                depth = tl.load(key_positions_ptr + sequence * width + behind, mask=near, other=0).to(tl.int32)
                where = tl.where(staged, depth, j)
                seen = seen & ((where[None, :] > position[:, None] - window) | (where < sink)[None, :])
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale_log2 * k_scale)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            floor = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: −∞ − −∞ is NaN
            weight = tl.exp2(scores - floor[:, None])
            shrink = tl.exp2(best - floor)
            total = total * shrink + tl.sum(weight, 1)
            v, v_scale = _load(
                v_ptr, v_scale_ptr, block, slot, head, stride_block, stride_slot, stride_head,
                scale_block, scale_slot, scale_head, there, D, BLOCK_D, BITS, DOT,
            )  # fmt: skip
            weight = (weight * v_scale[None, :]).to(DOT)
            acc = acc * shrink[:, None] + tl.dot(weight, v, input_precision=PRECISION)
            best = higher
        if WHOLE:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_ptr + at, acc, mask=inside)
        else:
            to = pair * parts + part
            tl.store(max_ptr + to, best, mask=mine)
            tl.store(sum_ptr + to, total, mask=mine)
            # what an empty chunk would leave is not read
            tl.store(out_ptr + to[:, None] * D + d[None, :], acc, mask=inside & (total > 0)[:, None])


@triton.jit
@no_type_check  # tests check the types of every other function; this one is no Python
def _merged(acc_ptr, max_ptr, sum_ptr, out_ptr, parts, D: tl.constexpr, BLOCK_D: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(parts):
        at = pair * parts + part
        mass = tl.load(sum_ptr + at)
        high = tl.load(max_ptr + at)
        there = mass + tl.zeros([BLOCK_D], tl.float32) > 0
        some = tl.load(acc_ptr + at * D + d, mask=(d < D) & there, other=0.0)
        higher = tl.maximum(best, high)
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - floor)
        grow = tl.exp2(high - floor)
        total = total * shrink + mass * grow
        acc = acc * shrink + some * grow
        best = higher
    tl.store(out_ptr + pair * D + d, acc / tl.where(total > 0, total, 1.0), mask=d < D)


def chunk_of(max_keys: int) -> int:
    """Keys that one program reads: enough programs to fill a GPU, and at most 64 partial sums a row."""
    return max(256, triton.next_power_of_2(triton.cdiv(max_keys, 64)))


def verify(
    q: Tensor, keys: Keys, looks: Looks, scale: float, window: int | None, sink: int, row_invariant: bool
) -> Tensor:
    T, Hq, D = q.shape
    Hkv, bits = keys.k.shape[2], {torch.int8: 8, torch.uint8: 4}.get(keys.k.dtype, 16)
    assert bits < 16 or keys.k.dtype == q.dtype
    q, N = q.contiguous(), len(looks.prefix)
    chunk = chunk_of(looks.max_keys)
    parts = max(1, triton.cdiv(looks.max_keys, chunk))
    least = max(16, triton.next_power_of_2(Hq // Hkv))
    block_m = least if row_invariant else max(least, min(32, triton.next_power_of_2(looks.max_rows * (Hq // Hkv))))
    tiles = max(1, triton.cdiv(looks.max_rows, block_m // (Hq // Hkv)))
    block_d = max(16, triton.next_power_of_2(D))
    out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    acc = out if parts == 1 else torch.empty(T, Hq, parts, D, dtype=torch.float32, device=q.device)
    high, mass = (torch.empty(T, Hq, parts, dtype=torch.float32, device=q.device) for _ in range(2))
    scale_strides = (0, 0, 0) if keys.k_scale is None else keys.k_scale.stride()
    if T and N:
        _chunks[(N * tiles, Hkv, parts)](
            *(q, keys.k, keys.v, keys.k_scale, keys.v_scale, keys.tables, looks.starts, looks.prefix, looks.staged),
            *(looks.positions, looks.key_positions.contiguous(), looks.blocked.contiguous().view(torch.uint8)),
            *(acc, high, mass, scale * _LOG2E, window or 0, sink, *keys.k.stride()[:3], *scale_strides),
            *(0 if keys.tables is None else keys.tables.shape[1], keys.k.shape[1], looks.blocked.shape[1], tiles),
            *(chunk, keys.ring or 0),
            GROUP=Hq // Hkv,
            D=D,
            BITS=bits,
            WINDOWED=window is not None,
            RINGED=keys.ring is not None,
            WHOLE=parts == 1,
            DOT=_DTYPES[operand(q.dtype)],
            PRECISION="ieee",
            BLOCK_M=block_m,
            BLOCK_N=_keys_at_once(block_d, q.dtype),
            BLOCK_D=block_d,
            num_warps=_warps(block_m),
            num_stages=_STAGES,
            enable_fp_fusion=True,
        )
        if parts > 1:
            _merged[(T * Hq,)](acc, high, mass, out, parts, D=D, BLOCK_D=block_d, num_warps=1, enable_fp_fusion=True)
    return out.view(T, Hq * D)


def _keys_at_once(block_d: int, dtype: torch.dtype) -> int:
    """As many as registers hold without spilling, and three stages of keys and values within 64 KiB."""
    return max(16, min(64, 8192 // (block_d * dtype.itemsize)))


def _warps(block_m: int) -> int:
    return 4 if block_m <= 16 else 8


def specimens() -> list[Specimen]:
    """As `verify` launches it: a lone row and a tree, groups that are powers of two and not."""
    found = []
    for name, bits, group, D, block_m, windowed, ringed, paged in (
        ("row, 16 bits, dense", 16, 4, 128, 16, False, False, False),
        ("tree, 16 bits, paged, window", 16, 7, 128, 32, True, False, True),
        ("tree, 16 bits, ring", 16, 4, 128, 32, True, True, False),
        ("row, 8 bits, paged", 8, 4, 128, 16, True, False, True),
        ("tree, 4 bits, paged", 4, 4, 128, 32, False, False, True),
    ):
        stored = {16: "*bf16", 8: "*i8", 4: "*u8"}[bits]
        scales = "*fp16" if bits < 16 else None
        types: dict[str, str | None] = {"q_ptr": "*bf16"}
        types |= dict.fromkeys(("k_ptr", "v_ptr"), stored)
        types |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), scales) | {"tables_ptr": "*i32" if paged else None}
        types |= dict.fromkeys(("starts_ptr", "prefix_ptr", "staged_ptr"), "*i32")
        types |= dict.fromkeys(("positions_ptr", "key_positions_ptr"), "*i64") | {"blocked_ptr": "*u8"}
        types |= dict.fromkeys(("out_ptr", "max_ptr", "sum_ptr"), "*fp32") | {"scale_log2": "fp32"}
        types |= dict.fromkeys(("window", "sink", "table_width", "width", "tiles", "ring"), "i32")
        types |= dict.fromkeys(("stride_block", "stride_slot", "stride_head"), "i32:16")
        types |= dict.fromkeys(("scale_block", "scale_slot", "scale_head"), "i32")
        types |= dict.fromkeys(("block_size", "chunk"), "i32:16")
        constants = {
            "GROUP": group, "D": D, "BITS": bits, "WINDOWED": windowed, "RINGED": ringed, "WHOLE": False,
            "DOT": tl.bfloat16, "PRECISION": "ieee",
            "BLOCK_M": block_m, "BLOCK_N": _keys_at_once(D, torch.bfloat16), "BLOCK_D": D,
        }  # fmt: skip
        found.append(Specimen(name, _chunks, types, constants, _warps(block_m), _STAGES, registers=240))
    merged = dict.fromkeys(("acc_ptr", "max_ptr", "sum_ptr"), "*fp32") | {"out_ptr": "*bf16", "parts": "i32"}
    found.append(Specimen("merged", _merged, merged, {"D": 128, "BLOCK_D": 128}, num_warps=1, registers=64))
    return found
