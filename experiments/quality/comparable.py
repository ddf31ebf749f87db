"""In what two runs differ that keeps them from being compared, and whether the user accepts that."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ...errors import UserError
from ..construct import did_you_mean
from .run_quality import RunQuality, pairs_of
from .settings import Difference

# Of a task, and the key that accepts a difference.
_OF_TASK = {"digest": "task", "kind": "task", "main": "task"}
_OF_SETTINGS = {
    "scorer": "task", "chat": "template", "template": "template", "system": "template", "shots": "template",
    "batch": "batch", "limit": "counting", "max_length": "counting",
}  # fmt: skip
_OF_ANSWERS = {"max_new_tokens": "counting", "stop": "counting", "thinking": "counting", "repeats": "counting"}
_SHOWN = 40  # characters of a value in a refusal


@dataclass(frozen=True, slots=True)
class Departure:
    """`what` is not alike in these tasks; `key` accepts it."""

    key: str
    what: str
    mine: Any
    reference: Any
    tasks: tuple[str, ...]


def refuse(mine: RunQuality, reference: RunQuality, allow: Collection[str]) -> list[Departure]:
    """The differences that `allow` accepts; UserError for any other. Needs no rows: it can be asked before the work."""
    known = get_args(Difference)
    for key in allow:
        if key not in known:
            raise UserError(f"quality.allow={key} is unknown: {did_you_mean(key, known)}it takes {', '.join(known)}")
    common = common_tasks(mine, reference)
    found = list(_differences(mine, reference, common))
    if refused := [d for d in found if d.key not in allow]:
        whats = "; ".join(_told(d, len(common)) for d in refused)
        keys = ",".join(dict.fromkeys(d.key for d in refused))
        raise UserError(
            f"not comparable with {reference.folder}: {whats}; run both alike, or accept it with quality.allow=[{keys}]"
        )
    return found


def _told(d: Departure, tasks: int) -> str:
    where = "" if len(d.tasks) == tasks else f" of {', '.join(d.tasks)}"
    here, there = (" ".join(json.dumps(value, ensure_ascii=False).split()) for value in (d.mine, d.reference))
    start = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
    return f"{d.what}{where} is {_excerpt(here, start)} here, {_excerpt(there, start)} there"


def _excerpt(text: str, around: int) -> str:
    """What is shown of a long value: its beginning, or where it begins to differ."""
    start = max(0, around - _SHOWN // 4) if len(text) > _SHOWN else 0
    shown = text[start : start + _SHOWN]
    return f"{'…' if start else ''}{shown}{'…' if start + _SHOWN < len(text) else ''}"


def common_tasks(mine: RunQuality, reference: RunQuality) -> list[str]:
    """The tasks of both."""
    here, there = mine.quality["tasks"], reference.quality["tasks"]
    if common := [name for name in here if name in there]:
        return common
    raise UserError(
        f"not comparable with {reference.folder}: no task in common, {', '.join(here)} here, {', '.join(there)} there"
    )


def _differences(mine: RunQuality, reference: RunQuality, common: Sequence[str]) -> Iterator[Departure]:
    """Each with the tasks that it is of."""
    found: dict[str, tuple[str, str, Any, Any, list[str]]] = {}

    def note(task: str, key: str, what: str, here: Any, there: Any) -> None:
        first, second = (json.dumps(value, sort_keys=True) for value in (here, there))  # a list is a tuple
        if first != second:
            found.setdefault(f"{what} {first} {second}", (key, what, here, there, []))[-1].append(task)

    for name in common:
        here, there = mine.quality["tasks"][name], reference.quality["tasks"][name]
        decodes = "decoding" in (here["measures"], there["measures"])  # else nothing was drawn, cut or stopped
        for what, key in _OF_TASK.items():
            note(name, key, what, here[what], there[what])
        for what, key in (_OF_SETTINGS | (_OF_ANSWERS if decodes else {})).items():
            note(name, key, what, here["settings"].get(what), there["settings"].get(what))
        note(name, "backend", "backend", mine.quality["backend"], reference.quality["backend"])
        if decodes:
            rules = _rules(mine, reference)
            note(name, "acceptance", "acceptance", *rules)
            if any(rule.partition("(")[0] != "Greedy" for rule in rules):
                note(name, "seed", "seed", mine.config.get("seed"), reference.config.get("seed"))
    for name in common:
        if not any(key == "template" and name in tasks for key, *_, tasks in found.values()):
            pairs = pairs_of(mine, reference, name)
            hashes = [(pair.mine[0].get("prompt_hash"), pair.reference[0].get("prompt_hash")) for pair in pairs]
            if changed := [pair for pair in hashes if pair[0] != pair[1]]:
                note(name, "template", f"the prompt of {len(changed)} of {len(pairs)} items", *changed[0])
    return (Departure(key, what, here, there, tuple(tasks)) for key, what, here, there, tasks in found.values())


def _rules(*runs: RunQuality) -> list[str]:
    """The acceptance rules by name, with the keys that are not the same in both."""
    keys = [dict(run.config["acceptance"]) for run in runs]
    names = [str(rule.pop("_target_")).rpartition(".")[2] for rule in keys]
    first, second = keys
    differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    own = [", ".join(f"{key}={value}" for key, value in rule.items() if key in differing) for rule in keys]
    return [f"{name}({rule})" if rule else name for name, rule in zip(names, own, strict=True)]
