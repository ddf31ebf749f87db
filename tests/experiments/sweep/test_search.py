"""Searches on functions that are known, and on a sweep's folder."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from decodelab.errors import UserError
from decodelab.experiments.cli import main
from decodelab.experiments.compose import Composer, compose
from decodelab.experiments.sweep.cells import JOB, RESULT, CellOutcome, State, Status, write
from decodelab.experiments.sweep.grid import Cell
from decodelab.experiments.sweep.search import Trial, best, check_space, look, number_at, search, told
from decodelab.experiments.sweep.settings import SearchSettings
from decodelab.tests.experiments.sweep.stage import Stage, result

SPACE = {"drafting.max_draft": [2, 32], "drafting.per_match": [0.5, 8.0]}
Values = Mapping[str, float]


def hill(values: Values) -> float:
    """Highest, at 2, for drafts of 9 tokens and 2 a match."""
    long, per_match = values["drafting.max_draft"], values["drafting.per_match"]
    return 2 - (long - 9) ** 2 / 200 - math.log(per_match / 2) ** 2


@dataclass
class Fake:
    """A runner whose cells come to what `speedup` and `verdict` say; a status other than done is a failure."""

    speedup: Callable[[Values], float] = hill
    verdict: Callable[[Values], str] = lambda values: "exact"
    status: Callable[[Values], Status] = lambda values: "done"
    quality: Callable[[Values], float] | None = None
    cells: list[Cell] = field(default_factory=list)

    def run_cell(self, cell: Cell) -> CellOutcome:
        self.cells.append(cell)
        values = {key: float(value) for key, _, value in (word.partition("=") for word in cell.label.split(" "))}
        if (status := self.status(values)) != "done":
            return CellOutcome(status, "k", Path("f"), None, None)
        value = self.speedup(values)
        found = result("k") | {"exactness": {"verdict": self.verdict(values)}}
        found["speedup"] = {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 9}
        if self.quality:
            metrics = {"exact_match": {"value": self.quality(values), "low": None, "high": None, "n": 5}}
            found["quality"] = {"tasks": {"my-task": {"metrics": metrics, "main": "exact_match"}}}
        return CellOutcome("broken" if self.verdict(values) == "broken" else "done", "k", Path("f"), found, 1.0)


def run(fake: Fake, start: Mapping[str, Any] | None = None, **settings: Any) -> tuple[list[Trial], Trial | None]:
    asked = SearchSettings(**{"space": SPACE, "trials": 40} | settings)
    trials = list(look(fake, asked, ["drafting=prompt_lookup"], start))
    return trials, best(trials, asked)


def words(table: Any, column: int) -> list[str]:
    return [str(cell) for cell in table.columns[column].cells]


def values(trial: Trial) -> dict[str, float]:
    return {key: float(value) for key, _, value in (word.partition("=") for word in trial.words)}


def test_it_finds_the_top_of_a_hill():
    fake = Fake()
    trials, top = run(fake)
    assert len(trials) == len({trial.words for trial in trials}) == 40
    assert top is not None
    assert top.value is not None
    assert top.value > 1.97
    assert abs(values(top)["drafting.max_draft"] - 9) <= 2
    assert fake.cells[0].overrides == ["drafting=prompt_lookup", *trials[0].words]
    assert fake.cells[0].label == " ".join(trials[0].words)
    for trial in trials:
        whole, real = (word.partition("=")[2] for word in trial.words)
        assert re.fullmatch(r"\d+", whole)
        assert 2 <= int(whole) <= 32
        assert 0.5 <= float(real) <= 8
        assert len(real.replace(".", "").lstrip("0")) <= 4  # a label that can be read
    _, low = run(Fake(), maximise=False, trials=20)
    assert low is not None
    assert low.value is not None
    assert low.value < 0.5


def test_the_same_seed_asks_the_same():
    """So that a search which is started again asks for the cells that are there."""
    first, again = [run(Fake(), trials=15)[0] for _ in range(2)]
    assert [trial.words for trial in first] == [trial.words for trial in again]
    longer = run(Fake(), trials=18, seed=0)[0]
    assert [trial.words for trial in longer[:15]] == [trial.words for trial in first]
    assert [t.words for t in run(Fake(), trials=15, seed=1)[0]] != [t.words for t in first]


def test_the_configured_values_come_first():
    start = {"drafting": {"max_draft": 15, "per_match": 2}}
    trials, _ = run(Fake(), start, trials=5)
    assert values(trials[0]) == {"drafting.max_draft": 15, "drafting.per_match": 2}
    assert [trial.configured for trial in trials] == [True, False, False, False, False]
    for outside in ({"max_draft": 33, "per_match": 2}, {"max_draft": 15, "per_match": None}, {}):
        assert values(run(Fake(), {"drafting": outside}, trials=1)[0][0]) != values(trials[0])


@pytest.mark.parametrize("bound", [None, {"exactness": ["exact", "near-tie"]}])
def test_output_that_is_broken_is_out_of_bounds(bound: Mapping[str, Any] | None):
    """Also where nothing was asked of it."""
    fake = Fake(verdict=lambda v: "broken" if v["drafting.max_draft"] > 6 else "near-tie")
    trials, top = run(fake, bound=bound)
    assert top is not None
    assert 4 <= values(top)["drafting.max_draft"] <= 6
    assert {trial.within for trial in trials} == {True, False}
    assert run(fake, bound={"exactness": "exact"})[1] is None


def test_it_keeps_away_from_what_is_out_of_bounds():
    """What is fastest is far outside: most of the trials are not there."""
    fake = Fake(lambda v: v["drafting.max_draft"], quality=lambda v: -v["drafting.max_draft"])
    trials, top = run(fake, bound={"quality/my-task/exact_match": {"min": -8}})
    late = [values(trial)["drafting.max_draft"] for trial in trials[20:]]
    assert sum(v <= 12 for v in late) > 12  # of 20
    assert top is not None
    assert values(top)["drafting.max_draft"] == 8


def test_a_number_can_be_bound():
    fake = Fake(quality=lambda v: v["drafting.per_match"] / 8)
    _, top = run(fake, bound={"quality/my-task/exact_match": {"min": 0.5}})
    assert top is not None
    assert 4 <= values(top)["drafting.per_match"] <= 5
    _, top = run(fake, objective="quality/my-task/exact_match", bound={"speedup.value": {"min": 1.0, "max": 1.5}})
    assert top is not None
    assert 3 < values(top)["drafting.per_match"] < 2 * math.e


def test_a_failure_is_told_and_the_search_goes_on():
    fake = Fake(status=lambda v: "failed" if v["drafting.max_draft"] > 20 else "done")
    trials, top = run(fake)
    assert len(trials) == 40
    assert {trial.value is None for trial in trials} == {True, False}
    assert top is not None
    assert top.value is not None
    assert top.value > 1.5


def test_it_ends_with_the_space_and_with_the_sweep():
    trials, top = run(Fake(lambda v: -v["seed"]), space={"seed": [0, 5]}, trials=30)
    assert sorted(values(trial)["seed"] for trial in trials) == [0, 1, 2, 3, 4, 5]
    assert top is not None
    assert values(top) == {"seed": 0}
    started: list[Values] = []
    fake = Fake(status=lambda v: "not started" if started.append(v) or len(started) > 3 else "done")
    assert len(run(fake)[0]) == 3


def test_choices_and_logarithms():
    fake = Fake(lambda v: {2.0: 1.0, 3.0: 3.0, 7.0: 2.0}[v["a"]] - v["b"] + (v["c"] == 8))
    space = {"a": [2, 3, 7], "b": {"low": 1e-4, "high": 1.0, "log": True}, "c": {"choices": [4, 8]}}
    trials, top = run(fake, space=space)
    assert top is not None
    found = values(top)
    assert (found["a"], found["c"]) == (3, 8)
    drawn = [values(trial)["b"] for trial in trials]
    assert min(drawn) < 1e-3 < 0.1 < max(drawn)
    asked = SearchSettings(space={"drafting": ["none", "reference"], "x": [True, False]}, trials=4)
    fake = Fake()
    with pytest.raises(ValueError, match="could not convert"):  # of the fake: words reach it as they are
        list(look(fake, asked, []))
    assert re.fullmatch(r"drafting=(none|reference) x=(true|false)", fake.cells[0].label)


def test_what_is_not_in_the_result_ends_it():
    line = "search.objective: speedup.valu is no number in f/result.json; name one that is, such as speedup.value, "
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        run(Fake(), objective="speedup.valu")
    with pytest.raises(UserError, match=r"^search\.bound: quality/a/b is no number"):
        run(Fake(quality=lambda v: 0.5), bound={"quality/a/b": {"min": 0}})


def test_what_is_null_in_one_trial_is_that_trial_s_failure():
    """Where nothing is drafted there is no acceptance rate; the others are found all the same."""

    @dataclass
    class Shy(Fake):
        def run_cell(self, cell: Cell) -> CellOutcome:
            outcome = Fake.run_cell(self, cell)
            if "max_draft=3" in cell.label:  # and 30, 31, 32
                outcome.result["strategy"]["acceptance_rate"] = None
            return outcome

    for asked in ({"objective": "strategy.acceptance_rate"}, {"bound": {"strategy.acceptance_rate": {"min": 0.1}}}):
        trials, top = run(Shy(), trials=20, **asked)
        assert len(trials) == 20
        assert top is not None
        shy = [trial for trial in trials if "max_draft=3" in trial.words[0]]
        assert shy
        assert {(trial.value, trial.lacks) for trial in shy} == {(None, "strategy.acceptance_rate")}
        table = next(told(trials, SearchSettings(space=SPACE, **asked), ["decodelab"], 200))
        assert words(table, -1).count("no strategy.acceptance_rate") == len(shy)


@pytest.mark.parametrize(
    ("job", "words", "name", "why"),
    [
        ("evaluate", "quality.tasks=[my.jsonl]", "speedup.value", "evaluate finds quality alone; "),
        ("run", "timing=untimed", "speedup.value", "timing=untimed; choose another timing, or another number"),
        ("run", "timing=untimed", "baseline.tpot_s", "timing=untimed"),
        ("run", "timing=untimed", "strategy.time_share.draft", "timing=untimed"),
        ("run", "timing=paired", "predicted_speedup", "it needs profile=true"),
        ("run", "timing=paired", "compare_hf.plain.tokens_per_second", "it needs compare_hf=true"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(
    job: str, words: str, name: str, why: str, composer: Composer
):
    given = [words, f"search={{space: {{seed: [1, 2]}}, objective: {name}}}"]
    with pytest.raises(UserError, match=f"^search: {re.escape(name)} is not measured: {re.escape(why)}"):
        check_space(job, composer.compose(given), given, composer)
    given[1] = "search={space: {seed: [1, 2]}, objective: strategy.tokens_per_step}"
    if job == "run":
        check_space(job, composer.compose(given), given, composer)


def test_a_number_by_its_name():
    found = result("k") | {"quality": {"tasks": {"a/b": {"metrics": {"f1": {"value": 0.25}}}}}, "flag": True}
    assert number_at(found, "speedup.value") == number_at(found, "speedup") == 1.5
    assert number_at(found, "speedup.low") == 1.25
    assert number_at(found, "quality/a/b/f1") == 0.25
    assert [number_at(found, name) for name in ("flag", "status", "speedup.x.y", "quality/a/f1")] == [None] * 4


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("{space: {}}", "search.space is empty: name keys and their ranges, {drafting.max_draft: [2, 32]}"),
        ("{trials: 3}", "search.space is missing: give search.space=…"),
        ("{space: {seed: [1, 2]}, trials: 0}", "search.trials=0: at least 1"),
        ("{space: {seed: [1, 2]}, trial: 3}", "search.trial is unknown: did you mean trials? search has space, trials, "
         "objective, maximise, bound, seed"),
        ("{space: {seed: 3}}", "search.space.seed is 3: give [low, high], or a list of choices"),
        ("{space: {seed: []}}", "search.space.seed has no choices: give two or more, or leave it out"),
        ("{space: {seed: [3]}}", "search.space.seed has one choice: give two or more, or leave it out"),
        ("{space: {seed: [1, 2, 1]}}", "search.space.seed has a choice twice"),
        ("{space: {seed: [3, 3]}}", "search.space.seed goes from 3 to 3: low must be below high"),
        ("{space: {seed: [8, 3]}}", "search.space.seed goes from 8 to 3: low must be below high"),
        ("{space: {seed: {low: 0, high: 3, log: true}}}",
         "search.space.seed goes from 0 with log: low must be above 0"),
        ("{space: {seed: {low: 0, high: many}}}",
         "search.space.seed goes from 0 to 'many': both must be finite numbers"),
        ("{space: {seed: {low: 0}}}",
         "search.space.seed has low: a mapping is {low, high, log: true} or {choices: […]}"),
        ("{space: {seed: [1, 2]}, bound: {exactness: broken}}",
         "search.bound.exactness=broken: one or several of exact, near-tie, same law, lossy"),
        ("{space: {seed: [1, 2]}, bound: {speedup.value: 1.2}}",
         "search.bound.speedup.value=1.2: a number is bound by {min: 0.4}, {max: 0.6} or both"),
        ("{space: {seed: [1, 2]}, bound: {speedup.value: {least: 1}}}",
         "search.bound.speedup.value={'least': 1}: a number is bound by {min: 0.4}, {max: 0.6} or both"),
        ("{space: {seed: [1, 2]}, bound: {quality/x: {min: 1}}}",
         "search: quality/x is no number of a task: quality/TASK/METRIC"),
        # found once it is composed
        ("{space: {drafting.max_drft: [1, 2]}}", "drafting.max_drft is unknown: did you mean max_draft? drafting has "
         "max_draft, min_ngram, max_ngram, per_match"),
        ("{space: {drafting.max_draft: [2.5, 8]}}", "drafting.max_draft must be an integer, got 2.5"),
        ("{space: {drafting.max_draft: [1, 2, x]}}", "drafting.max_draft must be an integer, got 'x'"),
        ("{space: {drafting: [prompt_lookup, nonne]}}", "drafting=nonne is unknown: did you mean none? "),
        ("{space: {seed: [1, 2]}, objective: quality/a/f1}",
         "search: quality/a/f1 is not measured: name the task in quality.tasks"),
        ("{space: {output: [a, b]}}",
         "search.space: output changes nothing that is measured, so its trials are one: leave it out"),
        ("{space: {cell.timeout: [5, 9]}}", "search.space: cell.timeout changes nothing that is measured"),
        ("{space: {seed: [1, 2]}, bound: {quality/a/f1: {min: 0.4}}}",
         "search: quality/a/f1 is not measured: name the task in quality.tasks"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(settings: str, line: str, composer: Composer):
    words = ["drafting=prompt_lookup", f"search={settings}"]
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        check_space("run", composer.compose(words), words, composer)


def test_without_optuna_it_says_what_to_install(composer: Composer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    words = ["search={space: {seed: [1, 2]}}"]
    line = r"^search needs optuna, which is not installed: pip install 'decodelab\[search\]'$"
    with pytest.raises(UserError, match=line):
        check_space("run", composer.compose(words), words, composer)


def test_a_search_is_of_one_configuration(capsys: pytest.CaptureFixture[str]):
    for sweep in (["-m", "seed=1,2"], ["sweep=[{seed: [1, 2]}]"]):
        assert main(["run", "search={space: {batch: [1, 2]}}", *sweep]) == 2
        assert capsys.readouterr().err == (
            "decodelab: error: search looks for the values of one configuration: leave out the sweep, or search=null\n"
        )


def test_what_is_told():
    asked = SearchSettings(space=SPACE, trials=12, bound={"exactness": "exact", "strategy.tokens_per_step": {"min": 1}})
    fake = Fake(verdict=lambda v: "near-tie" if v["drafting.max_draft"] > 20 else "exact")
    trials = list(look(fake, asked, [], {"drafting": {"max_draft": 32, "per_match": 8.0}}))
    table, *lines = told(trials, asked, ["decodelab", "run", "task.path='a b'"], 200)
    assert [column.header for column in table.columns][1:4] == ["max_draft", "per_match", "speedup.value"]
    assert table.row_count == 12
    top = best(trials, asked)
    assert top is not None
    assert top.value is not None
    value = f"{top.value:.3f} [{top.value - 0.1:.3f}, {top.value + 0.1:.3f}]"
    assert lines[0] == f"best: speedup.value {value} with {' '.join(top.words)}"
    assert lines.pop(1).endswith(" with drafting.max_draft=32 drafting.per_match=8.0")
    near = sum(t is not top and t.within and t.value is not None and t.value >= top.value - 0.1 for t in trials)
    noise = f", and {near} others lie within its interval" if near else ""
    assert lines[1] == f"it is the best of 12 on these prompts, so its number is optimistic{noise}; measured by itself:"
    assert shlex.split(lines[2]) == ["decodelab", "run", "task.path='a b'", *top.words]
    assert words(table, -1).count("best") == 1
    assert words(table, -1)[0] == "as configured, out of bounds"
    none = SearchSettings(space=SPACE, trials=12, bound={"strategy.tokens_per_step": {"min": 9}})
    assert list(told(list(look(Fake(), none, [])), none, [], 200))[1:] == ["no trial is within the bounds"]
    failed = list(look(Fake(status=lambda v: "timeout"), none, []))
    table, line = told(failed, none, [], 200)
    assert line == "no trial was finished"
    assert set(words(table, -1)) == {"timeout"}
    assert list(told([], none, [], 200)) == []


def test_a_narrow_terminal_has_one_column_for_all_values():
    asked = SearchSettings(space=SPACE, trials=3, bound={"strategy.tokens_per_step": {"min": 1}})
    trials = list(look(Fake(), asked, []))
    assert trials[0].outcome.result is not None
    trials[0].outcome.result["provenance"] = {"load_before": 4.0}
    table, left, busy, *_ = told(trials, asked, [], 80)
    heads = [column.header for column in table.columns]
    assert heads == ["trial", "speedup.value", "output", ""]
    assert words(table, 0)[0] == re.sub(r"drafting\.", "", " ".join(trials[0].words))
    assert left == "left out, for a terminal of 80 columns: strategy.tokens_per_step"
    assert busy == "‡ 1 of 3 trials ran on a busy machine: their speeds are noisy"
    assert [cell.startswith("‡") for cell in words(table, -1)] == [True, False, False]


@dataclass
class Worker:
    """Writes what `hill` says of a cell; raises at the cell after `most`."""

    group: str
    ran: list[str]
    most: int
    pid: int = 0

    def run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> None:
        job = json.loads((folder / JOB).read_text())
        if len(self.ran) == self.most:
            raise KeyboardInterrupt
        self.ran.append(job["label"])
        config = compose_drafting(job["overrides"])
        value = hill({"drafting.max_draft": config["max_draft"], "drafting.per_match": config["per_match"]})
        found = result(job["key"]) | {"speedup": {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 9}}
        (folder / RESULT).write_text(json.dumps(found))
        write(folder, State("done", seconds=1.0, code="code"))

    def stop(self) -> None: ...


def compose_drafting(overrides: list[str]) -> dict[str, Any]:
    return {
        key.partition(".")[2]: float(value)
        for key, _, value in (w.partition("=") for w in overrides)
        if "." in key and key.startswith("drafting.")
    }


def test_a_search_in_a_sweep_s_folder_goes_on_where_it_was(
    stage: Stage, composer: Composer, capsys: pytest.CaptureFixture[str]
):
    """Interrupted and started again, it does what it would have done, and runs no cell twice."""
    task = stage.bench.root / "task.jsonl"
    task.write_text('{"prompt": "ab ab"}\n')

    def go(folder: str, ran: list[str], most: int = 99) -> int:
        words = [
            f"model.path={stage.bench.checkpoint}",
            f"task.path={task}",
            "device=cpu",
            "threads=1",
            "dtype=float32",
        ]
        words += [f"output={folder}", "drafting=prompt_lookup"]
        words += ["search={space: {drafting.max_draft: [2, 32], drafting.per_match: [0.5, 8.0]}, trials: 6}"]
        return search("run", composer.compose(words), words, composer, (), lambda group, *_: Worker(group, ran, most))

    whole: list[str] = []
    assert go("whole", whole) == 0
    assert len(whole) == len(set(whole)) == 6
    told_whole, progress = capsys.readouterr()
    assert "a search of 6 trials (search.trials=6), in whole" in progress
    assert "[2/6] done" in progress
    assert "(about 4.0 s left)" in next(line for line in progress.splitlines() if line.startswith("[2/6]"))
    (command,) = (shlex.split(line) for line in told_whole.splitlines() if line.startswith("  decodelab run"))
    config = compose(command[2:])
    assert config.search is None
    assert not [word for word in command if word.startswith("output=")]
    assert f"drafting.max_draft={config.drafting.max_draft}" in command

    part: list[str] = []
    assert go("part", part, most=4) == 130
    assert part == whole[:4]
    said = "4 of 6 trials, in part; the same command with output=part goes on with the others"
    assert said in capsys.readouterr().out
    assert go("part", part) == 0
    assert part == whole
    assert capsys.readouterr().out.replace("in part", "in whole") == told_whole
    assert go("part", part) == 0
    assert part == whole
