"""A GGUF file's layers as codes, in the place of weights that are dequantised into the cache."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...quantization.formats import QuantisedLayers
from ...quantization.formats.gguf import BLOCKS, GGUFBlocks
from .gguf import Header, dequantised, names_of, read_header, row_order, stored_bytes
from .source import Source
from .storage import Progress

_TABLE = "model.embed_tokens"  # is looked up row by row, not multiplied with


def packed(source: Source) -> Source:
    """The same model with the codes that its GGUF file holds, and all else of it read from there, tensor by tensor: the
    cache is not used. Its `origin` is the file's digest."""
    header = _header(source)
    kinds = _types(header)
    if not (kept := {layer: kind for layer, kind in kinds.items() if kind in BLOCKS}):
        raise UserError(
            f"{source.label} holds no layer to be kept packed, its types are {', '.join(sorted(set(kinds.values())))} "
            f"and those that can be {', '.join(BLOCKS)}: leave quantization=gguf out"
        )
    names = {translated: name for name, translated in names_of(header).items()}
    shapes = {layer: header.tensors[names[f"{layer}.weight"]].shape for layer in kept}

    def blocks(name: str) -> Tensor:
        stored = names[f"{name.removesuffix('.blocks')}.weight"]
        raw = stored_bytes(header, stored).reshape(header.tensors[stored].shape[0], -1)
        order = row_order(header, stored)
        return torch.from_numpy(np.array(raw if order is None else raw[order]))

    codes = QuantisedLayers(GGUFBlocks(), {"layers": kept}, blocks, {layer: (N, K) for layer, (N, K) in shapes.items()})
    tensors = _Tensors(header, names)
    digest = sha256(f"{source.digest} packed".encode()).hexdigest()

    def read(progress: Progress | None) -> Mapping[str, Tensor]:
        return tensors

    return replace(source, digest=digest, origin=source.digest, codes=codes, _read=read)


def layer_types(source: Source) -> dict[str, str]:
    """The ggml type of every linear layer of a GGUF file."""
    return _types(_header(source))


def _header(source: Source) -> Header:
    if source.file is None:
        raise UserError(
            f"quantization=gguf keeps the layers of a GGUF file packed, and {source.label} is none, or has an adapter: "
            "name quantization.type=Q4_0 (or Q4_1, Q8_0) to make such layers, or another quantization"
        )
    return read_header(source.file)


def _types(header: Header) -> dict[str, str]:
    import gguf

    return {
        layer: gguf.GGMLQuantizationType(header.tensors[name].kind).name
        for name, translated in names_of(header).items()
        if len(header.tensors[name].shape) == 2 and (layer := translated.removesuffix(".weight")) != _TABLE
    }


def told(kinds: Mapping[str, str]) -> tuple[str, str | None]:
    """(how many layers are kept, of which types; the same of those that are dequantised, if there are any)."""
    kept = Counter(kind for kind in kinds.values() if kind in BLOCKS)
    left = Counter(kind for kind in kinds.values() if kind not in BLOCKS)
    listed = [", ".join(f"{kind} × {n}" for kind, n in each.most_common()) for each in (kept, left)]
    some = f"quantization=gguf: {sum(left.values())} of {len(kinds)} layers are dequantised ({listed[1]})"
    return f"{sum(kept.values())} layers kept packed ({listed[0]})", some if left else None


class _Tensors(Mapping[str, Tensor]):
    """Tensors by transformers' names, each read and dequantised when it is asked for."""

    def __init__(self, header: Header, names: Mapping[str, str]) -> None:
        self._header, self._names = header, names

    def __getitem__(self, name: str) -> Tensor:
        values = dequantised(self._header, self._names[name])
        if values.dtype == np.uint16:
            return torch.from_numpy(np.array(values)).view(torch.bfloat16)
        return torch.from_numpy(np.array(values))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
