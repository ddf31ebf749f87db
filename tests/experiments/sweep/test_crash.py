"""A sweep in real processes: killed by kill -9 in the middle, started again, with cells that crash, hang and run on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decodelab.experiments.cli import main
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.sweep.stage import gone

DRAFTER = '''
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path

from decodelab.decoding.draft import Needs
from decodelab.drafting.prompt_lookup import PromptLookup


@dataclass(frozen=True)
class Act:
    """Drafts as prompt_lookup does, if it comes to that."""

    how: str
    sources = ("prompt",)
    needs = Needs()
    gives = PromptLookup().gives

    def check(self, target):
        return []

    def build(self, resources):
        print("about to", self.how)
        paused = Path("paused")
        if self.how == "pause" and not paused.exists():
            paused.touch()
            time.sleep(600)
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        return PromptLookup().build(resources)
'''


def waited_for(file: Path, process: "subprocess.Popen[bytes]") -> None:
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.05)


def test_a_sweep_survives(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "crashlab").mkdir()
    (tmp_path / "crashlab" / "act.py").write_text(DRAFTER)
    (tmp_path / "conf" / "drafting").mkdir(parents=True)
    (tmp_path / "conf" / "drafting" / "act.yaml").write_text("_target_: crashlab.act.Act\nhow: good\n")
    (tmp_path / "task.jsonl").write_text('{"prompt": "ab ab ab"}\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["run", "-m", "--config-dir", "conf", "trusted=[crashlab]", "drafting=act"]
    words += ["drafting.how=good,pause,crash", f"model.path={bench.checkpoint}", "task.path=task.jsonl"]
    words += ["device=cpu", "dtype=float32", "threads=1", "timing=untimed", "task.max_new_tokens=4", "output=night"]
    command = "import sys; from decodelab.experiments.cli import main; sys.exit(main(sys.argv[1:]))"
    night = tmp_path / "night"

    def cells() -> dict[str, Path]:
        return {json.loads(f.read_text())["label"].partition("=")[2]: f.parent for f in night.glob("*/job.json")}

    def state(how: str) -> dict:
        return json.loads((cells()[how] / "status.json").read_text())

    first = subprocess.Popen([sys.executable, "-P", "-c", command, *words], stderr=subprocess.PIPE)
    waited_for(tmp_path / "paused", first)
    worker = state("pause")["pid"]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert gone(worker)
    assert (state("good")["status"], state("pause")["status"]) == ("done", "running")
    finished = (cells()["good"] / "result.json").stat()

    assert main(words) == 1
    assert {how: (state(how)["status"], state(how)["detail"]) for how in cells()} == {
        "good": ("done", ""),
        "pause": ("done", ""),
        "crash": ("failed", "the process ended with SIGSEGV (exit 139)"),
    }
    again = (cells()["good"] / "result.json").stat()
    assert (again.st_ino, again.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)
    log = (cells()["crash"] / "log.txt").read_text()
    assert "about to crash" in log
    assert "Fatal Python error: Segmentation fault" in log
    assert 'act.py", line' in log
    assert "about to" not in (told := capsys.readouterr()).out + told.err
    assert "2 of 3 cells are done" in told.out
