"""The definitions, in float64, rounded once."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor


def matmul_w8_reference(
    x: Float[Tensor, "T K"], weight: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]
) -> Float[Tensor, "T N"]:
    """x Wᵀ with w = weight · scale, a scale an output."""
    return ((x.double() @ weight.double().T) * scale.double()).to(x.dtype)


def matmul_w8a8_reference(
    x: Float[Tensor, "T K"], weight: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]
) -> Float[Tensor, "T N"]:
    """The same of x rounded to 8 bits."""
    rounded, by = rounded_rows(x)
    return matmul_w8_reference(rounded.double() * by.double(), weight, scale).to(x.dtype)


def rounded_rows(x: Float[Tensor, "T K"]) -> tuple[Int8[Tensor, "T K"], Float[Tensor, "T 1"]]:
    """(integers from −127 to 127, scales in float32): each row by its own greatest magnitude, so that it is rounded
    alike whatever rows stand beside it. The scale of a row that is not finite is not, and so is its product."""
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale).round_().to(torch.int8), scale
