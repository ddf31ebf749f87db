"""Rows that may stand in one ranking, ranked: what each is called, its quality, and whether another row is better."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import NOT_IN_KEY
from ..format import attention_name
from ..seeds import title as quantiser
from ..statistics import LEAST
from .load import Run, at, number_at

FAITHFUL = ("exact", "near-tie", "same law")  # the target's own output, or its law
# what a run was asked beside what it measures, or what its group shares
_UNNAMED = (
    *NOT_IN_KEY, "profile", "compare_hf", "timing", "trusted", "device", "dtype", "threads", "quality", "tasks",
    "replay",
)  # fmt: skip

# Groups whose option is named where rows differ in it, and the option that goes without saying.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "acceptance": ("greedy",), "quantization": ("none", "?"), "attention": ("native", "?"),
}  # fmt: skip

UNQUANTISED = "unquantised"  # the form of weights that are run as they are stored

_LONGEST = 36  # characters of a value in a label


@dataclass(frozen=True, slots=True)
class Value:
    """A number with its 95 % interval, as far as it is known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @classmethod
    def of(cls, found: Any) -> "Value":
        value, low, high, n = (number_at(found, name) for name in ("value", "low", "high", "n"))
        if low is None or high is None:
            low = high = None
        return cls(value, low, high, None if n is None else int(n))


@dataclass(frozen=True, slots=True)
class Measure:
    """One task's main metric. Scores under equal measures may be compared: `asked` holds the task's digest and how it
    was put to the model. `decodes`: the strategy made the answers; else the score is the model's alone. `scorer`: what
    gave the metric, where it is not called like it."""

    task: str
    metric: str
    asked: str
    higher: bool = True
    decodes: bool = True
    scorer: str = ""

    @property
    def title(self) -> str:
        scorer = f" ({_cut(self.scorer)})" if self.scorer else ""
        return f"{self.task} {self.metric}{scorer}" + ("" if self.decodes else ", model only")


@dataclass(frozen=True, slots=True)
class Row:
    """`speed`: what the group is ranked by, None where it was not timed. `form`: its quantiser, in as few words as tell
    it from others of the group. `dominated`: the label of a row that is at least as fast and at least as good, and
    better in one of the two."""

    run: Run
    label: str
    drafter: str
    form: str = UNQUANTISED
    scores: Mapping[Measure, Value] = field(default_factory=dict)
    speed: float | None = None
    dominated: str | None = None

    @property
    def verdict(self) -> str | None:
        found = self.run.at("exactness.verdict")
        return found if isinstance(found, str) else None

    @property
    def status(self) -> str:
        return str(self.run.at("status") or "done")

    @property
    def speedup(self) -> Value:
        return Value.of(self.run.at("speedup"))

    @property
    def whole(self) -> bool:
        """Whether it is timed to its end, with the output that it should have."""
        return self.speed is not None and self.status == "done" and self.verdict not in (None, "broken")

    @property
    def comparable(self) -> bool:
        """Whether it may dominate another row, or be dominated: a whole run whose output is what it should be, of
        enough prompts for an interval."""
        few = self.speedup.n is not None and self.speedup.n < LEAST
        return self.whole and not few


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one machine, model, dtype and task. `speed`: the number that they are ranked by."""

    title: str
    machine: str
    shared: str
    speed: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]


# --- groups


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Kept apart: hardware, weights, dtype, prompts, and what makes the same prompts another measurement (their
    template, how many tokens are decoded, how many prompts at once)."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(_condition(run), []).append(run)
    return [_group(some) for some in found.values()]


def _condition(run: Run) -> tuple[str, ...]:
    task = [run.at(f"config.task.{key}") for key in ("max_new_tokens", "chat", "template")]
    asked = [task, run.at("config.batch")] if run.at("digests.task") is not None else None
    weights = run.at("digests.model") or run.at("digests.weights")  # an older run has these alone
    where = [weights, run.at("provenance.dtype"), run.at("digests.task")]
    return tuple(_plain(part) for part in (_machine(run), *where, asked))


def _machine(run: Run) -> Any:
    """Where the answers were decoded."""
    return run.at("replay.device") or run.at("provenance.device")


def _group(runs: Sequence[Run]) -> Group:
    names = zip(_labels(runs), _weights(runs), strict=True)
    # where the rows' plain decoding differs in more than the moment, each speedup has another unit
    forms = {_plain([run.at("config.quantization"), run.at("config.attention")]) for run in runs}
    speed = "speedup" if len(forms) == 1 else "tokens per second"
    path = "speedup.value" if speed == "speedup" else "strategy.tokens_per_second"
    rows = [
        Row(run, label, drafter(run), form, _scores(run), run.number(path))
        for run, (label, form) in zip(runs, names, strict=True)
    ]
    rows.sort(key=lambda row: (row.verdict == "broken", row.speed is None, *_place(row), row.label))
    first = runs[0]
    timed = first.at("digests.task") is not None
    title = [
        model(first),
        *_quantised(first),
        _text(first.at("provenance.dtype")),
        task(first) if timed else "quality alone",
    ]
    many = first.at("prompts")
    said = {
        "prompt" if many == 1 else "prompts": many if timed else None,
        "tokens at most": first.at("config.task.max_new_tokens") if timed else None,
        "at once": batch if timed and isinstance(batch := first.at("config.batch"), int) and batch > 1 else None,
    }
    shared = [f"{value} {what}" for what, value in said.items() if value is not None]
    shared += [
        f"{what} {_text(first.at(f'digests.{what}'))[:8]}"
        for what in ("weights", "task")
        if first.at(f"digests.{what}")
    ]
    return Group(
        " · ".join(title),
        _text(_machine(first)),
        " · ".join(shared),
        speed,
        tuple(_marked(rows)),
        tuple(dict.fromkeys(measure for row in rows for measure in row.scores)),
    )


def _place(row: Row) -> tuple[float, float]:
    """By speed, and where that is not known by tokens a step; the first is the best."""
    return -(row.speed or 0.0), -(row.run.number("strategy.tokens_per_step") or 0.0)


def labelled(runs: Sequence[Run]) -> dict[Path, str]:
    """By folder, the names of runs that need not be comparable: where two groups have one in common, what else differs
    between those is added."""
    groups = grouped(runs)
    out = {}
    for group in groups:
        for row in group.rows:
            alike = [g for g in groups if g is not group and any(r.label == row.label for r in g.rows)]
            words = [row.label]
            for about in ("title", "machine", "shared"):
                mine, theirs = getattr(group, about), [getattr(other, about) for other in alike]
                words += [part for part in mine.split(" · ") if any(part not in told.split(" · ") for told in theirs)]
                alike = [other for other, told in zip(alike, theirs, strict=True) if told == mine]
            out[row.run.folder] = " · ".join(words)
    return out


def model(run: Run) -> str:
    asked = run.at("config.model")
    name = at(asked, "name") or _tail(at(asked, "path")) or "unknown model"
    adapter = at(asked, "adapter")
    return f"{name} + {_tail(adapter)}" if adapter else str(name)


def _quantised(run: Run) -> list[str]:
    """Of a folder of quantised weights, whose rows stand apart from those of other weights."""
    made, own = run.at("provenance.quantised"), _part(run.at("config.quantization"))
    return [quantiser(made)] if isinstance(made, Mapping) and "kind" in made and own in _USUAL["quantization"] else []


def task(run: Run) -> str:
    asked = run.at("config.task")
    return str(_tail(at(asked, "path"), ".jsonl") or at(asked, "dataset") or at(asked, "name") or "task")


def _tail(path: Any, suffix: str = "") -> str | None:
    return str(path).rstrip("/").rpartition("/")[2].removesuffix(suffix) or None if path else None


def _text(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# --- labels


def drafter(run: Run) -> str:
    """One file a drafter: the module of its class."""
    return _part(run.at("config.drafting"))


def _part(settings: Any) -> str:
    """The name of a part: of its module, or of its class where that is all there is (a rule, a repr)."""
    if isinstance(settings, Mapping):
        *_, module, kind = ("", *str(settings.get("_target_", "?")).split("."))
        if module == "options":  # of attention, all in one file
            return attention_name(settings)
        return kind.lower() if module in ("acceptance", "") else module
    return str(settings).partition("(")[0] if settings is not None else "?"


def _labels(runs: Sequence[Run]) -> list[str]:
    """The drafter, and what else differs between the configurations, in as few words as tell them apart."""
    known = [{**_flat(run.at("config"))} for run in runs]
    parts = {name: [_part(run.at(f"config.{name}")) for run in runs] for name in ("drafting", *_USUAL)}
    labels = []
    for i, mine in enumerate(known):
        words = [parts["drafting"][i]]
        for name, usual in _USUAL.items():
            if len(set(parts[name])) > 1 and parts[name][i] not in usual:
                words.append(parts[name][i])
        for key, value in mine.items():
            group, _, leaf = key.partition(".")
            if group in _UNNAMED or key.endswith("_target_"):
                continue
            # a key of a part is compared with the same part's alone: another one does not have it
            same = [
                other.get(key, value)
                for j, other in enumerate(known)
                if group not in parts or parts[group][j] == parts[group][i]
            ]
            if any(other != value for other in same) or key == "drafting.members":
                words.append(f"{leaf if group in parts else key}={_shown(value)}")
        if runs[i].at("replay"):
            sources = [_replayed(run) for run in runs if run.at("replay")]
            words.append("(replayed)" if len(set(sources)) == 1 else f"(replayed from {_replayed(runs[i])})")
        labels.append(" ".join(words))
    return _numbered(labels, runs)


def _weights(runs: Sequence[Run]) -> list[str]:
    """Their quantiser, and the keys of it in which those of one kind differ."""
    parts = [run.at("config.quantization") for run in runs]
    known = [(UNQUANTISED if (kind := _part(part)) in _USUAL["quantization"] else kind, _flat(part)) for part in parts]
    return [
        " ".join(
            [kind]
            + [
                f"{key}={_shown(value)}"
                for key, value in mine.items()
                if not key.endswith("_target_") and any(k == kind and other.get(key) != value for k, other in known)
            ]
        )
        for kind, mine in known
    ]


def _flat(config: Any, prefix: str = "") -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        return {}
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def _shown(value: Any) -> str:
    """In a label."""
    if isinstance(value, str):
        text = _tail(value) or value
    elif isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, list):
        text = "+".join(_part(item) if isinstance(item, Mapping) else _shown(item) for item in value)
    else:
        text = _plain(value)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[-_LONGEST // 2 :]}"


def _replayed(run: Run) -> str:
    """The run, or the file, whose answers were replayed."""
    *_, folder, file = ("", *str(run.at("replay.source")).split("/"))
    return folder if file == "samples.jsonl" and folder else file.removesuffix(".jsonl")


def _numbered(labels: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Runs of one configuration are #1, #2, … in the order of time, each with its folder."""
    order = sorted(range(len(runs)), key=lambda i: (str(runs[i].at("provenance.started_at")), str(runs[i].folder)))
    out, seen = list(labels), dict.fromkeys(labels, 0)
    for i in order:
        seen[labels[i]] += 1
        if labels.count(labels[i]) > 1:
            same = [runs[j].folder for j, label in enumerate(labels) if label == labels[i]]
            out[i] = f"{labels[i]} #{seen[labels[i]]} in {_apart(runs[i].folder, same)}"
    return out


def _apart(folder: Path, among: Sequence[Path]) -> str:
    """As much of the end of its path as no other has, the folder that it lies in at least."""
    for depth in range(2, len(folder.parts)):
        end = folder.parts[-depth:]
        if sum(other.parts[-depth:] == end for other in among) == 1:
            return "/".join(end)
    return str(folder)


# --- quality


def _scores(run: Run) -> dict[Measure, Value]:
    tasks = run.at("quality.tasks")
    out = {}
    for name, found in tasks.items() if isinstance(tasks, Mapping) else ():
        main, metrics = at(found, "main"), at(found, "metrics")
        known = isinstance(main, str) and isinstance(metrics, Mapping)
        value = Value.of(metrics.get(main)) if known else Value()
        if value.value is not None:
            settings = at(found, "settings")
            # how many items were put to the model side by side is no part of the question
            asked = {k: v for k, v in settings.items() if k != "batch"} if isinstance(settings, Mapping) else {}
            question = _plain([at(found, "digest"), asked, at(found, "n")])
            higher, decodes = at(found, "higher_is_better") is not False, at(found, "measures") != "model only"
            scorer = asked.get("scorer")
            named = str(scorer) if scorer not in (None, main) else ""
            out[Measure(str(name), str(main), question, higher, decodes, named)] = value
    lost = Value.of(run.at("quality.divergence.kl"))
    if lost.value is not None:
        against = _plain([run.at("quality.divergence.reference.key"), run.at("quality.divergence.tokens")])
        out[Measure("reference", "KL", against, higher=False, decodes=False)] = lost
    return out


# --- who is better


def _marked(rows: Sequence[Row]) -> list[Row]:
    out = []
    for row in rows:
        better = next((other for other in rows if dominates(other, row)), None)
        out.append(row if better is None else replace(row, dominated=better.label))
    return out


def dominates(a: Row, b: Row) -> bool:
    """`a` is at least as fast as `b` and at least as good, and better in one of the two.

    Good: rows whose output is the target's own (exact, near-tie, same law) under the same law are equally good,
    whatever their scores say; else the scores of the tasks that `b` was scored on decide, each of them; without scores,
    a row whose output is the target's own is better than a lossy one. Where nothing decides, neither row dominates.
    Broken and interrupted rows take no part.
    """
    if a is b or not (a.comparable and b.comparable):
        return False
    good = _as_good(a, b)
    if good is None or a.speed is None or b.speed is None:
        return False
    return a.speed >= b.speed and good >= 0 and (a.speed > b.speed or good > 0)


def _as_good(a: Row, b: Row) -> int | None:
    """1: `a` is better in something and worse in nothing, 0: equal, -1: worse in something. None: nobody knows."""
    if a.verdict in FAITHFUL and b.verdict in FAITHFUL and _law(a) == _law(b):
        return 0
    if b.scores and b.scores.keys() <= a.scores.keys():
        gains = [_gain(measure, a.scores[measure], b.scores[measure]) for measure in b.scores]
        return -1 if min(gains) < 0 else int(max(gains) > 0)
    if a.verdict in FAITHFUL and b.verdict not in FAITHFUL and _form(a) == _form(b):
        return 1
    return None


def _gain(measure: Measure, a: Value, b: Value) -> float:
    gain = (a.value or 0.0) - (b.value or 0.0)
    return gain if measure.higher else -gain


def _form(row: Row) -> str:
    """The target as it was run: its quantiser and its KV layout."""
    return _plain([row.run.at("config.quantization"), row.run.at("config.attention")])


def _law(row: Row) -> str:
    """What a faithful output is drawn from. Rules of one law have the same keys."""
    rule = row.run.at("config.acceptance")
    keys = {k: v for k, v in rule.items() if k != "_target_"} if isinstance(rule, Mapping) else rule
    return _plain([keys, _form(row)])


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, goodness), by speed, to which no other is at least equal in both and better in
    one."""

    def beaten(x: float, y: float) -> bool:
        return any(p >= x and q >= y and (p > x or q > y) for p, q in points)

    return sorted((i for i, point in enumerate(points) if not beaten(*point)), key=lambda i: points[i])
