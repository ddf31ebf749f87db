"""ggml's blocks stand for the codes that the gguf package dequantises them to, and codes become such blocks."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.codes import Codes
from decodelab.quantization.formats.gguf import BLOCKS, GGUFBlocks, blocks_of, codes_of, kind_of
from decodelab.quantization.gguf import GGUF
from decodelab.tests.quantization.formats.layers import random_codes, reread, written

HALVES = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block has float16s; others: first


def blocks(kind: str, N: int = 5, count: int = 3) -> torch.Tensor:
    """Whatever bits, but for scales that are numbers."""
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (N, count, BLOCKS[kind][1]), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        raw[..., at : at + 2] = draw.normal(size=(N, count, 1)).astype(np.float16).view(np.uint8)
    return torch.from_numpy(raw.reshape(N, -1))


def dequantised(raw: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize(
    ("kind", "bits", "group"),
    [("Q4_0", 4, 32), ("Q4_1", 4, 32), ("Q5_0", 5, 32), ("Q8_0", 8, 32), ("Q4_K", 4, 32), ("Q6_K", 6, 16)],
)
def test_blocks_stand_for_what_gguf_dequantises(kind: str, bits: int, group: int) -> None:
    codes = codes_of(blocks(kind), kind)
    assert (codes.bits, codes.group_size, codes.shape) == (bits, group, (5, 3 * BLOCKS[kind][0]))
    assert torch.equal(codes.dequantise(), dequantised(blocks(kind), kind))
    assert codes.symmetric is (kind not in ("Q4_1", "Q4_K"))


def test_the_sizes_of_blocks_are_ggmls() -> None:
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_become_the_blocks_they_were(kind: str) -> None:
    form, raw = GGUFBlocks(), blocks(kind)
    codes = codes_of(raw, kind)
    tensors, config = written(form, codes)
    assert config == {"quant_method": "gguf", "layers": {"X": kind}}
    assert torch.equal(tensors["X.blocks"], raw)
    assert torch.equal(reread(form, tensors, config).dequantise(), codes.dequantise())
    assert form.fit(codes).notes == ()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"bits": 4, "group_size": 32, "symmetric": True}, "Q4_0"),
        ({"bits": 4, "group_size": 64, "symmetric": True}, "Q4_0"),
        ({"bits": 4, "group_size": 32}, "Q4_1"),
        ({"bits": 8, "group_size": -1, "symmetric": True}, "Q8_0"),
    ],
)
def test_codes_of_other_quantisers_and_of_wider_groups(settings: dict[str, Any], kind: str) -> None:
    """An integer zero becomes a float16 shift: exact where scale · zero has its 11 digits, as here."""
    codes = random_codes(6, 128, **settings)
    codes = Codes(codes.codes, (codes.scale * 64).round() / 64, codes.bits, codes.group_size, zero=codes.zero)
    form = GGUFBlocks()
    form.check({"X": codes.scheme}, ())
    assert kind_of(codes.scheme) == kind
    assert torch.equal(dequantised(blocks_of("X", codes), kind), codes.dequantise())
    fit = form.fit(codes)
    assert fit.codes.group_size == 32
    assert fit.notes == ()


def test_a_shift_that_float16_rounds_is_noted() -> None:
    codes = random_codes(6, 64, group_size=32)
    fit = GGUFBlocks().fit(Codes(codes.codes, codes.scale, 4, 32, shift=torch.rand(6, 2)))
    assert fit.notes == ("shifts are rounded to float16",)
    assert GGUFBlocks().fit(fit.codes).notes == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5, "group_size": 32}, "bits=5 is neither 4 nor 8: X"),
        ({"bits": 8, "group_size": 32}, "codes of 8 bits are not symmetric: X"),
        ({"group_size": 16}, "group_size=16 is no multiple of 32 that divides 64 columns: X"),
        ({"group_size": 32, "groups": torch.arange(64) % 2}, "columns are not grouped in order: X"),
        ({"group_size": 32, "activation_bits": 8}, "their inputs are rounded as well: X"),
    ],
)
def test_what_no_block_holds_is_refused(settings: dict[str, Any], message: str) -> None:
    codes = random_codes(4, 64, **settings)
    for attempt in (lambda: GGUFBlocks().write("X", codes), lambda: GGUFBlocks().check({"X": codes.scheme}, ())):
        with pytest.raises(UserError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_a_shape_that_is_not_of_blocks_and_an_unknown_type_are_one_line() -> None:
    for shape, kind, message in (
        ((4, 19), "Q4_0", r"^X.blocks is \(4, 19\), but must be \(4, 36\)"),
        ((4, 36), "Q5_K", "^X is of ggml type Q5_K, and Q4_0, "),
    ):
        with pytest.raises(UserError, match=message):
            GGUFBlocks().layers({"X.blocks": shape}, {"layers": {"X": kind}})
    with pytest.raises(UserError, match=r"^X.blocks is missing"):
        GGUFBlocks().layers({}, {"layers": {"X": "Q4_0"}})


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_quantiser_makes_ggmls_own_blocks(kind: str, rng: torch.Generator) -> None:
    weight, settings = torch.randn(5, 64, generator=rng), GGUF(kind)
    codes = settings.layer(weight, None).codes
    raw = torch.from_numpy(gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(codes.dequantise(), dequantised(raw, kind))
    assert codes.scheme == settings.scheme((5, 64))


def test_settings_that_make_no_blocks_are_refused() -> None:
    with pytest.raises(UserError, match=r"quantization.type must be one of Q4_0, Q4_1, Q8_0, or null .*, got 'Q5_0'"):
        GGUF("Q5_0")
    with pytest.raises(UserError, match=r"quantization.type=null keeps what a GGUF file has, for a run: name one"):
        GGUF().scheme((4, 64))
    with pytest.raises(UserError, match="blocks of Q4_0 are 32 columns, which do not divide those of b, c: leave"):
        GGUF("Q4_0").check({"a": (4, 64), "b": (4, 48), "c": (4, 33)})
