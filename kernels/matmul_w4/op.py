"""The products for a GPU: weights of 4, 8 or 16 bits, groups with zeros or shifts, columns in any group."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Shaped, UInt8
from torch import Tensor

from ..dispatch import launches, runs_triton, wide


@dataclass(frozen=True, slots=True)
class Weight:
    """[N, K]: in x's dtype (`bits` 16), or codes a byte (8) or two a byte, the even column's low (4).

    w = scale · (code − zero), or scale · code + shift, in `wide` numbers. Column k is in group `groups[k]`, or, without
    them, in k // group_size.
    """

    codes: Shaped[Tensor, "N B"]
    bits: int
    scale: Float[Tensor, "N G"] | None = None
    zero: UInt8[Tensor, "N G"] | None = None
    shift: Float[Tensor, "N G"] | None = None
    groups: Int32[Tensor, " K"] | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        assert self.bits in (4, 8, 16)
        assert (self.scale is None) == (self.bits == 16)
        assert self.bits == 16 or (self.zero is None) != (self.shift is None)

    def dense(self, K: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "N K"]:
        """The weight, computed in `dtype`."""
        if self.scale is None:
            return self.codes.to(dtype)
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :K]
        at = torch.arange(K, device=codes.device) // self.group_size if self.groups is None else self.groups.long()
        scale = self.scale.to(dtype)[:, at]
        if self.zero is not None:
            return scale * (codes.to(dtype) - self.zero.to(dtype)[:, at])
        assert self.shift is not None
        return scale * codes.to(dtype) + self.shift.to(dtype)[:, at]


def matmul(
    x: Float[Tensor, "T K"], weight: Weight, bias: Float[Tensor, " N"] | None = None, row_invariant: bool = True
) -> Float[Tensor, "T N"]:
    """x Wᵀ + bias, summed in float32 and rounded once. `row_invariant`: a row has the same bits whatever rows stand
    beside it; else tiles and the split of the columns follow from their number."""
    K = x.shape[1]
    assert weight.codes.shape[1] == (-(-K // 2) if weight.bits == 4 else K)
    assert weight.bits < 16 or weight.codes.dtype == x.dtype
    parts = (weight.scale, weight.zero, weight.shift, weight.groups)
    if launches(x):
        from .triton import product

        return product(x, weight.codes, weight.bits, *parts, weight.group_size, bias, row_invariant)
    return _op(x, weight.codes, weight.bits, *parts, weight.group_size, bias, row_invariant)


@torch.library.custom_op("decodelab::matmul", mutates_args=())
def _op(
    x: Tensor,
    codes: Tensor,
    bits: int,
    scale: Tensor | None,
    zero: Tensor | None,
    shift: Tensor | None,
    groups: Tensor | None,
    group_size: int,
    bias: Tensor | None,
    row_invariant: bool,
) -> Tensor:
    if runs_triton(x):
        from .triton import product

        return product(x, codes, bits, scale, zero, shift, groups, group_size, bias, row_invariant)
    weight = Weight(codes, bits, scale, zero, shift, groups, group_size).dense(x.shape[1], wide(x.dtype))
    y = x.to(weight.dtype) @ weight.T
    return (y if bias is None else y + bias).to(x.dtype)


@_op.register_fake
def _(x: Tensor, codes: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])
