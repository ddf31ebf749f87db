"""The tasks of a run: files of the user's own, and lm-eval's by name."""

import glob
import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # comes with transformers

from ...errors import UserError
from ..construct import did_you_mean
from ..items import Row
from ..tasks import read_file, read_rows
from .questions import FIELDS, Metrics, Question, reading
from .scorers import Function, Scorer, build_scorer, scorer_text
from .settings import Kind, QualitySettings, TaskSpec

if TYPE_CHECKING:
    from lm_eval.api.task import Task

KEY, SHOTS_KEY = "quality.tasks.path", "quality.tasks.shots_path"


@dataclass(frozen=True, slots=True)
class OwnTask:
    """A file of the user's as a task, and all that a run records of it: `task.own` of what `build_tasks` returns.

    `questions`: the first `limit` rows. `pool`: where solved examples come from. `metrics`: (lm-eval's name of the
    aggregation, whether higher is better) by name; a function may return more, of which means are taken. `main`: the
    one that counts. `scorer`: null for likelihoods, whose main metric `scorer_text` names. `stop`, `max_new_tokens`:
    null where nothing is generated. `digest`: of the file, the few-shot file, how rows are read and the scorer, with
    the file that a function is in; neither of the number of shots nor of the limit.
    """

    name: str
    kind: Kind
    questions: tuple[Question, ...]
    pool: tuple[Question, ...]
    metrics: Metrics
    main: str
    scorer: Scorer | None
    scorer_text: str
    stop: tuple[str, ...] | None
    max_new_tokens: int | None
    shots: int
    limit: int | None
    digest: str

    @property
    def higher_is_better(self) -> bool:
        return self.metrics[self.main][1]

    @property
    def isolation(self) -> str | None:
        """How the network is kept from programs under test on this machine; null where none are."""
        return getattr(self.scorer, "isolation", None)

    def question(self, doc: Mapping[str, Any]) -> Question:
        """Of a document as lm-eval hands it around."""
        return self.questions[doc["number"]]

    def examples(self, question: Question) -> list[Question]:
        """The first `shots` of the pool, of the question's subject if the pool has that, without the question itself,
        whichever file it stands in (lm-eval#4145)."""
        if not self.shots:
            return []
        subject = question.row.fields.get("subject")
        related = [q for q in self.pool if subject is not None and q.row.fields.get("subject") == subject]
        others = list(islice((q for q in related or self.pool if q.contexts != question.contexts), self.shots))
        if len(others) < self.shots:
            found = f"{len(others)} other rows{f' of the subject {subject}' if related else ''}"
            raise UserError(f"{question.row.where}: shots={self.shots}, and there are {found} to take; lower it")
        for other in others:
            if other.solved is None:
                raise UserError(f"{other.row.where}: shots={self.shots}: the row has no answer to show; give it one")
        return others


def build_tasks(settings: QualitySettings, tokenizer: Any, trusted: tuple[str, ...]) -> dict[str, "Task"]:
    """What lm-eval asks, by name, in the order given: files as `harness.FileTask`, which has `own`; else lm-eval's own.

    A name is looked for in the folders of `quality.include` first; lm-eval's hundreds of tasks are read only for one
    that is not there. What such a task says itself (`num_fewshot`, `max_gen_toks`) wins over `settings`.
    """
    if settings.chat and settings.template is None and not tokenizer.chat_template:
        raise UserError(
            "quality.chat=true, and the tokenizer has no chat template: give one with quality.template=FILE"
        )
    from .harness import FileTask, named_tasks

    named = named_tasks([task for task in settings.tasks if isinstance(task, str)], settings, trusted)
    tasks: dict[str, Task] = {}
    for task in settings.tasks:
        if isinstance(task, str):
            found = named[task]
        else:
            own = read_task(task, settings, trusted)
            found = {own.name: FileTask(own)}
        for name in found:
            if name in tasks:
                raise UserError(f"two tasks are called {name!r}: give one {{path: …, name: OTHER}}, or leave one out")
        tasks |= found
    return tasks


def backend() -> str:
    """What asks and scores, with its version; refused where it is not installed."""
    try:
        return f"decodelab, lm-eval {version('lm_eval')}"
    except PackageNotFoundError:
        raise UserError("quality.tasks needs lm-eval: pip install 'decodelab[quality]'") from None


def tasks_digest(settings: QualitySettings, trusted: tuple[str, ...]) -> str:
    """Of all that the tasks are read from, without lm-eval: `OwnTask.digest` of files; of names, what the included
    folders hold and the data on this machine that their YAML names."""
    asked = [spec_digest(t, trusted) if isinstance(t, TaskSpec) else t for t in settings.tasks]
    return _sha(*asked, *(part for folder in included(settings) for part in _contents(folder)))


def included(settings: QualitySettings) -> list[Path]:
    """The folders of `quality.include`, which are there."""
    folders = [Path(folder).expanduser() for folder in settings.include]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"quality.include={str(folder)!r} is no folder; it is to hold YAML files of lm-eval's tasks"
            )
    return folders


def spec_digest(spec: TaskSpec, trusted: tuple[str, ...]) -> str:
    """As `OwnTask.digest` says."""
    scored = "" if spec.scorer is None else scorer_text(spec.scorer)
    read = [str(spec.kind), str(spec.prompt), str(sorted((spec.fields or {}).items())), scored]
    named = ((KEY, spec.path), (SHOTS_KEY, spec.shots_path))
    files = [read_file(Path(path), key) for key, path in named if path is not None]
    if spec.scorer is not None and "." in scored.partition("{")[0]:
        scorer = build_scorer(spec.scorer, trusted)
        source = inspect.getsourcefile(inspect.unwrap(scorer.function)) if isinstance(scorer, Function) else None
        files += [] if source is None else [Path(source).read_bytes()]
    return _sha(*read, *files)


def read_task(spec: TaskSpec, settings: QualitySettings, trusted: tuple[str, ...]) -> OwnTask:
    """Every row is read and checked, whatever the limit: nothing is found wrong after a model was asked."""
    shots = settings.shots if spec.shots is None else spec.shots
    rows = _rows(spec.path, KEY, spec)
    read = reading(rows, spec, shots, trusted)
    asked = list(_identified(map(read.ask, rows), spec.title))
    pool = asked if spec.shots_path is None else map(read.ask, _rows(spec.shots_path, SHOTS_KEY, spec))
    limit = settings.limit if spec.limit is None else spec.limit
    generated, stop = read.kind == "generate", () if settings.chat else read.stop
    tokens = settings.max_new_tokens if spec.max_new_tokens is None else spec.max_new_tokens
    own = OwnTask(
        name=spec.title,
        kind=read.kind,
        questions=tuple(asked[:limit]),
        pool=tuple(pool),
        metrics=read.metrics,
        main=next(iter(read.metrics)),
        scorer=read.scorer,
        scorer_text=read.scorer_text,
        stop=(stop if spec.stop is None else spec.stop) if generated else None,
        max_new_tokens=tokens if generated else None,
        shots=0 if read.kind == "perplexity" else shots,
        limit=limit,
        digest=spec_digest(spec, trusted),
    )
    for question in own.questions:
        own.examples(question)
    return own


def _rows(path: str, key: str, spec: TaskSpec) -> list[Row]:
    """With our names beside the file's own."""
    names = spec.fields or {}
    for ours in names:
        if ours not in FIELDS:
            raise UserError(f"{spec.path}: fields.{ours} is unknown: {did_you_mean(ours, FIELDS)}{', '.join(FIELDS)}")
    rows = []
    for row in read_rows(Path(os.path.expanduser(path)), key):
        for ours, theirs in names.items():
            if theirs not in row.fields:
                raise UserError(f"{row.where}: fields.{ours}={theirs}: the row has {', '.join(row.fields):.200}")
        rows.append(Row({**row.fields, **{ours: row.fields[theirs] for ours, theirs in names.items()}}, row.where))
        for name in FIELDS:
            if not _finite(rows[-1].fields.get(name)):
                raise UserError(f"{row.where}: {name} holds NaN or Infinity, no JSON; give a number, a text or null")
    if not rows:
        raise UserError(f"{key}={path!r} is empty; give it at least one row")
    return rows


def _finite(value: Any) -> bool:
    """Whether all numbers in it are. What reads JSON lets others through."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _identified(questions: Iterable[Question], name: str) -> Iterator[Question]:
    """An id seen before gets the suffix `#2`, `#3`, …"""
    seen: set[str] = set()
    for number, question in enumerate(questions):
        fields = question.row.fields
        plain = str(next((fields[key] for key in ("id", "task_id") if fields.get(key) is not None), f"{name}/{number}"))
        found, count = plain, 1
        while found in seen:
            count += 1
            found = f"{plain}#{count}"
        seen.add(found)
        yield replace(question, id=found)


def _contents(folder: Path) -> Iterator[str]:
    """Names and digests of all files; what Python keeps beside its sources is none of them. Behind a YAML file, the
    digests of the data that it names."""
    for file in _files(folder):
        yield from (str(file.relative_to(folder)), _file_digest(file))
        if file.suffix in (".yaml", ".yml"):
            yield from map(_file_digest, sorted(set(_data(file.resolve(), set()))))


def _data(file: Path, seen: set[Path]) -> Iterator[Path]:
    """Files of this machine that a YAML of lm-eval's names: its data, and what it includes with the data of that."""
    seen.add(file)
    try:
        nodes = [yaml.compose(file.read_bytes(), yaml.SafeLoader)]  # its tags name functions: nothing is constructed
    except yaml.YAMLError:
        return  # lm-eval says what is wrong with it
    for node in nodes:
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        inner = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in entries]
        nodes += [one for one in inner if isinstance(one, yaml.CollectionNode) and one not in nodes]
        for key, value in entries:
            if key.value in ("data_files", "data_dir") or (key.value == "dataset_path" and "/" in value.value):
                yield from (one for text in _texts(value) for one in _at(text))
            for text in _texts(value) if key.value == "include" else ():
                if (other := (file.parent / text).resolve()) not in seen and other.is_file():
                    yield other
                    yield from _data(other, seen)


def _texts(node: yaml.Node) -> Iterator[str]:
    """What a text, a list of texts or a mapping of either holds."""
    if isinstance(node, yaml.ScalarNode):
        yield node.value
    for inner in node.value if isinstance(node, yaml.CollectionNode) else ():
        yield from _texts(inner[1] if isinstance(inner, tuple) else inner)


def _at(text: str) -> Iterator[Path]:
    """The files that a path or a pattern stands for; none where it is an address elsewhere."""
    for found in map(Path, glob.iglob(os.path.expanduser(text), recursive=True)):
        yield from [found] if found.is_file() else _files(found)


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]


def _file_digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _sha(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
