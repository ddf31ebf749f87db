"""PyTorch's own products with weights of 8 bits. (float16 and float32 rows take a scalar loop in the first.)"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import BFloat16, Float, Int8
from torch import Tensor

from ..invariance import PROBED_ROWS, orders
from .reference import rounded_rows

_FAST = ("AVX2", "AVX512")  # processors that the operator is written for; others take a scalar loop


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
    """w8a8: x is rounded too, in whatever dtype it comes. `weight`: in oneDNN's own layout, which alone is kept."""

    weight: Tensor
    scale: Float[Tensor, " N"]
    in_features: int

    def __call__(self, x: Float[Tensor, "T K"]) -> Float[Tensor, "T N"]:
        rounded, by = rounded_rows(x)
        return _scaled_sums(rounded, self.weight, self.scale).mul_(by).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Of what one call reads."""
        return len(self.scale) * self.in_features + self.scale.nbytes

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """The weight, rounded once to `dtype`: a row that is one at k and else zero picks column k out."""
        lone = torch.eye(self.in_features, dtype=torch.int8)
        return _scaled_sums(lone, self.weight, self.scale).t().to(dtype).contiguous()


def _scaled_sums(x: Int8[Tensor, "T K"], packed: Tensor, scale: Float[Tensor, " N"]) -> Float[Tensor, "T N"]:
    """Of integers, so that it does not matter to the result how many rows are taken at once. The product is written
    for bytes without a sign: with one, it takes a path that is 200 times slower."""
    nothing: list[float] = []
    shifted = x.view(torch.uint8) ^ 128
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(
        *(shifted, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", nothing, "")
    )


def pack_rounded(weight: Int8[Tensor, "N K"], scale: Float[Tensor, " N"]) -> PackedRounded | None:
    """None: here the product of integers is not exact (it saturates on some processors), or not on the CPU."""
    assert scale.shape == weight.shape[:1]
    if weight.device.type != "cpu" or not _exact(min(weight.shape[0], 64), weight.shape[1]):
        return None
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return PackedRounded(packed, scale.float().contiguous(), weight.shape[1])


@lru_cache(maxsize=1024)
def _exact(N: int, K: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (max(PROBED_ROWS), K), generator=generator, dtype=torch.int8)
    x[0], weight[0] = 127, -128  # the greatest sum
    want = (x.double() @ weight.double().T).float()
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        sums = [_scaled_sums(x[:rows], packed, torch.ones(N)) for rows in (1, *PROBED_ROWS)]
    except (RuntimeError, AttributeError, NotImplementedError):  # a build of PyTorch without oneDNN
        return False
    return all(torch.equal(each, want[: len(each)]) for each in sums)
