"""The tables say what the files say, and texts in them stay texts."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from decodelab.experiments.format import CHANGED, NOISY, UNTRAINED
from decodelab.experiments.report.changes import Change, Comparison, compare
from decodelab.experiments.report.load import Found, Run, Unfinished, at
from decodelab.experiments.report.rows import Value, grouped
from decodelab.experiments.report.tables import comma_separated, markdown, notes, score, show
from decodelab.tests.experiments.report.made import interval, quality, quantised, result, run, sample, write

CELLS = (Unfinished(run().folder, "drafting=medusa", "out_of_memory", "killed | at <8> GB"),)


def rows() -> tuple[Run, ...]:
    """Ranked: a, c, b; the last is broken."""
    return (
        run("a", speedup=interval(3.0, 2.5, 3.5), quality=quality(gsm=0.625, mmlu=0.5)),
        run("b", config__drafting__max_draft=4, exactness__verdict="broken", status="broken", speedup=interval(9.0)),
        run("c", config__drafting__max_draft=8, speedup=interval(1.25, 1.1, 1.4), memory__peak_bytes=None),
    )


def terminal(runs: Sequence[Run], cells: Sequence[Unfinished] = (), width: int = 80, against: Any = None) -> list[str]:
    out = io.StringIO()
    found = Found(tuple(runs), tuple(cells), ())
    show(grouped(runs), found, against, Console(file=out, width=width, highlight=False, markup=False))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_terminal():
    lines = terminal(rows(), CELLS)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "tiny · float32 · demo"
    assert [" ".join(line.split()) for line in lines[2:8]] == [
        "strategy speedup [95 %] τ acceptance output tokens/s",
        "─" * len(lines[3]),
        "prompt_lookup 3.00× [2.50, 3.50] 2.20 60 % exact 100.0",
        "max_draft=15",
        "prompt_lookup 1.25× [1.10, 1.40] 2.20 60 % exact 100.0",
        "max_draft=8 †",
    ]
    assert "left out, for a terminal of 80 columns: end to end [95 %], ttft, tpot" in lines
    text = "\n".join(lines)
    assert "0.625 [0.525, 0.725]" in text
    assert "† dominated: another row of the table is at least as fast" in text
    assert "baseline: plain decoder" in text
    assert "drafting=medusa" in text
    assert "out_of_memory" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_labels_of_any_length_and_missing_numbers_fit(width: int):
    long = run("long", config__drafting={"_target_": "mylab.x.X", "key": "y" * 150})
    lines = terminal([long, run("b"), Run(run("empty").folder, {"schema": 1})], width=width)
    assert max(map(len, lines)) <= width


def test_a_wider_terminal_shows_more():
    wide = "\n".join(terminal(rows(), width=200))
    for text in ("end to end [95 %]", "1.60× [1.20, 2.00]", "tokens/s", "100.0 ms", "10.0 ms"):
        assert text in wide


def test_markdown():
    text = markdown(grouped(rows()), Found(rows(), CELLS, ("there is no folder *x*",)), None)
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("| strategy"))
    first = lines[lines.index(head) + 2]
    titles, cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, first))
    said = dict(zip(titles, cells, strict=True))
    assert said["strategy"] == r"prompt\_lookup max\_draft=15"
    assert said[r"speedup \[95 %\]"] == r"3.00× \[2.50, 3.50\]"
    assert said[r"end to end \[95 %\]"] == r"1.60× \[1.20, 2.00\]"
    assert (said["predicted"], said["τ"], said["acceptance"]) == ("1.90×", "2.20", "60 %")
    assert (said["tokens/s"], said["ttft"], said["tpot"]) == ("100.0", "100.0 ms", "10.0 ms")
    assert (said["weights in memory"], said["KV cache"], said["peak memory"]) == ("1.0 MiB", "1 KiB", "1.0 GiB")
    assert said["gsm acc"] == r"0.625 \[0.525, 0.725\]"
    assert r"| drafting=medusa | out\_of\_memory | killed \| at &lt;8> GB |" in lines
    assert r"- there is no folder \*x\*" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in tables[:5]} == {len(titles) + 1}


def test_columns_without_a_number_are_left_out():
    text = markdown(grouped([run(predicted_speedup=None)]), Found((), (), ()), None)
    assert "predicted" not in text
    assert "peak memory" in text


def test_csv_gives_every_number_back():
    runs = rows()
    lines = list(csv.DictReader(io.StringIO(comma_separated(grouped(runs), Found(runs, CELLS, ()), None))))
    assert [line["folder"] for line in lines] == ["a", "c", "b", "here"]
    assert [line["strategy"] for line in lines[:2]] == ["prompt_lookup max_draft=15", "prompt_lookup max_draft=8"]
    assert [line["dominated_by"] for line in lines] == ["", "prompt_lookup max_draft=15", "", ""]
    by_folder = {line["folder"]: line for line in lines}
    numbers = 0
    for one in runs:
        line = by_folder[str(one.folder)]
        for path in line.keys() - {"group", "strategy", "dominated_by", "warnings", "why", "folder"}:
            if path.startswith("quality."):
                continue
            value = at(one.result, path)
            if isinstance(value, int | float):
                assert float(line[path]) == value, path
                numbers += 1
            else:
                assert line[path] == ("" if value is None else str(value)), path
    assert numbers > 50
    gsm = [by_folder["a"][f"quality.gsm.acc{part}"] for part in ("", ".low", ".high")]
    assert [float(value) for value in gsm] == [0.625, 0.625 - 0.1, 0.625 + 0.1]
    assert by_folder["c"]["quality.gsm.acc"] == ""
    assert (lines[-1]["status"], lines[-1]["why"]) == ("out_of_memory", "killed | at <8> GB")


def test_changes_stand_in_all_of_them(tmp_path: Any):
    """A second against half of it, for ten tokens each."""
    before, after = (
        Run(write(tmp_path / name, result(), [sample("p", 1.0, spent)]), result())
        for name, spent in (("x", 0.5), ("y", 1.0))
    )
    against = compare([after], [before], "old", {after.folder: "mine"})
    found = Found((after,), (), ())
    (line,) = csv.DictReader(io.StringIO(comma_separated(grouped([after]), found, against)))
    assert float(line["against.time_per_token.value"]) == 1.0
    assert (line["against.time_per_token.n"], line["against.folder"]) == ("1", str(before.folder))
    assert "| mine | 100.0 % slower (n=1) | the same | 1 of 1 | 2.00× |" in markdown(grouped([after]), found, against)
    lines = terminal([after], against=against)
    assert max(map(len, lines)) <= 80
    said = "mine 100.0 % slower (n=1) the same 1 of 1 2.00× 2.20 exact"
    assert said in [" ".join(line.split()) for line in lines]
    assert "left out, for a terminal of 80 columns: acceptance" in lines


def test_the_verdict_of_quality_is_never_cut(tmp_path: Any):
    about = {"main": "exact_match", "verdict": "undecided", "metrics": {"exact_match": {
        "effect": "difference", "value": -0.25, "low": -0.5, "high": 0.125, "n01": 1, "n10": 3, "n": 8, "p": 0.625,
        "reference": 0.75, "mine": 0.5}}}  # fmt: skip
    alone = run("a", strategy=None, speedup=interval(None), exactness=None)
    change = Change("prompt_lookup max_draft=15 min_ngram=2", alone, alone, Value(), Value(), 0, 0,
                    {"tasks": {"a-long-task": about}})  # fmt: skip
    lines = terminal([alone], against=Comparison("old", (change,), ()))
    assert max(map(len, lines)) <= 80
    heads = [line.split() for line in lines if line.startswith("cell")]
    assert heads == [["cell", "task", "difference", "[95", "%]", "verdict"]]  # of quality alone, so no row of dashes
    assert any(line.endswith("  −0.250 [−0.500, 0.125]  undecided") for line in lines)
    assert "left out, for a terminal of 80 columns: score, p, better / worse" in lines


def test_runs_of_quality_alone_have_one_table():
    speechless = {"strategy": None, "speedup": interval(None), "end_to_end_speedup": interval(None), "exactness": None}
    runs = [run("a", quality=quality(mc=0.5), **speechless), run("b", quality=quality(gsm=0.25), **speechless)]
    lines = terminal(runs)
    assert [line.split() for line in lines if line.startswith("strategy")] == [["strategy", "mc", "acc", "gsm", "acc"]]
    # beside a run that was timed they are no row of dashes
    lines = terminal([*runs, run("c", config__drafting__max_draft=4)])
    assert sum(line.startswith("strategy") for line in lines) == 2
    assert sum("max_draft=4" in line for line in lines) == 1
    assert not any(set(line.split()[2:]) == {"–"} for line in lines)


def test_a_scorer_that_the_metric_is_not_called_after_is_named():
    def scored(scorer: str) -> dict[str, Any]:
        found = quality(gsm=0.5)
        found["tasks"]["gsm"]["settings"]["scorer"] = scorer
        return found

    runs = [run(name, quality=scored(name)) for name in ("acc", "number", "regex{pattern: 'a'}")]
    text = markdown(grouped(runs), Found(tuple(runs), (), ()), None)
    (head,) = [line for line in text.splitlines() if line.startswith("| strategy")]
    for title in ("| gsm acc |", "| gsm acc (number) |", "| gsm acc (regex{pattern: 'a'}) |"):
        assert title in head
    lines = list(csv.DictReader(io.StringIO(comma_separated(grouped(runs), Found((), (), ()), None))))
    assert {line["folder"]: line["quality.gsm.acc (number)"] for line in lines}["number"] == "0.5"
    assert {line["folder"]: line["quality.gsm.acc"] for line in lines}["number"] == ""


def test_runs_of_a_busy_machine_are_marked():
    runs = [run("a", speedup=interval(3.0, 2.5, 3.5), warnings=["one", NOISY]), run("b", config__seed=1)]
    note = "‡ 1 of 2 runs ran on a busy machine: their speeds are noisy"
    lines = terminal(runs, width=200)
    assert note in lines
    assert next(line.split()[1:3] for line in lines if line.startswith("prompt_lookup")) == ["seed=0", "‡"]
    text = markdown(grouped(runs), Found((), (), ()), None)
    assert f"- {note}" in text
    assert r"| prompt\_lookup seed=0 ‡ |" in text
    lines = list(csv.DictReader(io.StringIO(comma_separated(grouped(runs), Found((), (), ()), None))))
    assert [line["warnings"] for line in lines] == [f"one; {NOISY}", ""]


def test_a_target_of_another_layout_is_marked_until_its_quality_stands_beside_it():
    scored = {"tasks": {"t": {"main": "acc", "metrics": {"acc": interval(0.5)}}}}
    runs = [
        run("a", warnings=[UNTRAINED]),
        run("b", config__seed=1, warnings=[CHANGED, NOISY]),
        run("c", config__seed=2, warnings=[UNTRAINED], quality=scored),
    ]
    lines = terminal(runs, width=200)
    told = "§ 2 of 3 runs keep keys and values as their model does not, and have no quality beside their speed: give"
    assert any(line.startswith(told) for line in lines)
    marked = {line.split()[1]: line.split()[2] for line in lines if line.startswith("prompt_lookup seed=")}
    assert [marked[f"seed={i}"] for i in (0, 1)] == ["§", "‡§"]
    assert "§" not in marked["seed=2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value(), "–"),
        (Value(0.5), "0.500"),
        (Value(12.3456, 11.0, 13.0), "12.35 [11.00, 13.00]"),
        (Value(0.5, 0.25, 0.75), "0.500 [0.250, 0.750]"),
    ],
)
def test_scores(value: Value, text: str):
    assert score(value) == text


@pytest.mark.parametrize(
    ("speeds", "taus", "said"),
    [
        ((2.0, 1.0), (1.5, 1.2), "ranked by speedup, broken rows last"),
        ((2.0, None), (1.5, 1.2), "ranked by speedup, rows without it by tokens per step, broken rows last"),
        ((None, None), (1.5, 1.2), "nothing was timed: ranked by tokens per step (τ), broken rows last, which is not "),
        ((None, None), (None, None), "not ranked: no speed was measured"),
    ],
)
def test_by_what_rows_are_ranked(speeds: Sequence[float | None], taus: Sequence[float | None], said: str):
    pairs = zip("ab", speeds, taus, strict=True)
    (group,) = grouped([run(n, speedup__value=s, strategy__tokens_per_step=t) for n, s, t in pairs])
    assert notes(group)[0].startswith(said)


@pytest.mark.parametrize("predicted", [1.5, None])
def test_a_replay_foretells_a_speedup_only_where_it_has_one(predicted: float | None):
    (group,) = grouped([run(replay={"source": "x/samples.jsonl", "device": "a"}, predicted_speedup=predicted)])
    (line,) = [note for note in notes(group) if note.startswith("replayed")]
    assert line.endswith("in the replay" if predicted else "nothing was timed")


def test_seeds_of_the_calibration_text_are_summed_up_below_the_table():
    made = [
        {"kind": "awq", "settings": {"bits": 4, "calibration": {"seed": seed}}, "source": {"digest": "d"}}
        for seed in (0, 1)
    ]
    runs = [run(str(i), provenance__quantised=one, quality=quality(arc=0.25 + i / 4)) for i, one in enumerate(made)]
    (group,) = grouped(runs)
    line = "awq 4 bits, 2 seeds of its calibration text, mean (least to most): arc acc 0.375 (0.25 to 0.5)"
    assert line in notes(group)


def test_the_terminal_shows_bytes_where_they_differ():
    alike = [run("a"), run("b", config__seed=1)]
    assert "weights in memory" not in terminal(alike, width=200)[2]
    more = run("c", config__seed=2, memory__weights_bytes=2**19)
    assert "weights in memory" in terminal([*alike, more], width=200)[2]


def test_quantised_weights_are_set_beside_plain_decoding_of_those_as_stored():
    lines = terminal(quantised(), width=300)
    assert lines[2].split()[:5] == ["strategy", "tokens/s", "÷", "plain,", "unquantised"]
    rates = [line.partition("‡")[2].split() or line.split()[1:] for line in lines[4:10]]
    assert [" ".join(row[:2]) for row in rates] == [
        "30.0 3.00×", "28.0 2.80×", "20.0 2.00×", "15.0 1.50×", "14.0 1.40×", "10.0 1.00×",
    ]  # fmt: skip
    (wider,) = [line for line in lines if "run as" in line]
    assert wider.startswith("3 bits run as 4 here (int4pack), as fast and as large in memory as 4 bits")
    assert wider.endswith(": prompt_lookup rtn bits=3, none rtn bits=3")
    alone = terminal([run for run in quantised() if "rtn" not in str(run.at("config.quantization"))], width=300)
    assert not any("÷ plain" in line or "run as" in line for line in alone)
