"""Sweeps over a tiny model whose cells run in no process of their own: a stand-in writes what each comes to."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decodelab.experiments.compose import Composer
from decodelab.experiments.sweep import sweep as sweeps
from decodelab.experiments.sweep.cells import JOB, RESULT, State, Status, write
from decodelab.experiments.sweep.grid import composed, expand
from decodelab.tests.experiments.bench import Bench

Deed = Status | tuple[Status, str] | type[BaseException] | Callable[[], tuple[Status, str] | None]
INTERVAL = {"value": 1.5, "low": 1.25, "high": 1.75, "n": 8}


@dataclass
class Stage:
    """`does`: what a cell comes to, by its label. A status: the worker writes it, with a whole result where it is done.
    A status and a reason: the worker is gone, as after a crash. An exception: the sweep itself ends there."""

    bench: Bench
    composer: Composer
    does: dict[str, Deed] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)  # a worker each, by its group
    stopped: int = 0

    def sweep(self, *words: str, job: str = "run") -> int:
        task = self.bench.root / "task.jsonl"
        if not task.exists():
            task.write_text('{"prompt": "ab ab"}\n')
        common = [f"model.path={self.bench.checkpoint}", f"task.path={task}", f"output={self.folder}"]
        common += ["device=cpu", "threads=1", "dtype=float32"]
        given = {word.partition("=")[0] for word in words}
        common = [word for word in common if word.partition("=")[0] not in given]
        overrides = [*common, *words]
        cells = expand(overrides, self.composer)
        return sweeps.sweep(job, cells, composed(cells, self.composer), overrides, start_worker=self.start)

    @property
    def folder(self) -> Path:
        return self.bench.folder

    def start(self, group: str, log: Path, keep: Sequence[int] = ()) -> "Worker":
        log.touch()
        assert [os.fstat(fd).st_ino for fd in keep] == [(self.folder / ".lock").stat().st_ino]  # it holds the lock too
        self.started.append(group)
        return Worker(group, self)

    def states(self) -> dict[str, str]:
        """Status and reason by label, as the files have them."""
        found = {}
        for file in self.folder.glob(f"*/{JOB}"):
            state = json.loads((file.parent / "status.json").read_text())
            found[json.loads(file.read_text())["label"]] = f"{state['status']} {state['detail']}".strip()
        return dict(sorted(found.items()))

    def cell(self, label: str) -> Path:
        (found,) = (f.parent for f in self.folder.glob(f"*/{JOB}") if json.loads(f.read_text())["label"] == label)
        return found


@dataclass
class Worker:
    group: str
    stage: Stage
    pid: int = 0

    def run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> tuple[Status, str] | None:
        job = json.loads((folder / JOB).read_text())
        label = job["label"]
        self.stage.ran.append(label)
        deed = self.stage.does.get(label, "done")
        tick()
        if isinstance(deed, type):
            raise deed
        if callable(deed):
            deed = deed() or "done"
        if isinstance(deed, tuple):
            return deed
        if deed in ("done", "broken", "interrupted"):
            (folder / RESULT).write_text(json.dumps(result(job["key"], deed)))
        write(folder, State(deed, seconds=self.stage.seconds.get(label, 2.0), code="code"))
        return None

    def stop(self) -> None:
        self.stage.stopped += 1


def result(key: str, status: str = "done") -> dict[str, Any]:
    """As much of a result.json as a sweep reads."""
    return {
        "schema": 1,
        "key": key,
        "config": {},
        "digests": {},
        "status": status,
        "speedup": INTERVAL,
        "strategy": {"tokens_per_step": 2.125, "acceptance_rate": 0.5},
        "exactness": {"verdict": "exact"},
        "quality": None,
    }


def gone(pid: int) -> bool:
    """Within a moment; what nobody waits for stays as a zombie."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False
