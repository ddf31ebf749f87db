import random
import sys
import tracemalloc
from itertools import accumulate

import pytest

from decodelab.drafting.suffix_automaton import BORDER, START, SuffixAutomaton


def _longest(text, stop, limit):
    """(length, end) of the longest end of text[:stop] that ended earlier, of at most `limit` tokens: by trying all."""
    for length in range(min(stop - 1, limit or stop), 0, -1):
        for end in range(length - 1, stop - 1):
            if text[end - length + 1 : end + 1] == text[stop - length : stop]:
                return length, end
    return 0, -1


@pytest.mark.parametrize("alphabet", [1, 2, 3, 6])
@pytest.mark.parametrize("limit", [None, 1, 2, 5])
def test_the_longest_end_that_stood_before_and_its_first_place(alphabet, limit):
    rng = random.Random(alphabet)
    for _ in range(40):
        text = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 40))]
        automaton, match = SuffixAutomaton(), START
        for stop, token in enumerate(text, 1):
            match = automaton.follow(match, token, limit)
            automaton.add(token)
            assert (match.length, automaton.end(match)) == _longest(text, stop, limit)


def test_a_match_does_not_run_across_a_border():
    automaton = SuffixAutomaton([1, 2, BORDER, 3, 4, BORDER])
    match = START
    for token in (1, 2, 3):
        match = automaton.follow(match, token)
    assert (match.length, automaton.end(match)) == (1, 3)


def test_a_match_outlives_the_growth_of_its_text():
    rng = random.Random(0)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(60)]
        automaton, match, quoted = SuffixAutomaton(), START, []
        for token in text:
            automaton.add(token)
            if rng.random() < 0.3:
                quoted.append(rng.randrange(3))
                match = automaton.follow(match, quoted[-1], limit=4)
                held = automaton.tokens
                found = [q for q in _suffixes(quoted[-4:]) if any(held[i:][: len(q)] == q for i in range(len(held)))]
                quoted = found[0] if found else []
                assert match.length == len(quoted)
                assert automaton.tokens[automaton.end(match) + 1 - match.length : automaton.end(match) + 1] == quoted


def _suffixes(tokens):
    return [tokens[i:] for i in range(len(tokens))]


def _steps(text, limit):
    """Lines of code that the automaton runs for a text."""
    count = 0

    def tracer(frame, event, _):
        nonlocal count
        count += event == "line"
        return tracer if frame.f_code.co_filename.endswith("suffix_automaton.py") else None

    automaton, match = SuffixAutomaton(), START
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        for token in text:
            match = automaton.follow(match, token, limit)
            automaton.add(token)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize(
    "kind", ["one token", "a cycle", "two tokens at random", "many tokens", "long repeats, broken"]
)
def test_work_grows_with_the_text_alone(kind, limit):
    """vllm#16883: a proposal took O(length × longest match). Here a token takes constant work, whatever the limit."""
    rng = random.Random(0)
    texts = {
        "one token": lambda n: [7] * n,
        "a cycle": lambda n: [i % 48 for i in range(n)],
        "two tokens at random": lambda n: [rng.randrange(2) for _ in range(n)],
        "many tokens": lambda n: [rng.randrange(5000) for _ in range(n)],
        "long repeats, broken": lambda n: [7 if i % (n // 10) else i for i in range(n)],
    }
    n = 2_000
    assert _steps(texts[kind](n), limit) < 100 * n


def test_a_text_of_50k_tokens_has_at_most_two_states_and_three_steps_a_token():
    rng = random.Random(0)
    automaton = SuffixAutomaton(rng.randrange(40) for _ in range(50_000))
    assert len(automaton) == 50_000
    assert len(automaton._link) <= 2 * 50_000
    assert sum(len(automaton.following(state)) for state in range(len(automaton._link))) <= 3 * 50_000


def test_a_text_takes_less_than_200_bytes_a_token():
    """Words that follow each other by chance, often ones most often."""
    rng = random.Random(0)
    weights = list(accumulate(1 / (i + 1) for i in range(5_000)))
    text = rng.choices(range(5_000), cum_weights=weights, k=20_000)
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton(text, counted=47)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 200 * len(automaton)
