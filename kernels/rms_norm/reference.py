"""The definition: float64, rounded once; the sum with a residual is rounded to x's dtype first, as a layer keeps it."""

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, wide: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """See `rms_norm`. `wide`: what it is computed in."""
    total = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    y = total.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return y.to(x.dtype), total.clone()
