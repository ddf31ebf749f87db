"""A sweep for people: what runs now on a terminal, a line a cell in a log, and the table at the end."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table
from rich.text import Text

from ..format import interval, number, percent
from .cells import LOG, CellOutcome

_STYLE = {"done": "green", "interrupted": "yellow", "not started": "yellow"}  # the others are red
_WIDEST = 500  # characters of a reason
_NARROWEST = 14  # characters of a value in the table, where it is as long


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


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes = round(seconds / 60)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def line(outcome: CellOutcome) -> str:
    """How a cell went, in a line."""
    words: list[str] = [outcome.status]
    if outcome.status == "done" and outcome.result is not None and outcome.result["speedup"]["value"] is not None:
        words.append(interval(outcome.result["speedup"]))
    if outcome.seconds is not None:
        words.append(f"in {duration(outcome.seconds)}")
    return f"{' '.join(words)}: {outcome.label}{f' – {_short(outcome.detail)}' if outcome.detail else ''}"


def table(outcomes: Sequence[CellOutcome]) -> Table:
    """A row a cell: the values that it has of its own, how it went, what it found. What none has is no column."""
    asked = [_asked(outcome.label) for outcome in outcomes]
    found = [_numbers(outcome) for outcome in outcomes]
    out = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    axes = list(dict.fromkeys(key for words in asked for key in words))
    for key in axes:
        longest = max(len(words.get(key, "")) for words in asked)
        out.add_column(key, overflow="fold", min_width=min(longest, _NARROWEST))
    out.add_column("status", no_wrap=True)
    shown = [name for name in found[0] if any(row[name] != "–" for row in found)]
    for name in shown:
        out.add_column(name, justify="right", no_wrap=True)
    for outcome, words, row in zip(outcomes, asked, found, strict=True):
        status = Text(outcome.status + ("*" if outcome.stale else ""), style=_STYLE.get(outcome.status, "bold red"))
        out.add_row(*(words.get(key, "") for key in axes), status, *(row[name] for name in shown))
    return out


def _asked(label: str) -> dict[str, str]:
    """The label's values by their keys; one of another form stands as it is."""
    words = [word.partition("=") for word in label.split(" ")]
    return {key: value for key, _, value in words} if all(equals for _, equals, _ in words) else {"cell": label}


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
    return {
        "speedup [95 %]": interval(r["speedup"]) if r else "–",
        "τ": number(strategy.get("tokens_per_step")),
        "accepted": percent(strategy.get("acceptance_rate")),
        "output": "replayed" if r.get("replay") else exactness.get("verdict", "–"),
        "quality": "\n".join(_qualities(r.get("quality"))) or "–",
        "time": duration(outcome.seconds),
    }


def _qualities(quality: Mapping[str, Any] | None) -> Iterator[str]:
    """The main metric of each task."""
    for name, task in (quality or {"tasks": {}})["tasks"].items():
        yield f"{name} {number(task['metrics'][task['main']]['value'], 3)}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
