"""Our own format takes all that codes can be, and refuses a checkpoint that is not whole."""

import json
from dataclasses import fields
from typing import Any

import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.codes import Codes
from decodelab.quantization.formats.native import Native
from decodelab.tests.quantization.formats.layers import reread, written

KINDS = [(bits, shift, groups) for bits in range(1, 9) for shift in (False, True) for groups in (False, True)]


def codes_of(rng: torch.Generator, bits: int, shift: bool, groups: bool) -> Codes:
    N, K, size = 5, 21, 8
    return Codes(
        torch.randint(0, 2**bits, (N, K), generator=rng, dtype=torch.uint8),
        torch.rand(N, 3, generator=rng).half(),
        bits,
        size,
        zero=None if shift else torch.randint(0, 2**bits, (N, 3), generator=rng, dtype=torch.uint8),
        shift=torch.randn(N, 3, generator=rng) if shift else None,
        groups=(torch.randperm(K, generator=rng) // size).int() if groups else None,
        activation_bits=8 if bits == 8 else None,
    )


@pytest.mark.parametrize(("bits", "shift", "groups"), KINDS)
def test_what_is_written_is_read(rng: torch.Generator, bits: int, shift: bool, groups: bool) -> None:
    form, codes = Native(), codes_of(rng, bits, shift, groups)
    tensors = form.write("x", form.fit(codes).codes)
    config = json.loads(json.dumps(form.config({"x": codes.scheme}, ())))  # as config.json holds it
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert form.layers(shapes, config) == {"x": (5, 21)}
    back = form.read("x", tensors.__getitem__, config)
    assert sum(tensor.nbytes for tensor in tensors.values()) == codes.nbytes
    for field in fields(Codes):
        got, want = getattr(back, field.name), getattr(codes, field.name)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


@pytest.mark.parametrize("part", ["codes", "scale", "zero"])
def test_a_checkpoint_that_is_not_whole_is_refused(rng: torch.Generator, part: str) -> None:
    form, codes = Native(), codes_of(rng, 4, shift=False, groups=False)
    config = form.config({"x": codes.scheme}, ())
    shapes = {name: tuple(tensor.shape) for name, tensor in form.write("x", codes).items()}
    for changed in ({n: s for n, s in shapes.items() if n != f"x.{part}"}, shapes | {f"x.{part}": (5, 99)}):
        with pytest.raises(UserError, match=r"^x\.\w+ is [^\n]*, but must be .*; quantise again$"):
            form.layers(changed, config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"zero": lambda t: t + 200}, r"X\.zero holds 2\d\d, but must hold at most 15: it is damaged"),
        ({"scale": lambda t: t.int()}, r"X\.scale is of I32, but must be of F16 or BF16 or F32"),
        ({"codes": lambda t: t.long()}, r"X\.codes is of I64, but must be of U8"),
        (
            {"groups": lambda t: t.clamp_max(0)},
            r"X\.groups gives 21 columns to group 0, but 21 columns are 3 groups",
        ),
        ({"groups": lambda t: t + 1}, r"X\.groups gives groups up to 3, but"),
    ],
)
def test_values_that_codes_cannot_have_are_refused(rng: torch.Generator, change: dict[str, Any], told: str) -> None:
    tensors, config = written(Native(), codes_of(rng, 4, shift=False, groups=True))
    for part, damage in change.items():
        tensors[f"X.{part}"] = damage(tensors[f"X.{part}"])
    with pytest.raises(UserError, match=rf"^{told}[^\n]*$"):
        reread(Native(), tensors, config)


def test_another_version_is_refused() -> None:
    with pytest.raises(UserError, match=r"^quantization_config is of version 9, and 1 is read: quantise again$"):
        Native().layers({}, {"version": 9, "layers": {}})
