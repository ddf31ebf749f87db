import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import Opened, Remembers, Resources, Room, Seen
from decodelab.decoding.law import LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.drafting.lookahead import Lookahead, LookaheadDrafter, Pool
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer

CYCLE = [*range(5), 6, 7, 8, 5, *range(9, 16)]  # 5 6 7 8 5 6 …


def made(**keys):
    settings = Lookahead(**keys)
    return settings.build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))


def started(drafter, prompt):
    cache = clockwork(CYCLE).open_cache(1, 64)
    opened = Opened(tuple(prompt), (), 99, Processors.build(LawSettings(), 0, ()), cache.open(), cache)
    return drafter.start([opened])[0]


def draft(drafter, state, depth=99, rows=99):
    return drafter.propose([state], [Room(depth, rows)], [Noise(0, 0, 0)])[0]


def test_the_pool_holds_the_latest_continuations_of_a_token():
    pool = Pool(2)
    for gram in ([1, 2, 3], [1, 4, 5], [2, 9, 9], [1, 2, 3], [1, 6, 7]):
        pool.add(gram)
    assert list(pool.after(1)) == [(6, 7), (2, 3)]  # 4 5 was used longest ago
    assert list(pool.after(2)) == [(9, 9)]
    assert list(pool.after(3)) == []


def test_the_forest_of_a_full_window():
    """Candidates with one row for a common beginning; the window's columns behind each other, levels upon columns."""
    drafter = made(window=2, ngram=3, guesses=2, from_text=False)
    state = started(drafter, [1, 2, 3])
    state.pool.add([3, 7, 8])
    state.pool.add([3, 7, 9])
    state.levels = [[10, 11], [20, 21]]
    found = draft(drafter, state)
    assert found.tokens == (7, 9, 8, 10, 20, 11, 21)
    assert found.parents == (-1, 0, 0, -1, 3, 3, 5)
    assert found.judged == (True,) * 3 + (False,) * 4
    assert found.depth == 2


def test_full_columns_become_n_grams_and_the_window_moves_on():
    drafter = made(window=2, ngram=3, guesses=5, from_text=False)
    state = started(drafter, [1, 2, 3])
    state.levels = [[10, 11], [20, 21]]
    draft(drafter, state)
    # rows: root, 10, 20, 11, 21
    drafter.observe([state], [Seen((4,), 3, argmax=(4, 50, 30, 60, 31))])
    assert list(state.pool.after(10)) == [(20, 30)]
    assert list(state.pool.after(11)) == [(21, 31)]
    assert state.levels == [[20, 21], [30, 31]]
    assert state.tokens == [1, 2, 3, 4]


def test_a_window_fills_level_by_level_and_enters_nothing_before():
    drafter = made(window=2, ngram=3, guesses=5, from_text=False)
    state = started(drafter, [1, 2, 3])
    assert [len(level) for level in state.levels] == [3]
    first = list(state.levels[0])
    draft(drafter, state)
    drafter.observe([state], [Seen((4,), 3, argmax=(4, 30, 31, 32))])
    assert state.levels == [first[1:], [31, 32]]  # behind the columns that are left
    assert not state.pool.continuations


def test_the_first_step_has_candidates_from_the_prompt():
    state = started(made(window=1, ngram=3, guesses=2), [5, 6, 7, 8, 5])
    found = draft(made(window=1, ngram=3, guesses=2), state)
    assert found.tokens[:2] == (6, 7)
    assert found.judged[:2] == (True, True)


def test_a_full_match_keeps_n_minus_1_guesses_and_one_more_token():
    """The reference loop stops one short. Alone, in a merge and three at once."""
    decoder, rule = clockwork(CYCLE), Greedy()
    for drafter in (made(window=2, ngram=4, guesses=2), beside_a_wrong_one(made(window=2, ngram=4, guesses=2))):
        requests = [ask([t, *CYCLE_FROM[t]], rule, 17) for t in (5, 6, 7)]
        for got in loop.generate(decoder, requests, drafter, rule):
            assert [s.accepted for s in got.steps] == [3] * 4
            assert [s.emitted for s in got.steps] == [4] * 4


CYCLE_FROM = {5: [6, 7, 8, 5, 6, 7, 8, 5], 6: [7, 8, 5, 6, 7, 8, 5, 6], 7: [8, 5, 6, 7, 8, 5, 6, 7]}


def test_the_window_finds_what_the_prompt_does_not_say():
    """Without the text's own n-grams: the pool fills from the window alone."""
    decoder, rule = clockwork(CYCLE), Greedy()
    drafter = made(window=4, ngram=3, guesses=3, from_text=False)
    (got,) = loop.generate(decoder, [ask([1, 5], rule, 30)], drafter, rule)
    assert got.tokens == ([6, 7, 8, 5] * 8)[:30]
    assert got.steps[-2].accepted == 2
    assert len(got.steps) < 20


def test_w_guesses_are_g():
    """TensorRT-LLM#4003: W = 3 and G = 5 verify at most five candidates, not three."""
    drafter = made(window=3, ngram=3, guesses=5, from_text=False)
    state = started(drafter, [1, 2, 3])
    for i in range(9):
        state.pool.add([3, 20 + i, 40 + i])
    state.levels = [[10, 11, 12], [20, 21, 22]]
    found = draft(drafter, state)
    assert (sum(found.judged), len(found) - sum(found.judged)) == (10, 6)
    assert len(found) == drafter.gives.rows == (3 + 5) * 2


@pytest.mark.parametrize("rows", range(9))
def test_in_little_room_whole_columns_are_verified(rows):
    drafter = made(window=3, ngram=3, guesses=2, from_text=False)
    state = started(drafter, [1, 2, 3])
    state.pool.add([3, 7, 8])
    state.levels = [[10, 11, 12], [20, 21, 22]]
    found = draft(drafter, state, rows=rows)
    assert len(found) <= rows
    assert (len(found) - sum(found.judged)) % 2 == 0
    drafter.observe([state], [Seen((4,), 3, argmax=tuple(range(100, 101 + len(found))))])
    assert [len(level) for level in state.levels] == [3, 3]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
def test_what_is_emitted_is_plain_decoding(rule):
    decoder = tiny_decoder(scale=4.0)
    requests = [ask(p, rule, 30) for p in PROMPTS]
    got = loop.generate(decoder, requests, made(), rule, seed=2)
    want = reference.generate(decoder, requests, rule.law(), seed=2)
    assert [g.tokens for g in got] == [w.tokens for w in want]


def test_nothing_of_one_prompt_reaches_the_next_unless_asked():
    """TensorRT-LLM#2263. Warm, the second run of a prompt knows it; `forget` makes it cold again."""
    decoder, rule = tiny_decoder(), Greedy()

    def steps(drafter):
        return len(loop.generate(decoder, [ask(PROMPTS[0], rule, 30)], drafter, rule)[0].steps)

    cold = made()
    assert not isinstance(cold, Remembers) or cold.memory is None
    assert steps(cold) == steps(cold)
    warm = made(remember=True)
    first = steps(warm)
    assert steps(warm) < first
    warm.forget()
    assert steps(warm) == first


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"ngram": 1}, "ngram must be at least 2, got 1"),
        ({"guesses": 0}, "guesses must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said(keys, line):
    with pytest.raises(UserError, match=f"drafting.{line}"):
        Lookahead(**keys)


def test_a_drafter_of_its_own_pool():
    assert isinstance(made(remember=True).memory, Pool)
    assert LookaheadDrafter(Lookahead()).memory is None
