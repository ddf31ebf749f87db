"""The bookkeeping of pages, against a pool whose blocks hold lists of tokens."""

import random
from collections.abc import Sequence

import pytest

from decodelab.attention.pages import Pages
from decodelab.errors import UserError


class Pool:
    """Pages, and what a cache would have written: every sequence must read its own tokens, whoever else writes."""

    def __init__(self, total: int, size: int, share: bool = True) -> None:
        self.pages = Pages(total, size, share=share)
        self.blocks: list[list[int | None]] = [[None] * size for _ in range(total)]
        self.tokens: dict[int, list[int]] = {}
        self.staged: dict[int, list[int]] = {}
        self.opened = 0

    def open(self, prompt: Sequence[int] = ()) -> int:
        self.opened, sequence = self.opened + 1, self.opened
        self.pages.open(sequence)
        found = self.pages.adopt(sequence, prompt) if prompt else 0
        self.tokens[sequence], self.staged[sequence] = list(prompt[:found]), []
        return sequence

    def stage(self, rows: dict[int, list[int]]) -> None:
        for block, copy in self.pages.stage({sequence: len(tokens) for sequence, tokens in rows.items()}):
            self.blocks[copy] = list(self.blocks[block])
        for sequence, tokens in rows.items():
            self.staged[sequence] += tokens
            end = len(self.tokens[sequence]) + len(self.staged[sequence])
            for at, token in enumerate(tokens, end - len(tokens)):
                block, place = divmod(at, self.pages.size)
                self.blocks[self.pages.table(sequence)[block]][place] = token

    def commit(self, keep: dict[int, list[int]]) -> None:
        """The staged rows of these numbers."""
        for sequence, rows in keep.items():
            kept = [self.staged[sequence][row] for row in rows]
            start = len(self.tokens[sequence])
            for at, token in enumerate(kept, start):
                block, place = divmod(at, self.pages.size)
                self.blocks[self.pages.table(sequence)[block]][place] = token
            self.pages.commit(sequence, kept)
            self.tokens[sequence] += kept
        self.drop()

    def drop(self) -> None:
        self.pages.drop()
        for rows in self.staged.values():
            rows.clear()

    def fork(self, sequence: int) -> None:
        self.opened, child = self.opened + 1, self.opened
        self.pages.fork(sequence, child)
        self.tokens[child], self.staged[child] = list(self.tokens[sequence]), []

    def free(self, sequence: int) -> None:
        self.pages.free(sequence)
        del self.tokens[sequence], self.staged[sequence]

    def check(self) -> None:
        self.pages.check()
        size = self.pages.size
        for sequence, tokens in self.tokens.items():
            table, rows = self.pages.table(sequence), [*tokens, *self.staged[sequence]]
            held = [token for block in table for token in self.blocks[block]]
            assert held[: len(rows)] == rows
            assert self.pages.length(sequence) == len(tokens)
            assert len(table) == -(-len(rows) // size)


def filled(pool: Pool, tokens: Sequence[int]) -> int:
    sequence = pool.open(tokens)
    pool.stage({sequence: list(tokens[len(pool.tokens[sequence]) :])})
    pool.commit({sequence: list(range(len(pool.staged[sequence])))})
    pool.check()
    return sequence


@pytest.mark.parametrize("size", [1, 3, 4])
def test_100_000_random_operations(size: int) -> None:
    """xllm#828, vllm#4761, sglang#35270: free + cached + used is the total at every step, an abort leaks nothing, and
    no two sequences write to one block."""
    rng = random.Random(size)
    pool = Pool(24 // size + 4, size)
    pages, refused, found, evicted, copied, longest = pool.pages, 0, 0, 0, 0, 0
    for _ in range(33_334):
        match rng.choice(
            ["open", "open", "stage", "stage", "stage", "commit", "commit", "drop", "fork", "free", "all"]
        ):
            case "open" if len(pool.tokens) < 4:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
                found += len(pool.tokens[pool.open(prompt)]) > 0
            case "stage" if pool.tokens:
                some = rng.sample(sorted(pool.tokens), rng.randrange(1, len(pool.tokens) + 1))
                assert pages.room(some[0]) >= 0
                rows = {sequence: [rng.randrange(2) for _ in range(rng.randrange(0, 5))] for sequence in some}
                before, tables = pages.cached, {s: pages.table(s) for s in pool.tokens}
                held = pages.available
                try:
                    pool.stage(rows)
                    copied += any(pages.table(s)[: len(t)] != t for s, t in tables.items())
                    evicted += pages.cached < before
                except UserError:
                    refused += 1
                    assert (tables, held) == ({s: pages.table(s) for s in pool.tokens}, pages.available)
            case "commit":
                some = [s for s in pool.tokens if rng.random() < 0.8]
                keep = {}
                for s in some:
                    n = len(pool.staged[s])
                    keep[s] = sorted(rng.sample(range(n), rng.randrange(n + 1)))
                pool.commit(keep)
            case "drop":
                pool.drop()
            case "fork" if pool.tokens and len(pool.tokens) < 4:
                sequence = rng.choice(sorted(pool.tokens))
                if not pool.staged[sequence]:
                    pool.fork(sequence)
            case "free" if pool.tokens:
                sequence = rng.choice(sorted(pool.tokens))
                if pool.staged[sequence]:  # an abort
                    pool.drop()
                pool.free(sequence)
            case "all" if rng.random() < 0.05:
                pool.drop()
                for sequence in list(pool.tokens):
                    pool.free(sequence)
                assert pages.used == 0
                if rng.random() < 0.5:
                    pages.forget()
                    assert pages.cached == 0
        pool.check()
        longest = max([longest, *map(len, pool.tokens.values())])
    assert min(refused, found, evicted) > 200
    assert copied > 200 or size == 1  # where every block is full, none is written to again
    assert longest > 15


def test_of_those_who_share_a_block_the_last_one_keeps_it() -> None:
    """What is exactly enough is enough: three write behind one half-full block, and two of them copy it."""
    pool = Pool(3, 4, share=False)
    first = filled(pool, [1, 2])
    pool.fork(first)
    pool.fork(first)
    pool.stage({sequence: [7, 8] for sequence in pool.tokens})
    pool.check()
    assert pool.pages.available == 0


def test_a_prefix_is_found_by_whole_blocks() -> None:
    pool = Pool(8, 4)
    pool.free(filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert pool.pages.cached == 2  # the third block was not full
    for prompt, found in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 0], 4),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 0),  # its second block holds what another prefix held
        ([5, 6, 7, 8, 1], 0),
        ([1, 2, 3], 0),
    ):
        sequence = pool.open(prompt)
        assert pool.pages.length(sequence) == found
        pool.check()
        pool.free(sequence)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_prompt_that_is_there_whole_computes_its_last_token_again(size: int) -> None:
    """nano-vllm#211, #233: the count of tokens is that of the blocks that were found, less the last one."""
    pool = Pool(12, size)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = filled(pool, prompt)
    second = pool.open(prompt)
    assert pool.pages.length(second) == 7
    assert pool.pages.table(second)[: 7 // size] == pool.pages.table(first)[: 7 // size]
    pool.stage({second: [8]})
    pool.check()
    pool.commit({second: [0]})
    pool.check()
    assert pool.tokens[second] == prompt
    pool.free(second)
    pool.free(first)
    assert pool.pages.cached == 8 // size


def test_a_block_that_is_given_again_is_found_no_more() -> None:
    """nano-vllm#163, vllm#4761: an evicted block leaves the map, and the longest unused goes first."""
    pool = Pool(4, 2)
    pool.free(filled(pool, [1, 1, 1, 1]))
    pool.free(filled(pool, [2, 2, 2, 2]))
    pool.free(pool.open([1, 1, 1, 1, 1]))  # used again, so that the other one is older
    sequence = filled(pool, [3, 3, 3])
    pool.free(sequence)
    for prompt, found in (([2] * 5, 0), ([1] * 5, 4)):
        sequence = pool.open(prompt)
        assert pool.pages.length(sequence) == found
        pool.free(sequence)


def test_a_prefix_outlives_what_continues_it() -> None:
    pool = Pool(3, 2)
    pool.free(filled(pool, [1, 2, 3, 4, 5, 6]))
    pool.free(filled(pool, [9]))  # takes one block, and it is the last one of the three
    assert pool.pages.length(pool.open([1, 2, 3, 4, 5, 6, 7])) == 4


def test_what_is_not_verified_is_never_published() -> None:
    """vllm#43559: a draft that fills a block, and is not kept, leaves nothing that another prompt finds."""
    pool = Pool(8, 4)
    sequence = filled(pool, [1, 2, 3])
    pool.stage({sequence: [4, 5, 6, 7, 8]})
    assert pool.pages.length(pool.open([1, 2, 3, 4, 5])) == 0
    pool.commit({sequence: [1]})
    pool.check()
    assert pool.pages.length(pool.open([1, 2, 3, 4, 5])) == 0
    assert pool.pages.length(pool.open([1, 2, 3, 5, 5])) == 4


def test_the_same_prompt_twice_at_a_time() -> None:
    """mini-sglang#142: of two equal blocks one is published, and each sequence keeps its own."""
    pool = Pool(8, 2)
    a, b = pool.open(), pool.open()
    pool.stage({a: [1, 2, 3, 4], b: [1, 2, 3, 4]})
    pool.commit({a: [0, 1, 2, 3], b: [0, 1, 2, 3]})
    pool.check()
    pool.free(a)
    pool.check()
    assert pool.pages.cached == 2
    pool.free(b)
    pool.check()
    assert (pool.pages.cached, pool.pages.used) == (2, 0)


def test_forks_share_until_they_write() -> None:
    pool = Pool(6, 4)
    a = filled(pool, [1, 2, 3, 4, 5])
    pool.fork(a)
    pool.fork(a)
    assert pool.pages.used == 2
    b, c = sorted(set(pool.tokens) - {a})
    pool.stage({a: [6], b: [7], c: [8]})
    pool.check()
    assert pool.pages.used == 4  # two copies; the last one keeps the block
    pool.commit({s: [0] for s in (a, b, c)})
    assert {s: pool.tokens[s][-1] for s in (a, b, c)} == {a: 6, b: 7, c: 8}


def test_a_pool_that_is_full_says_so_and_room_says_so_before() -> None:
    pool = Pool(4, 2)
    a, b = filled(pool, [1, 2, 3]), pool.open()
    assert (pool.pages.room(a), pool.pages.room(b)) == (3, 2)
    with pytest.raises(
        UserError,
        match=r"out of KV blocks: 8 rows of 2 sequences need 4 more blocks of 2 tokens, and 2 of 4 are left; "
        "give a larger pages.blocks, a smaller batch or fewer tokens",
    ):
        pool.stage({a: [4, 5], b: [1, 2, 3, 4, 5, 6]})
    pool.check()
    pool.stage({a: [4, 5, 6], b: [1, 2]})
    assert (pool.pages.room(a), pool.pages.room(b)) == (0, 0)


def test_more_blocks_may_be_had_later() -> None:
    pool = Pool(1, 2)
    a = filled(pool, [1, 2])
    pool.pages.grow(3)
    pool.blocks += [[None, None], [None, None]]
    pool.stage({a: [3, 4, 5]})
    pool.check()
    assert (pool.pages.total, pool.pages.used) == (3, 3)


def test_without_sharing_nothing_is_found() -> None:
    pool = Pool(4, 2, share=False)
    pool.free(filled(pool, [1, 2, 3, 4]))
    assert pool.pages.length(pool.open([1, 2, 3, 4])) == 0
    assert pool.pages.cached == 0


def test_what_would_mix_rows_up_is_refused() -> None:
    pool = Pool(4, 2)
    a = filled(pool, [1, 2])
    with pytest.raises(ValueError, match="sequence 0 holds 2 rows; an empty one adopts a prefix"):
        pool.pages.adopt(a, [1, 2, 3])
    pool.stage({a: [3]})
    for change in (lambda: pool.pages.fork(a, 1), lambda: pool.pages.free(a)):
        with pytest.raises(ValueError, match="sequence 0 has staged rows; commit or drop them"):
            change()
    with pytest.raises(ValueError, match="2 rows of sequence 0 are kept, but 1 are staged"):
        pool.pages.commit(a, [3, 4])
    with pytest.raises(ValueError, match="a block holds at least 1 token, got 0"):
        Pages(4, 0)
