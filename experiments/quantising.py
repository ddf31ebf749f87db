"""What is to be quantised and how, known and refused before any weight is read."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]  # comes with transformers

from ..decoding.model.config import ModelConfig
from ..decoding.model.source import Source
from ..errors import UserError
from ..quantization.codes import Scheme
from ..quantization.formats import Format
from ..quantization.quantiser import Quantiser, check_overrides, deciding, settings_of
from .calibration import Pieces, load_calibration

AUTO = "auto"
VERSION = 5  # of what the quantisers compute: a new number makes copies in the cache unused


@dataclass(frozen=True)
class Quantising:
    """What is to be quantised, known before any weight is read. `key`: of everything that the result depends on;
    `skipped`: the layers of the blocks that stay as they are, and why."""

    source: Source
    settings: Quantiser
    layers: Mapping[str, Quantiser | None]
    pieces: Pieces | None
    dtype: torch.dtype
    form: Format
    key: str
    skipped: Mapping[str, str]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        rest = f", {len(self.skipped)} left as they are" if self.skipped else ""
        read = "" if self.pieces is None else f", calibrated on {self.pieces.tokens:,} tokens"
        return f"{self.label}: {len(self.layers) - len(self.skipped)} layers quantised{rest}{read}"

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Of the layers' codes, as far as they are known."""
        return _schemes(self.layers, layer_shapes(ModelConfig.from_hf(self.source.config)))

    @property
    def nbytes_beside(self) -> int:
        """Of the tensors that are written as they are."""
        from ..decoding.model.weights import shapes_of

        quantised = {f"{name}.weight" for name in self.schemes}
        shapes = shapes_of(ModelConfig.from_hf(self.source.config))
        return self.dtype.itemsize * sum(prod(shape) for name, shape in shapes.items() if name not in quantised)

    @property
    def untouched(self) -> list[str]:
        """All linear layers that stay as they are."""
        return _untouched(self.layers)

    @property
    def label(self) -> str:
        about: Any = self.settings
        bits, group = getattr(about, "bits", getattr(about, "type", "")), getattr(about, "group_size", "")
        return f"{self.source.label}-{self.settings.kind}-{bits}" + (f"g{group}" if group not in ("", -1) else "")


def layer_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of every layer that may be quantised, by name: the products within the blocks."""
    from ..decoding.model.weights import shapes_of

    shapes = shapes_of(model)
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.startswith("model.layers.") and len(shape) == 2
    }


def plan(settings: Quantiser, source: Source, dtype: torch.dtype, form: Format, least: float = 0.0) -> Quantising:
    """Refuses, before anything is read, what cannot be quantised so, and what leaves more than 1 − `least` of the
    blocks' weights as they are (executorch#22044)."""
    settings = _with_overrides(settings)
    assert isinstance(settings.overrides, Mapping)
    if source.codes:
        raise UserError(f"{source.label} is quantised already: quantise the model that it was made from")
    model = ModelConfig.from_hf(source.config)
    shapes = layer_shapes(model)
    check_overrides(settings, shapes)
    layers: dict[str, Quantiser | None] = {name: settings_of(settings, name) for name in shapes}
    if not any(layers.values()):
        raise UserError("quantization.overrides leave no layer to quantise")
    left = {name: f"overrides: {deciding(settings.overrides, name)}" for name, q in layers.items() if q is None}
    share = 1 - sum(prod(shapes[name]) for name in left) / sum(map(prod, shapes.values()))
    if share < least:
        raise UserError(
            f"{share:.1%} of the weights in the blocks would be quantised, and quantize.least={least} is the least: "
            f"{len(left)} of {len(layers)} layers stay ({next(iter(left.values()))}); change the overrides, or that key"
        )
    warnings = []
    for each in dict.fromkeys(str(q) for q in layers.values() if q is not None):
        of = {name: q for name, q in layers.items() if str(q) == each}
        one = next(iter(of.values()))
        assert one is not None
        warnings += one.check({name: shapes[name] for name in of})
    calibration = settings.calibration
    pieces = None
    form.check(_schemes(layers, shapes), _untouched(layers))
    if calibration is not None:
        pieces = load_calibration(calibration, settings.kind, source.tokenizer, model.max_positions)
    about = {
        "version": VERSION,
        "source": source.identity,
        "kind": settings.kind,
        "settings": str(settings),
        "calibration": None if pieces is None else pieces.digest,
        "dtype": str(dtype),
        "format": form.title,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return Quantising(source, settings, layers, pieces, dtype, form, key, left, tuple(warnings))


def _with_overrides(settings: Quantiser) -> Quantiser:
    """Those of a file are read."""
    given = settings.overrides
    if not isinstance(given, str):
        return settings
    if given == AUTO:
        raise UserError("quantization.overrides=auto is of the job quantize, which finds them: name the file it writes")
    try:
        found = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())[:200]
        raise UserError(f"quantization.overrides={given} cannot be read ({told}): name a YAML file, or auto") from None
    if not isinstance(found, Mapping):
        raise UserError(f"{given} must hold layers' patterns with their keys, and holds {str(found)[:60]!r}")
    return replace(settings, overrides=dict(found))  # type: ignore[type-var]


def _schemes(layers: Mapping[str, Quantiser | None], shapes: Mapping[str, tuple[int, int]]) -> dict[str, Scheme]:
    return {name: q.scheme(shapes[name]) for name, q in layers.items() if q is not None}


def _untouched(layers: Mapping[str, Quantiser | None]) -> list[str]:
    """All linear layers that stay as they are."""
    return [*(name for name, q in layers.items() if q is None), "lm_head"]
