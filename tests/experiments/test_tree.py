"""`decodelab tree`: from the events of a run to a file of paths that a drafter takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding import cost
from decodelab.decoding.cost import Profile
from decodelab.drafting.trees import cartesian, expected, measured, optimal, read_tree
from decodelab.experiments import run
from decodelab.experiments.cli import main
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.report.load import Run
from decodelab.experiments.report.log import Log
from decodelab.tests.experiments.bench import Bench, strict

WIDE = ["drafting=token_recycling", "drafting.tree=[4,2,2]", "task.max_new_tokens=24"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.hardware, "peaks", lambda *_: Peaks(1e10, 1e11))


def line(capsys: Any) -> str:
    (told,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("decodelab")]
    return told.removeprefix("decodelab: error: ")


def test_from_a_run_to_a_run(bench: Bench, private: Path, capsys: Any):
    """The best tree of so many nodes is written, with where it is from; the drafter that reads it drafts that tree."""
    assert bench.run(*WIDE, "timing=untimed") == 0
    steps = Log(Run(bench.folder, bench.result)).steps
    assert sum(step.accepted for step in steps) > 0
    capsys.readouterr()
    assert main(["tree", str(bench.folder), "output=trees/best.json", "nodes=5"]) == 0
    out = capsys.readouterr().out
    accept = measured(steps, cartesian([4, 2, 2]))
    best = read_tree("trees/best.json")
    assert best == optimal(accept, 5)
    written = json.loads(Path("trees/best.json").read_text())
    assert written["run"] == bench.result["key"]
    assert written["accept"] == [[round(rate, 4) for rate in rates] for rates in accept]
    assert (written["steps"], written["chosen"]) == (len(steps), "the best of 5 nodes")
    drafted = sum(step.depth > 0 for step in steps)
    assert written["drafted_steps"] == drafted < len(steps)
    share = drafted / len(steps)
    assert written["expected_tokens_per_step"] == pytest.approx(share * expected(accept, best) + 1 - share, abs=1e-4)
    assert f"{drafted} of {len(steps)} steps had a draft; the others emit one token" in out
    (note,) = written["notes"]
    assert note.startswith("this drafter learns from the rows that are verified: a smaller tree teaches it less")
    assert note in out
    assert "right at depth  rank 0  rank 1  rank 2  rank 3" in out
    assert [text.split()[0] for text in out.splitlines() if text.endswith("written")] == ["5"]
    assert "predicted" not in out
    tau = bench.result["strategy"]["tokens_per_step"]
    assert f"the run's own tree of {4 + 8 + 16} nodes: expected" in out
    assert f"measured {tau:.2f}" in out

    taken = ["drafting=token_recycling", "drafting.tree=trees/best.json", "timing=untimed", "output=again"]
    assert bench.run(*taken) == 0
    again = strict(Path("again/result.json").read_text())
    assert again["exactness"]["verdict"] == "exact"
    assert 0 < again["strategy"]["drafted_per_step"] <= 5
    assert main(["tree", "again", "output=second.json", "nodes=2"]) == 0  # a dense tree tells ranks, whatever its form


def test_the_size_follows_from_t_k(bench: Bench, private: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """Rows that are free but for the ninth: eight candidates. Rows that cost as much as a plain step each: none."""
    monkeypatch.setattr(
        cost, "measure_target", lambda target, context, **given: Profile(context, {1: 1.0, 9: 1.0, 10: 9.0})
    )
    monkeypatch.setattr(cost, "draft_cost", lambda *args, **options: cost.DraftCost(0.0, 0.0, 0.0))
    assert bench.run(*WIDE, "timing=untimed", "profile=true") == 0
    capsys.readouterr()
    assert main(["tree", str(bench.folder), "output=fast.json"]) == 0
    out = capsys.readouterr().out
    assert len(read_tree("fast.json")) == 8
    assert "predicted speedup" in out
    written = json.loads(Path("fast.json").read_text())
    assert written["chosen"] == "the fastest by T(k)"
    assert written["predicted_speedup"] == written["expected_tokens_per_step"]
    assert [note for note in written["notes"] if "T(k)" in note] == []
    dear = bench.result
    dear["profile"]["seconds"] = {"1": 1.0, "2": 0.9, "9": 3.0}
    dear["provenance"]["load_before"] = 1.2
    (bench.folder / "result.json").write_text(json.dumps(dear))
    capsys.readouterr()
    assert main(["tree", str(bench.folder), "output=noisy.json", "nodes=8"]) == 0
    noisy = json.loads(Path("noisy.json").read_text())
    share = noisy["drafted_steps"] / noisy["steps"]
    wait = share * Profile(0, {2: 0.9, 9: 3.0, 1: 1.0}).at(9) + 1 - share  # a step without a draft costs T(1)
    assert noisy["predicted_speedup"] == pytest.approx(noisy["expected_tokens_per_step"] / wait, abs=1e-3)
    doubt = "other programs used the cores while T(k) was measured and T(2) is only 0.90 of T(1): what is predicted"
    assert noisy["notes"][0].startswith(doubt)
    assert f"note: {doubt}" in capsys.readouterr().out
    dear["profile"]["seconds"] = {"1": 1.0, "2": 2.0, "64": 64.0}
    (bench.folder / "result.json").write_text(json.dumps(dear))
    assert main(["tree", str(bench.folder), "output=none.json"]) == 2
    assert (
        line(capsys) == "no tree pays at these costs, so none is written: drafting=none, or nodes=N for the best of N"
    )
    assert not Path("none.json").exists()


def test_what_cannot_be_measured_is_one_line(bench: Bench, private: Path, capsys: Any):
    assert bench.run("timing=untimed") == 0
    folder = str(bench.folder)
    capsys.readouterr()
    assert main(["tree", folder, "output=t.json", "nodes=3"]) == 2
    assert line(capsys).startswith(f"{folder}: PromptLookup filled no static tree; medusa, token_recycling")
    gap = ["drafting=token_recycling", "drafting.tree=[[0],[0,1]]", "timing=untimed", "output=gap"]
    assert bench.run(*gap) == 0
    capsys.readouterr()
    assert main(["tree", "gap", "output=t.json", "nodes=3"]) == 2
    assert line(capsys).startswith("the tree of gap leaves out likelier ranks")
    assert bench.run(*WIDE, "timing=untimed", "output=wide") == 0
    capsys.readouterr()
    assert main(["tree", "wide", "output=t.json"]) == 2
    assert line(capsys) == "wide measured no T(k), so no size is the fastest: nodes=N, or run with profile=true"
    events = [strict(text) for text in Path("wide/events.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in row.items() if key not in ("ranks", "offered")} for row in events]
    Path("wide/events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    assert main(["tree", "wide", "output=t.json", "nodes=3"]) == 2
    assert line(capsys) == "the events of wide tell no ranks, as those of an earlier version: run it again"
    Path("wide/events.jsonl").write_text("")
    assert main(["tree", "wide", "output=t.json", "nodes=3"]) == 2
    assert line(capsys).startswith("wide/events.jsonl is not there or holds no step: run again")
    assert not Path("t.json").exists()
    assert main(["tree", ".", "output=t.json"]) == 2
    runs = ", ".join(sorted(("gap", "wide", str(bench.folder.relative_to(Path.cwd())))))
    assert line(capsys) == f". is not a run, but holds 3; name one of them: {runs}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "b", "output=x"], "tree takes the folder of one run, got 2"),
        (["output=x"], "tree takes the folder of one run, got 0"),
        (["a"], "tree needs a file to write: output=FILE.json"),
        (["a", "output=x", "nodes=0"], "nodes=0: a whole number of at least 1"),
        (["a", "output=x", "nodes=few"], "nodes=few: a whole number of at least 1"),
        (["a", "output=x", "depth=3"], "depth= is unknown: tree takes output=FILE and nodes=N"),
        (["a", "output=x"], "a holds no result.json; name the folder of a run"),
        (["a", "output=there"], "output=there is there already; name another file or delete that one"),
    ],
)
def test_words(words: list[str], told: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("there").touch()
    assert main(["tree", *words]) == 2
    assert line(capsys).startswith(told)
    assert main(["tree", "--help"]) == 0
    assert "decodelab tree RUN output=FILE [nodes=N]" in capsys.readouterr().out
