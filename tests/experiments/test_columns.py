"""Tables on terminals of any width, and on none."""

import io
import sys

import pytest
from rich.console import Console

from decodelab.experiments.columns import Column, stdout, table

COLUMNS = (
    Column("cell", ("one", "a name of more than twenty-two letters")),
    Column("status", ("done", "out_of_memory"), right=False),
    Column("per_match", ("1", "2"), 2),
    Column("speedup [95 %]", ("1.50× [1.25, 1.75]", "–"), 1),
    Column("output", ("exact", "a\nb")),
)


def shown(width: int) -> tuple[list[str], str]:
    out = io.StringIO()
    made, left = table(COLUMNS, width)
    Console(file=out, width=width).print(made)
    return [line.rstrip() for line in out.getvalue().splitlines()], left


@pytest.mark.parametrize("width", [30, 50, 60, 78, 90, 200])
def test_it_fits(width: int):
    lines, left = shown(width)
    assert max(map(len, lines)) <= width
    if width >= 50:  # else what must stay does not fit, and is folded
        for title in ("status", "output"):
            assert title in lines[0]
        assert all((column.title in lines[0]) != (column.title in left) for column in COLUMNS[2:4])
        assert any("out_of_memory" in line for line in lines)


def test_what_has_the_highest_rank_goes_first():
    full = 38 + sum(2 + w for w in (13, 9, 18, 6))
    assert shown(full)[1] == ""
    assert "a name of more than twenty-two letters" in shown(full)[0][3]
    assert shown(76)[1] == ""  # the name is folded
    assert shown(75)[1] == "left out, for a terminal of 75 columns: per_match"
    assert shown(60)[1] == "left out, for a terminal of 60 columns: per_match, speedup [95 %]"


def test_what_is_no_terminal_has_no_width(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    console = stdout()
    console.print(table(COLUMNS, console.width)[0])
    console.print("long " * 100)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "per_match" in lines[0]
    assert len(lines) == 6
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert stdout().width == 80
