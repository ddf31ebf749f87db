import pytest
from transformers import LlamaConfig

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import EMPTY, Gives, Opened, Resources, Room, Seen
from decodelab.decoding.model.source import Source
from decodelab.decoding.noise import Noise
from decodelab.drafting.token_recycling import Recycler, State, TokenRecycling
from decodelab.drafting.trees import cartesian, shape, write_tree
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer

NEXT = [*range(1, 16), 0]


def made(tree=None, **keys):
    settings = TokenRecycling(**keys)
    return Recycler(settings, settings.shape if tree is None else tree, {} if settings.remember else None)


def draft(drafter, state, depth=99, rows=99):
    return drafter.propose([state], [Room(depth, rows)], [Noise(0, 0, 0)])[0]


def test_a_tree_is_filled_from_the_table():
    drafter = made(shape([[0, 0], [0, 1], [1, 0], [2]]), width=3)
    state = State([1], {1: (2, 3), 2: (4, 5), 3: (6,), 9: (9,)})
    found = draft(drafter, state)
    assert found.tokens == (2, 3, 4, 5, 6)  # nothing is known of a third follower
    assert found.parents == (-1, -1, 0, 0, 1)
    assert draft(drafter, state, depth=1).tokens == (2, 3)
    assert draft(drafter, state, rows=3).tokens == (2, 3, 4)
    assert draft(drafter, State([7], {1: (2,)})) is EMPTY


def test_every_row_teaches_kept_or_not():
    drafter = made(cartesian([2]), width=2)
    state = State([1], {1: (2, 3)})
    draft(drafter, state)
    drafter.observe([state], [Seen((3, 8), 1, (1,), topk=((3, 2), (5, 6), (8, 9)))])
    assert state.table == {1: (3, 2), 2: (5, 6), 3: (8, 9)}
    assert state.tokens == [1, 3, 8]


def test_the_prompts_pairs_are_known_from_the_start():
    """The later follower of a token first."""
    decoder, rule = clockwork(NEXT), Greedy()
    opened = Opened((1, 5, 1, 6, 1), (), 9, ask([1], rule).processors, 0, decoder.open_cache(1, 8))
    (state,) = made(width=2).start([opened])
    assert state.table == {1: (6, 5), 5: (1,), 6: (1,)}


def test_all_is_kept_once_the_table_knows_the_way():
    """Alone, in a merge and three at once: the prompt says the whole circle."""
    decoder, rule = clockwork(NEXT), Greedy()
    chain = cartesian([1] * 4)
    for drafter in (made(chain), beside_a_wrong_one(made(chain))):
        requests = [ask([*range(t, 16), *range(t + 1)], rule, 16) for t in (1, 2, 3)]
        for got in loop.generate(decoder, requests, drafter, rule):
            assert [s.accepted for s in got.steps] == [4, 4, 4]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
def test_what_is_emitted_is_plain_decoding(rule):
    decoder = tiny_decoder(scale=4.0)
    requests = [ask(p, rule, 24) for p in PROMPTS]
    got = loop.generate(decoder, requests, made(), rule, seed=2)
    want = reference.generate(decoder, requests, rule.law(), seed=2)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert sum(s.accepted for g in got for s in g.steps) > 0


def test_cold_and_warm():
    decoder, rule = tiny_decoder(), Greedy()

    def steps(drafter):
        return len(loop.generate(decoder, [ask(PROMPTS[0], rule, 30)], drafter, rule)[0].steps)

    cold, warm = made(), made(remember=True)
    assert steps(cold) == steps(cold)
    first = steps(warm)
    assert steps(warm) < first
    warm.forget()
    assert steps(warm) == first


def test_its_tree_may_be_given(tmp_path):
    """As a file that `decodelab tree` wrote, as widths, as paths, as a chain of `depth` nodes."""
    write_tree(tmp_path / "tree.json", shape([[0], [1, 0]]), {})
    filed = TokenRecycling(tree=str(tmp_path / "tree.json"))
    assert filed.shape == TokenRecycling(tree=((0,), (1, 0))).shape == shape([[0], [1], [1, 0]])
    assert filed.files == (tmp_path / "tree.json",)
    assert filed.gives == Gives("tree", rows=3, depth=2)
    assert TokenRecycling(tree=(3, 2)).shape == cartesian([3, 2])
    chain = TokenRecycling(tree="chain", depth=4)
    assert (chain.shape, chain.gives, chain.files) == (cartesian([1] * 4), Gives("chain", rows=4, depth=4), ())
    with pytest.raises(UserError, match=r"tries 9 followers of a token, and 8 are remembered: drafting.width=9"):
        _ = TokenRecycling(tree=(9,)).gives
    with pytest.raises(UserError, match=r"drafting.tree=\(\) is no tree"):
        _ = TokenRecycling(tree=()).gives


def test_what_is_wrong_is_said():
    with pytest.raises(UserError, match=r"drafting.nodes must be at least 1, got 0"):
        TokenRecycling(nodes=0)
    with pytest.raises(UserError, match=r"drafting.fall must be between 0 and 1, got 1.0"):
        TokenRecycling(fall=1.0)
    with pytest.raises(UserError, match=r"drafting.nodes must be at most 4096, got 4097"):
        TokenRecycling(nodes=4097)
    with pytest.raises(UserError, match=r"drafting.tree=.* must hold paths, lists of ranks from 0 on"):
        _ = TokenRecycling(tree=((0,), (0, -1))).gives
    wide = TokenRecycling(width=62)
    line = r"drafting.width must be at most 61, the target's vocabulary, got 62"
    with pytest.raises(UserError, match=line):
        wide.check(Source("tiny", LlamaConfig(vocab_size=61), tiny_tokenizer(), (), "0" * 64, 0, lambda progress: {}))
    with pytest.raises(UserError, match=line):
        wide.build(Resources(tiny_decoder(), tiny_tokenizer(), Greedy().law()))
