"""GPTQ against its definition, and where others' went wrong."""

import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decodelab.errors import UserError
from decodelab.quantization import gptq
from decodelab.quantization.codes import Codes
from decodelab.quantization.gptq import GPTQ
from decodelab.quantization.quantiser import Calibration, Inputs
from decodelab.quantization.rtn import RTN
from decodelab.quantization.sequential import output_error

MODES = list(product((False, True, "groups"), (False, True)))  # act_order, static_groups


def problem(N: int, K: int, tokens: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(weight [N, K], inputs [tokens, K]) whose columns are correlated and of unlike size."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, K, generator=draw) @ torch.randn(K, K, generator=draw) / K**0.5
    common = torch.randn(tokens, 1, generator=draw) * torch.randn(K, generator=draw)
    sizes = torch.randn(K, generator=draw).exp()
    return torch.randn(N, K, generator=draw) * 0.1, (mixed + common) * sizes


def brain_surgeon(weight: Tensor, hessian: Tensor, settings: GPTQ) -> tuple[Tensor, int]:
    """(the weight as it becomes, how often a code was cut off at an end of its range) by the definition: column by
    column, what is not rounded yet takes the values that lose least of the output, given all that is. They are solved
    for anew each time, in float64."""
    W, H = weight.double(), hessian.double()
    K, grid = W.shape[1], settings.grid
    width = grid.width(K)
    order = H.diagonal().argsort(descending=True, stable=True) if settings.act_order else torch.arange(K)
    if settings.act_order == "groups":
        starts = range(0, K, width)
        rank = sorted(starts, key=lambda g: (g + width > K, -float(H.diagonal()[g : g + width].sum())))
        order = torch.cat([order[(order >= g) & (order < g + width)] for g in rank])
    H = H + settings.damping * H.diagonal().mean() * torch.eye(K)
    left = [float(1 / torch.linalg.inv(H[order[j:]][:, order[j:]])[0, 0]) for j in range(K)]
    weighs = torch.empty(K)  # a column's squared error, when all behind it make up for it
    weighs[order] = torch.tensor(left)
    now, out, cut = W.clone(), W.clone(), 0
    for j, k in enumerate(order.tolist()):
        done, rest = order[:j], order[j:]
        now[:, rest] = W[:, rest] + (W - out)[:, done] @ H[done][:, rest] @ torch.linalg.inv(H[rest][:, rest])
        if settings.static_groups:
            start = k // width * width
            scale, zero = (
                part.double() for part in grid.ranges(weight[:, start : start + width], weighs[start : start + width])
            )
        elif j % width == 0:
            some = order[j : j + width]
            scale, zero = (part.double() for part in grid.ranges(now[:, some].float(), weighs[some]))
        wanted = (now[:, k] / scale + zero).round()
        code = wanted.clamp(0, 2**settings.bits - 1)
        cut += int((code != wanted).sum())
        out[:, k] = scale * (code - zero)
    return out, cut


def same(a: Codes, b: Codes) -> bool:
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.column_groups, b.column_groups)
        and torch.equal(a.dequantise(), b.dequantise())
    )


@pytest.mark.parametrize(("act_order", "static_groups"), MODES)
@pytest.mark.parametrize(
    ("K", "keys"),
    [
        (8, {"bits": 4, "group_size": -1}),
        (8, {"bits": 3, "group_size": 8, "symmetric": True, "damping": 0.1}),
        (32, {"bits": 2, "group_size": 8}),
        (44, {"bits": 4, "group_size": 16, "clip": True}),  # the last group has 12 columns
    ],
)
def test_each_column_is_rounded_where_the_output_loses_least(K, keys, act_order, static_groups):
    """mlx-lm#1878, cactus#807: indices that are wrong do not raise."""
    weight, x = problem(8, K)
    seen = Inputs.of([x])
    settings = GPTQ(**keys, act_order=act_order, static_groups=static_groups, block_size=8)
    made = settings.layer(weight, seen)
    wanted, _ = brain_surgeon(weight, seen.hessian, settings)
    assert made.notes == ()
    torch.testing.assert_close(made.codes.dequantise(torch.float64), wanted, rtol=0, atol=1e-12)


def test_a_heavy_last_group_that_is_shorter_stays_last():
    weight, x = problem(8, 44)
    x[:, 32:] *= 10
    seen = Inputs.of([x])
    settings = GPTQ(group_size=16, act_order="groups", static_groups=False, block_size=8)
    wanted, _ = brain_surgeon(weight, seen.hessian, settings)
    made = settings.layer(weight, seen).codes.dequantise().double()
    assert torch.allclose(made, wanted, atol=1e-5)


def test_a_code_stays_within_its_bits():
    """What corrections carry over an end of the range stays at that end (GPTQModel#2963)."""
    weight, x = problem(8, 16)
    seen, settings = Inputs.of([x]), GPTQ(bits=2, group_size=-1)
    wanted, cut = brain_surgeon(weight, seen.hessian, settings)
    assert cut > 0
    codes = settings.layer(weight, seen).codes
    assert codes.codes.max() == 3
    torch.testing.assert_close(codes.dequantise(torch.float64), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("act_order", "static_groups"), MODES)
@pytest.mark.parametrize("group_size", [-1, 16, 64])
def test_the_size_of_blocks_does_not_change_the_codes(group_size, act_order, static_groups):
    weight, x = problem(16, 200)
    seen = Inputs.of([x])
    settings = GPTQ(group_size=group_size, act_order=act_order, static_groups=static_groups)
    made = [replace(settings, block_size=size).layer(weight, seen).codes for size in (1, 16, 64, 128)]
    assert all(same(made[0], other) for other in made[1:])


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("act_order", "static_groups"), MODES)
def test_the_output_loses_less_than_by_rounding_to_nearest(bits, act_order, static_groups):
    """keras#23512: what was called GPTQ rounded to nearest."""
    weight, x = problem(32, 128, tokens=1024)
    seen = Inputs.of([x])
    made = GPTQ(bits=bits, act_order=act_order, static_groups=static_groups).layer(weight, seen)
    nearest = RTN(bits=bits).layer(weight, seen)
    assert seen.hessian.diagonal().min() > 0
    assert not torch.equal(made.codes.codes, nearest.codes.codes)
    assert output_error(weight, made.codes, seen) < 0.6 * output_error(weight, nearest.codes, seen)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [-1, 8, 32, 128])
def test_all_bits_and_groups(bits, symmetric, group_size):
    weight, x = problem(16, 72)
    seen = Inputs.of([x])
    keys = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "clip": False}
    codes = GPTQ(**keys).layer(weight, seen).codes
    nearest = RTN(**keys).layer(weight, seen).codes
    assert (codes.bits, codes.symmetric, int(codes.codes.max()) < 2**bits) == (bits, symmetric, True)
    assert torch.equal(codes.scale, nearest.scale)
    assert codes.groups is None
    assert output_error(weight, codes, seen) < output_error(weight, nearest, seen)


def test_in_another_order_groups_are_of_that_order():
    weight, x = problem(8, 40)
    seen = Inputs.of([x])
    order = seen.hessian.diagonal().argsort(descending=True, stable=True)
    codes = GPTQ(group_size=16, static_groups=False).layer(weight, seen).codes
    assert codes.groups is not None
    assert codes.groups[order].tolist() == [k // 16 for k in range(40)]


@pytest.mark.parametrize("static_groups", [False, True])
def test_columns_that_matter_alike_stay_in_order(static_groups):
    weight, x = problem(8, 64)
    hessian = torch.corrcoef(x.T).fill_diagonal_(1)
    seen = replace(Inputs.of([x]), hessian=hessian)
    settings = GPTQ(group_size=16, static_groups=static_groups)
    made = settings.layer(weight, seen).codes
    assert made.groups is None
    assert same(made, replace(settings, act_order=False).layer(weight, seen).codes)


@pytest.mark.parametrize(("act_order", "static_groups"), MODES)
@pytest.mark.parametrize("by", [100.0, 1e-4])
def test_the_size_of_the_inputs_does_not_change_the_codes(by, act_order, static_groups):
    weight, x = problem(16, 64)
    x[:, 5] = 0
    settings = GPTQ(group_size=16, act_order=act_order, static_groups=static_groups)
    assert same(settings.layer(weight, Inputs.of([x])).codes, settings.layer(weight, Inputs.of([by * x])).codes)


def test_large_inputs_in_half_precision_do_not_overflow():
    weight, x = problem(8, 32)
    x = (x * 300 / x.std()).half()
    made = GPTQ(group_size=16).layer(weight, Inputs.of([x]))
    assert made.notes == ()
    assert same(made.codes, GPTQ(group_size=16).layer(weight, Inputs.of([x.float()])).codes)


@pytest.mark.parametrize(("act_order", "static_groups"), MODES)
def test_columns_without_input_are_rounded(act_order, static_groups):
    """TICO#412: they were zeroed, and what the calibration text had not used was lost."""
    weight, x = problem(16, 64)
    x[:, [3, 40]] = 0
    settings = GPTQ(group_size=16, act_order=act_order, static_groups=static_groups, clip=False)
    made = settings.layer(weight, Inputs.of([x]))
    assert made.notes == ()
    codes = made.codes
    back, step = codes.dequantise(), codes.scale.float()[:, codes.column_groups]
    low, high = (step * (end - codes.zero[:, codes.column_groups].float()) for end in (0, 15))
    nearest = torch.minimum(torch.maximum(weight, low), high)
    for dead in (3, 40):
        assert ((back - nearest)[:, dead].abs() <= 0.51 * step[:, dead]).all()
        assert back[:, dead].abs().sum() > 0
    if static_groups:
        assert torch.equal(codes.codes[:, [3, 40]], RTN(group_size=16).layer(weight, None).codes.codes[:, [3, 40]])


def test_a_group_all_above_zero_keeps_its_values():
    weight, x = 1 + 0.1 * torch.rand(4, 16, generator=torch.Generator().manual_seed(0)), problem(4, 16)[1]
    codes = GPTQ(group_size=16).layer(weight, Inputs.of([x])).codes
    assert (codes.dequantise() - 1.05).abs().max() < 0.12


def test_damping_that_is_too_little_is_raised_and_noted():
    """One direction of input alone: AutoGPTQ#98, AutoGPTQ#572, llm-compressor#142."""
    weight, x = problem(8, 32)
    seen = Inputs.of([x[:1]])
    settings = GPTQ(group_size=16, damping=0.0)
    made = settings.layer(weight, seen)
    assert made.notes == ("damping raised from 0.0 to 0.001",)
    assert same(made.codes, replace(settings, damping=0.001).layer(weight, seen).codes)
    assert output_error(weight, made.codes, seen) < output_error(
        weight, RTN(group_size=16).layer(weight, seen).codes, seen
    )
    assert replace(settings, damping=0.01).layer(weight, seen).notes == ()


def test_without_damping_what_is_left_of_two_like_columns_is_noise():
    weight, x = problem(4, 8)
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1 - 2**-24  # as near to 1 as float32 comes
    made = GPTQ(group_size=8, damping=0.0).layer(weight, replace(Inputs.of([x]), hessian=hessian))
    assert made.notes == ("damping raised from 0.0 to 0.001",)


def test_columns_without_input_need_no_damping():
    weight, x = problem(4, 16)
    x[:, 3] = 0
    assert GPTQ(group_size=8, damping=0.0).layer(weight, Inputs.of([x])).notes == ()


def test_what_cannot_be_done_is_rounded_to_nearest_and_noted():
    weight, x = problem(8, 32)
    seen, settings = Inputs.of([x]), GPTQ(group_size=16)
    indefinite = torch.full((32, 32), -3.0).fill_diagonal_(1.0)
    for hessian, note in (
        (indefinite, "the Hessian is not positive definite at a damping of 0.01, 0.1, 1.0: rounded to nearest"),
        (torch.zeros(32, 32), "no input was seen: rounded to nearest"),
        (seen.hessian / 0, "its inputs are not finite: rounded to nearest"),
    ):
        made = settings.layer(weight, replace(seen, hessian=hessian))
        assert made.notes == (note,)
        assert same(made.codes, RTN(group_size=16, clip=True).layer(weight, None).codes)


def test_ranges_are_cut_by_what_the_output_loses():
    weight, x = problem(32, 128, tokens=1024)
    seen = Inputs.of([x])
    whole, cut = (output_error(weight, GPTQ(clip=clip).layer(weight, seen).codes, seen) for clip in (False, True))
    assert cut < whole


def test_a_wide_layer_is_decomposed_in_single_precision(monkeypatch):
    weight, x = problem(16, 96)
    seen, settings = Inputs.of([x]), GPTQ(group_size=32)
    double = settings.layer(weight, seen).codes
    monkeypatch.setattr(gptq, "_DOUBLE", 64)
    assert gptq.inverse_factor(seen.hessian, 0.01).dtype == torch.float32
    single = settings.layer(weight, seen).codes
    assert (single.codes != double.codes).float().mean() < 0.01
    assert output_error(weight, single, seen) == pytest.approx(output_error(weight, double, seen), rel=0.02)


def test_a_text_of_fewer_tokens_than_columns_is_warned_of():
    """AutoGPTQ#753: one sentence."""
    settings = GPTQ(calibration=Calibration(tokens=700, length=64))  # pieces of 640 in all
    assert settings.check({"a": (64, 576), "b": (8, 640)}) == []
    assert settings.check({"a": (64, 576), "b": (8, 641), "c": (64, 1536)}) == [
        "quantization.calibration.tokens=700 are fewer than the inputs of 2 layers (of c: 1536), which are then fitted "
        "to noise: give more"
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"damping": -0.1}, r"quantization\.damping must be 0 or more, such as 0\.01, got -0\.1"),
        ({"damping": float("nan")}, r"quantization\.damping must be 0 or more"),
        ({"block_size": 0}, r"quantization\.block_size must be at least 1, got 0"),
        ({"block_size": 48}, r"block_size=48 and quantization\.group_size=64: one must divide the other"),
        ({"act_order": "group"}, r"quantization\.act_order must be true, false or groups, got 'group'"),
        ({"bits": 9}, r"quantization\.bits must be 2 to 8, got 9"),
        ({"group_size": 24}, r"quantization\.group_size must be -1 for a whole row, or a power of two"),
    ],
)
def test_settings_that_are_refused(keys, told):
    with pytest.raises(UserError, match=told):
        GPTQ(**keys)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[at._cdata] = at.nbytes()
                weakref.finalize(at, self.sizes.pop, at._cdata, 0)
        self.most = max(self.most, sum(self.sizes.values()))
        return found


@pytest.mark.parametrize(("N", "K", "most"), [(8, 256, 32), (512, 128, 12 + 28 * 4)])
def test_it_takes_the_memory_that_it_says(N: int, K: int, most: int, rng: torch.Generator) -> None:
    weight, seen = torch.randn(N, K, generator=rng), Inputs.of([torch.randn(2 * K, K, generator=rng)])
    with Live() as live:
        GPTQ().layer(weight, seen)
    assert 0.75 * most < live.most / K**2 < 1.1 * most
