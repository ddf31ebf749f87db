"""GPTQ's layout, word by word, and what is refused of others' checkpoints."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.errors import UserError
from decodelab.quantization.codes import Scheme
from decodelab.quantization.formats.format import words
from decodelab.quantization.formats.gptq import GPTQFormat
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.tests.quantization.formats.layers import random_codes, reread, same, written

V1, V2 = GPTQFormat(1), GPTQFormat(2)


def bit_by_bit(values: list[int], bits: int) -> list[int]:
    """Words, by the definition: code j has bits j · bits …, of one long number."""
    whole = sum(value << (j * bits) for j, value in enumerate(values))
    words = [whole >> 32 * i & 0xFFFFFFFF for i in range(len(values) * bits // 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_lie_along_columns_and_zero_points_along_rows(bits: int) -> None:
    codes = random_codes(32, 64, bits, 32)
    tensors, _ = written(V2, codes)
    assert tensors["X.qweight"].shape == (64 * bits // 32, 32)
    assert tensors["X.qweight"][:, 5].tolist() == bit_by_bit(codes.codes[5].tolist(), bits)
    assert tensors["X.qzeros"].shape == (2, bits)
    assert tensors["X.qzeros"][1].tolist() == bit_by_bit(codes.zero[:, 1].tolist(), bits)
    assert torch.equal(tensors["X.scales"], codes.scale.T)
    assert tensors["X.g_idx"].tolist() == [0] * 32 + [1] * 32


def test_three_bits_lie_across_words_as_programs_read_them() -> None:
    # 10 | 1 | 10 | 1 | 10: codes 10 and 21 are in two words each
    codes = torch.arange(32).remainder(8).to(torch.uint8)
    tensors, _ = written(V2, replace(random_codes(32, 32, 3), codes=codes.expand(32, 32)))
    first, second, third = (int(word) & 0xFFFFFFFF for word in tensors["X.qweight"][:, 0])
    assert first >> 30 | (second & 1) << 2 == 10 % 8
    assert second >> 31 | (third & 3) << 1 == 21 % 8


@pytest.mark.parametrize("form", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 16), (4, -1), (8, 32), (8, -1)])
def test_what_is_written_is_read(form: GPTQFormat, symmetric: bool, bits: int, group_size: int) -> None:
    codes = form.fit(random_codes(64, 64, bits, group_size, symmetric)).codes
    assert same(reread(form, *written(form, codes)), codes)


def test_columns_may_be_in_any_group() -> None:
    groups = (torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 32).int()
    codes = random_codes(32, 64, 4, 32, groups=groups)
    tensors, config = written(V2, codes)
    assert config["desc_act"] is True
    assert torch.equal(tensors["X.g_idx"], groups)
    assert same(reread(V2, tensors, config), codes)
    for wrong, told in ((2, "groups up to 2"), (0, "64 columns to group 0")):  # all 0: so some programs said in order
        tensors["X.g_idx"] = torch.full((64,), wrong, dtype=torch.int32)
        with pytest.raises(UserError, match=rf"^X\.g_idx gives {told}, but 64 columns are 2 groups of 32"):
            reread(V2, tensors, config)
    del tensors["X.g_idx"]
    with pytest.raises(UserError, match=r"^X\.g_idx is missing"):
        reread(V2, tensors, config)


def test_without_g_idx_groups_are_in_order() -> None:
    codes = random_codes(32, 64, 4, 32)
    tensors, config = written(V2, codes)
    del tensors["X.g_idx"]
    assert same(reread(V2, tensors, config), codes)


@pytest.mark.parametrize("said", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("form", [V1, V2], ids=["v1", "v2"])
def test_symmetric_zero_points_say_themselves_how_they_are_stored(form: GPTQFormat, said: str | None) -> None:
    """vllm#38966: words of 8 in a checkpoint that says it is of the first version, whose words are of 7."""
    codes = random_codes(32, 64, 4, 32, symmetric=True)
    tensors, config = written(form, codes)
    assert int(tensors["X.qzeros"][0, 0]) & 0xFFFFFFFF == (0x77777777 if form is V1 else 0x88888888)
    assert same(reread(form, tensors, config | {"checkpoint_format": said}), codes)


def test_version_1_has_no_zero_point_of_0() -> None:
    """AutoGPTQ#640: stored as −1, it ran over into its neighbours."""
    codes = random_codes(32, 64, 4, 32)
    fit = V1.fit(codes)
    assert fit.notes == ("format=gptq has no zero point of 0: 1 in its place; the greatest weights there lost a step",)
    assert int(fit.codes.zero.min()) == 1
    lost = codes.dequantise() - fit.codes.dequantise()
    cut = (codes.zero[:, codes.column_groups] == 0) & (codes.codes == 15)
    assert cut.any()
    assert torch.equal(lost, torch.where(cut, codes.scale.float()[:, codes.column_groups], torch.zeros(()))), "all else"
    assert same(reread(V1, *written(V1, fit.codes)), fit.codes)
    assert V2.fit(codes).codes is codes


def test_a_zero_point_that_programs_read_differently_is_refused() -> None:
    codes = random_codes(32, 64, 4, 32)
    tensors, config = written(V2, codes)  # with 15s and 0s, as they are
    with pytest.raises(UserError, match=r"X.qzeros of version 1 holds 15, .* 0 or of 16: give a checkpoint of gptq_v2"):
        reread(V1, tensors, config | {"checkpoint_format": "gptq"})


def test_zero_points_that_are_not_the_middle_are_not_symmetric() -> None:
    tensors, config = written(V2, random_codes(32, 64, 4, 32))
    with pytest.raises(UserError, match=r"^X\.qzeros holds 0 to 15, but must hold 8 alone \(or 7\), .* says sym=true"):
        reread(V2, tensors, config | {"sym": True})


@pytest.mark.parametrize("form", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_version_that_the_weights_contradict_is_said(rng: torch.Generator, form: GPTQFormat, bits: int) -> None:
    codes = form.fit(round_to_nearest(torch.randn(64, 64, generator=rng), Grid(bits, 32, symmetric=False))).codes
    tensors, config = written(form, codes)
    other = "gptq" if form is V2 else "gptq_v2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(reread(form, tensors, config), codes)
    with pytest.warns(RuntimeWarning, match=rf"read as {other}, but its zero points are of {form.title}, by the mean"):
        assert not same(reread(form, tensors, config | {"checkpoint_format": other}), codes)


def test_a_version_that_cannot_be_told_is_said() -> None:
    codes = random_codes(32, 64, 4, 32)
    for changed in (replace(codes, codes=codes.codes.clamp_min(8)), random_codes(32, 64, 8, 32)):  # chance alone, at 8
        with pytest.warns(RuntimeWarning, match="whether its zero points are of gptq cannot be told"):
            reread(V2, *written(V2, changed))


def test_zero_points_that_do_not_fill_their_words_are_read() -> None:
    codes = random_codes(36, 64, 4, 32)
    tensors, config = written(V2, random_codes(40, 64, 4, 32))
    tensors["X.qweight"] = words(codes.codes, 4).T
    tensors["X.qzeros"] = words(codes.zero.T.contiguous(), 4)
    tensors["X.scales"] = codes.scale.T
    assert same(reread(V2, tensors, config), codes)


def _broken(change: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    if change.startswith("no "):
        del tensors[f"X.{change.removeprefix('no ')}"]
    elif change == "scales of another shape":
        tensors["X.scales"] = tensors["X.scales"][:1]
    else:
        key, value = change.split("=")
        config[key] = int(value) if value.isdigit() else value


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("no qzeros", r"X.qzeros is missing: the checkpoint is incomplete"),
        ("no scales", r"X.scales is missing"),
        ("no qweight", r"X.g_idx is there without its qweight"),
        ("scales of another shape", r"X.scales is \(1, 32\), but must be \(2, 32\)"),
        ("group_size=64", r"X.qzeros is \(2, 4\), but must be \(1, 4\)"),
        ("bits=8", r"but must be"),
        ("bits=5", r"GPTQ codes of 5 bits, and 2, 3, 4, 8 are read"),
        ("checkpoint_format=marlin", r"in the format 'marlin', and gptq and gptq_v2 are read"),
        ("checkpoint_format=exl2", r"in the format 'exl2'"),
    ],
)
def test_corrupt_and_foreign_checkpoints_are_refused_in_one_line(change: str, match: str) -> None:
    tensors, config = written(V2, random_codes(32, 64, 4, 32))
    _broken(change, tensors, config)
    with pytest.raises(UserError, match=match):
        reread(V2, tensors, config)


def test_settings_of_single_layers_are_refused() -> None:
    tensors, config = written(V2, random_codes(32, 64, 4, 32))
    assert same(reread(V2, tensors, config | {"dynamic": {"-:.*up_proj": {}}}), random_codes(32, 64, 4, 32))
    with pytest.raises(UserError, match=r"dynamic gives '\.\*down' settings of its own"):
        reread(V2, tensors, config | {"dynamic": {".*down": {"bits": 8}}})


def test_all_that_it_does_not_hold_is_told_at_once() -> None:
    """llm-compressor#1983: after a quarter of an hour, the first of many."""
    fine = Scheme((64, 128), 4, 32, False)
    layers = {
        **{f"model.layers.{i}.up": fine for i in range(3)},
        "model.layers.0.down": Scheme((64, 80), 4, 32, False),
        "model.layers.1.down": Scheme((64, 80), 4, 32, False),
        **{f"model.layers.{i}.down": Scheme((64, 80), 4, 32, False) for i in (4, 5, 6)},
        "a": replace(fine, shift=True),
        "b": replace(fine, bits=5),
        "c": replace(fine, shape=(60, 128)),
        "d": replace(fine, group_size=64),
        "e": replace(fine, activation_bits=8),
        "f": replace(fine, symmetric=True),
    }
    with pytest.raises(UserError, match="does not hold these layers") as refused:
        V2.check(layers, ())
    told = str(refused.value)
    assert "\n" not in told
    assert told.startswith("format=gptq_v2 does not hold these layers (")
    assert told.endswith("): choose otherwise, or format=native")
    for part in (
        "group_size=32 does not divide 80 columns: model.layers.0,1,4–6.down",
        "float shifts, no integer zeros: a",
        "bits=5 is none of 2, 3, 4, 8: b",
        "60 rows of 4 bits do not fill 32-bit words: c",
        "group_size=64, where most have 32: d",
        "their inputs are rounded as well: e",
        "symmetric=True, where most have False: f",
    ):
        assert part in told
    assert ".up" not in told
    V2.check(dict.fromkeys("ab", fine), ())


def test_whole_rows_of_unlike_lengths_are_one_setting() -> None:
    layers = {"a": Scheme((32, 64), 4, 64, True), "b": Scheme((32, 128), 4, 128, True)}
    V1.check(layers, ())
    assert V1.config(layers, ["lm_head"]) == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }
    named = V2.config(layers, ["c", "lm_head"])
    assert named["modules_in_block_to_quantize"] == [["a", "b"]]
