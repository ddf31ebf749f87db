"""oneDNN's product with a weight packed beforehand, through the operators that torch.compile itself emits."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..invariance import PROBED_ROWS, orders


def can_pack(weight: Tensor) -> bool:
    """float32, or bfloat16 on a processor with native bf16 products, on the CPU, with oneDNN built in."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Packed:
    """`widen`: a lone row is fed twice, because this shape takes another summation order for one row."""

    weight: Tensor
    widen: bool
    row_invariant: bool

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if self.widen and rows == 1:
            return _product(x.expand(2, -1).contiguous(), self.weight, bias)[:1]
        return _product(x, self.weight, bias)

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Packed:
    """Pack [N, K] once."""
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        lone, alike = _orders(*weight.shape, weight.dtype, torch.get_num_threads())
    return Packed(packed, widen=not lone, row_invariant=alike)


@lru_cache(maxsize=1024)
def _orders(N: int, K: int, dtype: torch.dtype, threads: int) -> tuple[bool, bool]:
    """Whether a lone row is summed as two are, and two as any other number, in a product with a weight [N, K]."""
    generator = torch.Generator().manual_seed(0)
    half = K // 2
    mirrored = torch.randperm(half, generator=generator)

    def cancelling(rows: int, sign: int) -> Tensor:
        left = torch.randn(rows, half, generator=generator).to(dtype)
        return torch.cat([left, sign * left[:, mirrored], left.new_zeros(rows, K % 2)], 1)

    few = cancelling(min(N, 256), -1)
    packed = torch.ops.mkldnn._reorder_linear_weight(few.repeat(-(-N // len(few)), 1)[:N].contiguous(), 8)
    return orders(lambda x: _product(x, packed, None), cancelling(max(PROBED_ROWS), 1))
