"""The one training loop: what a drafter learns for one target from texts that the target wrote.

An objective says what is trained and what its loss is; the loop brings texts, steps and the learning rate, judges what
was learnt so far on prompts kept back, and stops where that no longer gains. All that the rest of a training depends on
is in one file, so that a training that was broken off goes on to the same numbers as one that was not.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..attention.rows import chains
from ..errors import UserError
from .cost import DraftCost, Profile
from .draft import Drafter
from .events import Step
from .law import LawSettings
from .model.decoder import Decoder, Tap
from .model.source import Source
from .model.storage import atomic_file

# (steps done, steps in all, a note, the step at which the time will be over, if there is a limit)
Progress = Callable[[int, int, str, float | None], None]
_STATE = "decodelab-training"  # the key of our note in a state's metadata
_SAVE_EVERY_S = 60.0
_SAVE_SHARE = 0.05  # of the time, at most, where a state is large
_TOLD_EVERY = 10  # steps
_BETAS = (0.9, 0.95)
_LEAST = 0.1  # of the learning rate, at the end


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and of what was said to it, which begins at `first`; that alone is learnt from."""

    tokens: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Loss:
    """`value` is minimised; `parts` are told."""

    value: Tensor
    parts: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Objective(Protocol):
    """What is trained: `parameters` by the names they are saved under. `done`: the share of the steps behind us, for
    what is scheduled; all chance comes from `draws`."""

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...
    def loss(self, texts: Sequence[Text], done: float, draws: torch.Generator) -> Loss: ...


@dataclass(frozen=True, slots=True)
class Score:
    """What was learnt, judged on prompts kept back. `value` decides, the higher the better; `facts` are told."""

    value: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Learner(Protocol):
    """What is trained, as it is now: `save` makes a folder of it; `about` goes into its note."""

    @property
    def objective(self) -> Objective: ...
    def save(self, folder: Path, source: Source, about: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Drafts(Learner, Protocol):
    """It is a drafter, and judged by what drafting with it is worth. `law`: the target's."""

    def drafter(self, law: LawSettings) -> Drafter[Any]: ...


@runtime_checkable
class Watches(Drafts, Protocol):
    """It makes something of how its drafts fare on prompts kept back, such as the tree that it is saved with."""

    def watch(self, steps: Sequence[Step], costs: tuple[Profile, DraftCost]) -> None: ...


@runtime_checkable
class Stands(Learner, Protocol):
    """It stands in the target's place, and judges itself against it on what the target said."""

    def score(self, texts: Iterable[Text]) -> Score: ...


@runtime_checkable
class ReadsTexts(Protocol):
    """Settings of what may learn from files of texts, as they are, in place of the target's answers."""

    @property
    def texts(self) -> tuple[str, ...]: ...


@runtime_checkable
class Trains(Protocol):
    """What a YAML of the group `train` builds. `check` returns the tensors that a training goes on from, if any."""

    @property
    def kind(self) -> str: ...
    @property
    def schedule(self) -> "Schedule": ...
    def check(self, target: Source) -> Mapping[str, Tensor] | None: ...
    def learner(
        self,
        source: Source,
        target: Decoder,
        texts: Sequence[Text],
        seed: int,
        start: Mapping[str, Tensor] | None,
    ) -> Learner:
        """`texts`: what will be learnt from."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`held_back`: prompts that are not learnt from, and judge; `longest`: tokens of a text that is learnt from.

    `batch`: texts a step; `warmup`: the share of the steps in which the learning rate rises, before it falls along a
    cosine; `every`: steps from one validation to the next; `patience`: validations without a better one, then it ends
    (None: never); `minutes`: of training, after which it ends (None: any).
    """

    held_back: int = 16
    longest: int = 1024
    epochs: int = 3
    batch: int = 8
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    every: int = 100
    patience: int | None = 5
    minutes: float | None = None

    def __post_init__(self) -> None:
        at = "train.schedule."
        for name in ("held_back", "longest", "epochs", "batch", "every"):
            if getattr(self, name) < 1:
                raise UserError(f"{at}{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{at}{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"{at}warmup is a share of the steps, from 0 to below 1, got {self.warmup}")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"{at}weight_decay must be 0 or more, got {self.weight_decay}")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"{at}patience must be at least 1, or null to go on to the end, got {self.patience}")
        if self.minutes is not None and not self.minutes > 0:
            raise UserError(f"{at}minutes must be above 0, or null for no limit, got {self.minutes}")

    def rate(self, step: int, steps: int, seconds: float = 0.0) -> float:
        """The learning rate of step number `step` of `steps`, after so many seconds of training: where `minutes` will
        end it before its last step, they are what it follows."""
        at = float(step)
        if self.minutes is not None:
            at = max(at, steps * min(1.0, seconds / (60 * self.minutes)))
        rising = max(1, round(self.warmup * steps))
        if at < rising:
            return self.learning_rate * (at + 1) / rising
        gone = (at - rising) / max(1, steps - rising)
        return self.learning_rate * (_LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * gone)) / 2)


@dataclass(slots=True)
class Course:
    """How it went: a row a validation, with step, seconds, tokens, loss and score. `best`: the number of the row whose
    parameters were kept. `why`: it ended; None while it has not."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)  # of the steps since the last row
    why: str | None = None
    parts: dict[str, float] = field(default_factory=dict)  # of these losses, their sums


def drawn(rows: int, most: int | None, draws: torch.Generator) -> Int[Tensor, " R"]:
    """Which of so many rows a step learns from: all of them, or `most` by chance."""
    return torch.arange(rows) if most is None or rows <= most else torch.randperm(rows, generator=draws)[:most]


@dataclass(frozen=True)
class Teacher:
    """The frozen target over whole texts: its hidden states, computed when they are wanted and kept nowhere."""

    target: Decoder
    taps: Collection[Tap]

    @torch.no_grad()
    def __call__(self, texts: Sequence[Text]) -> list[dict[Tap, Float[Tensor, "T dim"]]]:
        """For each text, by tap, the hidden states of all of its rows."""
        lengths = [len(text.tokens) for text in texts]
        cache = self.target.open_cache(len(texts), max(lengths))
        slots = [cache.open() for _ in texts]
        rows = chains([text.tokens for text in texts], slots, prompt=True)
        hidden = self.target(rows, cache, logits_of=torch.tensor([0]), taps=self.taps).hidden
        split = {tap: states.split(lengths) for tap, states in hidden.items()}
        return [{tap: parts[i] for tap, parts in split.items()} for i in range(len(texts))]


def train(
    objective: Objective,
    texts: Sequence[Text],
    schedule: Schedule,
    *,
    seed: int,
    state: Path,
    identity: Mapping[str, Any],
    judge: Callable[[], Score],
    keep: Callable[[], None],
    progress: Progress | None = None,
    told: Callable[[Mapping[str, Any]], None] | None = None,
    before: bool = False,
) -> Course:
    """Trains in place; `keep` is called while the parameters are the best so far. `state`: the file that a training
    goes on from, of one with the same `identity` alone; Ctrl-C leaves one in which no step is missing. `told` gets each
    row of the course, those of before a resume too, and every few steps `step/loss` and `step/learning_rate`. `before`:
    the course begins with a row of what there was before the first step, without a loss."""
    steps_an_epoch = -(-len(texts) // schedule.batch)
    steps = schedule.epochs * steps_an_epoch
    parameters = dict(objective.parameters)
    optimizer = torch.optim.AdamW(
        list(parameters.values()), lr=schedule.learning_rate, betas=_BETAS, weight_decay=schedule.weight_decay
    )
    draws = torch.Generator().manual_seed(seed)
    course = Course()
    if state.exists():
        course = _load(state, identity, parameters, optimizer, draws)
    if told is not None:
        for row in course.rows:
            told(row)
    saved, took = time.monotonic(), 0.0  # when a state was, and how long that took
    if before and not course.rows:
        _judged(course, judge(), keep)
        if told is not None:
            told(course.rows[-1])
    try:
        while course.why is None:
            if not _due(course, schedule, steps):
                with _undisturbed():
                    epoch, at = divmod(course.step, steps_an_epoch)
                    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed + 1 + epoch))
                    batch = [texts[i] for i in order.tolist()[at * schedule.batch : (at + 1) * schedule.batch]]
                    _step(objective, batch, schedule, steps, optimizer, draws, course)
                if told is not None and course.step % _TOLD_EVERY == 0:
                    rate = optimizer.param_groups[0]["lr"]
                    told({"step": course.step, "step/loss": course.losses[-1], "step/learning_rate": rate})
            loss = course.losses[-1]
            if _due(course, schedule, steps):
                score = judge()  # where Ctrl-C ends it, it is asked again
                with _undisturbed():
                    _judged(course, score, keep)
                    course.why = _why(course, schedule, steps)
                    _save(state, identity, parameters, optimizer, draws, course)
                saved = time.monotonic()
                if told is not None:
                    told(course.rows[-1])
            elif time.monotonic() - saved > max(_SAVE_EVERY_S, took / _SAVE_SHARE):
                begun = time.monotonic()
                _save(state, identity, parameters, optimizer, draws, course)
                saved = time.monotonic()
                took = saved - begun
            if progress is not None:
                progress(course.step, steps, _note(course, loss), _last(course, schedule))
    except KeyboardInterrupt:
        if course.step:
            with _undisturbed():
                _save(state, identity, parameters, optimizer, draws, course)
        raise
    return course


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):  # it raises nothing here
        yield
        return
    pressed: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *which: pressed.append(which))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(*pressed[0])


def _step(
    objective: Objective,
    batch: Sequence[Text],
    schedule: Schedule,
    steps: int,
    optimizer: torch.optim.AdamW,
    draws: torch.Generator,
    course: Course,
) -> None:
    begin = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = schedule.rate(course.step, steps, course.seconds)
    loss = objective.loss(batch, course.step / steps, draws)
    optimizer.zero_grad(set_to_none=True)
    loss.value.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, schedule.clip))
    value = float(loss.value.detach())
    for name, found in (("loss", value), ("gradient's norm", norm)):
        if not math.isfinite(found):
            rate = f"train.schedule.learning_rate={schedule.learning_rate}"
            raise UserError(f"the {name} is {found} at step {course.step + 1}: lower {rate}")
    optimizer.step()
    course.losses.append(value)
    course.parts = {name: course.parts.get(name, 0.0) + part for name, part in loss.parts.items()}
    course.step += 1
    course.tokens += sum(len(text.tokens) for text in batch)
    course.seconds += time.perf_counter() - begin


def _late(course: Course, schedule: Schedule) -> bool:
    return schedule.minutes is not None and course.seconds >= 60 * schedule.minutes


def _due(course: Course, schedule: Schedule, steps: int) -> bool:
    """Whether a validation comes next."""
    if not course.losses:
        return False
    return course.step % schedule.every == 0 or course.step == steps or _late(course, schedule)


def _judged(course: Course, score: Score, keep: Callable[[], None]) -> None:
    course.rows.append(
        {
            "step": course.step,
            "seconds": course.seconds,
            "tokens": course.tokens,
            **({"loss": sum(course.losses) / len(course.losses)} if course.losses else {}),
            **{name: total / len(course.losses) for name, total in course.parts.items()},
            "value": score.value,
            **score.facts,
        }
    )
    course.losses, course.parts = [], {}
    if course.best is None or score.value > course.rows[course.best]["value"]:
        course.best = len(course.rows) - 1
        keep()


def _why(course: Course, schedule: Schedule, steps: int) -> str | None:
    """What ends it behind its last row; None while nothing does."""
    assert course.best is not None
    since = len(course.rows) - 1 - course.best
    if schedule.patience is not None and since >= schedule.patience:
        return f"the last {since} validations were no better than the one before them"
    if _late(course, schedule):
        return f"train.schedule.minutes={schedule.minutes} are over"
    return "all steps are done" if course.step == steps else None


def _last(course: Course, schedule: Schedule) -> float | None:
    """The step at which `minutes` will be over, by the pace so far."""
    return None if schedule.minutes is None else course.step * 60 * schedule.minutes / course.seconds


def _note(course: Course, loss: float) -> str:
    # a distance is less than nothing, so that more is better
    best = "" if course.best is None else f", best so far {abs(course.rows[course.best]['value']):.3f}"
    return f"loss {loss:.3f}, {course.tokens / course.seconds:.0f} tokens/s{best}"


def _save(
    file: Path,
    identity: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    draws: torch.Generator,
    course: Course,
) -> None:
    tensors = {"draws": draws.get_state()}
    for name, parameter in parameters.items():
        moments = optimizer.state[parameter]
        tensors[f"parameter/{name}"] = parameter.detach()
        tensors |= {f"{key}/{name}": moments[key] for key in ("exp_avg", "exp_avg_sq", "step")}
    note = {"identity": dict(identity), "course": asdict(course)}
    content = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {_STATE: json.dumps(note, default=str)}
    )
    with atomic_file(file, len(content)) as written:
        written.write(content)


def check_state(file: Path, known: Mapping[str, Any]) -> None:
    """Refuses a state of another training, by what is known of this one's identity."""
    with _opened(file) as stored:
        was = json.loads(stored.metadata()[_STATE])["identity"]
        plain = json.loads(json.dumps(dict(known), default=str))
        if differing := [key for key in plain if was.get(key) != plain[key]]:
            told = ", ".join(differing)
            raise UserError(f"{file} is of another training: {told} differ; name another output, or delete that file")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A state; what is none is one line."""
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no training's state ({error}): delete it and train again") from None


def _load(
    file: Path,
    identity: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    draws: torch.Generator,
) -> Course:
    check_state(file, identity)
    with _opened(file) as stored:
        course = Course(**json.loads(stored.metadata()[_STATE])["course"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"parameter/{name}"])
            moments = {key: tensors[f"{key}/{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": tensors[f"step/{name}"], **moments}  # it is counted on the CPU
    draws.set_state(tensors["draws"])
    return course
