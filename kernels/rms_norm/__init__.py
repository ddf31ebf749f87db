"""y = h / √(mean h² + eps) · weight with h = x + residual, and h itself: a residual and the norm behind it."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..dispatch import launches, runs_triton, wide
from .reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, " D"], eps: float, residual: Float[Tensor, "T D"] | None = None
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """(y, h), in x's dtype."""
    if launches(x):
        from .triton import norm

        return norm(x, weight, eps, residual)
    return _op(x, weight, eps, residual)


@torch.library.custom_op("decodelab::rms_norm", mutates_args=())
def _op(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if runs_triton(x):
        from .triton import norm

        return norm(x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual, wide(x.dtype))


@_op.register_fake
def _(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(x)
