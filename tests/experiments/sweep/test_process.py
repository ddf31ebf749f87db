"""A worker's process: what is asked of it, and what its end says. Small scripts stand in for the real one.

At the end one sweep in real processes: cells that crash, hang, run out of memory and raise; killed midway, started
again. It stands here because pytest-xdist starts files of few tests last, and would then wait for it alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.cli import main
from decodelab.experiments.sweep import process
from decodelab.experiments.sweep.process import CellWorker, Worker, ended
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.sweep.stage import gone

LOOP = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import os, signal, subprocess, sys, time
print("ready", flush=True)
for line in sys.stdin:
    folder = line.strip()
    {cell}
    print(folder, flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Worker]]:
    monkeypatch.setattr(process, "_SLICE_S", 0.01)
    workers = []

    def begin(cell: str = "pass", script: str = LOOP) -> Worker:
        text = script.replace("{cell}", cell)
        workers.append(Worker("group", tmp_path / "log.txt", (), (sys.executable, "-S", "-E", "-c", text)))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.stop()


def nothing() -> None:
    pass


def test_cells_one_after_the_other(start: Callable[..., Worker], tmp_path: Path):
    worker = start("open(folder + '/asked', 'x').close()")
    assert isinstance(worker, CellWorker)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert worker.run(tmp_path / name, 30.0, nothing) is None
        assert (tmp_path / name / "asked").exists()


@pytest.mark.parametrize(
    ("cell", "status", "detail"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "the process ended with SIGSEGV (exit 139)"),
        ("os._exit(139)", "failed", "the process ended with SIGSEGV (exit 139)"),
        ("os._exit(0)", "failed", "the process ended by itself (exit 0)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "out_of_memory", "the process was killed (SIGKILL), most likely"),
        # what it has started holds its pipe open
        ("subprocess.Popen(['sleep', '60']); os._exit(7)", "failed", "the process ended by itself (exit 7)"),
    ],
)
def test_a_process_that_ends_in_a_cell(
    cell: str, status: str, detail: str, start: Callable[..., Worker], tmp_path: Path
):
    found = start(cell).run(tmp_path, 30.0, nothing)
    assert found is not None
    assert found[0] == status
    assert found[1].startswith(detail)


def test_a_process_that_ends_before_its_first_cell(start: Callable[..., Worker], tmp_path: Path):
    worker = start(script="import sys; print('no such library', file=sys.stderr); sys.exit(1)")
    assert worker.run(tmp_path, 30.0, nothing) == ("failed", "the process ended by itself (exit 1)")
    assert (tmp_path / "log.txt").read_text() == "no such library\n"


def test_a_process_that_does_not_come_up(start: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_START_S", 0.2)
    worker = start(script="import time; time.sleep(60)")
    assert worker.run(tmp_path, None, nothing) == ("failed", "its process was not up after 0.2 s")
    assert gone(worker.pid)


def test_a_cell_that_hangs_is_stopped_with_all_that_it_started(start: Callable[..., Worker], tmp_path: Path):
    hang = "open(folder + '/pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    ticks: list[None] = []
    found = start(hang).run(tmp_path, 0.4, lambda: ticks.append(None))
    assert found == ("timeout", "stopped after 0.4 s (cell.timeout)")
    assert ticks
    assert gone(int((tmp_path / "pid").read_text()))


SWEEP = """
import os, sys
from pathlib import Path
from decodelab.experiments.sweep.process import Worker
worker = Worker("group", Path("log.txt"), (), (sys.executable, "-S", "-E", "-c", sys.argv[1]))
worker.run(Path(), None, lambda: os.kill(os.getpid(), 9) if Path("begun").exists() else None)
"""
HOLDS = """import re
    child = subprocess.Popen(["sleep", "60"])
    open(folder + "/pids", "w").write(f"{os.getpid()} {child.pid}")
    open(folder + "/begun", "w").close()
    re.match("(a+)+$", "a" * 60 + "b")  # no other thread runs meanwhile"""


def test_a_worker_whose_sweep_is_killed_ends_with_all_that_it_started(tmp_path: Path):
    """Also one whose threads cannot run."""
    script = LOOP.replace("{cell}", HOLDS)
    swept = subprocess.run([sys.executable, "-P", "-c", SWEEP, script], cwd=tmp_path, timeout=60, check=False)
    assert swept.returncode == -signal.SIGKILL
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


KEEPS = """
    try:
        open(folder + '/begun', 'w').close()
        time.sleep(60)
    except KeyboardInterrupt:
        open(folder + '/kept', 'w').close()
        {then}
"""


def test_ctrl_c_lets_the_cell_keep_what_it_has(
    start: Callable[..., Worker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def press() -> None:
        if (tmp_path / "begun").exists() and not (tmp_path / "pressed").exists():
            (tmp_path / "pressed").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(KEEPS.replace("{then}", "pass")).run(tmp_path, 30.0, press)
    assert (tmp_path / "kept").exists()
    assert "what this cell has finished is kept; Ctrl-C again stops it at once" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_it_at_once(start: Callable[..., Worker], tmp_path: Path):
    presses = iter(("begun", "kept"))
    awaited = [next(presses)]

    def press() -> None:
        if (tmp_path / awaited[0]).exists():
            awaited[0] = next(presses, "never")
            raise KeyboardInterrupt

    worker = start(KEEPS.replace("{then}", "time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt):
        worker.run(tmp_path, 30.0, press)
    assert awaited == ["never"]
    assert worker.stop() == -signal.SIGKILL


def test_the_terminal_s_ctrl_c_does_not_reach_the_worker(start: Callable[..., Worker], tmp_path: Path):
    worker = start("open(folder + '/session', 'w').write(f'{os.getsid(0)} {os.getpgrp()} {os.getpid()}')")
    worker.run(tmp_path, 30.0, nothing)
    session, group, pid = (tmp_path / "session").read_text().split()
    assert session == group == pid != str(os.getsid(0))


def test_the_kernel_s_count_tells_why_a_process_was_killed():
    assert ended(-9, 3, 4) == ("out_of_memory", "the kernel killed the process: out of memory")
    assert ended(137, 3, 3) == ("out_of_memory", "the process was killed (SIGKILL), most likely for its memory")
    assert ended(-6) == ("failed", "the process ended with SIGABRT (exit 134)")
    assert ended(255) == ("failed", "the process ended by itself (exit 255)")


DRAFTER = """
import os, re, resource, signal, time
from dataclasses import dataclass
from pathlib import Path

from decodelab.decoding.draft import Needs
from decodelab.drafting.prompt_lookup import PromptLookup


@dataclass(frozen=True)
class Act:
    '''Drafts as prompt_lookup does, if it comes to that.'''

    how: str
    sources = ("prompt",)
    needs = Needs()
    gives = PromptLookup().gives

    def check(self, target):
        return []

    def build(self, resources):
        print("about to", self.how)
        with open("built", "a") as file:
            file.write(self.how + " ")
        if self.how == "pause" and not Path("paused").exists():
            Path("paused").touch()
            re.match("(a+)+$", "a" * 60 + "b")  # without end, and no other thread runs meanwhile
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "hang":
            time.sleep(600)
        if self.how == "grow":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28,) * 2)
            bytearray(2**29)
        if self.how == "raise":
            raise ValueError("a bug of the user's")
        return PromptLookup().build(resources)
"""


def waited_for(file: Path, process: "subprocess.Popen[bytes]") -> None:
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a cell reads its size as Linux tells it")
def test_a_sweep_survives(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each good cell is finished once, also across the kill -9; each bad one has its status; the command fails."""
    (tmp_path / "crashlab").mkdir()
    (tmp_path / "crashlab" / "act.py").write_text(DRAFTER)
    (tmp_path / "conf" / "drafting").mkdir(parents=True)
    (tmp_path / "conf" / "drafting" / "act.yaml").write_text("_target_: crashlab.act.Act\nhow: good\n")
    (tmp_path / "task.jsonl").write_text('{"prompt": "ab ab ab"}\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    hows = "good, pause, crash, {drafting.how: hang, cell.timeout: 2}, grow, better, raise"
    words = ["run", "--config-dir", "conf", "trusted=[crashlab]", "drafting=act", f"sweep={{drafting.how: [{hows}]}}"]
    words += [f"model.path={bench.checkpoint}", "task.path=task.jsonl", "task.max_new_tokens=4"]
    words += ["device=cpu", "dtype=float32", "threads=1", "timing=untimed", "output=night"]
    command = "import sys; from decodelab.experiments.cli import main; sys.exit(main(sys.argv[1:]))"
    night = tmp_path / "night"

    def of(how: str) -> Path:
        (found,) = (f.parent for f in night.glob("*/job.json") if f"how={how}" in json.loads(f.read_text())["label"])
        return found

    def state(how: str) -> dict[str, Any]:
        return dict(json.loads((of(how) / "status.json").read_text()))

    first = subprocess.Popen([sys.executable, "-P", "-c", command, *words], stderr=subprocess.PIPE)
    waited_for(tmp_path / "paused", first)
    worker = state("pause")["pid"]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert gone(worker)
    assert (state("good")["status"], state("pause")["status"]) == ("done", "running")
    finished = (of("good") / "result.json").stat()

    assert main(words) == 1
    want = {
        "good": ("done", ""),
        "pause": ("done", ""),
        "crash": ("failed", "the process ended with SIGSEGV (exit 139)"),
        "hang": ("timeout", "stopped after 2 s (cell.timeout)"),
        "grow": ("out_of_memory", "MemoryError"),
        "better": ("done", ""),
        "raise": ("failed", "ValueError: a bug of the user's"),
    }
    assert {how: (state(how)["status"], state(how)["detail"]) for how in want} == want
    assert len(list(night.glob("*/job.json"))) == len(want)
    built = [how for how in (tmp_path / "built").read_text().split() if how != "hang"]  # on a busy machine not yet
    assert built == ["good", "pause", "pause", "crash", "grow", "better", "raise"]
    again = (of("good") / "result.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)
    log = (of("crash") / "log.txt").read_text()
    assert "about to crash" in log
    assert "Fatal Python error: Segmentation fault" in log
    assert 'act.py", line' in log
    assert "ValueError: a bug of the user's" in (of("raise") / "log.txt").read_text()
    assert "about to" not in (told := capsys.readouterr()).out + told.err
    assert "3 of 7 cells are done" in told.out
