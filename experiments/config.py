"""A run's configuration, typed: what the YAML groups and the command line resolve to."""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings
from ..decoding.errors import UserError
from ..decoding.model.source import ModelSpec
from .tasks import TaskSettings

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
Timing = Literal["paired", "untimed"]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Parts are built, weights are not loaded. `resolved` is the whole configuration as plain data, for the record."""

    model: ModelSpec
    drafting: DrafterSettings
    acceptance: Acceptance
    task: TaskSettings
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    batch: int = 1
    timing: Timing = "paired"
    profile: bool = False
    compare_hf: bool = False
    output: str | None = None
    resolved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.timing not in ("paired", "untimed"):
            raise UserError(f"timing must be paired or untimed, got {self.timing!r}")
        if self.batch < 1:
            raise UserError(f"batch must be at least 1, got {self.batch}")
        cores = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise UserError(f"threads must be between 1 and the {cores} cores of this machine, got {self.threads}")
