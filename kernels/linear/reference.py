"""The definition: a float64 product, rounded once."""

import torch
from jaxtyping import Float
from torch import Tensor


def linear_reference(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "T N"]:
    """x Wᵀ + b in float64, returned in x's dtype."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root-mean-square error relative to the root-mean-square of `want`."""
    got, want = got.double(), want.double()
    return float(
        (got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    )
