"""Runs against earlier ones: who is paired with whom, and changes worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.report.changes import Comparison, compare
from decodelab.experiments.report.load import Run, find
from decodelab.experiments.report.rows import Value
from decodelab.experiments.report.tables import changes, slower
from decodelab.tests.experiments.report.made import quality, result, run, sample, write


def compared(after: list[Run], before: list[Run]) -> tuple[Comparison, list[tuple[str, str]]]:
    found = compare(after, before, "old", {r.folder: f"label {r.folder.name}" for r in after})
    return found, [(change.after.folder.name, change.before.folder.name) for change in found.changes]


# --- pairs


def test_runs_of_one_key_are_a_pair():
    found, pairs = compared(
        [run("a", key="1"), run("b", key="2"), run("c", key="3", config__seed=5)],
        [run("x", key="2"), run("y", key="1"), run("z", key="4")],
    )
    assert pairs == [("a", "y"), ("b", "x")]
    assert found.notes[1:] == (
        "1 of 3 runs have no partner: 1 differs in seed from the nearest of old",
        "1 of 3 runs of old have no partner: 1 agrees with more than one of these",
    )
    assert found.of(found.changes[0].after) is found.changes[0]
    assert found.of(run("a", key="1")) is None


def test_nothing_to_be_a_partner():
    """As where no cell of a sweep has a result yet."""
    assert compared([], [run("x")])[0].notes == ("1 of 1 runs of old have no partner: nothing else has a result",)


def test_a_configuration_that_has_grown_is_the_same_one():
    """Its key is another, since a later version of the code knows of a key that the earlier one did not."""
    grown = run("a", key="1", config__drafting__new_key=3, config__output="elsewhere")
    other = run("b", key="2", config__drafting__max_draft=4, config__drafting__new_key=3)
    found, pairs = compared([grown, other], [run("x", key="8"), run("y", key="9", config__drafting__max_draft=4)])
    assert pairs == [("a", "x"), ("b", "y")]
    assert "label a: paired by configuration, less what one version does not know" in found.notes


@pytest.mark.parametrize("change", [{"config__seed": 1}, {"digests__weights": "other"}, {"digests__task": "other"}])
def test_another_configuration_or_other_weights_are_no_pair(change: dict[str, Any]):
    _, pairs = compared([run("a", key="1"), run("b", key="2", **change)], [run("x", key="2"), run("y", key="3")])
    assert pairs[0] == ("b", "x")
    _, pairs = compared([run("a", key="1"), run("b", key="2", config__seed=9)], [run("y", key="3", **change)])
    assert pairs == []


def test_a_pair_by_configuration_is_the_only_one_possible():
    _, pairs = compared([run("a", key="1")], [run("x", key="2"), run("y", key="3")])
    assert pairs == []


def test_one_run_on_either_side_is_a_pair_and_its_differences_are_named():
    found, pairs = compared(
        [run("a", key="1", config__seed=5, provenance__device="other")], [run("x", key="2", digests__task="t")]
    )
    assert pairs == [("a", "x")]
    assert "the only run on either side; they differ in seed, digests.task, device" in found.notes


def test_what_has_no_partner_is_one_line_with_the_reason():
    """Also a word that two parts of the result have is said once."""
    after = [run(str(i), key=str(i), config__drafting__max_draft=i) for i in range(6)]
    longer = {"config__task__max_new_tokens": 64}
    before = [run(f"old{i}", key=f"old{i}", config__drafting__max_draft=i, **longer) for i in range(5)]
    found, pairs = compared(after, before)
    assert pairs == []
    assert found.notes == (
        "6 of 6 runs have no partner: 5 differ in task.max_new_tokens from the nearest of old; 1 differs in "
        "drafting.max_draft, task.max_new_tokens from the nearest of old",
        "5 of 5 runs of old have no partner: 5 differ in task.max_new_tokens from the nearest of these",
    )
    found, _ = compared([run("a", key="1", config__dtype="a", provenance__dtype="a")], [run("x", config__dtype="b")])
    assert "the only run on either side; they differ in dtype" in found.notes


def test_of_runs_with_one_key_the_latest_counts():
    times = {"a": "2026-01-01", "b": "2026-01-03", "c": "2026-01-02"}
    found, pairs = compared(
        [run(name, key="1", provenance__started_at=t) for name, t in times.items()], [run("x", key="1")]
    )
    assert pairs == [("b", "x")]
    assert {"a: a later run of the same key counts", "c: a later run of the same key counts"} <= set(found.notes)


# --- time


def plain(value: Value) -> tuple[Any, ...]:
    """Rounded, for comparisons with numbers worked out by hand."""
    return tuple(round(v, 9) if isinstance(v, float) else v for v in (value.value, value.low, value.high, value.n))


def pair(tmp_path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Any:
    write(tmp_path / "old", result(), old)
    write(tmp_path / "new", result(), new)
    (change,) = compare(find([tmp_path / "new"]).runs, find([tmp_path / "old"]).runs, "old", {}).changes
    return change


def test_the_change_is_a_ratio_of_sums_over_the_prompts_of_both(tmp_path: Path):
    """Ten tokens a prompt: 2, 1, 1 s before and 1, 1, 4 s now, so 6 / 30 against 4 / 30; what one run has alone is
    out."""
    old = [sample(n, 2.0, s, batch=i) for i, (n, s) in enumerate([("a", 2.0), ("b", 1.0), ("c", 1.0), ("z", 50.0)])]
    new = [sample(n, 2.0, s, batch=i) for i, (n, s) in enumerate([("y", 70.0), ("c", 4.0), ("b", 1.0), ("a", 1.0)])]
    change = pair(tmp_path, old, new)
    assert plain(change.time) == (0.5, None, None, 3)
    assert plain(change.baseline) == (0.0, None, None, 3)
    assert (change.identical, change.shared) == (3, 3)


def test_an_interval_over_prompts(tmp_path: Path):
    """Each prompt takes a quarter longer: the interval has no width. The baseline's has, and holds its value."""
    spent = [1.0, 2.0, 3.0, 1.5, 2.5, 0.5]
    old = [sample(str(i), s, s, batch=i) for i, s in enumerate(spent)]
    new = [sample(str(i), s * (1 + 0.1 * (i % 3)), 1.25 * s, batch=i) for i, s in enumerate(spent)]
    change = pair(tmp_path, old, new)
    assert [change.time.value, change.time.low, change.time.high] == pytest.approx([0.25] * 3)
    assert change.time.n == 6
    ratio = sum(s * (1 + 0.1 * (i % 3)) for i, s in enumerate(spent)) / sum(spent)
    assert change.baseline.value == pytest.approx(ratio - 1)
    assert 0 <= change.baseline.low < change.baseline.value < change.baseline.high <= 0.2
    assert slower(change.time) == "25.0 % slower [25.0, 25.0]"


def test_tokens_that_differ_count_each_for_its_run(tmp_path: Path):
    """20 tokens in 2 s against 10 in 2 s: half as fast, and another output."""
    change = pair(tmp_path, [sample("a", 1.0, 2.0, tokens=21)], [sample("a", 1.0, 2.0, tokens=11)])
    assert plain(change.time) == (1.0, None, None, 1)
    assert (change.identical, change.shared) == (0, 1)


def test_a_batch_takes_as_long_as_its_slowest(tmp_path: Path):
    """Pairs are batches of the same prompts: b, c ran together, 4 s for 20 tokens before and 3 s now."""
    old = [sample("a", 1.0, 1.0), sample("b", 1.0, 4.0, batch=1), sample("c", 1.0, 1.0, batch=1)]
    new = [sample("a", 1.0, 1.0), sample("b", 1.0, 2.0, batch=1), sample("c", 1.0, 3.0, batch=1)]
    assert plain(pair(tmp_path, old, new).time) == (-0.2, None, None, 2)


def test_what_was_not_timed_or_decoded_has_no_change(tmp_path: Path):
    untimed = sample("a", 1.0, 1.0)
    untimed["strategy"] |= {"latency_s": None, "ttft_s": None}
    change = pair(tmp_path, [untimed, sample("b", 1.0, 1.0, tokens=1, batch=1)], [sample("a", 1.0, 1.0)])
    assert change.time == Value(n=0)
    assert change.shared == 1
    assert slower(change.time) == "–"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Value(0.02, -0.01, 0.05, 9), "2.0 % slower [−1.0, 5.0]"),
        (Value(-0.03, -0.07, 0.012, 9), "3.0 % faster [−1.2, 7.0]"),
        (Value(-0.5, None, None, 3), "50.0 % faster (n=3)"),
        (Value(0.0, 0.0, 0.0, 9), "the same"),
    ],
)
def test_changes_in_words(change: Value, words: str):
    assert slower(change) == words


# --- quality


def scored(folder: Path, scores: list[int], **changes: Any) -> Path:
    about = quality(gsm=sum(scores) / len(scores), n=len(scores))
    write(folder, result(quality=about, **changes))
    rows = [
        {"task": "gsm", "id": i, "repeat": 0, "category": None, "doc_hash": str(i), "prompt_hash": str(i), "prompt": "",
         "gold": "", "response": "", "scored": "", "scores": {"acc": score}, "truncated": False, "tokens": 1}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    (folder / "quality.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_quality_is_compared_item_by_item(tmp_path: Path):
    """Of 10 items 3 were lost and 1 gained: 0.2 less, and McNemar's exact p is 2 (C(4, 0) + C(4, 1)) / 2⁴ = 0.625."""
    scored(tmp_path / "old", [1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    scored(tmp_path / "new", [0, 0, 0, 1, 1, 1, 1, 0, 0, 0])
    found = compare(find([tmp_path / "new"]).runs, find([tmp_path / "old"]).runs, "old", {})
    _, (titles, (line,)) = changes(found)
    said = dict(zip(titles, line, strict=True))
    assert said["task"] == "gsm acc"
    assert said["score"] == "0.600 → 0.400"
    assert said["difference [95 %]"].startswith("−0.200 [−0.")
    assert (said["p"], said["better / worse"], said["verdict"]) == ("0.625", "1 / 3 of 10", "undecided")


def test_what_the_run_may_differ_in_it_may_differ_in_here_and_its_flips_stay_its_own(tmp_path: Path):
    asked = {"seed": 0, "quality": {"epsilon": 0.02, "allow": []}, "acceptance": {"_target_": "x.Greedy"}}
    scored(tmp_path / "old", [1, 0], config=asked, quality__tasks__gsm__settings__batch=4)
    for name, allow in (("strict", []), ("allowing", ["batch"])):
        scored(tmp_path / name, [1, 1], config=asked | {"quality": {"epsilon": 0.02, "allow": allow}})
        (tmp_path / name / "flips.jsonl").write_text("of its own reference\n")
        found = compare(find([tmp_path / name]).runs, find([tmp_path / "old"]).runs, "old", {})
        assert (found.changes[0].quality is None) == (name == "strict")
        assert any("batch is 1 here, 4 there" in note for note in found.notes) == (name == "strict")
        assert (tmp_path / name / "flips.jsonl").read_text() == "of its own reference\n"


def test_quality_that_may_not_be_compared_is_a_note(tmp_path: Path):
    scored(tmp_path / "old", [1, 0])
    scored(tmp_path / "new", [1, 0])
    (tmp_path / "old" / "quality.jsonl").unlink()
    found = compare(find([tmp_path / "new"]).runs, find([tmp_path / "old"]).runs, "old", {})
    assert found.changes[0].quality is None
    assert any(note.startswith("new, quality: ") and "quality.jsonl cannot be read" in note for note in found.notes)
