"""A cell of a sweep and its folder: what was asked (`job.json`), how it went (`status.json`), what came out
(`result.json`), what was said (`log.txt`). The manifest of a sweep is nothing but its folders, scanned."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, get_args, runtime_checkable

from ...errors import UserError
from ..files import misfit, read_result, write_atomic
from .grid import Cell

Status = Literal[
    "done",
    "broken",  # it ran, and its output is not the target's
    "failed",  # an exception, a signal, an exit
    "out_of_memory",  # also a process that something killed
    "timeout",
    "refused",  # the configuration cannot work
    "interrupted",  # by Ctrl-C; what was finished is kept
    "lost",  # it was running when the sweep was killed
    "running",
    "not started",  # the sweep stopped before it: too many failures, or no time left
]
JOB, STATUS, RESULT, LOG = "job.json", "status.json", "result.json", "log.txt"
_JOB: Mapping[str, Any] = {
    "key": str, "label": str, "job": str, "overrides": [str], "config_dirs": [str], "threads": (int, None),
    "group": str, "sweep": str,
}  # fmt: skip
_STATE: Mapping[str, Any] = {
    "status": str, "detail?": str, "started_at?": (str, None), "seconds?": (float, None), "pid?": (int, None),
    "code?": (str, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked. `group`: cells of one group share a loaded target."""

    key: str
    label: str
    job: str
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    threads: int | None
    group: str
    sweep: str


@dataclass(frozen=True, slots=True)
class State:
    """How it went. `detail`: one line, why; `seconds`: from the cell's begin in its worker to its end; `code`: a digest
    of the sources that ran."""

    status: Status
    detail: str = ""
    started_at: str | None = None
    seconds: float | None = None
    pid: int | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """A cell that was run, skipped or refused. `result`: what result.json holds, of a cell that is done or broken."""

    status: Status
    key: str
    folder: Path
    result: Mapping[str, Any] | None
    seconds: float | None
    detail: str = ""
    label: str = ""
    stale: bool = False  # done by another version of the code


@runtime_checkable
class Runner(Protocol):
    """What runs one cell after another; a search asks it for values."""

    def run_cell(self, cell: Cell) -> CellOutcome:
        """Skips what is done. Raises KeyboardInterrupt after Ctrl-C, once the cell's finished prompts are written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A cell's folder, read. `inferred`: the state is not what status.json says, because its process never came to
    write it."""

    folder: Path
    job: Job
    state: State
    result: Mapping[str, Any] | None
    inferred: bool = False

    def outcome(self, code: str | None = None) -> CellOutcome:
        """`code`: of the sources now."""
        s = self.state
        stale = s.status == "done" and code not in (None, s.code)
        return CellOutcome(s.status, self.job.key, self.folder, self.result, s.seconds, s.detail, self.job.label, stale)


def scan(folder: Path, *, live: bool = False) -> list[Found]:
    """The cells of a sweep's folder, by their names. `live`: a sweep is at work in it, so one may be running."""
    return [found for at in sorted(folder.glob(f"*/{JOB}")) if (found := read(at.parent, live=live)) is not None]


def read(folder: Path, *, live: bool = False) -> Found | None:
    """None where no cell was. Of a cell that nobody ended, a result that is whole tells how it went; a file that is
    damaged counts as gone."""
    job, status = _json(folder / JOB, _JOB), _json(folder / STATUS, _STATE)
    if job is None:
        return None
    asked = Job(**{**job, "overrides": tuple(job["overrides"]), "config_dirs": tuple(job["config_dirs"])})
    written = State("lost", "its status.json is gone or damaged")
    if status is not None and status["status"] in get_args(Status):
        written = State(**status)
    if written.status not in ("done", "broken", "running", "interrupted"):
        return Found(folder, asked, written, None)
    result: Mapping[str, Any] = {}
    with suppress(UserError):
        result = read_result(folder / RESULT)
    if result.get("key") == asked.key and result["status"] in get_args(Status):
        state = replace(written, status=result["status"], pid=None)
        return Found(folder, asked, state, result, state != written)
    if written.status == "interrupted" or (live and written.status == "running"):
        return Found(folder, asked, written, None)
    return Found(folder, asked, replace(written, status="lost", detail=_LOST[written.status], pid=None), None, True)


_LOST: Mapping[str, str] = {
    "running": "its process was gone when the sweep was started again",
    "done": "its result.json is gone or damaged",
    "broken": "its result.json is gone or damaged",
}


def write(folder: Path, content: Job | State) -> None:
    """Whole or not at all."""
    name = JOB if isinstance(content, Job) else STATUS
    write_atomic(folder / name, json.dumps(asdict(content), indent=1) + "\n")


def last_line(folder: Path) -> str:
    """Of the cell's log, without blank ones."""
    try:
        with (folder / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 2000))
            return next(_backwards(file.read().decode("utf-8", errors="replace")), "")
    except OSError:
        return ""


def _backwards(text: str) -> Iterator[str]:
    return (line.strip() for line in reversed(text.splitlines()) if line.strip())


def _json(file: Path, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where there is none, or none of ours."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refused)
        if misfit(found, shape) is None and set(found) <= {name.removesuffix("?") for name in shape}:
            return dict(found)
    return None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no time")
