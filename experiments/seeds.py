"""How far a quantiser's results lie apart where its calibration text is drawn anew: runs that differ in that seed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from statistics import fmean
from typing import Any

from .files import NOT_IN_KEY


def spread(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each quantiser with two seeds at least."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    names: dict[str, str] = {}
    for result in results:
        made = (result.get("provenance") or {}).get("quantised") or {}
        settings, config = deepcopy(made.get("settings")), result.get("config")
        calibration = settings.get("calibration") if isinstance(settings, dict) else None
        quality = result.get("quality")
        if not isinstance(calibration, dict) or not isinstance(config, Mapping) or not quality:
            continue
        if quality.get("interrupted"):  # it says something of other rows
            continue
        seed = calibration.pop("seed", None)
        # the folder of quantised weights, or how they are made in the run, is what `made` says
        shared = {key: value for key, value in config.items() if key not in (*NOT_IN_KEY, "model", "quantization")}
        source = (made.get("source") or {}).get("digest")
        asked = (result.get("digests") or {}).get("quality")
        key = json.dumps([made.get("kind"), settings, source, asked, shared], sort_keys=True, default=str)
        found.setdefault(key, {})[seed] = result
        names[key] = title(made)
    for key, by_seed in found.items():
        if len(by_seed) > 1:
            told = "; ".join(_told(list(by_seed.values())))
            yield f"{names[key]}, {len(by_seed)} seeds of its calibration text, mean (least to most): {told}"


def title(made: Mapping[str, Any]) -> str:
    """A quantiser with its bits and group."""
    settings = made.get("settings")
    bits, group = (settings.get(key) if isinstance(settings, Mapping) else None for key in ("bits", "group_size"))
    return " ".join([str(made["kind"]), *([f"{bits} bits"] if bits else ()), *([f"group {group}"] if group else ())])


def _told(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each task's main metric, and of KL, where all runs have it."""
    columns: dict[str, list[float]] = {}
    for result in results:
        quality = result["quality"]
        for name, task in (quality.get("tasks") or {}).items():
            value = (task.get("metrics", {}).get(task.get("main")) or {}).get("value")
            columns.setdefault(f"{name} {task.get('main')}", []).extend([] if value is None else [value])
        kl = ((quality.get("divergence") or {}).get("kl") or {}).get("value")
        columns.setdefault("KL", []).extend([] if kl is None else [kl])
    for name, values in columns.items():
        if len(values) == len(results):
            yield f"{name} {fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"
