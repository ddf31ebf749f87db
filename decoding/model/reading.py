"""A checkpoint's weights as a decoder wants them: in one dtype, and layers that read the same input as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import UserError
from ...kernels.dispatch import Kernels
from ...kernels.linear import Linear
from ...kernels.matmul_w4.layer import TritonLinear
from ...kernels.matmul_w4.op import Weight
from ...quantization.codes import Codes, alike, stacked
from ...quantization.linear import Beside, QuantisedLinear, by_triton
from .weights import Copies

_PIECE = 1 << 22  # elements

Product = Linear | QuantisedLinear | TritonLinear | Beside


@dataclass(frozen=True, slots=True)
class Weights:
    """`tensors` by transformers' parameter names; `codes`: of the layers that are quantised, by name without
    `.weight`. `kernels`: that multiply with them, if ours do."""

    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    codes: Mapping[str, Codes] = field(default_factory=dict)
    kernels: Kernels | None = None

    def read(self, name: str) -> Tensor:
        """A copy of it: a tensor of a file would hold on to all that is read of the file. Refuses what is missing or
        not finite."""
        return self._read(name, copy=True)

    def _read(self, name: str, copy: bool) -> Tensor:
        try:
            if copy and isinstance(self.tensors, Copies):
                tensor = self.tensors.copied(name, self.dtype, self.device)
            else:
                tensor = self.tensors[name].to(device=self.device, dtype=self.dtype, copy=copy)
        except KeyError:
            raise UserError(f"the checkpoint has no {name!r}; it is incomplete or of another model") from None
        self._check_finite(name, tensor)
        return tensor

    def product(self, names: Sequence[str], bias: bool) -> Product:
        """The layers `names`, which read the same input: one product where all are stored alike."""
        biases = [self.read(f"{name}.bias") for name in names] if bias else None
        whole = None if biases is None else torch.cat(biases)
        if not any(name in self.codes for name in names):
            if len(names) == 1:
                return self.linear(self.read(f"{names[0]}.weight"), whole)
            return self.linear(torch.cat([self._read(f"{name}.weight", copy=False) for name in names]), whole)
        found = [self._codes(name) if name in self.codes else None for name in names]
        quantised = [c for c in found if c is not None]
        if len(quantised) == len(found) and alike(quantised):
            return self._quantised(stacked(quantised), whole)
        parts: list[Linear | QuantisedLinear | TritonLinear] = []
        for i, (name, c) in enumerate(zip(names, found, strict=True)):
            own = None if biases is None else biases[i]
            parts.append(self.linear(self.read(f"{name}.weight"), own) if c is None else self._quantised(c, own))
        return parts[0] if len(parts) == 1 else Beside(parts)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear | TritonLinear:
        """The product with a weight of 16 bits; cuBLAS's, which is `Linear`'s on a GPU, wherever its order will do."""
        if self.kernels is None or not self.kernels.row_invariant:
            return Linear(weight, bias)
        return TritonLinear(Weight(weight, 16), weight.shape[1], bias, self.dtype, name="dense", row_invariant=True)

    def _quantised(self, codes: Codes, bias: Tensor | None) -> QuantisedLinear | TritonLinear:
        if self.kernels is None:
            return QuantisedLinear(codes, bias, self.dtype)
        return by_triton(codes, bias, self.dtype, self.kernels.row_invariant)

    def _codes(self, name: str) -> Codes:
        found = self.codes[name].to(self.device)
        self._check_finite(f"{name}.scale", found.scale)
        if found.shift is not None:
            self._check_finite(f"{name}.shift", found.shift)
        return found

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        # in pieces: the sum of all would widen all of it first
        if not all(torch.isfinite(part.sum(dtype=wide)) for part in tensor.reshape(-1).split(_PIECE)):
            raise UserError(
                f"{name!r} of the checkpoint is not finite in {tensor.dtype}: corrupt, or too large for it; "
                "fetch it again"
            )
