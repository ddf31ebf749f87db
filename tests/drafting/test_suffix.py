import random
import sys
from collections import Counter

import pytest

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import EMPTY, Opened, Resources, Room, Seen
from decodelab.decoding.law import LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.drafting.continuations import Continuations, continue_from
from decodelab.drafting.suffix import MANY, Own, Suffix
from decodelab.drafting.suffix_automaton import SuffixAutomaton
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer

CYCLE = [*range(1, 16), 0]  # 0 1 2 … 15 0 …


def made(**keys):
    return Suffix(**keys).build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))


def started(drafter, prompt):
    cache = clockwork(CYCLE).open_cache(1, 64)
    opened = Opened(tuple(prompt), (), 99, Processors.build(LawSettings(), 0, ()), cache.open(), cache)
    return drafter.start([opened])[0]


def draft(drafter, prompt, depth=99, rows=99):
    return drafter.propose([started(drafter, prompt)], [Room(depth, rows)], [Noise(0, 0, 0)])[0]


def own(tokens, longest=8, depth=6, least=0.1):
    text = Own(SuffixAutomaton(counted=longest + depth), longest, least)
    text.read(tokens)
    return text


def places(text, run):
    """(in how many places of the text `run` is followed by a token, by which how often): by looking at every place."""
    after = Counter(text[at + len(run)] for at in range(len(text) - len(run)) if text[at : at + len(run)] == run)
    return after.total(), after


@pytest.mark.parametrize("alphabet", [1, 2, 3, 6])
def test_frequencies_in_the_own_text_are_exact(alphabet):
    """Of the longest end that stood before, and of all that goes on from there."""
    rng = random.Random(alphabet)
    for _ in range(30):
        text = [rng.randrange(alphabet) for _ in range(rng.randrange(2, 60))]
        mine = own(text)
        length = mine.match.length
        assert length == max((n for n in range(1, 9) if places(text, text[-n:])[0]), default=0)
        runs = [(text[len(text) - length :], mine.look())] if length else []
        for _ in range(6):
            further = []
            for run, node in runs:
                total, after = places(text, run)
                assert mine.total(node) == total
                for token, count, longer in mine.followers(node, 1):
                    further.append(([*run, token], longer))
                    assert count == after.pop(token)
                assert not after
            runs = further[:40]


def chances(text, run, depth):
    """Of every continuation: its path's shares multiplied."""
    if depth == 0:
        return {}
    total, after = places(text, run)
    found = {}
    for token, count in after.items():
        found[(token,)] = count / total
        for path, chance in chances(text, [*run, token], depth - 1).items():
            found[(token, *path)] = chance * count / total
    return found


def paths(drafted):
    found = []
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("nodes", [1, 5, 30])
def test_a_tree_holds_the_likeliest_continuations(nodes):
    rng = random.Random(nodes)
    for _ in range(40):
        text = [rng.randrange(3) for _ in range(rng.randrange(10, 60))]
        mine = own(text)
        if not mine.match.length:
            continue
        likely = chances(text, text[len(text) - mine.match.length :], 4)
        best = sorted((c for c in likely.values() if c >= 0.2 - 1e-9), reverse=True)[:nodes]
        found = continue_from(mine, mine.look(), nodes=nodes, depth=4, least=0.2, branch=True)
        assert [likely[path] for path in paths(found)] == pytest.approx(best)
        assert found.score == pytest.approx(sum(best))
        assert found.depths == tuple(map(len, paths(found)))


def test_a_draft_of_a_text():
    """Behind 1 2: three times 3, once 4; behind 1 2 3: twice 5, once 6."""
    prompt = [1, 2, 3, 5, 0, 1, 2, 3, 6, 0, 1, 2, 4, 8, 1, 2, 3, 5, 9, 1, 2]
    found = draft(made(max_depth=2, per_match=None), prompt)
    assert found.tokens == (3, 5, 4, 6, 8)  # chances of 3/4, 3/4 · 2/3, and three of 1/4
    assert found.parents == (-1, 0, -1, 0, 2)
    assert found.source == (0,) * 5
    assert draft(made(max_depth=2, per_match=None, tree=False), prompt).tokens == (3, 5)
    assert draft(made(max_depth=9, per_match=None, tree=False), prompt).tokens == (3, 5, 9, 1, 2)  # 9 later than 0
    assert draft(made(max_depth=9, per_match=1.0), prompt).tokens == (3, 5)  # two are matched
    assert draft(made(max_depth=9, per_match=0.4), prompt) is EMPTY
    assert draft(made(max_depth=2, per_match=None, min_prob=0.3), prompt).tokens == (3, 5)
    assert draft(made(min_match=3), prompt) is EMPTY
    assert draft(made(nodes=4, max_depth=2, per_match=None), prompt).tokens == (3, 5, 4, 6)


def test_a_draft_is_cut_to_its_room():
    prompt = [1, 2, 3, 5, 0, 1, 2, 3, 6, 0, 1, 2, 4, 8, 1, 2, 3, 5, 9, 1, 2]
    drafter = made(max_depth=2, per_match=None)
    assert draft(drafter, prompt, rows=3).tokens == (3, 5, 4)
    shallow = draft(drafter, prompt, depth=1)
    assert (shallow.tokens, shallow.parents) == ((3, 4), (-1, -1))
    assert draft(drafter, prompt, rows=0) is EMPTY
    assert Continuations().draft(Room(9, 9)) is EMPTY


def test_the_text_that_promises_more_is_drafted_from():
    drafter = made(remember=True, per_match=None, max_depth=3, tree=False)
    drafter.memory.add([1, 2, 3, 4, 5, 6])
    here = [7, 2, 9, 9, 0, 7, 2, 8, 8, 5]
    found = draft(drafter, [*here, 7, 2])  # prompt: 9 or 8 behind 7 2; memory: 3 4 5 behind 2
    assert (found.tokens, found.source) == ((3, 4, 5), (1, 1, 1))
    found = draft(drafter, [*here[:5], 7, 2])  # both are sure: the own text comes first
    assert (found.tokens, found.source) == ((9, 9, 0), (0, 0, 0))
    assert drafter.sources == ("suffix", "suffix_memory")
    assert made().sources == ("suffix",)


def test_what_is_remembered_is_the_output():
    drafter = made(remember=True)
    state = started(drafter, [1, 2, 3])
    drafter.observe([state], [Seen((2, 3, 4), 1, prefill=True)])
    drafter.observe([state], [Seen((5, 6), 4)])
    assert len(drafter.memory) == 0
    drafter.finish(state)
    assert [array.text[:-1].tolist() for array in drafter.memory.arrays] == [[4, 5, 6]]


def test_all_is_kept_once_the_circle_is_known():
    """From the prompt and from memory; alone, in a merge and three at once."""
    decoder, rule = clockwork(CYCLE), Greedy()
    warm = made(remember=True, nodes=5, max_match=16, per_match=None)
    warm.memory.add([*range(16)] * 3)
    cold = made(nodes=5, max_match=16, per_match=None)
    whole = [[*range(t, 16), *range(16), *range(t + 1)] for t in (1, 2, 3)]
    for drafter, prompts, source in ((cold, whole, "suffix"), (warm, [[1], [2], [3]], "suffix_memory")):
        for rigged in (drafter, beside_a_wrong_one(drafter)):
            requests = [ask(prompt, rule, 19) for prompt in prompts]
            for asked in (requests, requests[:1]):
                for got in loop.generate(decoder, asked, rigged, rule):
                    assert [s.accepted for s in got.steps] == [5, 5, 5]
                    assert {s for step in got.steps for s in step.sources} - {"rigged"} == {source}


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
def test_what_is_emitted_is_plain_decoding(rule, tree):
    """Cold, and warm, when drafts of the same requests' outputs are there."""
    decoder = tiny_decoder(scale=4.0)
    requests = [ask(p, rule, 24) for p in PROMPTS]
    want = reference.generate(decoder, requests, rule.law(), seed=2)
    drafter = made(remember=True, tree=tree)
    for _ in range(2):
        got = loop.generate(decoder, requests, drafter, rule, seed=2)
        assert [g.tokens for g in got] == [w.tokens for w in want]
    assert {source for g in got for s in g.steps for source in s.sources} >= {"suffix_memory"}


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


def _lines(n, text):
    """Lines of code that drafting runs for a text of n tokens, with a draft behind each."""
    count = 0
    own_code = ("suffix.py", "suffix_automaton.py", "continuations.py", "suffix_array.py")

    def tracer(frame, event, _):
        nonlocal count
        count += event == "line"
        return tracer if frame.f_code.co_filename.endswith(own_code) else None

    mine = Own(SuffixAutomaton(counted=12), 8, 0.1)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        for token in text(n):
            mine.read([token])
            if mine.match.length:
                continue_from(mine, mine.look(), nodes=4, depth=4, least=0.1, branch=True)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["one token", "a token with new followers", "two tokens at random"])
def test_work_grows_with_the_text_alone(kind):
    """vllm#16883, and a token that has ever more followers: twice the text, twice the work."""
    rng = random.Random(0)
    texts = {
        "one token": lambda n: [7] * n,
        "a token with new followers": lambda n: [7 if i % 2 else 10 + i for i in range(n)],
        "two tokens at random": lambda n: [rng.randrange(2) for _ in range(n)],
    }
    assert _lines(640, texts[kind]) < 2.3 * _lines(320, texts[kind])


def test_of_many_followers_the_frequent_ones_are_known():
    """As the text grows: exactly those that have the share that is asked for."""
    rng = random.Random(0)
    mine, text = own([], longest=1, depth=2, least=0.2), []
    for i in range(1500):
        favourite = 1 + i // 400  # another one takes over
        text += [0, favourite if rng.random() < 0.4 else rng.randrange(10, 500)]
        mine.read(text[-2:])
        if i % 23 == 0:
            node = mine.text.following(0)[0]
            total, after = places(text, [0])
            least = max(1, -(-total // 5))
            frequent = {token: count for token, count in after.items() if count >= least}
            assert {token: count for token, count, _ in mine.followers(node, least)} == frequent
    assert len(mine.text.following(node)) > MANY
    assert mine.frequent


def test_a_corpus_is_looked_into(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "corpus.txt"
    file.write_text("abcdefgh", encoding="utf-8")
    a, b, c, d = (tiny_tokenizer().get_vocab()[letter] for letter in "abcd")
    drafter = made(corpus=str(file), remember=True, nodes=2, per_match=None)
    for _ in range(2):
        found = draft(drafter, [a, b])
        assert (found.tokens, found.source) == ((c, d), (1, 1))
        drafter.forget()  # what it was built with stays


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"max_depth": 0}, "max_depth must be at least 1, got 0"),
        ({"min_match": 0}, "min_match must be at least 1, got 0"),
        ({"min_match": 9, "max_match": 8}, r"max_match must be at least min_match \(9\), got 8"),
        ({"max_match": 120}, r"max_match \+ max_depth must be at most 128, got 120 \+ 15: lower one of them"),
        ({"min_prob": 0.0}, "min_prob must be between 0.001 and 1, got 0.0"),
        ({"per_match": 0.0}, "per_match must be above 0 and finite, or null for no cap, got 0.0"),
        ({"capacity": 2}, "capacity must be at least 3 tokens, got 2"),
    ],
)
def test_what_is_wrong_is_said(keys, line):
    with pytest.raises(UserError, match=f"drafting.{line}"):
        Suffix(**keys)
