"""What a run found, for people: a table, the best and the worst prompt with their reason, and notes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from . import metrics
from .format import (
    chance,
    counted,
    few_tokens,
    folded,
    interval,
    noise_floor,
    number,
    percent,
    positions,
    seconds,
    share,
    size,
    sources,
)
from .measure import Sample
from .quality.against import overall

_MEANING = {
    "exact": "token for token what plain decoding emits",
    "near-tie": "differs only where two tokens tie within rounding",
    "same law": "the same distribution as plain sampling, not the same tokens",
    "lossy": "another distribution by design; see its quality",
    "broken": "NOT the target's output",
}
_STYLE = {"exact": "green", "near-tie": "yellow", "same law": "green", "lossy": "yellow", "broken": "bold red"}
_JUDGED = {"worse": "bold red", "better": "green", "equivalent": "green", "undecided": "yellow"}
_PHASES = ("draft", "verify", "accept", "commit", "other")
_WIDEST = 24  # characters of a name in a table; 80 columns must do
_NARROW = 18  # where the table has six columns
_DIVERGENCES = 5  # shown


def show(result: Mapping[str, Any], samples: Sequence[Sample], title: str, console: Console) -> None:
    """Print it all. Tables fit into 80 columns; sentences wrap."""
    console.print(Group(*_parts(result, samples, title)))


def _parts(r: Mapping[str, Any], samples: Sequence[Sample], title: str) -> Iterator[Any]:
    for i, section in enumerate(_sections(r, samples, title)):
        if i and section:
            yield Text()
        yield from section


def _sections(r: Mapping[str, Any], samples: Sequence[Sample], title: str) -> Iterator[list[Any]]:
    p, strategy = r["provenance"], r["strategy"]
    timed = strategy is not None and strategy["ttft_s"] is not None
    spoken = "" if strategy is None else f" · {counted(r['prompts'], 'prompt')}{'' if timed else ' · untimed'}"
    where = f"replayed from {r['replay']['source']}" if r["replay"] else f"{p['device']} · {p['dtype']}"
    yield [Text(title, style="bold"), Text(f"{where}{spoken}"), *_anchored(r["timing"])]
    if strategy is not None:
        yield [_comparison(r)]
        brought = sources(strategy["by_source"], strategy["steps"])
        members = [Text(brought)] if brought else []
        yield [*_replayed(r), *members] if r["replay"] else [*_exactness(r), *members, *_resources(r)]
        yield [_categories(r["by_category"], timed)]
        yield [Text(line) for line in reasons(samples)]
    if r["quality"]:
        yield [*_quality(r["quality"])]
        if r["quality"]["against"]:
            verdict, why = overall(r["quality"]["against"], r["quality"].get("divergence"))
            yield [*comparison(r["quality"]["against"]), Text(f"overall {verdict}. {why}", style=_JUDGED[verdict])]
        if r["quality"].get("divergence"):
            yield [*divergence(r["quality"]["divergence"])]
    if r["compare_hf"]:
        yield [_transformers(r)]
    if r["profile"]:
        yield [_profile(r["profile"]), *map(Text, r["profile"]["explained"])]
    yield [Text(f"note: {w}", style="yellow") for w in r["warnings"]]


def comparison(found: Mapping[str, Any]) -> Iterator[Any]:
    """Quality against the reference run: what `quality.against` of a result holds."""
    differing = [*folded(found["differs_in"]), *dict.fromkeys(one["what"] for one in found["allowed"])]
    differs = ", ".join(differing) or "nothing that is recorded"
    yield Text(f"against {found['reference']['folder']}, which differs in {differs}")
    table = columns("task", "ref.", "difference [95 %]", "flips", "p", "verdict")
    for name, task in found["tasks"].items():
        main = task["metrics"][task["main"]]
        digits = 2 if main["effect"] == "ratio" else 3
        table.add_row(
            Text(_short(name, _NARROW)),
            number(main["reference"], digits),
            _change(main),
            "" if main["n01"] is None else f"+{main['n01']} −{main['n10']}",
            f"{task['p_holm']:.3f}",
            Text(task["verdict"], style=_JUDGED[task["verdict"]]),
        )
    if (all_ := found["combined"]) is not None:
        verdict = Text(all_["verdict"], style=_JUDGED[all_["verdict"]])
        table.add_row(
            f"mean of {len(all_['tasks'])}", "", _change(all_), "", f"{all_.get('p_holm', all_['p']):.3f}", verdict
        )
    yield table
    yield from map(Text, _remarks(found))


def divergence(found: Mapping[str, Any]) -> Iterator[Any]:
    """What `quality.divergence` of a result holds."""
    table = columns("gold answers", "KL a token [95 %]", "p50", "p99", "max", "same choice")
    rows = {name: one for name, one in found["tasks"].items() if len(found["tasks"]) > 1} | {"all": found}
    for name, one in rows.items():
        kl = one["kl"]
        bounds = "" if kl["low"] is None else f" [{kl['low']:.2g}, {kl['high']:.2g}]"
        quantiles = (f"{kl[which]:.2g}" for which in ("p50", "p99", "max"))
        table.add_row(
            Text(_short(name, _NARROW)), f"{kl['value']:.2g}{bounds}", *quantiles, share(one["agreement"]["value"])
        )
    yield table
    if (few := few_tokens(found)) is not None:
        yield Text(few, style="yellow")
    if found["floor"] is not None:
        yield Text(noise_floor(found["floor"]))
    if found["where"]:
        yield Text()
        yield degraded(found["where"])
    yield Text(f"over {found['tokens']} tokens of {counted(found['items'], 'answer')} (divergence.jsonl, worst first)")


def degraded(where: Sequence[Mapping[str, Any]]) -> Table:
    """The worst slice of each slicing."""
    table = columns("where it degrades", "worst", "of tokens", "of KL", "of flips", "p")
    for row in where:
        shares = (percent(row[key]) for key in ("size", "share", "flips"))
        table.add_row(Text(f"by {row['by']}"), Text(_short(row["name"])), *shares, chance(row["p_holm"]))
    return table


def _change(effect: Mapping[str, Any]) -> str:
    sign, unit = ("", "×") if effect["effect"] == "ratio" else ("+", "")
    value = f"{effect['value']:{sign}.3f}{unit}"
    if effect["low"] is None:
        return f"{value} (n={effect['n']})"
    return f"{value} [{effect['low']:{sign}.3f}, {effect['high']:{sign}.3f}]"


def _remarks(found: Mapping[str, Any]) -> Iterator[str]:
    epsilon = found["epsilon"]
    for name, task in found["tasks"].items():
        main = task["metrics"][task["main"]]
        if task["verdict"] == "undecided":
            least = main["detectable"]
            what = "are too few to show any difference"
            if least is not None:
                what = f"can show a difference of {least:.2f} or more (80 % power)"
            yield f"{name}: ε is {epsilon:g}; {main['n']} items {what}"
        if any(task["unpaired"].values()):
            here, there = task["unpaired"]["mine"], task["unpaired"]["reference"]
            yield f"{name}: {main['n']} items are in both; {here} are only in this run, {there} only in the reference"
    for one in found["allowed"]:
        yield f"note: {one['what']} differs in {', '.join(one['tasks'])}, as quality.allow={one['key']} accepts"
    for side, names in (("this run", found["only_here"]), ("the reference", found["only_there"])):
        if names:
            yield f"note: only in {side}, so not compared: {', '.join(names)}"
    if found["interrupted"]["reference"]:
        yield "note: the reference was interrupted"
    changed = sum(task["metrics"][task["main"]]["changed"] for task in found["tasks"].values())
    yield f"items changed: {changed} (flips.jsonl, worst first); p is corrected for all tasks and their mean (Holm)"


def columns(*names: str) -> Table:
    """The first column names the row, the others hold numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _anchored(timing: Mapping[str, Any] | None) -> Iterator[Text]:
    """Where the baseline is not of this run alone."""
    if timing is not None and timing["baseline"] in ("stored", "anew"):
        drift = "" if timing["drift"] is None else f", which drifted by {100 * (timing['drift'] - 1):+.1f} %"
        source = "timed by an earlier cell" if timing["baseline"] == "stored" else "timed anew, behind the strategy"
        anchors = f"{timing['anchors']} anchor{'' if timing['anchors'] == 1 else 's'}"
        yield Text(f"baseline {source}; {anchors} timed again{drift}")


def _comparison(r: Mapping[str, Any]) -> Table:
    base, ours, decode = r["baseline"], r["strategy"], r["decode"]
    table = columns("", base["kind"], "strategy")
    # a sequence's own time goes on while the prompts of its batch are read, which the speedups are measured behind
    own = ", a sequence" if r["config"].get("batch", 1) > 1 else ""
    rows = [
        ("speedup [95 % interval]", "1.00×", interval(r["speedup"])),
        ("end-to-end speedup", "1.00×", interval(r["end_to_end_speedup"])),
        ("predicted speedup", "", number(r["predicted_speedup"], 2, "×")),
        ("tokens per step (τ)", "1.00", number(ours["tokens_per_step"])),
        ("acceptance", "", percent(ours["acceptance_rate"])),
        (f"tokens per second{own}", number(base["tokens_per_second"], 1), number(ours["tokens_per_second"], 1)),
        ("time to first token (ttft)", seconds(base["ttft_s"]), seconds(ours["ttft_s"])),
        (f"time per output token (tpot){own}", seconds(base["tpot_s"]), seconds(ours["tpot_s"])),
        ("bandwidth used (MBU)", percent(decode["mbu_baseline"]), percent(decode["mbu"])),
    ]
    for name, plain, strategy in rows:
        if strategy != "–":
            table.add_row(name, plain, strategy)
    return table


def _replayed(r: Mapping[str, Any]) -> Iterator[Text]:
    yield Text("no model ran: the answers are known, and what they make of the drafts is computed", style="yellow")
    if (told := positions(r["strategy"]["acceptance_by_position"])) is not None:
        yield Text(told)
    if r["predicted_speedup"] is not None:
        yield Text("the speedup is predicted, not measured: from T(k) of the recorded run and what drafting took here")


def _exactness(r: Mapping[str, Any]) -> Iterator[Text]:
    found = r["exactness"]
    verdict = found["verdict"]
    line = Text("output: ").append(verdict, style=_STYLE[verdict])
    yield line.append(
        f" – {_MEANING[verdict]} ({found['identical']} of {counted(found['prompts'], 'prompt')} identical)"
    )
    if verdict == "same law" or (verdict == "lossy" and "temperature" in (r["config"].get("acceptance") or ())):
        return  # drawn anew, so other tokens than plain sampling's are nothing to look into
    for d in found["divergences"][:_DIVERGENCES]:
        gap = "" if d["gap"] is None else f", {d['gap']:.3g} below plain decoding's choice"
        yield Text(f"  {d['id']}: token {d['position']} is {_id(d['got'])}, not {_id(d['expected'])}{gap}")
    if (more := len(found["divergences"]) - _DIVERGENCES) > 0:
        yield Text(f"  and {more} more in result.json")


def _id(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


def _resources(r: Mapping[str, Any]) -> Iterator[Text]:
    names = {"weights_bytes": "weights", "kv_bytes": "KV cache", "peak_bytes": "process at most"}
    held = [f"{name} {size(r['memory'][key])}" for key, name in names.items() if r["memory"][key] is not None]
    yield Text(f"memory: {', '.join(held)}")
    if (pages := r.get("pages")) is not None:
        mine, base = pages["strategy"], pages["baseline"]
        at_most = "" if mine["blocks"] is None else f", {mine['blocks']} in use at most"
        line = f"pages: blocks of {pages['size']} tokens{at_most}"
        if pages["share"]:
            line += f"; {percent(mine['hit_rate'])} of the prompts' tokens were found (baseline: "
            line += f"{percent(base['hit_rate'])})"
        yield Text(line)
    share = r["strategy"]["time_share"]
    if share["verify"] is not None:
        yield Text("step time: " + ", ".join(f"{phase} {percent(share[phase])}" for phase in _PHASES))


def _categories(found: Mapping[str, Mapping[str, Any]], timed: bool) -> Table:
    table = columns("category", "n", *(("speedup [95 %]",) if timed else ()), "tokens/step", "acceptance")
    for name, row in found.items():
        speedup = (interval(row["speedup"]),) if timed else ()
        rates = number(row["tokens_per_step"]), percent(row["acceptance_rate"])
        table.add_row(Text(_short(name)), str(row["n"]), *speedup, *rates)
    return table


def _quality(found: Mapping[str, Any]) -> Iterator[Any]:
    """A line a metric, the main one of a task first."""
    if not found["tasks"]:
        return
    table = columns("quality", "metric", "value [95 %]", "n", "truncated")
    for name, task in found["tasks"].items():
        metrics = {task["main"]: task["metrics"][task["main"]]} | task["metrics"]
        repeats = f" × {task['repeats']}" if task["repeats"] > 1 else ""
        for i, (metric, value) in enumerate(metrics.items()):
            first = Text(_short(name, _NARROW)), f"{value['n']}{repeats}", percent(task["truncated"])
            label, n, truncated = first if not i else (Text(), "", "")
            metric += _scorer(task, metric) if not i else ""
            table.add_row(label, Text(_short(metric)), _score(value), n, truncated)
    yield table
    if only := [name for name, task in found["tasks"].items() if task["measures"] == "model only"]:
        yield Text(f"model only, since likelihoods decode nothing: {', '.join(only)}")


def _scorer(task: Mapping[str, Any], metric: str) -> str:
    """What gave the metric, where it is not called like it."""
    scorer = task["settings"].get("scorer")
    return "" if scorer in (None, metric) else f" ({scorer})"


def _score(found: Mapping[str, Any]) -> str:
    value, low, high = (
        None if found[key] is None else f"{found[key]:.3f}" if abs(found[key]) < 1e4 else f"{found[key]:.2e}"
        for key in ("value", "low", "high")
    )
    return value or "–" if low is None else f"{value} [{low}, {high}]"


def _transformers(r: Mapping[str, Any]) -> Table:
    turns = all(row["interleaved"] for row in r["compare_hf"].values())
    name = "transformers generate" if turns else "transformers, after ours"
    table = columns(name, "tokens/s", "time per token", "τ", "ours ÷ it", "identical")
    ours = r["strategy"]["tokens_per_second"]
    for mode, row in r["compare_hf"].items():
        rate = row["tokens_per_second"]
        times = number(ours / rate, 2, "×") if ours and rate else "–"
        same = f"{row['identical']}/{row['prompts']}"
        table.add_row(mode, number(rate, 1), seconds(row["tpot_s"]), number(row["tokens_per_step"]), times, same)
    return table


def _profile(profile: Mapping[str, Any]) -> Table:
    table = columns(f"k rows in one forward, {profile['context']} tokens of context", "T(k)", "T(k) ÷ T(1)")
    first = next(iter(profile["seconds"].values()))
    for k, spent in profile["seconds"].items():
        table.add_row(str(k), seconds(spent), f"{spent / first:.2f}")
    return table


def _short(name: str, most: int = _WIDEST) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def reasons(samples: Sequence[Sample]) -> list[str]:
    """The prompt that won most and the one that won least or lost, each with what made the difference."""
    rated = []
    for s in samples:
        base, ours = (metrics.tpot(g) if g.delivered else None for g in (s.baseline, s.strategy))
        if base and ours:
            rated.append((base / ours, s))
    if len(rated) < 2:
        return []
    (low, worst), (high, best) = min(rated, key=_ratio), max(rated, key=_ratio)
    if not any(step.depth for _, s in rated for step in s.strategy.steps):
        return ["nothing was drafted on any prompt"]
    first, last = "best: ", "worst:"
    if low >= 1:
        last = "no prompt lost; the least gain:"
    elif high < 1:
        first = "no prompt won; the least loss:"
    return [
        f"{first} {best.id} ({best.category}) {high:.2f}×: {_why(best)}",
        f"{last} {worst.id} ({worst.category}) {low:.2f}×: {_why(worst)}",
    ]


def _ratio(rated: tuple[float, Sample]) -> float:
    return rated[0]


def _why(s: Sample) -> str:
    steps = s.strategy.steps
    found = metrics.acceptance(steps)
    step = sum(x.total_s for x in steps) / len(steps)
    plain = metrics.tpot(s.baseline) or step
    cost = f"a step costs {step / plain:.2f}× a plain one"
    if not any(x.depth for x in steps):
        return f"nothing was drafted, and {cost} (the search for a draft is part of it)"
    text = f"{percent(found['acceptance_rate'])} of what was drafted was kept"
    idle = found["steps_without_draft"]
    searched = f"; {idle} of {len(steps)} steps had no draft" if idle else ""
    return f"{text}, {number(found['tokens_per_step'])} tokens a step, and {cost}{searched}"
