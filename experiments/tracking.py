"""Where a run is mirrored while it goes on. The files of its folder stay the truth."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known before it runs. `sweep`: the id of the sweep it is a cell of; `job`: speed, quality or both."""

    key: str
    label: str
    job: str
    folder: Path
    config: Mapping[str, Any]  # resolved, with dtype and device as they came to be
    sweep: str | None = None


@runtime_checkable
class Tracker(Protocol):
    """One run, open: a context that always ends it, whatever happens inside."""

    def __enter__(self) -> "Tracker": ...
    def __exit__(self, *error: object) -> None: ...
    def prompt(self, row: Mapping[str, Any]) -> None:
        """After each prompt: flat numbers so far."""

    def done(self, result: Mapping[str, Any]) -> None:
        """Once the folder is written: `result` is what result.json holds."""


@runtime_checkable
class Tracking(Protocol):
    """Settings of the group `tracking`."""

    def check(self) -> None:
        """Raises UserError for what cannot work, before any weight is loaded."""

    def open(self, run: RunInfo) -> Tracker: ...


@dataclass(frozen=True, slots=True)
class Untracked:
    """tracking=none."""

    def check(self) -> None: ...
    def open(self, run: RunInfo) -> "Untracked":
        return self

    def __enter__(self) -> "Untracked":
        return self

    def __exit__(self, *error: object) -> None: ...
    def prompt(self, row: Mapping[str, Any]) -> None: ...
    def done(self, result: Mapping[str, Any]) -> None: ...
