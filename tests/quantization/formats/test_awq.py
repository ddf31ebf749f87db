"""AWQ's layout, nibble by nibble."""

import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.codes import Scheme
from decodelab.quantization.formats.awq import AWQFormat
from decodelab.tests.quantization.formats.layers import random_codes, reread, same, written

AWQ = AWQFormat()
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def test_eight_rows_are_a_word_in_awq_s_order() -> None:
    codes = random_codes(16, 64, 4, 32)
    tensors, config = written(AWQ, codes)
    assert tensors["X.qweight"].shape == (64, 2)
    assert tensors["X.qzeros"].shape == (2, 2)
    for i, column in enumerate(ORDER):
        assert int(tensors["X.qweight"][7, 1]) >> 4 * i & 15 == int(codes.codes[8 + column, 7])
        assert int(tensors["X.qzeros"][1, 0]) >> 4 * i & 15 == int(codes.zero[column, 1])
    assert config == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_what_is_written_is_read_zero_points_of_0_too(symmetric: bool, group_size: int) -> None:
    """GPTQModel#2350: 0 became 15."""
    codes = random_codes(24, 64, 4, group_size, symmetric)
    assert symmetric or int(codes.zero.min()) == 0
    assert same(reread(AWQ, *written(AWQ, codes)), codes)


def test_old_keys_and_symmetric_checkpoints_without_zero_points_are_read() -> None:
    codes = random_codes(16, 64, 4, 32, symmetric=True)
    tensors, config = written(AWQ, codes)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    assert same(reread(AWQ, tensors, old), codes)
    del tensors["X.qzeros"]
    assert same(reread(AWQ, tensors, config | {"zero_point": False}), codes)
    with pytest.raises(UserError, match=r"X\.qzeros is missing"):
        reread(AWQ, tensors, config)


def test_zero_points_that_are_there_against_what_is_said_are_refused() -> None:
    tensors, config = written(AWQ, random_codes(16, 64, 4, 32))
    with pytest.raises(UserError, match=r"^X\.qzeros is there, but must not be, .* zero_point=false: say true there"):
        reread(AWQ, tensors, config | {"zero_point": False})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 8}, "AWQ codes of 8 bits, and 4 are read"),
        ({"version": "gemv"}, "in the format 'gemv', and gemm is read"),
        ({"version": "llm-awq"}, "in the format 'llm-awq'"),
        ({"group_size": 48}, "X has 64 columns, which group_size=48 does not divide"),
        ({"group_size": 64}, r"X.scales is \(2, 16\), but must be \(1, 16\)"),
    ],
)
def test_other_awq_checkpoints_are_refused_in_one_line(changes: dict[str, object], match: str) -> None:
    tensors, config = written(AWQ, random_codes(16, 64, 4, 32))
    with pytest.raises(UserError, match=match):
        reread(AWQ, tensors, config | changes)


def test_all_that_it_does_not_hold_is_told_at_once() -> None:
    layers = {
        "a": Scheme((16, 64), 4, 32, True),
        "b": Scheme((12, 64), 4, 32, False),
        "c": Scheme((16, 64), 3, 32, False),
        "d": Scheme((16, 64), 4, 32, False, grouped=True),
        "e": Scheme((16, 48), 4, 32, False),
    }
    with pytest.raises(UserError, match="does not hold these layers") as refused:
        AWQ.check(layers, ())
    for part in (
        "12 rows are no multiple of 8: b",
        "bits=3 is none of 4: c",
        "columns are not grouped in order: d",
        "group_size=32 does not divide 48 columns: e",
    ):
        assert part in str(refused.value)
    AWQ.check(dict.fromkeys("ab", layers["a"]), ())


def test_a_scale_that_float16_does_not_hold_is_refused() -> None:
    codes = random_codes(16, 64, 4, 32)
    for wrong in (1e5, 1e-9):
        bad = torch.full_like(codes.scale, wrong, dtype=torch.float32)
        with pytest.raises(UserError, match="X has a scale that float16 does not hold"):
            AWQ.write("X", type(codes)(codes.codes, bad, 4, 32, zero=codes.zero))
