import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import Room, Seen
from decodelab.decoding.noise import Noise
from decodelab.drafting.jacobi import Jacobi, State
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder

STILL = list(range(16))  # every token follows itself


def drafts(drafter, state, depth=99):
    (draft,) = drafter.propose([state], [Room(depth, 99)], [Noise(0, 0, 0)])
    return list(draft.tokens)


def test_a_guess_becomes_what_the_target_says_behind_the_one_before():
    drafter, state = Jacobi(window=3), State([7, 8, 9])
    assert drafts(drafter, state) == [7, 8, 9]  # the text once more
    # the target says 1 behind the text, and 2, 3, 4 behind the three guesses; the first guess was wrong
    drafter.observe([state], [Seen((1,), 3, choices=(1, 2, 3, 4))])
    assert state.tokens == [7, 8, 9, 1]
    assert drafts(drafter, state) == [2, 3, 4]
    # two of them hold: 2, 3 and what stands behind them, 5; the guess behind the third follows
    drafter.observe([state], [Seen((2, 3, 5), 4, (0, 1), choices=(2, 3, 5, 6))])
    assert drafts(drafter, state)[0] == 6


def test_a_shorter_room_and_a_step_without_a_draft_lose_no_guess():
    drafter, state = Jacobi(window=4), State([7, 8])
    drafts(drafter, state, depth=0)
    state.guess = [1, 2, 3, 4]
    assert drafts(drafter, state, depth=2) == [1, 2]
    drafter.observe([state], [Seen((9,), 2, choices=(9, 5, 6))])
    assert state.guess == [5, 6, 4]  # 3 was guessed where the target says 6 now
    assert drafts(drafter, state, depth=0) == []
    drafter.observe([state], [Seen((5,), 3, choices=(5,))])
    assert state.guess == [6, 4]


def test_all_is_kept_where_the_text_stands_still():
    """Alone, in a merge and three at once: each step keeps the whole window."""
    decoder, rule = clockwork(STILL), Greedy()
    for drafter in (Jacobi(window=5), beside_a_wrong_one(Jacobi(window=5))):
        requests = [ask([t, t, t, t, t], rule, 19) for t in (3, 4, 5)]
        for got in loop.generate(decoder, requests, drafter, rule):
            assert [s.accepted for s in got.steps] == [5, 5, 5]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.7), Greedy(repetition_penalty=1.3)], ids=str)
def test_the_fixed_point_is_plain_decoding(rule):
    """In fewer iterations than tokens; under sampling each position keeps its noise."""
    decoder = tiny_decoder(scale=4.0)
    requests = [ask(p, rule, 24) for p in PROMPTS]
    got = loop.generate(decoder, requests, Jacobi(window=6), rule, seed=3)
    want = reference.generate(decoder, requests, rule.law(), seed=3)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    if not rule.law().sample:
        assert sum(s.accepted for g in got for s in g.steps) > 0
        assert sum(len(g.steps) for g in got) < sum(len(g.tokens) - 1 for g in got)


def test_sampled_iterations_converge_too():
    """A law that hardly looks at the text: with the noise of each position a guess is right at once, wherever it stands
    (with fresh noise for each iteration it would be so by chance alone)."""
    decoder, rule = tiny_decoder(scale=0.5), Sampling()
    (got,) = loop.generate(decoder, [ask(PROMPTS[0], rule, 40)], Jacobi(window=4), rule)
    assert sum(s.accepted for s in got.steps) / len(got.steps) > 1


def test_what_is_wrong_is_said():
    with pytest.raises(UserError, match=r"drafting.window must be at least 1, got 0; drafting=none drafts nothing"):
        Jacobi(window=0)
