"""Layers of random codes, and what becomes of them in a format."""

from typing import Any

import torch
from safetensors import deserialize
from safetensors.torch import save

from decodelab.quantization.codes import Codes
from decodelab.quantization.formats import Format, QuantisedLayers, layers_of


def random_codes(N: int, K: int, bits: int = 4, group_size: int = -1, symmetric: bool = False, **parts: Any) -> Codes:
    draw = torch.Generator().manual_seed(bits)
    width = K if group_size == -1 else group_size
    groups, top = -(-K // width), 2**bits - 1
    codes = torch.randint(0, top + 1, (N, K), generator=draw, dtype=torch.uint8)
    scale = (torch.rand(N, groups, generator=draw) + 0.1).half()
    zero = torch.randint(0, top + 1, (N, groups), generator=draw, dtype=torch.uint8)
    zero[0, 0], zero[-1, -1] = 0, top  # the ends are always there
    if symmetric:
        zero.fill_(2 ** (bits - 1))
    return Codes(codes, scale, bits, width, zero=zero, **parts)


def written(form: Format, codes: Codes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(the tensors of a layer X, quantization_config)."""
    return form.write("X", codes), form.config({"X": codes.scheme}, ["lm_head"])


def headers(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(shapes, types) as a file's header has them."""
    stored = dict(deserialize(save({name: tensor.contiguous() for name, tensor in tensors.items()})))
    return {n: tuple(each["shape"]) for n, each in stored.items()}, {n: each["dtype"] for n, each in stored.items()}


def reread(form: Format, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Codes:
    found = QuantisedLayers(form, config, tensors.__getitem__, layers_of(form, config, *headers(tensors)))
    assert list(found) == ["X"]
    assert found["X"].shape == found.shapes["X"]
    return found["X"]


def same(a: Codes, b: Codes) -> bool:
    assert a.zero is not None
    assert b.zero is not None
    return (
        a.scheme == b.scheme
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.zero, b.zero)
        and torch.equal(a.scale, b.scale)
        and torch.equal(a.column_groups, b.column_groups)
    )
