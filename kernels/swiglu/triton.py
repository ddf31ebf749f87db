"""One program a block of a row."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen

_BLOCK = 1024


@triton.jit
@no_type_check  # this one is no Python
def _gated(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + i, gate * tl.sigmoid(gate) * up, mask=inside)


def gated(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    T, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(T, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        _gated[(T, triton.cdiv(width, _BLOCK))](gate_up, y, width, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
    return y


def specimens() -> list[Specimen]:
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "width": "i32:16"}
    return [Specimen("", _gated, types, {"BLOCK": _BLOCK}, registers=64)]
