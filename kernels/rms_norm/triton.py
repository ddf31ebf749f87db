"""One program a row, which is held in registers whole."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen


@triton.jit
@no_type_check  # this one is no Python
def _norm(x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(x_ptr + row + d, mask=inside, other=0.0)
    if residual_ptr is not None:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row + d, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row + d, x, mask=inside)
    wide = x.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + d, wide * norm * weight, mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    T, D = x.shape
    block = triton.next_power_of_2(D)
    if T:
        _norm[(T,)](
            *(x, residual, weight.contiguous(), y, total, D, eps),
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=True,
        )
    return y, total


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def specimens() -> list[Specimen]:
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr"), "*bf16")
    types |= {"D": "i32:16", "eps": "fp32"}
    return [Specimen(f"of {D}", _norm, types, {"BLOCK": D}, num_warps=_warps(D), registers=96) for D in (1024, 8192)]
