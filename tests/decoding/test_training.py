"""The loop: what it steps through, where it ends, what it keeps, and that a training goes on exactly."""

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.decoding.training import Course, Loss, Schedule, Score, Text, train
from decodelab.errors import UserError

TEXTS = [Text((n, n + 1, n + 2), 1) for n in range(10)]


class Mean:
    """One number for the mean of the texts' first tokens, with some noise."""

    def __init__(self, begun: float = 0.0) -> None:
        self.x = torch.tensor([begun], requires_grad=True)
        self.seen: list[tuple[int, ...]] = []
        self.done: list[float] = []

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return {"x": self.x}

    def loss(self, texts: Sequence[Text], done: float, draws: torch.Generator) -> Loss:
        self.seen.append(tuple(text.tokens[0] for text in texts))
        self.done.append(done)
        wanted = torch.tensor([float(text.tokens[0]) for text in texts]).mean() + torch.randn(1, generator=draws)
        return Loss(((self.x - wanted) ** 2).sum(), {"wanted": float(wanted)})


def run(
    objective: Mean,
    folder: Path,
    judged: Sequence[float] | None = None,
    kept: list[float] | None = None,
    judge: Callable[[], Score] | None = None,
    progress: Any = None,
    told: Any = None,
    **keys: Any,
) -> Course:
    """`judged`: the predicted speedups, one a validation; by default the better the nearer."""
    scores = iter(judged or ())

    def nearness() -> Score:
        value = next(scores) if judged else 10.0 - abs(4.5 - float(objective.x.detach()))
        return Score(value, {"tokens_per_step": 1.5})

    schedule = Schedule(**({"batch": 4, "every": 2, "epochs": 4, "learning_rate": 0.5} | keys))
    return train(
        objective,
        TEXTS,
        schedule,
        seed=3,
        state=folder / "state.safetensors",
        identity={"of": "mean"},
        judge=nearness if judge is None else judge,
        keep=lambda: None if kept is None else kept.append(float(objective.x.detach())),
        progress=progress,
        told=told,
    )


def test_each_epoch_has_every_text_once_in_another_order(tmp_path: Path):
    objective = Mean()
    course = run(objective, tmp_path)
    assert course.step == len(objective.seen) == 12  # 3 steps of 4, 4 and 2 texts in each of 4 epochs
    epochs = [[n for batch in objective.seen[e * 3 : e * 3 + 3] for n in batch] for e in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert objective.done == [n / 12 for n in range(12)]
    assert course.why == "all steps are done"
    assert [row["step"] for row in course.rows] == [2, 4, 6, 8, 10, 12]
    assert course.tokens == 4 * 30


def test_the_learning_rate_rises_and_then_falls():
    schedule = Schedule(learning_rate=1.0, warmup=0.1)
    rates = [schedule.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_row_tells_the_means_of_its_own_steps(tmp_path: Path):
    seen: list[float] = []

    class Heard(Mean):
        def loss(self, *args: Any) -> Loss:
            found = super().loss(*args)
            seen.append(found.parts["wanted"])
            return found

    course = run(Heard(), tmp_path)
    for n, row in enumerate(course.rows):
        assert row["wanted"] == pytest.approx(sum(seen[2 * n : 2 * n + 2]) / 2)


def test_the_best_is_kept(tmp_path: Path):
    kept: list[float] = []
    course = run(Mean(), tmp_path, judged=[1.0, 1.4, 1.2, 1.4, 1.5, 0.2], kept=kept)
    assert len(kept) == 3
    assert course.best == 4


def test_it_ends_where_nothing_is_gained(tmp_path: Path):
    course = run(Mean(), tmp_path, judged=[1.0, 1.4, 1.4, 1.3, 2.0], patience=2)
    assert (course.step, course.best) == (8, 1)
    assert course.why == "the last 2 validations were no better than the one before them"
    assert run(Mean(), tmp_path, judged=[9.9], patience=2) == course  # it is over


@pytest.mark.parametrize("broken", [1, 4, 5, 11])
def test_a_training_that_was_broken_off_goes_on_exactly(broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also between two validations, and in the middle of an epoch."""
    monkeypatch.setattr("decodelab.decoding.training._SAVE_EVERY_S", -1.0)  # after each step
    first, second = tmp_path / "whole", tmp_path / "broken"
    first.mkdir()
    second.mkdir()
    whole = Mean()
    want = run(whole, first)

    begun, loss = Mean(), Mean.loss

    def breaks(self: Mean, *args: Any) -> Loss:
        if len(self.seen) == broken:
            raise KeyboardInterrupt
        return loss(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Mean, "loss", breaks)
        with pytest.raises(KeyboardInterrupt):
            run(begun, second)
    again = Mean()
    got = run(again, second)
    assert len(again.seen) == 12 - broken
    assert begun.seen + again.seen == whole.seen
    assert torch.equal(again.x, whole.x)
    for course in (got, want):
        course.seconds = 0.0
        for row in course.rows:
            row["seconds"] = 0.0
    assert got == want


@pytest.mark.parametrize("pressed", [1, 3, 4, 12])
def test_ctrl_c_waits_for_the_end_of_a_step(
    pressed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c: None
):
    """Pressed when its chance is drawn and nothing has changed yet: no step is lost, none is made twice."""
    first, second = tmp_path / "whole", tmp_path / "broken"
    first.mkdir()
    second.mkdir()
    whole, begun, again, loss = Mean(), Mean(), Mean(), Mean.loss
    want = run(whole, first)

    def pressing(self: Mean, *args: Any) -> Loss:
        found = loss(self, *args)
        if self is begun and len(self.seen) == pressed:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(Mean, "loss", pressing)
    with pytest.raises(KeyboardInterrupt):
        run(begun, second)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    got = run(again, second)
    assert begun.seen + again.seen == whole.seen
    assert len(begun.seen) == pressed
    assert torch.equal(again.x, whole.x)
    assert [row["loss"] for row in got.rows] == [row["loss"] for row in want.rows]


def test_a_validation_that_was_broken_off_is_made_again(tmp_path: Path):
    asked: list[int] = []
    objective = Mean()

    def judge() -> Score:
        asked.append(len(objective.seen))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return Score(1.0)

    with pytest.raises(KeyboardInterrupt):
        run(objective, tmp_path, judge=judge)
    assert asked == [2, 4]
    again = Mean()
    course = run(again, tmp_path, judge=lambda: Score(float(len(again.seen))))
    assert [row["step"] for row in course.rows] == [2, 4, 6, 8, 10, 12]
    assert [row["value"] for row in course.rows] == [1.0, 0.0, 2.0, 4.0, 6.0, 8.0]
    (tmp_path / "state.safetensors").unlink()
    assert course.rows[1]["wanted"] == run(Mean(), tmp_path).rows[1]["wanted"]


def test_what_is_told(tmp_path: Path):
    """Each row, again after a resume; every ten steps the loss and the learning rate."""
    told: list[Mapping[str, Any]] = []
    course = run(Mean(), tmp_path, every=8, told=told.append)
    assert [row["step"] for row in told] == [8, 10, 12]
    assert [told[0], told[2]] == course.rows
    assert told[1].keys() == {"step", "step/loss", "step/learning_rate"}
    assert told[1]["step/learning_rate"] == Schedule(learning_rate=0.5).rate(9, 12)
    told.clear()
    run(Mean(), tmp_path, every=8, told=told.append)
    assert told == course.rows


def test_the_progress_tells_where_the_time_will_be_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(1000))
    seconds = SimpleNamespace(perf_counter=lambda: float(next(clock)), monotonic=time.monotonic)  # one a step
    monkeypatch.setattr("decodelab.decoding.training.time", seconds)
    told: list[tuple[Any, ...]] = []
    course = run(Mean(), tmp_path, minutes=1 / 12, progress=lambda *step: told.append(step))
    assert [step[:2] for step in told] == [(n, 12) for n in range(1, 6)]
    assert [step[3] for step in told] == pytest.approx([5.0] * 5)
    assert told[0][2].endswith(", 12 tokens/s")
    assert course.why == f"train.schedule.minutes={1 / 12} are over"
    (tmp_path / "state.safetensors").unlink()
    told.clear()
    run(Mean(), tmp_path, progress=lambda *step: told.append(step))
    assert told[0][3] is None


def test_a_state_of_another_training_is_refused(tmp_path: Path):
    run(Mean(), tmp_path)
    file = tmp_path / "state.safetensors"
    with pytest.raises(
        UserError, match=r"state\.safetensors is of another training: of differ; name another output, or delete that"
    ):
        train(
            Mean(), TEXTS, Schedule(), seed=3, state=file, identity={"of": "else"}, judge=lambda: Score(1.0),
            keep=lambda: None,
        )  # fmt: skip
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match=r"state\.safetensors is no training's state .*: delete it and train again"):
        run(Mean(), tmp_path)


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path):
    with pytest.raises(UserError, match=r"the loss is nan at step 1: lower train\.schedule\.learning_rate=0\.5"):
        run(Mean(float("nan")), tmp_path)


def test_a_gradient_that_is_no_number_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a loss that is one: √|x| at 0."""
    objective = Mean()
    monkeypatch.setattr(objective, "loss", lambda *_: Loss(objective.x.abs().sqrt().sum()))
    with pytest.raises(UserError, match=r"the gradient's norm is nan at step 1: lower train\.schedule\.learning_rate"):
        run(objective, tmp_path)
    assert float(objective.x.detach()) == 0
    assert not (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"epochs": 0}, "train.schedule.epochs must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "train.schedule.learning_rate must be above 0 and finite, got 0.0"),
        ({"warmup": 1.0}, "train.schedule.warmup is a share of the steps, from 0 to below 1, got 1.0"),
        ({"weight_decay": -1.0}, "train.schedule.weight_decay must be 0 or more, got -1.0"),
        ({"patience": 0}, "train.schedule.patience must be at least 1, or null to go on to the end, got 0"),
        ({"minutes": 0.0}, "train.schedule.minutes must be above 0, or null for no limit, got 0.0"),
    ],
)
def test_what_is_wrong_is_said(keys: dict[str, Any], line: str):
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        Schedule(**keys)
