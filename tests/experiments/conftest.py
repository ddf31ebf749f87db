"""Whole commands on a tiny model, with a cache and a working directory of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.decoding.acceptance import Greedy, Verdict
from decodelab.experiments import hardware
from decodelab.experiments.compose import Composer
from decodelab.experiments.hardware import Peaks
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.bench import Bench


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 262 tokens and a context of 128, whose output repeats itself enough to be drafted."""
    return save_folder(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_model())


@pytest.fixture(scope="session")
def chosen() -> Callable[[Composer, tuple[str, ...]], Any]:
    """`Composer._choose` that has Hydra compose a choice among the shipped options once, not once a command."""
    kept: dict[tuple[str, ...], Any] = {}
    honest = Composer._choose

    def choose(composer: Composer, words: tuple[str, ...]) -> Any:
        if composer._searchpath:  # options of the user's, which change from test to test
            return honest(composer, words)
        if words not in kept:
            kept[words] = honest(composer, words)
        return kept[words]

    return choose


@pytest.fixture
def private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Composer, tuple[str, ...]], Any]
) -> Path:
    """A cache of its own, a machine that does nothing else, peaks that are not measured, and tmp_path to work in."""
    monkeypatch.setattr(Composer, "_choose", chosen)
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(hardware, "_measure", lambda device, dtype, threads: Peaks(1e10, 1e11))
    monkeypatch.setattr("decodelab.experiments.run.unused_gpu", lambda: None)
    for module in ("run.load", "api"):
        monkeypatch.setattr(f"decodelab.experiments.{module}.load_of_others", lambda: 0.0)
        monkeypatch.setattr(f"decodelab.experiments.{module}.others_since", lambda then: 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bench(private: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Types are checked in the tests of the parts; here they would take half of the time."""
    unchecked(monkeypatch)
    return Bench(private, checkpoint, private / "out")


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the rule `greedy` err: where it has a draft to judge, the token behind the path is another one."""

    def apply() -> None:
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
