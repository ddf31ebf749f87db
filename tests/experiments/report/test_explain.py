"""Runs made up so that one thing made each slow or fast; it is named, with its numbers, and nothing else is."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding.cost import DraftCost, Profile, predict
from decodelab.errors import UserError
from decodelab.experiments.exactness import Divergence
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import Sample, Timing
from decodelab.experiments.report.explain import explain, replayed
from decodelab.experiments.result import build_result
from decodelab.tests.experiments.report.steps import PLAIN, prompt, step, write

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def told(tmp_path: Path, lab: Lab) -> Callable[..., list[str]]:
    """What is said of a run over these prompts."""

    def said(*samples: Sample, **options: Any) -> list[str]:
        write(tmp_path, lab, *samples, **options)
        return explain(tmp_path)

    return said


FAST = [step(4, 4), step(4, 4), step(4, 3), step(4, 4)]  # 19 tokens in 4 steps of a plain one


def test_it_is_fast_because_drafts_are_kept(told: Callable[..., list[str]]):
    lines = told(prompt(FAST))
    assert lines[:4] == [
        "4.75× as fast as the plain decoder on one prompt, too few for an interval",
        "= 4.75 tokens a step × 10.0 ms of a plain step ÷ 10.0 ms of a step: a step costs as much as 1.00 "
        "plain ones, so it pays where it emits more than 1.00 tokens",
        "a draft offers 4.0 tokens, of which 3.8 are kept (94 %)",
        "kept at position 1: 100 %, 2: 100 %, 3: 100 %, 4: 75 % (of the steps that drafted)",
    ]
    assert "in plain steps, a step is: 1.00 verifying 5.0 rows a sequence, 0.00 drafting, " in lines[4]
    assert lines[5] == "it would be 5.00× if every draft were kept whole"
    assert len([line for line in lines if line.startswith("try")]) == 1


def test_an_interval_over_one_is_doubt(told: Callable[..., list[str]]):
    sure = told(*(prompt(FAST) for _ in range(5)))
    assert sure[0] == "4.75× as fast as the plain decoder over 5 prompts, 95 % interval 4.75 to 4.75"
    slow = [step(4, 0, verify=2 * PLAIN)] * 4
    assert told(*(prompt(steps) for steps in (FAST, slow) * 3))[0].endswith(": it may be no gain at all")


def test_dear_drafts(told: Callable[..., list[str]]):
    """Two tokens a step, and half of the step goes into drafting."""
    lines = told(prompt([step(2, 1, draft=PLAIN)] * 9 + [step()]), config={"drafting": {"max_draft": 2, "model": {}}})
    assert "in plain steps, a step is: 1.00 verifying 2.8 rows a sequence, 0.90 drafting, 0.00 accepting" in " ".join(
        lines
    )
    (costs,) = [line for line in lines if line.startswith("it would be")]
    assert costs.startswith("it would be 1.90× if drafting took no time, ")
    assert lines[-1].startswith("try ")
    (smaller,) = [line for line in lines if "smaller" in line]
    assert smaller == (
        "try a smaller drafting.model: a drafted token costs 0.50 plain steps, and at half of that, kept as often, "
        "it is 1.31×"
    )


def test_dear_verification(told: Callable[..., list[str]]):
    """T(9) is three times T(1): at one row's price it would win."""
    lines = told(prompt([step(8, 2, verify=3 * PLAIN)] * 6 + [step()] * 3))
    (costs,) = [line for line in lines if line.startswith("it would be")]
    assert "2.33× if verifying cost no more than one row" in costs
    assert "drafting took no time" not in costs
    assert "verifying 6.3 rows a sequence" in " ".join(lines)


def test_few_drafts(told: Callable[..., list[str]]):
    lines = told(prompt([step(4, 4)] * 4 + [step()] * 16))
    assert "16 of 20 steps (80 %) had no draft and emit one token" in lines
    (costs,) = [line for line in lines if line.startswith("it would be")]
    assert costs == "it would be 5.00× if every step were like those that had a draft"


def test_nothing_drafted(told: Callable[..., list[str]]):
    lines = told(prompt([step(loop=0.1 * PLAIN)] * 5))
    assert "nothing was drafted in 5 steps, so each emits one token" in lines
    assert lines[0].startswith("0.91× as fast")
    assert "in plain steps, a step is: 1.00 verifying 1.0 rows a sequence, 0.00 drafting, 0.10 accepting, " in " ".join(
        lines
    )
    assert not any(line.startswith("try") for line in lines)


TIMES = {1: 0.010, 3: 0.011, 9: 0.030}  # T(k)


def test_shorter_drafts_would_have_been_faster(told: Callable[..., list[str]]):
    """Of eight tokens two are kept, and eight cost three times as much to verify: two are best."""
    steps = [step(8, 2, verify=TIMES[9])] * 6 + [step(2, 2, verify=TIMES[3])] * 6 + [step(verify=TIMES[1])] * 3
    lines = told(prompt(steps))
    (advice,) = [line for line in lines if line.startswith("try")]
    value = float(lines[0].partition("×")[0])
    assert value == pytest.approx(39 * PLAIN / (6 * 0.030 + 6 * 0.011 + 3 * 0.010), abs=0.005)
    expected = 39 * PLAIN / (12 * 0.011 + 3 * 0.010)
    assert advice == (
        f"try drafting.max_draft=2: the same drafts, cut at 2, come to {expected:.2f}× at the costs of this run"
    )


def test_a_profile_is_believed_before_the_log(told: Callable[..., list[str]]):
    """Measured apart, verifying costs nothing more: then no shorter draft is better."""
    steps = [step(8, 2, verify=TIMES[9])] * 6 + [step(2, 2, verify=TIMES[3])] * 6 + [step(verify=TIMES[1])] * 3
    profile = {
        "context": 10, "seconds": {"1": 0.01, "16": 0.01}, "draft": asdict(DraftCost(0.0, 0.0, 0.0)), "alpha": 0.5,
        "predicted_speedup": 2.0, "explained": [],
    }  # fmt: skip
    lines = told(prompt(steps), result={"profile": profile, "predicted_speedup": 2.0})
    assert not any("cut at" in line for line in lines)
    assert "T(k) and the drafts' cost, measured apart, predict 2.00×: -29 % unexplained" in lines


def test_no_length_pays(told: Callable[..., list[str]]):
    lines = told(prompt([step(4, 0, verify=2 * PLAIN, draft=PLAIN)] * 8 + [step()] * 3))
    assert lines[-1] == "try drafting=none: no length of these drafts pays here"
    assert not any("shorter" in line for line in lines)


def test_longer_drafts_are_extrapolated(told: Callable[..., list[str]]):
    """Every draft is as long as it may be and nearly all is kept, at no cost."""
    lines = told(prompt([step(4, 4)] * 18 + [step(4, 2)] * 2 + [step()] * 3))
    (advice,) = [line for line in lines if line.startswith("try")]
    assert advice.startswith("try drafting.max_draft=32: ")
    assert advice.endswith("× if what lies beyond 4 is kept as often")


def test_a_drafter_without_a_length_gets_no_key(told: Callable[..., list[str]]):
    steps = [step(8, 2, verify=TIMES[9])] * 6 + [step(verify=TIMES[1])] * 3
    lines = told(prompt(steps), config={"drafting": {"_target_": "mine"}})
    assert "try drafts of at most 2 tokens: the same drafts, cut at 2, come to " in lines[-1]


def test_without_one_row_in_the_log_a_profile_is_asked_for(told: Callable[..., list[str]]):
    lines = told(prompt([step(4, 1, verify=2 * PLAIN)] * 5))
    assert "try profile=true: the log does not tell what a forward of one row costs, so no length is computed" in lines


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_a_replay_emits_what_was_emitted(most: int):
    """Cut drafts of which all is kept come again; what a piece accepts is never more than it offers."""
    steps = [step(6, 6), step(6, 4), step(5, 0), step(0), step(7, 7, emitted=7)]
    pieces = list(replayed(steps, most))
    assert sum(p.emitted for p in pieces) == sum(s.emitted for s in steps)
    assert all(p.accepted <= p.depth <= most and p.emitted <= p.accepted + 1 for p in pieces[:-1])
    assert len(pieces) >= len(steps)
    if most == 7:
        assert [(p.depth, p.accepted, p.emitted) for p in pieces] == [(s.depth, s.accepted, s.emitted) for s in steps]
    profile = Profile(0, {1: 1.0, 16: 1.0})
    assert predict(profile, DraftCost(0, 0, 0), pieces) <= predict(profile, DraftCost(0, 0, 0), steps) + 1e-9


def test_a_replay_in_pieces():
    """Seven tokens of a draft of six, at most two at a time: three, three, and the target's own."""
    assert [(p.verified, p.accepted, p.emitted) for p in replayed([step(6, 6)], 2)] == [(3, 2, 3), (3, 2, 3), (1, 0, 1)]
    assert [(p.verified, p.accepted, p.emitted) for p in replayed([step(6, 3)], 2)] == [(3, 2, 3), (3, 0, 1)]


def test_categories(told: Callable[..., list[str]]):
    lines = told(prompt(FAST, "edit"), prompt([step(4, 0)] * 6, "chat"), prompt([step(4, 1)] * 6, "questions"))
    assert "best on edit: 4.75× (n=1), 94 % kept, 4.75 tokens a step" in lines
    assert "worst on chat: 1.00× (n=1), 0 % kept, 1.00 tokens a step" in lines
    assert not any(line.startswith(("best", "worst")) for line in told(prompt(FAST, "a"), prompt(FAST, "b")))


def test_reading_the_prompt_dominates(told: Callable[..., list[str]]):
    lines = told(prompt(FAST, ttft=19 * PLAIN))
    assert (
        "reading the prompt is 50 % of plain decoding's latency, and no drafter shortens that: end to end it is 1.65×, "
        "and could be 2.00× at most"
    ) in lines
    assert not any("reading the prompt" in line for line in told(prompt(FAST)))


def test_a_drafter_that_starts_slowly(told: Callable[..., list[str]]):
    lines = told(prompt(FAST, start=5 * PLAIN))
    assert (
        "before the first token the drafter takes 50.0 ms a prompt, 50 % of the latency: in the end-to-end speedup "
        "alone"
    ) in lines


def test_a_busy_machine_and_a_drift(told: Callable[..., list[str]]):
    lines = told(prompt(FAST), made={"load_before": 3.25}, timing=Timing("anchored", "stored", 3, 1.05))
    assert "the machine was busy (load 3.2 before it began): its times are noise, run it again when quiet" in lines
    assert "the baseline of an earlier cell had drifted by +5.0 % (timing=paired has its own)" in lines
    quiet = told(prompt(FAST), timing=Timing("anchored", "stored", 3, 1.01))
    assert not any("busy" in line or "drift" in line for line in quiet)


def test_near_ties(told: Callable[..., list[str]]):
    sample = prompt(FAST, divergence=Divergence("made up", 3, 1, 2, True, 0.0625, 8.0))
    exact = [prompt(FAST) for _ in range(9)]
    found = {"dtype": "bfloat16"}
    result = {"exactness": {"verdict": "near-tie", "identical": 9, "prompts": 10, "divergences": [{"gap": 0.0625}]}}
    lines = told(sample, *exact, made=found, result=result)
    tied = "where two tokens tie within the rounding of bfloat16, at most 0.0625 apart"
    assert f"1 of 10 outputs leave plain decoding's {tied}" in lines
    assert not any("tie" in line for line in told(*exact))


def test_answers_that_were_cut(told: Callable[..., list[str]]):
    assert "1 of 1 answers end at 40 tokens: what would have followed is not in these numbers" in told(prompt(FAST))
    ended = prompt(FAST)
    ended.baseline.reason = "eos"
    assert not any("answers end" in line for line in told(ended))


def test_a_broken_output_is_said_first_and_gets_no_advice(told: Callable[..., list[str]]):
    lines = told(
        prompt([step(4, 0, verify=2 * PLAIN)] * 8), result={"exactness": {"verdict": "broken", "divergences": []}}
    )
    assert lines[0] == "the output is broken, so its speed means nothing: see the divergences in result.json"
    assert not any(line.startswith("try") for line in lines)


def test_a_lossy_rule_needs_a_quality(told: Callable[..., list[str]]):
    lossy = {"exactness": {"verdict": "lossy", "divergences": []}}
    assert any("no quality was measured" in line for line in told(prompt(FAST), result=lossy))
    assert not any("no quality" in line for line in told(prompt(FAST), result=lossy | {"quality": {"tasks": {}}}))


def test_untimed(told: Callable[..., list[str]]):
    lines = told(prompt(FAST), timed=False, timing=Timing("untimed", None))
    assert lines[0] == "nothing was timed (timing=untimed): 4.75 tokens a step"
    assert lines[-1] == "try timing=paired for a speed: tokens a step are not yet a speedup"
    assert "a draft offers 4.0 tokens, of which 3.8 are kept (94 %)" in lines
    assert not any("if every step" in line or "drafting=merge" in line for line in lines)


def test_an_untimed_run_with_few_drafts(told: Callable[..., list[str]]):
    """Half of the steps have none: 7 tokens in 4 steps, 5 of them in the 2 that drafted."""
    keys = {"_target_": "decodelab.drafting.suffix.Suffix", "nodes": 15}
    steps = [step(4, 4), step(), step(4, 1), step()]
    lines = told(prompt(steps), config={"drafting": keys}, timed=False, timing=Timing("untimed", None))
    assert lines[-3:] == [
        "tokens a step would be 3.50 if every step were like those that had a draft",
        "try drafting=merge 'drafting.members=[suffix, token_recycling]': the other one may fill steps without a draft",
        "try timing=paired for a speed: tokens a step are not yet a speedup",
    ]


def test_untimed_drafts_that_could_be_longer(told: Callable[..., list[str]]):
    lines = told(prompt([step(8, 8)] * 3 + [step(8, 2)]), timed=False, timing=Timing("untimed", None))
    assert "try drafting.max_draft=16: 3 of 4 drafts were as long as may be and kept whole" in lines
    short = told(prompt([step(4, 4)] * 3), timed=False, timing=Timing("untimed", None))
    assert not any("max_draft" in line for line in short)


WIDE = [step(4, 1, drafted=424, verified=425, verify=5 * PLAIN)] * 6


@pytest.mark.parametrize(
    ("drafting", "advice"),
    [
        (
            {"_target_": "x.token_recycling.TokenRecycling", "tree": None, "nodes": 424},
            "try a smaller tree, which `decodelab tree {run} output=tree.json nodes=16` makes of what was kept here "
            "and drafting.tree=tree.json reads: ",
        ),
        ({"_target_": "x.eagle.Eagle", "tree": None, "nodes": 500}, "try drafting.nodes below 500: "),
        ({"_target_": "x.suffix.Suffix", "tree": True, "nodes": 500}, "try drafting.nodes below 500: "),
        ({"_target_": "x.merge.Merge", "members": ["suffix"]}, "try drafting.budget=auto, or a number below 424: "),
    ],
)  # fmt: skip
def test_an_oversized_tree(drafting: dict[str, Any], advice: str, told: Callable[..., list[str]], tmp_path: Path):
    lines = told(prompt(WIDE), config={"drafting": drafting}, baseline_kind="drafting=none")
    assert lines[0] == "0.40× as fast as drafting=none on one prompt, too few for an interval"
    dear = "drafts of 424 tokens on average make verifying cost 5.0 plain steps"
    tries = [line for line in lines if line.startswith("try")]
    assert tries[:2] == [
        f"{advice.format(run=tmp_path)}{dear}", "try drafting=none: plain decoding was faster than this run",
    ]  # fmt: skip


def test_a_tree_that_costs_little_is_left_alone(told: Callable[..., list[str]]):
    lines = told(prompt([step(4, 1, drafted=8, verified=9)] * 6), config={"drafting": {"nodes": 8}})
    assert not any("below" in line or "smaller" in line for line in lines)


def test_who_brought_what(told: Callable[..., list[str]], tmp_path: Path):
    """Of a merge, from its log; a log of an earlier version does not say who drafted."""
    both = step(2, 2, sources=("a", "b"), also_proposed=(("b",), ()), drafted_by={"a": 1, "b": 2, "c": 0})
    alone = step(1, 0, drafted_by={"a": 1, "b": 0, "c": 0})
    said = "kept by source, in 2 steps: "
    assert f"{said}a 1 of 2 drafted in 2; b 2 of 2 drafted in 1 (1 it alone); c drafted nothing" in told(
        prompt([both, alone])
    )
    old = [step(2, 2, sources=("a", "b"), also_proposed=(("b",), ())), step(1, 0)]
    assert f"{said}a 1; b 2 (1 it alone)" in told(prompt(old))
    assert not any(line.startswith("kept by source") for line in told(prompt(FAST)))


def test_one_token_has_no_speed(told: Callable[..., list[str]]):
    lines = told(prompt([]))
    assert lines[0] == "no token followed the first of any prompt, so there is no speed: raise task.max_new_tokens"


def test_an_interrupted_run(told: Callable[..., list[str]]):
    assert told(prompt(FAST), interrupted=True)[0] == "it was interrupted after 1 prompt"


def test_a_batch(bench: Any):
    """Two sequences a forward: the same identity, from a real run."""
    assert bench.run("batch=2") == 0
    result = bench.result
    first, identity, *_ = explain(bench.folder)
    assert first.startswith(f"{result['speedup']['value']:.2f}× as fast as the ")
    tau, plain_tau, factor = map(float, re.findall(r"([0-9.]+) (?:tokens a step ÷|of plain|plain ones)", identity))
    assert tau / plain_tau / factor == pytest.approx(result["speedup"]["value"], rel=0.02)


def test_quality_alone(lab: Lab, tmp_path: Path):
    score = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 20}
    tasks = {
        "arc": {"kind": "multiple_choice", "measures": "model only", "metrics": {"acc": score}, "main": "acc",
                "higher_is_better": True, "n": 20, "repeats": 1, "truncated": None},
        "sums": {"kind": "generate", "measures": "decoding", "metrics": {"exact": score | {"low": None}},
                 "main": "exact", "higher_is_better": True, "n": 4, "repeats": 3, "truncated": 0.25},
    }  # fmt: skip
    found = build_result(
        {}, lab, None, digests={}, provenance={}, peaks=None, peak_bytes=None, warnings=[],
        quality={"tasks": tasks, "interrupted": False},
    )  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert explain(tmp_path) == [
        "arc: acc 0.500, 95 % interval 0.250 to 0.750 over 20 items (higher is better; measures the model only)",
        "sums: exact 0.500 over 4 items, 3 answers each (higher is better; measures the decoding)",
        "sums: 25 % of the answers were cut at their length limit",
        "no decoding was timed here: decodelab run measures speed, with quality.tasks=… both",
    ]


def test_drafts_that_ended_by_themselves_are_not_lengthened(told: Callable[..., list[str]]):
    """All of them is kept, but few were as long as they might be: a higher bound would change little."""
    lines = told(prompt([step(4, 4)] * 6 + [step(2, 2)] * 14 + [step()] * 3))
    assert not any("lies beyond" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("samples.jsonl", '{"a": 1}', "samples.jsonl is damaged: of a line, it has no id; run it again"),
        ("samples.jsonl", "", "samples.jsonl times no answer, and result.json has a speedup: run it again"),
        (
            "events.jsonl", '{"side": "strategy", "event": "step", "id": "a", "batch": "1"}',
            "events.jsonl is damaged: of a line, batch is not a whole number; run it again",
        ),
    ],
)  # fmt: skip
def test_damaged_lines_are_named(name: str, text: str, wrong: str, told: Callable[..., list[str]], tmp_path: Path):
    told(prompt(FAST))
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / wrong))):
        explain(tmp_path)
