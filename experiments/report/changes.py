"""Runs against earlier runs: which belongs to which, and what changed, over the same prompts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ..files import NOT_IN_KEY, read_lines
from ..statistics import speedup_interval
from .load import Run, at, number_at
from .rows import Value

EPSILON = 0.02  # a difference of scores that does not matter, where the run does not say


@dataclass(frozen=True, slots=True)
class Change:
    """`time`, `baseline`: the relative change of decode seconds per token, of the strategy and of plain decoding, over
    the prompts of both; above 0 is slower. `identical` of `shared`: prompts whose output is the same. `quality`: as
    result.json has it under `quality.against`, where both runs have any and they may be compared."""

    label: str
    before: Run
    after: Run
    time: Value
    baseline: Value
    identical: int
    shared: int
    quality: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`name`: of the folder compared with. `notes`: how pairs were found, and what has no partner."""

    name: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def of(self, run: Run) -> Change | None:
        return next((change for change in self.changes if change.after is run), None)


def compare(
    after: Sequence[Run], before: Sequence[Run], name: str, labels: Mapping[Path, str], notes: Sequence[str] = ()
) -> Comparison:
    """Pairs runs of one key; then those whose digests and configurations agree in all that both have, as runs of two
    versions of the code do whose configurations have grown; then, where one run is left on either side, these two. Of
    runs with one key the latest counts. `labels`: by folder."""
    pairs: list[tuple[Run, Run]] = []
    notes = list(notes)
    new, old = _latest(after, notes), _latest(before, notes)
    here, there = list(new), list(old)
    for one in list(new):
        twin = next((other for other in old if other.at("key") is not None and other.at("key") == one.at("key")), None)
        if twin is not None:
            _pair(one, twin, new, old, pairs)
    for one in list(new):
        alike = [other for other in old if _agree(one, other)]
        if len(alike) == 1 and sum(_agree(other, alike[0]) for other in new) == 1:
            _pair(one, alike[0], new, old, pairs)
            notes.append(
                f"{labels.get(one.folder, one.folder)}: paired by configuration, less what one version does not know"
            )
    if not pairs and len(new) == len(old) == 1:
        notes.append(f"the only run on either side; they differ in {_listed(_differences(new[0], old[0]))}")
        _pair(new[0], old[0], new, old, pairs)
    notes += _alone(new, here, there, "", name)
    notes += _alone(old, there, here, f" of {name}", "these")
    changes = [_change(labels.get(one.folder, one.folder.name), two, one, notes) for one, two in pairs]
    if changes:
        notes.insert(0, "time per token: of the strategy, over the prompts of both runs, with a paired 95 % interval; "
                     "plain decoding: its own change between the runs, which is the machine's")  # fmt: skip
    return Comparison(name, tuple(changes), tuple(notes))


def _pair(one: Run, two: Run, new: list[Run], old: list[Run], pairs: list[tuple[Run, Run]]) -> None:
    new.remove(one)
    old.remove(two)
    pairs.append((one, two))


def _latest(runs: Iterable[Run], notes: list[str]) -> list[Run]:
    found: dict[Any, Run] = {}
    for run in sorted(runs, key=lambda run: str(run.at("provenance.started_at"))):
        key = run.at("key") if run.at("key") is not None else run.folder
        if key in found:
            notes.append(f"{found[key].folder}: a later run of the same key counts")
        found[key] = run
    return list(found.values())


def _agree(a: Run, b: Run) -> bool:
    """In everything that both know of, down to each key. A key that is new says nothing against it."""
    return _known(a.at("digests"), b.at("digests")) and _known(_asked(a), _asked(b))


def _asked(run: Run) -> Any:
    config = run.at("config")
    return {k: v for k, v in config.items() if k not in NOT_IN_KEY} if isinstance(config, Mapping) else config


def _known(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(_known(a[key], b[key]) for key in a.keys() & b.keys())
    return bool(a == b)


def _alone(some: Sequence[Run], side: Sequence[Run], other: Sequence[Run], of: str, name: str) -> Iterable[str]:
    """A line for those without a partner: how many, and what it is that none of the other side shares."""
    if not some:
        return
    if not other:
        yield f"{len(some)} of {len(side)} runs{of} have no partner: nothing else has a result"
        return
    why: Counter[str] = Counter()
    for run in some:
        # what makes them two configurations; a commit or a device does not
        found = min((_unlike(run, one) for one in other), key=len)
        why[_listed([path for path in found if not path.startswith("digests.")] or found) if found else ""] += 1
    said = [
        f"{n} differ{'s' if n == 1 else ''} in {what} from the nearest of {name}" if what
        else f"{n} agree{'s' if n == 1 else ''} with more than one of {name}"
        for what, n in why.most_common()
    ]  # fmt: skip
    yield f"{len(some)} of {len(side)} runs{of} have no partner: {'; '.join(said)}"


def _differences(a: Run, b: Run) -> list[str]:
    found = _unlike(a, b)
    found += [
        name for name in ("device", "dtype", "commit") if a.at(f"provenance.{name}") != b.at(f"provenance.{name}")
    ]
    return list(dict.fromkeys(found))


def _unlike(a: Run, b: Run) -> list[str]:
    return sorted(_paths(_asked(a), _asked(b), "")) + sorted(_paths(a.at("digests"), b.at("digests"), "digests."))


def _listed(found: Sequence[str]) -> str:
    return ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "nothing that is recorded"


def _paths(a: Any, b: Any, prefix: str) -> Iterable[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a.keys() | b.keys():
            yield from _paths(a.get(key), b.get(key), f"{prefix}{key}.")
    elif json.dumps(a, default=str) != json.dumps(b, default=str):
        yield prefix.rstrip(".")


# --- over prompts


def _change(label: str, before: Run, after: Run, notes: list[str]) -> Change:
    old, new = _units(before), _units(after)
    both = [name for name in new if name in old]
    outputs = [pair for name in both for pair in zip(old[name], new[name], strict=True)]
    same = sum(at(a, "strategy.tokens") == at(b, "strategy.tokens") for a, b in outputs)
    pairs = [(old[name], new[name]) for name in both]
    time, baseline = _slower("strategy", pairs), _slower("baseline", pairs)
    return Change(label, before, after, time, baseline, same, len(outputs), _quality(label, before, after, notes))


def _quality(label: str, before: Run, after: Run, notes: list[str]) -> Mapping[str, Any] | None:
    """Item by item, as the run asks to be compared; what forbids it is a note."""
    from ..quality.against import compare
    from ..quality.run_quality import read_quality

    if not (before.at("quality.tasks") and after.at("quality.tasks")):
        return None
    epsilon, allowed = after.number("config.quality.epsilon"), after.at("config.quality.allow")
    try:
        return compare(
            read_quality(after.folder),
            read_quality(before.folder),
            epsilon=EPSILON if epsilon is None else epsilon,
            allow=allowed if isinstance(allowed, list) else (),
        )
    except UserError as error:
        notes.append(f"{label}, quality: {error}")
        return None


def _units(run: Run) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """The samples by the batch that they ran in, named by their prompts."""
    batches: dict[Any, list[Mapping[str, Any]]] = {}
    for sample in read_lines(run.folder / "samples.jsonl"):
        batches.setdefault(sample.get("batch"), []).append(sample)
    return {tuple(str(sample.get("id")) for sample in some): some for some in batches.values()}


def _slower(side: str, pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> Value:
    """Relative change of decode seconds per token: a ratio of sums over the batches that both runs timed."""
    rows = [(*old, *new) for a, b in pairs if (old := _spent(side, a)) and (new := _spent(side, b))]
    found = speedup_interval(*(np.array([row[i] for row in rows], dtype=float) for i in range(4)))
    value, low, high = (1 / bound - 1 if bound else None for bound in (found.value, found.high, found.low))
    return Value(value, low, high, found.n) if low is not None and high is not None else Value(value, n=found.n)


def _spent(side: str, batch: Sequence[Any]) -> tuple[float, float] | None:
    """Seconds from the last prefill's end to the last token, and tokens behind the first; None where neither was."""
    ends = [(number_at(s, f"{side}.latency_s"), number_at(s, f"{side}.ttft_s"), at(s, f"{side}.tokens")) for s in batch]
    known = [
        (last, first, len(tokens) - 1)
        for last, first, tokens in ends
        if last is not None and first is not None and isinstance(tokens, list)
    ]
    if len(known) < len(batch) or sum(n for *_, n in known) < 1:
        return None
    return max(last for last, _, _ in known) - max(first for _, first, _ in known), float(sum(n for *_, n in known))
