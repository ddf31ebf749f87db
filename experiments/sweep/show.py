"""A sweep for people: what runs now on a terminal, a line a cell in a log, and the table at the end."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table
from rich.text import Text

from ..columns import Column, fit
from ..columns import table as fitted
from ..format import duration, interval, mark_notes, marks, number, percent, seconds, size
from ..seeds import spread
from .cells import LOG, CellOutcome

_STYLE = {"done": "green", "interrupted": "yellow", "not started": "yellow"}  # the others are red
_WIDEST = 500  # characters of a reason
# What is left out of a table that has no room, the highest first.
_RANKS = {
    "speedup [95 %]": 1,
    "τ": 4,
    "accepted": 5,
    "prompts found": 3,
    "ttft": 3,
    "output": 0,
    "quality": 2,
    "KL": 2,
    "weights": 3,
    "time": 6,
}


class Display:
    """On standard error: lines, and on a terminal a last line that changes."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, markup=False, highlight=False)
        self._spinner: Spinner | None = None

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._spinner = self._console.status("")
            self._spinner.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def now(self, text: str) -> None:
        """What goes on; shown on a terminal alone, cut to its width."""
        if self._spinner is not None:
            self._spinner.update(Text(text, no_wrap=True, overflow="ellipsis"))

    def step(self, what: str, done: int, total: int) -> None:
        """Of files that are fetched or read."""
        self.now(f"{what} {done}/{total}")


def rough(seconds: float) -> str:
    """Of a guess: one digit, of minutes where there is one."""
    unit, name = (60, "min") if seconds >= 60 else (1, "s")
    return f"{float(f'{max(seconds, 1) / unit:.1g}'):.0f} {name}"


def line(outcome: CellOutcome) -> str:
    """How a cell went, in a line."""
    words: list[str] = [outcome.status]
    if outcome.status == "done" and outcome.result is not None and outcome.result["speedup"]["value"] is not None:
        words.append(interval(outcome.result["speedup"]))
    if outcome.seconds is not None:
        words.append(f"in {duration(outcome.seconds)}")
    return f"{' '.join(words)}: {outcome.label}{f' – {_short(outcome.detail)}' if outcome.detail else ''}"


def table(outcomes: Sequence[CellOutcome], width: int) -> Iterator[Table | str]:
    """A row a cell: the values that it has of its own, how it went, what it found. What none has is no column. Where a
    terminal has no room for a column a key, the values stand in one; then come notes."""
    found = [_numbers(outcome) for outcome in outcomes]
    shown = [name for name in _RANKS if any(row[name] != "–" for row in found)]
    if "prompts found" not in shown:  # no pages are shared
        shown = [name for name in shown if name != "ttft"]
    if len({row["weights"] for row in found if row["weights"] != "–"}) < 2:  # the same in all cells
        shown = [name for name in shown if name != "weights"]
    status = Column("status", [_status(outcome) for outcome in outcomes], right=False)
    results = [status, *(Column(name, [row[name] for row in found], _RANKS[name]) for name in shown)]
    asked = [_asked(outcome.label) for outcome in outcomes]
    axes = list(dict.fromkeys(key for words in asked for key in words))
    columns = [*(Column(key, [words.get(key, "") for words in asked], right=False) for key in axes), *results]
    if not fit(columns, width):
        columns = [Column("cell", [short_name(outcome.label) for outcome in outcomes]), *results]
    made, left = fitted(columns, width)
    yield made
    whole = [outcome.result for outcome in outcomes if outcome.result is not None]
    yield from filter(None, (left, *mark_notes(whole, "cells"), *spread(whole)))


def _status(outcome: CellOutcome) -> Text:
    behind = ("*" if outcome.stale else "") + marks(outcome.result or {})
    return Text(outcome.status + behind, style=_STYLE.get(outcome.status, "bold red"))


def _asked(label: str) -> dict[str, str]:
    """The label's values by their keys; one of another form stands as it is."""
    words = [word.partition("=") for word in label.split(" ")]
    return {key: value for key, _, value in words} if all(equals for _, equals, _ in words) else {"cell": label}


def short_name(label: str) -> str:
    """The label of a cell as a report has it: the drafter first, its keys without their group."""
    words = [word.partition("=") for word in label.split(" ")]
    first = [value for key, _, value in words if key == "drafting"]
    others = [f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in words if key != "drafting"]
    return " ".join([*first, *others])


def reasons(outcomes: Sequence[CellOutcome]) -> Iterator[str]:
    """Why each cell that is not done is not, and where it says more."""
    for outcome in outcomes:
        if outcome.status != "done":
            log = outcome.folder / LOG
            more = f" ({log})" if log.exists() else ""
            detail = f" – {_short(outcome.detail)}" if outcome.detail else ""
            yield f"{outcome.status}: {outcome.label}{detail}{more}"


def _numbers(outcome: CellOutcome) -> dict[str, str]:
    """By the names of their columns; – is what there is not."""
    r: Mapping[str, Any] = outcome.result or {}
    strategy, exactness = r.get("strategy") or {}, r.get("exactness") or {}
    pages = r.get("pages") or {}
    shares = bool(pages.get("share"))
    lost = (((r.get("quality") or {}).get("divergence") or {}).get("kl") or {}).get("value")
    return {
        "speedup [95 %]": interval(r["speedup"]) if r else "–",
        "τ": number(strategy.get("tokens_per_step")),
        "accepted": percent(strategy.get("acceptance_rate")),
        "prompts found": percent(pages["strategy"]["hit_rate"]) if shares else "–",
        "ttft": seconds(strategy.get("ttft_s")),
        "output": "replayed" if r.get("replay") else exactness.get("verdict", "–"),
        "quality": "\n".join(_qualities(r.get("quality"))) or "–",
        "KL": "–" if lost is None else f"{lost:.2g}",
        "weights": size((r.get("memory") or {}).get("weights_bytes")),
        "time": duration(outcome.seconds),
    }


def _qualities(quality: Mapping[str, Any] | None) -> Iterator[str]:
    """The main metric of each task."""
    for name, task in (quality or {"tasks": {}})["tasks"].items():
        yield f"{name} {number(task['metrics'].get(task['main'], {}).get('value'), 3)}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
