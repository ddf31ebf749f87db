"""PEFT LoRA adapters, merged into the base's weights in float32: W + scaling · B A (Hu et al. 2021, equation 3).

Handled are LoRA on linear layers with rank and alpha patterns, rsLoRA, and whole tensors trained beside it
(`modules_to_save`). Whatever else an adapter's config or file holds is refused by name, never left out.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import UserError
from .storage import file_digest
from .weights import StoredTensors, read_headers, read_json

_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INSTEAD = "merge it with PEFT and give the merged model's folder"

# Keys of adapter_config.json that are handled below, say where the adapter came from or only mattered in training.
_KNOWN = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "bias", "init_lora_weights",
    "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "eva_config",
    "megatron_core", "qalora_group_size",
}  # fmt: skip
_SAME_BASE = (True, False, "gaussian", "orthogonal", "eva")  # initialisations that leave the base's weights alone


@dataclass(frozen=True, slots=True)
class Adapter:
    """`pairs`: a base parameter's A, B and scaling; `saved`: what replaces a base parameter. Names as in the file."""

    label: str
    digest: str
    nbytes: int
    tensors: StoredTensors
    pairs: dict[str, tuple[str, str, float]]
    saved: dict[str, str]


class MergedTensors(Mapping[str, Tensor]):
    """The base's tensors with an adapter merged, each when it is asked for; merged ones are float32."""

    def __init__(self, base: Mapping[str, Tensor], adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter

    def __getitem__(self, name: str) -> Tensor:
        adapter = self._adapter
        if name in adapter.saved:
            return adapter.tensors[adapter.saved[name]]
        if name not in adapter.pairs:
            return self._base[name]
        a, b, scaling = adapter.pairs[name]
        return self._base[name].float() + (adapter.tensors[b].float() @ adapter.tensors[a].float()) * scaling

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def read_adapter(folder: Path, base: Mapping[str, tuple[int, ...]], tied: bool) -> Adapter:
    """The adapter in `folder` for a base with tensors of these shapes; reads its config and its file's header."""
    for name in (_CONFIG, _FILE):
        if not (folder / name).is_file():
            raise UserError(f"adapter {folder} has no {name}: give the folder that PEFT's save_pretrained wrote")
    config = read_json(folder / _CONFIG)
    _check_config(folder, config)
    table = read_headers([folder / _FILE])
    shapes = {name: stored.shape for name, stored in table.items()}
    pairs, saved = {}, {}
    for key, shape in shapes.items():
        name = key.removeprefix(_PREFIX)
        if match := re.fullmatch(r"(.+)\.lora_A\.weight", name):
            module = match[1]
            other = f"{key.removesuffix('lora_A.weight')}lora_B.weight"
            parameter = f"{module}.weight"
            _check_pair(folder, module, shape, shapes.get(other), base.get(parameter), config)
            pairs[parameter] = (key, other, _scaling(config, module))
        elif re.fullmatch(r".+\.lora_B\.weight", name):
            if key.replace("lora_B", "lora_A") not in shapes:
                raise UserError(f"adapter {folder} holds {key} without its lora_A: its file is incomplete")
        elif name in base:
            if shape != base[name]:
                raise UserError(f"adapter {folder} does not fit: it holds {name} as {shape}, the base as {base[name]}")
            saved[name] = key
        else:
            raise UserError(f"adapter {folder} holds {key}, which is not handled: {_INSTEAD}")
    for name in {*pairs, *saved} & {"model.embed_tokens.weight", "lm_head.weight"}:
        if tied:
            raise UserError(f"adapter {folder} changes {name}, but the base ties its two ends: {_INSTEAD}")
    if not pairs and not saved:
        raise UserError(f"adapter {folder} holds no tensor")
    digests = [file_digest(folder / name) for name in (_FILE, _CONFIG)]
    return Adapter(
        folder.name,
        hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        (folder / _FILE).stat().st_size,
        StoredTensors(table),
        pairs,
        saved,
    )


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"adapter {folder} is of type {config.get('peft_type')!r}, and only LORA is merged: {_INSTEAD}")
    for key, value in config.items():
        if key not in _KNOWN and value:
            raise UserError(f"adapter {folder}: {key}={value!r} is not handled: {_INSTEAD}")
    if (bias := config.get("bias", "none")) != "none":
        raise UserError(f"adapter {folder}: bias={bias!r} is not handled: {_INSTEAD}")
    if (initial := config.get("init_lora_weights", True)) not in _SAME_BASE:
        raise UserError(
            f"adapter {folder}: init_lora_weights={initial!r} changed the base's weights too: save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )


def _check_pair(
    folder: Path,
    module: str,
    a: tuple[int, ...],
    b: tuple[int, ...] | None,
    weight: tuple[int, ...] | None,
    config: dict[str, Any],
) -> None:
    if weight is None:
        raise UserError(f"adapter {folder} does not fit: it adapts {module}, which the base does not have")
    if b is None:
        raise UserError(f"adapter {folder} holds {module}.lora_A without its lora_B: its file is incomplete")
    rank = _of_module(config, "rank_pattern", "r", module)
    if len(weight) != 2 or [*b, *a] != [weight[0], rank, rank, weight[1]]:
        raise UserError(
            f"adapter {folder} does not fit: {module} is {weight}, but A is {a} and B is {b} at rank {rank:g}"
        )


def _scaling(config: dict[str, Any], module: str) -> float:
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module)
    rank = _of_module(config, "rank_pattern", "r", module)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(config: dict[str, Any], patterns: str, default: str, module: str) -> float:
    """PEFT's rule: the first pattern that is the end of the module's name, from a dot on, as a regular expression."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return float(value)
    if not isinstance(value := config.get(default), int | float) or value <= 0:
        raise UserError(f"adapter_config.json: {default}={value!r}, but a number above 0 is needed")
    return float(value)
