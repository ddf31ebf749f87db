"""PyTorch's own products with weights of 8 bits. (float16 and float32 rows take a scalar loop in the first.)"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import BFloat16, Float, Int8, Int32
from torch import Tensor

from ..invariance import PROBED_ROWS, orders
from .reference import rounded_rows

_FAST = ("AVX2", "AVX512")  # processors that the operator is written for; others take a scalar loop
_ONE_BY_ONE = 3  # rows, up to which that is the fastest: a lone row's product of integers is a third of two rows'


def can_pack(dtype: torch.dtype, device: torch.device, K: int) -> bool:
    """K must be a multiple of 16: of other rows the operator reads past the end (pytorch#136709)."""
    fast = torch.backends.cpu.get_cpu_capability().startswith(_FAST)
    return dtype == torch.bfloat16 and device.type == "cpu" and fast and K % 16 == 0


@dataclass(frozen=True, slots=True)
class Packed:
    """`widen`: a lone row is fed twice."""

    weight: Int8[Tensor, "N K"]
    scale: BFloat16[Tensor, " N"]
    widen: bool

    def __call__(self, x: BFloat16[Tensor, "T K"]) -> BFloat16[Tensor, "T N"]:
        x, rows = x.contiguous(), x.shape[0]
        if self.widen and rows == 1:
            x = x.expand(2, -1).contiguous()
        return torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale)[:rows]

    @property
    def nbytes(self) -> int:
        """Of what one call reads."""
        return self.weight.nbytes + self.scale.nbytes

    def dense(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Float[Tensor, "n K"]:
        """The weight's rows start … stop − 1, as they are multiplied with, rounded once to `dtype`."""
        return (self.weight[start:stop] * self.scale[start:stop, None].float()).to(dtype)


def pack(weight: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]) -> Packed | None:
    """The scale is rounded to bfloat16, as the product takes it. None: here the product gives a row other bits beside
    other rows."""
    N, K = weight.shape
    assert K % 16 == 0
    assert scale.shape == (N,)
    lone, alike = _orders(N % 64, K, torch.get_num_threads())
    return Packed(weight.contiguous(), scale.bfloat16(), widen=not lone) if alike else None


@lru_cache(maxsize=1024)
def _orders(last: int, K: int, threads: int) -> tuple[bool, bool]:
    """As `orders`, of a weight whose last tile has `last` of 64 rows."""
    generator = torch.Generator().manual_seed(0)
    N, half = 128 + last, K // 2
    mirrored = torch.randperm(half, generator=generator)
    left = torch.randint(-127, 128, (N, half), generator=generator, dtype=torch.int8)
    weight = torch.cat([left, -left[:, mirrored]], 1)
    rows = torch.randn(max(PROBED_ROWS), half, generator=generator).bfloat16()
    scale = torch.ones(N, dtype=torch.bfloat16)
    x = torch.cat([rows, rows[:, mirrored]], 1)
    return orders(lambda some: torch.ops.aten._weight_int8pack_mm(some, weight, scale), x)


@dataclass(frozen=True, slots=True)
class PackedRounded:
    """w8a8: x is rounded too, in whatever dtype it comes."""

    weight: Int8[Tensor, "N K"]
    scale: Float[Tensor, " N"]

    def __call__(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        rounded, by = rounded_rows(x)
        return _sums(rounded, self.weight).float().mul_(by).mul_(self.scale).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Of what one call reads."""
        return self.weight.nbytes + self.scale.nbytes

    def dense(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Float[Tensor, "n K"]:
        """The weight's rows start … stop − 1, rounded once to `dtype`."""
        return (self.weight[start:stop] * self.scale[start:stop, None]).to(dtype)


def _sums(x: Int8[Tensor, "T K"], weight: Int8[Tensor, "N K"]) -> Int32[Tensor, "T N"]:
    """Of integers, so that it does not matter to the result how many rows are taken at once."""
    if 1 < len(x) <= _ONE_BY_ONE:
        return torch.cat([torch._int_mm(row, weight.t()) for row in x.split(1)])
    return torch._int_mm(x, weight.t())


def pack_rounded(weight: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]) -> PackedRounded | None:
    """None: here the product of integers is not exact (it saturates on some processors), or not on the CPU."""
    assert scale.shape == weight.shape[:1]
    if weight.device.type != "cpu" or not _exact(min(weight.shape[0], 64), weight.shape[1]):
        return None
    return PackedRounded(weight.contiguous(), scale.float())


@lru_cache(maxsize=1024)
def _exact(N: int, K: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (max(PROBED_ROWS), K), generator=generator, dtype=torch.int8)
    x[0], weight[0] = 127, -128  # the greatest sum
    want = x.double() @ weight.double().T
    return all(torch.equal(_sums(x[:rows], weight).double(), want[:rows]) for rows in (1, *PROBED_ROWS))
