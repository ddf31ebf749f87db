"""Runs and the cells of sweeps, read from their folders. What cannot be read is a note, and harms no other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..files import read_result, result_files
from ..peers import table
from ..sweep import cells

_MOST = 1e300


@dataclass(frozen=True, slots=True)
class Run:
    """What one folder holds. `result` is read with `at`, which knows that anything may be missing."""

    folder: Path
    result: Mapping[str, Any]

    def at(self, path: str) -> Any:
        return at(self.result, path)

    def number(self, path: str) -> float | None:
        return number_at(self.result, path)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A cell of a sweep that came to no result, and why."""

    folder: Path
    label: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """All that lies under some folders. `notes`: a line for each thing that could not be read."""

    runs: tuple[Run, ...]
    unfinished: tuple[Unfinished, ...]
    notes: tuple[str, ...]


def find(roots: Iterable[Path]) -> Found:
    """A folder that lies below two of the roots counts once."""
    runs: dict[Path, Run] = {}
    unfinished: dict[Path, Unfinished] = {}
    notes: list[str] = []
    for root in roots:
        if not root.exists():
            notes.append(f"there is no folder {root}")
            continue
        files = result_files(root)
        jobs = sorted(root.rglob(cells.JOB)) if root.is_dir() else []
        races = sorted(root.rglob(table.FILE)) if root.is_dir() else []
        notes += [f"{race.parent} is a race of `decodelab peers`: {race} has its tables" for race in races]
        if not files and not jobs and not races:
            notes.append(f"there is no run under {root}")
        for job in jobs:
            # a sweep may be at work, so that what is running counts as running
            cell = cells.read(job.parent, live=True)
            if cell is not None and cell.result is None:
                reason = cell.state.detail or ("or killed: the sweep knows" if cell.state.status == "running" else "")
                found = Unfinished(job.parent, cell.job.label, cell.state.status, reason)
                unfinished.setdefault(job.parent.resolve(), found)
        for file in files:
            # a result that a cell left before it was tried again is not what it came to
            if (where := file.parent.resolve()) in runs or where in unfinished:
                continue
            try:
                runs[where] = Run(file.parent, read_result(file))
            except UserError as error:
                notes.append(str(error))
    return Found(tuple(runs.values()), tuple(unfinished.values()), tuple(dict.fromkeys(notes)))


def at(data: Any, path: str) -> Any:
    """The value behind dotted keys; None where one is missing."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def number_at(data: Any, path: str) -> float | None:
    """A finite number, or None."""
    value = at(data, path)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and -_MOST < value < _MOST else None  # which is false of NaN
