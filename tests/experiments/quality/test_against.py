"""Quality against a reference run: pairs, verdicts at their borders, flips, and what is refused."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from math import comb, exp, expm1, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from decodelab.errors import UserError
from decodelab.experiments.format import folded
from decodelab.experiments.quality.against import compare, compare_kept, flips, overall
from decodelab.experiments.quality.comparable import refuse
from decodelab.experiments.quality.run_quality import RunQuality, read_quality
from decodelab.experiments.statistics import detectable_flips, detectable_mean, mcnemar, mean_interval, score_interval
from decodelab.experiments.table import comparison

SETTINGS = {
    "shots": 0, "chat": False, "template": None, "system": None, "batch": 1, "max_new_tokens": 32, "stop": ["\n"],
    "scorer": "exact_match", "limit": None, "thinking": None, "repeats": 1,
}  # fmt: skip
GREEDY = {"_target_": "decodelab.decoding.acceptance.Greedy", "repetition_penalty": 1.0}
SAMPLING = {"_target_": "decodelab.decoding.acceptance.Sampling", "repetition_penalty": 1.0, "temperature": 0.7}
Scores = Sequence[float | None] | Sequence[Sequence[float]]


def task(name: str, scores: Scores, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What result.json and quality.jsonl say of a task whose item i scored `scores[i]` (a list: one a repeat)."""
    main = more.pop("main", "acc")
    rows = more.pop("rows", {})
    repeats = [score if isinstance(score, Sequence) else [score] for score in scores]
    about = {
        "kind": "generate", "measures": "decoding", "main": main, "higher_is_better": True, "n": len(scores),
        "repeats": len(repeats[0]) if repeats else 1, "digest": "d", "truncated": 0.0, "metrics": {},
        "settings": SETTINGS | {"repeats": len(repeats[0]) if repeats else 1} | more.pop("settings", {}), **more,
    }  # fmt: skip
    lines = [
        {
            "task": name, "id": i, "repeat": repeat, "category": None, "doc_hash": f"doc {i}",
            "prompt_hash": f"prompt {i}", "prompt": f"what is {i}?", "gold": str(i), "response": f"{i}: {score}",
            "scored": "", "scores": {main: score}, "truncated": False, "tokens": 3, "weights": {},
            **{key: column[i] for key, column in rows.items()},
        }
        for i, item in enumerate(repeats)
        for repeat, score in enumerate(item)
    ]  # fmt: skip
    return about, lines


def run(**tasks: Any) -> RunQuality:
    """A run in memory of tasks by name: scores, or what `task` made."""
    made = {name: found if isinstance(found, tuple) else task(name, found) for name, found in tasks.items()}
    return RunQuality(
        Path("runs/here"),
        "key",
        {"tasks": {name: about for name, (about, _) in made.items()}, "backend": "ours", "interrupted": False},
        {"acceptance": GREEDY, "seed": 0, "quality": {}},
        {"weights": "w", "draft": None},
        {"version": "0"},
        [row for _, rows in made.values() for row in rows],
    )


def flipped(n: int, lost: int, gained: int) -> tuple[list[int], list[int]]:
    """Scores of this run and of the reference."""
    here = [0] * lost + [1] * gained + [1] * (n - lost - gained)
    there = [1] * lost + [0] * gained + [1] * (n - lost - gained)
    return here, there


def against(here: Any, there: Any, epsilon: float = 0.02, **more: Any) -> dict[str, Any]:
    """Of one task, its comparison."""
    mine, reference = (run(t=task("t", scores, **more)) for scores in (here, there))
    return compare(mine, reference, epsilon=epsilon)["tasks"]["t"]


def main(found: Mapping[str, Any]) -> dict[str, Any]:
    return found["metrics"][found["main"]]


def saved(folder: Path, found: RunQuality) -> Path:
    folder.mkdir()
    keys = ("key", "quality", "config", "digests", "provenance")
    result = {"schema": 1, "status": "done", **{key: getattr(found, key) for key in keys}}
    result["speedup"] = dict.fromkeys(("value", "low", "high", "n"))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "quality.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found.rows))
    return folder


# Numbers


def test_a_comparison_of_zeros_and_ones():
    found = main(against(*flipped(100, lost=9, gained=2)))
    interval, bounds = score_interval(9, 2, 100), score_interval(9, 2, 100, 0.90)
    assert found["effect"] == "difference"
    assert (found["value"], found["low"], found["high"], found["n"]) == (-0.07, interval.low, interval.high, 100)
    assert found["bounds"] == [bounds.low, bounds.high]
    assert (found["mine"], found["reference"]) == (0.91, 0.98)
    assert (found["n01"], found["n10"], found["changed"]) == (2, 9, 11)
    assert (found["test"], found["p"]) == ("McNemar", mcnemar(9, 2))
    assert found["detectable"] == detectable_flips(100, 11)


def test_pairs_find_what_means_alone_do_not():
    # lm-eval#3831, lm-eval#3868: unpaired p = 0.080, and the same items paired 0.008
    found = against(*flipped(220, lost=12, gained=30))
    assert round(main(found)["p"], 3) == 0.008
    assert found["verdict"] == "better"


def test_a_comparison_of_fractions_is_a_paired_bootstrap():
    rng = np.random.default_rng(0)
    there = rng.uniform(0, 1, 40)
    here = np.clip(there - 0.1 + rng.normal(0, 0.05, 40), 0, 1)
    found = main(against(here.tolist(), there.tolist(), main="f1"))
    want = mean_interval(here - there)
    assert (found["value"], found["low"], found["high"]) == pytest.approx((want.value, want.low, want.high))
    assert found["high"] - found["low"] < 0.05  # unpaired: 0.26
    assert (found["n01"], found["n10"], found["test"]) == (None, None, "sign flip")
    assert found["p"] < 0.001
    assert found["detectable"] < 0.03


def test_repeats_are_averaged_within_the_item_first():
    here, there = [[0, 1]] * 3 + [[1, 1]] * 5, [[1, 1]] * 8
    found = main(against(here, there))
    assert (found["n"], found["value"], found["n10"]) == (8, pytest.approx(-3 / 16), None)
    assert found["p"] == pytest.approx(2 / 2**3)  # 3 items changed, not 3 of 16 answers


def test_items_are_paired_by_their_documents_and_not_by_their_place():
    here, there = flipped(20, lost=3, gained=1)
    mine, reference = run(t=here), run(t=there)
    shuffled = replace(mine, rows=[mine.rows[i] for i in np.random.default_rng(0).permutation(20)])
    assert compare(shuffled, reference, epsilon=0.02)["tasks"] == compare(mine, reference, epsilon=0.02)["tasks"]


def test_equal_documents_are_paired_one_by_one():
    twice = {"doc_hash": ["same"] * 6}
    found = main(against([0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], rows=twice))
    assert (found["n"], found["n10"]) == (6, 2)


def test_items_of_one_run_alone_are_counted_and_left_out():
    mine, reference = run(t=[1] * 9), run(t=[0] * 6)
    found = compare(mine, reference, epsilon=0.02)["tasks"]["t"]
    assert (found["n"], found["unpaired"]) == (6, {"mine": 3, "reference": 0})


def test_perplexities_are_compared_as_a_ratio_of_whole_texts():
    words, there, growth = [10, 100, 30, 5, 50, 8], [20.0, 8.0, 12.0, 90.0, 5.0, 31.0], [1.1, 1.02, 1.05, 1.3, 1.0, 1.2]
    more = {"kind": "perplexity", "main": "word_perplexity", "higher_is_better": False, "measures": "model only"}
    more["rows"] = {"weights": [{"word_perplexity": n} for n in words]}
    found = main(against([a * b for a, b in zip(there, growth, strict=True)], there, **more))
    whole = exp(sum(n * log(x) for n, x in zip(words, there, strict=True)) / sum(words))
    ratio = exp(sum(n * log(x) for n, x in zip(words, growth, strict=True)) / sum(words))
    assert found["effect"] == "ratio"
    assert (found["reference"], found["mine"], found["value"]) == pytest.approx((whole, whole * ratio, ratio))
    assert 1.0 < found["low"] < ratio < found["high"] < 1.3
    assert found["p"] == pytest.approx(2 / 2**5)  # five texts, all worse
    # on the logarithms, as a ratio of sums varies, and told as a relative difference
    logs, weights = np.log(growth), np.array(words)
    assert found["detectable"] == pytest.approx(
        expm1(detectable_mean(weights * (logs - log(ratio)) / weights.mean()) or 0.0)
    )


def test_metrics_of_items_are_all_compared_and_those_of_a_corpus_are_not():
    about, rows = task("t", [1, 0, 1, 1, 0, 1])
    for row in rows:
        row["scores"] |= {"f1": 0.5, "torn": None}
    about["metrics"] = {"bleu": {}}
    found = compare(run(t=(about, rows)), run(t=(about, rows)), epsilon=0.02)["tasks"]["t"]
    assert list(found["metrics"]) == ["acc", "f1"]


def test_categories_have_their_own_difference():
    names = ["sums"] * 12 + ["dates"] * 8 + [None] * 2
    here = [1] * 12 + [0] * 8 + [0, 0]
    found = against(here, [1] * 22, rows={"category": names})["by_category"]
    assert {name: (row["value"], row["n"]) for name, row in found.items()} == {"sums": (0, 12), "dates": (-1, 8)}
    assert found["dates"]["high"] < 0 < found["sums"]["high"]
    assert against([1] * 6, [1] * 6)["by_category"] == {}


def test_the_mean_of_all_tasks():
    worse, same, wrong = flipped(40, lost=12, gained=0), flipped(200, lost=0, gained=0), flipped(40, lost=0, gained=8)
    texts = {"kind": "perplexity", "main": "byte_perplexity", "higher_is_better": False}
    errors = {"main": "errors", "higher_is_better": False}
    runs = [
        run(a=worse[i], b=same[i], c=task("c", wrong[i], **errors), text=task("text", [2.0 + i] * 9, **texts))
        for i in (0, 1)
    ]
    found = compare(*runs, epsilon=0.02)
    combined = found["combined"]
    assert combined["tasks"] == ["a", "b", "c"]
    assert combined["value"] == pytest.approx(-(12 / 40 + 8 / 40) / 3)  # not -20/280
    assert combined["low"] < -0.2 < -0.15 < combined["high"] < 0
    assert combined["p"] < 0.001
    assert combined["verdict"] == "worse"
    assert found["tasks"]["text"]["verdict"] == "better"
    assert compare(run(a=[1] * 9), run(a=[1] * 9), epsilon=0.02)["combined"] is None


def test_the_mean_of_tasks_in_which_nothing_changed_is_as_sure_as_its_smallest_task():
    tasks = {"a": [1] * 60, "b": [1] * 200}
    combined = compare(run(**tasks), run(**tasks), epsilon=0.02)["combined"]
    low = score_interval(0, 0, 60).low
    assert (combined["low"], combined["value"], combined["high"]) == pytest.approx((low / 2, 0, -low / 2))
    assert combined["verdict"] == "undecided"
    assert compare(run(**tasks), run(**tasks), epsilon=0.03)["combined"]["verdict"] == "equivalent"


def test_an_error_rate_that_falls_is_better():
    falling = {"main": "errors", "higher_is_better": False}
    assert against(*flipped(100, lost=20, gained=1), **falling)["verdict"] == "better"
    assert against(*flipped(100, lost=20, gained=1))["verdict"] == "worse"


def test_p_is_corrected_for_the_number_of_tasks_and_their_mean():
    here, there = flipped(60, lost=7, gained=0)
    alone = compare(run(a=here), run(a=there), epsilon=0.02)["tasks"]["a"]
    assert (alone["p_holm"], alone["verdict"]) == (2 / 2**7, "worse")
    others = {name: [1] * 60 for name in "bcde"}
    among = compare(run(a=here, **others), run(a=there, **others), epsilon=0.02)["tasks"]["a"]
    assert (among["p_holm"], among["verdict"]) == (pytest.approx(6 * 2 / 2**7), "undecided")


# Verdicts


@pytest.mark.parametrize(
    ("n", "lost", "gained", "epsilon", "verdict"),
    [
        (400, 40, 5, 0.02, "worse"),
        (400, 5, 40, 0.02, "better"),
        (400, 0, 0, 0.02, "equivalent"),
        (400, 20, 18, 0.02, "undecided"),
        (8, 1, 0, 0.02, "undecided"),
        (4, 4, 0, 0.02, "undecided"),  # no interval under five
        (3000, 20, 4, 0.02, "equivalent"),  # a real difference (p = 0.0015), smaller than ε
        (100, 5, 0, 0.02, "undecided"),  # five flips one way: the interval lies below 0, p is 0.06
        (100, 0, 5, 0.02, "undecided"),
    ],
)
def test_verdicts(n, lost, gained, epsilon, verdict):
    assert against(*flipped(n, lost, gained), epsilon)["verdict"] == verdict


def test_five_flips_one_way_are_no_proof():
    found = main(against(*flipped(100, lost=5, gained=0)))
    assert found["high"] < 0
    assert found["p"] > 0.05


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (6, 6), (9, 3)])
def test_equivalence_ends_where_the_90_percent_interval_reaches_epsilon(lost, gained):
    scores = flipped(500, lost, gained)
    reach = max(abs(bound) for bound in main(against(*scores))["bounds"])
    assert against(*scores, epsilon=reach)["verdict"] == "undecided"
    assert against(*scores, epsilon=reach * (1 + 1e-9))["verdict"] == "equivalent"


def test_few_items_without_a_flip_prove_nothing():
    # z²/(n + z²) < 0.02 from 133 items on
    assert against([1] * 132, [1] * 132)["verdict"] == "undecided"
    assert against([1] * 133, [1] * 133)["verdict"] == "equivalent"
    halves = [0.5] * 132
    unchanged = against(halves, halves)
    assert unchanged["verdict"] == "undecided"
    assert main(unchanged)["low"] < 0 < main(unchanged)["high"]
    assert main(unchanged)["detectable"] == main(against([1] * 132, [1] * 132))["detectable"]
    assert against([*halves, 0.5], [*halves, 0.5])["verdict"] == "equivalent"
    assert against([*halves[1:], 0.49], halves)["verdict"] == "undecided"  # the bootstrap's own interval is tiny


def test_scores_on_another_scale_widen_with_it():
    hundreds = [50.0] * 200
    assert against(hundreds, hundreds)["verdict"] == "undecided"
    assert against(hundreds, hundreds, epsilon=0.9)["verdict"] == "equivalent"


@pytest.mark.parametrize(
    ("growth", "verdict"), [(1.0, "equivalent"), (1.01, "equivalent"), (1.1, "worse"), (0.9, "better")]
)
def test_perplexities_within_epsilon(growth, verdict):
    rng = np.random.default_rng(0)
    there = rng.uniform(5, 30, 60)
    here = there * growth * rng.lognormal(0, 0.01, 60)
    more = {"kind": "perplexity", "main": "word_perplexity", "higher_is_better": False}
    assert against(here.tolist(), there.tolist(), **more)["verdict"] == verdict


@pytest.mark.parametrize("kind", ["zeros and ones", "fractions", "perplexity"])
def test_the_reference_finds_the_mirror_image(kind):
    rng, more, mirrored = np.random.default_rng(1), {}, {"worse": "better", "undecided": "undecided"}
    if kind == "zeros and ones":
        here, there = flipped(80, lost=15, gained=3)
    else:
        there = rng.uniform(0.5, 0.9, 80).tolist()
        here = [x - 0.05 + d for x, d in zip(there, rng.normal(0, 0.1, 80), strict=True)]
    if kind == "perplexity":
        more = {"kind": "perplexity", "main": "word_perplexity", "higher_is_better": True}
    found, other = against(here, there, **more), against(there, here, **more)
    assert other["verdict"] == mirrored[found["verdict"]]
    assert main(other)["p"] == pytest.approx(main(found)["p"], abs=0.01)
    transform = (lambda x: 1 / x) if kind == "perplexity" else (lambda x: -x)
    assert main(other)["low"] == pytest.approx(transform(main(found)["high"]), abs=0.01)


@pytest.mark.parametrize("shared", [0.0, 0.02, 0.1])
def test_what_differs_by_epsilon_is_seldom_called_equivalent(shared):
    # by enumeration of all outcomes of 60 pairs whose true difference is -ε; at most 0.07 for any n and ε tried
    n, epsilon, called = 60, 0.1, 0.0
    lost, gained = shared + epsilon, shared
    for b in range(25):
        for c in range(25):
            chance = comb(n, b) * comb(n - b, c) * lost**b * gained**c * (1 - lost - gained) ** (n - b - c)
            if chance > 1e-5:
                bounds = score_interval(b, c, n, 0.90)
                called += chance * (-epsilon < bounds.low and bounds.high < epsilon)
    assert called < 0.06


def test_equal_fractions_are_seldom_called_worse():
    rng, trials = np.random.default_rng(2), 60
    verdicts = []
    for _ in range(trials):
        there = rng.uniform(0, 1, 20)
        here = there + rng.normal(0, 0.1, 20)
        verdicts.append(against(here.tolist(), there.tolist(), main="f1")["verdict"])
    assert verdicts.count("worse") + verdicts.count("better") <= 6
    assert verdicts.count("equivalent") == 0  # 20 items cannot tell, at 0.02


def test_epsilon_is_above_zero():
    with pytest.raises(UserError, match=r"epsilon=0\.0: a difference above 0 that does not matter, such as 0\.02"):
        compare(run(t=[1]), run(t=[1]), epsilon=0.0)


# Flips


def test_flips_hold_what_changed_worst_first(tmp_path):
    f1 = task("f1", [0.5, 0.2, 0.9, 0.4, 0.4], main="f1")
    mine = saved(tmp_path / "mine", run(t=[1, 0, 1, 1, 0], f1=f1))
    reference = saved(
        tmp_path / "reference", run(t=[1, 1, 0, 1, 0], f1=task("f1", [0.5, 0.5, 0.8, 0.4, 0.4], main="f1"))
    )
    compare_kept(mine, reference, epsilon=0.02)
    found = [json.loads(line) for line in (mine / "flips.jsonl").read_text().splitlines()]
    assert [(row["task"], row["id"], round(row["gain"], 6)) for row in found] == [
        ("t", 1, -1.0), ("f1", 1, -0.3), ("f1", 2, 0.1), ("t", 2, 1.0)
    ]  # fmt: skip
    assert found[0] == {
        "task": "t", "id": 1, "category": None, "prompt": "what is 1?", "gold": "1", "choices": None,
        "metric": "acc", "gain": -1.0,
        "mine": {"score": 0.0, "responses": ["1: 0"], "truncated": [False]},
        "reference": {"score": 1.0, "responses": ["1: 1"], "truncated": [False]},
    }  # fmt: skip
    assert not (reference / "flips.jsonl").exists()
    assert sorted(path.name for path in mine.iterdir()) == ["flips.jsonl", "quality.jsonl", "result.json"]


def test_a_run_that_is_over_is_compared_as_if_it_had_been_asked_to(tmp_path):
    mine, reference = run(t=[1, 0, 1, 1, 0]), run(t=[1, 1, 0, 1, 0])
    folder, other = saved(tmp_path / "mine", mine), saved(tmp_path / "reference", reference)
    before = json.loads((folder / "result.json").read_text())
    compare_kept(folder, other, epsilon=0.1)
    after = json.loads((folder / "result.json").read_text())
    want = compare(replace(mine, folder=folder), replace(reference, folder=other), epsilon=0.1)
    assert after.pop("quality") == before.pop("quality") | {"against": json.loads(json.dumps(want))}
    assert after == before
    assert (folder / "flips.jsonl").read_text().count("\n") == 2


def test_a_run_that_is_over_and_may_not_be_compared_stays_as_it_is(tmp_path):
    folder, other = (
        saved(tmp_path / "mine", run(t=[1])),
        saved(tmp_path / "reference", run(t=task("t", [0], digest="e"))),
    )
    before = (folder / "result.json").read_text()
    with pytest.raises(UserError, match=r"not comparable with .*quality\.allow=\[task\]"):
        compare_kept(folder, other, epsilon=0.02)
    assert (folder / "result.json").read_text() == before
    assert not (folder / "flips.jsonl").exists()
    compare_kept(folder, other, epsilon=0.02, allow=["task"])
    assert json.loads((folder / "result.json").read_text())["quality"]["against"]["allowed"][0]["key"] == "task"


def test_flips_of_texts_and_of_errors_know_what_is_worse():
    texts = {"kind": "perplexity", "main": "word_perplexity", "higher_is_better": False}
    found = flips(run(t=task("t", [8.0, 2.0, 3.0], **texts)), run(t=task("t", [4.0, 4.0, 3.0], **texts)))
    assert [(row["id"], row["gain"]) for row in found] == [(0, pytest.approx(-log(2))), (1, pytest.approx(log(2)))]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    mine = saved(tmp_path / "mine", run(t=[1] * 5))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decodelab.experiments.quality.against.write_atomic", full)
    with pytest.raises(UserError, match=r"cannot be written into .*mine \(No space left on device\)"):
        compare_kept(mine, mine, epsilon=0.02)


# Runs that do not compare


def changed(found: RunQuality, key: str, value: Any) -> RunQuality:
    """The run with one setting changed, of its task or of the run."""
    if key == "backend":
        return replace(found, quality={**found.quality, "backend": value})
    if key in ("acceptance", "seed"):
        return replace(found, config={**found.config, key: value})
    about = dict(found.quality["tasks"]["t"])
    if key in about["settings"]:
        about = {**about, "settings": {**about["settings"], key: value}}
    else:
        about[key] = value
    return replace(found, quality={**found.quality, "tasks": {"t": about}})


@pytest.mark.parametrize(
    ("setting", "value", "told", "key"),
    [
        ("digest", "e", 'digest is "e" here, "d" there', "task"),
        ("scorer", "f1", 'scorer is "f1" here, "exact_match" there', "task"),
        ("chat", True, "chat is true here, false there", "template"),
        ("template", "abc", 'template is "abc" here, null there', "template"),
        ("system", "Be brief.", 'system is "Be brief." here, null there', "template"),
        ("shots", 5, "shots is 5 here, 0 there", "template"),
        ("batch", 16, "batch is 16 here, 1 there", "batch"),  # lm-eval#1645, lm-eval#2498
        ("backend", "another", 'backend is "another" here, "ours" there', "backend"),
        ("max_new_tokens", 64, "max_new_tokens is 64 here, 32 there", "counting"),
        ("stop", [], r'stop is \[\] here, \["\\n"\] there', "counting"),
        ("limit", 8, "limit is 8 here, null there", "counting"),
        ("repeats", 4, "repeats is 4 here, 1 there", "counting"),
        ("thinking", ["<a>", "</a>"], r'thinking is \["<a>", "</a>"\] here, null there', "counting"),
        ("acceptance", GREEDY | {"repetition_penalty": 2.0}, r'acceptance is "Greedy\(repetition_p', "acceptance"),
    ],
)  # fmt: skip
def test_runs_that_differ_are_refused_unless_told(setting, value, told, key):
    reference = run(t=[1, 0, 1, 1, 0])
    mine = changed(reference, setting, value)
    remedy = rf"run both alike, or accept it with quality\.allow=\[{key}\]"
    with pytest.raises(UserError, match=f"^not comparable with runs/here: {told}.*; {remedy}$"):
        compare(mine, reference, epsilon=0.02)
    (allowed,) = compare(mine, reference, epsilon=0.02, allow=[key])["allowed"]
    assert (allowed["key"], allowed["tasks"]) == (key, ("t",))
    assert allowed["what"] == setting
    if setting != "acceptance":
        assert allowed["mine"] == value


def test_greedy_against_sampled_is_refused_and_so_is_another_seed_of_sampled():
    greedy = run(t=[1, 0, 1, 1, 0])
    drawn = changed(greedy, "acceptance", SAMPLING)
    with pytest.raises(UserError, match=r'"Sampling\(temperature=0\.7\)" here, "Greedy" there.*allow=\[acceptance\]$'):
        compare(drawn, greedy, epsilon=0.02)
    with pytest.raises(UserError, match=r"seed is 1 here, 0 there.*allow=\[seed\]$"):
        compare(changed(drawn, "seed", 1), drawn, epsilon=0.02)
    assert compare(changed(greedy, "seed", 1), greedy, epsilon=0.02)["allowed"] == []


def test_what_plays_no_part_in_likelihoods_is_not_asked_of_them():
    choice = task("t", [1, 0, 1, 1, 0], kind="multiple_choice", measures="model only")
    found = run(t=choice)
    for key, value in (("max_new_tokens", 64), ("stop", []), ("acceptance", SAMPLING), ("thinking", ["a", "b"])):
        assert compare(changed(found, key, value), found, epsilon=0.02)["allowed"] == []
    with pytest.raises(UserError, match="batch is 2 here"):
        compare(changed(found, "batch", 2), found, epsilon=0.02)


def test_a_list_read_back_is_the_tuple_that_was_written():
    mine, reference = (run(t=task("t", [1] * 5, settings={"stop": stop})) for stop in (("a", "b"), ["a", "b"]))
    assert compare(mine, reference, epsilon=0.02)["allowed"] == []


def test_all_that_differs_is_said_at_once_with_the_tasks_that_it_is_of():
    runs = [run(a=[1] * 5, b=task("b", [1] * 5, settings=more), c=[1] * 5) for more in ({"shots": 1, "batch": 2}, {})]
    with pytest.raises(UserError, match=r"shots of b is 1 here, 0 there; batch of b is 2.*allow=\[template,batch\]$"):
        compare(*runs, epsilon=0.02)
    with pytest.raises(UserError, match=r"not comparable with runs/here: batch of b is .*allow=\[batch\]$"):
        compare(*runs, epsilon=0.02, allow=["template"])
    assert [d["tasks"] for d in compare(*runs, epsilon=0.02, allow=["template", "batch"])["allowed"]] == [("b",)] * 2


def test_long_values_are_shown_where_they_differ():
    prompts = ["You are a helpful assistant of the company. " * 9 + end for end in ("Be brief.", "Be kind.")]
    runs = [run(t=task("t", [1] * 5, settings={"system": prompt})) for prompt in prompts]
    with pytest.raises(UserError, match=r'system is …mpany\. Be brief\." here, …mpany\. Be kind\." there'):
        compare(*runs, epsilon=0.02)


def test_prompts_that_differ_are_refused_though_the_settings_agree():
    # another checkpoint's chat template, say
    hashes = {"prompt_hash": ["prompt 0", "else", "prompt 2", "else", "prompt 4"]}
    mine, reference = run(t=task("t", [1] * 5, rows=hashes)), run(t=[1] * 5)
    with pytest.raises(UserError, match=r'the prompt of 2 of 5 items is "else" here, "prompt 1" there.*=\[template\]$'):
        compare(mine, reference, epsilon=0.02)
    assert len(compare(mine, reference, epsilon=0.02, allow=["template"])["allowed"]) == 1


def test_what_is_compared_may_differ_and_is_listed():
    reference = run(t=[1] * 5)
    config = {**reference.config, "model": {"path": "a"}, "quantization": {"bits": 4}, "dtype": "float32", "threads": 2}
    mine = replace(reference, config=config, digests={"weights": "v", "draft": None}, provenance={"version": "1"})
    assert compare(mine, reference, epsilon=0.02)["differs_in"] == {
        "digests.weights": ["v", "w"],
        "dtype": ["float32", None],
        "model.path": ["a", None],
        "quantization.bits": [4, None],
        "version": ["1", "0"],
    }
    unknown = replace(mine, provenance={})
    assert "version" not in compare(unknown, reference, epsilon=0.02)["differs_in"]


def test_tasks_of_one_run_alone_are_named():
    found = compare(run(a=[1] * 5, b=[1] * 5), run(a=[1] * 5, c=[1] * 5), epsilon=0.02)
    assert (list(found["tasks"]), found["only_here"], found["only_there"]) == (["a"], ["b"], ["c"])
    with pytest.raises(UserError, match="no task in common, a here, c there"):
        compare(run(a=[1]), run(c=[1]), epsilon=0.02)


def test_no_item_in_common():
    here = task("t", [1] * 5, rows={"doc_hash": list("abcde")})
    with pytest.raises(UserError, match="no item of t is in both runs"):
        compare(run(t=here), run(t=[1] * 5), epsilon=0.02)


def test_what_may_be_allowed_is_a_closed_list():
    with pytest.raises(
        UserError, match=r"quality\.allow=batches is unknown: did you mean batch\? it takes task, templ"
    ):
        refuse(run(t=[1]), run(t=[1]), ["batches"])


def test_refusal_needs_no_items():
    mine = replace(run(t=task("t", [1], settings={"batch": 4})), rows=[])
    with pytest.raises(UserError, match="batch is 4 here, 1 there"):
        refuse(mine, run(t=[1]), [])


# Folders


def text(name: str, edit: Callable[[str], str]) -> Callable[[Path], Any]:
    """Damages a file of the folder."""
    return lambda folder: (folder / name).write_text(edit((folder / name).read_text()))


def result(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def apply(content: str) -> str:
        found = json.loads(content)
        edit(found)
        return json.dumps(found)

    return text("result.json", apply)


def rows(edit: Callable[[str], str]) -> Callable[[Path], Any]:
    return text("quality.jsonl", edit)


def first_score(score: str) -> Callable[[Path], Any]:
    return rows(lambda content: content.replace('{"acc": 1}', score, 1))


STALE = "is not as this version writes a run"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda folder: (folder / "result.json").unlink(),
            "holds no result.json; name the folder of a run with quality",
        ),
        (text("result.json", lambda content: content[:90]), "is not a whole result"),
        (text("result.json", lambda content: "[]"), "has schema None"),
        (result(lambda r: r.update(schema=0)), "has schema 0, and this version reads schema 1"),
        (result(lambda r: r.update(quality=None)), "is a run without quality; name the folder of a run with quality"),
        (result(lambda r: r["quality"].pop("backend")), rf"{STALE} \(KeyError\('backend'\)\)"),
        (
            result(lambda r: r["quality"]["tasks"]["t"].pop("main")),
            rf"{STALE} \(KeyError\('main'\)\)|is damaged: quality\.tasks\.t has no main",
        ),
        (result(lambda r: r["config"].pop("acceptance")), rf"{STALE} \(KeyError\('acceptance'\)\)"),
        (result(lambda r: r["quality"].update(tasks=3)), rf"{STALE}|is damaged: quality\.tasks is not an object"),
        (lambda folder: (folder / "quality.jsonl").unlink(), r"quality\.jsonl cannot be read \(No such file or dir"),
        (rows(lambda content: content[:-30]), r"quality\.jsonl is broken in line 5 of 5"),
        (rows(lambda content: content.replace("{", "\0", 1)), "is broken in line 1 of 5"),
        (rows(lambda content: "[" * 100_000), "is broken in line 1 of 1"),
        (rows(lambda content: "".join(content.splitlines(True)[:3])), "holds 3 of 5 items of t; run it again"),
        (rows(lambda content: content + content.splitlines(True)[2]), "holds 6 of 5 items of t"),
        (rows(lambda content: content.replace("doc_hash", "hash", 1)), "line 1 has no doc_hash"),
        (rows(lambda content: "3\n" + content), "line 1 is no object"),
        (first_score('{"acc": NaN}'), "acc of item 0 is nan, no number"),
        (first_score('{"acc": "1"}'), "acc of item 0 is 1, no number"),
        (first_score('{"acc": null}'), "acc of item 0 of t is None, which cannot be compared"),
        (first_score("{}"), "acc of item 0 of t is None, which cannot be compared"),
        (first_score("3"), STALE),
    ],
)
def test_a_folder_that_is_not_whole_is_one_line(tmp_path, damage, told):
    folder = saved(tmp_path / "run", run(t=[1, 0, 1, 1, 0]))
    read_quality(folder)
    damage(folder)
    with pytest.raises(UserError, match=told) as caught:
        read_quality(folder)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="nowhere holds no result"):
        compare_kept(tmp_path / "nowhere", tmp_path, epsilon=0.02)


def test_a_score_without_a_number_is_one_line_whichever_run_has_it():
    for here, there in (([1, None], [1, 1]), ([1, 1], [1, None])):
        with pytest.raises(UserError, match=r"acc of item 1 of t is None, which cannot be compared"):
            compare(run(t=here), run(t=there), epsilon=0.02)
    with pytest.raises(UserError, match=r"f1 of item 0 of t is None, which cannot be compared"):
        compare(run(t=task("t", [1], main="f1")), run(t=[1]), epsilon=0.02, allow=["task"])


def test_a_perplexity_of_nothing_is_refused(tmp_path):
    texts = {"kind": "perplexity", "main": "word_perplexity"}
    folder = saved(tmp_path / "run", run(t=task("t", [2.0, 0.0], **texts)))
    with pytest.raises(UserError, match=r"word_perplexity of item 1 of t is 0\.0, which cannot be compared"):
        read_quality(folder)


def test_what_is_found_is_plain_data(tmp_path):
    mine, reference = run(t=flipped(30, 4, 1)[0], u=[0.5] * 9), run(t=flipped(30, 4, 1)[1], u=[0.25] * 9)
    found = compare(
        read_quality(saved(tmp_path / "a", mine)), read_quality(saved(tmp_path / "b", reference)), epsilon=0.02
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["reference"] == {"folder": str(tmp_path / "b"), "key": "key"}
    assert found["epsilon"] == 0.02


# The table


def shown(found: Mapping[str, Any], width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(*comparison(found), sep="\n")
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_what_decided_is_said_in_words_with_its_bounds():
    few, errors = flipped(26, 4, 1), flipped(40, 0, 30)  # wrong answers, then errors that came
    runs = [
        run(arc=task("arc", few[i]), wer=task("wer", errors[i], higher_is_better=False), f1=task("f1", [0.5, 0.25]))
        for i in (0, 1)
    ]
    found = compare(*runs, epsilon=0.02)
    assert found["tasks"]["wer"]["verdict"] == "worse"
    verdict, words = overall(found, None)
    assert verdict == "worse"
    clear = "clearly worse in wer +0.750 [+0.597, +0.858]"
    assert words == f"Answers: 34 of 66 became wrong, 1 became right; f1 +0.000: {clear}."
    longer = [run(text=task("text", [base] * 40, main="f1")) for base in (0.5, 0.75)]
    longer = overall(compare(*longer, epsilon=0.02), None)
    assert longer == ("worse", "Scores: clearly worse in text −0.250 [−0.250, −0.250].")
    one, same = (
        compare(*(run(arc=task("arc", pair[i])) for i in (0, 1)), epsilon=0.02) for pair in (few, [[1] * 900] * 2)
    )
    about = {"reference": one["reference"], "tokens": 219, "agreement": {"value": 0.648}, "floor": {"kl": 5e-4}}
    kl = {"value": 0.31, "low": 0.25, "high": 0.39}
    answers = "Answers: 4 of 26 became wrong, 1 became right: too few to be sure."
    told = "35.2 % of 219 likeliest next tokens changed; KL 0.31 [0.25, 0.39], where 0.02 is allowed."
    assert overall(one, {**about, "kl": kl}) == ("worse", f"Word by word clearly different: {told} {answers}")
    for changed, judged in (({"high": 0.019, "low": 0.01}, "the same"), ({"low": 0.01}, "unclear")):
        assert f"{answers} Word by word {judged}: 35.2 % " in overall(one, {**about, "kl": kl | changed})[1]
    loud = overall(one, {**about, "kl": kl, "floor": {"kl": 0.5}})
    assert loud[0] == "undecided"
    assert loud[1].endswith("KL 0.31 [0.25, 0.39], where rounding alone makes 0.5.")
    assert overall(same, None) == (
        "equivalent", "Answers: 0 of 900 became wrong, 0 became right: the same within 0.02."
    )  # fmt: skip


def test_the_table():
    texts = {"kind": "perplexity", "main": "word_perplexity", "higher_is_better": False}
    grown = np.random.default_rng(0).uniform(1.1, 1.3, 20)
    runs = []
    for i in (0, 1):
        text = task("text", [12.0 * (1 if i else x) for x in grown], **texts)
        long = task("mmlu_high_school_statistics", [0.5 - 0.1 * i] * 8, main="f1")
        settings = {"batch": 1 + i}
        arc = task("arc", flipped(220, 30, 12)[i], settings=settings)
        runs.append(run(arc=arc, mmlu_high_school_statistics=long, text=text, **{"only": [1] * 5} if i else {}))
    runs[0] = replace(runs[0], digests={"weights": "other", "draft": None})
    lines = shown(compare(*runs, epsilon=0.02, allow=["batch"]))
    text = " ".join(lines)
    assert lines[0] == "against runs/here, which differs in digests.weights, batch"
    keys = [*(f"quantization.{i}" for i in range(4)), "model.path", *(f"drafting.{i}" for i in range(3))]
    assert folded(keys) == ["quantization", *keys[4:]]
    assert any(
        line.startswith("arc ") and "0.945  -0.082 [-0.141, -0.025]" in line and "+12 −30" in line for line in lines
    )
    assert any(line.startswith("arc ") and line.endswith("worse") for line in lines)
    assert any(line.startswith("mmlu_high_school_…") and line.endswith("better") for line in lines)
    assert any(
        line.startswith("text ") and "12.00" in line and "1.201× [1.169, 1.231]" in line and line.endswith("worse")
        for line in lines
    )
    assert any(line.startswith("mean of 2") and line.endswith("undecided") for line in lines)
    assert "note: batch differs in arc, as quality.allow=batch accepts" in text
    assert "note: only in the reference, so not compared: only" in text
    assert "items changed: 70 (flips.jsonl, worst first)" in text


def test_the_table_says_what_so_few_items_can_find():
    lines = shown(compare(run(a=[1] * 8, b=[1] * 3), run(a=[1] * 8, b=[0, 1, 1]), epsilon=0.02))
    assert "a: ε is 0.02; 8 items can show a difference of 0.80 or more (80 % power)" in lines
    assert "b: ε is 0.02; 3 items are too few to show any difference" in lines
    assert any("+0.333 (n=3)" in line for line in lines)
