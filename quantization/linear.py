"""A linear layer over quantised weights."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..kernels.linear import Linear
from .codes import Codes


class QuantisedLinear(nn.Module):
    """y = x Ŵᵀ + b. `dtype`: of x and y."""

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.codes, self.dtype, self.device = codes, dtype, codes.codes.device
        self._product = Linear(codes.dequantise(dtype), bias)

    @property
    def implementation(self) -> str:
        return f"int{self.codes.bits} dequantised, {self._product.implementation}"

    @property
    def nbytes(self) -> int:
        """Bytes of weight read by one call."""
        return self._product.nbytes

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        return self._product(x)

    def dense(self) -> Float[Tensor, "N K"]:
        return self.codes.dequantise(self.dtype)


class Beside(nn.Module):
    """Layers that read the same input and are quantised differently, as one: their outputs side by side."""

    def __init__(self, parts: Sequence[Linear | QuantisedLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.dtype, self.device = parts[0].dtype, parts[0].device

    @property
    def implementation(self) -> str:
        return ", ".join(sorted({str(part.implementation) for part in self.parts}))

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self.parts)

    def forward(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        return torch.cat([part(x) for part in self.parts], -1)

    def dense(self) -> Float[Tensor, "N K"]:
        return torch.cat([part.dense() for part in self.parts])
