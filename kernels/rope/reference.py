"""The definition: angles in float32, as models have them, and all else in float64."""

import torch
from torch import Tensor


def rope_reference(
    x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float = 1.0, wide: torch.dtype = torch.float64
) -> Tensor:
    """See `rope`. `wide`: what it is computed in."""
    angle = (positions.float()[:, None] * inv_freq.float()).to(wide)[:, None]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    first, second = x.to(wide).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
