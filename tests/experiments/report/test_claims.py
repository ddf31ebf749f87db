"""Each claim is set against what made-up runs say of it, or says what it needs; no value comes from nowhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding.cost import expected_tokens
from decodelab.errors import UserError
from decodelab.experiments.compose import Composer
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import Sample
from decodelab.experiments.report.claims import Claim, claims, markdown, text
from decodelab.experiments.report.command import main
from decodelab.experiments.report.load import find
from decodelab.experiments.sweep.grid import composed, expand
from decodelab.tests.experiments.report.steps import PLAIN, prompt, step, write

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def runs(tmp_path: Path, lab: Lab) -> Callable[..., list[Claim]]:
    """The claims beside runs of these drafters over these prompts; each call adds to the runs before it."""

    def add(*samples: Sample, name: str = "prompt_lookup", **options: Any) -> list[Claim]:
        config = {"drafting": {"_target_": f"decodelab.drafting.{name}.D"} | options.pop("drafting", {})}
        config |= {"model": {"name": "tiny"}, "task": {"name": "demo", "max_new_tokens": 40}}
        if samples:
            folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
            write(folder, lab, *samples, config=config | options.pop("config", {}), **options)
        return claims(find([tmp_path]).runs)

    return add


def about(found: list[Claim], what: str) -> Claim:
    (claim,) = [claim for claim in found if what in claim.text]
    return claim


def named(name: str, sample: Sample, tokens: int = 4) -> Sample:
    return replace(sample, id=name, request=None)


TWICE, HALF = [step(3, 1)] * 6, [step(3, 0, verify=2 * PLAIN)] * 6  # speedups


def test_without_runs_nothing_is_measured(runs: Callable[..., list[Claim]]):
    found = runs()
    assert len(found) == 8
    assert [c.kind for c in found].count("not yet") == 7
    assert not any(c.kind == "measured" for c in found)
    assert all(c.here.startswith("needs ") for c in found if c.kind == "not yet")
    assert about(found, "Medusa").here == "needs trained heads and drafting=medusa"
    for claim in found:
        assert claim.source
        assert claim.claimed


def test_a_pair_of_models_is_predicted_from_bytes(runs: Callable[..., list[Claim]]):
    """Four tokens a draft: τ ÷ (1 + 4 · 4/70), as arXiv:2211.17192 has it, since reading the weights takes longer than
    the products of five rows."""
    alone = about(runs(), "4B draft")
    assert alone.kind == "predicted"
    assert alone.here == "halved where a drafted token is kept with a chance of 0.64 or more"
    assert "14.6 ms and 0.83 ms" in alone.how
    assert expected_tokens(0.64, 4) / (1 + 4 * 4 / 70) >= 2 > expected_tokens(0.63, 4) / (1 + 4 * 4 / 70)
    pair = {"drafting": {"model": {"name": "small"}}}
    found = about(
        runs(prompt([step(4, 4), step(4, 4), step(4, 2), step(4, 1)]), name="draft_model", **pair), "4B draft"
    )
    alpha = 11 / 13
    speedup = expected_tokens(alpha, 4) / (1 + 4 * 4 / 70)
    assert found.here == (
        f"{100 * (1 - 1 / speedup):.0f} % less ({speedup:.2f}×) at α = {alpha:.2f}; halved from 0.64 on"
    )
    assert found.how.endswith(
        "α is that of small for tiny on demo (1 prompt, made up), assumed to hold for the large pair"
    )


def test_copies_by_kind_of_prompt(runs: Callable[..., list[Claim]]):
    samples = [
        named("a", prompt(TWICE, "passage_qa")),
        named("b", prompt(HALF, "code_editing")),
        named("c/turn1", prompt(HALF, "chat")),
        named("c/turn2", prompt(TWICE, "chat")),
    ]
    found = about(runs(*samples), "copying")
    assert (found.kind, found.claimed) == ("measured", "≈ 2×")
    assert found.here == (
        "retrieval 2.00× (prompt_lookup, n=1); multi-turn 2.00× (prompt_lookup, n=1); code 0.50× (prompt_lookup, n=1)"
    )
    both = about(runs(samples[0], name="reference"), "copying")
    assert both.here.startswith("retrieval 2.00× (reference, n=1); retrieval 2.00× (prompt_lookup, n=1); ")
    where = "tiny, demo (1 prompt, made up); tiny, demo (4 prompts, made up)"
    assert both.how == f"decode seconds per token, baseline ÷ strategy: {where}"


def test_no_copies_without_a_time(runs: Callable[..., list[Claim]]):
    assert about(runs(prompt([], "code")), "copying").kind == "not yet"
    assert about(runs(prompt(TWICE, "code"), config={"batch": 2}), "copying").kind == "not yet"


def test_what_is_predictable_is_kept(runs: Callable[..., list[Claim]]):
    easy, hard = named("a", prompt([step(4, 4), step(4, 3)], "code")), named("b", prompt([step(4, 0), step()], "chat"))
    found = about(runs(easy, hard), "predictable")
    assert (found.kind, found.here) == ("measured", "3.5 tokens kept a draft on code, 0.0 on chat")
    assert about(runs(easy), "predictable").here == found.here  # one category says nothing
    drafted = about(runs(hard, named("a", prompt([step(4, 1)], "code")), name="draft_model"), "predictable")
    assert drafted.here == "1.0 tokens kept a draft on code, 0.0 on chat"
    assert "draft_model" in drafted.how


def test_a_cached_prompt_saves_its_time(runs: Callable[..., list[Claim]]):
    waits = [named(str(i), prompt([step()] * 4, ttft=n * PLAIN)) for i, n in enumerate((1, 4, 12))]
    found = about(runs(*waits), "caching")
    assert found.kind == "predicted"
    assert found.here == "up to 75 % (a prompt of 4 tokens, an answer of 5); 50 % for the median"


def test_pages_waste_their_last(runs: Callable[..., list[Claim]]):
    """Sequences of 4 + 12 and 4 + 24 rows: three pages of 16 hold 44 rows, two slots of 44 hold 88."""
    samples = [named(str(n), prompt([step()] * n)) for n in (12, 24)]
    found = about(runs(*samples), "paging")
    assert found.kind == "predicted"
    assert found.here == "8.3 % in pages, 50 % in slots for the longest"


def test_medusa_is_measured_once_it_is_there(runs: Callable[..., list[Claim]]):
    found = about(runs(prompt(TWICE), name="medusa"), "Medusa")
    assert (found.kind, found.here) == ("measured", "2.00×")


def test_broken_runs_say_nothing(runs: Callable[..., list[Claim]]):
    assert about(runs(prompt(TWICE, "code"), result={"status": "broken"}), "copying").kind == "not yet"


def test_a_busy_machine_is_part_of_how(runs: Callable[..., list[Claim]]):
    assert "made up, while busy)" in about(runs(prompt(TWICE, "code"), made={"load_before": 3.0}), "copying").how


def test_the_command(runs: Callable[..., list[Claim]], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = runs(prompt(TWICE, "code"))
    assert main(["claims", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a 4B draft for a 70B target cuts latency by more than half\n  claimed    > 50 % less: arXiv")
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert out.endswith(f"written to {tmp_path / 'claims.md'}\n")
    written = (tmp_path / "claims.md").read_text()
    assert written == markdown(found)
    assert written.count("\n| ") == 9
    assert "| copying from a reference gives about 2× on retrieval, multi-turn and code | arXiv:2304.04487 |" in written
    assert "\n- Medusa" not in written  # nothing was computed
    assert text(found, 60)[0] == found[0].text
    with pytest.raises(UserError, match="there is no folder"):
        main(["claims", str(tmp_path / "prompt_lookup-0" / "none"), f"output={tmp_path}"])
    with pytest.raises(UserError, match="claims takes folders and output=DIR"):
        main(["claims", str(tmp_path), "--against", str(tmp_path)])


def test_a_bar_does_not_end_a_cell():
    assert "| a \\| b |" in markdown([Claim("a | b", "s", "c", "h", "not yet", "")])


def test_the_experiment_composes():
    """Its cells have what the claims ask for."""
    composer = Composer()
    configs = composed(expand(["experiment=claims"], composer), composer)
    drafters = [type(config.drafting).__module__.rpartition(".")[2] for config in configs]
    assert {"reference", "prompt_lookup", "draft_model"} <= set(drafters)
    assert all(config.timing == "paired" and config.batch == 1 for config in configs)
