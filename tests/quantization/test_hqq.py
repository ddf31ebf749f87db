"""HQQ against its equations in loops of float64, and against rounding to nearest."""

import math

import pytest
import torch
from torch import Tensor

from decodelab.errors import UserError
from decodelab.quantization.hqq import HQQ
from decodelab.quantization.quantiser import settings_of
from decodelab.quantization.rtn import RTN


def heavy_tailed(N: int = 24, K: int = 128, seed: int = 0) -> Tensor:
    """Student's t with 3 degrees of freedom: most are small, some are far out."""
    g = torch.Generator().manual_seed(seed)
    squares = torch.randn(N, K, 3, generator=g).pow(2).mean(-1)
    return 0.05 * torch.randn(N, K, generator=g) / squares.sqrt()


def half(x: float) -> float:
    return float(torch.tensor(x).to(torch.float16))


def fitted(group: list[float], scale: float, top: int, turns: int) -> float:
    """The shift of a group. The two subproblems, by turns: e ← shrink(w − z), z ← mean(w − e − s · q), in steps."""
    p, beta, kappa = 0.7, 10.0, 1.01
    shift = kept = half(min(group))
    least = math.inf
    for _ in range(turns):
        codes = [min(max(round((w - shift) / scale), 0), top) for w in group]
        errors = [(w - shift) / scale - q for w, q in zip(group, codes, strict=True)]
        loss = sum(abs(x) ** p for x in errors)
        if loss < least:
            least, kept = loss, shift
        outliers = [math.copysign(max(0.0, abs(x) - abs(x) ** (p - 1) / beta), x) if x else 0.0 for x in errors]
        rest = [w - scale * (e + q) for w, e, q in zip(group, outliers, codes, strict=True)]
        shift = half(sum(rest) / len(rest))
        beta *= kappa
    return kept


@pytest.mark.parametrize(("bits", "group", "turns"), [(4, 32, 20), (3, 64, 20), (2, -1, 7), (4, 64, 1)])
def test_the_shift_is_that_of_the_equations(bits: int, group: int, turns: int) -> None:
    """A ragged last group too. Rounding in float32 may send a group of many another way at a tie."""
    weight = heavy_tailed(N=8, K=80)
    got = HQQ(bits, group, iterations=turns).layer(weight, None).codes
    width = 80 if group == -1 else group
    assert got.shift is not None
    same = 0
    for n in range(8):
        for g, at in enumerate(range(0, 80, width)):
            want = fitted(weight[n, at : at + width].tolist(), float(got.scale[n, g]), 2**bits - 1, turns)
            same += abs(float(got.shift[n, g]) - want) <= 1e-3 * float(got.scale[n, g])
    assert same >= got.shift.numel() - 1
    groups = weight.split(width, 1)
    spans = torch.stack([g.amax(1) - g.amin(1) for g in groups], 1)
    torch.testing.assert_close(got.scale.float(), spans / (2**bits - 1), rtol=2**-8, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_it_loses_less_than_rounding_to_nearest(bits: int, group: int) -> None:
    """By the norm that it is after, by the mean and by the mean square, where the tails are heavy."""
    weight = heavy_tailed()
    ours, rtn = (q.layer(weight, None).codes.dequantise() - weight for q in (HQQ(bits, group), RTN(bits, group)))
    for power in (0.7, 1.0, 2.0):
        assert ours.abs().pow(power).sum() < rtn.abs().pow(power).sum()


def test_turns_help_and_the_best_is_kept() -> None:
    losses = []
    for turns in (1, 2, 5, 20, 40):
        codes = HQQ(3, 32, iterations=turns).layer(heavy_tailed(), None).codes
        steps = (codes.dequantise() - heavy_tailed()) / codes.scale.float().repeat_interleave(32, 1)
        losses.append(float(steps.abs().pow(0.7).sum()))
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.97 * losses[0]


def test_values_of_one_sign_do_not_collapse() -> None:
    """In [1.0, 1.1], all of 16 codes are used, and no value is more than half a step and the shift's rounding off."""
    weight = 1 + 0.1 * torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    for sign in (1, -1):
        codes = HQQ().layer(sign * weight, None).codes
        assert len(codes.codes.unique()) == 16
        assert (codes.dequantise() - sign * weight).abs().max() < 0.6 * 0.1 / 15


def test_the_scale_of_the_weights_does_not_matter() -> None:
    """The norm works at any: the codes of W and of 8 W are the same."""
    one, other = (HQQ(3).layer(factor * heavy_tailed(), None).codes for factor in (1, 8))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(8 * one.scale, other.scale)


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0, 1e-8])
def test_groups_of_one_value(value: float) -> None:
    """AutoAWQ#519: nothing is divided by a range of 0."""
    weight = torch.full((2, 64), value)
    weight[1, 5] = 1.0
    back = HQQ().layer(weight, None).codes.dequantise()
    torch.testing.assert_close(back[0], weight[0], rtol=2**-11, atol=1e-7)
    assert torch.isfinite(back).all()


def test_weights_beyond_what_scales_hold_are_finite() -> None:
    weight = 1e7 * heavy_tailed()
    codes = HQQ().layer(weight, None).codes
    assert torch.isfinite(codes.dequantise()).all()


def test_settings() -> None:
    """An override is of its own keys."""
    with pytest.raises(UserError, match=r"quantization.iterations must be at least 1, got 0"):
        HQQ(iterations=0)
    with pytest.raises(UserError, match=r"overrides of a has clip: give none, or a mapping of bits, group_size"):
        settings_of(HQQ(overrides={"a": {"clip": True}}), "a")
    assert settings_of(HQQ(overrides={"a": {"bits": 8}}), "a") == HQQ(8)
