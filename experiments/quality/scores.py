"""What answers come to: a task's metrics with their intervals, and a line an item."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite, log
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..statistics import Interval, mean_interval, ratio_interval, share_interval
from .answers import Answer

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from .questions import Question

KINDS = {
    "multiple_choice": "multiple_choice",
    "generate_until": "generate",
    "loglikelihood": "perplexity",
    "loglikelihood_rolling": "perplexity",
}


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
            score_name(metric, sample["filter"], len(self.samples)): sample[metric]
            for sample in self.samples
            for metric in sample["metrics"]
        }


def task_scores(task: "Task", about: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    """What result.json says of a task, beside `about`: over items, the repeats of one averaged."""
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


def item_row(name: str, task: "Task", item: Item) -> dict[str, Any]:
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
        "choices": _choices(sample, question) if kind == "multiple_choice" and len(answers) > 1 else None,
        "response": response,
        "scored": scored,
        "scores": scores,
        "truncated": answers[0].truncated,
        "tokens": None if kind == "multiple_choice" else sum(answer.tokens for answer in answers),
        "weights": weights,
    }


def _choices(sample: Mapping[str, Any], question: "Question | None") -> list[str]:
    """What was chosen among, as text: of a task of lm-eval's what it put behind the prompt, or the prompts where those
    differ."""
    if question is not None:
        return list(question.choices)
    contexts, continuations = zip(*(arguments[:2] for arguments in sample["arguments"]), strict=True)
    return [text.strip() for text in (continuations if len(set(continuations)) > 1 else contexts)]


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


def score_name(metric: str, filter_name: str, filters: int) -> str:
    return metric if filters == 1 else f"{metric},{filter_name}"
