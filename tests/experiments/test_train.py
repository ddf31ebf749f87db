"""`decodelab train`: the folder it writes, and that the same command goes on where it was."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from decodelab.decoding import training
from decodelab.decoding.cost import DraftCost
from decodelab.decoding.model.source import ModelSpec
from decodelab.errors import UserError
from decodelab.experiments import train as job
from decodelab.experiments.cli import main
from decodelab.experiments.compose import compose
from decodelab.experiments.sweep.lock import lock_folder
from decodelab.tests.experiments.trainings import KINDS, ROWS, words

FILES = {"draft": "model.safetensors", "student": "model.safetensors"}
USED = {"draft": ("drafting=draft_model", "drafting.model.path="), "student": ("model.path=",)}


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
    model = [] if kind == "student" else [f"model.path={bench.checkpoint}"]
    assert f"\nwritten to {folder}; use it:\ndecodelab run {' '.join([*model, *used])}\n" in said
    with safe_open(folder / FILES.get(kind, f"{kind}.safetensors"), framework="pt") as stored:
        note = json.loads(stored.metadata()["decodelab"])
    assert (note["kind"], note["prompts"], note["task"]) == (kind, 6, "prompts")
    course = json.loads((folder / "course.json").read_text())
    assert [row["step"] for row in course["rows"]] == [3, 6, 9, 12]
    assert course["tokens_per_second"] == course["tokens"] / course["seconds"]
    assert course["peak_memory_bytes"] > 2**20
    assert 0 < course["answers_s"] < 60
    assert {"weights", "task", "answers", "settings"} == course["digests"].keys()
    assert f" of training at {course['tokens_per_second']:,.0f} tokens/s, " in said
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


def test_prompts_come_from_a_dataset(bench: Any):
    given = words(bench, "medusa", "out", "task.dataset=json", "train.schedule.epochs=1")
    assert main(given) == 0
    answers = [json.loads(line) for line in (bench.root / "out" / "answers.jsonl").read_text().splitlines()]
    assert {row["id"] for row in answers} == {row["id"] for row in ROWS}


def test_what_is_left_out_is_told(bench: Any, capsys: pytest.CaptureFixture[str]):
    """Beside it the training goes on; the context holds 128 tokens."""
    rows = [*ROWS, {"id": "long", "prompt": "a" * 117}, {"id": "longer", "turns": ["b" * 150, "and?"]}]
    assert main(words(bench, "medusa", "out", "train.schedule.longest=15", rows=rows)) == 2
    rows.append({"id": "fits", "prompt": "c" * 100})  # it is not among those kept back
    assert main(words(bench, "medusa", "out", "train.schedule.longest=100", rows=rows)) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "left out: 3 prompts that left no room for task.max_new_tokens=12 in the context of 128, "
        "1 text of more than train.schedule.longest=100 tokens"
    )


def test_ctrl_c_loses_nothing(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ctrl_c: None
):
    """In the answers, in a step, in a validation: the same command goes on to the same heads."""
    assert main(words(bench, "medusa", "whole")) == 0
    folder = bench.root / "pressed"
    folder.mkdir()
    (folder / "costs.json").write_text((bench.root / "whole" / "costs.json").read_text())
    strategy, step, judge = job.Lab.strategy, training._step, job.Judge.__call__
    calls = {"strategy": 0, "step": 0, "judge": 0}

    def counted(name: str, at: int) -> bool:
        calls[name] += 1
        return calls[name] == at

    def asked(self: Any, *args: Any, **options: Any) -> Any:
        if counted("strategy", 2):
            raise KeyboardInterrupt
        return strategy(self, *args, **options)

    def stepped(*args: Any) -> None:
        if counted("step", 4):
            signal.raise_signal(signal.SIGINT)
        step(*args)

    def judged(self: Any, learner: Any) -> Any:
        if counted("judge", 2):
            raise KeyboardInterrupt
        return judge(self, learner)

    monkeypatch.setattr(job.Lab, "strategy", asked)
    monkeypatch.setattr(training, "_step", stepped)
    monkeypatch.setattr(job.Judge, "__call__", judged)
    for counts in ((2, 0, 0), (4, 4, 1), (4, 6, 2)):
        assert main(words(bench, "medusa", "pressed")) == 130
        line = "decodelab: interrupted; the same command goes on where it was"
        assert capsys.readouterr().err.splitlines()[-1] == line
        assert tuple(calls.values()) == counts
    assert main(words(bench, "medusa", "pressed")) == 0
    assert tuple(calls.values()) == (4, 12, 5)
    a, b = parameters(bench.root / "whole", "medusa"), parameters(folder, "medusa")
    assert all(bool((a[name] == b[name]).all()) for name in a)


def test_damaged_files(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Made anew, or one line that says what to do."""
    given = words(bench, "medusa", "out", "train.schedule.epochs=1")
    assert main(given) == 0
    folder = bench.root / "out"
    course = json.loads((folder / "course.json").read_text())
    (folder / "course.json").write_text(json.dumps(course | {"peak_memory_bytes": 2**50}))
    assert main(given) == 0
    assert json.loads((folder / "course.json").read_text())["peak_memory_bytes"] == 2**50  # of when it was trained
    answers, costs = (folder / "answers.jsonl").read_text(), (folder / "costs.json").read_text()
    for found in ("torn {", "[]", '{"digests": 1}'):
        (folder / "course.json").write_text(found)
        (folder / "answers.jsonl").write_text(f"{found}\n{answers.replace(']', '}', 1)}")
        assert main(given) == 0
        assert json.loads((folder / "course.json").read_text())["rows"] == course["rows"]
        assert (folder / "answers.jsonl").read_text().count("\n") == 10  # those, and one anew
    first, *rest = answers.splitlines(keepends=True)
    for wrong in ({"tokens": [262]}, {"tokens": [-1]}, {"seconds": float("nan")}):
        (folder / "answers.jsonl").write_text("".join([json.dumps(json.loads(first) | wrong) + "\n", *rest]))
        assert main(given) == 0
        assert (folder / "answers.jsonl").read_text().count("\n") == 9
    capsys.readouterr()
    for found, wrong in (("{", "Expecting"), ('{"context": "a"}', "context is not a whole number")):
        (folder / "costs.json").write_text(found)
        assert main(given) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"decodelab: error: {folder}/costs.json is damaged ({wrong}")
        assert line.endswith("): delete it, and costs are measured anew")

    (folder / "costs.json").write_text(costs)
    (folder / "medusa.safetensors").unlink()
    assert main(given) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"decodelab: error: {folder} has lost what was trained: "
        f"delete {folder}/state.safetensors, and it is trained again"
    )
    (folder / "state.safetensors").unlink()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(given) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"decodelab: error: the disk is full: {folder}/medusa.safetensors was not written; free some space, "
        "or name a folder on a larger disk"
    )


def test_costs_of_other_drafts_are_not_taken(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """Where a training ended before its first state, and is begun with other settings."""
    measured: list[Any] = []
    cost = job.draft_cost
    monkeypatch.setattr(job, "draft_cost", lambda *args, **keys: measured.append(args) or cost(*args, **keys))
    for more, times in (([], 1), ([], 1), (["train.heads=1"], 2)):
        assert main(words(bench, "medusa", "out", "train.schedule.epochs=1", *more)) == 0
        assert len(measured) == times
        (bench.root / "out" / "state.safetensors").unlink()


@pytest.mark.parametrize("kind", ["student", "medusa"])
def test_it_needs_an_answer_to_be_judged_by(
    kind: str, bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """All that the target says to the prompts kept back is that it is at its end."""
    of = job.Lessons.of

    def short(*args: Any) -> Any:
        found = of(*args)
        requests = [replace(a.request, stop=replace(a.request.stop, max_new_tokens=1)) for a in found.held]
        held = [replace(a, tokens=a.tokens[:1], request=r) for a, r in zip(found.held, requests, strict=True)]
        return replace(found, held=held, judged=())

    monkeypatch.setattr(job.Lessons, "of", short)
    monkeypatch.setattr(job, "draft_cost", lambda *args, **keys: DraftCost(0.0, 0.0, 0.0))
    assert main(words(bench, kind, "out")) == 2
    line = "no answer to a prompt kept back has a second token: give other prompts, or more of them"
    assert capsys.readouterr().err.splitlines()[-1] == f"decodelab: error: {line}"


def test_a_folder_with_what_others_made_is_left_alone(bench: Any, capsys: pytest.CaptureFixture[str]):
    """Such as the target's own."""
    folder = shutil.copytree(bench.checkpoint, bench.root / "mine")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(words(bench, "student", "mine", f"model.path={folder}")) == 2
    line = f"{folder}/model.safetensors was not made by a training in this folder: name another output"
    assert capsys.readouterr().err.splitlines()[-1] == f"decodelab: error: {line}"
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_two_trainings_of_one_folder(bench: Any, capsys: pytest.CaptureFixture[str]):
    other = lock_folder(bench.root / "out", "a training")
    assert main(words(bench, "medusa", "out")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"decodelab: error: process {os.getpid()} runs a training in {bench.root}/out: "
        "wait for it, or name another folder with output=DIR"
    )
    other.release()
    assert main(words(bench, "medusa", "out", "train.schedule.epochs=1")) == 0


@pytest.mark.parametrize(
    ("model", "folder", "command"),
    [
        (ModelSpec("smollm2-135m"), "heads", "drafting.path=heads"),
        (ModelSpec("qwen3-0.6b", "Qwen/Qwen3-0.6B"), "heads", "model=qwen3-0.6b drafting.path=heads"),
        (ModelSpec("smollm2-135m", "my/model", "v1"), "a", "model.path=my/model model.revision=v1 drafting.path=a"),
        (
            ModelSpec("mine", "my/model", None, "l=1"),
            "a",
            "model.path=my/model 'model.adapter=\"l=1\"' drafting.path=a",
        ),
    ],
)
def test_the_command_that_uses_it(model: ModelSpec, folder: str, command: str):
    said = job._command("medusa", model, Path(folder)).replace(" drafting=medusa", "")
    assert said == f"decodelab run {command}"


@pytest.mark.parametrize("name", ["a b", "x=1,y", "it's", "7", "[v1]", "$HOME"])
def test_the_command_is_read_as_it_was_meant(name: str):
    *_, word = shlex.split(job._command("medusa", ModelSpec("smollm2-135m"), Path(name)))
    with pytest.raises(UserError, match=re.escape(f"drafting.path={name} does not exist")):
        compose(["drafting=medusa", word])


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


def test_a_folder_of_another_training_is_refused_before_any_answer(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(words(bench, "medusa", "first")) == 0
    assert main(words(bench, "medusa", "other", "seed=3")) == 0
    start = [f"train.start={bench.root / 'first'}", "train.heads=2"]
    assert main(words(bench, "medusa", "second", *start)) == 0
    monkeypatch.setattr(job, "answered", lambda *args, **options: pytest.fail("answers were asked for"))
    again = f"{bench.root / 'second' / 'state.safetensors'} is of another training: "
    assert main(words(bench, "medusa", "second", *start, "seed=1")) == 2
    assert f"{again}seed differ; name another output" in capsys.readouterr().err
    # the same path holds other heads now
    shutil.copy(bench.root / "other" / "medusa.safetensors", bench.root / "first" / "medusa.safetensors")
    assert main(words(bench, "medusa", "second", *start)) == 2
    assert f"{again}start differ; name another output" in capsys.readouterr().err


def test_the_target_may_be_quantised(bench: Any, capsys: pytest.CaptureFixture[str]):
    """The heads learn from the quantised copy's own answers and states; with the weights it was made from they draft
    too, and a line says so."""
    low = ["quantization=rtn", "quantization.bits=3", "quantization.group_size=16"]
    assert main(words(bench, "medusa", "heads", *low)) == 0
    folder = bench.root / "heads"
    with safe_open(folder / "medusa.safetensors", framework="pt") as stored:
        note = json.loads(stored.metadata()["decodelab"])
    assert note["target"] != note["origin"]
    drafting = ["drafting=medusa", f"drafting.path={folder}", "timing=untimed"]
    assert bench.run(*drafting, *low) == 0
    assert bench.result["exactness"]["verdict"] == "exact"
    assert not any("quantised otherwise" in warning for warning in bench.result["warnings"])
    shutil.rmtree(bench.folder)
    assert bench.run(*drafting) == 0
    assert any("has the same weights quantised otherwise" in warning for warning in bench.result["warnings"])


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["output=null"], "train writes a folder: name it with output=DIR"),
        (["output=prompts.jsonl"], "output folder prompts.jsonl cannot be written (File exists); name another with"),
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
