"""PyTorch's own product of bfloat16 rows with packed codes of 4 bits. (float16 and float32 rows take a scalar loop.)"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import BFloat16, Float, UInt8
from torch import Tensor

from ..invariance import PROBED_ROWS, orders

GROUPS = (256, 128, 64, 32)  # columns, as the product takes them
_TILE = 16  # it takes a multiple of this many output rows
_SLICE = 4096  # output rows packed at a time: the operator wants codes of 32 bits
_FAST = ("AVX2", "AVX512")  # processors that it is written for; others take a scalar loop


def group_of(group_size: int, K: int) -> int | None:
    """The largest group that the product takes and that divides groups of `group_size` and rows of K: their scales are
    then repeated."""
    return next((group for group in GROUPS if K % group == 0 and group_size % group == 0), None)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        dtype == torch.bfloat16 and device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith(_FAST)
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """`weight`: in the operator's own layout; `codes` [N, K / 2]: two a byte, the even column's low, for `dense`.
    `scales` [K / group, N, 2]: scale and shift in bfloat16. `widen`: a lone row is fed twice."""

    weight: UInt8[Tensor, "N2 K2"]
    codes: UInt8[Tensor, "N K2"]
    scales: BFloat16[Tensor, "G N2 2"]
    group: int
    widen: bool

    def __call__(self, x: BFloat16[Tensor, "T K"]) -> BFloat16[Tensor, "T N"]:
        x, rows = x.contiguous(), x.shape[0]
        if self.widen and rows == 1:
            x = x.expand(2, -1).contiguous()
        return _product(x, self.weight, self.group, self.scales)[:rows, : self.codes.shape[0]]

    @property
    def nbytes(self) -> int:
        """Of what one call reads."""
        return self.weight.nbytes + self.scales.nbytes

    def dense(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Float[Tensor, "n K"]:
        """The weight's rows start … stop − 1, as they are multiplied with, rounded once to `dtype`."""
        packed = self.codes[start:stop]
        codes = torch.stack([packed & 15, packed >> 4], -1).view(len(packed), -1, self.group)
        scale, shift = self.scales[:, : len(self.codes)].transpose(0, 1)[start:stop, :, None].float().unbind(-1)
        return codes.float().sub_(8).mul_(scale).add_(shift).view(len(packed), -1).to(dtype)


def _product(x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group, scales)


def pack(
    codes: UInt8[Tensor, "N K"], scale: Float[Tensor, "N G"], shift: Float[Tensor, "N G"], group: int
) -> Packed | None:
    """Pack once. Scale and shift are rounded to bfloat16, as the product takes them. None: here the product gives a row
    other bits beside other rows."""
    N, K = codes.shape
    assert group in GROUPS
    assert K % group == 0
    assert scale.shape == shift.shape == (N, K // group)  # another would crash it (pytorch#128692)
    if N and int(codes.max()) > 15:  # the operator does not look, and would write into the neighbours
        raise ValueError(f"a code is {int(codes.max())}, but 4 bits hold at most 15")
    lone, alike = _orders(N % 64, K, group, torch.get_num_threads())
    if not alike:
        return None
    fill = -N % _TILE
    scales = torch.stack([scale, shift], -1).transpose(0, 1).bfloat16()
    scales = torch.nn.functional.pad(scales, (0, 0, 0, fill)).contiguous()
    low, high = codes[:, ::2], codes[:, 1::2]
    return Packed(_packed(codes, fill), low | high << 4, scales, group, widen=not lone)


def _packed(codes: Tensor, fill: int) -> Tensor:
    whole = torch.nn.functional.pad(codes, (0, 0, 0, fill))
    each = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.int(), 1) for part in whole.split(_SLICE)]
    return torch.cat(each)


@lru_cache(maxsize=1024)
def _orders(last: int, K: int, group: int, threads: int) -> tuple[bool, bool]:
    """As `orders`, of a weight whose last tile has `last` of 64 rows. The terms of each group cancel."""
    generator = torch.Generator().manual_seed(0)
    N, groups, half = 128 + last + -last % _TILE, K // group, group // 2
    mirrored = torch.randperm(half, generator=generator)
    left = torch.randint(1, 16, (N, groups, half), generator=generator, dtype=torch.uint8)
    codes = torch.cat([left, 16 - left[..., mirrored]], -1).view(N, K)
    scale = torch.rand(groups, N, generator=generator) + 0.5
    scales = torch.stack([scale, torch.zeros_like(scale)], -1).bfloat16()
    rows = torch.randn(max(PROBED_ROWS), groups, half, generator=generator).bfloat16()
    x = torch.cat([rows, rows[..., mirrored]], -1).view(-1, K)
    weight = _packed(codes, 0)
    return orders(lambda some: _product(some, weight, group, scales), x)
