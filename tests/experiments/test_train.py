"""`decodelab train`: the folder it writes, and that the same command goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from decodelab.experiments import train as job
from decodelab.experiments.cli import main

KINDS = {
    "medusa": ["train.heads=2"],
    "eagle": ["train.mlp_dim=16"],
    "draft": ["train.student.keep=1"],
    "student": ["train.student.keep=1"],
}
FILES = {"draft": "model.safetensors", "student": "model.safetensors"}
USED = {"draft": ("drafting=draft_model", "drafting.model.path="), "student": ("model.path=",)}


def words(bench: Any, kind: str, output: str, *more: str) -> list[str]:
    task = bench.root / "prompts.jsonl"
    rows = [{"id": f"p{n}", "prompt": f"{n} ab {n} ab {n}"} for n in range(8)]
    task.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        "train", f"train={kind}", f"model.path={bench.checkpoint}", "device=cpu", "threads=1", "dtype=float32",
        f"task.path={task}", "task.max_new_tokens=12", "batch=3", "train.schedule.held_back=2",
        "train.schedule.batch=2", "train.schedule.every=3", "train.schedule.epochs=4", *KINDS[kind],
        f"output={bench.root / output}", *more,
    ]  # fmt: skip


def parameters(folder: Path, kind: str) -> dict[str, Any]:
    return load_file(folder / FILES.get(kind, f"{kind}.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_used(kind: str, bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, kind, "heads")) == 0
    folder = bench.root / "heads"
    said = capsys.readouterr().out
    assert "6 texts, judged on 2 others" in said
    *used, path = USED.get(kind, (f"drafting={kind}", "drafting.path="))
    used.append(f"{path}{folder}")
    assert f"written to {folder}; {' '.join(used)}" in said
    with safe_open(folder / FILES.get(kind, f"{kind}.safetensors"), framework="pt") as stored:
        note = json.loads(stored.metadata()["decodelab"])
    assert (note["kind"], note["prompts"], note["task"]) == (kind, 6, "prompts")
    course = json.loads((folder / "course.json").read_text())
    assert [row["step"] for row in course["rows"]] == [3, 6, 9, 12]
    assert bench.run(*used, "timing=untimed") == 0
    assert bench.result["exactness"]["verdict"] == "exact"


def test_answers_are_made_once_and_only_those_that_are_missing(bench: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    strategy = job.Lab.strategy

    def counted(self: Any, requests: Sequence[Any], *args: Any, **options: Any) -> Any:
        asked.append(len(requests))
        return strategy(self, requests, *args, **options)

    monkeypatch.setattr(job.Lab, "strategy", counted)
    assert main(words(bench, "medusa", "out")) == 0
    assert asked == [3, 3, 2]
    file = bench.root / "out" / "answers.jsonl"
    whole = file.read_text()
    asked.clear()
    assert main(words(bench, "medusa", "out")) == 0  # it is over
    assert not asked
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:20])
    (bench.root / "out" / "state.safetensors").unlink()
    assert main(words(bench, "medusa", "out")) == 0
    assert asked == [3]
    # of other lengths: all anew
    asked.clear()
    (bench.root / "out" / "state.safetensors").unlink()
    assert main(words(bench, "medusa", "out", "task.max_new_tokens=9")) == 0
    assert asked == [3, 3, 2]


def test_a_training_that_was_killed_goes_on_to_the_same_heads(bench: Any):
    """kill -9 in a process of its own, after the first state was saved."""
    assert main(words(bench, "medusa", "whole")) == 0
    folder = bench.root / "killed"
    folder.mkdir()
    whole = bench.root / "whole"
    (folder / "costs.json").write_text((whole / "costs.json").read_text())  # times are judged alike
    code = (
        "import sys, time\n"
        "from decodelab.decoding import training\n"
        "save = training._save\n"
        "def slowly(*args):\n"
        "    save(*args)\n"
        "    print('saved', flush=True)\n"
        "    time.sleep(60)\n"
        "training._save = slowly\n"
        "from decodelab.experiments.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, *words(bench, "medusa", "killed")]
    environment = os.environ | {"JAXTYPING_DISABLE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        while "saved" not in process.stdout.readline():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert (folder / "state.safetensors").exists()
    assert main(words(bench, "medusa", "killed")) == 0
    a, b = parameters(whole, "medusa"), parameters(folder, "medusa")
    assert a.keys() == b.keys()
    assert all(bool((a[name] == b[name]).all()) for name in a)


def test_a_warm_start_begins_where_the_other_ended(bench: Any):
    assert main(words(bench, "medusa", "first")) == 0
    start = f"train.start={bench.root / 'first'}"
    assert main(words(bench, "medusa", "second", start)) == 0
    losses = [json.loads((bench.root / n / "course.json").read_text())["rows"][0]["loss"] for n in ("first", "second")]
    assert losses[1] < losses[0]
    assert main(words(bench, "medusa", "third", start, "train.heads=3")) == 2


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["output=null"], "train writes a folder: name it with output=DIR"),
        (["train.schedule.held_back=8"], "train.schedule.held_back=8 of 8 prompts leaves none to learn from"),
        (["train.schedule.longest=4"], "no text to learn from"),
    ],
)
def test_what_is_wrong_is_said(more: list[str], line: str, bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "medusa", "out", *more)) == 2
    assert f"decodelab: error: {line}" in capsys.readouterr().err


def test_train_without_a_kind(bench: Any, capsys: pytest.CaptureFixture[str]):
    given = [word for word in words(bench, "medusa", "out") if not word.startswith("train")]
    assert main(["train", *given]) == 2
    assert "name what is to be trained, such as train=medusa" in capsys.readouterr().err
