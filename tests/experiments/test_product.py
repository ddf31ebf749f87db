"""What `train=student` says at its end: size, speed, and quality beside the teacher's."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments import product
from decodelab.experiments.cli import main
from decodelab.tests.experiments.bench import strict
from decodelab.tests.experiments.trainings import words

ASKED = [{"id": f"q{i}", "question": f"what is {i} ab {i}?", "answer": str(i)} for i in range(6)]


@pytest.fixture
def tasks(bench: Any) -> list[str]:
    file = bench.root / "asked.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ASKED))
    return [f"quality.tasks=[{file}]", "quality.max_new_tokens=4"]


def result(folder: Path) -> dict[str, Any]:
    return dict(strict((folder / "result.json").read_text()))


def test_a_student_is_measured_beside_its_teacher(bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "student", "out")) == 0
    said = capsys.readouterr().out
    found = json.loads((bench.root / "out" / "product.json").read_text())
    ours, theirs = found["student"], found["teacher"]
    layer = theirs["bytes"] - ours["bytes"]  # one of two
    assert theirs["bytes"] == 2 * layer + 262 * 32 * 4  # and the unembedding, in float32
    assert ours["step_s"] > 0
    assert f"the teacher's {theirs['bytes'] / 1024:.0f} KiB ({ours['bytes'] / theirs['bytes']:.2f})" in said
    assert f"({theirs['step_s'] / ours['step_s']:.2f}× as fast, behind 64 tokens)" in said
    assert all(heading in said for heading in ("KL", "agreement", "perplexity"))
    assert "tokens/step" not in said
    assert not (bench.root / "out" / "teacher").exists()


def test_quality_is_the_teachers_and_the_students(
    bench: Any, tasks: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As `evaluate` finds it, once: what is there is not asked again."""
    assert main(words(bench, "student", "out", *tasks)) == 0
    folder = bench.root / "out"
    compared = f"against{folder / 'teacher'},whichdiffersin"  # wherever the lines break
    assert compared in "".join(capsys.readouterr().out.split())
    teacher, student = result(folder / "teacher"), result(folder / "student")
    assert teacher["quality"]["against"] is None
    assert student["quality"]["against"]["reference"] == {"folder": str(folder / "teacher"), "key": teacher["key"]}
    assert student["quality"]["against"]["tasks"]["asked"]["n"] == len(ASKED)
    assert student["config"]["model"]["path"] == str(folder)
    assert student["digests"]["weights"] != teacher["digests"]["weights"]

    asked = ["evaluate", "device=cpu", "threads=1", "dtype=float32", "batch=3", "task.max_new_tokens=12", *tasks]
    again = bench.root / "again"
    assert main([*asked, f"model.path={folder}", f"output={again}", f"against={folder / 'teacher'}"]) == 0
    assert (again / "quality.jsonl").read_text() == (folder / "student" / "quality.jsonl").read_text()
    capsys.readouterr()

    def never(*args: Any, **keys: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(product, "execute", never)
        assert main(words(bench, "student", "out", *tasks)) == 0
    assert compared in "".join(capsys.readouterr().out.split())
    assert main(words(bench, "student", "out", *tasks, "quality.max_new_tokens=5")) == 2  # they are others
    assert f"output={folder / 'teacher'} already holds a result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "line"),
    [
        ("draft", [], "quality.tasks are for a student, beside its teacher: train=student or train=kv, or leave"),
        ("student", ["quality.tasks=[nowhere.jsonl]"], "nowhere.jsonl"),
        ("student", ["train.student.keep=3"], "train.student.keep=3, but tiny has 2 layers, from 0 on"),
        ("student", ["train.student.config={hidden: 3}"], "a student comes from one of train.student.keep,"),
        ("student", ["train.student.keep=x"], "train.student.keep must be an integer, a list of integers or null"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_learnt(
    kind: str, more: list[str], line: str, bench: Any, tasks: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(words(bench, kind, "out", *tasks, *more)) == 2
    said = capsys.readouterr().err
    assert line in said.splitlines()[-1]
    assert not (bench.root / "out").exists()


def test_a_student_goes_on_from_another(bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "student", "first")) == 0
    more = ["train.student.keep=null", f"train.student.start={bench.root / 'first'}"]
    assert main(words(bench, "student", "second", *more)) == 0
    rows = [json.loads((bench.root / name / "course.json").read_text())["rows"] for name in ("first", "second")]
    assert rows[1][0]["loss"] < rows[0][0]["loss"]
    assert rows[1][-1]["kl"] < rows[0][-1]["kl"]
