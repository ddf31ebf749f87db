"""Weights that were quantised before are known by their values."""

import pytest
import torch

from decodelab.quantization.dequantised import Stored, most_common, stored_grid
from decodelab.quantization.grid import Grid, round_to_nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128])
def test_a_grid_is_found(rng: torch.Generator, size: int, dtype: torch.dtype) -> None:
    """Also after the rounding of a 16-bit checkpoint."""
    weight = torch.randn(96, 512, generator=rng)
    codes = round_to_nearest(weight, Grid(4, size, symmetric=False))
    assert stored_grid(codes.dequantise().to(dtype)) == Stored(4, size)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_bits_are_found(rng: torch.Generator, bits: int) -> None:
    weight = torch.randn(96, 256, generator=rng)
    assert stored_grid(round_to_nearest(weight, Grid(bits, 32, symmetric=False)).dequantise()) == Stored(bits, 32)


def test_a_float_shift_is_a_grid_as_well(rng: torch.Generator) -> None:
    codes = torch.randint(0, 16, (64, 8, 32), generator=rng)
    weight = codes * torch.rand(64, 8, 1, generator=rng) + torch.randn(64, 8, 1, generator=rng)
    assert stored_grid(weight.reshape(64, 256)) == Stored(4, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_others_are_on_none(rng: torch.Generator, dtype: torch.dtype) -> None:
    assert stored_grid(torch.randn(64, 512, generator=rng).to(dtype)) is None
    assert stored_grid(torch.zeros(8, 64, dtype=dtype)) is None


def test_the_most_common_counts() -> None:
    a, b = Stored(4, 32), Stored(8, 32)
    assert most_common([a, b, None, b]) == (b, 2)
    assert most_common([None]) == (None, 0)
