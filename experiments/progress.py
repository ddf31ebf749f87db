"""Progress that people can watch: a bar on a terminal, a line now and then in a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .format import duration

EVERY_S = 10.0  # between lines of a log


class Watch:
    """`step(what, done, total, note)` from anywhere; everything goes to standard error."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: tuple[str, TaskID] | None = None  # what is shown, its number in the bar
        self._spoke = 0.0
        self._began = time.monotonic()
        self._since = (0, 0.0)  # what of it was done when it was first shown, and when that was

    def __enter__(self) -> "Watch":
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            told = (TextColumn("{task.fields[left]}"), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, *told, console=self._console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str, done: int, total: int, note: str = "", last: float | None = None) -> None:
        """`last`: where it is expected to end, if not at `total`."""
        begins = self._task is None or self._task[0] != what
        if begins:
            self._since = (done, time.monotonic())
        left = self._left(done, total if last is None else min(total, last))
        if self._bar is not None:
            if self._task is None or begins:
                if self._task is not None:
                    self._bar.update(self._task[1], visible=False)
                self._task = (what, self._bar.add_task(what, total=total, note=note, left=left))
            self._bar.update(self._task[1], completed=done, total=total, note=note, left=left)
        elif begins or done == total or time.monotonic() - self._spoke > EVERY_S:
            self._task, self._spoke = (what, TaskID(0)), time.monotonic()
            elapsed = time.monotonic() - self._began
            line = ", ".join(filter(None, (f"[{elapsed:6.1f} s] {what} {done}/{total}", left, note)))
            print(line, file=sys.stderr, flush=True)

    def _left(self, done: int, end: int | float) -> str:
        """The time to the end, by the pace of this alone and not of what was done before it was shown."""
        first, then = self._since
        if not first < done < end:
            return ""
        return f"{duration((end - done) * (time.monotonic() - then) / (done - first))} left"
