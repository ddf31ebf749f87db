"""The draft model: what it proposes, what its cache keeps, and where it has to stop."""

import re
import warnings

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Block, Greedy, Sampling
from decodelab.decoding.draft import Opened, Room
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.noise import Noise
from decodelab.decoding.request import Request, request
from decodelab.drafting.draft_model import DraftModel, DraftSpec, ModelDrafter, same_tokens
from decodelab.errors import UserError
from decodelab.testing import tiny_decoder, tiny_tokenizer
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.tiny import clockwork

PROMPTS = ([5, 9, 30], [7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 3, 22, 41, 9])
RULES = [Greedy(), Greedy(repetition_penalty=1.2), Sampling(temperature=0.8), Sampling(top_k=5, top_p=0.9)]


def ask(target: Decoder, rule: Acceptance, n: int, prompts=PROMPTS) -> list[Request]:
    c = target.config
    return [request(p, law=rule.law(), max_new_tokens=n, vocab=c.vocab, context=c.max_positions) for p in prompts]


def drafter(model: Decoder, target: Decoder, rule: Acceptance, **settings) -> ModelDrafter:
    return ModelDrafter(DraftModel(**settings), model, target.config.vocab, rule.law())


def accepted(generations) -> tuple[int, int]:
    steps = [s for g in generations for s in g.steps]
    return sum(s.accepted for s in steps), sum(s.drafted for s in steps)


def opened(model: Decoder, r: Request) -> Opened:
    cache = model.open_cache(1, 64)
    return Opened(r.prompt, (), r.stop.limit, r.processors, cache.open(), cache)


def test_propose_is_what_the_model_itself_would_say():
    model = clockwork([1, 2, 3, 4, 5, 6, 7, 0])
    (r,) = ask(model, Greedy(), 20, [[2]])
    d = drafter(model, model, Greedy(), max_draft=3)
    states = d.start([opened(model, r)])
    states[0].tokens.append(3)
    (draft,) = d.propose(states, [Room(9, 9)], [Noise(0, 0, 1)])
    assert (draft.tokens, draft.parents, draft.q_row) == ((4, 5, 6), (-1, 0, 1), (-1, -1, -1))
    states = d.start([opened(model, r)])
    states[0].tokens.append(6)
    (shorter,) = d.propose(states, [Room(2, 9)], [Noise(0, 0, 1)])
    assert shorter.tokens == (7, 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("together", [True, False])
def test_a_model_that_drafts_for_itself_is_always_right(rule, together):
    """vllm#8783; vllm#9730: after a draft is kept whole, the draft model has not read its last token yet."""
    target = tiny_decoder()
    d = drafter(target, target, rule, max_draft=3)
    requests = ask(target, rule, 20)
    groups = [requests] if together else [[r] for r in requests]
    for group in groups:
        got = loop.generate(target, group, d, rule, seed=3)
        assert [g.tokens for g in got] == [g.tokens for g in reference.generate(target, group, rule.law(), seed=3)]
        kept, offered = accepted(got)
        assert kept == offered > 0
        beside = loop.generate(target, group, beside_a_wrong_one(d), rule, seed=3)
        assert [[s.accepted for s in g.steps] for g in beside] == [[s.accepted for s in g.steps] for g in got]


def test_sampled_drafts_from_the_target_itself_are_all_kept():
    target, rule = tiny_decoder(), Sampling(temperature=0.8)
    kept, offered = accepted(
        loop.generate(target, ask(target, rule, 20), drafter(target, target, rule, proposal="sampled"), rule)
    )
    assert kept == offered > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_poor_draft_changes_no_token(rule):
    target, poor = tiny_decoder(), tiny_decoder(seed=1)
    got = loop.generate(target, ask(target, rule, 20), drafter(poor, target, rule, max_draft=5), rule, seed=3)
    want = reference.generate(target, ask(target, rule, 20), rule.law(), seed=3)
    assert [g.tokens for g in got] == [g.tokens for g in want]


def test_a_draft_with_fewer_embeddings_than_the_target():
    """transformers#45307: 16 against 24 ids. The cycle leaves the draft's 16 and comes back."""
    target, small = clockwork([*range(1, 24), 0]), clockwork([*range(1, 16), 0])
    (r,) = ask(target, Greedy(), 40, [[9]])
    with pytest.warns(RuntimeWarning, match="a token beyond the draft model's 16 embeddings: no drafts behind it"):
        (got,) = loop.generate(target, [r], drafter(small, target, Greedy(), max_draft=3), Greedy())
    assert got.tokens == [(10 + i) % 24 for i in range(40)]
    assert accepted([got])[0] >= 3
    assert all(s.drafted == 0 for s in got.steps[4:])


def test_a_draft_with_more_embeddings_than_the_target():
    target, large = clockwork([*range(1, 16), 0]), clockwork([*range(1, 24), 0])
    rule = Sampling(temperature=1.0)
    (r,) = ask(target, rule, 30, [[9]])
    for proposal in ("coupled", "sampled"):
        (got,) = loop.generate(target, [r], drafter(large, target, rule, proposal=proposal), rule)
        assert got.tokens == [(10 + i) % 16 for i in range(30)]


@pytest.mark.parametrize("length", [30, 33])
def test_past_its_own_context_nothing_is_drafted(length):
    """vllm#5342, vllm#24662: a draft model of 32 positions, prompts around that, and a target that goes on."""
    target, short = tiny_decoder(), tiny_decoder(max_position_embeddings=32)
    prompt = [3 + i % 40 for i in range(length)]
    requests = ask(target, Greedy(), 12, [prompt])
    with pytest.warns(RuntimeWarning, match="the draft model's context of 32 tokens is full: no drafts past it"):
        (got,) = loop.generate(target, requests, drafter(short, target, Greedy()), Greedy())
    assert got.tokens == reference.generate(target, requests, Greedy().law())[0].tokens
    assert all(s.depth == 0 for s in got.steps[4:])


def test_no_draft_is_begun_where_the_model_is_unsure():
    target = tiny_decoder()
    rule = Sampling(temperature=2.0)
    sure = drafter(target, target, rule, max_draft=6, confidence=0.999999)
    got = loop.generate(target, ask(target, rule, 15), sure, rule)
    assert {s.drafted for g in got for s in g.steps[:-1]} == {1}  # the first token is always offered


def test_a_model_whose_numbers_overflow_drafts_nothing():
    target, model = tiny_decoder(), tiny_decoder(1)
    model.unembedding.weight[5] = torch.nan
    for rule, proposal in ((Block(), "sampled"), (Sampling(), "sampled"), (Greedy(), "coupled")):
        requests = ask(target, rule, 5)
        d = drafter(model, target, rule, proposal=proposal)
        with pytest.warns(RuntimeWarning, match=r"the draft model's logits are not finite in torch.float64: no drafts"):
            got = loop.generate(target, requests, d, rule)
        assert accepted(got) == (0, 0)


def test_sampled_drafts_are_coupled_under_a_greedy_rule():
    target = tiny_decoder()
    d = drafter(target, target, Greedy(), proposal="sampled")
    assert d.gives.q == "one-hot"
    kept, offered = accepted(loop.generate(target, ask(target, Greedy(), 12), d, Greedy()))
    assert kept == offered > 0


def test_an_abort_between_propose_and_observe_frees_everything():
    target = tiny_decoder()
    d = drafter(target, target, Greedy())
    requests = ask(target, Greedy(), 12)
    cache = target.open_cache(3, 64)
    states = d.start([Opened(r.prompt, (), 12, r.processors, cache.open(), cache) for r in requests])
    for state in states:
        state.tokens.append(7)
    d.propose(states, [Room(4, 4)] * 3, [Noise(0, 0, 0)] * 3)
    for state in states:
        d.finish(state)
    own = states[0].reading.cache
    assert own.staged == 0
    assert sorted(own.open() for _ in range(3)) == [0, 1, 2]


def test_other_tokens_are_refused():
    a = tiny_tokenizer()
    same_tokens(a, tiny_tokenizer(), "draft", "target")
    b = tiny_tokenizer()
    assert isinstance(b, PreTrainedTokenizerFast)
    b.add_tokens(["<new>"])
    with pytest.raises(
        UserError, match=re.escape("draft cannot draft for target: their tokenizers differ (token '<new>'")
    ):
        same_tokens(a, b, "draft", "target")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_draft": 0}, "drafting.max_draft must be at least 1, got 0"),
        ({"confidence": 1.0}, "drafting.confidence must be at least 0 and below 1, got 1.0"),
        ({"temperature": 0.5}, "goes with proposal=sampled, got 0.5 with coupled"),
        ({"temperature": float("nan"), "proposal": "sampled"}, "drafting.temperature must be at least 1e-6 and finite"),
    ],
)
def test_settings_out_of_range(settings, text):
    with pytest.raises(UserError, match=re.escape(text)):
        DraftModel(**settings)


def test_a_model_must_be_named():
    with pytest.raises(UserError, match=re.escape("name one with drafting.model.name= or drafting.model.path=")):
        _ = DraftSpec().model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DraftSpec(name="smollm2-135m").model.name == "smollm2-135m"
