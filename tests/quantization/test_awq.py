"""AWQ against searches written out over the rows themselves, and against rounding to nearest."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from decodelab.errors import UserError
from decodelab.quantization.awq import AWQ
from decodelab.quantization.codes import Codes
from decodelab.quantization.grid import Grid
from decodelab.quantization.quantiser import Inputs, settings_of
from decodelab.quantization.rtn import RTN
from decodelab.quantization.sequential import output_error, quantise

K = 48


def salient(seed: int = 0, rows: int = 200) -> Tensor:
    """Inputs that hang together, of which a few columns are large."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=g) @ (torch.eye(K) + 0.1 * torch.randn(K, K, generator=g))
    x[:, torch.randperm(K, generator=g)[:3]] *= 30
    return x


def weights(seed: int = 0, *heights: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(N, K, generator=g) * 0.05 for N in heights or (24, 8)]


def whatever(by: Tensor) -> Tensor:
    return by


def relative(x: Tensor, weight: Tensor, back: Tensor) -> float:
    """‖(W − Ŵ) x‖² / ‖W x‖², over the rows."""
    x, weight, back = x.double(), weight.double(), back.double()
    return float((x @ (weight - back).T).pow(2).sum() / (x @ weight.T).pow(2).sum())


def rounded(settings: AWQ, weight: Tensor) -> Tensor:
    return RTN(settings.bits, settings.group_size, settings.symmetric).layer(weight, None).codes.dequantise()


@pytest.mark.parametrize(
    "settings",
    [AWQ(group_size=16), AWQ(3, 32), AWQ(4, 16, symmetric=True), AWQ(2, -1), AWQ(group_size=16, duo=True)],
    ids=lambda settings: f"W{settings.bits}g{settings.group_size}{' sym' * settings.symmetric}{' duo' * settings.duo}",
)
def test_it_loses_less_than_rounding_to_nearest(settings: AWQ) -> None:
    """Where some columns meet large inputs: half after the scales, and less after the cuts, in each row."""
    x, layers = salient(), weights()
    by = settings.scale([(settings, w) for w in layers], Inputs.of([x]), whatever)
    assert by is not None
    seen = Inputs.of([x / by])
    plain = sum(relative(x, w, rounded(settings, w)) for w in layers)
    scaled = sum(relative(x / by, w * by, rounded(settings, w * by)) for w in layers)
    assert scaled < 0.5 * plain
    for w in layers:
        cut = settings.layer(w * by, seen).codes.dequantise()
        before, after = ((x / by @ (w * by - b).T).pow(2).sum(0) for b in (rounded(settings, w * by), cut))
        assert bool((after <= before * (1 + 1e-5)).all())
        assert after.sum() < 0.95 * before.sum()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(4, 16), (3, 32), (2, -1), (8, 64)])
def test_it_is_never_worse_than_rounding_to_nearest_on_the_text(seed: int, shape: tuple[int, int]) -> None:
    """Without any column that stands out, ragged groups among them; in 8 bits too, where little is to be gained."""
    x = torch.randn(100, K, generator=torch.Generator().manual_seed(seed))
    settings = AWQ(*shape, symmetric=bool(seed % 2))
    layers = weights(seed)
    by = settings.scale([(settings, w) for w in layers], Inputs.of([x]), whatever)
    by = torch.ones(K) if by is None else by
    seen = Inputs.of([x / by])
    ours = sum(relative(x / by, w * by, settings.layer(w * by, seen).codes.dequantise()) for w in layers)
    assert ours <= sum(relative(x, w, rounded(settings, w)) for w in layers) * (1 + 1e-5)


def tried_scales(x: Tensor, layers: list[Tensor], settings: AWQ) -> list[Tensor]:
    """By the paper's equations 4 and 5, and with the weights' magnitude as its code has it."""
    mean = (x.abs().mean(0) / x.abs().mean()).clamp_min(1e-4)
    found = []
    for i in range(settings.grid):
        found.append(mean ** (i / settings.grid))
        if settings.duo:
            stacked = torch.cat(layers)
            groups = [stacked[:, a:b] for a, b in pairwise(range(0, K + 1, settings.group_size))]
            shares = torch.cat([g.abs() / g.abs().amax(1, keepdim=True) for g in groups], 1).mean(0)
            found.append(mean ** (i / settings.grid) / (shares / shares.mean()) ** (1 - i / settings.grid))
    return [by / (by.max() * by.min()).sqrt() for by in found]


def in_pairs(by: Tensor) -> Tensor:
    return by.view(-1, 2).mean(1).repeat_interleave(2)


@pytest.mark.parametrize("duo", [False, True])
@pytest.mark.parametrize("feasible", [whatever, in_pairs])
def test_the_scale_is_the_best_of_those_that_can_be_moved(feasible: Callable[[Tensor], Tensor], duo: bool) -> None:
    """Against a search over the rows themselves; each layer is weighed as it will be quantised."""
    x, layers = salient(), weights()
    settings = AWQ(group_size=16, grid=8, duo=duo)
    each = [settings, replace(settings, bits=2)]
    by = settings.scale(list(zip(each, layers, strict=True)), Inputs.of([x]), feasible)

    def loss(by: Tensor) -> float:
        return sum(relative(x / by, w * by, rounded(q, w * by)) for q, w in zip(each, layers, strict=True))

    tried = [feasible(each) for each in tried_scales(x, layers, settings)]
    best = min(tried, key=loss)
    assert by is not None
    torch.testing.assert_close(by, best, rtol=1e-4, atol=0)
    assert not torch.allclose(best, tried[0])
    late = feasible(min(tried_scales(x, layers, settings), key=loss))
    assert loss(by) <= loss(late) * (1 + 1e-5)


def test_ranges_are_cut_group_by_group_given_the_other_groups() -> None:
    """Against loops over rows, groups and shares, which look at the outputs themselves."""
    x, (weight,) = salient(rows=60).double(), weights(1, 4)
    grid = Grid(3, 16, symmetric=False)
    got = AWQ(3, 16).layer(weight, Inputs.of([x])).codes
    for n in range(4):
        back = RTN(3, 16).layer(weight[n : n + 1], None).codes.dequantise()[0].double()
        for at in range(0, K, 16):
            group = weight[n : n + 1, at : at + 16]
            options = [back]
            for i in range(1, 11):
                share = 1 - 0.05 * i
                scale, zero = grid.of_range(share * group.amin(1), share * group.amax(1))
                codes = grid.codes(group, scale[:, None], zero[:, None])
                option = back.clone()
                option[at : at + 16] = scale.double() * (codes[0].double() - zero.double())
                options.append(option)
            back = min(options, key=lambda option: float((x @ (weight[n].double() - option)).pow(2).sum()))
        torch.testing.assert_close(got.dequantise(torch.float64)[n], back, rtol=0, atol=1e-12)


@dataclass(eq=False)
class Fixed:
    """Layers that read x, which cannot be divided."""

    x: Tensor
    weights: dict[str, Tensor]
    codes: dict[str, Codes] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.weights)

    @property
    def stages(self) -> "tuple[Fixed]":
        return (self,)

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def put(self, name: str, codes: Codes) -> None:
        self.codes[name] = codes

    def inputs(self, sink=1.0):  # type: ignore[no-untyped-def]
        yield self.x

    def feasible(self, by: Tensor) -> None:
        return None

    def scale(self, by: Tensor) -> None:
        raise AssertionError("it cannot be scaled")

    def advance(self) -> None: ...


def test_without_scales_and_cuts_it_is_rounding_to_nearest() -> None:
    """A stage whose input cannot be divided says so in each layer's report."""
    layers = dict(zip(("a", "b"), weights(), strict=True))
    block = Fixed(salient(), layers)
    reports = list(quantise(block, dict.fromkeys(layers, AWQ(group_size=16, clip=False))))
    assert [report.notes for report in reports] == 2 * [
        ("its input's scale is left as it is: what it comes from cannot be divided",)
    ]
    for report in reports:
        want = RTN(group_size=16).layer(layers[report.name], None).codes
        got = block.codes[report.name]
        assert got.zero is not None
        assert want.zero is not None
        for part, other in ((got.codes, want.codes), (got.scale, want.scale), (got.zero, want.zero)):
            assert torch.equal(part, other)
        assert report.error == pytest.approx(relative(block.x, layers[report.name], want.dequantise()), rel=1e-4)


def test_queries_and_keys_are_not_cut() -> None:
    """As in the paper's code; an override of theirs decides anew."""
    at = "model.layers.3.self_attn."
    for settings in (AWQ(), AWQ(bits=3)):
        clips = {name: settings_of(settings, at + name).clip for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        assert clips == {"q_proj": False, "k_proj": False, "v_proj": True, "o_proj": True}


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e8])
def test_how_large_inputs_are_does_not_matter(size: float) -> None:
    """llm-awq#96, GPTQModel#2331: nothing is NaN or infinite. The scales are the same, unless all squares are 0."""
    x, layers = salient(), weights()
    settings = AWQ(group_size=16)
    want = settings.scale([(settings, w) for w in layers], Inputs.of([x]), whatever)
    by = settings.scale([(settings, w) for w in layers], Inputs.of([x * size]), whatever)
    assert want is not None
    if size == 1e-30:
        assert by is None
    else:
        torch.testing.assert_close(by, want)
    made = settings.layer(layers[0], Inputs.of([x * size]))
    assert made.notes == ()
    assert torch.isfinite(made.codes.scale).all()


def test_inputs_beyond_float32_are_said() -> None:
    settings, (weight, _) = AWQ(group_size=16), weights()
    seen = Inputs.of([salient() * 1e25])
    assert settings.scale([(settings, weight)], seen, whatever) is None
    for made in (settings.layer(weight, seen), replace(settings, clip=False).layer(weight, seen)):
        assert made.notes == ("its inputs are too large for float32: rounded to nearest",)
        assert torch.equal(made.codes.codes, RTN(group_size=16).layer(weight, None).codes.codes)


def test_columns_without_input_and_groups_of_zeros() -> None:
    """llm-awq#96, AutoAWQ#519: a column that the text never reaches keeps its weights as rounding to nearest would
    have them, not scaled down to nothing; a group of zeros stays one."""
    x, layers = salient(), weights()
    x[:, [2, 20]] = 0
    for weight in layers:
        weight[:, 32:] = 0
    for settings in (AWQ(group_size=16), AWQ(group_size=16, duo=True), AWQ(3, -1, symmetric=True)):
        by = settings.scale([(settings, w) for w in layers], Inputs.of([x]), whatever)
        assert by is not None
        assert torch.equal(by[[2, 20]], torch.ones(2))
        assert bool(torch.isfinite(by).all() & (by > 0).all())
        for weight in layers:
            made = settings.layer(weight * by, Inputs.of([x / by])).codes
            back = made.dequantise() / by
            assert torch.isfinite(back).all()
            assert torch.equal(back[:, 32:], torch.zeros_like(back[:, 32:])) or settings.group_size == -1
            assert (back - weight)[:, [2, 20]].abs().max() < made.scale.float().max()
    nothing = Inputs.of([torch.zeros(10, K)])
    assert AWQ().scale([(AWQ(), layers[0])], nothing, whatever) is None
    assert output_error(layers[0], AWQ().layer(layers[0], nothing).codes, nothing) == 0


def test_settings_that_are_refused() -> None:
    with pytest.raises(UserError, match=r"quantization.grid must be at least 1, got 0"):
        AWQ(grid=0)
    with pytest.raises(UserError, match=r"quantization.bits must be 2 to 8, got 1"):
        AWQ(bits=1)
