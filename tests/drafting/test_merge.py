import pytest
import torch

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.cost import Profile
from decodelab.decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Resources, Room, Seen, chain, tree
from decodelab.decoding.noise import Noise
from decodelab.drafting.budget import HOPE, Estimate, allocate
from decodelab.drafting.merge import Merge, Merged, merge
from decodelab.drafting.none import Nothing
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.reference import Reference
from decodelab.errors import UserError
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import PROMPTS, Rigged, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer


def built(*members, **keys):
    """A merge of drafters that need no weights."""
    return Merged(tuple(members), **keys)


def test_equal_rows_are_one_and_each_keeps_its_view():
    a, b = chain([5, 6, 7]), tree([5, 8, 6, 6], [-1, -1, 0, 1])
    forest, rows = merge([a, b])
    assert forest.tokens == (5, 6, 7, 8, 6)
    assert forest.parents == (-1, 0, 1, -1, 3)
    assert rows == [[0, 1, 2], [0, 3, 1, 4]]
    assert forest.source == (0, 0, 0, 1, 1)
    assert forest.also == ((1,), (1,), (), (), ())


def test_a_window_and_a_candidate_share_a_row():
    window = Draft((5, 6), (-1, 0), None, (-1, -1), (False, False), (0, 0))
    forest, rows = merge([window, chain([5])])
    assert (forest.tokens, forest.judged, forest.source) == ((5, 6), (True, False), (1, 0))
    assert forest.also == ((), ())
    assert rows == [[0, 1], [0]]


def test_equal_chains_stay_a_chain_and_a_q_is_left_out():
    q = torch.full((2, 9), 1 / 9)
    forest, _ = merge([chain([1, 2], q), chain([1, 2, 3])])
    assert forest.is_chain
    assert forest.q is None
    assert forest.q_row == (-1, -1, -1)


def test_every_accepted_token_is_credited():
    """Two members are right, one for two tokens, one for four: the log names both where both were."""
    decoder, rule = tiny_decoder(), Greedy()
    (plain,) = reference.generate(decoder, [ask(PROMPTS[0], rule)], rule.law())

    def right(length):
        return lambda state, room, noise: chain(plain.tokens[state.emitted :][: min(length, room.chain)])

    gives = Gives("chain", 4, 4)
    drafter = built(Rigged(right(2), gives=gives, sources=("short",)), Rigged(right(4), gives=gives, sources=("long",)))
    (got,) = loop.generate(decoder, [ask(PROMPTS[0], rule)], drafter, rule)
    assert got.tokens == plain.tokens
    first = got.steps[0]
    assert (first.accepted, first.verified) == (4, 5)
    assert first.sources == ("short", "short", "long", "long")
    assert first.also_proposed == (("long",), ("long",), (), ())


class Told:
    """Drafts a tree with a window and remembers what it is told."""

    sources = ("told",)
    needs = Needs(taps=("final",), argmax=True, topk=2)
    gives = Gives("forest", 3, 2)

    def __init__(self, draft):
        self.draft, self.seen = draft, []

    def start(self, requests):
        return [None] * len(requests)

    def propose(self, states, room, noise):
        return [self.draft if r.rows >= 3 and r.depth >= 2 else EMPTY for r in room]

    def observe(self, states, seen):
        self.seen += seen
        return list(states)

    def finish(self, state):
        pass


def test_a_member_is_told_of_its_own_rows_in_its_own_order():
    """As if it were alone: argmax, top-k and hidden states row by row; and no more of them than it asked for."""
    decoder, rule = tiny_decoder(), Greedy()
    draft = Draft((7, 9, 7), (-1, -1, 0), None, (-1,) * 3, (True, True, False), (0,) * 3)
    alone = Told(draft)
    loop.generate(decoder, [ask(PROMPTS[0], rule, 4)], alone, rule)

    class More(Told):
        sources = ("more",)
        needs = Needs(taps=("final", 1), argmax=True, topk=5, prefill_hidden=True)

    beside = Told(draft)
    other = More(Draft((11, 7, 12), (-1, -1, 0), None, (-1,) * 3, (True,) * 3, (0,) * 3))
    loop.generate(decoder, [ask(PROMPTS[0], rule, 4)], built(other, beside), rule)
    assert len(alone.seen) == len(beside.seen) > 1
    for mine, merged in zip(alone.seen, beside.seen, strict=True):
        assert (mine.tokens, mine.own_path, mine.argmax, mine.topk) == (
            merged.tokens, merged.own_path, merged.argmax, merged.topk
        )  # fmt: skip
        for a, b in ((mine.hidden, merged.hidden), (mine.committed, merged.committed)):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.keys() == b.keys()
                assert torch.allclose(a["final"], b["final"], atol=1e-10)


def test_in_order_the_first_that_drafts_has_the_step():
    asked = []

    def plan(name, tokens):
        def propose(state, room, noise):
            asked.append(name)
            return chain(tokens[: room.chain])

        return propose

    gives = Gives("chain", 2, 2)
    members = [
        Rigged(plan("never", []), gives=gives, sources=("never",)),
        Rigged(plan("always", [3]), gives=gives, sources=("always",)),
        Rigged(plan("late", [4]), gives=gives, sources=("late",)),
    ]
    drafter = built(*members, order="first")
    assert drafter.gives == Gives("chain", 2, 2)
    decoder, rule = tiny_decoder(), Greedy()
    (got,) = loop.generate(decoder, [ask(PROMPTS[0], rule, 6)], drafter, rule)
    assert set(asked) == {"never", "always"}
    assert got.tokens == reference.generate(decoder, [ask(PROMPTS[0], rule, 6)], rule.law())[0].tokens


def test_a_draft_without_candidates_does_not_settle_a_step():
    """A window's rows are judged by nobody: the next member has the step too."""
    window = Draft((3,), (-1,), None, (-1,), (False,), (0,))
    gives = Gives("chain", 1, 1)
    asked = []

    def second(state, room, noise):
        asked.append(room.rows)
        return chain([4])

    two = Gives("chain", 2, 2)
    drafter = built(Rigged(lambda s, r, n: window, gives=gives), Rigged(second, gives=two), order="first")
    decoder, rule = tiny_decoder(), Greedy()
    loop.generate(decoder, [ask(PROMPTS[0], rule, 6)], drafter, rule)
    assert asked


def test_a_budget_goes_to_the_members_in_their_order():
    rooms = []

    def plan(state, room, noise):
        rooms.append(room.rows)
        return EMPTY

    drafter = built(Rigged(plan, gives=Gives("chain", 4, 4)), Rigged(plan, gives=Gives("chain", 4, 4)), budget=6)
    assert drafter.gives.rows == 6
    decoder, rule = tiny_decoder(), Greedy()
    loop.generate(decoder, [ask(PROMPTS[0], rule)], drafter, rule)
    assert rooms[:2] == [4, 2]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("keys", [{}, {"order": "first"}, {"budget": 3}, {"budget": "auto"}], ids=str)
def test_what_is_emitted_is_plain_decoding(rule, keys):
    decoder = tiny_decoder(scale=4.0)
    settings = Merge((PromptLookup(max_draft=6, per_match=None), Reference(in_prompt=True), Nothing()), **keys)
    drafter = settings.build(Resources(decoder, tiny_tokenizer(), rule.law()))
    requests = [ask(p, rule, 24) for p in PROMPTS]
    got = loop.generate(decoder, requests, drafter, rule)
    want = reference.generate(decoder, requests, rule.law())
    assert [g.tokens for g in got] == [w.tokens for w in want]


def test_nobody_is_asked_who_cannot_pay():
    """A forward of two rows that costs two forwards of one: no acceptance pays for it."""
    never = Profile(8, {1: 1.0, 2: 2.0, 16: 16.0})
    assert allocate([Estimate(), Estimate()], [8, 4], [8, 4], 12, never) == [0, 0]
    free = Profile(8, {1: 1.0, 2: 1.0, 16: 1.0})
    assert allocate([Estimate()], [8], [8], 12, free) == [8]


def test_the_rows_go_to_the_member_whose_drafts_are_kept():
    good, bad = Estimate(), Estimate()
    for _ in range(20):
        good.told(8, 8, 8, 7, 0.0)
        bad.told(8, 8, 8, 0, 0.0)
    flat = Profile(8, {1: 1.0, 2: 1.02, 32: 1.6})
    assert allocate([bad, good], [8, 8], [8, 8], 16, flat) == [0, 8]
    dear = Estimate()
    for _ in range(20):
        dear.told(8, 8, 8, 7, 50.0)  # seconds of drafting: fifty plain steps
    assert allocate([dear], [8], [8], 16, flat) == [0]


def test_what_is_known_of_a_member_that_is_not_asked_fades():
    estimate = Estimate()
    for _ in range(30):
        estimate.told(4, 4, 4, 0, 0.0)
    low = estimate.survival(1)[0]
    assert low < 0.1
    for _ in range(150):
        estimate.told(0, 0, 0, 0, 0.0)
    assert estimate.survival(1)[0] == pytest.approx(HOPE, abs=0.01)


def test_survival_is_the_product_of_conditional_acceptances():
    estimate = Estimate()
    for accepted in [2, 0] * 200:
        estimate.told(3, 3, 3, accepted, 0.0)
    first, second, third = estimate.survival(3)
    assert first == pytest.approx(0.5, abs=0.05)
    assert second / first == pytest.approx(0.95, abs=0.06)  # given the first, the second always was
    assert third / second == pytest.approx(0.1, abs=0.1)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"members": ()}, "drafting.members is empty: name drafters"),
        ({"order": "random"}, "drafting.order must be together or first, got 'random'"),
        ({"budget": 0}, "drafting.budget must be at least 1 row, got 0"),
        (
            {"budget": "auto", "order": "first"},
            "drafting.budget=auto shares a step among members, and order=first",
        ),
        ({"budget": "some"}, "drafting.budget must be a number of rows, auto or null, got 'some'"),
    ],
)
def test_what_is_wrong_is_said(keys, line, monkeypatch):
    unchecked(monkeypatch)
    with pytest.raises(UserError, match=line):
        Merge(**({"members": (Nothing(),)} | keys))


def test_names_of_equal_members_are_told_apart():
    assert built(PromptLookup(), PromptLookup(), Nothing()).sources[:2] == ("prompt_lookup", "prompt_lookup#2")


def test_names_in_a_merge_of_merges_are_told_apart():
    look = PromptLookup()
    assert built(look, built(look, look), look).sources == tuple(f"prompt_lookup{n}" for n in ("", "#2", "#3", "#4"))


def test_what_a_member_did_not_draft_was_not_kept():
    """It finds something every other step, two tokens deep where five might be, and those are kept."""
    estimate = Estimate()
    for kept in [2, 0] * 200:
        estimate.told(5, kept, 5, kept, 0.0)
    first, second, third, *_ = estimate.survival(5)
    assert first == pytest.approx(0.5, abs=0.06)
    assert second == pytest.approx(first, abs=0.06)
    assert third < 0.1
    drafter = built(PromptLookup(max_draft=4, per_match=None), Nothing(), profile=Profile(8, {1: 1.0, 32: 1.0}))
    opened = Opened((1, 2, 3), (), 9, ask([1, 2, 3], Greedy()).processors, 0, tiny_decoder().open_cache(1, 9))
    (state,) = drafter.start([opened])
    drafter.propose([state], [Room(8, 8)], [Noise(0, 0, 0)])
    assert (state.allowed, state.reach) == ([4, 0], [4, 0])
    drafter.observe([state], [Seen((4,), 3)])
    assert [e.tried for e in state.estimates] == [[1.0, 0.0, 0.0, 0.0], []]


def test_shares_of_many_members_are_found_one_by_one():
    """As good as the best of all combinations where the members differ; each alone is a start."""
    flat = Profile(8, {1: 1.0, 2: 1.3, 32: 1.4})
    estimates = [Estimate() for _ in range(9)]
    for _ in range(40):
        for m, estimate in enumerate(estimates):
            estimate.told(8, 8, 8, 7 if m == 6 else 0, 0.0)
    assert allocate(estimates, [8] * 9, [8] * 9, 72, flat) == [0, 0, 0, 0, 0, 0, 8, 0, 0]
    assert allocate(estimates, [8] * 9, [8] * 9, 4, flat) == [0, 0, 0, 0, 0, 0, 4, 0, 0]
    assert allocate(estimates, [0] * 9, [0] * 9, 0, flat) == [0] * 9


def test_members_are_finished_and_started_one_by_one():
    """Each member has a state a request, whatever the others do."""
    log = []
    members = [Rigged(lambda *_: EMPTY, log=log, sources=(name,)) for name in ("a", "b")]
    decoder, rule = tiny_decoder(), Greedy()
    loop.generate(decoder, [ask(p, rule, 5) for p in PROMPTS], built(*members), rule)
    assert sum(entry[0] == "finish" for entry in log) == 6
    assert sum(entry[0] == "seen" for entry in log) > 6


@pytest.mark.parametrize("window", [True, False], ids=["only a window", "wrong"])
def test_a_member_that_brings_nothing_is_soon_not_asked(window):
    asked = []

    def plan(state, room, noise):
        asked.append(state.step)
        n = room.chain
        return Draft((0,) * n, tuple(range(-1, n - 1)), None, (-1,) * n, (not window,) * n, (0,) * n)

    rising = Profile(8, {1: 1.0, 2: 1.1, 32: 3.0})
    drafter = built(Rigged(plan, gives=Gives("chain", 8, 8)), Nothing(), budget="auto", profile=rising)
    decoder, rule = clockwork([1, 2, 3, 1, 4, 5, 6, 7]), Greedy()
    loop.generate(decoder, [ask([1], rule, 61)], drafter, rule)
    assert asked[0] == 0
    assert len(asked) < 20  # of 60 steps: what is known fades, and it is tried again
