"""The definition: the weight from its codes and the product, both in float64, rounded once."""

from jaxtyping import Float, UInt8
from torch import Tensor


def matmul_w4_reference(
    x: Float[Tensor, "T K"],
    codes: UInt8[Tensor, "N K"],
    scale: Float[Tensor, "N G"],
    shift: Float[Tensor, "N G"],
    group: int,
) -> Float[Tensor, "T N"]:
    """x Wᵀ with w = (code − 8) · scale + shift, a scale and a shift for `group` neighbouring columns."""
    wide, across = codes.double() - 8, scale.double().repeat_interleave(group, 1)
    weight = wide * across + shift.double().repeat_interleave(group, 1)
    return (x.double() @ weight.T).to(x.dtype)
