"""compressed-tensors' layouts, and what is refused of others' checkpoints."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.codes import Scheme
from decodelab.quantization.formats.compressed_tensors import CompressedTensors
from decodelab.quantization.formats.format import words
from decodelab.tests.quantization.formats.layers import random_codes, reread, same, written

CT = CompressedTensors()
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codes_lie_along_columns_without_gaps(bits: int) -> None:
    """So since 0.20; before, codes of 3 bits did not lie across words."""
    codes = random_codes(32, 64, bits, 32)
    tensors, _ = written(CT, codes)
    assert tensors["X.weight_packed"].shape == (32, 2 * bits)
    row = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(tensors["X.weight_packed"][3]))
    assert [row >> bits * j & 2**bits - 1 for j in range(64)] == codes.codes[3].tolist()
    zero = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(tensors["X.weight_zero_point"][:, 1]))
    assert [zero >> bits * j & 2**bits - 1 for j in range(32)] == codes.zero[:, 1].tolist()
    assert tensors["X.weight_shape"].tolist() == [32, 64]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (4, 16), (4, -1), (8, -1)])
def test_what_is_written_is_read(symmetric: bool, bits: int, group_size: int) -> None:
    codes = random_codes(32, 64, bits, group_size, symmetric)
    tensors, config = written(CT, codes)
    assert same(reread(CT, tensors, config), codes)
    assert ("X.weight_zero_point" in tensors) is not symmetric
    assert config["ignore"] == ["lm_head"]
    assert config["format"] == "pack-quantized"


def test_layers_whose_inputs_are_rounded_are_int8() -> None:
    codes = random_codes(16, 40, 8, -1, symmetric=True, activation_bits=8)
    tensors, config = written(CT, codes)
    assert tensors["X.weight"].dtype == torch.int8
    assert torch.equal(tensors["X.weight"].int(), codes.codes.int() - 128)
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] == INPUTS
    assert same(reread(CT, tensors, config), codes)


def test_int8_with_zero_points_is_read() -> None:
    codes = random_codes(16, 32, 8, -1)
    tensors = {
        "X.weight": (codes.codes.int() - 128).to(torch.int8),
        "X.weight_scale": codes.scale,
        "X.weight_zero_point": (codes.zero.int() - 128).to(torch.int8),
    }
    config = written(CT, codes)[1] | {"format": "int-quantized"}
    config["config_groups"]["group_0"]["format"] = None
    assert same(reread(CT, tensors, config), codes)


def test_layers_of_unlike_settings_are_groups() -> None:
    four, eight = random_codes(32, 64, 4, 32), random_codes(32, 64, 8, -1, symmetric=True)
    tensors = CT.write("m.a", four) | CT.write("m.b", eight) | CT.write("m.c", four)
    config = CT.config({"m.a": four.scheme, "m.b": eight.scheme, "m.c": four.scheme}, [])
    assert [group["targets"] for group in config["config_groups"].values()] == [["m.a", "m.c"], ["m.b"]]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert CT.layers(shapes, config) == {"m.a": (32, 64), "m.b": (32, 64), "m.c": (32, 64)}
    for name, codes in {"m.a": four, "m.b": eight}.items():
        assert same(CT.read(name, tensors.__getitem__, config), codes)
    config["config_groups"]["group_1"]["targets"] = ["re:.*b"]
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    assert same(CT.read("m.b", tensors.__getitem__, config), eight), "a pattern goes before all that is linear"
    del config["config_groups"]["group_0"]
    with pytest.raises(UserError, match=r"m\.a is quantised, but no group"):
        CT.layers(shapes, config)


def test_zero_points_of_symmetric_layers_are_the_middle() -> None:
    """Some programs store them."""
    codes = random_codes(32, 64, 4, 32, symmetric=True)
    tensors, config = written(CT, codes)
    middle = words(codes.zero.T.contiguous(), 4).T
    for zero in (middle, torch.zeros(32, 2, dtype=torch.int8), torch.zeros_like(middle)):
        assert same(reread(CT, tensors | {"X.weight_zero_point": zero}, config), codes)
    with pytest.raises(UserError, match=r"^X\.weight_zero_point holds others than the middle, .* says symmetric=true"):
        reread(CT, tensors | {"X.weight_zero_point": middle + 1}, config)


def test_rows_that_do_not_fill_their_words_are_read_in_groups_alone() -> None:
    """Of a whole row, the header does not say whether it is of 100 or of 104."""
    for group in (20, -1):
        codes = random_codes(32, 100, 4, group, symmetric=True)
        config = CT.config({"X": codes.scheme}, [])
        tensors = {"X.weight_packed": words(codes.codes, 4), "X.weight_scale": codes.scale}
        tensors["X.weight_shape"] = torch.tensor([32, 100])
        if group == 20:
            assert same(reread(CT, tensors, config), codes)
        else:
            with pytest.raises(UserError, match=r"^X\.weight_shape is \[32, 100\], but must be \[32, 104\]"):
                reread(CT, tensors, config)


def _weights(**changes: Any) -> dict[str, Any]:
    return {"weights": changes}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (_weights(num_bits=8), r"X.weight_packed is \(32, 8\), but must be \(32, 16\)"),
        (_weights(group_size=None), "quantization_config has group_size=None, but must have a whole number from 1 up"),
        ({"targets": ["re:("]}, r"quantization_config has 're:\(', which is no pattern"),
        (_weights(type="float"), "X has codes of type float and 4 bits, which are not read"),
        (_weights(strategy="tensor"), "X has scales by tensor, and those by group and channel are read"),
        (_weights(actorder="group"), r"not grouped in order \(actorder=group\)"),
        ({"format": "nvfp4-pack-quantized"}, "X is in the format 'nvfp4-pack-quantized'"),
        ({"input_activations": INPUTS | {"dynamic": False}}, "X has inputs rounded otherwise than to int8 by token"),
        ({"output_activations": INPUTS}, "X has rounded outputs"),
    ],
)
def test_foreign_checkpoints_are_refused_in_one_line(changes: dict[str, Any], match: str) -> None:
    tensors, config = written(CT, random_codes(32, 64, 4, 32))
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_0"] = group | changes | {"weights": group["weights"] | changes.get("weights", {})}
    with pytest.raises(UserError, match=match):
        reread(CT, tensors, config)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])
def test_a_tensor_that_is_missing_is_told(part: str) -> None:
    tensors, config = written(CT, random_codes(32, 64, 4, 32))
    del tensors[f"X.{part}"]
    with pytest.raises(UserError, match="the checkpoint is incomplete; download it again"):
        reread(CT, tensors, config)


def test_a_quantised_cache_is_not_read() -> None:
    tensors, config = written(CT, random_codes(32, 64, 4, 32))
    with pytest.raises(UserError, match="kv_cache_scheme quantises the KV cache"):
        reread(CT, tensors, config | {"kv_cache_scheme": {"num_bits": 8}})


def test_codes_of_3_bits_as_they_were_packed_before_are_refused() -> None:
    tensors, config = written(CT, random_codes(32, 64, 3, 32, symmetric=True))
    tensors["X.weight_packed"] = torch.zeros(32, 7, dtype=torch.int32)  # ten a word
    with pytest.raises(UserError, match=r"X.weight_packed is \(32, 7\), but must be \(32, 6\)"):
        reread(CT, tensors, config)


def test_all_that_it_does_not_hold_is_told_at_once() -> None:
    fine = Scheme((32, 64), 4, 32, True)
    rounded = Scheme((32, 64), 8, 64, True, activation_bits=8)
    layers = {
        "a": fine,
        "b": replace(fine, shape=(32, 80)),
        "c": replace(fine, grouped=True),
        "d": replace(fine, shape=(30, 64), symmetric=False),
        "e": replace(fine, shift=True),
        "f": rounded,
    }
    with pytest.raises(UserError, match="does not hold these layers") as refused:
        CT.check(layers, ())
    for part in (
        "group_size=32 does not divide 80 columns: b",
        "columns are not grouped in order: c",
        "30 rows of 4 bits do not fill 32-bit words: d",
        "float shifts, no integer zeros: e",
        "their inputs are rounded, and those of others are not: f",
    ):
        assert part in str(refused.value)
    CT.check({"a": fine, "b": replace(fine, bits=3)}, ())
    CT.check({"a": rounded}, ())
