from dataclasses import fields
from typing import Any

import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import EMPTY, Gives, Needs, Resources, chain
from decodelab.decoding.events import Generation, Step
from decodelab.decoding.replay import needs_model, replay
from decodelab.drafting.jacobi import Jacobi
from decodelab.drafting.merge import Merge, Merged
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.reference import Reference
from decodelab.errors import UserError
from decodelab.tests.rigged import PROMPTS, Rigged, ask, oracle
from decodelab.tests.tiny import tiny_decoder, tiny_tokenizer

LOOK = PromptLookup(max_draft=6, per_match=None)


@pytest.mark.parametrize("drafter", [LOOK, Merged((LOOK, Reference(in_prompt=True)))], ids=["prompt_lookup", "merge"])
@pytest.mark.parametrize("eos", [(), "some"], ids=["length", "eos"])
@pytest.mark.parametrize("budget", [None, 2])
def test_the_steps_are_those_of_a_real_run(drafter, eos, budget):
    """Tokens, acceptances, sources and the cut at an EOS inside a draft."""
    decoder, rule = tiny_decoder(scale=3.0), Greedy()
    free = reference.generate(decoder, [ask(p, rule, 60) for p in PROMPTS], rule.law())
    eos_ids = (free[2].tokens[30],) if eos else ()
    requests = [ask(p, rule, 60, eos_ids=eos_ids) for p in PROMPTS]
    want = [loop.generate(decoder, [r], drafter, rule, budget=budget)[0] for r in requests]
    got = replay(drafter, requests, [w.tokens for w in want], budget=budget)
    for mine, real in zip(got, want, strict=True):
        assert (mine.tokens, mine.reason) == (real.tokens, real.reason)
        assert facts(mine) == facts(real)
    assert sum(s.accepted for g in got for s in g.steps) > 0


def test_an_end_that_was_drafted_counts_as_in_a_real_run():
    """An EOS inside a draft is accepted; what the draft has behind it is cut, whether or not the stop rule knows it."""
    decoder, rule = tiny_decoder(scale=3.0), Greedy()
    free = reference.generate(decoder, [ask(p, rule, 60) for p in PROMPTS], rule.law())
    drafter = Rigged(oracle({tuple(p): g.tokens for p, g in zip(PROMPTS, free, strict=True)}))
    ended = [ask(p, rule, 60, eos_ids=(free[2].tokens[30],)) for p in PROMPTS]
    want = [loop.generate(decoder, [r], drafter, rule)[0] for r in ended]
    assert [w.reason for w in want] == ["eos"] * 3
    assert {w.steps[-1].accepted - w.steps[-1].emitted for w in want} == {0}  # the cut falls inside the draft
    assert all(len(s.offered) == s.emitted for w in want for s in w.steps if s.drafted)
    for requests in (ended, [ask(p, rule, 60) for p in PROMPTS]):
        got = replay(drafter, requests, [w.tokens for w in want])
        assert [facts(g) for g in got] == [facts(w) for w in want]
        assert [g.tokens for g in got] == [w.tokens for w in want]


def facts(g: Generation) -> list[list[Any]]:
    """All that a step says but its seconds and its cache."""
    unknown = {"request", "step", "at_s", "kv_bytes", "kv_formula"}
    names = [f.name for f in fields(Step) if not f.name.endswith("_s") and f.name not in unknown]
    return [[getattr(step, name) for name in names] for step in g.steps]


def test_what_drafting_took_is_in_the_steps():
    (got,) = replay(LOOK, [ask([1, 2, 1, 2, 1], Greedy(), 9)], [[2, 1, 2, 1, 2, 1]])
    assert all(step.draft_s > 0 and step.total_s == step.draft_s for step in got.steps)


def test_a_drafter_that_needs_a_model_is_refused():
    assert Merge((LOOK,), budget="auto").needs.costs
    assert Merge((Merge((LOOK,), budget="auto"), LOOK)).needs.costs
    assert needs_model(Merge((LOOK,)).needs, "merge") is None
    auto = needs_model(Merge((LOOK,), budget="auto").needs, "merge")
    assert auto is not None
    assert auto.endswith(
        "on which merge would measure what rows cost, as drafting.budget=auto does: give it a number "
        "of rows, or leave replay out"
    )
    both = Merge((LOOK, Jacobi()), budget="auto")  # a number of rows would not do
    assert "and merge needs one: choose a drafter" in (needs_model(both.needs, "merge") or "")
    with pytest.raises(UserError, match=r"replay has answers and no model, and this drafter is built beside one"):
        Merge((LOOK,), budget="auto").build(Resources(None, tiny_tokenizer, Greedy().law()))
    drafter = Rigged(lambda *_: chain([1]), needs=Needs(argmax=True), gives=Gives("chain", 1, 1))
    with pytest.raises(UserError, match=r"replay has answers and no model, and rigged needs one"):
        replay(drafter, [ask([1], Greedy())], [[2]])
    with pytest.raises(UserError, match=r"answer 0 is empty"):
        replay(LOOK, [ask([1], Greedy())], [[]])


def test_a_drafter_of_more_rows_than_can_be_verified_is_refused():
    """Before anything is set aside for them. A chain is no longer than what may be emitted; a budget holds."""
    decoder, rule = tiny_decoder(), Greedy()
    requests = [ask([1, 2, 1, 2], rule, 6)]
    wide = Rigged(lambda *_: EMPTY, gives=Gives("forest", 16_385, 5))
    line = r"the drafter may propose 16385 rows a step, and 16384 can be verified at once: give smaller numbers"
    with pytest.raises(UserError, match=line):
        loop.generate(decoder, requests, wide, rule)
    with pytest.raises(UserError, match=line):
        replay(wide, requests, [[3]])
    long = PromptLookup(max_draft=10**12)
    for drafter, budget in ((wide, 9), (long, None)):
        (real,) = loop.generate(decoder, requests, drafter, rule, budget=budget)
        (got,) = replay(drafter, requests, [real.tokens], budget=budget)
        assert facts(got) == facts(real)


def test_a_limit_beyond_all_memory_costs_none():
    (got,) = replay(LOOK, [ask([1, 2, 1], Greedy(), 10**15, context=10**15)], [[2, 1, 2, 1]])
    assert len(got.tokens) == 4
