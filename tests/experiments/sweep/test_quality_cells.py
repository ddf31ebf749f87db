"""Cells that ask for quality, served in this process: what is asked again, and what is compared afterwards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.lab import Warm
from decodelab.experiments.quality.lm import DecodelabLM
from decodelab.experiments.sweep import sweep as sweeps
from decodelab.experiments.sweep.grid import composed, expand
from decodelab.experiments.sweep.worker import serve
from decodelab.tests.experiments.sweep.stage import Stage


@dataclass
class Here:
    """Serves its cells where the test can see what they ask."""

    group: str
    warm: Warm = field(default_factory=Warm)
    pid: int = 0

    def run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> None:
        serve(folder, self.warm, "package")

    def stop(self) -> None: ...


@dataclass
class Exam:
    """`evaluate(*words)` is the command over a task of six questions, with and without a drafter."""

    stage: Stage
    asked: list[str] = field(default_factory=list)
    dies_at: int | None = None

    def evaluate(self, *words: str) -> int:
        task = self.stage.bench.root / "asked.jsonl"
        rows = [{"id": f"q{i}", "question": f"what is {i} ab?", "answer": str(i)} for i in range(6)]
        task.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        overrides = [f"model.path={self.stage.bench.checkpoint}", f"output={self.stage.folder}", f"tasks=[{task}]"]
        overrides += ["device=cpu", "threads=1", "dtype=float32", "quality.max_new_tokens=4"]
        overrides += ["drafting=none,prompt_lookup", *words]
        cells = expand(overrides, self.stage.composer)
        configs = composed(cells, self.stage.composer)
        return sweeps.sweep("evaluate", cells, configs, overrides, start_worker=lambda group, *_: Here(group))

    def result(self, label: str) -> dict[str, Any]:
        return dict(json.loads((self.stage.cell(label) / "result.json").read_text()))


@pytest.fixture
def exam(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Exam:
    made, generate = Exam(stage), DecodelabLM._generate
    monkeypatch.setattr("decodelab.experiments.sweep.worker.code_digest", lambda *_: "code")

    def counted(self: DecodelabLM, jobs: Sequence[Any]) -> Any:
        if len(made.asked) == made.dies_at:
            raise MemoryError
        made.asked.append(type(self.lab.drafter).__name__)
        return generate(self, jobs)

    monkeypatch.setattr(DecodelabLM, "_generate", counted)
    return made


def test_a_broken_off_cell_is_asked_for_the_answers_that_are_missing(exam: Exam):
    exam.dies_at = 8
    assert exam.evaluate() == 1
    assert exam.stage.states() == {"drafting=none": "done", "drafting=prompt_lookup": "out_of_memory MemoryError"}
    assert len(exam.asked) == 6 + 2
    exam.dies_at = None
    assert exam.evaluate() == 0
    assert len(exam.asked) == 6 + 6
    assert exam.result("drafting=prompt_lookup")["quality"]["tasks"]["asked"]["n"] == 6


def test_a_reference_that_is_named_later_is_compared_with_what_is_done(exam: Exam, capsys: pytest.CaptureFixture[str]):
    assert exam.evaluate() == 0
    reference = exam.stage.cell("drafting=none")
    assert exam.result("drafting=prompt_lookup")["quality"]["against"] is None
    assert exam.evaluate(f"against={reference}") == 0
    assert len(exam.asked) == 12  # nothing anew
    for label in ("drafting=none", "drafting=prompt_lookup"):
        found = exam.result(label)["quality"]["against"]
        assert found["reference"]["key"] == json.loads((reference / "job.json").read_text())["key"]
        assert (exam.stage.cell(label) / "flips.jsonl").read_text() == ""
    before = exam.result("drafting=prompt_lookup")
    capsys.readouterr()
    assert exam.evaluate("against=nowhere") == 1
    assert "refused: drafting=none – nowhere holds no result.json" in capsys.readouterr().out
    assert exam.stage.states() == {"drafting=none": "done", "drafting=prompt_lookup": "done"}
    assert exam.result("drafting=prompt_lookup") == before
