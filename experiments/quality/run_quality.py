"""What a run found of quality, read back from its files: items, and those of two runs in pairs."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..files import read_result

_REQUIRED = ("task", "id", "repeat", "doc_hash", "scores")


@dataclass(frozen=True, slots=True)
class RunQuality:
    """What a run found of quality. `quality`, `config`, `digests` and `provenance` are those of its result.json (the
    last may be empty), `rows` the lines of the quality.jsonl in `folder`."""

    folder: Path
    key: str
    quality: Mapping[str, Any]
    config: Mapping[str, Any]
    digests: Mapping[str, Any]
    provenance: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Pair:
    """An item in both runs: rows of each, one a repeat."""

    mine: Sequence[Mapping[str, Any]]
    reference: Sequence[Mapping[str, Any]]


def read_quality(folder: Path) -> RunQuality:
    """A run's quality, from its result.json and quality.jsonl. What is not whole is refused."""
    again = "name the folder of a run with quality.tasks"
    file, items = folder / "result.json", folder / "quality.jsonl"
    if not file.exists():
        raise UserError(f"{folder} holds no result.json; {again}")
    result = read_result(file)
    if not result.get("quality"):
        raise UserError(f"{folder} is a run without quality; {again}")
    try:
        of = {key: result[key] for key in ("key", "quality", "config", "digests", "provenance")}
        run = RunQuality(folder, **of, rows=read_rows(items))
        itemgetter("backend", "interrupted")(run.quality)
        itemgetter("_target_")(run.config["acceptance"])
        for name, task in run.quality["tasks"].items():
            itemgetter("measures", "higher_is_better", "digest", "settings")(task)
            _check_whole(run, name, task["n"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} is not as this version writes a run ({error!r}); run it again") from None
    return run


def _check_whole(run: RunQuality, task: str, n: int) -> None:
    if (found := len(items_of(run, task))) != n:
        raise UserError(f"{run.folder / 'quality.jsonl'} holds {found} of {n} items of {task}; run it again")
    check_scores(run, task, run.quality["tasks"][task])


def check_scores(run: RunQuality, task: str, about: Mapping[str, Any]) -> None:
    """Of the metric that counts, every item has a number."""
    kind, main = about["kind"], about["main"]
    for row in run.rows:
        if row["task"] == task:
            score = row["scores"].get(main)
            if score is None or (is_ratio(kind, main) and score <= 0):
                file = run.folder / "quality.jsonl"
                raise UserError(f"{file}: {main} of item {row['id']} of {task} is {score}, which cannot be compared")


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a quality.jsonl. A score is a finite number, or null where it has no value."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): the run's items are gone; run it again") from error
    rows: list[Mapping[str, Any]] = []
    for i, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path} is broken in line {i} of {len(lines)}; run it again") from None
        if not isinstance(row, dict) or (missing := [key for key in _REQUIRED if key not in row]):
            lacks = f"has no {missing[0]}" if isinstance(row, dict) else "is no object"
            raise UserError(f"{path}: line {i} {lacks}; run it again")
        for metric, score in row["scores"].items():
            if score is not None and (not isinstance(score, int | float) or not isfinite(score)):
                raise UserError(f"{path}: {metric} of item {row['id']} is {score}, no number; run it again")
        rows.append(row)
    return rows


def items_of(run: RunQuality, task: str) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """The rows of each item, a repeat each, by its document's hash; of equal documents, by which of them it is."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    copies: Counter[tuple[str, int]] = Counter()
    for row in run.rows:
        if row["task"] == task:
            same = row["doc_hash"], row["repeat"]
            found.setdefault((row["doc_hash"], copies[same]), []).append(row)
            copies[same] += 1
    return found


def pairs_of(mine: RunQuality, reference: RunQuality, task: str) -> list[Pair]:
    here, there = items_of(mine, task), items_of(reference, task)
    return [Pair(rows, there[key]) for key, rows in here.items() if key in there]


def is_ratio(kind: str, metric: str) -> bool:
    return kind == "perplexity" and metric.partition(",")[0].endswith("perplexity")
