import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Gives, Needs, chain
from decodelab.decoding.errors import UserError
from decodelab.decoding.replay import replay
from decodelab.drafting.merge import Merged
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.reference import Reference
from decodelab.tests.rigged import PROMPTS, Rigged, ask
from decodelab.tests.tiny import tiny_decoder

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
        facts = ("drafted", "verified", "depth", "accepted", "emitted", "sources", "also_proposed")
        assert [[getattr(s, f) for f in facts] for s in mine.steps] == [
            [getattr(s, f) for f in facts] for s in real.steps
        ]
    assert sum(s.accepted for g in got for s in g.steps) > 0


def test_a_drafter_that_needs_a_model_is_refused():
    drafter = Rigged(lambda *_: chain([1]), needs=Needs(argmax=True), gives=Gives("chain", 1, 1))
    with pytest.raises(UserError, match=r"replay has answers and no model, and rigged needs one"):
        replay(drafter, [ask([1], Greedy())], [[2]])
    with pytest.raises(UserError, match=r"answer 0 is empty"):
        replay(LOOK, [ask([1], Greedy())], [[]])
