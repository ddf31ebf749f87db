"""Round to nearest: each step of more bits and of smaller groups loses less."""

from itertools import pairwise

import pytest
import torch

from decodelab.errors import UserError
from decodelab.quantization.quantiser import Quantiser, check_overrides, deciding, settings_of
from decodelab.quantization.rtn import RTN


def lost(weight: torch.Tensor, **settings: object) -> float:
    codes = RTN(**settings).layer(weight, None).codes
    return float((codes.dequantise() - weight).pow(2).mean())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [-1, 32, 64, 128])
def test_a_bit_more_loses_less_in_any_group(rng: torch.Generator, size: int, symmetric: bool) -> None:
    """300 columns: the last group is shorter, but for whole rows."""
    weight = torch.randn(6, 300, generator=rng)
    errors = [lost(weight, bits=bits, group_size=size, symmetric=symmetric) for bits in range(2, 9)]
    assert all(b < 0.5 * a for a, b in pairwise(errors))
    codes = RTN(3, size, symmetric).layer(weight, None).codes
    assert (codes.bits, codes.scale.shape[1], codes.symmetric) == (3, 1 if size == -1 else -(-300 // size), symmetric)


def test_smaller_groups_lose_less(rng: torch.Generator) -> None:
    weight = torch.randn(6, 256, generator=rng)
    errors = [lost(weight, group_size=size) for size in (-1, 128, 64, 32)]
    assert all(b < a for a, b in pairwise(errors))


def test_settings_of_a_layer_are_those_of_the_last_pattern_that_fits() -> None:
    settings = RTN(overrides={"*.v_proj": {"bits": 8}, "a.*": "none", "a.b.v_proj": {"group_size": 32}})
    assert isinstance(settings, Quantiser)
    assert settings_of(settings, "b.v_proj") == RTN(bits=8)
    assert settings_of(settings, "b.q_proj") == settings
    assert settings_of(settings, "a.q_proj") is None
    assert settings_of(settings, "a.b.v_proj") == RTN(group_size=32)
    assert [deciding(settings.overrides, name) for name in ("a.v_proj", "c")] == ["a.*", None]


def test_overrides_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match=r"^quantization.overrides: '\*.vproj' fits none of the 1 layers, such as a.v$"):
        check_overrides(RTN(overrides={"*.vproj": "none"}), ["a.v"])
    for given, told in (({"size": 3}, "has size"), (4, "is 4")):
        with pytest.raises(UserError, match=f"overrides of a.v {told}: give none, or a mapping of bits, "):
            settings_of(RTN(overrides={"*": given}), "a.v")
