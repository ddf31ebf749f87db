"""One sweep in real processes: cells that crash, hang, run out of memory and raise; killed midway, started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.cli import main
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.sweep.stage import gone

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
