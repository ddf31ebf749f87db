"""compressed-tensors' checkpoints, of integers. "pack-quantized": a layer X has X.weight_packed int32
[N, ⌈K · bits / 32⌉], without gaps along K (so since 0.20; before, codes of 3 bits did not lie across words),
X.weight_scale [N, G], X.weight_shape int64 [2], and if it is asymmetric X.weight_zero_point int32 [⌈N · bits / 32⌉, G],
without gaps along N. "int-quantized": X.weight int8 [N, K], X.weight_scale [N, G], and X.weight_zero_point int8 [N, G].
Codes of int8 are less by 2^(bits − 1) than ours. Layers of different settings are groups in quantization_config.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme
from ..quantiser import Quantised
from .format import (
    AGAIN,
    FLOATS,
    Shape,
    flag,
    float16,
    matrix,
    misfits,
    need,
    owners,
    refuse,
    uneven,
    unwords,
    whole,
    words,
)

BITS = (2, 3, 4, 5, 6, 7, 8)
PACKED, PLAIN = "pack-quantized", "int-quantized"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    name: ClassVar[str] = "compressed-tensors"
    title: ClassVar[str] = "compressed_tensors"
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {
        "weight_packed": ("I32",),
        "weight": ("I8",),
        "weight_scale": FLOATS,
        "weight_shape": ("I32", "I64"),
        "weight_zero_point": ("I32", "I8"),
    }

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        if config.get("kv_cache_scheme") is not None:
            raise UserError("quantization_config.kv_cache_scheme quantises the KV cache, which is not read")
        scaled = [name.removesuffix(".weight_scale") for name in shapes if name.endswith(".weight_scale")]
        found = {}
        for layer in sorted({*owners(shapes, "weight_packed", ("weight_shape",)), *scaled}):
            found[layer] = _shape(layer, shapes, _Settings.of(layer, config))
        return found

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        about = _Settings.of(layer, config)
        size = about.group_size or shape[1]
        return Scheme(shape, about.bits, size, about.symmetric, activation_bits=about.activation_bits)

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        about = _Settings.of(layer, config)
        bits, middle = about.bits, 2 ** (about.bits - 1)
        scale = tensor(f"{layer}.weight_scale")
        N = len(scale)
        zero = torch.full(scale.shape, middle, dtype=torch.uint8)
        main = tensor(f"{layer}.weight_packed" if about.packed else f"{layer}.weight")
        K = about.columns(main.shape[1], scale.shape[1])
        if about.packed:
            if (said := tensor(f"{layer}.weight_shape").tolist()) != [N, K]:
                raise UserError(
                    f"{layer}.weight_shape is {said}, but must be {[N, K]} by its codes and scales (rows that do not "
                    f"fill their 32-bit words are read in groups alone): {AGAIN}"
                )
            codes = unwords(main, bits, K)
        else:
            codes = _unsigned(main, middle)
        if not about.symmetric:
            zero = _zero(layer, tensor(f"{layer}.weight_zero_point"), N, about)
        else:
            _check_no_zero(layer, tensor, N, about)
        return Codes(codes, scale, bits, about.group_size or K, zero=zero, activation_bits=about.activation_bits)

    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        problems = {layer: _misfits(scheme) for layer, scheme in layers.items()}
        rounded = [layer for layer, scheme in layers.items() if scheme.activation_bits is not None]
        if 0 < len(rounded) < len(layers):
            for layer in rounded:
                problems[layer].append("their inputs are rounded, and those of others are not")
        refuse(self, problems)

    def fit(self, codes: Codes) -> Quantised:
        return Quantised(codes)

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        scheme = codes.scheme
        refuse(self, {layer: _misfits(scheme)})
        assert codes.zero is not None
        (N, K), bits = codes.shape, codes.bits
        parts = {"weight_scale": float16(layer, codes.scale)}
        if scheme.activation_bits is None:
            parts["weight_packed"] = words(codes.codes, bits)
            parts["weight_shape"] = torch.tensor([N, K], dtype=torch.int64)
            if not scheme.symmetric:
                parts["weight_zero_point"] = words(codes.zero.T.contiguous(), bits).T.contiguous()
        else:
            parts["weight"] = (codes.codes.int() - 2 ** (bits - 1)).to(torch.int8)
        return {f"{layer}.{part}": values for part, values in parts.items()}

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        """The group of most layers takes all that are linear and not named elsewhere."""
        groups: dict[tuple[int, int | None, bool, int | None], list[str]] = {}
        for layer, scheme in layers.items():
            size = None if scheme.group_size == scheme.shape[1] else scheme.group_size
            key = scheme.bits, size, scheme.symmetric, scheme.activation_bits
            groups.setdefault(key, []).append(layer)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        rounded = any(scheme.activation_bits is not None for scheme in layers.values())
        return {
            "quant_method": self.name,
            "format": PLAIN if rounded else PACKED,
            "quantization_status": "compressed",
            "ignore": list(skipped),
            "config_groups": {
                f"group_{i}": _group(*key, targets=["Linear"] if len(ordered) == 1 else names)
                for i, (key, names) in enumerate(ordered)
            },
        }


@dataclass(frozen=True, slots=True)
class _Settings:
    """Of a layer. `group_size`: None for whole rows."""

    bits: int
    group_size: int | None
    symmetric: bool
    activation_bits: int | None
    packed: bool

    def columns(self, width: int, groups: int) -> int:
        """Of a weight with so many words or codes a row, and scales."""
        if self.group_size is not None:
            return groups * self.group_size
        return width * 32 // self.bits if self.packed else width

    @staticmethod
    def of(layer: str, config: Mapping[str, Any]) -> "_Settings":
        group = _chosen(layer, config)
        weights, inputs = group["weights"], group.get("input_activations")
        form = group.get("format") or config.get("format")
        if form not in (PACKED, PLAIN):
            raise UserError(f"{layer} is in the format {form!r}, and {PACKED} and {PLAIN} are read")
        bits = whole(weights, "num_bits")
        if weights.get("type", "int") != "int" or not 2 <= bits <= 8 or (form == PLAIN and bits != 8):
            raise UserError(f"{layer} has codes of type {weights.get('type')} and {bits} bits, which are not read")
        strategy = weights.get("strategy") or ("channel" if weights.get("group_size") is None else "group")
        if strategy not in ("group", "channel"):
            raise UserError(f"{layer} has scales by {strategy}, and those by group and channel are read")
        if weights.get("actorder") in ("group", True):
            raise UserError(f"{layer} has columns that are not grouped in order (actorder=group), which are not read")
        if group.get("output_activations") is not None:
            raise UserError(f"{layer} has rounded outputs, which are not read")
        activation_bits = None
        if inputs is not None:
            activation_bits = whole(inputs, "num_bits")
            kind = (inputs.get("type", "int"), inputs.get("strategy"), inputs.get("dynamic"), inputs.get("symmetric"))
            if kind != ("int", "token", True, True) or activation_bits != 8:
                raise UserError(f"{layer} has inputs rounded otherwise than to int8 by token, which are not read")
        size = whole(weights, "group_size") if strategy == "group" else None
        return _Settings(bits, size, flag(weights, "symmetric") is not False, activation_bits, form == PACKED)


def _chosen(layer: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group that names the layer, else one whose pattern fits it, else that of all linear layers."""
    fits: list[tuple[int, Mapping[str, Any]]] = []
    for group in config["config_groups"].values():
        for target in group["targets"]:
            if target == layer:
                fits.append((0, group))
            elif target.startswith("re:") and _pattern(target).match(layer):
                fits.append((1, group))
            elif target == "Linear":
                fits.append((2, group))
    if not fits:
        raise UserError(f"{layer} is quantised, but no group in quantization_config.config_groups has it as a target")
    return min(fits, key=lambda fit: fit[0])[1]


def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise UserError(f"quantization_config has {target!r}, which is no pattern ({error}): {AGAIN}") from None


def _zero(layer: str, stored: Tensor, N: int, about: _Settings) -> Tensor:
    wanted = torch.int32 if about.packed else torch.int8
    if stored.dtype != wanted:
        raise UserError(f"{layer}.weight_zero_point is of {stored.dtype}, but must be of {wanted}: {AGAIN}")
    return unwords(stored.T, about.bits, N).T.contiguous() if about.packed else _unsigned(stored, 2 ** (about.bits - 1))


def _check_no_zero(layer: str, tensor: Callable[[str], Tensor], N: int, about: _Settings) -> None:
    """Some programs store the zero points of symmetric layers as well, all of them 0, or the middle where packed."""
    try:
        stored = tensor(f"{layer}.weight_zero_point")
    except KeyError:
        return
    if stored.dtype == torch.int32 and bool((stored != 0).any()):
        stored = unwords(stored.T, about.bits, N) ^ 2 ** (about.bits - 1)
    if bool((stored != 0).any()):
        raise UserError(
            f"{layer}.weight_zero_point holds others than the middle, but quantization_config says symmetric=true: say "
            "false there if the weights have zero points, or download it again"
        )


def _shape(layer: str, shapes: Mapping[str, Shape], about: _Settings) -> tuple[int, int]:
    main, bits = "weight_packed" if about.packed else "weight", about.bits
    (N, width), (_, groups) = (matrix(layer, part, shapes) for part in (main, "weight_scale"))
    K = about.columns(width, groups)
    if about.group_size is None:
        groups = 1
    if f"{layer}.weight_g_idx" in shapes:
        raise UserError(f"{layer} has columns that are not grouped in order (weight_g_idx), which are not read")
    wanted: dict[str, Shape] = {main: (N, -(-K * bits // 32) if about.packed else K), "weight_scale": (N, groups)}
    if about.packed:
        wanted["weight_shape"] = (2,)
    zero = f"{layer}.weight_zero_point"
    if not about.symmetric or (zero in shapes and shapes[zero] != (N, groups)):
        wanted["weight_zero_point"] = (-(-N * bits // 32) if about.packed else N, groups)
    need(layer, shapes, wanted)
    return N, K


def _group(
    bits: int, size: int | None, symmetric: bool, activation_bits: int | None, *, targets: Sequence[str]
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
    }
    inputs = None
    if activation_bits is not None:
        inputs = {"num_bits": activation_bits, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    form = PACKED if activation_bits is None else PLAIN
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def _unsigned(codes: Tensor, middle: int) -> Tensor:
    return (codes.int() + middle).to(torch.uint8)


def _misfits(scheme: Scheme) -> list[str]:
    (N, K), bits = scheme.shape, scheme.bits
    found = misfits(scheme, BITS)
    if scheme.grouped:
        found.append("columns are not grouped in order")
    if scheme.activation_bits is None:
        found += uneven(K, bits, "columns")
        return found if scheme.symmetric else found + uneven(N, bits, "rows")
    if (bits, scheme.activation_bits, scheme.symmetric) != (8, 8, True):
        found.append("inputs are rounded, which goes with 8 bits of both and symmetric=true")
    return found
