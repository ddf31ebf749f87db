"""The definition, in float64."""

import torch
from torch import Tensor


def swiglu_reference(gate_up: Tensor, wide: torch.dtype = torch.float64) -> Tensor:
    """See `swiglu`. `wide`: what it is computed in."""
    gate, up = gate_up.to(wide).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
