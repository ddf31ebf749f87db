"""Quality of a run: lm-eval's tasks on the decoding path, item by item."""

import hashlib
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ...decoding.model.config import ModelConfig
from ...decoding.model.source import Source
from ...errors import UserError
from ..config import RunConfig
from ..files import write_atomic
from ..format import counted
from ..lab import Lab, Progress
from ..tasks import read_template
from .against import compare_and_write
from .answers import Answers, answers_key, refuse_others
from .comparable import refuse
from .divergence import Key, lead, record, refuse_recorded, summarise, write_ranked
from .recorded import Recorded, gold_of, read_recorded, write_recorded
from .run_quality import RunQuality, read_quality
from .scores import KINDS, Item, item_row, score_name, task_scores
from .settings import TaskSpec
from .tasks import backend, build_tasks, included, read_task, tasks_digest

if TYPE_CHECKING:  # a second that commands without quality do not pay
    from lm_eval.api.task import Task

    from .lm import DecodelabLM

Asked = tuple[Any, Item, Mapping[str, Any]]  # lm-eval's task, and the item's line of quality.jsonl

ANSWERS = "quality-responses.jsonl"  # of a run that is not over, so that it can go on
SHOTS_SEED = 1234  # lm-eval's own
# Of a task's config: where its files lie, and what result.json says apart.
_ELSEWHERE = ("dataset_path", "dataset_kwargs", "metadata", "num_fewshot", "generation_kwargs", "repeats")


@dataclass(frozen=True, slots=True)
class Exam:
    """Tasks that can be asked, what result.json says of each beside its scores, and the run they are held against, with
    its predictions where they are asked for."""

    tasks: Mapping[str, Any]  # lm-eval's
    about: Mapping[str, Mapping[str, Any]]
    template: str | None
    reference: RunQuality | None
    recorded: Recorded | None = None


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
    recorded = None
    if reference is not None and settings.kl:
        recorded = read_recorded(reference.folder)
        vocab = ModelConfig.from_hf(source.config).vocab
        refuse_recorded(recorded, reference.folder, reference.key, source.tokenizer, vocab, context)
    return Exam(tasks, about, template, reference, recorded)


def _task_digest(task: "Task") -> str:
    """Of all items and of how they are read and scored."""
    how = {k: v for k, v in task.dump_config().items() if k not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode())
    for doc in task.eval_docs:
        digest.update(json.dumps(doc, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def check_quality(config: RunConfig, source: Source | None) -> Exam | None:
    """Refuses what `prepare` does, as far as it is known without a fetch. `source`: None for a model that is not here;
    what the data of lm-eval's own tasks are like is known once they are loaded. Their exam, where all is here."""
    _beside_tasks(config)
    if not config.quality.tasks:
        return None
    backend()
    if names := [task for task in config.quality.tasks if isinstance(task, str)]:
        from .harness import manager

        manager(names, config.quality, config.trusted)
    if source is not None and not names:
        return prepare(config, source, "", config.resolved)
    for task in config.quality.tasks:
        if isinstance(task, TaskSpec):
            read_task(task, config.quality, config.trusted)
    return None


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
    return score_name(next(iter(task.aggregation())), filters[0], len(filters))


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
    asked: list[Asked] = []
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
                        answered, interrupted = _asked(lm, name, task, about, settings.system, repeat)
                        items += answered
                if items:
                    found[name] = task_scores(task, about, items)
                    _warn_of_empty(name, about, items)
                    written = [item_row(name, task, item) for item in items]
                    rows += written
                    asked += [(task, item, row) for item, row in zip(items, written, strict=True)]
            except UserError as error:
                failed[name] = str(error)
                warnings.warn(f"quality of {name} failed: {error}", RuntimeWarning, stacklevel=2)
    write_atomic(mine.folder / "quality.jsonl", "".join(json.dumps(row, default=str) + "\n" for row in rows))
    quality = no_quality(failed) | {"tasks": found, "interrupted": interrupted}
    if settings.kl and found and not interrupted:
        try:
            quality |= _led(lm, exam, mine, asked, told)
        except KeyboardInterrupt:
            quality["interrupted"] = True
        except UserError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
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


def _warn_of_empty(name: str, about: Mapping[str, Any], items: Sequence[Item]) -> None:
    """Where the model mostly says nothing, its score is that of the way it was asked."""
    empty = sum(not str(item.answers[0].value).strip() for item in items)
    if about["kind"] != "generate" or 2 * empty < len(items):
        return
    told = f"{name}: {empty} of {counted(len(items), 'answer')} are empty, so that the score says little of the model: "
    asked = about["settings"]
    if asked["thinking"]:
        told += "its thoughts may not end within max_new_tokens; raise it"
    elif asked["chat"]:
        told += "see quality.jsonl for what it said; solved examples (quality.shots=2) show how to answer"
    else:
        told += "an instruct model wants quality.chat=true, any other solved examples (quality.shots=2)"
    warnings.warn(told, RuntimeWarning, stacklevel=2)


def no_quality(failed: Mapping[str, str]) -> dict[str, Any]:
    """What result.json holds under `quality` where nothing was found. `failed`: why, by task."""
    absent = dict.fromkeys(("against", "recorded", "divergence"))
    return {"tasks": {}, "backend": backend(), **absent, "interrupted": False, "failed": dict(failed)}


def _led(lm: "DecodelabLM", exam: Exam, mine: RunQuality, asked: Sequence[Asked], progress: Progress) -> dict[str, Any]:
    """Without a reference its predictions are kept; with one, how far this run's are from its."""
    items: dict[Key, Asked] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for task, item, row in asked:
        if item.repeat == 0:
            same = row["task"], row["doc_hash"]
            items[*same, copies[same]] = task, item, row
            copies[same] += 1
    if exam.recorded is None or exam.reference is None:
        found = [gold_of(lm, *parts, key[2], exam.about[key[0]]["settings"]["chat"]) for key, parts in items.items()]
        golds = [gold for gold in found if gold is not None]
        made = record(lm, golds, mine.key, len(items) - len(golds), progress)
        if made is None:
            raise UserError("quality.kl=true, and no item has an answer to be led through: nothing was kept")
        write_recorded(mine.folder, made)
        return {"recorded": {"items": len(golds), "skipped": made.skipped, "floor": made.floor}}
    folder = exam.reference.folder
    led = lead(lm, exam.recorded, set(items), progress)
    if not led:
        raise UserError(f"not comparable with {folder} token by token: no answer is in both runs")
    write_ranked(mine.folder, led, lm.tokenizer)
    return {"divergence": summarise(exam.recorded, folder, led)}


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
