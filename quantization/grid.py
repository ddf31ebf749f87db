"""Which numbers a group of weights may become: 2^bits steps between the least and the greatest."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ..errors import UserError
from .codes import Codes, Scheme

GROUP_SIZES = (-1, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Grid:
    """`group_size`: columns that share a scale, −1 for a whole row. `symmetric`: the zero point is 2^(bits − 1), and
    the scale is 2 · max|w| / (2^bits − 1), so that −max|w| is half a step from the lowest code and max|w| loses half a
    step; else the range is from the least weight to the greatest, zero included. `clip`: the share of the range that is
    kept is searched for, of 1 to 0.4, by the error's power `norm` (as GPTQ's mse option), or by the squared error where
    it is known what each column weighs.

    Scales are rounded to `scale_dtype` first and the codes chosen by the rounded ones. float16 stands for the values
    that bfloat16 has as well: formats store scales in the one, packed products multiply in the other, none loses any.
    """

    bits: int
    group_size: int
    symmetric: bool
    clip: bool = False
    norm: float = 2.4
    scale_dtype: torch.dtype = torch.float16

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    def width(self, K: int) -> int:
        """Columns of a group in rows of K."""
        return K if self.group_size == -1 else min(self.group_size, K)

    def scheme(self, shape: tuple[int, int], grouped: bool = False) -> Scheme:
        """Of codes that a weight of that shape gets."""
        return Scheme(shape, self.bits, self.width(shape[1]), self.symmetric, grouped=grouped)

    def ranges(
        self, weight: Float[Tensor, "N C"], importance: Float[Tensor, " C"] | None = None
    ) -> tuple[Float[Tensor, " N"], UInt8[Tensor, " N"]]:
        """(scale, zero) of one group of columns, for each row. `importance`: what a column's squared error weighs."""
        scale, zero = self.of_range(weight.amin(1), weight.amax(1))
        if not self.clip:
            return scale, zero
        best = self._error(weight, scale, zero, importance)
        for share in (1 - 0.02 * i for i in range(1, 31)):
            tried = self.of_range(share * weight.amin(1), share * weight.amax(1))
            error = self._error(weight, *tried, importance)
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, tried[0], scale), torch.where(better, tried[1], zero)
        return scale, zero

    def of_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero) of the range from low to high; 0 is always within it."""
        low, high = low.clamp_max(0), high.clamp_min(0)  # a group all above 0 still has the code of 0
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = (high - low) / self.top
        limits = torch.finfo(self.scale_dtype)
        least = limits.tiny / 8 if self.scale_dtype == torch.float16 else limits.tiny  # as fine as bfloat16 still
        scale = torch.where(scale > 0, scale.clamp(least, limits.max * (1 - 2**-8)), torch.ones_like(scale))
        if self.scale_dtype == torch.float16:
            scale = scale.bfloat16()
        scale = scale.to(self.scale_dtype).to(low.dtype)
        if self.symmetric:
            return scale, torch.full_like(scale, 2 ** (self.bits - 1), dtype=torch.uint8)
        return scale, (-low / scale).round().clamp(0, self.top).to(torch.uint8)

    def _error(self, weight: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None) -> Tensor:
        codes = self.codes(weight, scale[:, None], zero[:, None])
        back = scale[:, None] * (codes.to(weight.dtype) - zero[:, None].to(weight.dtype))
        if importance is None:
            return (back - weight).abs().pow(self.norm).sum(1)
        return (back - weight).square() @ importance

    def codes(self, weight: Tensor, scale: Tensor, zero: Tensor) -> UInt8[Tensor, "..."]:
        """The nearest codes. `scale` and `zero` have the weight's shape, or one that becomes it."""
        return (weight / scale + zero.to(weight.dtype)).round().clamp(0, self.top).to(torch.uint8)


def round_to_nearest(weight: Float[Tensor, "N K"], grid: Grid, importance: Float[Tensor, " K"] | None = None) -> Codes:
    """Each weight to the nearest code of its group's range. `importance`: see `Grid.ranges`."""
    K = weight.shape[1]
    width = grid.width(K)
    parts = [
        grid.ranges(weight[:, at : at + width], None if importance is None else importance[at : at + width])
        for at in range(0, K, width)
    ]
    scale, zero = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    at = torch.arange(K, device=weight.device) // width
    codes = grid.codes(weight, scale[:, at], zero[:, at])
    return Codes(codes, scale.to(grid.scale_dtype), grid.bits, width, zero=zero)


def check_grid(bits: int, group_size: int, most: int = 8, least: int = 2) -> None:
    """Refuses bits and group sizes that no quantiser here takes."""
    if not least <= bits <= most:
        raise UserError(f"quantization.bits must be {least} to {most}, got {bits}")
    if group_size != -1 and not (group_size >= 8 and math.log2(group_size).is_integer()):
        raise UserError(
            f"quantization.group_size must be -1 for a whole row, or a power of two from 8 up, got {group_size}"
        )
