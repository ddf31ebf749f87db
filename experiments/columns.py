"""Tables of which nothing is cut: where a terminal is too narrow the least of the columns are left out, and named."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_ENDLESS = 100_000  # columns of what is no terminal
_GAP = 2  # between two columns
_LABEL, _LEAST = 22, 8  # a longer first column is folded to this before anything is left out; and behind that, at most


@dataclass(frozen=True, slots=True)
class Column:
    """`rank`: the highest is left out first, 0 never."""

    title: str
    cells: Sequence[str | Text]
    rank: int = 0
    right: bool = True

    @property
    def width(self) -> int:
        lines = [line for cell in (self.title, *self.cells) for line in str(cell).split("\n")]
        return max(map(cell_len, lines))


def stdout() -> Console:
    """What is no terminal has no width: a pipe, a file and a log get whole lines."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _ENDLESS)


def fit(columns: Sequence[Column], width: int, *, folded: bool = False) -> bool:
    """`folded`: with the first one as narrow as it may be."""
    first, *others = (column.width for column in columns)
    return sum([min(first, _LABEL) if folded else first, *(_GAP + other for other in others)]) <= width


def table(columns: Sequence[Column], width: int) -> tuple[Table, str]:
    """The first column names the rows, and is folded where that makes room. Also what is left out, in words; empty
    where nothing is."""
    kept = list(columns)
    while not fit(kept, width, folded=True) and any(column.rank for column in kept[1:]):
        kept.remove(max(kept[1:], key=lambda column: column.rank))
    out = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    rest = width - sum(_GAP + other.width for other in kept[1:])
    for i, column in enumerate(kept):
        least = min(column.width, rest) if i == 0 else column.width
        side = "right" if column.right and i else "left"
        out.add_column(column.title, justify=side, overflow="fold", width=least if rest >= _LEAST else None)  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in kept), strict=True):
        out.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    left = [column.title for column in columns if all(column is not one for one in kept)]
    return out, f"left out, for a terminal of {width} columns: {', '.join(left)}" if left else ""
