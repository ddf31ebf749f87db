"""silu(gate) · up of a layer's two halves."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..dispatch import launches, runs_triton, wide
from .reference import swiglu_reference

__all__ = ["swiglu", "swiglu_reference"]


def swiglu(gate_up: Float[Tensor, "T two_I"]) -> Float[Tensor, "T I"]:
    """Of [gate, up] side by side, rounded once."""
    if launches(gate_up):
        from .triton import gated

        return gated(gate_up)
    return _op(gate_up)


@torch.library.custom_op("decodelab::swiglu", mutates_args=())
def _op(gate_up: Tensor) -> Tensor:
    if runs_triton(gate_up):
        from .triton import gated

        return gated(gate_up)
    return swiglu_reference(gate_up, wide(gate_up.dtype))


@_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
