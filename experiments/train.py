"""The job `train`: what a drafter learns for a target, from the target's own answers to the prompts of a task.

The answers are made first, side by side, and kept in the output's folder, so that a training that was broken off asks
for none again. Some prompts are kept back; on them the real loop says what the drafter is worth so far.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..decoding import loop
from ..decoding.cost import DraftCost, Profile, draft_cost, measure_target, predict
from ..decoding.events import finish
from ..decoding.model.load import load_decoder
from ..decoding.model.source import Source, open_source
from ..decoding.request import Request
from ..decoding.training import Course, Drafts, Score, Stands, Text, train
from ..errors import UserError
from . import hardware
from .composition import resolve_device, resolve_dtype
from .config import RunConfig
from .files import read_lines, write_atomic
from .format import number, percent
from .lab import Lab, build_lab
from .measure import request_of
from .metrics import acceptance
from .product import check_product, product
from .progress import Watch
from .table import columns
from .tasks import Task, load_task

ANSWERS = "answers.jsonl"
STATE = "state.safetensors"
COSTS = "costs.json"
COURSE = "course.json"
_SOME = 3  # prompts from which a draft's cost is taken
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
_USED = {"draft": "drafting=draft_model drafting.model.path=", "student": "model.path="}  # other than as heads are


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
            raise UserError("no answer to a prompt kept back has a second token: give other prompts, or more of them")
        rates = tuple(at["rate"] for at in found["acceptance_by_position"])
        facts = {"predicted_speedup": value, "tokens_per_step": found["tokens_per_step"], "acceptance": rates}
        return Score(value, facts)


def train_job(config: RunConfig) -> int:
    """Answers, training, the file of what was learnt. The same command goes on where it was."""
    settings = config.train
    if settings is None:
        raise UserError("name what is to be trained, such as train=medusa")
    if config.output is None or not config.output.strip():
        raise UserError("train writes a folder: name it with output=DIR")
    folder = Path(config.output).expanduser()
    device = resolve_device(config.device)
    dtype, _ = resolve_dtype(config.dtype, device)
    task = load_task(config.task)
    with hardware.torch_threads(config.threads), Watch() as watch:
        source = open_source(config.model, watch.step)
        start = settings.check(source)
        check_product(config, source)
        folder.mkdir(parents=True, exist_ok=True)
        target = load_decoder(source, dtype=dtype, device=device, progress=watch.step)
        lab = build_lab(source, target, config.drafting, config.acceptance, progress=watch.step)
        rows = answered(lab, task, config, folder / ANSWERS, watch.step)
        texts, held = _split(rows, settings.schedule.held_back, settings.schedule.longest)
        back = {row["id"] for row in held}
        learner = settings.learner(source, target, config.seed, start)
        if isinstance(learner, Drafts):
            requests = [r for r, row in zip(_requests(lab, task, config), rows, strict=True) if row["id"] in back]
            costs = _costs(folder / COSTS, lab, learner, requests, config.seed, watch.step)
            judge = partial(Judge(lab, requests, config.seed, costs), learner)
        else:
            assert isinstance(learner, Stands)
            judge = partial(learner.score, [_text(row) for row in held if len(row["tokens"]) > 1])
        identity = {
            "kind": settings.kind,
            "settings": config.resolved["train"],
            "target": source.digest,
            "dtype": str(dtype).removeprefix("torch."),
            "answers": _digest(rows),
            "seed": config.seed,
        }
        about = {
            "settings": config.resolved["train"],
            "prompts": len(texts),
            "answers": identity["answers"],
            "task": task.label,
        }
        course = train(
            learner.objective,
            texts,
            settings.schedule,
            seed=config.seed,
            state=folder / STATE,
            identity=identity,
            judge=judge,
            keep=lambda: learner.save(folder, source, about),
            progress=lambda done, steps, note: watch.step("training", done, steps, note),
        )
        write_atomic(folder / COURSE, json.dumps(asdict(course), indent=1) + "\n")
    _show(course, settings.kind, source, len(texts), len(back), folder)
    if isinstance(learner, Stands):
        with hardware.torch_threads(config.threads):
            return product(config, source, target, folder)
    return 0


def _requests(lab: Lab, task: Task, config: RunConfig) -> list[Request]:
    return [request_of(lab, item, (), config.task) for item in task.items]


def answered(
    lab: Lab, task: Task, config: RunConfig, file: Path, progress: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    """The target's answer to the first turn of each item, in the task's order: those of the file, and the rest."""
    requests = _requests(lab, task, config)
    made = {
        "target": lab.source.digest,
        "law": asdict(lab.acceptance.law()),
        "seed": config.seed,
        "max_new_tokens": config.task.max_new_tokens,
    }
    mark = _digest(made)
    kept = {row["id"]: row for row in read_lines(file) if row.get("made") == mark and "tokens" in row}
    rows: dict[str, dict[str, Any]] = {}
    missing = []
    for item, r in zip(task.items, requests, strict=True):
        row = kept.get(item.id)
        if row is not None and row["prompt"] == list(r.prompt):
            rows[item.id] = row
        else:
            missing.append((item.id, r))
    with file.open("a", encoding="utf-8") as out:
        for at in range(0, len(missing), config.batch):
            some = missing[at : at + config.batch]
            progress("answers", len(rows), len(task.items))
            for (name, r), g in zip(some, finish(lab.strategy([r for _, r in some], config.seed)), strict=True):
                rows[name] = {"id": name, "made": mark, "prompt": list(r.prompt), "tokens": g.tokens}
                out.write(json.dumps(rows[name]) + "\n")
            out.flush()
    progress("answers", len(rows), len(task.items))
    return [rows[item.id] for item in task.items]


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _split(
    rows: Sequence[Mapping[str, Any]], held_back: int, longest: int
) -> tuple[list[Text], list[Mapping[str, Any]]]:
    """(the texts that are learnt from, none longer than `longest`; the rows kept back, chosen by a hash)."""
    if len(rows) <= held_back:
        raise UserError(
            f"train.schedule.held_back={held_back} of {len(rows)} prompts leaves none to learn from: give more"
        )
    back = set(sorted((row["id"] for row in rows), key=_digest)[:held_back])
    texts = [
        _text(row)
        for row in rows
        if row["id"] not in back and len(row["tokens"]) > 2 and len(row["prompt"]) + len(row["tokens"]) <= longest
    ]
    if not texts:
        raise UserError(
            f"no text to learn from: it takes answers of 3 tokens, in texts of at most train.schedule.longest={longest}"
        )
    return texts, [row for row in rows if row["id"] in back]


def _text(row: Mapping[str, Any]) -> Text:
    return Text((*row["prompt"], *row["tokens"]), len(row["prompt"]))


def _costs(
    file: Path,
    lab: Lab,
    learner: Drafts,
    requests: Sequence[Request],
    seed: int,
    progress: Callable[[str, int, int], None],
) -> tuple[Profile, DraftCost]:
    """Measured once and kept: what is judged by them stays comparable, and a training goes on to the same numbers."""
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        seconds = {int(k): s for k, s in found["seconds"].items()}
        return Profile(found["context"], seconds), DraftCost(**found["draft"])
    progress("costs", 0, 1)
    context = max(len(r.prompt) for r in requests)
    profile = measure_target(lab.target, context=min(context, lab.context // 2))
    drafter = learner.drafter(lab.acceptance.law())
    cost = draft_cost(lab.target, drafter, lab.acceptance, list(requests[:_SOME]), seed=seed)
    found = {"context": profile.context, "seconds": profile.seconds, "draft": asdict(cost)}
    write_atomic(file, json.dumps(found, indent=1) + "\n")
    progress("costs", 1, 1)
    return profile, cost


def _show(course: Course, kind: str, source: Source, texts: int, back: int, folder: Path) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{kind} for {source.label}: {texts} texts, judged on {back} others\n", soft_wrap=True)
    told = [fact for fact in _FACTS if any(fact in row for row in course.rows)]
    table = columns("step", "minutes", "tokens", "loss", *(_FACTS[fact][0] for fact in told))
    for n, row in enumerate(course.rows):
        table.add_row(
            f"{row['step']}{' *' if n == course.best else ''}",
            f"{row['seconds'] / 60:.1f}",
            f"{row['tokens']:,}",
            number(row["loss"], 3),
            *(_FACTS[fact][1](row[fact]) for fact in told),
        )
    console.print(table)
    console.print(f"ended because {course.why}; * is kept", soft_wrap=True)
    used = _USED.get(kind, f"drafting={kind} drafting.path=")
    console.print(f"written to {folder}; {used}{folder}", soft_wrap=True)
