"""A linear layer by the Triton products: what `Linear` and `QuantisedLinear` are on a CPU."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..dispatch import wide
from ..matmul_w8 import rounded_rows
from .op import Weight, matmul

_SLICE = 2048  # output rows of the weight that are dequantised at a time, for a prompt


class TritonLinear(nn.Module):
    """y = x Wᵀ + b. `name`: of the codes, for a run's record. `rounds`: x is rounded to 8 bits, with a scale a row."""

    def __init__(
        self,
        weight: Weight,
        in_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        name: str,
        row_invariant: bool,
        rounds: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype, self.device = weight, bias, dtype, weight.codes.device
        self.out_features, self.in_features = weight.codes.shape[0], in_features
        self.name, self.row_invariant, self.rounds = name, row_invariant, rounds

    @property
    def implementation(self) -> str:
        """The name of the product in use, for a run's record."""
        order = "row-invariant" if self.row_invariant else "not row-invariant"
        return f"{self.name} (triton, {order}, prefill by torch)"

    @property
    def nbytes(self) -> int:
        """Bytes of weight read by one call of a few rows."""
        w = self.weight
        parts = (w.codes, w.scale, w.zero, w.shift, w.groups, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def forward(self, x: Float[Tensor, "T K"], prefill: bool = False) -> Float[Tensor, "T N"]:
        """`prefill`: the rows are a prompt's, which may be summed in another order than others."""
        if self.rounds:
            values, scale = rounded_rows(x)
            x = (values * scale).to(x.dtype)
        if not prefill:
            return matmul(x, self.weight, self.bias, self.row_invariant)
        if self.weight.bits == 16:
            return F.linear(x, self.weight.codes, self.bias)
        y = torch.cat([F.linear(x, self._dense(at)) for at in range(0, self.out_features, _SLICE)], 1)
        return y if self.bias is None else y.add_(self.bias)

    def _dense(self, at: int) -> Float[Tensor, "n K"]:
        w = self.weight
        part = slice(at, at + _SLICE)
        scale, zero, shift = (None if of is None else of[part] for of in (w.scale, w.zero, w.shift))
        some = replace(w, codes=w.codes[part], scale=scale, zero=zero, shift=shift)
        return some.dense(self.in_features, wide(self.dtype)).to(self.dtype)

    def dense(self) -> Float[Tensor, "N K"]:
        """The weight that x is multiplied with, rounded once to `dtype`."""
        return torch.cat([self._dense(at) for at in range(0, self.out_features, _SLICE)])
