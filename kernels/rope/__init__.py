"""Rotary position embedding of rows at any positions: a tree's rows stand at prefix + depth."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..dispatch import launches, runs_triton, wide
from .reference import rope_reference

__all__ = ["rope", "rope_reference"]


def rope(
    x: Float[Tensor, "T H D"], positions: Int[Tensor, " T"], inv_freq: Float[Tensor, " half"], scale: float = 1.0
) -> Float[Tensor, "T H D"]:
    """Elements d and d + D / 2 of each head turned by positions · inv_freq[d], and `scale` times as long; rounded once.
    x may be a slice of heads of a greater tensor."""
    assert 2 * len(inv_freq) == x.shape[2]
    if launches(x):
        from .triton import turned

        return turned(x, positions, inv_freq, scale)
    return _op(x, positions, inv_freq, scale)


@torch.library.custom_op("decodelab::rope", mutates_args=())
def _op(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    if runs_triton(x):
        from .triton import turned

        return turned(x, positions, inv_freq, scale)
    return rope_reference(x, positions, inv_freq, scale, wide(x.dtype))


@_op.register_fake
def _(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)
