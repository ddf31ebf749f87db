"""One program a row and a few heads, which share its angles."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen

_HEADS = 4


@triton.jit
@no_type_check  # this one is no Python
def _turned(
    x_ptr,
    y_ptr,
    positions_ptr,
    inv_freq_ptr,
    scale,
    stride_row,
    stride_head,
    heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)
    inside = (h[:, None] < heads) & (d[None, :] < HALF)
    angle = tl.load(positions_ptr + row).to(tl.float32) * tl.load(inv_freq_ptr + d, mask=d < HALF, other=0.0)
    cos = (tl.cos(angle) * scale)[None, :]
    sin = (tl.sin(angle) * scale)[None, :]
    at = row * stride_row + h[:, None] * stride_head + d[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = (row * heads + h[:, None]) * (2 * HALF) + d[None, :]
    tl.store(y_ptr + to, first * cos - second * sin, mask=inside)
    tl.store(y_ptr + to + HALF, second * cos + first * sin, mask=inside)


def turned(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    T, H, D = x.shape
    y = torch.empty(T, H, D, dtype=x.dtype, device=x.device)
    if y.numel():
        _turned[(T, triton.cdiv(H, _HEADS))](
            *(x, y, positions.contiguous(), inv_freq.float().contiguous(), scale, x.stride(0), x.stride(1), H),
            HALF=D // 2,
            BLOCK=triton.next_power_of_2(D // 2),
            HEADS=_HEADS,
            num_warps=2,
            enable_fp_fusion=True,
        )
    return y


def specimens() -> list[Specimen]:
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "positions_ptr": "*i64", "inv_freq_ptr": "*fp32", "scale": "fp32"}
    types |= {"stride_row": "i32:16", "stride_head": "i32:16", "heads": "i32"}
    return [Specimen("", _turned, types, {"HALF": 64, "BLOCK": 64, "HEADS": _HEADS}, num_warps=2, registers=128)]
