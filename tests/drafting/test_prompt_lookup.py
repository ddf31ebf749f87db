import re

import pytest
import torch

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import EMPTY, Gives, Opened, Room, Seen
from decodelab.decoding.law import LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.decoding.request import request
from decodelab.drafting.copying import NEAR
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.tiny import clockwork, tiny_decoder

CYCLE = [*range(5), 6, 7, 5, *range(8, 16)]  # 5 6 7 5 6 7 …; every other token follows itself
FREE = PromptLookup(per_match=None)


def _started(drafter, prompt):
    cache = clockwork(CYCLE).open_cache(1, 64)
    (state,) = drafter.start(
        [Opened(tuple(prompt), (), 99, Processors.build(LawSettings(), 0, ()), cache.open(), cache)]
    )
    return state


def _draft(drafter, state, depth=99, rows=99):
    (draft,) = drafter.propose([state], [Room(depth, rows)], [Noise(0, 0, 0)])
    return draft


def _next(prompt, drafter=FREE, **room):
    return list(_draft(drafter, _started(drafter, prompt), **room).tokens)


def _tell(drafter, state, *tokens):
    (state,) = drafter.observe([state], [Seen(tokens, state.length)])
    return state


def test_copies_what_followed_and_repeats_itself_past_the_end():
    # transformers#46790: no id of EOS is known, and none is needed
    state = _started(FREE, [5, 6, 7, 8, 9, 10, 11, 7, 8])
    draft = _draft(FREE, state)
    assert draft.tokens == (9, 10, 11, 7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8)
    assert draft.is_chain
    assert draft.q is None
    assert set(draft.q_row) == {-1}
    assert all(draft.judged)
    assert {FREE.sources[i] for i in draft.source} == {"prompt_lookup"}


def test_of_equal_matches_the_first_in_the_text_is_copied():
    assert _next([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3])[0] == 9  # vllm#22437


def test_the_longest_match_wins_wherever_it_stands():
    assert _next([3, 7, 5, 2, 3, 8, 4, 2, 3])[0] == 8


def test_max_ngram_bounds_the_match():
    text = [3, 7, 5, 2, 3, 8, 4, 2, 3]
    assert _next(text, PromptLookup(max_ngram=1))[0] == 7  # vllm#15348
    assert _next(text, PromptLookup(max_ngram=2))[0] == 8
    assert _next(text, PromptLookup(max_ngram=0))[0] == 8


def test_min_ngram_asks_for_longer_matches():
    assert _next([4, 9, 5, 4], PromptLookup(min_ngram=2)) == []
    assert _next([5, 4, 9, 5, 4], PromptLookup(min_ngram=2, max_ngram=2))[0] == 9


def test_nothing_is_proposed_where_nothing_matches():
    assert _draft(FREE, _started(FREE, [1, 2, 3])) == EMPTY
    assert _draft(FREE, _started(FREE, [1])) == EMPTY


def test_per_match_makes_drafts_longer_with_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(_next([*text, 1], PromptLookup(max_draft=7, per_match=2.0))) == 2
    assert len(_next([*text, 1, 2], PromptLookup(max_draft=7, per_match=2.0))) == 4
    assert len(_next([*text, 1, 2, 3, 4], PromptLookup(max_draft=7, per_match=2.0))) == 7
    assert len(_next([*text, 1], PromptLookup(max_draft=7, per_match=1.5))) == 1
    assert len(_next([*text, 1], PromptLookup(max_draft=7, per_match=None))) == 7
    assert len(_next([*text, 1, 2], PromptLookup(max_draft=7, per_match=1e308))) == 7  # twice that is infinite


@pytest.mark.parametrize(
    ("depth", "rows", "length"), [(3, 99, 3), (99, 2, 2), (0, 99, 0), (99, 0, 0), (0, 0, 0), (99, 99, 15)]
)
def test_a_draft_keeps_to_its_room(depth, rows, length):
    assert len(_next([1, 2, 1, 2], depth=depth, rows=rows)) == length


def test_a_cycle_is_continued_beyond_the_text():
    assert _next([7] * 48) == [7] * 15  # vllm#41758: "serving" 48 times
    assert _next([1, 2, 3] * 4)[:7] == [1, 2, 3, 1, 2, 3, 1]


def test_the_text_grows_by_the_tokens_behind_those_held():
    whole, pieces = _started(FREE, [4, 5, 6, 7]), _started(FREE, [4, 5, 6, 7])
    _tell(FREE, whole, 4, 5)
    # chunks of the prompt repeat it; behind the last one stands the first generated token
    for tokens, position in (((5, 6), 1), ((7, 4), 3)):
        FREE.observe([pieces], [Seen(tokens, position, prefill=True)])
    _tell(FREE, pieces, 5)
    assert whole.text.tokens == pieces.text.tokens == [4, 5, 6, 7, 4, 5]
    assert _draft(FREE, whole) == _draft(FREE, pieces)
    assert _draft(FREE, whole).tokens[:2] == (6, 7)


def test_the_copy_goes_on_behind_the_last_token_copied():
    # 20 21 stands twice with 9 behind it; in the second place the copy had come as far as 31 and was then broken by 50
    text = [20, 21, 9, 40, 30, 31, 32, 20, 21, 9, 41]
    state = _tell(FREE, _started(FREE, [*text, 60, 30]), 31)
    assert state.copied == 5
    state = _tell(FREE, state, 50)
    state = _tell(FREE, state, 9)
    assert _draft(FREE, state).tokens[:2] == (41, 60)
    assert _next([*text, 60, 30, 31, 50, 9])[:2] == [40, 30]  # nothing was copied yet: the first place


def test_a_copy_goes_on_no_further_than_near_and_nowhere_but_in_the_longest_match():
    far = [9, 40, 30, 31, *range(100, 100 + NEAR), 9, 41, 60, 30]
    state = _tell(FREE, _started(FREE, far), 31, 50, 9)
    assert _draft(FREE, state).tokens[0] == 40
    near = [8, 50, 8, 9, 40, 30, 31, 9, 41, 60, 30]  # 8 9 stands before, 9 alone behind the copy
    state = _tell(FREE, _started(FREE, near), 31, 8, 9)
    assert _draft(FREE, state).tokens[0] == 40


def test_proposing_changes_nothing():
    state = _started(FREE, [1, 2, 3, 1, 2])
    assert _draft(FREE, state, depth=2) == _draft(FREE, state, depth=2)
    assert _draft(FREE, state).tokens[:2] == (3, 1)


def _request(target, prompt, count, acceptance, eos_ids=()):
    config = target.config
    law, context = acceptance.law(), config.max_positions
    return request(prompt, law=law, max_new_tokens=count, vocab=config.vocab, context=context, eos_ids=eos_ids)


@pytest.mark.parametrize("acceptance", [Greedy(), Sampling()], ids=["greedy", "sampling"])
def test_a_text_that_repeats_itself_is_accepted_whole(acceptance):
    target = clockwork(CYCLE)
    (got,) = loop.generate(target, [_request(target, [5, 6, 7, 5], 50, acceptance)], PromptLookup(), acceptance)
    assert got.tokens == ([6, 7, 5] * 17)[:50]
    assert [step.drafted for step in got.steps] == [4, 14, 15, 12]
    assert all(step.accepted == step.drafted for step in got.steps)
    assert {source for step in got.steps for source in step.sources} == {"prompt_lookup"}
    three = [_request(target, prompt, 50, acceptance) for prompt in ([5, 6, 7, 5], [6, 7, 5, 6], [7, 5, 6, 7])]
    for got in loop.generate(target, three, beside_a_wrong_one(PromptLookup()), acceptance):
        assert [step.accepted for step in got.steps] == [4, 14, 15, 12]


def test_an_eos_in_the_copied_span_ends_the_text():
    # transformers#31301, transformers#27775: the drafter copies on behind it, and the loop cuts
    target = clockwork([*range(5), 6, 7, 8, 9, 10, 5, *range(11, 16)])
    prompt = [5, 6, 7, 8, 9, 10, 5, 6]
    (got,) = loop.generate(target, [_request(target, prompt, 30, Greedy(), eos_ids=(9,))], FREE, Greedy())
    assert (got.tokens, got.reason) == ([7, 8, 9], "eos")
    assert got.steps[0].drafted == 15


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_no_more_tokens_than_asked_for(count):
    # transformers#46993, transformers#47195
    target = clockwork(CYCLE)
    (got,) = loop.generate(target, [_request(target, [5, 6, 7, 5], count, Greedy())], PromptLookup(), Greedy())
    assert (len(got.tokens), got.reason) == (count, "length")


@pytest.mark.parametrize("bits", [torch.float32, torch.float64])
def test_a_cycle_in_the_prompt_changes_no_token(bits):
    # vllm#41758
    target = tiny_decoder(dtype=bits)
    req = _request(target, [9] * 48, 32, Greedy())
    (plain,) = reference.generate(target, [req], Greedy().law())
    (got,) = loop.generate(target, [req], PromptLookup(), Greedy())
    assert got.tokens == plain.tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_draft": 0}, "drafting.max_draft must be at least 1, got 0; drafting=none drafts nothing"),
        ({"min_ngram": 0}, "drafting.min_ngram must be at least 1, got 0"),
        (
            {"min_ngram": 3, "max_ngram": 2},
            "drafting.max_ngram must be at least min_ngram (3) or null for no bound, got 2",
        ),
        ({"max_ngram": -1}, "drafting.max_ngram must be at least min_ngram (1) or null for no bound, got -1"),
        ({"per_match": 0.0}, "drafting.per_match must be above 0 and finite, or null for no cap, got 0.0"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        PromptLookup(**wrong)


def test_what_it_gives_follows_its_settings():
    assert PromptLookup(max_draft=6).gives == Gives("chain", rows=6, depth=6, q="one-hot")
    assert PromptLookup().check("a target") == []
