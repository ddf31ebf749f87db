"""`pages=`: a run over a cache in pages, alone and with prompts that share them, and what is said of it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding.draft import EMPTY, Needs
from decodelab.decoding.events import finish
from decodelab.errors import UserError
from decodelab.experiments import run
from decodelab.experiments.cli import main
from decodelab.experiments.compose import compose
from decodelab.experiments.composition import UNSHARED, resolve
from decodelab.experiments.config import PageSettings
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import Sides, measure
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.tiny_lab import talk, tiny_lab
from decodelab.tests.rigged import Rigged

SHARED = PageSettings(4, share=True)


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run.hardware, "peaks", lambda *_: Peaks(1e10, 1e11))
    unchecked(monkeypatch)


def found_by(done: Sequence[Any]) -> list[int]:
    return [g.prefill.found for g in done]


@pytest.mark.parametrize("share", ["true", "false"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_run(bench: Any, capsys: Any, batch: int, share: str) -> None:
    """Both sides find the same: what was warmed up with is forgotten, and the output is that without pages."""
    assert bench.run("pages.size=4", f"pages.share={share}", f"batch={batch}", "acceptance=sampling") == 0
    result = bench.result
    assert result["exactness"]["verdict"] == "exact"
    pages = result["pages"]
    assert (pages["size"], pages["share"]) == (4, share == "true")
    for side in ("baseline", "strategy"):
        assert pages[side]["prompt_tokens"] == sum(s["prompt_tokens"] for s in bench.lines("samples.jsonl"))
    assert pages["baseline"]["found_tokens"] == pages["strategy"]["found_tokens"]
    found = {e["id"]: e["found"] for e in bench.lines("events.jsonl") if e["event"] == "prefill"}
    assert (found["talk/turn2"] >= 8) == (share == "true")
    assert found["copy"] == 0
    rate = pages["strategy"]["hit_rate"]
    assert (rate > 0.05) == (share == "true")
    assert pages["strategy"]["blocks"] > 5
    assert result["memory"]["kv_bytes"] == result["memory"]["kv_bytes_formula"]
    told = " ".join(capsys.readouterr().out.split())
    line = f"pages: blocks of 4 tokens, {pages['strategy']['blocks']} in use at most"
    assert line in told
    said = f"; {100 * rate:.0f} % of the prompts' tokens were found (baseline: {100 * rate:.0f} %)"
    assert (said in told) == (share == "true")


@pytest.mark.parametrize(
    "words", [["train", "train=medusa"], ["train", "train=kv", "attention=mqa"], ["layers"], ["quantize"]]
)
def test_what_keeps_no_pages_says_so(words: list[str], capsys: Any) -> None:
    assert main([*words, "pages.size=4", "output=x"]) == 2
    assert f"pages.size=4 is of a run, and {words[0]} keeps no pages: leave it out" in capsys.readouterr().err


def test_without_pages_nothing_is_said_of_them(bench: Any, capsys: Any) -> None:
    assert bench.run("timing=untimed") == 0
    assert bench.result["pages"] is None
    assert "pages:" not in capsys.readouterr().out


def test_the_oracle_finds_nothing_and_each_side_only_its_own() -> None:
    lab = replace(tiny_lab(), pages=SHARED)
    requests = [lab.request(lab.tokenizer.encode("the cat and the dog"), 5)]
    for _ in range(2):
        assert found_by(finish(lab.plain(requests))) == [0]
    assert lab.pools == {}
    for first, again in ((0, 16), (16, 16)):
        assert found_by(finish(lab.strategy(requests))) == [first]
        assert found_by(finish(lab.strategy(requests))) == [again]
        lab.pools.pop("drafting=none", None)
        for sides in (lab.undrafted, lambda r: lab.plain(r, paged=True)):
            assert found_by(finish(sides(requests))) in ([0], [16])
    assert set(lab.pools) == {"strategy", "drafting=none", "plain decoder"}
    lab.forget()
    assert found_by(finish(lab.strategy(requests))) == [0]


def test_a_measurement_begins_with_empty_pools_and_keeps_those_of_two_sides() -> None:
    lab = replace(tiny_lab(), pages=SHARED)
    sides = Sides(lab, 0)
    requests = [lab.request(lab.tokenizer.encode("the cat and the dog"), 5)]
    sides.warm_up(requests)
    assert set(lab.pools) == {"strategy", sides.baseline_kind}
    for found in ([0], [16]):
        assert found_by(sides.baseline(requests)) == found_by(sides.strategy(requests)) == found


def test_what_is_compared_with_is_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plain decoder is the baseline: a baseline that shares is no oracle of one that does."""
    lab = replace(tiny_lab(), pages=SHARED)
    plain, asked = Lab.plain, []

    def recorded(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Any:
        asked.append(options.get("paged", False))
        return plain(self, requests, seed, **options)

    monkeypatch.setattr(Lab, "plain", recorded)
    monkeypatch.setattr(Lab, "undrafted", lambda *_: pytest.fail("only the plain decoder is a baseline here"))
    monkeypatch.setattr(Sides, "__init__", _only_plain(Sides.__init__))
    task, settings = talk(["ab cd ab", "ab cd"])
    found = measure(lab, task, settings, seed=0, batch=1, timing="paired")
    assert all(s.divergence is None for s in found.samples)
    assert asked[2:].count(False) == 2  # the oracle, once a turn, besides the baseline
    assert found_by([s.strategy for s in found.samples])[1] > 0


def _only_plain(init: Any) -> Any:
    return lambda self, lab, seed, kind=None: init(self, lab, seed, "plain decoder")


def test_a_drafter_that_reads_the_prompts_hidden_states_shares_nothing() -> None:
    drafter = Rigged(lambda *_: EMPTY, needs=Needs(taps=(1,), prefill_hidden=True))
    lab = replace(tiny_lab(drafter), pages=SHARED)
    requests = [lab.request(lab.tokenizer.encode("the cat and the dog"), 5)]
    for _ in range(2):
        for side in (lab.strategy, lab.undrafted):
            assert found_by(finish(side(requests))) == [0]
    config = replace(compose([]), drafting=drafter, pages=SHARED)
    found = resolve(config)
    assert (found.verdict, found.reasons) == ("runs with a fallback", (UNSHARED,))
    assert resolve(replace(config, pages=PageSettings(4))).verdict == "runs"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["pages.size=0"], "pages.size must be at least 1, or null, got 0"),
        (["pages.size=4", "pages.blocks=0"], "pages.blocks must be at least 1, or null, got 0"),
        (["pages.share=true"], "pages.share=true is of a cache in pages: give pages.size too, such as pages.size=16"),
        (["pages.blocks=9"], "pages.blocks=9 is of a cache in pages: give pages.size too, such as pages.size=16"),
        (["pages.size=4", "replay=x"], "pages needs a model, and replay has answers and none: leave one of them out"),
    ],
)
def test_settings_that_cannot_be(words: list[str], error: str) -> None:
    with pytest.raises(UserError, match=f"^{error}$"):
        compose(words)


@pytest.mark.parametrize("more", [[], ["pages.share=true"], ["pages.share=true", "batch=3"]])
def test_a_pool_that_is_too_small_is_said_before_anything_is_decoded(bench: Any, capsys: Any, more: list[str]) -> None:
    """Once, with what is enough for the whole task; one block less is not."""
    words = ["pages.size=4", *more]
    assert bench.run(*words, "pages.blocks=3") == 2
    told = capsys.readouterr().err
    (line,) = [x for x in told.splitlines() if x.startswith("decodelab:")]
    assert re.search(r"out of KV blocks: a \w+ of .* needs \d+ blocks of 4 tokens, and the pool has 3; give", line)
    assert "decoding" not in told
    enough = int(line.partition("; give pages.blocks=")[2].removesuffix(", a smaller batch or fewer tokens"))
    assert bench.run(*words, f"pages.blocks={enough - 1}") == 2
    assert bench.run(*words, f"pages.blocks={enough}") == 0


def test_a_pool_that_memory_does_not_hold_is_refused_before_it_is_made() -> None:
    lab = replace(tiny_lab(), pages=PageSettings(1_000_000_000, blocks=1000))
    request = lab.request(lab.tokenizer.encode("the cat"), 5)
    with pytest.raises(
        UserError, match=r"^pages.blocks=1000 of pages.size=1000000000 tokens take \S+ GiB, and \S+ GiB"
    ):
        next(lab.strategy([request]))


def test_check_knows_them() -> None:
    assert main(["check", "pages.size=16", "pages.share=true"]) == 0
