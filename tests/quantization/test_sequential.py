"""A block is quantised stage by stage, each from what came through all that was quantised before it."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from decodelab.decoding.model.calibrated import CalibratedBlock, passages
from decodelab.decoding.model.config import ModelConfig
from decodelab.errors import UserError
from decodelab.quantization.codes import Codes, Scheme
from decodelab.quantization.formats.gptq import GPTQFormat
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.quantization.quantiser import Calibration, Inputs, Quantised, Quantiser, settings_of
from decodelab.quantization.rtn import RTN
from decodelab.quantization.sequential import Report, output_error, quantise
from decodelab.tests.decoding.model.checkpoints import tiny_model
from decodelab.tests.enumeration import unchecked

PIECES = [[5, 9, 33, 7, 20, 41, 8, 2], [4, 4, 58, 21, 6, 30, 12, 250]]
ORDER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
ORDER += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)


@dataclass(frozen=True)
class Recorder:
    """Two bits, so that what follows shows it; keeps what each layer was given."""

    given: list[tuple[Tensor, Inputs | None]] = field(default_factory=list)
    overrides: ClassVar[dict] = {}
    calibration: ClassVar[Calibration] = Calibration()
    kind: ClassVar[str] = "recorder"
    sink: ClassVar[float] = 32.0

    def check(self, shapes: object) -> list[str]:
        return []

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        return Grid(2, -1, symmetric=False).scheme(shape)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        self.given.append((weight, seen))
        return Quantised(round_to_nearest(weight, Grid(2, -1, symmetric=False)))


def blocks() -> list[CalibratedBlock]:
    model = tiny_model()
    tensors = model.state_dict()
    text = passages(PIECES, tensors["model.embed_tokens.weight"])
    return [CalibratedBlock(ModelConfig.from_hf(model.config), layer, tensors, text) for layer in range(2)]


def names(block: CalibratedBlock) -> list[str]:
    return [name for stage in block.stages for name in stage.names]


def test_each_stage_reads_what_has_come_through_the_quantised_ones_before_it() -> None:
    """Against modules of transformers into which the dequantised weights are put, layer by layer."""
    model, recorder = tiny_model(), Recorder()
    assert isinstance(recorder, Quantiser)
    for layer, block in enumerate(blocks()):
        at = f"model.layers.{layer}."
        for number, report in enumerate(quantise(block, dict.fromkeys(names(block), recorder))):
            assert report.name == at + ORDER[number]
            weight, seen = recorder.given[-1]
            module = model.get_submodule(report.name)
            assert torch.equal(weight, module.weight)
            fed: list[Tensor] = []
            hook = module.register_forward_pre_hook(lambda _, given, fed=fed: fed.append(given[0][0]))
            with torch.no_grad():
                for piece in PIECES:
                    model(torch.tensor([piece]))
            hook.remove()
            if number < 3:  # what the recorder asks for, where keys and values are made
                for piece in fed:
                    piece[0] *= 32**0.5
            x = torch.cat(fed)
            assert torch.allclose(seen.hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-4)
            assert torch.allclose(seen.magnitude, x.abs().mean(0), atol=1e-4)
            assert float(seen.hessian.sum().abs()) > 0  # keras#23512: hooks that never fired
            if number in (2, 3, 5, 6):  # the last of its stage: those beside it read the same
                for name, codes in block.codes.items():
                    model.get_submodule(name).weight.data = codes.dequantise()
        block.advance()  # the text that the blocks share


def test_nothing_is_read_for_who_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = blocks()
    monkeypatch.setattr(CalibratedBlock, "inputs", lambda *_: pytest.fail("read"))
    reports = list(quantise(block, {name: RTN() for name in names(block)}))
    assert [report.name.split(".", 3)[-1] for report in reports] == ORDER
    assert all(report.error > 0 for report in reports)


def test_errors_are_of_what_a_format_keeps() -> None:
    """Version 1 of GPTQ has no zero point of 0, as weights from 0 up have."""
    told: dict[str, tuple[Report, Codes]] = {}
    for form in (GPTQFormat(1), GPTQFormat(2)):
        block, _ = blocks()
        block.tensors[(name := "model.layers.0.mlp.up_proj") + ".weight"].abs_()
        for report in quantise(block, {each: RTN(group_size=16) for each in names(block)}, form.fit):
            if report.name == name:
                codes = block.codes[name]
                assert report.error == output_error(block.tensors[f"{name}.weight"], codes, None)
                told[form.title] = report, codes
    assert not torch.equal(told["gptq"][1].zero, told["gptq_v2"][1].zero)
    assert told["gptq"][0].error > 1.01 * told["gptq_v2"][0].error
    assert [len(report.notes) for report, _ in told.values()] == [1, 0]


def test_weights_that_are_not_finite_are_refused() -> None:
    block, _ = blocks()
    block.tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is not finite: the checkpoint"):
        list(quantise(block, {name: RTN() for name in names(block)}))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [("symmetric", "false", "true or false"), ("bits", "four", "a whole number"), ("bits", 4.0, "a whole number")],
)
def test_overrides_of_another_type_are_refused(key: str, value: object, wanted: str) -> None:
    with pytest.raises(UserError, match=rf"overrides of \*v_proj: {key} must be {wanted}, got {value!r}"):
        settings_of(RTN(overrides={"*v_proj": {key: value}}), "model.layers.0.self_attn.v_proj")


def test_layers_without_settings_stay() -> None:
    block, _ = blocks()
    chosen = {name: RTN() if name.endswith("up_proj") else None for name in names(block)}
    assert [report.name for report in quantise(block, chosen)] == ["model.layers.0.mlp.up_proj"]
    assert list(block.codes) == ["model.layers.0.mlp.up_proj"]


def test_side_by_side_and_alone_are_the_same_to_a_quantiser() -> None:
    """Model-Optimizer#1261: no padding is among the inputs, whatever stands beside a piece."""
    model = tiny_model()
    tensors, config = model.state_dict(), ModelConfig.from_hf(model.config)
    ragged = [PIECES[0], PIECES[1][:3], PIECES[0][2:7]]

    def seen(text: list) -> list[Inputs]:
        return [Inputs.of(stage.inputs()) for stage in CalibratedBlock(config, 0, tensors, text).stages]

    embedding = tensors["model.embed_tokens.weight"]
    together = seen(passages(ragged, embedding))
    alone = seen([passage for piece in ragged for passage in passages([piece], embedding)])
    for a, b in zip(together, alone, strict=True):
        assert a.count == b.count == 16
        assert torch.allclose(a.hessian, b.hessian, rtol=1e-4, atol=1e-5)


def test_the_error_is_that_of_the_outputs(rng: torch.Generator) -> None:
    x, weight = torch.randn(50, 24, generator=rng), torch.randn(6, 24, generator=rng)
    codes = RTN(bits=3, group_size=8).layer(weight, None).codes
    lost = (codes.dequantise() - weight) @ x.T
    assert output_error(weight, codes, Inputs.of([x[:20], x[20:]])) == pytest.approx(
        float(lost.pow(2).sum() / (weight @ x.T).pow(2).sum()), rel=1e-4
    )
