"""A checkpoint with quantised layers: which of its tensors they are, and their weights dequantised."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...quantization.codes import Codes
from ...quantization.formats import FORMATS, QuantisedLayers, layers_of
from .weights import Copies, Stored, StoredTensors, read_json

CONFIG = "quantization_config"  # the key in config.json
STATE = "quantising.json"  # in a folder that is being quantised, until it is whole


def read_quantised(folder: Path, table: Mapping[str, Stored]) -> tuple[Mapping[str, Codes], str | None]:
    """(the codes of the quantised layers of a folder, read when they are asked for; the digest of what they were made
    from, where it is noted)."""
    config: Any = read_json(folder / "config.json").get(CONFIG)
    if not config:
        return {}, None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(method, str) or method not in FORMATS:
        raise UserError(
            f"{folder} holds weights quantised by {method}, which are not read; read are {', '.join(FORMATS)}: "
            "give the unquantised model"
        )
    form, shapes = FORMATS[method], {name: stored.shape for name, stored in table.items()}
    dtypes = {name: stored.dtype for name, stored in table.items()}
    try:
        layers = layers_of(form, config, shapes, dtypes)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    origin = config.get("origin")
    if not isinstance(origin, str | None):
        raise UserError(f"{folder}: the origin in its {CONFIG} is no digest: download it again")
    return QuantisedLayers(form, config, StoredTensors(table).__getitem__, layers), origin


def weight_shapes(codes: Mapping[str, Codes]) -> dict[str, tuple[int, ...]]:
    """Of the weights, under transformers' names, without reading any."""
    if not isinstance(codes, QuantisedLayers):
        return {f"{layer}.weight": c.shape for layer, c in codes.items()}
    return {f"{layer}.weight": shape for layer, shape in codes.shapes.items()}


class Dequantised(Mapping[str, Tensor]):
    """Tensors by transformers' names; a quantised layer's weight in float32."""

    def __init__(self, stored: Mapping[str, Tensor], codes: Mapping[str, Codes]) -> None:
        self._stored, self._codes = stored, codes

    def __getitem__(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        return self._codes[layer].dequantise() if layer in self._codes else self._stored[name]

    def copied(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        if isinstance(self._stored, Copies) and name.removesuffix(".weight") not in self._codes:
            return self._stored.copied(name, dtype, device)
        return self[name].to(device=device, dtype=dtype, copy=True)

    def __iter__(self) -> Iterator[str]:
        quantised = {f"{layer}." for layer in self._codes}
        for name in self._stored:
            if f"{name.rpartition('.')[0]}." not in quantised or name.endswith(".bias"):
                yield name
        yield from (f"{layer}.weight" for layer in self._codes)

    def __len__(self) -> int:
        return sum(1 for _ in self)
