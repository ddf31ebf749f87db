"""What a million tokens take: `python tests/drafting/measure_suffix_memory.py [TOKENS]`. No test.

On two busy cores of an AMD EPYC. In memory: 8.0 bytes a token, 79 more while all of it is sorted at once (a second,
once in some hundred thousand tokens); 5 to 7 µs a token in all; a draft takes 0.3 to 0.9 ms, of which finding the match
is half. In a prompt, online: 80 bytes and 28 µs a token.
"""

import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from itertools import accumulate
from statistics import mean, quantiles

import numpy as np

from decodelab.drafting.continuations import continue_from
from decodelab.drafting.suffix_array import Memory, SuffixArray, Texts
from decodelab.drafting.suffix_automaton import SuffixAutomaton


def outputs(tokens: int) -> Iterator[list[int]]:
    """Documents of 64 to 512 tokens, made of phrases some of which come often, as answers to alike questions are."""
    rng = random.Random(0)
    phrases = [[rng.randrange(50_000) for _ in range(rng.randrange(1, 12))] for _ in range(40_000)]
    weights = list(accumulate(1 / (i + 1) for i in range(len(phrases))))
    while tokens > 0:
        length = rng.randrange(64, 512)
        picked = rng.choices(phrases, cum_weights=weights, k=length)
        yield [token for phrase in picked for token in phrase][:length]
        tokens -= length + 1


def main(tokens: int) -> None:
    memory, seconds, added = Memory(tokens), [], 0
    for output in outputs(tokens * 3 // 2):
        begin = time.perf_counter()
        memory.add(output)
        seconds.append(time.perf_counter() - begin)
        added += len(output) + 1
    sizes = ", ".join(f"{len(array):,}" for array in memory.arrays)
    say(f"{added:,} tokens told, {len(memory):,} kept in arrays of {sizes}")
    say(f"kept: {memory.nbytes / len(memory):.1f} bytes a token")
    say(f"time: {sum(seconds) / added * 1e6:.1f} µs a token, {max(seconds):.2f} s for the longest sorting")

    texts, finding, drafting = Texts(tuple(memory.arrays)), [], []
    for output in outputs(300_000):
        begin = time.perf_counter()
        match = texts.longest_end(output, 1, 32)
        found = time.perf_counter()
        if match is not None:
            continue_from(texts, match, nodes=15, depth=15, least=0.1, branch=True)
        finding.append(found - begin)
        drafting.append(time.perf_counter() - found)
    for what, taken in (("finding the longest end", finding), ("its continuations", drafting)):
        say(f"{what}: {mean(taken) * 1e6:.0f} µs, 99 % within {quantiles(taken, n=100)[-1] * 1e6:.0f} µs")

    text = [token for output in outputs(tokens) for token in output]
    tracemalloc.start()
    begin = time.perf_counter()
    automaton = SuffixAutomaton(text, counted=47)
    took, used = time.perf_counter() - begin, tracemalloc.get_traced_memory()[0]
    say(f"a prompt of {len(text):,}: {used / len(automaton):.0f} bytes and {took / len(text) * 1e6:.0f} µs a token")
    del automaton
    tracemalloc.stop()
    tracemalloc.start()
    SuffixArray.of(np.concatenate([array.text for array in memory.arrays]))
    say(f"while all is sorted at once: {tracemalloc.get_traced_memory()[1] / len(memory):.0f} bytes a token more")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
