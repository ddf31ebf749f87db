import re

import pytest

from decodelab.decoding import loop
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import EMPTY, Gives, Opened, Room, Seen
from decodelab.decoding.law import LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.decoding.request import request
from decodelab.drafting.reference import Reference
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.tiny import clockwork

COUNTING = [*range(1, 40), 0]
FREE = Reference(per_match=None)


def _started(drafter, prompt, *documents):
    cache = clockwork(COUNTING).open_cache(1, 64)
    processors = Processors.build(LawSettings(), 0, ())
    (state,) = drafter.start([Opened(tuple(prompt), tuple(map(tuple, documents)), 99, processors, cache.open(), cache)])
    return state


def _next(state, drafter=FREE, rows=99):
    (draft,) = drafter.propose([state], [Room(99, rows)], [Noise(0, 0, 0)])
    return list(draft.tokens)


def test_copies_from_the_document_that_the_text_quotes():
    state = _started(FREE, [1, 2, 7, 8], [5, 6, 9], [7, 8, 3, 4])
    (draft,) = FREE.propose([state], [Room(99, 99)], [Noise(0, 0, 0)])
    assert draft.tokens == (3, 4)
    assert draft.is_chain
    assert draft.q is None
    assert {FREE.sources[i] for i in draft.source} == {"reference"}


def test_the_trigger_is_the_shortest_match_and_copy_the_longest_draft():
    document = [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert _next(_started(FREE, [8], document), Reference(trigger=2)) == []
    assert _next(_started(FREE, [7, 8], document), Reference(trigger=2, copy=3, per_match=None)) == [9, 1, 2]
    assert _next(_started(FREE, [7, 8], document), Reference(trigger=2, copy=5, per_match=2.0)) == [9, 1, 2, 3]
    assert _next(_started(FREE, [7, 8], document), Reference(copy=5), rows=1) == [9]


def test_the_longest_match_wins_then_the_first_place():
    documents = [8, 1, 5, 8, 2], [7, 8, 3], [6, 7, 8, 4]
    assert _next(_started(FREE, [8], *documents))[0] == 1
    assert _next(_started(FREE, [7, 8], *documents))[0] == 3
    assert _next(_started(FREE, [6, 7, 8], *documents))[0] == 4
    assert _next(_started(FREE, [0, 8], *documents))[0] == 1


def test_a_copy_ends_with_its_document_and_no_match_runs_across():
    assert _next(_started(FREE, [1, 2], [1, 2, 3], [4, 5])) == [3]
    assert _next(_started(FREE, [1, 2, 3], [1, 2, 3], [4, 5])) == []
    assert _next(_started(FREE, [3, 4], [1, 2, 3], [4, 5]), Reference(trigger=2)) == []


def test_the_copy_goes_on_behind_the_last_token_copied():
    document = [9, 1, 30, 31, 32, 9, 2]
    state = _started(FREE, [30], document)
    for tokens in ((31,), (50, 9)):  # 31 was copied, 50 stands in the place of 32
        (state,) = FREE.observe([state], [Seen(tokens, state.length)])
    assert _next(state) == [2]
    assert _next(_started(FREE, [30, 31, 50, 9], document))[0] == 1


def test_the_prompt_is_a_document_where_asked_for():
    both = Reference(in_prompt=True, per_match=None)
    assert _next(_started(FREE, [1, 2, 3, 1, 2])) == []
    assert _next(_started(both, [1, 2, 3, 1, 2]), both)[:4] == [3, 1, 2, 3]
    # a document stands before the prompt, and a copy from it ends with it
    assert _next(_started(both, [1, 2, 3, 1, 2], [1, 2, 4]), both) == [4]


def test_without_documents_nothing_is_drafted():
    assert FREE.propose([_started(FREE, [1, 2, 1])], [Room(9, 9)], [Noise(0, 0, 0)]) == [EMPTY]
    assert _next(_started(FREE, [1, 2, 1], [])) == []


@pytest.mark.parametrize("acceptance", [Greedy(), Sampling()], ids=["greedy", "sampling"])
def test_a_document_that_says_what_the_model_will_is_accepted_whole(acceptance):
    target = clockwork(COUNTING)
    documents = [[5, 4, 3], list(range(2, 40))]
    law = {"law": acceptance.law(), "max_new_tokens": 30, "vocab": 40, "context": 512}
    (got,) = loop.generate(target, [request([2, 3], documents=documents, **law)], Reference(), acceptance)
    assert got.tokens == list(range(4, 34))
    assert [step.drafted for step in got.steps] == [6, 15, 5]
    assert all(step.accepted == step.drafted for step in got.steps)
    assert {source for step in got.steps for source in step.sources} == {"reference"}
    three = [request([t, t + 1], documents=documents, **law) for t in (2, 3, 4)]
    for got in loop.generate(target, three, beside_a_wrong_one(Reference()), acceptance):
        assert [step.accepted for step in got.steps] == [6, 15, 5]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trigger": 0}, "drafting.trigger must be at least 1, got 0"),
        ({"copy": 0}, "drafting.copy must be at least 1, got 0; drafting=none drafts nothing"),
        ({"per_match": -1.0}, "drafting.per_match must be above 0 and finite, or null for no cap, got -1.0"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Reference(**wrong)


def test_what_it_gives_and_needs_follows_its_settings():
    assert Reference(copy=6).gives == Gives("chain", rows=6, depth=6, q="one-hot")
    assert Reference().needs.documents
    assert Reference().check("a target") == []
