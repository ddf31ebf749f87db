"""A cell's folder, read: what its files say of it, whatever became of the process that wrote them."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from decodelab.experiments.sweep.cells import Job, State, Status, last_line, read, scan, write
from decodelab.tests.checkout import ROOT
from decodelab.tests.experiments.sweep.stage import result

ASKED = Job("abc", "seed=1", "run", ("seed=1",), ("/conf",), 2, "group", "sweep")


def cell(folder: Path, state: State | None, result: dict[str, Any] | str | None = None) -> Path:
    folder.mkdir()
    write(folder, ASKED)
    if state is not None:
        write(folder, state)
    if result is not None:
        (folder / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    return folder


DONE = result("abc")


@pytest.mark.parametrize(
    ("written", "left", "status", "has_result"),
    [
        ("done", DONE, "done", True),
        ("broken", result("abc", "broken"), "broken", True),
        ("interrupted", result("abc", "interrupted"), "interrupted", True),
        ("interrupted", None, "interrupted", False),
        ("running", None, "lost", False),
        ("running", DONE, "done", True),
        ("running", result("other"), "lost", False),
        ("running", '{"key": "abc", ', "lost", False),  # cut short
        ("done", None, "lost", False),
        ("done", DONE | {"speedup": [1.5]}, "lost", False),
        ("done", DONE | {"status": ["done"]}, "lost", False),
        ("done", DONE | {"status": "well"}, "lost", False),
        ("failed", None, "failed", False),
        ("failed", DONE, "failed", False),  # what came after the result failed, and that is not hidden
        ("timeout", None, "timeout", False),
        (None, DONE, "lost", False),
    ],
)
def test_how_a_cell_went(written: Any, left: Any, status: str, has_result: bool, tmp_path: Path):
    found = read(cell(tmp_path / "cell", None if written is None else State(written, seconds=3.0, code="c"), left))
    assert found is not None
    assert (found.job, found.state.status, found.result is not None) == (ASKED, status, has_result)
    assert found.inferred == (written not in (None, status))
    assert found.outcome().seconds == (None if written is None else 3.0)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "[" * 100_000, "{}", '{"status": ["done"]}', '{"status": "well"}', '{"status": "done", "seconds": "3"}',
        '{"status": "done", "seconds": NaN}', '{"status": "done", "more": 1}',
    ],
)  # fmt: skip
def test_a_status_that_is_damaged_is_lost(text: str, tmp_path: Path):
    folder = cell(tmp_path / "cell", None, DONE)
    (folder / "status.json").write_text(text)
    assert read(folder).state == State("lost", "its status.json is gone or damaged")


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"key": "abc"}'])
def test_a_job_that_is_damaged_is_no_cell(text: str, tmp_path: Path):
    folder = cell(tmp_path / "cell", State("done"), DONE)
    (folder / "job.json").write_text(text)
    assert read(folder) is None


def test_a_cell_that_runs_now(tmp_path: Path):
    folder = cell(tmp_path / "cell", State("running", pid=7))
    assert read(folder, live=True).state == State("running", pid=7)
    assert read(folder).state == State("lost", "its process was gone when the sweep was started again")


def test_a_scan_finds_cells_alone(tmp_path: Path):
    cell(tmp_path / "b", State("done"), DONE)
    cell(tmp_path / "a", State("failed"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "result.json").write_text("{}")  # a single run
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "job.json").write_text('{"of": "another version"}')
    assert [found.folder.name for found in scan(tmp_path)] == ["a", "b"]
    assert scan(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("code", "now", "stale"), [("a", "a", False), ("a", "b", True), (None, "b", True), ("a", None, False)]
)
def test_a_cell_of_another_code_is_stale(code: Any, now: Any, stale: bool, tmp_path: Path):
    assert read(cell(tmp_path / "cell", State("done", code=code), DONE)).outcome(now).stale is stale


def test_only_what_is_done_is_stale(tmp_path: Path):
    assert not read(cell(tmp_path / "cell", State("failed", code="a"))).outcome("b").stale


def test_the_last_line_of_a_log(tmp_path: Path):
    assert last_line(tmp_path) == ""
    (tmp_path / "log.txt").write_bytes(b"first\n" * 1000 + "loading äß 1/2\n\n  \n".encode())
    assert last_line(tmp_path) == "loading äß 1/2"
    (tmp_path / "log.txt").write_bytes(b"\n")
    assert last_line(tmp_path) == ""


def test_the_readme_knows_every_status():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| status | the cell |")[2].partition("\n\n")[0]
    told = re.findall(r"^  \| `([a-z_ ]+)` \|", table, re.MULTILINE)
    assert told == [status for status in get_args(Status) if status != "running"]
