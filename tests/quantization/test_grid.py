"""Grids: ranges, scales and zeros of groups, and the nearest codes."""

import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.grid import Grid, check_grid, round_to_nearest


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "row", [[1.0, 1.05, 1.1, 1.02], [-3.0, -2.9, -2.0, -2.5], [0.0, 5.0, 1.0, 2.0], [-1.0, 1.0, 0.3, -0.2]]
)
def test_zero_is_always_on_the_grid(row: list[float], symmetric: bool) -> None:
    """A group all above 0 keeps its values (AWQ's formula made [1, 1.1] into 0.1), and 0 has a code."""
    weight = torch.tensor([[*row, 0.0]])
    codes = round_to_nearest(weight, Grid(4, -1, symmetric))
    back = codes.dequantise()
    assert float(back[0, -1]) == 0.0
    at_most = 1.0 if symmetric else 0.5  # of a step: the greatest weight of a symmetric range loses half a step more
    assert float((back - weight).abs().max()) <= at_most * float(codes.scale.max()) * 1.01


def test_the_symmetric_range_is_from_the_lowest_code_to_half_a_step_below_the_greatest_weight() -> None:
    """2 · max|w| / (2^bits − 1) a step, zero at 2^(bits − 1): quantisers differ in this, so it is stated."""
    codes = round_to_nearest(torch.tensor([[-7.5, 7.5, 1.0, 0.0]]), Grid(4, -1, symmetric=True))
    assert (float(codes.scale), int(codes.zero), codes.codes.tolist()) == (1.0, 8, [[0, 15, 9, 8]])


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_stays_zero(symmetric: bool) -> None:
    """AutoAWQ#577: no 0 ÷ 0."""
    codes = round_to_nearest(torch.zeros(2, 16), Grid(4, 8, symmetric))
    assert torch.equal(codes.dequantise(), torch.zeros(2, 16))
    assert bool((codes.scale > 0).all())


@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_tiny_and_huge_groups_stay_finite(size: float, rng: torch.Generator) -> None:
    """A scale is neither 0 nor infinite as it is stored."""
    weight = size * torch.randn(2, 16, generator=rng)
    codes = round_to_nearest(weight, Grid(4, 8, symmetric=False))
    assert bool((codes.scale > 0).all() and codes.scale.isfinite().all() and codes.dequantise().isfinite().all())


def test_a_last_group_may_be_shorter(rng: torch.Generator) -> None:
    """Its scale is of the columns that it has: a filling of zeros would not change it, 0 being in any range."""
    weight = torch.randn(3, 21, generator=rng)
    whole = round_to_nearest(weight, Grid(4, 8, symmetric=False))
    alone = round_to_nearest(weight[:, 16:], Grid(4, -1, symmetric=False))
    assert whole.scale.shape == (3, 3)
    assert torch.equal(whole.dequantise()[:, 16:], alone.dequantise())


@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_is_never_worse_by_its_own_error(rng: torch.Generator, symmetric: bool) -> None:
    weight = torch.randn(8, 64, generator=rng)
    weight[:, 5] *= 9  # an outlier
    lost = [
        (round_to_nearest(weight, Grid(3, 32, symmetric, clip)).dequantise() - weight).abs().pow(2.4)
        for clip in (False, True)
    ]
    per_group = [x.view(8, 2, 32).sum(-1) for x in lost]
    assert bool((per_group[1] <= per_group[0] + 1e-6).all())
    assert float(lost[1].sum()) < 0.97 * float(lost[0].sum())


def test_codes_are_the_nearest_by_the_scale_that_is_stored(rng: torch.Generator) -> None:
    weight = torch.randn(4, 32, generator=rng)
    codes = round_to_nearest(weight, Grid(8, 16, symmetric=False))
    at = codes.column_groups
    scale, zero = codes.scale.double()[:, at], codes.zero.double()[:, at]
    every = scale[..., None] * (torch.arange(256).double() - zero[..., None])
    best = (every - weight.double()[..., None]).abs().amin(-1)
    assert torch.allclose((codes.dequantise(torch.float64) - weight.double()).abs(), best, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("bits", "size", "told"),
    [
        (1, 32, "quantization.bits must be 2 to 8, got 1"),
        (9, 32, "quantization.bits must be 2 to 8, got 9"),
        (4, 0, "quantization.group_size must be -1 for a whole row, or a power of two from 8 up, got 0"),
        (4, 96, "quantization.group_size must be -1 for a whole row, or a power of two from 8 up, got 96"),
    ],
)
def test_other_grids_are_refused(bits: int, size: int, told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}$"):
        check_grid(bits, size)


def test_small_weights_keep_their_eight_bits(rng: torch.Generator) -> None:
    """A scale below float16's least normal number, 6.1e-5, is stored all the same."""
    weight = 0.001 * torch.randn(16, 256, generator=rng)
    back = round_to_nearest(weight, Grid(8, -1, symmetric=True)).dequantise()
    assert float((back - weight).norm() / weight.norm()) < 0.01
