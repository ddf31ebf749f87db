"""Our own product with codes of 4 or 8 bits in groups (native.h): of x rounded to 8 bits in blocks of 32
columns, which VNNI's sums of integers take, so that 8 rows cost hardly more than one. A row has the same bits whatever
rows stand beside it, prompts included."""

from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float, Int32, UInt8
from torch import Tensor

from ..native import Product, library

BLOCK, TILE = 32, 32


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cpu" and library() is not None


@dataclass(frozen=True, slots=True)
class Packed:
    """`data` [tiles, G, bytes]: of 32 outputs and each group their scales, zeros or shifts, and codes."""

    data: UInt8[Tensor, "n G B"]
    shape: tuple[int, int]
    group: int
    bits: int
    shifted: bool
    whole: bool = False  # rows of x are rounded with one scale each

    def product(self, bias: BFloat16[Tensor, " N"] | None, order: Int32[Tensor, " K"] | None = None) -> Product:
        """`order`: in which x's columns are read."""
        at = [None if each is None else each.data_ptr() for each in (self.data, bias, order)]
        return Product(*at, *self.shape, self.group, self.bits, self.shifted, self.whole)

    @property
    def nbytes(self) -> int:
        """Of what one call reads."""
        return self.data.nbytes

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weight, rounded once to `dtype`."""
        tiles, G, _ = self.data.shape
        head = 2 * TILE * (2 if self.shifted else 1) + (0 if self.shifted else TILE)
        scale = self.data[:, :, : 2 * TILE].contiguous().view(torch.float16)
        zero = self.data[:, :, 2 * TILE : head].contiguous()
        codes = self.data[:, :, head:]
        if self.bits == 4:
            codes = torch.stack([codes.unflatten(2, (-1, 4 * TILE)) & 15, codes.unflatten(2, (-1, 4 * TILE)) >> 4], 3)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # [tile, group, four columns, output, column]
        each = codes.reshape(tiles, G, -1, TILE, 4).to(wide)
        by = scale.to(wide)[:, :, None, :, None]
        if self.shifted:
            each = each * by + zero.view(torch.float16).to(wide)[:, :, None, :, None]
        else:
            each = (each - zero.to(wide)[:, :, None, :, None]) * by
        return each.permute(0, 3, 1, 2, 4).reshape(tiles * TILE, -1)[: self.shape[0]].to(dtype)


def pack(
    codes: UInt8[Tensor, "N K"],
    scale: Float[Tensor, "N G"],
    zero: UInt8[Tensor, "N G"] | Float[Tensor, "N G"],
    group: int,
    bits: int,
    whole: bool = False,
) -> Packed | None:
    """Pack once: w = scale · (code − zero) with integers, = scale · code + zero with floats. Both floats are rounded
    to float16; None: they are beyond it, or so small that they would lose more than 2^-11 of themselves."""
    N, K = codes.shape
    assert bits in (4, 8)
    assert group % BLOCK == 0
    assert group == K or not whole
    assert scale.shape == zero.shape == (N, K // group)
    shifted = zero.is_floating_point()
    parts = [scale.half(), zero.half() if shifted else zero]
    for part, given in zip(parts, (scale, zero), strict=True):
        if not bool(((part.float() - given.float()).abs() <= given.float().abs() * 2**-11).all()):
            return None
    fill = -N % TILE
    head = [torch.nn.functional.pad(part, (0, 0, 0, fill)).unflatten(0, (-1, TILE)).mT.contiguous() for part in parts]
    # [tile, output, group, four columns, column] -> [tile, group, four columns, output, column]
    each = torch.nn.functional.pad(codes, (0, 0, 0, fill)).view(-1, TILE, K // group, group // 4, 4)
    each = each.permute(0, 2, 3, 1, 4).flatten(3)
    if bits == 4:
        each = each[:, :, ::2] | each[:, :, 1::2] << 4
    data = torch.cat([*(part.view(torch.uint8) for part in head), each.flatten(2)], 2)
    return Packed(data, (N, K), group, bits, shifted, whole)
