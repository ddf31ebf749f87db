"""A sweep: cells in one folder, each run once, by worker processes that may crash, hang or be killed.

The folder is the truth: the same command over the same folder runs what is not done yet.
"""

import hashlib
import json
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ...errors import UserError
from ..columns import stdout
from ..compose import Composer
from ..files import MIRRORED, NOT_IN_KEY, write_atomic
from ..format import duration
from .cells import LOG, RESULT, CellOutcome, Found, Job, State, Status, last_line, read, scan, write
from .grid import Cell
from .lock import Lock, lock_folder, lock_gpu
from .process import CellWorker, Worker
from .settings import SweepSettings
from .show import Display, line, reasons, rough, table
from .version import code_digest, package_digest

if TYPE_CHECKING:  # torch, which planning imports
    from ...decoding.model.source import ModelSpec, Source
    from ..config import RunConfig
    from ..quality.settings import QualitySettings
    from .guess import Work

SWEEP = "sweep.json"
StartWorker = Callable[[str, Path, Sequence[int]], CellWorker]  # (group, its first log, descriptors to inherit)
_FAILED: tuple[Status, ...] = ("broken", "failed", "out_of_memory", "timeout")
_SOUND: tuple[Status, ...] = ("done", "broken", "refused")  # after which the worker is as good as new
_SLUG = 60  # characters of a folder's name, beside its key: of 4 bytes each, a disk takes no more
# by cells of one warm target, with its weights
_SHARED = ("dtype", "device", "kernels", "threads", "quantization", "attention")


def sweep(
    job: str,
    cells: Sequence[Cell],
    configs: Sequence["RunConfig"],
    overrides: Sequence[str],
    config_dirs: Sequence[Path] = (),
    start_worker: StartWorker = Worker,
) -> int:
    """Every cell of a command, those that share a target one after the other. `configs`: of the cells. 0: all are done;
    1: some are not; 130: interrupted, and what was finished is kept."""
    settings = settings_of(configs)
    folder = folder_of(settings.output, job, overrides, config_dirs)
    with Sweep(folder, job, settings, config_dirs, start_worker) as at:
        planned = at.expect(cells)
        code = 0
        try:
            for one in planned:
                at.run(one)
        except KeyboardInterrupt:
            code = 130
        others = at.others()
    console = stdout()
    outcomes = at.outcomes
    for part in table(outcomes, console.width):
        console.print(part)
    for text in (*reasons(outcomes), *others):
        console.print(text, soft_wrap=True)
    if any(outcome.stale for outcome in outcomes):
        console.print("* done by another version of the code; rerun=stale runs it again", soft_wrap=True)
    done = sum(outcome.status == "done" for outcome in outcomes)
    todo = "" if done == len(planned) else f"; the same command with output={folder} runs the others"
    console.print(f"{done} of {len(planned)} cells are done, in {folder}{todo}", soft_wrap=True)
    return code or int(done < len(planned))


def settings_of(configs: Sequence["RunConfig"]) -> SweepSettings:
    """What the cells say, with one voice, of the sweep as a whole."""
    said = {}
    for name in (one.name for one in fields(SweepSettings)):
        values = list(dict.fromkeys(getattr(config, name) for config in configs))
        if len(values) > 1:
            raise UserError(f"{name} is of the sweep as a whole: one value, not {' and '.join(map(str, values))}")
        said[name] = values[0]
    return SweepSettings(**said)


def folder_of(output: str | None, job: str, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Path:
    """`output`, or outputs/sweep-HASH with a hash of the command, so that the same command finds its cells again."""
    if output is not None:
        return Path(output).expanduser()
    words = [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] not in NOT_IN_KEY]
    command = json.dumps([job, words, [str(folder) for folder in config_dirs]])
    return Path("outputs") / f"sweep-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell that has a key. `code`: a digest of the sources now; `against`: a run whose quality is its reference;
    `wrong`: why it cannot run at all; `trace`: where a bug shows itself then."""

    job: Job
    folder: Path
    device: str = "cpu"
    timeout: float | None = None
    code: str = ""
    against: Path | None = None
    quality: "QualitySettings | None" = None
    work: "Work | None" = None
    wrong: State | None = None
    trace: str = ""


@dataclass
class Sweep:
    """Runs cells in `folder`; a context that keeps other sweeps out of it. `job`: run or evaluate."""

    folder: Path
    job: str
    settings: SweepSettings = field(default_factory=SweepSettings)
    config_dirs: Sequence[Path] = ()
    start_worker: StartWorker = Worker

    def __post_init__(self) -> None:
        self.config_dirs = tuple(path.expanduser().resolve() for path in self.config_dirs)
        self._composer = Composer(self.config_dirs)
        self._ended: dict[str, CellOutcome] = {}  # by key
        self._waiting: dict[str, Planned] = {}
        self._done: dict[str, Found] = {}  # of those that are expected; decided once
        self._total = 0
        self._sources: dict[ModelSpec, Source] = {}
        self._guesses: dict[Work, float | None] = {}
        self._locks: dict[str, Lock] = {}
        self._worker: CellWorker | None = None
        self._interrupted = False
        self._display = Display()

    def __enter__(self) -> "Sweep":
        try:
            if (self.folder / RESULT).exists():
                raise UserError(f"output={self.folder} holds a single run; name another folder for a sweep")
            self._locks["folder"] = lock_folder(self.folder)
            self.id = self._identity()
            self._seconds = self._recover()
        except OSError as error:
            self._release()
            raise UserError(
                f"output folder {self.folder} cannot be written ({error.strerror}); name another with output=DIR"
            ) from error
        self._package = package_digest()
        self._began = time.monotonic()
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_worker()
        self._display.__exit__(*error)
        self._release()

    def _release(self) -> None:
        for lock in self._locks.values():
            lock.release()

    def _identity(self) -> str:
        """Of the sweep that made the folder; it stays when the sweep is started again."""
        file = self.folder / SWEEP
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads(file.read_text(encoding="utf-8"))["id"])
        made = uuid.uuid4().hex[:8]
        write_atomic(file, json.dumps({"schema": 1, "id": made, "started_at": _now()}, indent=1) + "\n")
        return made

    def _recover(self) -> dict[str, list[float]]:
        """Write down what a killed sweep left unsaid. The seconds of the cells that are done, by group."""
        seconds: dict[str, list[float]] = {}
        for found in scan(self.folder):
            if not found.job.group:  # it was wrong before it could run, and may be right now
                shutil.rmtree(found.folder)
                continue
            if found.inferred:
                write(found.folder, found.state)
            if found.state.status == "done" and found.state.seconds is not None:
                seconds.setdefault(found.job.group, []).append(found.state.seconds)
        return seconds

    @property
    def outcomes(self) -> list[CellOutcome]:
        """Of the cells so far, as they came; of those that an interrupt left, too."""
        left = [
            self._done[key].outcome(one.code) if key in self._done else self._not_started(one, "interrupted")
            for key, one in self._waiting.items()
        ]
        return [*self._ended.values(), *left]

    def expect(self, cells: Sequence[Cell]) -> list[Planned]:
        """The cells in the order in which they are best run, each key once; says what lies ahead."""
        planned: dict[str, Planned] = {}
        for number, cell in enumerate(cells, 1):
            self._display.now(f"reading the files of cell {number}/{len(cells)}: {cell.label}")
            one = self.plan(cell)
            if (same := planned.setdefault(one.job.key, one)) is not one:
                self._display.say(f"{one.job.label} is the same cell as {same.job.label}: run once")
        groups = list(dict.fromkeys(one.job.group for one in planned.values()))
        ordered = sorted(planned.values(), key=lambda one: groups.index(one.job.group))
        for one in ordered:
            self._lock_gpu(one.device)
        self._waiting = {one.job.key: one for one in ordered}
        self._total = len(ordered)
        self._done = {one.job.key: kept for one in ordered if (kept := self._kept(one)) is not None}
        todo = [one for one in ordered if one.wrong is None and one.job.key not in self._done]
        wrong = sum(one.wrong is not None for one in ordered)
        cells_in = f"{len(ordered)} cell{'' if len(ordered) == 1 else 's'} in {self.folder}"
        said = f"{cells_in}: {len(ordered) - len(todo) - wrong} done, {len(todo)} to run"
        said += f", {wrong} refused" if wrong else ""
        if todo:
            unknown = f"how long is unknown until the first is done; {LOG} in its folder says how far it is"
            said += f"; {self._ahead(self._left()) or unknown}"
        self._display.say(said)
        return ordered

    def foresee(self, total: int, what: str) -> None:
        """Of cells that come one by one, as a search asks for them; says what lies ahead."""
        self._total = total
        self._display.say(f"{what}, in {self.folder}")

    def others(self) -> list[str]:
        """What is said of cells in the folder that are not of this command."""
        labels = {one.label for one in self.outcomes}
        found = [one for one in scan(self.folder) if one.job.key not in self._ended | self._waiting]
        lines = [
            f"stale: {one.folder.name}: {one.job.label}, of files or settings that have changed since"
            for one in found
            if one.job.label in labels
        ]
        if len(found) > len(lines):
            n = len(found) - len(lines)
            lines.append(f"{n} cell{' in the folder is' if n == 1 else 's in the folder are'} of other commands")
        return lines

    def plan(self, cell: Cell) -> Planned:
        """Its key and folder, without loading weights. What is wrong with it is said of this cell alone."""
        from .worker import verdict  # torch

        try:
            return self._identified(cell)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a part of the user's own runs here; other cells wait
            status, detail = verdict(error)
            key = hashlib.sha256(json.dumps([self.job, cell.overrides]).encode()).hexdigest()[:12]
            trace = "" if status == "refused" else traceback.format_exc()
            folder = self.folder / f"{status}-{key}"
            return Planned(self._asked(cell, key), folder, wrong=State(status, detail), trace=trace)

    def _identified(self, cell: Cell) -> Planned:
        from ..composition import resolve
        from ..hardware import torch_threads
        from ..identity import identify
        from .guess import Work

        config = self._composer.compose(cell.overrides)
        config.tracking.check()
        with torch_threads(config.threads):
            what = identify(config, speed=self.job == "run", opened=self._opened)
        resolve(config, what.source, what.task).notes()
        group = json.dumps([what.digests["weights"], *(what.resolved.get(name) for name in _SHARED)], sort_keys=True)
        return Planned(
            self._asked(
                cell,
                what.key,
                group=hashlib.sha256(group.encode()).hexdigest()[:8],
                threads=what.resolved["threads"],
            ),
            self.folder / f"{what.slug[:_SLUG]}-{what.key}",
            device=str(what.device),
            timeout=config.cell.timeout,
            code=code_digest(self._package, config.trusted),
            against=None if config.against is None else Path(config.against).expanduser(),
            quality=config.quality,
            work=Work.of(config, what),
        )

    def _opened(self, spec: "ModelSpec") -> "Source":
        """Once for all cells: its tokenizer and headers take up to a second to read."""
        from ...decoding.model.source import open_source

        if spec not in self._sources:
            self._sources[spec] = open_source(spec, self._display.step)
        return self._sources[spec]

    def _asked(self, cell: Cell, key: str, group: str = "", threads: int | None = None) -> Job:
        folders = tuple(str(folder) for folder in self.config_dirs)
        label = cell.label or "the only cell"
        return Job(key, label, self.job, tuple(cell.overrides), folders, threads, group, self.id)

    def run_cell(self, cell: Cell) -> CellOutcome:
        """Plan it, and run it unless it is done, or wrong, or the sweep's limits let no other cell start."""
        return self.run(self.plan(cell))

    def run(self, planned: Planned) -> CellOutcome:
        """Raises KeyboardInterrupt after Ctrl-C, once the finished prompts of the cell are written."""
        key = planned.job.key
        if key not in self._ended:
            self._lock_gpu(planned.device)
            kept = self._done.get(key) or self._kept(planned)
            outcome = self._outcome(planned) if kept is None else self._compared(planned, kept)
            self._ended[key] = outcome = replace(outcome, label=planned.job.label)
            self._waiting.pop(key, None)
            if kept is None:
                count = f"[{len(self._ended)}/{self._total}] " if self._total else ""
                left = f" ({ahead})" if len(self._ended) < self._total and (ahead := self._ahead(self._left())) else ""
                self._display.say(f"{count}{line(outcome)}{left}")
            if self._interrupted:
                raise KeyboardInterrupt
        return self._ended[key]

    def _outcome(self, planned: Planned) -> CellOutcome:
        job = planned.job
        if (wrong := planned.wrong) is not None:
            self._write(planned, wrong)
            if planned.trace:
                (planned.folder / LOG).write_text(planned.trace, encoding="utf-8")
            return CellOutcome(wrong.status, job.key, planned.folder, None, None, wrong.detail, job.label)
        if (why := self._stopped(planned)) is not None:
            return self._not_started(planned, why)
        self._clear(planned)
        self._write(planned, State("running", started_at=_now()))
        began = time.monotonic()
        try:
            ended = self._work(planned, began)
        except KeyboardInterrupt:
            self._interrupted, ended = True, ("interrupted", "nothing of it was finished")
        found = read(planned.folder)
        assert found is not None  # it was written above
        if found.inferred:
            state = found.state
            if ended is not None and state.status == "lost":
                status, detail = ended
                state = replace(state, status=status, detail=detail, seconds=round(time.monotonic() - began, 3))
            found = replace(found, state=state)
            write(planned.folder, state)
        if found.state.status not in _SOUND:
            self._stop_worker()
        if found.state.status == "done" and found.state.seconds is not None:
            self._seconds.setdefault(job.group, []).append(found.state.seconds)
        return found.outcome()

    def _work(self, planned: Planned, began: float) -> tuple[Status, str] | None:
        """In the worker that is warm for it, or in a new one."""
        if self._worker is not None and self._worker.group != planned.job.group:
            self._stop_worker()
        if self._worker is None:
            inherited = [lock.fd for lock in self._locks.values()]
            self._worker = self.start_worker(planned.job.group, planned.folder / LOG, inherited)
            for lock in self._locks.values():
                lock.hand_down(self._worker.pid)

        ahead = self._left()

        def tick() -> None:  # while the cell is timed, so nothing is read but the end of its log
            spent = time.monotonic() - began
            left = None if ahead is None else self._ahead(max(0.0, ahead - spent))
            words = [planned.job.label, duration(spent), last_line(planned.folder), *filter(None, [left])]
            self._display.now(f"[{len(self._ended) + 1}/{self._total or '…'}] {' · '.join(words)}")

        return self._worker.run(planned.folder, planned.timeout, tick)

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def _kept(self, planned: Planned) -> Found | None:
        """The cell as it is, where it is not to be run."""
        found = read(planned.folder)
        if found is None or found.state.status != "done" or self.settings.rerun == "all":
            return None
        return None if self.settings.rerun == "stale" and found.outcome(planned.code).stale else found

    def _compared(self, planned: Planned, kept: Found) -> CellOutcome:
        """A cell that is kept, beside the reference that is asked for now, which is no part of a key."""
        outcome = kept.outcome(planned.code)
        if planned.against is None or planned.quality is None:
            return outcome
        from ..quality.against import compare_kept

        try:
            compare_kept(planned.folder, planned.against, planned.quality.epsilon, planned.quality.allow)
        except UserError as error:  # the cell stays what it is; what was asked of it now cannot be done
            return replace(outcome, status="refused", detail=str(error))
        found = read(planned.folder)
        assert found is not None  # it was kept
        return found.outcome(planned.code)

    def _clear(self, planned: Planned) -> None:
        """Of what was there, only what a cell of the same code had got to is of use. Mirrored runs stay: they may not
        have been uploaded yet, and their ids are taken."""
        found = read(planned.folder)
        if found is not None and (found.state.status == "done" or found.state.code != planned.code):
            for path in planned.folder.iterdir():
                if path.is_dir() and path.name != MIRRORED:
                    shutil.rmtree(path)
                elif not path.is_dir():
                    path.unlink()
        (planned.folder / RESULT).unlink(missing_ok=True)

    def _write(self, planned: Planned, state: State) -> None:
        planned.folder.mkdir(exist_ok=True)
        write(planned.folder, planned.job)
        write(planned.folder, state)

    def _stopped(self, planned: Planned) -> str | None:
        """Why no other cell starts, or not this one."""
        most, hours = self.settings.stop_after_failures, self.settings.budget_hours
        failed = sum(outcome.status in _FAILED for outcome in self._ended.values())
        if most is not None and failed >= most:
            return f"{failed} cells have failed (stop_after_failures={most})"
        if hours is None:
            return None
        left, expected = 3600 * hours - (time.monotonic() - self._began), self._expected(planned)
        if left <= 0:
            return f"the time is up (budget_hours={hours:g})"
        if expected is not None and expected > left:
            takes = f"it takes {'about' if self._seconds else 'perhaps'} {duration(expected)}"
            return f"{takes}, and of budget_hours={hours:g} {duration(left)} are left"
        return None

    def _not_started(self, planned: Planned, why: str) -> CellOutcome:
        return CellOutcome("not started", planned.job.key, planned.folder, None, None, why, planned.job.label)

    def _expected(self, planned: Planned) -> float | None:
        """Seconds: the mean of the cells of its group that are done, or else of all, or else a guess."""
        known = self._seconds.get(planned.job.group) or [s for group in self._seconds.values() for s in group]
        if known or planned.work is None:
            return fmean(known) if known else None
        if planned.work not in self._guesses:
            self._display.now("measuring how fast the memory is")
            self._guesses[planned.work] = planned.work.seconds()
        return self._guesses[planned.work]

    def _left(self) -> float | None:
        """Seconds until the last of the expected cells is done; None while nothing is known."""
        waiting = (one for key, one in self._waiting.items() if one.wrong is None and key not in self._done)
        todo = [self._expected(one) for one in waiting]
        if foreseen := self._total - len(self._ended) - len(self._waiting):
            known = [s for group in self._seconds.values() for s in group]
            todo += [fmean(known) if known else None] * foreseen
        return None if None in todo else sum(filter(None, todo))

    def _ahead(self, seconds: float | None) -> str | None:
        if seconds is None or self._seconds:
            return None if seconds is None else f"about {duration(seconds)} left"
        return f"perhaps {rough(seconds)} left or several times that, a guess from the bytes of the weights"

    def _lock_gpu(self, device: str) -> None:
        if device.startswith("cuda") and device not in self._locks:
            self._locks[device] = lock_gpu(device)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
