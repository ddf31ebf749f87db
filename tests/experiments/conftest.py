"""Whole commands on a tiny model: a folder of files, a cache and a working directory of their own, in a second."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.experiments import hardware
from decodelab.experiments.cli import main
from decodelab.experiments.hardware import Peaks
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked

ROWS: tuple[Mapping[str, Any], ...] = (
    {"id": "copy", "category": "copy", "prompt": "12 ab 12 ab 12 ab 12"},
    {"id": "count", "category": "copy", "prompt": "one two three one two three one"},
    {"id": "talk", "category": "chat", "turns": ["hello there", "and then?"]},
    {"id": "ask", "category": "documents", "question": "what?", "documents": ["it is a b c"], "answer": "GOLD"},
    {"id": "three", "category": "copy", "prompt": "xyz xyz xyz"},
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 262 tokens and a context of 128, whose output repeats itself enough to be drafted."""
    return save_folder(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_model())


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, peaks that are not measured, and tmp_path to work in."""
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(hardware, "_measure", lambda device, dtype, threads: Peaks(1e10, 1e11))
    monkeypatch.setattr("decodelab.experiments.run.unused_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Bench:
    """`run(*words)` is `decodelab run` on the tiny model and ROWS; the files it writes are read back from `folder`."""

    root: Path
    checkpoint: Path
    folder: Path

    def run(self, *words: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> int:
        task = self.root / "task.jsonl"
        task.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        model, output = f"model.path={self.checkpoint}", f"output={self.folder}"
        common = ["device=cpu", "threads=1", f"task.path={task}", "task.max_new_tokens=12", model]
        given = {word.partition("=")[0] for word in words}
        defaults = [w for w in (*common, "dtype=float32", output) if w.partition("=")[0] not in given]
        return main(["run", *defaults, *words])

    @property
    def result(self) -> dict[str, Any]:
        return strict((self.folder / "result.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [strict(line) for line in (self.folder / name).read_text().splitlines()]


def strict(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are not in it."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def bench(private: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Types are checked in the tests of the parts; here they would take half of the time."""
    unchecked(monkeypatch)
    return Bench(private, checkpoint, private / "out")


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the rule `greedy` err: where it has a draft to judge, the token behind the path is another one."""

    def apply() -> None:
        from decodelab.decoding.acceptance import Greedy, Verdict

        honest = Greedy.judge

        def judge(self: Greedy, draft: Any, law: Any, noise: Any) -> Verdict:
            verdict = honest(self, draft, law, noise)
            return Verdict(verdict.path, (verdict.next + 1) % 256) if len(draft) else verdict

        monkeypatch.setattr(Greedy, "judge", judge)

    return apply


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run puts back the number of threads that it found."""
    yield
    assert torch.get_num_threads() == 1
