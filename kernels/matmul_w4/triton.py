"""Products with weights of 4, 8 or 16 bits for a few rows of x, split over the columns in two stages.

A program holds a tile [rows, outputs] and reads every `parts`-th block of columns. In the row-invariant mode tile and
parts follow from the weight's shape alone, so that a row's sums have one order whatever rows stand beside it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen
from ..dispatch import operand

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_PROGRAMS = 256  # about as many fill a GPU


# Not specialised by the number of rows: what is compiled anew for one row might add in another order.
@triton.jit(do_not_specialize=["T"])
@no_type_check  # this one is no Python
def _product(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    groups_ptr,
    bias_ptr,
    out_ptr,
    T,
    N,
    K,
    G,
    row_bytes,
    group_size,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    rows = m.to(tl.int64)
    outputs = n.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * BLOCK_K, K, parts * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (m[:, None] < T) & (k[None, :] < K)
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=inside, other=0.0).to(DOT)
        if BITS == 4:
            pair = start // 2 + tl.arange(0, BLOCK_K // 2)
            there = (n[:, None] < N) & (pair[None, :] < row_bytes)
            byte = tl.load(codes_ptr + outputs[:, None] * row_bytes + pair[None, :], mask=there, other=0).to(tl.int32)
            code = tl.interleave(byte & 15, byte >> 4)
        else:
            there = (n[:, None] < N) & (k[None, :] < K)
            code = tl.load(codes_ptr + outputs[:, None] * row_bytes + k[None, :], mask=there, other=0)
        if BITS == 16:
            acc += tl.dot(x, tl.trans(code.to(DOT)), input_precision="ieee")
        elif ALIGNED:  # one group a block of columns: integers are multiplied, exactly, and their sum is scaled
            at = outputs * G + start // group_size
            scale = tl.load(scale_ptr + at, mask=n < N, other=0.0).to(tl.float32)
            code = code.to(tl.int32)
            if zero_ptr is not None:
                code -= tl.load(zero_ptr + at, mask=n < N, other=0).to(tl.int32)[:, None]
            acc += tl.dot(x, tl.trans(code.to(tl.float32).to(DOT)), input_precision="ieee") * scale[None, :]
            if shift_ptr is not None:
                shift = tl.load(shift_ptr + at, mask=n < N, other=0.0).to(tl.float32)
                acc += tl.sum(x.to(tl.float32), 1)[:, None] * shift[None, :]
        else:  # a column may be in any group
            group = k // group_size
            if groups_ptr is not None:
                group = tl.load(groups_ptr + k, mask=k < K, other=0).to(tl.int32)
            at = outputs[:, None] * G + group[None, :]
            known = (n[:, None] < N) & (k[None, :] < K)
            weight = code.to(tl.float32)
            scale = tl.load(scale_ptr + at, mask=known, other=0.0).to(tl.float32)
            if zero_ptr is not None:
                weight = (weight - tl.load(zero_ptr + at, mask=known, other=0).to(tl.float32)) * scale
            else:
                weight = weight * scale + tl.load(shift_ptr + at, mask=known, other=0.0).to(tl.float32)
            acc += tl.dot(x, tl.trans(weight.to(DOT)), input_precision="ieee")
    to = (part * T.to(tl.int64) + rows[:, None]) * N + n[None, :]
    if WHOLE:  # noqa: SIM102 - both are known when it is compiled
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + to, acc, mask=(m[:, None] < T) & (n[None, :] < N))


@triton.jit(do_not_specialize=["stride"])
@no_type_check
def _summed(parts_ptr, bias_ptr, out_ptr, N, parts, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + part * stride.to(tl.int64) + row * N + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total, mask=n < N)


def tiles(T: int, N: int, K: int, bits: int, group: int | None, row_invariant: bool) -> tuple[int, int, int, int]:
    """(rows, outputs and columns of a tile, parts). `group`: columns that share a scale, neighbours (None: any)."""
    block_k = 128 if bits < 16 and group is not None else 64
    if group is not None and group >= 16:  # the largest power of two that divides the group: a block has one scale
        block_k = min(block_k, max(32, group & -group))
    block_m = 16 if row_invariant or T <= 16 else 32 if T <= 32 else 64
    block_n = 32 if N <= 4096 or (group is None and bits < 16) else 64
    programs = triton.cdiv(N, block_n) * (1 if row_invariant else triton.cdiv(T, block_m))
    parts = max(1, min(_PROGRAMS // programs, triton.cdiv(K, 4 * block_k), 16))
    return block_m, block_n, block_k, parts


def product(
    x: Tensor,
    codes: Tensor,
    bits: int,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    shift: Tensor | None = None,
    groups: Tensor | None = None,
    group_size: int = 1,
    bias: Tensor | None = None,
    row_invariant: bool = True,
) -> Tensor:
    """x Wᵀ + bias with W of `codes`: [N, K] in x's dtype (16 bits) or bytes, or two a byte (4 bits)."""
    (T, K), N = x.shape, codes.shape[0]
    x, codes = x.contiguous(), codes.contiguous()
    scale, zero, shift, groups = (None if p is None else p.contiguous() for p in (scale, zero, shift, groups))
    block_m, block_n, block_k, parts = tiles(
        T, N, K, bits, group_size if groups is None and bits < 16 else None, row_invariant
    )
    aligned = bits < 16 and groups is None and (group_size % block_k == 0 or group_size >= K)
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    partial = out if parts == 1 else torch.empty(parts, T, N, dtype=torch.float32, device=x.device)
    if out.numel():
        _product[(triton.cdiv(N, block_n), triton.cdiv(T, block_m), parts)](
            *(x, codes, scale, zero, shift, groups, bias, partial, T, N, K, 0 if scale is None else scale.shape[1]),
            *(codes.shape[1], group_size),
            BITS=bits,
            ALIGNED=aligned,
            WHOLE=parts == 1,
            DOT=_DTYPES[operand(x.dtype)],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
        if parts > 1:
            _summed[(T, triton.cdiv(N, 512))](
                *(partial, bias, out, N, parts, T * N), BLOCK=512, num_warps=4, enable_fp_fusion=True
            )
    return out


def specimens_of(bits: int) -> list[Specimen]:
    """As `product` launches it: 8 and 64 rows, groups of 128 with zeros, and columns in any group with shifts."""
    stored = {16: "*bf16", 8: "*u8", 4: "*u8"}[bits]
    found = []
    for name, T, any_group in (("1–16 rows", 8, False), ("64 rows", 64, False), ("g_idx, shifts", 8, True)):
        if any_group and bits == 16:
            continue
        low = bits < 16
        block_m, block_n, block_k, _ = tiles(T, 8192, 4096, bits, 128 if low and not any_group else None, T <= 16)
        types: dict[str, str | None] = {"x_ptr": "*bf16", "codes_ptr": stored, "out_ptr": "*fp32", "bias_ptr": None}
        types |= {"scale_ptr": "*fp16" if low else None, "zero_ptr": "*u8" if low and not any_group else None}
        types |= {"shift_ptr": "*fp16" if any_group else None, "groups_ptr": "*i32" if any_group else None}
        types |= dict.fromkeys(("T", "G"), "i32")
        types |= dict.fromkeys(("N", "K", "row_bytes", "group_size"), "i32:16")
        constants = {
            "BITS": bits, "ALIGNED": low and not any_group, "WHOLE": False, "DOT": tl.bfloat16,
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
        }  # fmt: skip
        registers = 255 if block_m > 16 else 192 if any_group else 144
        found.append(Specimen(name, _product, types, constants, registers=registers))
    return found


def specimens() -> list[Specimen]:
    types = {"parts_ptr": "*fp32", "bias_ptr": None, "out_ptr": "*bf16", "N": "i32:16", "parts": "i32", "stride": "i32"}
    return [*specimens_of(4), Specimen("summed", _summed, types, {"BLOCK": 512}, registers=64)]
