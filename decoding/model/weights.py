"""Safetensors files: which tensors they hold, whether these are a whole model's, and reading them one at a time."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import UserError
from .config import ModelConfig

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies; `dtype` as safetensors calls it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


_MAPPED = 16 << 20  # bytes of a file that are read before it is mapped anew, and what was read of it let go


@runtime_checkable
class Copies(Protocol):
    """Tensors that are copied without all of what is stored being held beside the copy."""

    def copied(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of memory-mapped files, each read when it is asked for, in the dtype it is stored in. As long as one is
    held, so is what was read of its file beside it."""

    def __init__(self, table: Mapping[str, Stored]) -> None:
        self._table = table
        self._file: Path | None = None
        self._open: Any = None
        self._read = 0

    def __getitem__(self, name: str) -> Tensor:
        file = self._table[name].file
        if file != self._file or self._read > _MAPPED:
            self._file, self._open, self._read = file, open_safetensors(file), 0
        tensor: Tensor = self._open.get_tensor(name)
        self._read += tensor.nbytes
        return tensor

    def copied(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        stored = self._table[name]
        if not stored.shape or prod(stored.shape) * 4 <= _MAPPED:
            return self[name].to(device=device, dtype=dtype, copy=True)
        copy = torch.empty(stored.shape, dtype=dtype, device=device)
        self._file = self._open = None
        rows = max(1, _MAPPED // (4 * prod(stored.shape[1:])))
        for at in range(0, len(copy), rows):
            copy[at : at + rows] = open_safetensors(stored.file).get_slice(name)[at : at + rows]
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder: those its index names, else model.safetensors."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if Path(name).name != name:
                raise UserError(f"{index} names the shard {name!r}, which is not a file of that folder")
            if not (folder / name).is_file():
                raise UserError(f"{index} names the shard {name}, but it is not there: download the folder again")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise UserError(f"{folder} holds {pickled[0]}, but pickled weights are never read: convert them to safetensors")
    raise UserError(f"{folder} holds neither {_SINGLE} nor {INDEX}: give a model's folder, or download it again")


def has_tokenizer(folder: Path) -> bool:
    """tokenizer.json, a sentencepiece or tiktoken tokenizer.model, or a vocabulary with merges."""
    names = {path.name for path in folder.iterdir()}
    return bool(names & {"tokenizer.json", "tokenizer.model"}) or {"vocab.json", "merges.txt"} <= names


def read_table(folder: Path, files: list[Path]) -> dict[str, Stored]:
    """Name, file and shape of every tensor, from the files' headers."""
    table = read_headers(files)
    if (folder / INDEX).is_file():
        for name, shard in _weight_map(folder / INDEX).items():
            if name not in table:
                raise UserError(f"{folder / shard} lacks {name}, which is there by {INDEX}: download the folder again")
    return table


def read_headers(files: list[Path]) -> dict[str, Stored]:
    table: dict[str, Stored] = {}
    for file in files:
        opened = open_safetensors(file)
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            table[name] = Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
    return table


def open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or no safetensors file ({error}): download it again") from None


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    mapped = content.get("weight_map")
    if not isinstance(mapped, dict) or not mapped or not all(isinstance(shard, str) for shard in mapped.values()):
        raise UserError(f"{index} has no weight_map of tensors to shards: download the folder again")
    return mapped


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a JSON {type(content).__name__}, but an object is needed")
    return content


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the decoder reads, under transformers' name."""
    c = config
    q = c.heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.dim), "model.norm.weight": (c.dim,)}
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, c.dim)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        kv = c.layout.layers[layer].kv_heads * c.head_dim
        products = {
            "self_attn.q_proj": (q, c.dim, c.qkv_bias),
            "self_attn.k_proj": (kv, c.dim, c.qkv_bias),
            "self_attn.v_proj": (kv, c.dim, c.qkv_bias),
            "self_attn.o_proj": (c.dim, q, c.output_bias),
            "mlp.gate_proj": (c.mlp_dim, c.dim, c.mlp_bias),
            "mlp.up_proj": (c.mlp_dim, c.dim, c.mlp_bias),
            "mlp.down_proj": (c.dim, c.mlp_dim, c.mlp_bias),
        }
        if layer not in c.layout.owners:
            del products["self_attn.k_proj"], products["self_attn.v_proj"]
        for name, (rows, columns, bias) in products.items():
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (c.dim,)
        if c.qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"{at}self_attn.{norm}.weight"] = (c.head_dim,)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuses weights that lack a tensor the config calls for, or hold it in another shape."""
    wanted = shapes_of(config)
    if missing := [name for name in wanted if name not in found]:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise UserError(
            f"{where} lacks {missing[0]}{more} of the {len(wanted)} that its config calls for: "
            "the weights are incomplete or another model's"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UserError(f"{where} holds {name} as {found[name]}, but its config calls for {shape}: of two models?")
