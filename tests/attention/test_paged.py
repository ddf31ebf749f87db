"""The paged cache against lists and against the dense one: where blocks lie, and who else holds them, is not seen."""

import random
from typing import Any

import pytest
import torch

from decodelab.attention.book import Part
from decodelab.attention.cache import Cache, DenseCache
from decodelab.attention.paged import SPARE, PagedCache
from decodelab.attention.rows import Rows, chains
from decodelab.decoding.model.decoder import Decoder
from decodelab.errors import UserError
from decodelab.tests.attention.caches import LAYERS, LAYOUT, Listed, operate, stage, write
from decodelab.tests.tiny import tiny_decoder


def paged(size: int = 4, blocks: int | None = 64, capacity: int = 400, **options: Any) -> PagedCache:
    cache = PagedCache(LAYOUT, size=size, blocks=blocks, dtype=torch.float32, device="cpu", **options)
    cache.reserve(2, capacity)
    return cache


@pytest.mark.parametrize(("size", "blocks"), [(1, 96), (3, 32), (16, 7)])
def test_against_lists_under_random_operations(size: int, blocks: int) -> None:
    """As for the dense cache, with forks, in a pool that is often full."""
    operate(paged(size, blocks), seed=size)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder(dtype=torch.float32)


def logits(decoder: Decoder, cache: DenseCache | PagedCache) -> torch.Tensor:
    """Of two prompts, of a forest behind each, and of a row behind what is kept of it."""
    a, b = cache.open(), cache.open()
    prompts = [[(7 * i) % 61 for i in range(90)], [3, 1, 4, 1, 5]]
    found = [decoder(chains(prompts, [a, b], prompt=True), cache).logits]
    cache.commit({a: range(90), b: range(90, 95)})
    kind = torch.tensor
    rows = Rows(kind([5, 6, 7, 8, 9, 5, 6]), kind([-1, 0, 0, 2, 1, -1, 5]), kind([a] * 5 + [b] * 2), False)
    found.append(decoder(rows, cache).logits)
    cache.commit({a: [0, 2, 3], b: [5]})
    found.append(decoder(chains([[1], [2]], [a, b]), cache).logits)
    cache.drop()
    return torch.cat(found)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_it_is_the_dense_cache_to_the_bit_wherever_its_blocks_lie(decoder: Decoder, size: int) -> None:
    dense = logits(decoder, decoder.open_cache(2, 128))
    for seed in range(3):
        pages = PagedCache(decoder.config.layout, size=size, dtype=torch.float32, device="cpu")
        pages.reserve(2, 128)
        random.Random(seed).shuffle(pages.pages._free)
        assert torch.equal(logits(decoder, decoder.open_cache(2, 128, pages)), dense)


def test_bytes_are_those_of_the_formula() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedCache(LAYOUT, size=16, blocks=7, dtype=dtype, device="cpu")
        assert cache.slots == 7 * 16
        assert cache.nbytes == LAYOUT.bytes_per_token(dtype.itemsize) * cache.slots


def test_a_pool_grows_with_what_is_asked_for_and_keeps_what_it_holds() -> None:
    for share in (False, True):
        cache, listed = paged(4, None, capacity=10, share=share), Listed()
        spare = SPARE if share else 1
        assert cache.pages.total == 2 * 3 * spare
        sequence = cache.open()
        listed.committed[sequence] = []
        stage(cache, listed, chains([[0] * 10], [sequence]))
        cache.commit({sequence: range(10)})
        listed.committed[sequence] = list(range(1, 11))
        listed.staged.clear()
        cache.reserve(3, 50)
        cache.reserve(1, 20)
        assert (cache.pages.total, cache.capacity) == (3 * 13 * spare, 50)
        assert cache.nbytes == LAYOUT.bytes_per_token(4) * cache.slots
        stage(cache, listed, chains([[0] * 30], [sequence]))


def test_a_prompt_is_found_and_continued() -> None:
    """A prompt that is there whole computes its last token again, in a block that nobody else reads."""
    cache = paged(share=True)
    first = cache.open()
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    assert cache.adopt(first, prompt) == 0
    (part,) = cache.stage(chains([prompt], [first])).parts
    write(cache, part, list(range(8)))
    cache.commit({first: range(8)})
    second = cache.open()
    assert cache.adopt(second, prompt) == cache.length(second) == 7
    place = cache.stage(chains([[12]], [second]))
    assert place.positions.tolist() == [7]
    write(cache, place.parts[0], [99])
    owned = cache.view(0, place.parts[0])[0][0, :8, 0].round().tolist()
    assert owned == [0, 1, 2, 3, 4, 5, 6, 99]
    cache.drop()
    (part,) = cache.stage(chains([[13]], [first])).parts
    write(cache, part, [8])
    assert cache.view(0, part)[0][0, :9, 0].round().tolist() == list(range(9))


def test_an_overflow_is_refused_before_anything_is_written() -> None:
    cache = paged(4, 3, capacity=10)
    a, b = cache.open(), cache.open()
    with pytest.raises(UserError, match="10 rows of 2 sequences need 4 more blocks of 4 tokens, and 3 of 3 are left"):
        cache.stage(chains([[0], [0] * 9], [a, b]))
    with pytest.raises(ValueError, match=r"overflow: 11 rows for sequence 0, which has room for 10 of 10; open"):
        cache.stage(chains([[0] * 11], [a]))
    assert (cache.room(a), cache.staged, cache.pages.used) == (4, 0, 0)
    with pytest.raises(ValueError, match="rows are numbered from 3, but 0 rows are staged"):
        cache.stage(chains([[0]], [a], first=3))


def test_rows_that_are_staged_are_not_forked() -> None:
    cache = paged()
    a = cache.open()
    cache.stage(chains([[1]], [a]))
    with pytest.raises(ValueError, match="sequence 0 has staged rows; commit or drop them before it is forked"):
        cache.fork(a)
    assert cache.open() == 1


def test_what_a_request_left_never_reaches_the_next() -> None:
    """Blocked slots are multiplied by 0, which a NaN survives: none of an earlier request's is looked at."""
    cache = paged(4, 3)

    def fill(count: int, value: float) -> Part:
        (part,) = cache.stage(chains([[0] * count], [sequence])).parts
        for layer in LAYOUT.owners:
            rows = torch.full((count, LAYOUT.layers[layer].kv_heads, 3), value)
            cache.write(layer, part, rows, rows)
        return part

    sequence = cache.open()
    fill(9, torch.nan)
    cache.commit({sequence: range(9)})
    cache.free(sequence)
    sequence = cache.open()
    part = fill(2, 1.0)
    for layer in LAYERS:
        assert all(kv.isfinite().all() for kv in cache.view(layer, part))


def test_slots_of_a_large_pool_are_64_bits() -> None:
    """vllm#47671, sglang#20389: a block's number times its size is past 2³¹."""
    assert paged(16)._slots_of([2**31]).tolist() == list(range(2**35, 2**35 + 16))


def test_it_is_a_cache() -> None:
    assert isinstance(paged(), Cache)
