"""Folders, whatever lies in them: what can be read is read, and the rest is a line each."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodelab.errors import UserError
from decodelab.experiments.files import misfit, read_lines, read_result
from decodelab.experiments.report.load import at, find, number_at
from decodelab.experiments.sweep.cells import Job, State
from decodelab.experiments.sweep.cells import write as write_cell
from decodelab.tests.experiments.report.made import result, write


def cell(folder: Path, status: str, detail: str = "", key: str = "key") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_cell(folder, Job(key, f"label of {folder.name}", "run", (), (), None, "group", "sweep"))
    write_cell(folder, State(status, detail))
    return folder


def test_runs_below_folders_each_once(tmp_path: Path):
    for name in ("a/one", "a/deep/two", "b"):
        write(tmp_path / name, result(key=name))
    found = find([tmp_path / "a", tmp_path / "a" / "one", tmp_path / "b" / "result.json"])
    assert [run.at("key") for run in found.runs] == ["a/deep/two", "a/one", "b"]
    assert (found.unfinished, found.notes) == ((), ())


def test_what_cannot_be_read_is_a_line_and_harms_no_other(tmp_path: Path):
    write(tmp_path / "good", result())
    for name, text in {
        "torn": '{"schema": 1,',
        "newer": '{"schema": 2}',
        "list": "[]",
        "deep": "[" * 100_000,
        "long": '{"n": ' + "9" * 5000 + "}",
        "lacks": json.dumps({name: value for name, value in result().items() if name != "config"}),
        "odd": json.dumps(result(by_category={"chat": {"speedup": [2.0], "tokens_per_step": 1.0}})),
        "bytes": b"\xff\xfe".decode("latin-1"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text, encoding="latin-1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "peers.txt").touch()
    found = find([tmp_path, tmp_path / "absent", tmp_path / "empty"])
    assert [run.folder.name for run in found.runs] == ["good"]
    assert found.notes == (
        f"{tmp_path}/race is a race of `decodelab peers`: {tmp_path}/race/peers.txt has its tables",
        f"{tmp_path}/bytes/result.json cannot be read (UnicodeDecodeError); delete it and run again",
        f"{tmp_path}/deep/result.json cannot be read (RecursionError); delete it and run again",
        f"{tmp_path}/lacks/result.json is damaged: it has no config; delete it and run again",
        f"{tmp_path}/list/result.json has schema None, and this version reads schema 1; run again with it",
        f"{tmp_path}/long/result.json cannot be read (ValueError); delete it and run again",
        f"{tmp_path}/newer/result.json has schema 2, and this version reads schema 1; run again with it",
        f"{tmp_path}/odd/result.json is damaged: by_category.chat.speedup is not an object; delete it and run again",
        f"{tmp_path}/torn/result.json is not a whole result (Expecting property name enclosed in double quotes); "
        "delete it and run again",
        f"there is no folder {tmp_path}/absent",
        f"there is no run under {tmp_path}/empty",
    )
    assert len(find([tmp_path / "race"]).notes) == 1


@pytest.mark.parametrize(
    ("status", "detail"), [("failed", "ValueError: no"), ("timeout", ""), ("out_of_memory", "killed"), ("refused", "")]
)
def test_a_cell_without_a_result_keeps_its_status(status: str, detail: str, tmp_path: Path):
    """Also where a result of an earlier try lies in its folder."""
    write(tmp_path / "done", result())
    cell(tmp_path / "done", "done")
    write(tmp_path / "again", result())
    for name in ("bad", "again"):
        cell(tmp_path / name, status, detail)
    found = find([tmp_path])
    assert [run.folder.name for run in found.runs] == ["done"]
    told = [(c.folder.name, c.label, c.status, c.reason) for c in found.unfinished]
    assert told == [(name, f"label of {name}", status, detail) for name in ("again", "bad")]


def test_a_cell_that_is_running_counts_as_such(tmp_path: Path):
    cell(tmp_path / "now", "running")
    (now,) = find([tmp_path]).unfinished
    assert (now.status, now.reason) == ("running", "or killed: the sweep knows")


def test_schemas_other_than_ours_are_refused_one_by_one(tmp_path: Path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"schema": "1"}))
    with pytest.raises(UserError, match=r"has schema 1, and this version reads schema 1"):
        read_result(file)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\)"):
        read_result(file)


def test_lines_of_a_log_that_was_cut(tmp_path: Path):
    file = tmp_path / "samples.jsonl"
    assert list(read_lines(file)) == []
    file.write_bytes(b'{"id": 1}\n[2]\n{"id": "\xff"}\n{"id": 3')
    assert list(read_lines(file)) == [{"id": 1}, {"id": "�"}]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ({"a": {"b": 2}}, 2.0),
        ({"a": {"b": True}}, None),
        ({"a": {"b": float("nan")}}, None),
        ({"a": {"b": float("inf")}}, None),
        ({"a": {"b": 10**400}}, None),
        ({"a": {"b": "2"}}, None),
        ({"a": [2]}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_number_is_one_or_null(data: Any, value: float | None):
    assert number_at(data, "a.b") == value


def test_what_is_missing_is_null():
    assert at({"a": {"b": [1]}}, "a.b") == [1]
    assert at({"a": None}, "a.b.c") is None


@pytest.mark.parametrize(
    ("found", "shape", "wrong"),
    [
        ({"a": 1, "b": None}, {"a": float, "b": (str, None), "c?": int}, None),
        ({"a": {"x": [1, "2"]}}, {"a": {"*": [int]}}, "a.x[1] is not a whole number"),
        ({}, {"a": (int, None)}, "it has no a"),
        ({"a": {}}, {"a": {"b": int}}, "a has no b"),
        ({"c": None}, {"c?": int}, "c is not a whole number"),
        ({"a": True}, {"a": int}, "a is not a whole number"),
        ({"a": 10**400}, {"a": float}, "a is not a number"),
        ([], {"a": int}, "it is not an object"),
    ],
)
def test_what_does_not_fit_is_named(found: Any, shape: Any, wrong: str | None):
    assert misfit(found, shape) == wrong
