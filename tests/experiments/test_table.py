"""The table that people read: everything that is asked of it, in 80 columns, in honest words."""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decodelab.drafting.none import Nothing
from decodelab.experiments.exactness import Divergence
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import Measurement, Timing, measure
from decodelab.experiments.result import build_result
from decodelab.experiments.table import interval, number, percent, reasons, seconds, show, size
from decodelab.tests.experiments.tiny_lab import texts, tiny_lab

PROMPTS = ("ab ab ab", "cd cd cd cd", "efg efg", "the cat and the dog and", "a b c", "xyxyxyxy")
LONG = "a category whose name is far too long for a table of eighty columns"
DEVICE = "Some CPU 9000 with a long name, 16 threads, bfloat16 native"


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))


@cache
def measured(drafted: bool) -> tuple[Lab, Measurement]:
    lab = tiny_lab(None if drafted else Nothing())
    return lab, measure(lab, *texts(*PROMPTS, tokens=9), seed=0, batch=1, timing="paired")


def paced(*speedups: float, drafted: bool = True) -> tuple[Lab, Measurement]:
    """A measurement in which prompt i took a second a token plainly, and 1 ÷ speedups[i] with the strategy."""
    lab, found = measured(drafted)
    found = Measurement(True, copy.deepcopy(found.samples[: len(speedups)]), "drafting=none")
    for i, (sample, ratio) in enumerate(zip(found.samples, speedups, strict=True)):
        sample.category = ("copy", "list[int]", LONG)[i % 3]
        sample.baseline.delivered = [(0.25, 1), (8.25, 8)]
        sample.strategy.delivered = [(0.5, 1), (0.5 + 8 / ratio, 8)]
        for step in sample.strategy.steps:
            step.draft_s, step.verify_s, step.accept_s, step.commit_s, step.other_s = 0.5, 1.0, 0.25, 0.25, 0.0
    return lab, found


def told(lab: Any, measured: Measurement, width: int = 80, **more: Any) -> list[str]:
    """The lines as they stand on a terminal of this width."""
    changed = more.pop("changed", {})
    result = build_result(
        {}, lab, measured, digests={}, provenance={"device": DEVICE, "dtype": "float32"}, peaks=Peaks(1e4, 1e6),
        peak_bytes=3 * 2**30, warnings=more.pop("warnings", []), **more,
    ) | changed  # fmt: skip
    console = Console(width=width, record=True, file=StringIO())
    show(result, measured.samples, "tiny: prompt_lookup, greedy, texts", console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def sections(lines: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line:
            found[-1].append(line)
        else:
            found.append([])
    return found


PROFILE = {
    "context": 8191,
    "seconds": {1: 0.1234, 2: 0.1235, 4: 0.13, 8: 0.15, 16: 0.2, 32: 1.234},
    "predicted_speedup": 1.234,
    "explained": ["2.00 tokens a step, ÷ 1.10 for verifying 4 rows", "nothing else"],
}
PEERS = {
    mode: {
        "interleaved": True,
        "tokens_per_second": 1.25,
        "tpot_s": 0.8,
        "ttft_s": 0.1,
        "tokens_per_step": 1.5,
        "identical": 6,
        "prompts": 6,
    }
    for mode in ("plain", "prompt_lookup", "assisted")
}


@pytest.mark.parametrize("width", [80, 120])
def test_all_of_it(width: int):
    """Device, speedup with its interval, tokens a step, acceptance, exactness, times, MBU, memory, categories, reasons,
    notes; a row of numbers is one line, at 80 columns too."""
    lab, measured = paced(2.0, 1.0, 4.0, 0.5, 2.0, 1.5)
    lines = told(lab, measured, width, profile=PROFILE, compare_hf=PEERS, warnings=["a note"])
    about, compared, output, categories, why, peers, profile, notes = sections(lines)
    assert about[0] == "tiny: prompt_lookup, greedy, texts"
    assert " ".join(about[1:]) == f"{DEVICE} · float32 · 6 prompts"
    rows = {line[:28].strip(): line[28:].split() for line in compared}
    assert rows[""][-1] == "strategy"
    assert rows["speedup [95 % interval]"][:2] == ["1.00×", "1.22×"]  # 6 × 8 s ÷ (4 + 8 + 2 + 16 + 4 + 5⅓ s)
    low, high = rows["speedup [95 % interval]"][2:]
    assert (low[0], low[-1], high[-1]) == ("[", ",", "]")
    assert rows["predicted speedup"] == ["1.23×"]
    assert [float(x) for x in rows["tokens per step (τ)"]] == [1.0, pytest.approx(tau(measured), abs=0.006)]
    assert rows["acceptance"][-1] == "%"
    assert rows["tokens per second"] == ["1.0", "1.2"]
    assert rows["time to first token (ttft)"] == ["250.0", "ms", "500.0", "ms"]
    assert rows["time per output token (tpot)"] == ["1.00", "s", "819.4", "ms"]
    assert rows["bandwidth used (MBU)"][-1] == "%"
    assert " ".join(output).startswith(
        "output: exact – token for token what plain decoding emits (6 of 6 prompts identical) memory: weights "
    )
    assert "KV cache 16 KiB, process at most 3.0 GiB" in " ".join(output)
    assert output[-1] == "step time: draft 25 %, verify 50 %, accept 12 %, commit 12 %, other 0 %"
    assert [line[:24].strip() for line in categories[2:]] == ["copy", "list[int]", f"{LONG[:23]}…"]
    assert categories[2].split()[1:4] == ["2", "0.80×", "(n=2)"]
    assert " ".join(why).count("best: ") == " ".join(why).count("worst:") == 1
    assert [line.split()[-1] for line in peers[2:]] == ["6/6"] * 3
    assert profile[0].split()[:10] == ["k", "rows", "in", "one", "forward,", "8191", "tokens", "of", "context", "T(k)"]
    at_k = [line.split() for line in profile[2:8]]
    assert [" ".join(row[1:3]) for row in at_k] == [
        "123.4 ms",
        "123.5 ms",
        "130.0 ms",
        "150.0 ms",
        "200.0 ms",
        "1.23 s",
    ]
    assert [row[-1] for row in at_k] == ["1.00", "1.00", "1.05", "1.22", "1.62", "10.00"]
    assert profile[-1] == "nothing else"
    assert notes == ["note: a note"]


def tau(measured: Measurement) -> float:
    steps = [step for s in measured.samples for step in s.strategy.steps]
    return sum(step.emitted for step in steps) / len(steps)


def test_tables_are_the_same_at_any_width():
    lab, measured = paced(2.0, 1.0, 4.0, 0.5, 2.0, 1.5)
    narrow, wide = (sections(told(lab, measured, w, profile=PROFILE, compare_hf=PEERS)) for w in (80, 200))
    for table in (1, 3, 5):
        assert narrow[table] == wide[table]


def test_of_few_prompts_there_is_no_interval():
    compared = sections(told(*paced(2.0, 2.0)))[1]
    assert compared[2].endswith("1.00×  2.00× (n=2)")


@pytest.mark.parametrize(
    ("speedups", "best", "worst"),
    [
        ((2.0, 1.5, 0.5), "best:  0 (copy) 2.00×: ", f"worst: 2 ({LONG}) 0.50×: "),
        ((2.0, 1.5), "best:  0 (copy) 2.00×: ", "no prompt lost; the least gain: 1 (list[int]) 1.50×: "),
        ((1.0, 1.5), "best:  1 (list[int]) 1.50×: ", "no prompt lost; the least gain: 0 (copy) 1.00×: "),
        ((0.9, 0.5), "no prompt won; the least loss: 0 (copy) 0.90×: ", "worst: 1 (list[int]) 0.50×: "),
    ],
)
def test_the_best_and_the_worst_are_called_what_they_are(speedups: tuple[float, ...], best: str, worst: str):
    first, last = reasons(paced(*speedups)[1].samples)
    assert first.startswith(best)
    assert last.startswith(worst)


def test_reasons_are_of_that_prompt():
    """A step costs 2 s and a plain one 1 s; the tokens a step are the prompt's own."""
    measured = paced(2.0, 0.5)[1]
    first, second = measured.samples
    first.strategy.steps[0].depth, first.strategy.steps[0].drafted = 4, 4
    for step in second.strategy.steps:
        step.depth = step.drafted = step.accepted = 0
    kept = sum(s.accepted for s in first.strategy.steps) / sum(s.depth for s in first.strategy.steps)
    one = Measurement(True, [first])
    idle = sum(not s.depth for s in first.strategy.steps)
    searched = f"; {idle} of {len(first.strategy.steps)} steps had no draft" if idle else ""
    best, worst = reasons(measured.samples)
    assert best == (
        f"best:  0 (copy) 2.00×: {100 * kept:.0f} % of what was drafted was kept, {tau(one):.2f} tokens a step, "
        f"and a step costs 2.00× a plain one{searched}"
    )
    assert worst == (
        "worst: 1 (list[int]) 0.50×: nothing was drafted, and a step costs 2.00× a plain one "
        "(the search for a draft is part of it)"
    )


def test_without_drafts_there_is_no_best_or_worst():
    lab, measured = paced(1.1, 0.9, drafted=False)
    assert reasons(measured.samples) == ["nothing was drafted on any prompt"]
    assert not any(line.startswith("acceptance") for line in told(lab, measured))


def test_one_prompt_is_neither_best_nor_worst():
    assert reasons(paced(1.1)[1].samples) == []


def test_an_untimed_run_shows_what_it_knows():
    lab = tiny_lab()
    measured = measure(lab, *texts(*PROMPTS[:2]), seed=0, batch=1, timing="untimed")
    lines = told(lab, measured)
    assert " ".join(lines[1:3]).strip().endswith("· float32 · 2 prompts · untimed")
    assert "speedup" not in "\n".join(lines)
    assert "–" not in "\n".join(line for line in lines if not line.startswith("output"))
    assert [line.split()[0] for line in sections(lines)[1][2:]] == ["tokens", "acceptance"]


def test_broken_output_is_shown():
    lab, measured = paced(*[1.0] * 6)
    for i, sample in enumerate(measured.samples):
        sample.divergence = Divergence(f"p{i}", 3, 7, None if i else 8, None if i else 0.5, True, 1.0)
    output = sections(told(lab, measured))[2]
    assert output[0] == "output: broken – NOT the target's output (0 of 6 prompts identical)"
    assert output[1] == "  p0: token 3 is id 8, not id 7, 0.5 below plain decoding's choice"
    assert output[2] == "  p1: token 3 is the end, not id 7"
    assert output[6] == "  and 1 more in result.json"


@pytest.mark.parametrize(
    ("verdict", "rule", "listed"),
    [("same law", {}, False), ("lossy", {"temperature": 0.7}, False), ("lossy", {"epsilon": 0.1}, True)],
)
def test_tokens_that_were_drawn_anew_are_no_divergences(verdict: str, rule: dict[str, Any], listed: bool):
    """Of a lossy rule that does not sample they say where it departs."""
    lab, measured = paced(1.0, 1.0)
    found = {"verdict": verdict, "identical": 1, "prompts": 2, "divergences": [asdict(Divergence("p0", 3, 7, 8, 3.46))]}
    output = sections(told(lab, measured, 200, changed={"exactness": found, "config": {"acceptance": rule}}))[2]
    assert output[0].startswith(f"output: {verdict} – ")
    assert ("  p0: token 3 is id 8, not id 7, 3.46 below plain decoding's choice" in output) is listed


def test_several_sources_are_told_apart():
    lab, measured = paced(2.0, 1.0)
    for sample in measured.samples:
        for step in sample.strategy.steps:
            step.drafted_by = {"suffix": 2, "idle": 0}
            step.sources, step.also_proposed = ("suffix",), ((),)
    steps = sum(len(s.strategy.steps) for s in measured.samples)
    each = f"suffix {steps} of {2 * steps} drafted in {steps}; idle drafted nothing"
    assert f"kept by source, in {steps} steps: {each}" in told(lab, measured, 200)
    assert not any(line.startswith("kept by") for line in told(*paced(2.0, 1.0)))


def test_one_prompt_is_one_prompt():
    lines = " ".join(told(*paced(2.0)))
    assert "· 1 prompt " in lines
    assert "(1 of 1 prompt identical)" in lines


def test_numbers():
    assert [number(None), number(1.005), number(2.0, 1, "×")] == ["–", "1.00", "2.0×"]
    assert [percent(None), percent(0.0), percent(0.666)] == ["–", "0 %", "67 %"]
    assert [seconds(None), seconds(0.0012), seconds(1.0)] == ["–", "1.2 ms", "1.00 s"]
    assert [size(None), size(512), size(1536), size(3 * 2**20), size(5000 * 2**30)] == [
        "–", "512 B", "2 KiB", "3.0 MiB", "5000.0 GiB",
    ]  # fmt: skip
    assert interval({"value": None, "low": None, "high": None, "n": None}) == "–"
    assert interval({"value": 1.5, "low": 1.25, "high": 2.0, "n": 9}) == "1.50× [1.25, 2.00]"


def test_a_stored_baseline_is_said_to_be_one():
    lab, measured = paced(2.0, 1.0)
    again, earlier = "anchors timed again, which drifted by", "timed by an earlier cell"
    for timing, line in (
        (Timing("anchored", "stored", 3, 1.004), f"{earlier}; 3 {again} +0.4 %"),
        (Timing("anchored", "anew", 3, 0.8), f"timed anew, behind the strategy; 3 {again} -20.0 %"),
        (Timing("anchored", "stored", 1, None), f"{earlier}; 1 anchor timed again"),
    ):
        measured.timing = timing
        assert " ".join(sections(told(lab, measured, 200))[0]).endswith(f"baseline {line}")
    measured.timing = Timing()
    assert "baseline timed" not in "".join(sections(told(lab, measured, 200))[0])


def test_transformers_that_ran_apart_are_said_to():
    lab, measured = paced(2.0, 1.0)
    apart = {mode: row | {"interleaved": False} for mode, row in PEERS.items()}
    shown = "\n".join(told(lab, measured, 80, compare_hf=apart))
    assert "transformers, after ours" in shown
    assert "transformers generate" not in shown


def test_a_score_names_its_scorer_where_the_metric_does_not():
    def task(scorer: str | None) -> dict[str, Any]:
        metrics = {name: {"value": 0.5, "low": None, "high": None, "n": 4} for name in ("f1", "exact_match")}
        settings = {"scorer": scorer}
        return {"main": "exact_match", "metrics": metrics, "repeats": 1, "truncated": None, "measures": "decoding",
                "settings": settings}  # fmt: skip

    lab, measured = paced(2.0, 1.0)
    tasks = {"a": task("number"), "b": task("exact_match"), "c": task(None)}
    quality = {"tasks": tasks, "against": None, "interrupted": False, "failed": {}}
    lines = [line.split() for line in told(lab, measured, quality=quality)]
    rows = [" ".join(line[: line.index("0.500")]) for line in lines if "0.500" in line]
    assert rows == ["a exact_match (number)", "f1", "b exact_match", "f1", "c exact_match", "f1"]
