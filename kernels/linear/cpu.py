"""oneDNN's product with a weight packed beforehand, through the operators that torch.compile itself emits."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Row counts at which a row must come out the same; more rows than this are prefill, which nobody compares.
_PROBED_ROWS = (2, 5, 16)


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
    """Pack [N, K] once, and find out on random rows whether one row is summed as several are.

    Which shapes do so depends on oneDNN's version and the processor, so it is observed, not assumed.
    """
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, weight.shape[1], generator=generator).to(weight.dtype)
        want = _product(x, packed, None)
        alike = all(torch.equal(_product(x[:rows], packed, None), want[:rows]) for rows in _PROBED_ROWS)
        lone = torch.equal(_product(x[:1], packed, None), want[:1])
    return Packed(packed, widen=not lone, row_invariant=alike)
