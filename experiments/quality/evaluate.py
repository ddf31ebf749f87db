"""Quality of a run: lm-eval's tasks on the decoding path, item by item."""

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from logging.handlers import QueueHandler
from math import exp, isfinite, log
from numbers import Real
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ...decoding.errors import UserError
from ...decoding.model.config import ModelConfig
from ...decoding.model.source import Source
from ..config import RunConfig
from ..files import write_atomic
from ..lab import Lab, Progress
from ..statistics import Interval, mean_interval, ratio_interval, share_interval
from ..tasks import read_template
from .against import compare_and_write
from .answers import Answer, Answers, answers_key, refuse_others
from .comparable import refuse
from .run_quality import RunQuality, read_quality
from .settings import TaskSpec
from .tasks import backend, build_tasks, included, read_task, tasks_digest

if TYPE_CHECKING:  # a second that commands without quality do not pay
    from lm_eval.api.task import Task

    from .lm import DecodelabLM

ANSWERS = "quality-responses.jsonl"  # of a run that is not over, so that it can go on
KINDS = {
    "multiple_choice": "multiple_choice",
    "generate_until": "generate",
    "loglikelihood": "perplexity",
    "loglikelihood_rolling": "perplexity",
}
SHOTS_SEED = 1234  # lm-eval's own
# Of a task's config: where its files lie, and what result.json says apart.
_ELSEWHERE = ("dataset_path", "dataset_kwargs", "metadata", "num_fewshot", "generation_kwargs", "repeats")


@dataclass(frozen=True, slots=True)
class Exam:
    """Tasks that can be asked, what result.json says of each beside its scores, and the run they are held against."""

    tasks: Mapping[str, Any]  # lm-eval's
    about: Mapping[str, Mapping[str, Any]]
    template: str | None
    reference: RunQuality | None


def quality_digest(config: RunConfig) -> str | None:
    """Of the tasks' files, scorers and templates; part of a run's key. None without tasks."""
    settings = config.quality
    if not settings.tasks:
        return None
    template = read_template(settings.template, "quality.template")
    return hashlib.sha256(
        json.dumps([backend(), template, tasks_digest(settings, config.trusted)]).encode()
    ).hexdigest()


def prepare(config: RunConfig, source: Source, key: str, resolved: Mapping[str, Any]) -> Exam | None:
    """Builds the tasks, before any weight is loaded; what cannot work, or cannot be compared as asked, is refused."""
    settings = config.quality
    template, reference = _beside_tasks(config)
    if not settings.tasks:
        return None
    from .lm import limits

    tasks = build_tasks(settings, source.tokenizer, config.trusted)
    if config.output is not None:
        refuse_others(Path(config.output).expanduser() / ANSWERS, tasks)
    context = ModelConfig.from_hf(source.config).max_positions
    if settings.max_length is not None and settings.max_length > context:
        raise UserError(f"quality.max_length={settings.max_length}: the context of {source.label} is {context}")
    effective = (template or str(source.tokenizer.chat_template)) if settings.chat else None
    about = {}
    for name, task in tasks.items():
        own, generates = getattr(task, "own", None), task.OUTPUT_TYPE == "generate_until"
        longest, stop = (
            limits(task.config.generation_kwargs or {}, settings.max_new_tokens) if generates else (None, ())
        )
        if longest is not None and longest >= context:
            raise UserError(
                f"{name}: an answer of {longest} tokens and its prompt do not fit the context of {context}; lower "
                "max_new_tokens"
            )
        main = main_metric(task) if own is None else own.main
        better = task.higher_is_better().get(main.partition(",")[0], True) if own is None else own.higher_is_better
        about[name] = {
            "kind": KINDS[task.OUTPUT_TYPE] if own is None else own.kind,
            "measures": "decoding" if generates else "model only",
            "main": main,
            "higher_is_better": bool(better),
            "repeats": settings.repeats if generates else 1,
            "digest": _task_digest(task) if own is None else own.digest,
            "settings": {
                "shots": (task.config.num_fewshot or 0) if own is None else own.shots,
                "chat": settings.chat,
                "template": None if effective is None else hashlib.sha256(effective.encode()).hexdigest(),
                "system": settings.system,
                "batch": settings.batch or config.batch,
                "max_new_tokens": longest,
                "max_length": None if generates else settings.max_length or context,
                "stop": list(stop),
                "scorer": None if own is None else own.scorer_text,
                "thinking": list(settings.thinking) if generates and settings.thinking else None,
                "repeats": settings.repeats if generates else 1,
                "isolation": None if own is None else own.isolation,  # of programs under test, from the network
                "limit": settings.limit if own is None else own.limit,
            },
        }
    if reference is not None:
        there = reference.quality["tasks"]  # which metric counts is known once there are scores
        alike = {name: one | {"main": there.get(name, one)["main"]} for name, one in about.items()}
        mine = RunQuality(Path(), key, {"tasks": alike, "backend": backend()}, resolved, {}, {}, ())
        refuse(mine, reference, settings.allow)
    return Exam(tasks, about, template, reference)


def _task_digest(task: "Task") -> str:
    """Of all items and of how they are read and scored."""
    how = {k: v for k, v in task.dump_config().items() if k not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode())
    for doc in task.eval_docs:
        digest.update(json.dumps(doc, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def check_quality(config: RunConfig, source: Source | None) -> None:
    """Refuses what `prepare` does, as far as it is known without a fetch. `source`: None for a model that is not here;
    what the data of lm-eval's own tasks are like is known once they are loaded."""
    _beside_tasks(config)
    if not config.quality.tasks:
        return
    backend()
    if names := [task for task in config.quality.tasks if isinstance(task, str)]:
        from .harness import manager

        manager(names, config.quality, config.trusted)
    if source is not None and not names:
        prepare(config, source, "", config.resolved)
        return
    for task in config.quality.tasks:
        if isinstance(task, TaskSpec):
            read_task(task, config.quality, config.trusted)


def _beside_tasks(config: RunConfig) -> tuple[str | None, RunQuality | None]:
    """The chat template and the run that is compared with."""
    settings = config.quality
    if config.against is not None and not settings.tasks:
        raise UserError(f"against={config.against} compares quality: name quality.tasks")
    if settings.repeats > 1 and not config.acceptance.law().sample:
        raise UserError(
            f"quality.repeats={settings.repeats} would draw one answer {settings.repeats} times; acceptance=sampling"
        )
    included(settings)
    template = read_template(settings.template, "quality.template")
    return template, None if config.against is None else read_quality(Path(config.against).expanduser())


def main_metric(task: "Task") -> str:
    """The first one, by the first filter."""
    filters = [f["name"] for f in task.config.filter_list or ()] or ["none"]
    return _score_name(next(iter(task.aggregation())), filters[0], len(filters))


def _score_name(metric: str, filter_name: str, filters: int) -> str:
    return metric if filters == 1 else f"{metric},{filter_name}"


def measure_quality(lab: Lab, exam: Exam, config: RunConfig, mine: RunQuality, progress: Progress) -> dict[str, Any]:
    """What result.json holds under `quality`. `mine`: the run, without what is found here.

    Writes quality.jsonl, a line an item and repeat, and flips.jsonl beside a reference. Answers are kept as they come:
    a run in the same folder that would be answered alike asks for those that are missing. An interrupt ends the asking;
    what was answered is scored. `failed`: by task, the UserError that ended it; the other tasks go on.
    """
    from .lm import DecodelabLM

    settings = config.quality
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    interrupted = False
    shown = sys.stderr

    def told(what: str, done: int, total: int) -> None:
        with redirect_stderr(shown):
            progress(what, done, total)

    with Answers(mine.folder / ANSWERS, answers_key(mine.config, mine.digests)) as answers:
        lm = DecodelabLM(
            lab,
            seed=config.seed,
            batch=settings.batch or config.batch,
            max_new_tokens=settings.max_new_tokens,
            max_length=settings.max_length,
            thinking=settings.thinking,
            template=exam.template,
            answers=answers,
            progress=told,
        )
        for name, task in exam.tasks.items():
            about = exam.about[name]
            items: list[Item] = []
            try:
                for repeat in range(about["repeats"]):
                    if not interrupted:
                        asked, interrupted = _asked(lm, name, task, about, settings.system, repeat)
                        items += asked
                if items:
                    found[name] = _scored(task, about, items)
                    rows += [_row(name, task, item) for item in items]
            except UserError as error:
                failed[name] = str(error)
                warnings.warn(f"quality of {name} failed: {error}", RuntimeWarning, stacklevel=2)
    write_atomic(mine.folder / "quality.jsonl", "".join(json.dumps(row, default=str) + "\n" for row in rows))
    quality = no_quality(failed) | {"tasks": found, "interrupted": interrupted}
    if exam.reference is not None and found:
        try:
            quality["against"] = compare_and_write(
                replace(mine, quality=quality, rows=rows),
                exam.reference,
                epsilon=settings.epsilon,
                allow=settings.allow,
            )
        except UserError as error:  # what took hours is written all the same
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return quality


def no_quality(failed: Mapping[str, str]) -> dict[str, Any]:
    """What result.json holds under `quality` where nothing was found. `failed`: why, by task."""
    return {"tasks": {}, "backend": backend(), "against": None, "interrupted": False, "failed": dict(failed)}


@dataclass(frozen=True, slots=True)
class Item:
    """One answered item: lm-eval's sample of each filter, and the answers to its requests."""

    samples: tuple[Mapping[str, Any], ...]
    answers: tuple[Answer, ...]
    repeat: int

    @property
    def values(self) -> dict[str, Any]:
        """What lm-eval scored it with, by metric: mostly a number, or what a number of the whole task is made of."""
        return {
            _score_name(metric, sample["filter"], len(self.samples)): sample[metric]
            for sample in self.samples
            for metric in sample["metrics"]
        }


def _asked(
    lm: "DecodelabLM", name: str, task: "Task", about: Mapping[str, Any], system: str | None, repeat: int
) -> tuple[list[Item], bool]:
    """Every item of a task once, and whether that was interrupted: then those that were answered before; none where it
    was the scoring that was interrupted, since it would only begin again."""
    from lm_eval.evaluator import evaluate

    def evaluated(replay: bool) -> list[Item]:
        lm.begin(name, repeat, about["repeats"], replay=replay)
        task.set_fewshot_seed(SHOTS_SEED)  # anew, so that every pass asks the same
        chat = about["settings"]["chat"]
        with _heard(), _item_by_item(task), redirect_stderr(StringIO()):  # of lm-eval's progress bars
            done = evaluate(
                lm,
                {name: task},
                limit=about["settings"]["limit"],
                bootstrap_iters=0,
                system_instruction=system,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        by_doc: dict[int, list[Mapping[str, Any]]] = {}
        for sample in done["samples"][name]:
            by_doc.setdefault(sample["doc_id"], []).append(sample)
        items = []
        for doc, samples in by_doc.items():
            known = [answer for answer in lm.asked[doc] if answer is not None]
            if len(known) == len(lm.asked[doc]):
                items.append(Item(tuple(samples), tuple(known), repeat))
        return items

    try:
        return evaluated(replay=False), False
    except KeyboardInterrupt:
        if lm.asked:
            return [], True
    try:
        return evaluated(replay=True), True
    except KeyboardInterrupt:
        return [], True


@contextmanager
def _item_by_item(task: "Task") -> Iterator[None]:
    """Without lm-eval's numbers over all items: ours have intervals, and its perplexities overflow."""
    known = task.aggregation
    task.aggregation = lambda: dict.fromkeys(known(), len)
    try:
        yield
    finally:
        del task.aggregation


def _scored(task: "Task", about: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    by_doc: dict[int, list[Item]] = {}
    for item in items:
        by_doc.setdefault(item.samples[0]["doc_id"], []).append(item)
    names = dict.fromkeys(name for item in items for name in item.values)
    metrics = {}
    for name in names:
        values = [[item.values[name] for item in same if name in item.values] for same in by_doc.values()]
        metrics[name] = asdict(_interval(task, name.partition(",")[0], [v for v in values if v]))
    cut = [item.answers[0].truncated for item in items if item.answers[0].truncated is not None]
    main = _counting(task, about["main"], metrics, items)
    better = task.higher_is_better().get(main.partition(",")[0], about["higher_is_better"])
    truncated = sum(cut) / len(cut) if cut else None
    told = {"metrics": metrics, "main": main, "higher_is_better": better, "n": len(by_doc), "truncated": truncated}
    return dict(about) | told


def _counting(task: "Task", main: str, metrics: Mapping[str, Any], items: Sequence[Item]) -> str:
    """The main metric, or the next that has a number for each item and for all of them: a text without blanks is one
    word, whose perplexity no float holds. A metric may also have split into several, none of which has its name."""
    for name in dict.fromkeys((main, *metrics)):
        scores = [_score(task, name, item.values[name]) for item in items if name in item.values]
        if name in metrics and metrics[name]["value"] is not None and None not in scores:
            return name
    return main if main in metrics else next(iter(metrics))


def _interval(task: "Task", metric: str, values: Sequence[Sequence[Any]]) -> Interval:
    """Over items, the repeats of one averaged first. Metrics of a whole corpus, such as F1 over all, have no bounds."""
    from lm_eval.api import metrics as known

    aggregate = task.aggregation().get(metric, known.mean)
    if aggregate in (known.mean, known.perplexity):
        column = np.array([np.mean([float(v) for v in same]) for same in values])
        found = share_interval(column) if np.isin(column, (0, 1)).all() else mean_interval(column)
        return found if aggregate is known.mean else _mapped(found, _perplexity)
    if _weighted(task, metric):
        sums, weights = np.array([same[0] for same in values], dtype=float).T
        bits = aggregate is known.bits_per_byte
        return _mapped(ratio_interval(sums, weights), (lambda x: -x / log(2)) if bits else _perplexity)
    every = [v for same in values for v in same]
    return Interval(float(aggregate(every)), None, None, len(values))


def _mapped(found: Interval, falling: Callable[[float], float | None]) -> Interval:
    """Of a decreasing function of the value. An interval of which one end has no number has no ends."""
    value, low, high = (None if x is None else falling(x) for x in (found.value, found.high, found.low))
    return Interval(value, None, None, found.n) if low is None or high is None else Interval(value, low, high, found.n)


def _perplexity(mean: float) -> float | None:
    """None where a float cannot hold it."""
    try:
        return exp(-mean)
    except OverflowError:
        return None


def _row(name: str, task: "Task", item: Item) -> dict[str, Any]:
    """A line of quality.jsonl. `weights`: the words or bytes that a document's perplexity counts for."""
    sample, answers = item.samples[0], item.answers
    own = getattr(task, "own", None)
    question = None if own is None else own.question(sample["doc"])
    kind = KINDS[task.OUTPUT_TYPE]
    scores, weights = {}, {}
    for metric, value in item.values.items():
        if _weighted(task, metric):
            weights[metric] = value[1]
        if _weighted(task, metric) or isinstance(value, Real):
            scores[metric] = _score(task, metric, value)
    if kind == "multiple_choice":
        response: Any = [answer.value[0] for answer in answers]
        scored: Any = int(np.argmax(response)) if len(response) > 1 else answers[0].value[1]
    else:
        response = answers[0].value if answers[0].text is None else [answer.text for answer in answers]
        scored = sample["filtered_resps"][0]
    if isinstance(response, list) and len(response) == 1:
        (response,) = response
    return {
        "task": name,
        "id": sample["doc"].get("id", sample["doc_id"]) if question is None else question.id,
        "repeat": item.repeat,
        "category": sample["doc"].get("category") if question is None else question.category,
        # of what stands in the row, wherever that is in its file
        "doc_hash": sample["doc_hash"] if own is None else hashlib.sha256(sample["doc"]["row"].encode()).hexdigest(),
        "prompt_hash": sample["prompt_hash"],
        "prompt": "" if task.OUTPUT_TYPE == "loglikelihood_rolling" else sample["arguments"][0][0],
        "gold": sample["target"],
        "response": response,
        "scored": scored,
        "scores": scores,
        "truncated": answers[0].truncated,
        "tokens": None if kind == "multiple_choice" else sum(answer.tokens for answer in answers),
        "weights": weights,
    }


def _weighted(task: "Task", metric: str) -> bool:
    from lm_eval.api import metrics as known

    return task.aggregation().get(metric.partition(",")[0]) in (known.weighted_perplexity, known.bits_per_byte)


def _score(task: "Task", metric: str, value: Any) -> float | None:
    """One item's, of what lm-eval scored it with; None where it is no finite number."""
    from lm_eval.api import metrics as known

    aggregate = task.aggregation().get(metric.partition(",")[0])
    if _weighted(task, metric) or aggregate is known.perplexity:
        try:
            value = aggregate([value])
        except OverflowError:
            return None
    return float(value) if isinstance(value, Real) and isfinite(value) else None


@contextmanager
def _heard() -> Iterator[None]:
    """What lm-eval logs as a warning becomes one, each text once."""
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler, logger = QueueHandler(queue), logging.getLogger("lm_eval")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        while not queue.empty():
            warnings.warn(f"lm-eval: {queue.get().getMessage()}", RuntimeWarning, stacklevel=3)
