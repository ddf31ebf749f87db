"""The job `train`: what a drafter learns for a target, from the target's own answers to the prompts of a task.

The answers are made first, side by side, and kept in the output's folder, so that a training that was broken off asks
for none again. Some prompts are kept back; on them the real loop says what the drafter is worth so far.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..attention.options import Native
from ..decoding import loop
from ..decoding.cost import DraftCost, Profile, draft_cost, measure_target, predict
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, named
from ..decoding.request import Request
from ..decoding.training import (
    Course,
    Drafts,
    Learner,
    ReadsTexts,
    Score,
    Stands,
    Text,
    Trains,
    Watches,
    check_state,
    train,
)  # fmt: skip
from ..decoding.uptraining import TrainKV
from ..errors import UserError
from ..quantization.none import AsStored
from . import hardware
from .compose import defaults, quoted
from .composition import resolve_device, resolve_dtype
from .config import RunConfig
from .files import make_folder, misfit, write_atomic
from .format import duration, number, percent, size
from .lab import Heard, Lab, build_lab
from .metrics import acceptance
from .plain_texts import lessons_of, read_texts
from .product import check_product, product
from .progress import Watch
from .quantise import target_of
from .result import provenance
from .sweep.lock import lock_folder
from .table import columns
from .target_answers import Answers, Lessons, answered, digest, enough
from .tasks import Task, load_task
from .tracking import RunInfo

ANSWERS = "answers.jsonl"
STATE = "state.safetensors"
COSTS = "costs.json"
COURSE = "course.json"
NOT_TRAINED = (ANSWERS, STATE, COSTS)  # of a training's folder, beside what was trained and how that went
_SHORT = "no answer to a prompt kept back has a second token: give other prompts, or more of them"
_UNCOUNTED = "texts kept back; not of train.schedule.minutes"
_SOME = 3  # prompts from which a draft's cost is taken
_COSTS = {
    "context": int, "seconds": {"1": float, "*": float}, "draft": {"step_s": float, "token_s": float, "host_s": float},
    "made": str,
}  # fmt: skip
# What a row of the course may tell: the heading of its column, and how it is written.
_FACTS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "tokens_per_step": ("tokens/step", number),
    "predicted_speedup": ("predicted", lambda value: number(value, 2, "×")),
    "acceptance": ("acceptance by position", lambda rates: " ".join(percent(rate) for rate in rates)),
    "kl": ("KL", lambda value: number(value, 3)),
    "kl_p99": ("p99", number),
    "agreement": ("agreement", percent),
    "perplexity": ("perplexity", number),
    "teacher_perplexity": ("teacher's", number),
}
# What is not used as heads are.
_USED = {
    "draft": ("drafting=draft_model", "drafting.model.path"), "student": ("", "model.path"), "kv": ("", "model.path"),
}  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """What drafting is worth on the prompts kept back: they are decoded side by side by the loop itself, and the
    speedup follows from its steps, T(k) and the draft's cost, which are measured once."""

    lab: Lab
    requests: Sequence[Request]
    seed: int
    costs: tuple[Profile, DraftCost]

    def __call__(self, learner: Drafts) -> Score:
        lab = self.lab
        drafter = learner.drafter(lab.acceptance.law())
        done = loop.generate(lab.target, list(self.requests), drafter, lab.acceptance, seed=self.seed)
        steps = [step for g in done for step in g.steps]
        found = acceptance(steps)
        value = predict(*self.costs, steps)
        if value is None:
            raise UserError(_SHORT)
        if isinstance(learner, Watches):
            learner.watch(steps, self.costs)
        rates = tuple(at["rate"] for at in found["acceptance_by_position"])
        facts = {"predicted_speedup": value, "tokens_per_step": found["tokens_per_step"], "acceptance": rates}
        return Score(value, facts)


def check_settings(config: RunConfig) -> Trains:
    """What is to be trained. Refuses what does not go with it, as far as that is known without the model."""
    settings = config.train
    if not isinstance(settings, TrainKV) and not isinstance(config.attention, Native):
        raise UserError(
            "train=kv trains a model for another attention; train=eagle, medusa, draft and student want the model's "
            "own: give train=kv, or leave attention out"
        )
    if settings is None:
        raise UserError("name what is to be trained, such as train=medusa")
    if isinstance(settings, TrainKV) and not isinstance(config.quantization, AsStored):
        raise UserError(
            "train=kv trains weights, and quantization makes a copy of them: quantise its folder afterwards"
        )
    return settings


def train_job(config: RunConfig) -> int:
    """Answers, training, the file of what was learnt. The same command goes on where it was."""
    settings = check_settings(config)
    if config.output is None or not config.output.strip():
        raise UserError("train writes a folder: name it with output=DIR")
    config.tracking.check()
    folder = Path(config.output).expanduser()
    try:
        with hardware.torch_threads(config.threads), ExitStack() as stack:
            return _train(config, settings, folder, stack)
    except KeyboardInterrupt:
        print("decodelab: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130


@dataclass(frozen=True)
class Job:
    """A training, ready to begin."""

    config: RunConfig
    settings: Trains
    folder: Path
    task: Task
    lab: Lab
    answers: Answers
    lessons: Lessons
    learner: Learner
    made: dict[str, Any]  # its provenance
    known: dict[str, Any]  # of its identity, before there are answers

    @property
    def given(self) -> Any:
        """The keys of the group `train`."""
        return self.config.resolved["train"]

    @property
    def identity(self) -> dict[str, Any]:
        """What all numbers follow from: a state of another one is not gone on from."""
        return self.known | {"answers": self.answers.digest}

    @property
    def about(self) -> dict[str, Any]:
        """What goes into the note of what was trained."""
        return {
            "settings": self.given,
            "prompts": len(self.lessons.texts),
            "answers": self.answers.digest,
            "task": self.task.label,
        }

    @property
    def digests(self) -> dict[str, Any]:
        return {
            "weights": self.lab.source.digest,
            "task": self.task.digest,
            "answers": self.answers.digest,
            "settings": digest(self.given),
        }

    @property
    def info(self) -> RunInfo:
        identity, config = self.identity, self.config
        title = f"{self.settings.kind} for {self.lab.source.label}, {self.task.label}"
        settled = {"dtype": identity["dtype"], "device": str(self.lab.target.device)}
        resolved = config.resolved | settled
        return RunInfo(digest(identity), title, "train", self.folder, resolved, self.digests, self.made)


def _train(config: RunConfig, settings: Trains, folder: Path, stack: ExitStack) -> int:
    started = datetime.now(UTC)
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    schedule = settings.schedule
    files = settings.texts if isinstance(settings, ReadsTexts) else ()
    task, plain = read_texts(files) if files else (load_task(config.task), [])
    enough(len(plain or task.items), schedule.held_back)
    with Watch() as watch, Heard() as heard:
        source = target_of(config, dtype, watch.step)
        start = settings.check(source)
        check_product(config, source)
        if not (folder / ANSWERS).exists() and (found := sorted(folder.glob("*.safetensors"))):
            raise UserError(f"{found[0]} was not made by a training in this folder: name another output")
        make_folder(folder)
        stack.callback(lock_folder(folder, "a training").release)
        known = _known(config, settings, source.identity, dtype, start)
        if (folder / STATE).exists():
            check_state(folder / STATE, known)
        target = load_decoder(source, dtype=dtype, device=device, kernels=config.kernels.kernels, progress=watch.step)
        lab = build_lab(source, target, config.drafting, config.acceptance, progress=watch.step)
        if files:
            (folder / ANSWERS).touch()  # by which the folder is known as a training's
            answers = Answers((), 0, task.digest)
            lessons = lessons_of(plain, source, schedule.held_back, schedule.longest)
        else:
            answers = answered(
                lab,
                task,
                config.task,
                folder / ANSWERS,
                seed=config.seed,
                batch=config.batch,
                progress=watch.step,
            )
            lessons = Lessons.of(answers, schedule.held_back, schedule.longest)
        learner = settings.learner(source, target, lessons.texts, config.seed, start)
        made = provenance(
            dtype,
            config.seed,
            device=hardware.describe_device(device),
            dtype_reason=why,
            started_at=started.isoformat(timespec="seconds"),
        )
        job = Job(config, settings, folder, task, lab, answers, lessons, learner, made, known)
        course, costs = _taught(job, watch)
    _show(course, settings.kind, source, lessons, costs, lessons.left_out(config.task, schedule, lab.context))
    for told in heard.texts:
        print(f"note: {told}")
    print(f"written to {folder}; use it:\n{_command(settings.kind, config.model, folder)}")
    if isinstance(learner, Stands):
        return product(config, source, target, folder)
    return 0


def _known(
    config: RunConfig, settings: Trains, target: str, dtype: torch.dtype, start: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """What a training's numbers follow from, beside the answers."""
    begun = None
    if start is not None:
        hashed = hashlib.sha256()
        for name in sorted(start):
            hashed.update(name.encode() + start[name].contiguous().view(torch.uint8).numpy().tobytes())
        begun = hashed.hexdigest()[:16]
    return {
        "kind": settings.kind,
        "settings": config.resolved["train"],
        "start": begun,
        "target": target,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": config.seed,
    }


def _taught(job: Job, watch: Watch) -> tuple[Course, dict[str, Any]]:
    """How the training went, and what it cost; both are written."""
    folder, learner = job.folder, job.learner
    judge = _judge(job, watch)
    with job.config.tracking.open(job.info) as tracker:
        course = train(
            learner.objective,
            job.lessons.texts,
            job.settings.schedule,
            seed=job.config.seed,
            state=folder / STATE,
            identity=job.identity,
            judge=judge,
            keep=lambda: learner.save(folder, job.lab.source, job.about),
            progress=partial(watch.step, "training"),
            told=lambda row: tracker.row(_flat(row)),
            before=isinstance(job.settings, TrainKV),  # a model already, before the first step
        )
        if not {file.name for file in folder.glob("*.safetensors")} - {STATE}:
            raise UserError(f"{folder} has lost what was trained: delete {folder / STATE}, and it is trained again")
        costs = {
            "tokens_per_second": course.tokens / course.seconds,
            "peak_memory_bytes": _peak(folder / COURSE, job.digests, hardware.peak_memory_bytes(job.lab.target.device)),
            "answers_s": sum(a.seconds for a in job.answers.all),
        }
        written = {**asdict(course), **costs, "digests": job.digests, "provenance": job.made}
        write_atomic(folder / COURSE, json.dumps(written, indent=1) + "\n")
        assert course.best is not None
        best = {f"best/{name}": value for name, value in _flat(course.rows[course.best]).items()}
        files = [f.name for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".")]
        tracker.done({"status": "done", "why": course.why, **costs, **best}, [f for f in files if f not in NOT_TRAINED])
    return course, costs


def _judge(job: Job, watch: Watch) -> Callable[[], Score]:
    learner, lab, held, seed = job.learner, job.lab, job.lessons.held, job.config.seed
    if isinstance(learner, Drafts):
        requests = [a.request for a in held]
        mark = digest(job.identity | {"device": str(lab.target.device)})
        costs = _costs(job.folder / COSTS, mark, lab, learner, requests, seed, watch.step)
        judge = Judge(lab, requests, seed, costs)

        def judged() -> Score:
            watch.step("judging", 0, len(requests), _UNCOUNTED)  # side by side
            return judge(learner)

        return judged
    assert isinstance(learner, Stands)
    if not job.lessons.judged:
        raise UserError(_SHORT)
    texts = job.lessons.judged
    return lambda: learner.score(_watched(texts, watch))


def _watched(texts: Sequence[Text], watch: Watch) -> Iterator[Text]:
    """One after the other, told of as they are judged."""
    for n, text in enumerate(texts):
        watch.step("judging", n, len(texts), _UNCOUNTED)
        yield text
    watch.step("judging", len(texts), len(texts), _UNCOUNTED)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a list holds is told as NAME/1, NAME/2, …"""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        listed = isinstance(value, list | tuple)
        flat |= {f"{name}/{i}": one for i, one in enumerate(value, 1)} if listed else {name: value}
    return flat


def _peak(file: Path, digests: Mapping[str, Any], now: int | None) -> int | None:
    """The most memory: of this process, or of the one that ended this very training before."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or none of ours
        found = None
    if misfit(found, {"digests": dict, "peak_memory_bytes": int}) is not None or found["digests"] != digests:
        return now
    return max(found["peak_memory_bytes"], now or 0)


def _command(kind: str, model: ModelSpec, folder: Path) -> str:
    """What uses it."""
    part, key = _USED.get(kind, (f"drafting={kind}", "drafting.path"))
    words = [] if key == "model.path" else _model_words(model)
    return shlex.join(["decodelab", "run", *words, *filter(None, [part]), _word(key, str(folder))])


def _model_words(spec: ModelSpec) -> list[str]:
    """What names this model on a command line; the default one needs none."""
    usual = str(defaults()["model"])
    try:
        name, base = spec.name, named(spec.name or usual)
    except UserError:  # of a folder of the user's own configurations
        name, base = usual, named(usual)
    words = [] if name in (None, usual) else [f"model={name}"]
    keys = ("path", "revision", "adapter")
    return words + [
        _word(f"model.{key}", getattr(spec, key)) for key in keys if getattr(spec, key) != getattr(base, key)
    ]


def _word(key: str, value: str | None) -> str:
    """An override; what Hydra would not read as this very text is quoted."""
    if value is None:
        return f"{key}=null"
    return f"{key}={value}" if re.fullmatch(r"[A-Za-z_./][\w./:@%+-]*", value) else f"{key}={quoted(value)}"


def _costs(
    file: Path,
    mark: str,
    lab: Lab,
    learner: Drafts,
    requests: Sequence[Request],
    seed: int,
    progress: Callable[[str, int, int], None],
) -> tuple[Profile, DraftCost]:
    """Measured once and kept: what is judged by them stays comparable, and a training goes on to the same numbers.
    Those of another `mark` are another training's."""
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            wrong = misfit(found, _COSTS)
        except ValueError as error:
            wrong = str(error)
        if wrong is None and not all(isfinite(s) and s > 0 for s in found["seconds"].values()):
            wrong = "a step takes no such time"
        if wrong is not None:
            raise UserError(f"{file} is damaged ({wrong}): delete it, and costs are measured anew")
        if found["made"] == mark:
            seconds = {int(k): s for k, s in found["seconds"].items()}
            return Profile(found["context"], seconds), DraftCost(**found["draft"])
    progress("costs", 0, 1)
    context = max(len(r.prompt) for r in requests)
    profile = measure_target(lab.target, context=min(context, lab.context // 2))
    drafter = learner.drafter(lab.acceptance.law())
    cost = draft_cost(lab.target, drafter, lab.acceptance, list(requests[:_SOME]), seed=seed)
    found = {"context": profile.context, "seconds": profile.seconds, "draft": asdict(cost), "made": mark}
    write_atomic(file, json.dumps(found, indent=1) + "\n")
    progress("costs", 1, 1)
    return profile, cost


def _show(
    course: Course, kind: str, source: Source, lessons: Lessons, costs: Mapping[str, Any], left_out: str | None
) -> None:
    console = Console(highlight=False, markup=False)
    texts, back = len(lessons.texts), len({a.id for a in lessons.held} or lessons.judged)
    console.print(f"{kind} for {source.label}: {texts} texts, judged on {back} others", soft_wrap=True)
    if left_out is not None:
        console.print(left_out, soft_wrap=True)
    told = [fact for fact in _FACTS if any(fact in row for row in course.rows)]
    table = columns("step", "minutes", "tokens", "loss", *(_FACTS[fact][0] for fact in told))
    for n, row in enumerate(course.rows):
        table.add_row(
            f"{row['step']}{' *' if n == course.best else ''}",
            f"{row['seconds'] / 60:.1f}",
            f"{row['tokens']:,}",
            number(row.get("loss"), 3),
            *(_FACTS[fact][1](row[fact]) for fact in told),
        )
    console.print()
    console.print(table)
    console.print(f"ended because {course.why}; * is kept", soft_wrap=True)
    spent = f"{duration(costs['answers_s'])} of answers, {duration(course.seconds)} of training at"
    pace = f"{costs['tokens_per_second']:,.0f} tokens/s, {size(costs['peak_memory_bytes'])} of memory at most"
    console.print(f"{spent} {pace}", soft_wrap=True)
