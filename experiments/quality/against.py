"""A run's quality against a reference run's: the same items, paired.

Two runs share their items, so what differs between them is in the items that changed. An unpaired test throws that away
(lm-eval#3831: p = 0.080 unpaired, 0.008 paired). Items are paired by task and document, answers drawn several times are
averaged within the item first.

effect     value, 95 % interval                                   p
---------  -----------------------------------------------------  ------------------------------------------------
0/1 score  difference of means, Tango's score interval            McNemar's, exact
score      difference of means, paired bootstrap                  sign-flip permutation
perplexity ratio, paired bootstrap over documents                 sign-flip permutation of the logarithms

Verdicts, at ε, for the task's main metric; a difference is signed so that above 0 this run is better:
  equivalent  the two one-sided tests (Schuirmann 1987) at 5 % hold: the 90 % interval lies strictly within ±ε; for
              perplexity that of the ratio within 1/(1 + ε) and 1 + ε
  worse       not that, the 95 % interval lies below 0, and p, corrected for all tasks and their mean (Holm), is under
              0.05
  better      the same, above 0
  undecided   anything else: `detectable` says what difference so many items would have found (80 % power, 5 %)

A real difference may be smaller than ε: that is `equivalent`. Where scores are not 0 or 1, the 90 % interval is never
narrower than that of as many 0/1 pairs without a flip, and where nothing changed it is that one: a bootstrap of items
that hardly ever change is too narrow, and of items that never did it has no width.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import exp, expm1, log, log1p
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import UserError
from ..files import read_result, write_atomic, write_result
from ..format import FEW_TOKENS, difference, share
from ..statistics import (
    SIGNIFICANT,
    Column,
    Interval,
    detectable_flips,
    detectable_mean,
    holm,
    macro_interval,
    mcnemar,
    ratio_interval,
    score_interval,
    sign_flip,
)
from .comparable import common_tasks, refuse
from .run_quality import Pair, RunQuality, check_scores, is_ratio, items_of, pairs_of, read_quality

Verdict = Literal["worse", "better", "equivalent", "undecided"]

_NAMED = 3  # tasks that a sentence names

# Keys of a configuration that are compared by themselves, or change no score.
_NOT_LISTED = (
    "acceptance", "against", "batch", "budget_hours", "cell", "compare_hf", "context", "hardware", "hydra", "output",
    "peers", "plan", "profile", "quality", "rerun", "search", "seed", "stop_after_failures", "task", "tasks", "threads",
    "timing", "tracking", "trusted",
)  # fmt: skip


def compare_kept(folder: Path, against: Path, epsilon: float, allow: Collection[str] = ()) -> None:
    """Compares a run that is over, from its files: `quality.against` of its result.json and its flips.jsonl are then
    as if the run had been made with `against`. Nothing of it changes where the two cannot be compared."""
    found = compare_and_write(read_quality(folder), read_quality(against), epsilon=epsilon, allow=allow)
    result = read_result(folder / "result.json")
    result["quality"]["against"] = found
    with _writing(folder):
        write_result(folder, result)


def compare_and_write(
    mine: RunQuality, reference: RunQuality, *, epsilon: float, allow: Collection[str] = ()
) -> dict[str, Any]:
    """`compare`, and `flips.jsonl` beside the run's quality.jsonl."""
    found = compare(mine, reference, epsilon=epsilon, allow=allow)
    with _writing(mine.folder):
        lines = [json.dumps(row) + "\n" for row in flips(mine, reference)]
        write_atomic(mine.folder / "flips.jsonl", "".join(lines))
    return found


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the comparison cannot be written into {folder} ({error.strerror})") from error


def compare(mine: RunQuality, reference: RunQuality, *, epsilon: float, allow: Collection[str] = ()) -> dict[str, Any]:
    """What stands in a result under `quality.against`; UserError where runs differ in what `allow` does not name."""
    if not epsilon > 0:
        raise UserError(f"epsilon={epsilon}: a difference above 0 that does not matter, such as 0.02")
    accepted = refuse(mine, reference, allow)
    for name in common_tasks(mine, reference):
        for run in (mine, reference):
            check_scores(run, name, mine.quality["tasks"][name])
    tasks = {name: _task(mine, reference, name, epsilon) for name in common_tasks(mine, reference)}
    combined = _combined(mine, reference, tasks)
    compared = [task["metrics"][task["main"]] for task in tasks.values()] + [combined] * (combined is not None)
    *corrected, last = holm([one["p"] for one in compared])
    if combined is None:
        corrected.append(last)
    else:
        combined |= {"p_holm": last, "verdict": _verdict(combined, last, epsilon, True)}
    for task, p in zip(tasks.values(), corrected, strict=True):
        task["p_holm"] = p
        task["verdict"] = _verdict(task["metrics"][task["main"]], p, epsilon, task["higher_is_better"])
    here, there = mine.quality["tasks"], reference.quality["tasks"]
    return {
        "reference": {"folder": str(reference.folder), "key": reference.key},
        "epsilon": epsilon,
        "allowed": [asdict(d) for d in accepted],
        "differs_in": _differs_in(mine, reference),
        "only_here": [name for name in here if name not in there],
        "only_there": [name for name in there if name not in here],
        "interrupted": {"mine": mine.quality["interrupted"], "reference": reference.quality["interrupted"]},
        "tasks": tasks,
        "combined": combined,
    }


def _differs_in(mine: RunQuality, reference: RunQuality) -> dict[str, Any]:
    """Key → [here, there] of what may differ, as it is what is compared: weights, formats, drafters, versions."""
    here, there = _described(mine), _described(reference)
    if "model" in mine.digests and "model" in reference.digests:  # an older run has weights alone
        here["digests.model"], there["digests.model"] = mine.digests["model"], reference.digests["model"]
    for name in ("version", "commit", "torch", "transformers"):
        if name in mine.provenance and name in reference.provenance:
            here[name], there[name] = mine.provenance[name], reference.provenance[name]
    pairs = {key: [here.get(key), there.get(key)] for key in sorted(here.keys() | there.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _described(run: RunQuality) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                walk(f"{key}.{name}", inner)
        else:
            flat[key] = value

    for name, value in run.config.items():
        if name not in _NOT_LISTED:
            walk(name, value)
    return flat | {f"digests.{name}": run.digests.get(name) for name in ("weights", "draft")}


def _task(mine: RunQuality, reference: RunQuality, name: str, epsilon: float) -> dict[str, Any]:
    about = mine.quality["tasks"][name]
    pairs = pairs_of(mine, reference, name)
    if not pairs:
        raise UserError(f"not comparable with {reference.folder}: no item of {name} is in both runs")
    metrics = {metric: _effect(pairs, metric, about["kind"]) for metric in _metrics(pairs)}
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if (category := pair.mine[0].get("category")) is not None:
            groups.setdefault(category, []).append(pair)
    by_category = {category: _effect(some, about["main"], about["kind"]) for category, some in groups.items()}
    return {
        **{key: about[key] for key in ("kind", "measures", "main", "higher_is_better")},
        "n": len(pairs),
        "unpaired": {
            side: len(items_of(run, name)) - len(pairs) for side, run in (("mine", mine), ("reference", reference))
        },
        "metrics": metrics,
        "by_category": by_category,
    }


def _metrics(pairs: Sequence[Pair]) -> list[str]:
    """What every item of both has a number for. Metrics of a whole corpus are not among them."""
    rows = [row["scores"] for pair in pairs for row in (*pair.mine, *pair.reference)]
    return [metric for metric in rows[0] if all(scores.get(metric) is not None for scores in rows)]


def _columns(pairs: Sequence[Pair], metric: str) -> tuple[Column, Column]:
    """Scores of this run and of the reference, repeats averaged."""
    here, there = (
        np.array([np.mean([row["scores"][metric] for row in rows]) for rows in side])
        for side in ([pair.mine for pair in pairs], [pair.reference for pair in pairs])
    )
    return here, there


def _effect(pairs: Sequence[Pair], metric: str, kind: str) -> dict[str, Any]:
    """What tells apart a difference and chance. `n01`, `n10`: pairs in which the reference scored 0 and this run 1, and
    the other way round; null where scores are not 0 or 1.

    A document's perplexity counts by its words or bytes, so that the ratio is that of the whole texts' perplexities.
    """
    here, there = _columns(pairs, metric)
    weights = np.array([pair.mine[0].get("weights", {}).get(metric, 1) for pair in pairs])
    n, ratio = len(pairs), is_ratio(kind, metric)
    if ratio:
        here, there = np.log(here), np.log(there)
    changes = here - there
    n01, n10 = int((changes > 0).sum()), int((changes < 0).sum())
    binary = not ratio and bool(np.isin([here, there], (0, 1)).all())
    if binary:
        interval, bounds = (score_interval(n10, n01, n, level) for level in (0.95, 0.90))
        p, detectable = mcnemar(n10, n01), detectable_flips(n, n01 + n10)
    else:
        interval, bounds = (ratio_interval(weights * changes, weights, level) for level in (0.95, 0.90))
        p = sign_flip(weights * changes)
        detectable = detectable_mean(weights * (changes - (weights @ changes) / weights.sum()) / weights.mean())
        if not ratio:
            bounds = _widened(bounds, _least(here, there, 0.90))
            detectable = detectable or detectable_flips(n, 0)
            if not changes.any():
                interval = _widened(interval, _least(here, there, 0.95))

    def told(value: float | None) -> float | None:
        return exp(value) if ratio and value is not None else value

    return {
        "effect": "ratio" if ratio else "difference",
        "value": told(interval.value),
        "low": told(interval.low),
        "high": told(interval.high),
        "n": n,
        "mine": told(float(weights @ here / weights.sum())),
        "reference": told(float(weights @ there / weights.sum())),
        "bounds": [told(bounds.low), told(bounds.high)],
        "changed": n01 + n10,
        "n01": n01 if binary else None,
        "n10": n10 if binary else None,
        "test": "McNemar" if binary else "sign flip",
        "p": p,
        "detectable": expm1(detectable) if ratio and detectable is not None else detectable,
    }


def _least(here: Column, there: Column, level: float) -> float:
    """Half the width of the interval that as many 0/1 pairs without a flip have, on the scale of these scores."""
    return (score_interval(0, 0, len(here), level).high or 0.0) * max(1.0, float(np.abs([here, there]).max()))


def _widened(interval: Interval, least: float) -> Interval:
    if interval.value is None or interval.low is None or interval.high is None:
        return interval
    low, high = min(interval.low, interval.value - least), max(interval.high, interval.value + least)
    return Interval(interval.value, low, high, interval.n)


def _verdict(effect: Mapping[str, Any], p: float, epsilon: float, higher_is_better: bool) -> Verdict:
    """As the module says."""
    low, high, (lower, upper) = effect["low"], effect["high"], effect["bounds"]
    if low is None or lower is None:
        return "undecided"
    if effect["effect"] == "ratio":
        low, high, lower, upper, epsilon = log(low), log(high), log(lower), log(upper), log1p(epsilon)
    if not higher_is_better:
        low, high, lower, upper = -high, -low, -upper, -lower
    if -epsilon < lower and upper < epsilon:
        return "equivalent"
    if p < SIGNIFICANT and high < 0:
        return "worse"
    return "better" if p < SIGNIFICANT and low > 0 else "undecided"


def _combined(mine: RunQuality, reference: RunQuality, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean of the tasks' differences, each task counting alike; above 0 this run is better. Perplexities, which are
    no scores, are not in it. None under two tasks."""
    columns = {
        name: _columns(pairs_of(mine, reference, name), task["main"])
        for name, task in tasks.items()
        if task["metrics"][task["main"]]["effect"] == "difference"
    }
    if len(columns) < 2:
        return None
    changes = [
        here - there if tasks[name]["higher_is_better"] else there - here for name, (here, there) in columns.items()
    ]

    def least(level: float) -> float:
        return max(_least(here, there, level) for here, there in columns.values()) / len(columns)

    interval, bounds = macro_interval(changes), _widened(macro_interval(changes, 0.90), least(0.90))
    if not any(column.any() for column in changes):
        interval = _widened(interval, least(0.95))
    p = sign_flip(*changes)
    found = {
        "effect": "difference",
        "value": interval.value,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "bounds": [bounds.low, bounds.high],
        "test": "sign flip",
        "p": p,
    }
    return {"tasks": list(columns), **found}


RULE = (
    "Overall: worse if any task, or the mean of the tasks, is worse, or if nothing is better and KL has the lower end "
    f"of its interval above log(1 + ε) and above what rounding alone does, over {FEW_TOKENS} tokens or more; "
    "equivalent if all tasks are; better if all are better or equivalent; else undecided."
)


def overall(found: Mapping[str, Any], divergence: Mapping[str, Any] | None) -> tuple[Verdict, str]:
    """One verdict of `quality.against` by `RULE`, with `quality.divergence` where it was measured; and in plain words
    what decided it, then what the rest says."""
    known = {task["verdict"] for task in found["tasks"].values()}
    judged = known | ({found["combined"]["verdict"]} if found["combined"] else set())
    told, lost = [_answers(found)], False
    if divergence and divergence["reference"]["key"] == found["reference"]["key"]:
        words, lost = _next_tokens(divergence, found["epsilon"])
        told.insert(0 if lost and not judged & {"worse", "better"} else 1, words)
    verdict: Verdict = "undecided"
    if "worse" in judged or (lost and "better" not in judged):
        verdict = "worse"
    elif lost:
        told.append("One says worse, the other better.")
    elif known == {"equivalent"}:
        verdict = "equivalent"
    elif known <= {"better", "equivalent"}:
        verdict = "better"
    return verdict, " ".join(told)


def _answers(found: Mapping[str, Any]) -> str:
    """What the tasks say: how many answers flipped, and where that is more than chance."""
    effects = {name: (task["verdict"], task["metrics"][task["main"]]) for name, task in found["tasks"].items()}
    binary = {name: effect for name, (_, effect) in effects.items() if effect["n01"] is not None}
    rest = [
        f"{name} {difference(effect)}"
        for name, (verdict, effect) in effects.items()
        if name not in binary and verdict not in ("worse", "better")  # which are told below
    ]
    told = [_some(rest)] if rest else []
    if binary:
        flipped = [(one["n10"], one["n01"]) for one in binary.values()]
        ways = zip(flipped, (found["tasks"][name]["higher_is_better"] for name in binary), strict=True)
        wrong, right = map(sum, zip(*(pair if higher else pair[::-1] for pair, higher in ways), strict=True))
        told.insert(0, f"{wrong} of {sum(one['n'] for one in binary.values())} became wrong, {right} became right")
    if (mean := found["combined"]) is not None:
        effects[f"the mean of {len(mean['tasks'])} tasks"] = mean["verdict"], mean
    clear = [
        f"clearly {word} in {_some(names)}"
        for word in ("worse", "better")
        if (names := [f"{name} {difference(one)}" for name, (verdict, one) in effects.items() if verdict == word])
    ]
    same = all(task["verdict"] == "equivalent" for task in found["tasks"].values())
    judged = "; ".join(clear) or (f"the same within {found['epsilon']:g}" if same else "too few to be sure")
    return f"{'Answers' if binary else 'Scores'}: {': '.join(filter(None, ('; '.join(told), judged)))}."


def _some(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def _next_tokens(divergence: Mapping[str, Any], epsilon: float) -> tuple[str, bool]:
    """What KL says, and whether that is worse by `RULE`."""
    kl, noise = divergence["kl"], (divergence["floor"] or {"kl": 0.0})["kl"]
    most = max(noise, log1p(epsilon))
    enough = kl["low"] is not None and divergence["tokens"] >= FEW_TOKENS
    lost = enough and kl["low"] > most
    same = enough and kl["high"] <= most
    judged = "clearly different" if lost else "the same" if same else "too few to be sure" if not enough else "unclear"
    bounds = "" if kl["low"] is None else f" [{kl['low']:.2g}, {kl['high']:.2g}]"
    allowed = f"rounding alone makes {noise:.2g}" if noise == most else f"{most:.2g} is allowed"
    changed = share(1 - divergence["agreement"]["value"])
    words = f"{changed} of {divergence['tokens']} likeliest next tokens changed; KL {kl['value']:.2g}{bounds}"
    return f"Word by word {judged}: {words}, where {allowed}.", lost


def flips(mine: RunQuality, reference: RunQuality) -> list[dict[str, Any]]:
    """The items whose main score changed, worst first. `gain`: above 0 this run is better; of perplexities, the
    logarithm of their ratio."""
    out = []
    for name in common_tasks(mine, reference):
        about = mine.quality["tasks"][name]
        metric = about["main"]
        pairs = pairs_of(mine, reference, name)
        for pair, here, there in zip(pairs, *_columns(pairs, metric), strict=True):
            change = log(here / there) if is_ratio(about["kind"], metric) else here - there
            gain = change if about["higher_is_better"] else -change
            if gain:
                row = pair.mine[0]
                out.append(
                    {
                        "task": name,
                        **{key: row.get(key) for key in ("id", "category", "prompt", "gold", "choices")},
                        "metric": metric,
                        "gain": float(gain),
                        "mine": _side(pair.mine, here),
                        "reference": _side(pair.reference, there),
                    }
                )
    return sorted(out, key=lambda row: row["gain"])


def _side(rows: Sequence[Mapping[str, Any]], score: float) -> dict[str, Any]:
    """One response a repeat."""
    return {
        "score": float(score),
        "responses": [row.get("response") for row in rows],
        "truncated": [row.get("truncated") for row in rows],
    }
