"""Every drafter of configs/drafting with every rule of configs/acceptance: a cell runs, or is one of those written down
here. Where nothing else is declared, its output is plain decoding's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from decodelab.attention.options import Attention, Hybrid, LowBits, SinkWindow, Table, Window
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling
from decodelab.decoding.draft import Resources
from decodelab.decoding.events import Generation
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.request import Request
from decodelab.experiments.compose import described, groups
from decodelab.experiments.composition import resolve_pair
from decodelab.experiments.construct import Constructor
from decodelab.tests.drafting.builders import OPTIONS, configured
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import ask
from decodelab.tests.tiny import tiny_decoder, tiny_tokenizer
from decodelab.tests.twins import SIZES, twins

RULES = groups()["acceptance"]
STATEFUL = {"repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "bad_words"}
# The cells that are refused, each with its reason: (rule, drafters, reason).
REFUSED = (
    (
        "block",
        {"eagle", "lookahead", "medusa", "merge", "retrieval", "suffix", "token_recycling"},
        "acceptance=block judges chains, and this drafter proposes a ",
    ),
)
PROMPTS = ([7, 30, 12, 7, 30], [5, 9, 41, 5, 9, 41, 5, 9])
DOCUMENTS = ([30, 12, 44, 3, 19], [9, 41, 5, 22])
TOKENS = 12
LAYOUTS: dict[str, Attention] = {
    "window": Window(4),
    "sink_window": SinkWindow(4, 2),
    "hybrid": Hybrid(4, "wf"),
    "kv_int8": LowBits(8),
    "kv_int4": LowBits(4),
    "recipe": Table("3*(window=5 sinks=1) 1*full | share=2 bits=8"),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are checked in the tests of the parts."""
    unchecked(monkeypatch)


@cache
def target() -> Decoder:
    return tiny_decoder(scale=6.0)


def rule_of(name: str, **keys: Any) -> Acceptance:
    """An option of the group `acceptance`, with the keys of its YAML."""
    found: Acceptance = Constructor().build(described("acceptance", name, RULES), Acceptance, "acceptance")
    return replace(found, **keys)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each rule as it is, and those that take penalties with some."""
    for name in sorted(RULES):
        yield name, {}
        if "repetition_penalty" in described("acceptance", name, RULES):
            yield name, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}


def asked(rule: Acceptance) -> list[Request]:
    return [ask(prompt, rule, TOKENS, documents=DOCUMENTS) for prompt in PROMPTS]


@cache
def plain(rule: Acceptance) -> list[list[int]]:
    done: list[Generation] = reference.generate(target(), asked(rule), rule.law(), seed=3)
    return [g.tokens for g in done]


@pytest.mark.parametrize(
    ("rule_name", "keys"), list(variants()), ids=lambda v: v if isinstance(v, str) else "+".join(v)
)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_cell(name: str, rule_name: str, keys: dict[str, Any]) -> None:
    rule, settings = rule_of(rule_name, **keys), configured(name)
    resources = Resources(target(), tiny_tokenizer(), rule.law())
    drafter = settings.build(resources)
    known = settings if hasattr(settings, "gives") else drafter  # a stand-in has no settings
    found = resolve_pair(known, rule)
    reasons = [reason for refused, drafters, reason in REFUSED if refused == rule_name and name in drafters]
    if reasons or found.verdict == "refused":
        assert found.verdict == "refused"
        assert [reason for reason in reasons if found.reasons[0].startswith(reason)], found.reasons
        return
    got = loop.generate(target(), asked(rule), drafter, rule, seed=3)
    assert [len(g.tokens) for g in got] == [TOKENS] * len(PROMPTS)
    if found.exactness == "exact":
        assert [g.tokens for g in got] == plain(rule)
    if rule == Greedy() and name != "none":  # or the cell would say nothing
        assert sum(step.drafted for g in got for step in g.steps) > 0


def test_which_cells_are_exact() -> None:
    """Greedy always; sampling where candidates are one-hot; the others never (they draw on their own, or are lossy)."""
    exact = {
        rule_name
        for rule_name in RULES
        if resolve_pair(configured("prompt_lookup"), rule_of(rule_name)).exactness == "exact"
    }
    assert exact == {"greedy", "sampling"}


def test_rules_that_read_all_rows_take_nothing_that_is_followed_along_a_path() -> None:
    """So none of ours can be refused for it; one of a user's own is, with the reason (test_composition.py)."""
    for name in RULES:
        stateful = STATEFUL & set(described("acceptance", name, RULES))
        assert bool(stateful) == (rule_of(name).reads == "path"), name


def test_what_is_refused_is_there() -> None:
    for rule_name, drafters, _ in REFUSED:
        assert rule_name in RULES
        assert drafters <= set(OPTIONS)


@cache
def laid_out(name: str) -> Decoder:
    """Random weights of four layers with other keys and values; windows are of a few tokens."""
    config = LlamaConfig(**SIZES)
    own = ModelConfig.from_hf(config)
    return Decoder(
        replace(own, layout=LAYOUTS[name].layout(own.layout, own.heads)),
        twins(config, torch.float64)[0].state_dict(),
        dtype=torch.float64,
    )


@cache
def plainly(layout: str, rule: Acceptance) -> list[list[int]]:
    return [g.tokens for g in reference.generate(laid_out(layout), asked(rule), rule.law(), seed=3)]


@pytest.mark.parametrize(
    ("layout", "rule"), [*((layout, Greedy()) for layout in LAYOUTS), ("window", Sampling(temperature=1.5))]
)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_over_other_layouts(name: str, layout: str, rule: Acceptance) -> None:
    """Rows of a tree see what their own path left in the window and in the codes, whoever drafts."""
    decoder = laid_out(layout)
    drafter = configured(name).build(Resources(decoder, tiny_tokenizer(), rule.law()))
    got = loop.generate(decoder, asked(rule), drafter, rule, seed=3)
    assert [g.tokens for g in got] == plainly(layout, rule)
