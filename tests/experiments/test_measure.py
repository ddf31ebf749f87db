"""Both sides of the comparison: what runs, in which order, on which prompts, and what is remembered."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.events import Generation
from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.experiments import measure as module
from decodelab.experiments import metrics
from decodelab.experiments.lab import Baseline, Lab
from decodelab.experiments.measure import WARM_TOKENS, Anchored, Measurement, Sides, Timing, measure
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.tiny_lab import PROMPTS, talk, texts, tiny_lab
from decodelab.tests.tiny import tiny_decoder

KINDS = {"plain": "plain decoder", "undrafted": "drafting=none"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    unchecked(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(side, prompts, most tokens) of every decoding, in order."""
    made: list[tuple[str, int, int]] = []

    def record(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(self: Lab, requests: Sequence[Any], seed: int = 0, **options: Any) -> Any:
            made.append((name, len(requests), max(r.stop.limit for r in requests)))
            return run(self, requests, seed, **options)

        return recorded

    for name in ("plain", "undrafted", "strategy"):
        monkeypatch.setattr(Lab, name, record(name, getattr(Lab, name)))
    return made


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one of `plain` and `undrafted` the faster plain decoding: by what it says of its times, nothing else."""

    def choose(name: str) -> None:
        for kind in KINDS:
            run, pace = getattr(Lab, kind), 1.0 if kind == name else 2.0
            monkeypatch.setattr(Lab, kind, timed(run, pace))

    def timed(run: Callable[..., Any], pace: float) -> Callable[..., Any]:
        def paced(self: Lab, *args: Any, **options: Any) -> Iterator[list[Generation]]:
            for done in run(self, *args, **options):
                for g in done:
                    g.delivered = [(pace * i, n) for i, (_, n) in enumerate(g.delivered, 1)]
                yield done

        return paced

    return choose


def run(lab: Lab, task: Any, *, timing: str = "paired", seed: int = 0, batch: int = 1, **options: Any) -> Measurement:
    return measure(lab, task[0], task[1], seed=seed, batch=batch, timing=timing, **options)


@pytest.mark.parametrize("faster", KINDS)
def test_the_order_alternates_after_a_warm_up_of_all(faster: str, calls: list, fastest: Callable[[str], None]):
    """Each side runs twice on the first prompt, cut short; then who goes first changes from prompt to prompt."""
    fastest(faster)
    found = run(tiny_lab(), texts("ab", "abc", "abcd", tokens=40))
    assert found.baseline_kind == KINDS[faster]
    assert calls[:6] == [(side, 1, WARM_TOKENS) for side in ("undrafted", "plain", "strategy")] * 2
    sides = [side for side, _, _ in calls[6:]]
    if faster == "plain":  # the baseline is the oracle as well
        assert sides == ["plain", "strategy", "strategy", "plain", "plain", "strategy"]
    else:
        oracle = ["plain"]
        assert sides == ["undrafted", "strategy", *oracle, "strategy", "undrafted", *oracle,
                         "undrafted", "strategy", *oracle]  # fmt: skip
    assert {tokens for _, _, tokens in calls[6:]} == {40}
    assert found.timed
    assert not found.warnings
    for sample in found.samples:
        assert sample.plain == sample.baseline.tokens == sample.strategy.tokens
        assert sample.baseline.delivered
        assert sample.divergence is None


def test_nothing_is_timed_before_its_warm_up():
    sides = Sides(tiny_lab(), 0)
    for side in (sides.baseline, sides.strategy):
        with pytest.raises(AssertionError, match="timed before its warm-up"):
            side([])


def test_a_batch_of_different_lengths_equals_each_alone(calls: list):
    """transformers#42655: three prompts side by side, in float32; each unit is one decoding of three."""
    together = run(tiny_lab(), texts(*PROMPTS, tokens=30), batch=3)
    alone = run(tiny_lab(), texts(*PROMPTS, tokens=30))
    assert [s.unit for s in together.samples] == [0, 0, 0]
    assert [s.unit for s in alone.samples] == [0, 1, 2]
    assert len({len(s.prompt) for s in together.samples}) == 3
    for a, b in zip(together.samples, alone.samples, strict=True):
        assert a.id == b.id
        assert a.strategy.tokens == a.plain == b.plain == b.strategy.tokens
        assert [s.accepted for s in a.strategy.steps] == [s.accepted for s in b.strategy.steps]
    assert {n for _, n, _ in calls} == {1, 3}
    assert max(s.accepted for x in together.samples for s in x.strategy.steps) > 0


def test_the_last_batch_may_be_smaller():
    found = run(tiny_lab(), texts(*PROMPTS), batch=2)
    assert [(s.id, s.unit) for s in found.samples] == [("0", 0), ("1", 0), ("2", 1)]


def test_later_turns_follow_plain_decoding_s_answers(monkeypatch: pytest.MonkeyPatch):
    """Even where the strategy answers something else, so that every strategy is measured on the same prompts."""
    honest = Lab.strategy

    def astray(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Iterator[list[Generation]]:
        for done in honest(self, requests, seed, **options):
            yield done
        for g in done:
            g.tokens = [t % 60 + 1 for t in g.tokens]
        yield done

    monkeypatch.setattr(Lab, "strategy", astray)
    lab = tiny_lab()
    found = run(lab, talk(("ab", "and", "then"), ("cd", "so")), timing="untimed", batch=2)
    assert [s.id for s in found.samples] == ["a/turn1", "b/turn1", "a/turn2", "b/turn2", "a/turn3"]
    assert [s.unit for s in found.samples] == [0, 0, 1, 1, 2]
    first, _, second, _, third = found.samples
    assert lab.text(second.prompt) == f"ab{lab.text(first.plain)}and"
    assert lab.text(third.prompt) == f"{lab.text(second.prompt)}{lab.text(second.plain)}then"
    assert first.strategy.tokens != first.plain
    assert all(s.divergence is not None for s in found.samples)


def test_a_later_turn_that_does_not_fit_is_left_out_with_a_warning():
    lab = tiny_lab(target=tiny_decoder(dtype=torch.float32, max_position_embeddings=24))
    found = run(lab, talk(("ab", "c" * 30, "d"), ("ef", "gh")), timing="untimed")
    assert [s.id for s in found.samples] == ["a/turn1", "b/turn1", "b/turn2"]
    assert found.warnings == [
        "turns from 2 on are left out: "
        "a: the prompt has 48 tokens, but the context holds 24 and one must be free; shorten it"
    ]


def test_a_prompt_that_cannot_run_is_named_before_any_runs(calls: list):
    lab = tiny_lab(target=tiny_decoder(dtype=torch.float32, max_position_embeddings=24))
    with pytest.raises(UserError, match=r"^1: the prompt has 40 tokens, but the context holds 24 and one must be free"):
        run(lab, texts("ab", "c" * 40))
    assert calls == []


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=1.5)])
def test_untimed_decodes_plainly_once(rule: Any, calls: list):
    first = run(tiny_lab(rule=rule), texts(*PROMPTS), timing="untimed")
    assert [side for side, _, _ in calls] == ["plain", "strategy"] * 3
    assert (first.timed, first.baseline_kind) == (False, "plain decoder")
    calls.clear()
    second = run(tiny_lab(Nothing(), rule), texts(*PROMPTS), timing="untimed")
    assert [side for side, _, _ in calls] == ["strategy"] * 3
    assert [s.plain for s in second.samples] == [s.plain for s in first.samples]
    assert [s.baseline.reason for s in second.samples] == [s.baseline.reason for s in first.samples] == ["length"] * 3
    assert not any(s.divergence for s in second.samples)


PLAINLY = ("plain", "strategy")


@pytest.mark.parametrize(
    ("change", "sides"),
    [
        ({}, ("strategy",)),
        ({"digest": "other"}, PLAINLY),
        ({"target": tiny_decoder(dtype=torch.float64, scale=4.0)}, PLAINLY),
        ({"target": tiny_decoder(dtype=torch.float32, scale=4.0, rope_theta=5.0)}, PLAINLY),
        ({"rule": Greedy(repetition_penalty=1.5)}, PLAINLY),
        ({"rule": Sampling()}, PLAINLY),
        ({"eos_ids": (7,)}, PLAINLY),
        ({"seed": 1}, ("strategy",)),
        ({"tokens": 13}, PLAINLY),
        ({"batch": 2}, PLAINLY),
        ({"threads": 2}, PLAINLY),
    ],
)  # fmt: skip
def test_what_tokens_depend_on_is_remembered_with_them(change: dict[str, Any], sides: tuple, calls: list):
    """vllm#6038: the seed of a greedy run is none of it."""
    run(tiny_lab(), texts("ab cd ab"), timing="untimed")
    calls.clear()
    tokens, seed, batch = (change.pop(key, other) for key, other in (("tokens", 12), ("seed", 0), ("batch", 1)))
    torch.set_num_threads(change.pop("threads", 1))
    try:
        run(tiny_lab(**change), texts("ab cd ab", tokens=tokens), timing="untimed", seed=seed, batch=batch)
    finally:
        torch.set_num_threads(1)
    assert tuple(side for side, _, _ in calls) == sides


def test_the_seed_of_sampling_is_remembered(calls: list):
    for seed in (0, 1, 0):
        run(tiny_lab(rule=Sampling()), texts("ab cd ab"), timing="untimed", seed=seed)
    assert [side for side, _, _ in calls] == [*PLAINLY, *PLAINLY, "strategy"]


def test_other_code_decodes_again(calls: list, monkeypatch: pytest.MonkeyPatch):
    run(tiny_lab(), texts("ab"), timing="untimed")
    monkeypatch.setattr(module, "_code_digest", lambda: "another version")
    run(tiny_lab(), texts("ab"), timing="untimed")
    assert [side for side, _, _ in calls] == [*PLAINLY, *PLAINLY]


@pytest.mark.parametrize("left", ["", '{"key": "', "torn\n", "5\n", "null\n", '{"key": "x"}\n'])
def test_a_line_cut_short_is_decoded_again(left: str, calls: list, cache: Path):
    """By a kill in the middle of a write; what is written behind it is found the time after."""
    want = run(tiny_lab(), texts("ab", "cd"), timing="untimed")
    (file,) = (cache / "baselines").iterdir()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + left)
    for expected in ([*["strategy"], *PLAINLY], None):
        calls.clear()
        got = run(tiny_lab(), texts("ab", "cd"), timing="untimed")
        assert [s.plain for s in got.samples] == [s.plain for s in want.samples]
        if expected:
            assert [side for side, _, _ in calls] == expected


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        found = run(tiny_lab(), texts("ab"), timing="untimed")
        assert found.samples[0].divergence is None
    assert [side for side, _, _ in calls] == [*PLAINLY, *PLAINLY]


def test_what_is_remembered_is_one_line_a_prompt(cache: Path):
    found = run(tiny_lab(), texts(*PROMPTS), timing="untimed")
    (file,) = (cache / "baselines").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [s.plain for s in found.samples]
    assert len({row["key"] for row in rows}) == 3


def test_a_divergence_is_measured_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """In the second sequence of a batch, at its sixth token; the scores there are those that decided it."""
    honest, at = Lab.strategy, 5

    def astray(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Iterator[list[Generation]]:
        for done in honest(self, requests, seed, **options):
            yield done
        scores = tiny_scores(self, done[1], requests[1])
        done[1].tokens = [*done[1].tokens[:at], int(scores.argsort()[-2]), *done[1].tokens[at + 1 :]]
        yield done

    def tiny_scores(lab: Lab, g: Generation, request: Any) -> torch.Tensor:
        from decodelab.attention.rows import chains

        fed = [*request.prompt, *g.tokens[:at]]
        cache = lab.target.open_cache(1, len(fed))
        return lab.target(chains([fed], [cache.open()]), cache).logits[-1]

    monkeypatch.setattr(Lab, "strategy", astray)
    lab = tiny_lab()
    found = run(lab, texts(*PROMPTS, tokens=12), timing="untimed", batch=3)
    assert [s.divergence is None for s in found.samples] == [True, False, True]
    d = found.samples[1].divergence
    assert (d.id, d.position, d.second) == ("1", 5, True)
    assert (d.expected, d.got) == (found.samples[1].plain[5], found.samples[1].strategy.tokens[5])
    scores = tiny_scores(lab, found.samples[1].baseline, found.samples[1].request)
    assert d.gap == pytest.approx(float(scores.topk(2).values.diff().abs()), abs=1e-5)
    assert d.top_logit == pytest.approx(float(scores.max()), abs=1e-5)


def test_an_interrupt_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch):
    honest, begun = Lab.strategy, []

    def interrupted(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Any:
        begun.append(requests)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return honest(self, requests, seed, **options)

    monkeypatch.setattr(Lab, "strategy", interrupted)
    found = run(tiny_lab(), texts("ab", "cd", "ef", "gh"), timing="untimed")
    assert found.interrupted
    assert [s.id for s in found.samples] == ["0", "1"]


def test_an_interrupt_before_anything_is_finished_is_one(monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: Lab, *args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "strategy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_lab(), texts("ab", "cd"))


def test_progress_says_how_far_it_is(calls: list):
    told: list[tuple[int, int, str]] = []
    run(tiny_lab(), texts("ab", "cd"), progress=lambda *words: told.append(words))
    assert told[:6] == [(0, 2, f"warming up {i}/6") for i in range(6)]
    assert [done for done, _, _ in told[6:]] == [1, 2]
    assert told[-1][2].startswith("speedup ")
    assert told[-1][2].endswith("x, 2/2 identical")


def anchored(lab: Lab, kept: dict[str, Any], task: Any = None, **options: Any) -> Measurement:
    """A cell of a worker that has timed the baselines `kept`."""
    return run(lab, texts(*"abcdefgh") if task is None else task, timing="anchored", baselines=kept, **options)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds that a token of the plain decoder takes from now on; the loop takes ten a step."""
    now = [1.0]

    def paced(run: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(self: Lab, *args: Any, **options: Any) -> Iterator[list[Generation]]:
            for done in run(self, *args, **options):
                for g in done:
                    g.delivered = [(seconds[0] * i, n) for i, (_, n) in enumerate(g.delivered, 1)]
                yield done

        return timed

    monkeypatch.setattr(Lab, "plain", paced(Lab.plain, now))
    monkeypatch.setattr(Lab, "undrafted", paced(Lab.undrafted, [10.0]))
    monkeypatch.setattr(Lab, "strategy", paced(Lab.strategy, [10.0]))
    return lambda seconds: now.__setitem__(0, seconds)


def test_a_later_cell_times_a_few_baselines_again(calls: list, pace: Callable[[float], None]):
    """Three of eight prompts, spread over the task, in turn with the strategy; the speedup is over the first cell's."""
    kept: dict[str, Any] = {}
    first = anchored(tiny_lab(), kept)
    assert first.timing == Timing("anchored", "here", None, None)
    assert [side for side, _, tokens in calls[6:]] == ["plain", "strategy", "strategy", "plain"] * 4
    calls.clear()
    pace(1.015)
    second = anchored(tiny_lab(Nothing()), kept)
    sides = [side for side, _, _ in calls]
    assert sides[:4] == ["plain", "strategy"] * 2
    once, first_plain, first_ours = ["strategy"], ["plain", "strategy"], ["strategy", "plain"]
    assert sides[4:] == [*once, *first_plain, *once * 2, *first_ours, *once, *first_plain, *once]
    assert second.timing == Timing("anchored", "stored", 3, pytest.approx(1.015))
    assert not second.warnings
    for a, b in zip(first.samples, second.samples, strict=True):
        assert b.baseline is a.baseline
        assert b.plain == a.plain == b.strategy.tokens
        assert b.divergence is None


@pytest.mark.parametrize(("seconds", "reads"), [(1.05, "low"), (0.95, "high")])
def test_a_drift_is_told(seconds: float, reads: str, pace: Callable[[float], None]):
    kept: dict[str, Any] = {}
    anchored(tiny_lab(), kept)
    pace(seconds)
    found = anchored(tiny_lab(), kept)
    assert found.warnings == [
        f"the baseline of 3 anchors takes {100 * seconds:.1f} % of the time that it took when this worker timed it: "
        f"speedups read too {reads} by about as much"
    ]
    assert found.timing == Timing("anchored", "stored", 3, pytest.approx(seconds))
    assert {metrics.tpot(s.baseline) for s in found.samples} == {1.0}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_baseline_that_drifted_far_is_timed_anew(batch: int, calls: list, pace: Callable[[float], None]):
    """Over 10 %: what the anchors did not time is timed behind the strategy, and is what the next cell takes."""
    kept: dict[str, Any] = {}
    anchored(tiny_lab(), kept, batch=batch)
    pace(1.2)
    calls.clear()
    found = anchored(tiny_lab(), kept, batch=batch)
    cells = -(-8 // batch)
    assert [side for side, _, _ in calls[4:]].count("plain") == cells
    assert [n for side, n, _ in calls[4:] if side == "plain"].count(batch) == 8 // batch
    assert found.timing == Timing("anchored", "anew", 3, pytest.approx(1.2))
    assert found.warnings == [
        "the baseline of 3 anchors takes 120.0 % of the time that it took when this worker timed it: "
        "it was timed anew, behind the strategy"
    ]
    assert all(metrics.tpot(s.baseline) == pytest.approx(1.2) for s in found.samples)
    assert all(s.baseline.tokens == s.plain and s.divergence is None for s in found.samples)
    third = anchored(tiny_lab(), kept, batch=batch)
    assert third.timing == Timing("anchored", "stored", 3, pytest.approx(1.0))
    assert [s.baseline for s in third.samples] == [s.baseline for s in found.samples]


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        ({}, "stored"),
        ({"seed": 1}, "stored"),
        ({"digest": "other"}, "here"),
        ({"target": tiny_decoder(dtype=torch.float64, scale=4.0)}, "here"),
        ({"rule": Greedy(repetition_penalty=1.5)}, "here"),
        ({"task": texts("ab", "cd", tokens=13)}, "here"),
        ({"task": (replace(texts("ab", "cd")[0], digest="other"), texts("ab", "cd")[1])}, "here"),
        ({"batch": 2}, "here"),
        ({"threads": 2}, "here"),
    ],
)
def test_a_baseline_is_kept_under_all_that_it_depends_on(change: dict[str, Any], stored: str, pace: Any):
    kept: dict[str, Any] = {}
    anchored(tiny_lab(), kept, texts("ab", "cd"))
    options = {name: change.pop(name) for name in ("seed", "batch") if name in change}
    task = change.pop("task", texts("ab", "cd"))
    torch.set_num_threads(change.pop("threads", 1))
    try:
        found = anchored(tiny_lab(**change), kept, task, **options)
    finally:
        torch.set_num_threads(1)
    assert found.timing.baseline == stored
    assert len(kept) == (1 if stored == "stored" else 2)


def test_every_prompt_of_a_short_task_is_an_anchor_and_of_a_long_one_a_tenth():
    for n, anchors in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (8, [1, 4, 6]), (40, [5, 15, 25, 35])):
        assert Anchored(Baseline("plain decoder", ([],) * n)).anchors == anchors


def test_later_turns_of_an_anchored_cell_follow_the_stored_answers(pace: Callable[[float], None]):
    kept: dict[str, Any] = {}
    task = talk(("ab", "and", "then"), ("cd", "so"))
    first, second = (anchored(tiny_lab(), kept, task, batch=2) for _ in range(2))
    assert second.timing.baseline == "stored"
    assert [s.prompt for s in second.samples] == [s.prompt for s in first.samples]


def test_an_interrupted_cell_keeps_no_baseline(monkeypatch: pytest.MonkeyPatch):
    honest, begun = Lab.strategy, []

    def interrupted(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Any:
        begun.append(requests)
        if len(begun) == 5:
            raise KeyboardInterrupt
        return honest(self, requests, seed, **options)

    monkeypatch.setattr(Lab, "strategy", interrupted)
    kept: dict[str, Any] = {}
    assert anchored(tiny_lab(), kept).interrupted
    assert kept == {}


def test_nothing_decoded_has_no_drift():
    kept: dict[str, Any] = {}
    for _ in range(2):
        found = anchored(tiny_lab(), kept, texts("ab", "cd", tokens=1))
    assert found.timing == Timing("anchored", "stored", 2, None)
    assert not found.warnings


def test_other_timings_keep_nothing():
    kept: dict[str, Any] = {}
    for timing, baseline in (("paired", "here"), ("untimed", None)):
        assert run(tiny_lab(), texts("ab"), timing=timing, baselines=kept).timing == Timing(timing, baseline)
    assert kept == {}
