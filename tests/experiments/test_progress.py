"""Lines of a log: what is done, and the time that remains."""

from types import SimpleNamespace

import pytest

from decodelab.experiments import progress
from decodelab.experiments.progress import Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_time_that_remains(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """By the pace of this alone: not of what was before it, nor of what was done when it began."""
    steps = [
        (0, "loading", 0, 2, "", None), (500, "loading", 2, 2, "", None),
        (500, "answers", 30, 40, "", None), (511, "answers", 31, 40, "9 tokens/s", None),
        (515, "answers", 32, 40, "", None),  # too soon after the one before it
        (530, "answers", 40, 40, "", None),
        (600, "training", 0, 100, "", None), (620, "training", 10, 100, "loss 1.0", 30.0),
        (640, "training", 20, 100, "loss 0.9", 300.0), (660, "training", 30, 100, "", 30.0),
    ]  # fmt: skip
    with Watch() as watch:
        for now, *step in steps:
            clock[0] = float(now)
            watch.step(*step)
    assert capsys.readouterr().err.splitlines() == [
        "[   0.0 s] loading 0/2",
        "[ 500.0 s] loading 2/2",
        "[ 500.0 s] answers 30/40",
        "[ 511.0 s] answers 31/40, 2 min left, 9 tokens/s",
        "[ 530.0 s] answers 40/40",
        "[ 600.0 s] training 0/100",
        "[ 620.0 s] training 10/100, 40 s left, loss 1.0",
        "[ 640.0 s] training 20/100, 3 min left, loss 0.9",
        "[ 660.0 s] training 30/100",
    ]


def test_a_terminal_shows_the_same(clock: list[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Watch() as watch:
        assert watch._bar is not None
        watch.step("training", 5, 100, "loss 1.0")
        clock[0] = 10.0
        watch.step("training", 6, 100, "loss 0.9", 8.0)
        (task,) = watch._bar.tasks
        assert (task.completed, task.fields) == (6, {"left": "20 s left", "note": "loss 0.9"})
