"""Sizes of published models, by the names that `model=` takes in the job `plan`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with transformers


@cache
def architectures() -> Mapping[str, Mapping[str, Any]]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
