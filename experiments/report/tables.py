"""The rows as tables: in the terminal, in Markdown, and in CSV, where numbers are as they are in the files."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from .. import columns as fitted
from ..format import interval, mark_notes, marks, number, percent, seconds, size
from ..seeds import spread
from .changes import Change, Comparison
from .load import Found, at, number_at
from .rows import UNQUANTISED, Group, Measure, Row, Value

RANKED = "ranked by {speed}, broken rows last"
UNTIMED = "nothing was timed: ranked by tokens per step (τ), broken rows last, which is not yet how fast they are"
UNRANKED = "not ranked: no speed was measured"
BESIDE = "÷ plain, unquantised"
BESIDES = (
    f"{BESIDE}: tokens/s over those of plain decoding with the weights as stored; speedup is over the row's own weights"
)
_PRODUCT = re.compile(r"int(\d)(?: × int8)? \((\w+)")  # of `implementation`: bits and what multiplies them
REPLAYED = "replayed: the drafter on recorded answers; no model ran, so nothing was timed"
PREDICTED = "; predicted is by T(k) of the recorded run and what drafting took in the replay"
DOMINATED = (
    "dominated: another row of the table is at least as fast and at least as good, and better in one of the two; rows "
    "whose output is the target's own (exact, near-tie, same law) are equally good under one law, else scores decide; "
    "where intervals overlap, it may be chance"
)


@dataclass(frozen=True, slots=True)
class Column:
    """`rank`: where a terminal has no room the highest is left out first, and 0 never; None stands on pages alone."""

    title: str
    show: Callable[[Row], str]
    rank: int | None = None


def _number(path: str, digits: int = 2, unit: str = "") -> Callable[[Row], str]:
    return lambda row: number(row.run.number(path), digits, unit)


def _interval(path: str) -> Callable[[Row], str]:
    return lambda row: interval(asdict(Value.of(row.run.at(path))))


RATE = Column("tokens/s", _number("strategy.tokens_per_second", 1), 4)
COLUMNS: Sequence[Column] = (
    Column("speedup [95 %]", _interval("speedup"), 1),
    Column("predicted", _number("predicted_speedup", 2, "×")),
    Column("end to end [95 %]", _interval("end_to_end_speedup"), 7),
    Column("τ", _number("strategy.tokens_per_step"), 2),
    Column("acceptance", lambda row: percent(row.run.number("strategy.acceptance_rate")), 3),
    Column("output", lambda row: _output(row), 0),
    RATE,
    Column("ttft", lambda row: seconds(row.run.number("strategy.ttft_s")), 6),
    Column("tpot", lambda row: seconds(row.run.number("strategy.tpot_s")), 5),
    Column("prompts found", lambda row: _found(row), 2),
)
WEIGHTS = Column("weights in memory", lambda row: size(row.run.number("memory.weights_bytes")), 3)
MEMORY: Sequence[Column] = (
    WEIGHTS,
    Column("KV cache", lambda row: size(row.run.number("memory.kv_bytes"))),
    Column("peak memory", lambda row: size(row.run.number("memory.peak_bytes"))),
)


def _found(row: Row) -> str:
    """In shared pages, of the prompts' tokens."""
    return percent(row.run.number("pages.strategy.hit_rate")) if row.run.at("pages.share") else "–"


def _output(row: Row) -> str:
    verdict = "replayed" if row.run.at("replay") else row.verdict or "–"
    return verdict if row.status in ("done", "broken") else f"{verdict}, {row.status}"


def columns(group: Group) -> list[Column]:
    """Those that say something of at least one row, and a column for each task."""
    return [column for column in (*_speeds(group), *_scores(group), *MEMORY) if _says(column, group.rows)]


def _speeds(group: Group) -> list[Column]:
    """What the rows are ranked by stands first."""
    if group.speed == "speedup":
        return list(COLUMNS)
    beside = Column(BESIDE, lambda row: number(_beside_plain(row, group), 2, "×"), 1)
    return [replace(RATE, rank=1), beside, *(column for column in COLUMNS if column is not RATE)]


def _beside_plain(row: Row, group: Group) -> float | None:
    """Its tokens per second over those of plain decoding with the weights unquantised and the same KV layout."""
    alike = [
        o
        for o in group.rows
        if o.form == UNQUANTISED and o.run.at("config.attention") == row.run.at("config.attention")
    ]
    rates = [o.run.number("strategy.tokens_per_second") for o in alike if o.drafter == "none"]
    rates += [o.run.number("baseline.tokens_per_second") for o in alike]
    plain, mine = next(filter(None, rates), None), row.run.number("strategy.tokens_per_second")
    return None if plain is None or mine is None else mine / plain


def _run_wider(group: Group) -> Iterator[str]:
    """Of quantised weights whose product has no fewer bits: what they do not save."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        for bits, product in _PRODUCT.findall(str(row.run.at("implementation.linear"))):
            if bits not in ("4", "8"):
                found.setdefault((bits, product), []).append(row.label)
    for (bits, product), labels in found.items():
        wide = 4 if int(bits) < 4 else 8
        yield (
            f"{bits} bits run as {wide} here ({product}), as fast and as large in memory as {wide} bits, so that a "
            f"difference in speed to those is noise or another draft: {', '.join(labels)}"
        )


def _scores(group: Group) -> list[Column]:
    return [Column(title(measure), _scored(measure)) for measure in group.measures]


def title(measure: Measure) -> str:
    return measure.title if measure.higher else f"{measure.title} (less is better)"


def _scored(measure: Measure) -> Callable[[Row], str]:
    return lambda row: score(row.scores.get(measure, Value()))


def score(found: Value) -> str:
    if found.value is None:
        return "–"
    digits = 3 if abs(found.value) < 10 else 2
    bounds = "" if found.low is None else f" [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return f"{found.value:.{digits}f}{bounds}"


def mark(row: Row) -> str:
    """Behind a label."""
    return "".join(f" {one}" for one in ("" if row.dominated is None else "†", marks(row.run.result)) if one)


def notes(group: Group) -> list[str]:
    """What the tables do not say of themselves."""
    said = [_order(group)]
    if any(row.dominated for row in group.rows):
        said.append(f"† {DOMINATED}")
    said += mark_notes([row.run.result for row in group.rows], "runs")
    if any(_beside_plain(row, group) is not None for row in group.rows) and group.speed != "speedup":
        said.append(BESIDES)
    said += _run_wider(group)
    said += spread([row.run.result for row in group.rows])
    if replays := [row.run for row in group.rows if row.run.at("replay")]:
        foretold = any(run.number("predicted_speedup") is not None for run in replays)
        said.append(REPLAYED + (PREDICTED if foretold else ""))
    kinds = sorted({str(kind) for row in group.rows if (kind := row.run.at("baseline.kind")) is not None})
    if kinds:
        said.append(
            f"baseline: {kinds[0]}" if len(kinds) == 1 else f"baseline: the faster in each run, {' or '.join(kinds)}"
        )
    apart = {m.title for m in group.measures if [o.title for o in group.measures].count(m.title) > 1}
    said += [
        f"{name} stands more than once: its items, shots, template, scorer or limit differ" for name in sorted(apart)
    ]
    return said


def _order(group: Group) -> str:
    timed = [row.speed is not None for row in group.rows]
    if any(timed):
        return RANKED.format(speed=group.speed if all(timed) else f"{group.speed}, rows without it by tokens per step")
    return UNTIMED if any(row.run.number("strategy.tokens_per_step") is not None for row in group.rows) else UNRANKED


# --- terminal


def show(groups: Sequence[Group], found: Found, against: Comparison | None, console: Any) -> None:
    """Print it all; tables fit into the terminal, whatever is left out of them is named."""
    from rich.text import Text

    for group in groups:
        console.print(Text(group.title, style="bold"))
        console.print(Text(" · ".join(filter(None, (group.machine, group.shared)))))
        speed = [column for column in _speeds(group) if column.rank is not None]
        if len({WEIGHTS.show(row) for row in group.rows}) > 1:
            speed.append(WEIGHTS)
        scored = [column for column in _scores(group) if _says(column, group.rows)]
        if not scored or any(_says(column, group.rows) for column in speed):
            # a run of quality alone stands in the table of scores
            _print(console, [row for row in group.rows if not row.scores or _told_of(row, speed)], speed)
        for some in _packed(scored, group.rows, console.width):
            _print(console, [row for row in group.rows if _told_of(row, some)], some)
        for note in notes(group):
            console.print(Text(note, style="dim"))
        console.print()
    if found.unfinished:
        cells = [_told(cell) for cell in found.unfinished]
        _print_words(console, ("cells without a result", "status", "why"), cells)
        console.print()
    if against is not None:
        for titles, lines in changes(against):
            cells = list(zip(*lines, strict=True))
            made = [fitted.Column(t, c, _LEFT_OUT.get(t, 0)) for t, c in zip(titles, cells, strict=True)]
            _print_fitted(console, made)
        for note in against.notes:
            console.print(Text(note, style="dim"))


def _told(cell: Any) -> tuple[str, str, str]:
    return (cell.label, cell.status, cell.reason or "–")


def _says(column: Column, rows: Sequence[Row]) -> bool:
    return any(column.show(row) != "–" for row in rows)


def _told_of(row: Row, some: Sequence[Column]) -> bool:
    return any(column.show(row) != "–" for column in some)


def _fitted(some: Sequence[Column], rows: Sequence[Row]) -> list[fitted.Column]:
    names = fitted.Column("strategy", [f"{row.label}{mark(row)}" for row in rows])
    return [names, *(fitted.Column(c.title, [c.show(row) for row in rows], c.rank or 0) for c in some)]


def _packed(some: Sequence[Column], rows: Sequence[Row], width: int) -> Iterator[list[Column]]:
    """As many tables as it takes to show all of the columns."""
    pack: list[Column] = []
    for column in some:
        if pack and not fitted.fit(_fitted([*pack, column], rows), width, folded=True):
            yield pack
            pack = []
        pack.append(column)
    if pack:
        yield pack


def _print(console: Any, rows: Sequence[Row], some: Sequence[Column]) -> None:
    _print_fitted(console, _fitted([column for column in some if _says(column, rows)], rows))


def _print_fitted(console: Any, columns: Sequence[fitted.Column]) -> None:
    made, left = fitted.table(columns, console.width)
    console.print(made)
    if left:
        console.print(left, style="dim")


def _print_words(console: Any, titles: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in titles:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    console.print(table)


# --- Markdown


def markdown(groups: Sequence[Group], found: Found, against: Comparison | None) -> str:
    return "\n".join(_markdown(groups, found, against)) + "\n"


def _markdown(groups: Sequence[Group], found: Found, against: Comparison | None) -> Iterator[str]:
    yield "# decodelab report"
    for group in groups:
        yield f"\n## {literal(group.title)}\n"
        yield f"{literal(' · '.join(filter(None, (group.machine, group.shared))))}\n"
        some = columns(group)
        lines = [(f"{row.label}{mark(row)}", *(c.show(row) for c in some)) for row in group.rows]
        yield from table(("strategy", *(c.title for c in some)), lines)
        yield ""
        yield from (f"- {literal(note)}" for note in notes(group))
    if found.unfinished:
        yield "\n## Cells without a result\n"
        yield from table(("cell", "status", "why"), [_told(cell) for cell in found.unfinished])
    if against is not None:
        yield f"\n## Against {literal(against.name)}\n"
        for titles, changed in changes(against):
            yield from table(titles, changed)
            yield ""
        yield from (f"- {literal(note)}" for note in against.notes)
    if found.notes:
        yield "\n## Not read\n"
        yield from (f"- {literal(note)}" for note in found.notes)


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(literal, titles))} |"
    yield f"| --- |{' ---: |' * (len(titles) - 1)}"
    yield from (f"| {' | '.join(map(literal, line))} |" for line in lines)


def literal(text: str) -> str:
    """Nothing in it is Markdown or HTML."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)


# --- CSV

_PATHS = (
    "status", "prompts", "exactness.verdict", "exactness.identical",
    "speedup.value", "speedup.low", "speedup.high", "speedup.n", "predicted_speedup",
    "end_to_end_speedup.value", "end_to_end_speedup.low", "end_to_end_speedup.high",
    "strategy.tokens_per_step", "strategy.acceptance_rate", "strategy.tokens_per_second", "strategy.ttft_s",
    "strategy.tpot_s", "strategy.latency_s", "baseline.kind", "baseline.tokens_per_second", "decode.mbu",
    "memory.weights_bytes", "memory.kv_bytes", "memory.peak_bytes", "provenance.device", "provenance.dtype",
    "provenance.commit", "provenance.started_at", "digests.weights", "digests.task", "key",
)  # fmt: skip


def comma_separated(groups: Sequence[Group], found: Found, against: Comparison | None) -> str:
    """A line a run, whatever its group, and a line a cell without a result. Empty: not known."""
    rows = [line for group in groups for line in _lines(group, against)]
    rows += [
        {"strategy": c.label, "status": c.status, "why": c.reason, "folder": str(c.folder)} for c in found.unfinished
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _lines(group: Group, against: Comparison | None) -> Iterator[dict[str, Any]]:
    for row in group.rows:
        line: dict[str, Any] = {"group": group.title, "strategy": row.label, "dominated_by": row.dominated}
        line |= {path: row.run.at(path) for path in _PATHS}
        warnings = row.run.at("warnings")
        line["warnings"] = "; ".join(map(str, warnings)) if isinstance(warnings, list) else None
        for measure in group.measures:
            found = row.scores.get(measure, Value())
            scorer = f" ({measure.scorer})" if measure.scorer else ""
            name = f"quality.{measure.task}.{measure.metric}{scorer}"
            if name in line and line[name] is not None:
                continue  # the same task, asked otherwise: the row has one of the two
            line |= {name: found.value, f"{name}.low": found.low, f"{name}.high": found.high}
        change = None if against is None else against.of(row.run)
        if change is not None:
            line["against.folder"] = str(change.before.folder)
            for name, value in (("time_per_token", change.time), ("baseline_time_per_token", change.baseline)):
                line |= {f"against.{name}.{part}": getattr(value, part) for part in ("value", "low", "high", "n")}
        yield line | {"folder": str(row.run.folder)}


# --- changes

_CHANGED = ("cell", "time per token", "plain decoding", "same outputs", "speedup", "τ", "acceptance", "output")
_SCORED = ("cell", "task", "score", "difference [95 %]", "p", "better / worse", "verdict")
# What a terminal without room leaves out, the highest first.
_LEFT_OUT = {"acceptance": 5, "τ": 4, "speedup": 3, "plain decoding": 2, "same outputs": 1,
             "p": 3, "better / worse": 2, "score": 1}  # fmt: skip


def changes(against: Comparison) -> Iterator[tuple[Sequence[str], list[Sequence[str]]]]:
    """Of speed, then of quality: titles and lines of each table that has any."""
    lines = [_changed(change) for change in against.changes]
    if speed := [line for line in lines if set(line[1:]) != {"–"}]:
        yield _CHANGED, speed
    quality: list[Sequence[str]] = [line for change in against.changes for line in _rescored(change)]
    if quality:
        yield _SCORED, quality


def _changed(change: Change) -> Sequence[str]:
    before, after = change.before, change.after
    same = "–" if change.shared == 0 else f"{change.identical} of {change.shared}"
    verdicts = [run.at("exactness.verdict") or "–" for run in (before, after)]
    return (
        change.label,
        slower(change.time),
        slower(change.baseline),
        same,
        _both(number(before.number("speedup.value"), 2, "×"), number(after.number("speedup.value"), 2, "×")),
        _both(number(before.number("strategy.tokens_per_step")), number(after.number("strategy.tokens_per_step"))),
        _both(percent(before.number("strategy.acceptance_rate")), percent(after.number("strategy.acceptance_rate"))),
        _both(*verdicts),
    )


def _rescored(change: Change) -> Iterator[Sequence[str]]:
    tasks = at(change.quality, "tasks")
    for name, task in tasks.items() if isinstance(tasks, Mapping) else ():
        main = task["metrics"][task["main"]]
        effect = number if main["effect"] == "difference" else partial(number, unit="×")
        bounds = "" if main["low"] is None else f" [{effect(main['low'], 3)}, {effect(main['high'], 3)}]"
        flips = "–" if main["n01"] is None else f"{main['n01']} / {main['n10']} of {main['n']}"
        yield (
            change.label,
            f"{name} {task['main']}",
            _both(score(Value(main["reference"])), score(Value(main["mine"]))),
            f"{effect(main['value'], 3)}{bounds}".replace("-", "−"),
            number(number_at(main, "p"), 3),
            flips,
            task["verdict"],
        )


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def slower(change: Value) -> str:
    """Of seconds per token: "2.0 % slower [−1.0, 5.0]"."""
    if change.value is None:
        return "–"
    if change.value == 0:
        return "the same"
    sign, word = (1, "slower") if change.value > 0 else (-1, "faster")
    bounds = [100 * sign * bound for bound in (change.low, change.high) if bound is not None]
    text = f"{100 * abs(change.value):.1f} % {word}"
    if len(bounds) == 2:
        return f"{text} [{_signed(min(bounds))}, {_signed(max(bounds))}]"
    return f"{text} (n={change.n})"


def _signed(value: float) -> str:
    return f"{value:.1f}".replace("-", "−")
