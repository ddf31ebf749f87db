"""The command: words in, files and one-line errors out; and real runs read back."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodelab import load_runs
from decodelab.experiments.cli import main
from decodelab.experiments.report.command import HELP, SUBCOMMANDS, Asked, read
from decodelab.tests.experiments.report.made import brief, interval, sample, write

FILES = ("report.csv", "report.html", "report.md")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def fails(here: Path, capsys: Any) -> Callable[..., str]:
    """The one line of a command that the user got wrong."""

    def call(*words: str) -> str:
        assert main(["report", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err.removeprefix("decodelab: error: ").strip()

    return call


def test_words(here: Path):
    (here / "a=b").mkdir()
    a, b = Path("a"), Path("b")
    assert read(["a", "b"]) == Asked((a, b))
    assert read(["a", "--against", "b"]) == read(["--against=b", "a"]) == Asked((a,), against=b)
    assert read(["output=x", "a"]) == Asked((a,), output=Path("x"))
    assert read(["a=b"]) == Asked((Path("a=b"),))
    assert read(["~/a"]).folders == (Path.home() / "a",)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["output=x"], "report needs the folder of a run or a sweep: decodelab report DIR… [--against DIR] "),
        (["a", "--against"], "--against needs a folder: --against DIR"),
        (["a", "--against", "b", "--against=c"], "--against c is the second; runs are compared with one folder"),
        (["a", "--agianst", "b"], "--agianst is unknown: report takes DIR…, --against DIR and output=DIR"),
        (["a", "outptu=b"], "outptu= is unknown: report takes output=DIR"),
        (["a", "output="], "output is empty; name a folder"),
        (["absent", "gone"], "there is no folder absent; there is no folder gone"),
        (["empty"], "there is no run under empty"),
        (["good", "--against", "absent"], "--against: there is no folder absent"),
        (["good", "output=file"], "file cannot be made (File exists); name another folder with output=DIR"),
        (
            ["good", "output=taken"],
            "taken/report.html cannot be written (Is a directory); name another folder with output",
        ),
        (["n" * 300], f"the name of a file or folder is too long for this disk: {'n' * 300}"),
        (["explain"], "explain takes the folder of one run, got 0: decodelab report explain RUN"),
        (["explain", "empty"], "empty holds no result.json; name the folder of a run"),
        (["explain", "."], ". is not a run, but holds 1; name one of them: good"),
    ],
)
def test_errors_are_one_line(words: list[str], line: str, here: Path, fails: Callable[..., str]):
    (here / "empty").mkdir()
    (here / "file").touch()
    (here / "taken" / "report.html").mkdir(parents=True)
    write(here / "good", brief())
    assert fails(*words).startswith(line)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["a", "--help"]])
def test_help(words: list[str], here: Path, capsys: Any):
    assert main(["report", *words]) == 0
    assert capsys.readouterr().out.strip() == HELP
    assert max(map(len, HELP.splitlines())) <= 120
    assert all(name in HELP for name in SUBCOMMANDS)


def test_report_is_the_first_word(capsys: Any):
    assert main(["--help", "report"]) == 2
    assert "report is the first word: decodelab report …" in capsys.readouterr().err


def test_files_are_written_into_the_first_folder(here: Path, capsys: Any):
    write(here / "runs" / "a", brief(speedup=interval(3.0, 2.5, 3.5)))
    write(here / "more" / "b", brief(key="b", config__seed=1))
    (here / "more" / "torn").mkdir()
    (here / "more" / "torn" / "result.json").write_text("{")
    assert main(["report", "runs", "more", "absent"]) == 0
    out = capsys.readouterr().out
    assert "written to runs/report.md, runs/report.csv, runs/report.html" in out
    assert "note: more/torn/result.json is not a whole result" in out
    assert "note: there is no folder absent" in out
    assert sorted(file.name for file in (here / "runs").iterdir() if file.is_file()) == list(FILES)
    html = (here / "runs" / "report.html").read_text()
    assert "Not read" in html
    with (here / "runs" / "report.csv").open(newline="") as file:
        assert [row["speedup.value"] for row in csv.DictReader(file)] == ["3.0", "2.0"]
    # once more, over what is there
    assert main(["report", "runs", "more/b"]) == 0
    assert "Not read" not in (here / "runs" / "report.html").read_text()


def test_against_and_another_folder(here: Path, capsys: Any):
    prompts = [(str(i), 1.0 + i) for i in range(6)]
    write(here / "old" / "a", brief(), [sample(n, s, s, batch=i) for i, (n, s) in enumerate(prompts)])
    write(here / "new" / "a", brief(), [sample(n, s, s / 2, batch=i) for i, (n, s) in enumerate(prompts)])
    assert main(["report", "new", "--against", "old", "output=out/deep"]) == 0
    assert sorted(file.name for file in (here / "out" / "deep").iterdir()) == list(FILES)
    assert sorted(file.name for file in (here / "new").iterdir()) == ["a"]
    for text in (capsys.readouterr().out, *((here / "out" / "deep" / name).read_text() for name in FILES[1:])):
        assert "50.0 % faster" in text
        assert "6 of 6" in text


def test_a_result_named_itself_is_reported_beside_it(here: Path):
    write(here / "a", brief())
    assert main(["report", "a/result.json"]) == 0
    assert (here / "a" / "report.html").exists()


def test_real_runs(bench: Any, private: Path, capsys: Any):
    """Of the command, read by the report, by load_runs and by explain alike."""
    assert bench.run("output=runs/a", "profile=true") == 0
    assert bench.run("output=runs/b", "drafting=none") == 0
    capsys.readouterr()
    assert main(["report", "runs"]) == 0
    frame = load_runs("runs").set_index("folder")
    with (private / "runs" / "report.csv").open(newline="") as file:
        rows = {row["folder"]: row for row in csv.DictReader(file)}
    assert rows.keys() == set(frame.index)
    for folder, row in rows.items():
        for name in ("speedup.value", "speedup.high", "strategy.tokens_per_step", "strategy.ttft_s"):
            assert float(row[name]) == frame.loc[folder, name]
        assert row["exactness.verdict"] == "exact"
    assert {row["strategy"] for row in rows.values()} == {"prompt_lookup", "none"}
    html = (private / "runs" / "report.html").read_text()
    for title in ("Speedup", "Acceptance by position", "Time per phase", "By category", "Cost of a step, T(k)"):
        assert f"<h3>{title}</h3>" in html
    capsys.readouterr()
    assert main(["report", "explain", "runs/a"]) == 0
    assert "tokens a step" in capsys.readouterr().out
