"""Which rows stand together, what they are called, who is first, and who is dominated."""

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from decodelab.experiments.report.load import Run
from decodelab.experiments.report.rows import FAITHFUL, Group, Row, dominates, front, grouped, labelled
from decodelab.tests.experiments.report.made import GREEDY, LOOKUP, quality, result, run

SAMPLING = {"_target_": "decodelab.decoding.acceptance.Sampling", "temperature": 0.7}
TYPICAL = {"_target_": "decodelab.decoding.acceptance.Typical", "temperature": 0.7, "epsilon": 0.1}


def group(*runs: Any) -> Group:
    (found,) = grouped(runs)
    return found


# --- groups


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("provenance__device", "another"),
        ("provenance__dtype", "bfloat16"),
        ("digests__weights", "other"),
        ("digests__task", "other"),
        ("config__task__max_new_tokens", 64),
        ("config__task__chat", True),
        ("config__batch", 4),
    ],
)
def test_rows_of_another_condition_stand_apart(key: str, value: Any):
    groups = grouped([run("a"), run("b", **{key: value}), run("c")])
    assert [[row.run.folder.name for row in g.rows] for g in groups] == [["a", "c"], ["b"]]


@pytest.mark.parametrize("key", ["config__seed", "config__drafting__max_draft", "provenance__commit", "digests__draft"])
def test_rows_of_one_condition_stand_together(key: str):
    assert len(group(run("a"), run("b", **{key: "other"})).rows) == 2


def test_what_a_group_is_called():
    g = group(run())
    assert g.title == "tiny · float32 · demo"
    assert g.machine == "a laptop"
    assert g.shared == f"9 prompts · 32 tokens at most · weights {'a' * 8} · task {'b' * 8}"
    path = {"name": None, "path": "/models/Some-7B/", "adapter": "loras/mine"}
    task = {"path": "data/edits.jsonl", "max_new_tokens": 8}
    other = group(run(config__model=path, config__task=task, config__batch=4))
    assert other.title == "Some-7B + mine · float32 · edits"
    assert "4 at once" in other.shared
    made = {"kind": "awq", "settings": {"bits": 4, "group_size": 64}}
    assert group(run(provenance__quantised=made)).title == "tiny · awq 4 bits group 64 · float32 · demo"
    assert group(run(digests__task=None, prompts=0, quality=quality(gsm=0.5))).title == "tiny · float32 · quality alone"


def test_one_prompt_is_one_prompt():
    assert group(run(prompts=1)).shared.startswith("1 prompt · ")


def test_a_result_with_nothing_in_it_is_a_row():
    (row,) = group(Run(Path("x"), {"schema": 1})).rows
    assert (row.label, row.speed, row.verdict, row.status, row.scores) == ("?", None, None, "done", {})


# --- labels


def labels(*runs: Any) -> list[str]:
    """In the order given."""
    by_folder = {row.run.folder.name: row.label for row in group(*runs).rows}
    return [by_folder[r.folder.name] for r in runs]


def test_a_label_says_what_differs_and_nothing_else():
    reference = {"_target_": "decodelab.drafting.reference.Reference", "copy": 15}
    assert labels(
        run("a"),
        run("b", config__drafting__max_draft=4),
        run("c", config__drafting=reference),
        run("d", config__drafting__max_draft=4, config__acceptance=SAMPLING),
        run("e", config__seed=3),
    ) == [
        "prompt_lookup max_draft=15 seed=0",
        "prompt_lookup max_draft=4 seed=0",
        "reference seed=0",
        "prompt_lookup sampling max_draft=4 seed=0",
        "prompt_lookup max_draft=15 seed=3",
    ]
    assert labels(run("a")) == ["prompt_lookup"]


def test_values_in_labels_are_short():
    def with_drafter(name: str, **keys: Any) -> Any:
        return run(name, config__drafting={"_target_": LOOKUP, **keys})

    members = [{"_target_": LOOKUP}, {"_target_": "mylab.again.Again"}]
    assert labels(
        with_drafter("a", model={"path": "/models/Qwen-0.5B"}, members=members, rate=0.30000000000000004, on=True),
        with_drafter("b", model={"path": "/models/Qwen-1.5B"}, members=["reference"], rate=None, on=False),
    ) == [
        "prompt_lookup model.path=Qwen-0.5B members=prompt_lookup+again rate=0.3 on=true",
        "prompt_lookup model.path=Qwen-1.5B members=reference rate=null on=false",
    ]


def test_a_long_value_loses_its_middle():
    runs = [run(str(i), config__drafting={"_target_": LOOKUP, "key": f"begin{'x' * 90}{i}"}) for i in range(2)]
    assert labels(*runs) == [f"prompt_lookup key=beginxxxxxxx…{'x' * 17}{i}" for i in range(2)]


def test_what_was_only_asked_beside_is_not_in_a_label():
    beside = {"config__output": "x", "config__profile": True, "config__timing": "untimed", "config__threads": 2}
    assert labels(run("a"), run("b", **beside)) == ["prompt_lookup #1 in a", "prompt_lookup #2 in b"]


def test_a_configuration_run_again_is_numbered_in_time():
    times = {"late": "2026-01-03", "early": "2026-01-01", "middle": "2026-01-02"}
    assert labels(*(run(name, provenance__started_at=at) for name, at in times.items())) == [
        "prompt_lookup #3 in late", "prompt_lookup #1 in early", "prompt_lookup #2 in middle",
    ]  # fmt: skip
    found = group(*(run(f"out/{name}/cell", provenance__started_at=at) for name, at in times.items()), run("x/y"))
    assert {row.label for row in found.rows} == {
        "prompt_lookup #1 in early/cell", "prompt_lookup #2 in x/y", "prompt_lookup #3 in middle/cell",
        "prompt_lookup #4 in late/cell",
    }  # fmt: skip


def test_a_merge_names_its_members():
    merge = {"_target_": "decodelab.drafting.merge.Merge", "members": [{"_target_": LOOKUP}, "suffix"], "budget": None}
    assert labels(run("a", config__drafting=merge), run("b")) == ["merge members=prompt_lookup+suffix", "prompt_lookup"]


def test_a_replay_names_what_it_is_from_where_that_differs():
    def replay(name: str, source: str) -> Run:
        return run(name, replay={"source": source, "device": "a laptop"})

    a, b = replay("x", "out/none-1/samples.jsonl"), replay("y", "data/answers.jsonl")
    assert labels(a, run("z")) == ["prompt_lookup (replayed)", "prompt_lookup"]
    assert labels(a, b) == ["prompt_lookup (replayed from none-1)", "prompt_lookup (replayed from answers)"]


def test_labels_of_several_groups_are_told_apart():
    """Of what is not compared, what differs is named: as many words as it takes."""
    task = {"path": "data/edits.jsonl", "max_new_tokens": 32}
    runs = [
        run("a"),
        run("b", provenance__device="a server"),
        run("c", provenance__device="a server", config__task=task, digests__task="c" * 64),
        run("d", config__drafting={"_target_": "decodelab.drafting.suffix.Suffix"}),
    ]
    assert {folder.name: label for folder, label in labelled(runs).items()} == {
        "a": "prompt_lookup · demo · a laptop", "b": "prompt_lookup · demo · a server",
        "c": "prompt_lookup · edits", "d": "suffix",
    }  # fmt: skip


def test_settings_of_the_python_interface_are_named_too():
    assert labels(run(config__drafting="PromptLookup(max_draft=4)", config__acceptance="Greedy()")) == ["PromptLookup"]


# --- order


def test_ranked_by_speedup_the_broken_and_the_untimed_last():
    speeds = {"a": (1.2, "exact"), "b": (None, "exact"), "c": (9.0, "broken"), "d": (3.0, "lossy"), "e": (2.0, "exact")}
    runs = [run(name, speedup__value=v, exactness__verdict=verdict) for name, (v, verdict) in speeds.items()]
    g = group(*runs)
    assert [row.run.folder.name for row in g.rows] == ["d", "e", "a", "b", "c"]
    assert g.speed == "speedup"


def test_rows_without_a_speed_are_ordered_by_tokens_a_step():
    taus = {"a": 1.5, "b": 2.5, "c": 2.0}
    runs = [run(name, speedup__value=None, strategy__tokens_per_step=tau) for name, tau in taus.items()]
    assert [row.run.folder.name for row in group(*runs).rows] == ["b", "c", "a"]


def test_another_form_of_the_target_has_another_baseline_so_rows_are_ranked_by_rate():
    fast = run("a", config__quantization={"bits": 4}, speedup__value=1.5, strategy__tokens_per_second=200.0)
    g = group(fast, run("b", config__quantization=None, speedup__value=2.0))
    assert g.speed == "tokens per second"
    assert [(row.run.folder.name, row.speed) for row in g.rows] == [("a", 200.0), ("b", 100.0)]


def test_a_quantiser_is_named_where_rows_differ_in_it():
    rtn = {"_target_": "decodelab.quantization.rtn.RTN", "bits": 4}
    stored = {"_target_": "decodelab.quantization.none.AsStored"}
    g = group(run("a", config__quantization=rtn), run("b", config__quantization=stored))
    assert sorted(row.label for row in g.rows) == ["prompt_lookup", "prompt_lookup rtn"]
    g = group(run("a", config__quantization=rtn), run("b", config__quantization=rtn | {"bits": 3}))
    assert sorted(row.label for row in g.rows) == ["prompt_lookup bits=3", "prompt_lookup bits=4"]


# --- quality


def test_a_layout_of_keys_is_named_where_rows_differ_in_it():
    of = "decodelab.attention.options."
    kinds = [{"_target_": of + "Native"}, {"_target_": of + "SinkWindow", "size": 8, "sinks": 4}]
    kinds += [{"_target_": of + "LowBits", "bits": 4}, {"_target_": of + "MQA", "pool": "mean"}, None]
    found = group(*(run(str(i), config__attention=kind) for i, kind in enumerate(kinds[:4])))
    assert sorted(row.label for row in found.rows) == [
        "prompt_lookup", "prompt_lookup kv_int4", "prompt_lookup mqa", "prompt_lookup sink_window",
    ]  # fmt: skip


def test_kl_to_one_reference_is_a_score_of_which_less_is_better():
    def led(kl: float, key: str = "ref") -> dict[str, Any]:
        found = {"reference": {"key": key}, "tokens": 90, "kl": {"value": kl, "low": None, "high": None, "n": 9}}
        return quality(gsm=0.5) | {"divergence": found}

    g = group(run("a", quality=led(0.2)), run("b", quality=led(0.1)), run("c", quality=led(0.1, "another")))
    assert [m.title for m in g.measures] == ["gsm acc", "reference KL, model only", "reference KL, model only"]
    (measure,) = {m for row in g.rows[:2] for m in row.scores if m.metric == "KL"}
    assert not measure.higher
    assert {row.run.folder.name: row.scores[measure].value for row in g.rows if measure in row.scores} == {
        "a": 0.2, "b": 0.1,
    }  # fmt: skip


def test_scores_are_compared_where_the_question_was_the_same():
    g = group(
        run("a", quality=quality(gsm=0.5, mmlu=0.3)),
        run("b", quality=quality(gsm=0.4)),
        run("c", quality=quality(gsm=0.6, n=99)),
        run("d", quality=quality(measures="model only", lm=0.2)),
    )
    assert [m.title for m in g.measures] == ["gsm acc", "mmlu acc", "gsm acc", "lm acc, model only"]
    gsm = g.measures[0]
    assert {row.run.folder.name: row.scores[gsm].value for row in g.rows if gsm in row.scores} == {"a": 0.5, "b": 0.4}
    score = next(row for row in g.rows if row.run.folder.name == "a").scores[gsm]
    assert (score.low, score.high, score.n) == (0.4, 0.6, 10)


def test_side_by_side_in_a_batch_is_the_same_question():
    other = quality(gsm=0.4)
    other["tasks"]["gsm"]["settings"]["batch"] = 8
    assert len(group(run("a", quality=quality(gsm=0.5)), run("b", quality=other)).measures) == 1


@pytest.mark.parametrize("odd", [{"gsm": None}, {"gsm": {"main": ["acc"], "metrics": {"acc": 1}}}, {"gsm": {}}, "text"])
def test_scores_of_another_shape_are_none(odd: Any):
    assert group(run(quality={"tasks": odd})).measures == ()


# --- who dominates whom


def row(speed: float | None, verdict: str | None = "exact", **more: Any) -> Row:
    (found,) = group(run(speedup__value=speed, exactness__verdict=verdict, **more)).rows
    return found


def errors(value: float) -> dict[str, Any]:
    return quality(higher=False, t=value)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # output of the target: equally good, so the faster one
        (row(2.0), row(1.5), True),
        (row(1.5), row(2.0), False),
        (row(2.0), row(2.0), False),
        (row(2.0), row(1.5, "near-tie"), True),
        (row(2.0, "near-tie"), row(1.5), True),
        # what scores say of equal outputs is chance
        (row(2.0, quality=quality(t=0.1)), row(1.5, quality=quality(t=0.9)), True),
        # lossy without scores is worse than the target's own, whatever it is worth otherwise
        (row(2.0), row(1.5, "lossy"), True),
        (row(2.0), row(2.0, "lossy"), True),
        (row(1.5), row(2.0, "lossy"), False),
        (row(2.0, "lossy"), row(1.5), False),
        (row(2.0, "lossy"), row(1.5, "lossy"), False),
        # scores decide, each of them
        (row(2.0, "lossy", quality=quality(t=0.5)), row(1.5, "lossy", quality=quality(t=0.5)), True),
        (row(2.0, "lossy", quality=quality(t=0.5)), row(1.5, "exact", quality=quality(t=0.5)), True),
        (row(2.0, "lossy", quality=quality(t=0.4)), row(1.5, "exact", quality=quality(t=0.5)), False),
        (row(2.0, "lossy", quality=quality(t=0.5)), row(2.0, "lossy", quality=quality(t=0.5)), False),
        (row(2.0, "lossy", quality=quality(t=0.6)), row(2.0, "lossy", quality=quality(t=0.5)), True),
        (row(2.0, "lossy", quality=quality(t=0.6, u=0.1)), row(1.5, "lossy", quality=quality(t=0.5, u=0.2)), False),
        (row(2.0, "lossy", quality=quality(t=0.6)), row(1.5, "lossy", quality=quality(t=0.5, u=0.2)), False),
        (row(2.0, "lossy", quality=quality(t=0.6, u=0.1)), row(1.5, "lossy", quality=quality(t=0.5)), True),
        # less is better
        (row(2.0, "lossy", quality=errors(9.0)), row(1.5, "lossy", quality=errors(8.0)), False),
        (row(2.0, "lossy", quality=errors(7.0)), row(1.5, "lossy", quality=errors(8.0)), True),
        # another law is another output
        (row(2.0), row(1.5, config__acceptance=SAMPLING), False),
        (row(2.0, config__acceptance=SAMPLING), row(1.5, "same law", config__acceptance=SAMPLING), True),
        (row(2.0, config__quantization={"bits": 4}), row(1.5, config__quantization=None), False),
        # no part of it
        (row(2.0, "broken"), row(1.5), False),
        (row(2.0), row(1.5, "broken"), False),
        (row(None), row(1.5), False),
        (row(2.0), row(None), False),
        (row(2.0, status="interrupted"), row(1.5), False),
        (row(2.0, None), row(1.5), False),
        # of too few prompts for an interval
        (row(2.0), row(1.5, speedup__n=4), False),
        (row(2.0, speedup__n=4), row(1.5), False),
        (row(2.0, speedup__n=5), row(1.5, speedup__n=5), True),
    ],
)  # fmt: skip
def test_dominates(a: Row, b: Row, expected: bool):
    assert dominates(a, b) is expected


def test_marks_are_those_of_a_search_through_all_pairs():
    """By the words of the definition, for two tasks and three verdicts."""
    random = Random(0)
    facts = {}
    for i in range(40):
        verdict = random.choice(["exact", "near-tie", "lossy", "broken"])
        scores = {t: random.randint(0, 3) / 4 for t in ("t", "u") if random.random() < 0.8}
        facts[str(i)] = (random.randint(1, 6) / 2, verdict, scores)

    def better(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
        (speed, verdict, scores), (slower, judged, known) = x, y
        if "broken" in (verdict, judged) or speed < slower:
            return False
        if verdict in FAITHFUL and judged in FAITHFUL:
            return speed > slower
        if known and all(t in scores for t in known):
            if any(scores[t] < known[t] for t in known):
                return False
            return speed > slower or any(scores[t] > known[t] for t in known)
        return verdict in FAITHFUL

    runs = [
        run(name, speedup__value=speed, exactness__verdict=verdict, quality=quality(**scores))
        for name, (speed, verdict, scores) in facts.items()
    ]
    g = group(*runs)
    marked = {row.run.folder.name: row.dominated for row in g.rows}
    beaten = {b: [a for a in facts if a != b and better(facts[a], facts[b])] for b in facts}
    assert {name for name, by in marked.items() if by} == {name for name, by in beaten.items() if by}
    assert 5 < sum(map(bool, marked.values())) < 35
    named = {row.label: row.run.folder.name for row in g.rows}
    assert all(named[by] in beaten[name] for name, by in marked.items() if by)


def test_the_front_is_the_staircase():
    """Found the other way: from the fastest down, each that is better than all before it."""
    random = Random(1)
    points = [(random.randint(0, 9) / 3, random.randint(0, 9) / 3) for _ in range(60)]
    stairs, best = set(), float("-inf")
    for x in sorted({x for x, _ in points}, reverse=True):
        top = max(y for p, y in points if p == x)
        if top > best:
            stairs.add((x, top))
            best = top
    found = [points[i] for i in front(points)]
    assert set(found) == stairs
    assert found == sorted(found)
    assert front([]) == []
    assert front(list(product([1.0], [1.0, 2.0]))) == [1]


def test_greedy_is_not_named_beside_sampling():
    """It is the default; the rule is named where it is another one."""
    assert result()["config"]["acceptance"]["_target_"] == GREEDY
    assert labels(run("a"), run("b", config__acceptance=TYPICAL)) == ["prompt_lookup", "prompt_lookup typical"]
