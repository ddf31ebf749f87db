"""A worker's process: what is asked of it, and what its end says. Small scripts stand in for the real one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decodelab.experiments.sweep import process
from decodelab.experiments.sweep.process import CellWorker, Worker, ended
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
