import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from decodelab.drafting.suffix_array import BORDER, DEPTH, GROWTH, Memory, SuffixArray, Texts, sort_places


def text(*documents):
    return np.array([token for document in documents for token in (*document, BORDER)], np.uint32)


def documents(array):
    ends = np.flatnonzero(array.text == BORDER) + 1
    return [part[:-1].tolist() for part in np.split(array.text, ends)[:-1]]


def followers(held, run):
    """(in how many places `run` stands in the documents, what follows it how often): by looking at every place."""
    stands, after = 0, Counter()
    for document in held:
        for at in range(len(document) - len(run) + 1):
            if document[at : at + len(run)] == run:
                stands += 1
                after.update(document[at + len(run) : at + len(run) + 1])
    return stands, after


@pytest.mark.parametrize("alphabet", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 3, 8, DEPTH])
def test_places_are_in_the_order_of_what_stands_there(alphabet, depth):
    rng = np.random.default_rng(alphabet)
    for n in (1, 2, 3, 50, 300):
        tokens = rng.integers(0, alphabet, n).astype(np.uint32)
        order = sort_places(tokens, depth).tolist()
        assert sorted(order) == list(range(n))
        stands = [tokens[place : place + depth].tolist() for place in order]
        assert stands == sorted(stands)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_frequencies_are_exact_after_growth_and_eviction(alphabet):
    rng = random.Random(alphabet)
    arrays = evicted = 0
    for _ in range(25):
        memory, told = Memory(rng.choice([40, 100, 300])), []
        for _ in range(rng.randrange(1, 30)):
            told.append([rng.randrange(alphabet) for _ in range(rng.randrange(2, 30))])
            memory.add(told[-1])
        held = [document for array in memory.arrays for document in documents(array)]
        assert held == told[-len(held) :]
        arrays, evicted = max(arrays, len(memory.arrays)), evicted + len(told) - len(held)
        texts = Texts(tuple(memory.arrays))
        for _ in range(10):
            end = [rng.randrange(alphabet) for _ in range(8)]
            least = rng.randrange(1, 4)
            most = rng.randrange(least, 9)
            lengths = [n for n in range(most, least - 1, -1) if followers(held, end[-n:])[0]]
            place = texts.longest_end(end, least, most)
            assert (place.depth if place else None) == (lengths[0] if lengths else None)
            if place is None:
                continue
            stands, after = followers(held, end[-place.depth :])
            assert texts.total(place) == stands
            for enough in (1, 2, 3, 7):
                found = [(token, count) for token, count, _ in texts.followers(place, enough)]
                assert found == sorted((token, count) for token, count in after.items() if count >= enough)
            for token, count, run in texts.followers(place, 1):
                assert texts.total(run) == count
                beyond = followers(held, [*end[-place.depth :], token])[1]
                assert {t: c for t, c, _ in texts.followers(run, 1)} == beyond
    assert arrays > 1
    assert evicted > 50


def test_the_oldest_go_and_the_capacity_is_kept():
    memory = Memory(160)
    for first in range(40):
        memory.add([first] * 9)  # with its border, ten
        assert len(memory) <= 160
        assert len(memory) >= min(10 * (first + 1), 150)
    held = [document[0] for array in memory.arrays for document in documents(array)]
    assert held == list(range(40 - len(held), 40))
    memory.add(range(1000, 1500))  # longer than all that fits: its end stays
    assert [documents(array) for array in memory.arrays] == [[list(range(1341, 1500))]]
    memory.clear()
    assert len(memory) == 0


def test_nothing_is_learnt_where_nothing_follows():
    memory = Memory(100)
    memory.add([])
    memory.add([5])
    assert len(memory) == 0
    assert Texts(()).longest_end([1, 2, 3], 1, 3) is None


def test_a_match_does_not_run_across_a_border():
    texts = Texts((SuffixArray.of(text([1, 2], [3, 4])),))
    place = texts.longest_end([1, 2, 3], 1, 9)
    assert place.depth == 1
    assert texts.total(texts.find([2])) == 1
    assert texts.followers(texts.find([2]), 1) == []  # a document's end is a way to go on, but no token


def test_a_token_of_many_followers_is_found_by_few_looks():
    """Those that are frequent enough, without a look at every place."""
    rare = [token for i in range(3000) for token in (7, 1000 + i)]
    array = SuffixArray.of(text(rare + [7, 8] * 600))
    low, high = array.find([7])
    assert high - low == 3600
    looks = 0

    class Counting(list):
        def __getitem__(self, at):
            nonlocal looks
            looks += 1
            return places[at]

    places, array._places = array._places, Counting()
    assert [(token, end - begin) for token, begin, end in array.frequent(low, high, 1, 360)] == [(8, 600)]
    assert looks < 400


def test_the_memory_of_a_token_and_the_work_it_makes():
    """Eight bytes; and it is sorted again O(log n) times, however long the documents are."""
    rng = random.Random(0)
    for longest in (3, 40):
        memory, sorted_tokens, n = Memory(5_000), 0, 0
        while n < 7_000:
            document = [rng.randrange(50) for _ in range(rng.randrange(2, longest + 1))]
            memory.add(document)
            sorted_tokens += len(memory.arrays[-1])
            n += len(document) + 1
        assert memory.nbytes == 8 * len(memory)
        sizes = [len(array) for array in memory.arrays]
        assert all(a > GROWTH * b for a, b in pairwise(sizes[1:]))
        assert len(sizes) <= 8
        assert sorted_tokens < 30 * n
