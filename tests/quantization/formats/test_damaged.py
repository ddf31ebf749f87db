"""A checkpoint of which anything is changed is read as the same weights, or refused in one line."""

import math
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.errors import UserError
from decodelab.quantization.codes import Codes
from decodelab.quantization.formats import WRITTEN, QuantisedLayers, layers_of
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.tests.quantization.formats.layers import headers, random_codes, written

GROUPS = (torch.arange(64) % 2).int()
WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))  # of random codes no version can be told
LAYERS: dict[str, tuple[str, Codes]] = {
    "native": ("native", random_codes(16, 64, 4, 32, groups=GROUPS)),
    "gptq": ("gptq", random_codes(32, 64, 4, 32, symmetric=True)),
    "gptq_v2": ("gptq_v2", replace(round_to_nearest(WEIGHT, Grid(4, 32, False)), groups=GROUPS)),
    "awq": ("awq", random_codes(16, 64, 4, 32)),
    "packed": ("compressed_tensors", random_codes(32, 64, 4, 32)),
    "plain": ("compressed_tensors", random_codes(16, 64, 8, -1, symmetric=True, activation_bits=8)),
    "gguf": ("gguf", random_codes(16, 64, 4, 32, symmetric=True)),
}
VALUES = (None, -1, 0, "x", "re:(", True, False, [], {}, 1e9, math.nan, KeyError)


def configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """With one value changed, or gone."""

    def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield (*path, key)
            yield from places(node[key], (*path, key))

    for *path, last in places(config):
        for value in VALUES:
            changed = deepcopy(config)
            node: Any = changed
            for key in path:
                node = node[key]
            if value is KeyError:
                del node[last]
            else:
                node[last] = value
            yield changed


def damaged(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """With one tensor of another shape, type or size, or gone."""
    for name, tensor in tensors.items():
        flat = tensor.flatten()
        changes = [tensor[:-1], tensor[None], flat, flat[:1], flat[:0], torch.cat([tensor, tensor])]
        changes += [tensor.to(dtype) for dtype in (torch.int64, torch.uint8, torch.float32, torch.float64)]
        if tensor.is_floating_point():
            changes += [torch.full_like(tensor, value) for value in (math.nan, math.inf)]
        yield from (tensors | {name: changed} for changed in changes)
        yield {other: t for other, t in tensors.items() if other != name}


@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_the_same_weights_or_one_line(kind: str) -> None:
    name, codes = LAYERS[kind]
    form, wanted = WRITTEN[name], codes.dequantise()
    tensors, config = written(form, codes)
    whole = headers(tensors)
    cases = [(tensors, whole, config), *((tensors, whole, changed) for changed in configs(config))]
    cases += [(broken, headers(broken), config) for broken in damaged(tensors)]
    refused = 0
    for stored, head, about in cases:
        changed = f"{about} {[(n, t.dtype, t.shape) for n, t in stored.items()]}"
        found, told = None, ""  # None: of another shape, which is refused by the model's config
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                shapes = layers_of(form, about, *head)
                if shapes.get("X") == codes.shape:
                    found = QuantisedLayers(form, about, stored.__getitem__, shapes)["X"].dequantise()
            except UserError as error:
                told = str(error)
        refused += bool(told)
        assert "\n" not in told, changed
        assert about is not config or stored is not tensors or not warned
        assert found is None or warned or torch.equal(found, wanted), f"other weights: {changed}"
    assert refused > len(cases) / 4
