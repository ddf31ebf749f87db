"""The cache of rings and low bits against lists, against the dense one, and against itself however rows are grouped."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.attention.book import LONG_CHAIN
from decodelab.attention.cache import Cache, DenseCache
from decodelab.attention.layered import LayeredCache
from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.rows import Rows, chains
from decodelab.decoding.model.decoder import Block, Decoder
from decodelab.kernels.verify_attention import row_invariant
from decodelab.testing import tiny_decoder
from decodelab.tests.attention.caches import LAYERS, LAYOUT, Listed, operate, stage, write
from decodelab.tests.enumeration import unchecked

PROMPT = [(7 * i) % 61 for i in range(90)]


def layered(layout: Layout = LAYOUT, sequences: int = 2, capacity: int = 128) -> LayeredCache:
    return LayeredCache(layout, sequences=sequences, capacity=capacity, dtype=torch.float32, device="cpu")


def of(entry: dict[str, Any], dtype: torch.dtype = torch.float64) -> Decoder:
    """A tiny model, all of whose layers have this entry, but that the second reads everything where there are bits."""
    decoder = tiny_decoder(dtype=dtype)
    own = decoder.config.layout
    entries = [replace(layer, **entry) for layer in own.layers]
    if entries[1].bits != 16:
        entries[1] = replace(entries[1], window=None, sink=0)
    layout = Layout(tuple(entries), own.head_dim)
    decoder.config = replace(decoder.config, layout=layout)
    for block, one in zip(decoder.blocks, layout.layers, strict=True):
        assert isinstance(block, Block)
        block.sight, block.bits = one.sight, one.bits
    return decoder


def test_against_lists_under_random_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    operate(layered(sequences=3, capacity=400))


def test_long_prompts_in_chunks() -> None:
    """Each sees the sinks, the ring that the one before it left, and itself; staging shrinks when it is committed."""
    layout = Layout((LayerKV(0, 1), LayerKV(1, 1, window=100, sink=3), LayerKV(2, 1, window=30, bits=8)), 8)
    cache = layered(layout, sequences=1, capacity=600)
    sequence = cache.open()
    assert cache.staging_bytes == 0
    for at in (0, 100, 200):
        (part,) = cache.stage(chains([[0] * 100], [sequence], prompt=True)).parts
        assert part.causal
        for layer, held in ((0, at), (1, min(at, 3 + 99)), (2, min(at, 29))):
            rows = (torch.arange(at, at + 100).float() / 8 + 1)[:, None, None].expand(-1, 1, 8)
            cache.write(layer, part, rows, -rows)
            k, v = cache.view(layer, part)
            assert torch.equal(k, -v)
            want = torch.arange(at + 100).float() / 8 + 1
            want = torch.cat([want[:at][:3], want[:at][3:][-99:], want[at:]]) if layer == 1 else want[-100 - held :]
            if layer == 2:
                torch.testing.assert_close(k[0, :, 0], want, rtol=2**-10, atol=0)
            else:
                assert torch.equal(k[0, :, 0], want)
        cache.commit({sequence: range(100)})
        assert cache.staging_bytes == 64 * (2 * 8 * 4 + 2 * (8 + 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """Rings have W + S slots, or all where that is fewer; what is shared is there once."""
    layout = Layout(
        (
            LayerKV(0, 2, window=10, sink=2),
            LayerKV(0, 2, window=10, sink=2),
            LayerKV(2, 1, bits=4),
            LayerKV(3, 2, window=1000, bits=8),
        ),
        6,
    )
    cache = LayeredCache(layout, sequences=3, capacity=100, dtype=dtype, device="cpu")
    assert cache.nbytes == cache.formula_bytes == 3 * layout.sequence_bytes(cache.capacity, dtype.itemsize)
    size = dtype.itemsize
    assert cache.capacity == 128
    assert cache.nbytes == 3 * (12 * 2 * 2 * 6 * size + 128 * 2 * (3 + 2) + 128 * 2 * 2 * (6 + 2))
    sequence = cache.open()
    cache.stage(chains([[0] * 70], [sequence]))
    assert cache.nbytes == cache.formula_bytes
    assert cache.staging_bytes == 128 * 2 * 2 * 6 * size  # of the one ring


def logits(decoder: Decoder, cache: Cache) -> Tensor:
    """Of two prompts, one in two chunks, and of forests and rows behind what is kept of them, up to 280 tokens."""
    a, b = cache.open(), cache.open()
    decoder._reach(600)
    found = []
    for prompt, sequence in ((PROMPT, a), ([3], b), (PROMPT, a)):
        found.append(decoder(chains([prompt], [sequence], prompt=True), cache).logits)
        cache.commit({sequence: range(len(prompt))})
    kind = torch.tensor
    tree = Rows(kind([5, 6, 7, 8, 9, 5, 6]), kind([-1, 0, 0, 2, 1, -1, 5]), kind([a] * 5 + [b] * 2), False)
    for _ in range(25):
        found.append(decoder(tree, cache).logits)
        cache.commit({a: [0, 2, 3], b: [5]})
        found.append(decoder(chains([[1], [2]], [a, b]), cache).logits)
        cache.commit({a: [0], b: [1]})
    return torch.cat(found)


ENTRIES = [{"window": 4}, {"window": 230}, {"window": 3, "sink": 2}, {"window": 50, "sink": 4}]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_ring_is_a_mask_that_saves_memory(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit in float32, where the machine keeps a row's sums: whole blocks of sums are left out, never parts."""
    unchecked(monkeypatch)
    for dtype in (torch.float32, torch.float64):
        decoder, known = of(entry, dtype), {"sequences": 2, "capacity": 600, "dtype": dtype, "device": "cpu"}
        got = logits(decoder, LayeredCache(decoder.config.layout, **known))
        want = logits(decoder, DenseCache(decoder.config.layout, **known))
        if dtype == torch.float32 and row_invariant():
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-11)


def read(decoder: Decoder, groups: Sequence[int], tree: bool, dropped: bool) -> tuple[Tensor, list[Tensor]]:
    """(the logits of a text read in groups of so many rows, all that its cache holds): each group may be the trunk of a
    tree with a branch beside each of its rows, or follow rows that were dropped."""
    cache = decoder.open_cache(2, 128)
    assert isinstance(cache, LayeredCache)
    found, at, sequence = [], 0, cache.open()
    for n in groups:
        if dropped:
            decoder(chains([[9, 8, 7]], [sequence]), cache)
            cache.drop()
        piece = PROMPT[at : at + n]
        if tree:
            tokens = [t for token in piece for t in (60 - token, token)]
            parents = [-1 if i < 2 else 2 * (i // 2) - 1 for i in range(2 * n)]
            rows = Rows(torch.tensor(tokens), torch.tensor(parents), torch.full((2 * n,), sequence), False)
            kept = range(1, 2 * n, 2)
        else:
            rows, kept = chains([piece], [sequence]), range(n)
        found.append(decoder(rows, cache).logits[list(kept)])
        cache.commit({sequence: kept})
        at += n
    last = [part[:, :, :at] for part in cache._kept[1].parts]
    sight = decoder.config.layout.layers[0].sight
    ring = [part[:, :, : cache._held(sight) if cache._is_ring(sight) else at] for part in cache._kept[0].parts]
    return torch.cat(found), [*last, *ring]


BITS = [{"bits": 8}, {"bits": 4}, {"bits": 4, "window": 7, "sink": 2}, {"bits": 8, "window": 5}]


@pytest.mark.parametrize("entry", BITS, ids=str)
def test_what_a_row_sees_of_a_key_is_a_function_of_the_two(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rows are grouped, in trees and behind dropped ones, codes are the same bit for bit, and so are logits but
    for the order of sums: there is no residual window, and a row sees its own key as those after it will."""
    unchecked(monkeypatch)
    decoder, rng = of(entry), random.Random(0)
    n = 60
    want, codes = read(decoder, [1] * n, tree=False, dropped=False)
    assert (codes[0][:, :, :n] != 0).any(-1).all()
    sizes = []
    while sum(sizes) < n:
        sizes.append(min(rng.randrange(1, 12), n - sum(sizes)))
    for groups in ([n], [20] * 3, sizes):
        for tree in (False, True):
            for dropped in (False, True):
                got, same = read(decoder, groups, tree, dropped)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
                for one, other in zip(same, codes, strict=True):
                    assert torch.equal(one, other), (groups, tree, dropped)


def test_a_prompts_keys_are_the_codes_of_rows_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long chain's path too."""
    unchecked(monkeypatch)
    decoder = of({"bits": 4, "window": 70, "sink": 2})
    want, _ = read(decoder, [1] * 90, tree=False, dropped=False)
    cache = decoder.open_cache(1, 128)
    sequence = cache.open()
    found = []
    for at, n in ((0, LONG_CHAIN + 6), (LONG_CHAIN + 6, 90 - LONG_CHAIN - 6)):
        found.append(decoder(chains([PROMPT[at : at + n]], [sequence], prompt=True), cache).logits)
        cache.commit({sequence: range(n)})
    torch.testing.assert_close(torch.cat(found), want, rtol=0, atol=1e-11)


def test_batched_is_alone() -> None:
    """mlx-vlm#1946: a prompt of 1 token beside one of 5."""
    for entry in (*ENTRIES, {"bits": 4}):
        decoder = of(entry)
        texts = [[3], [5, 9, 41, 5, 9]]

        def run(which: Sequence[int], decoder: Decoder = decoder, texts: Sequence[list[int]] = texts) -> list[Tensor]:
            cache = decoder.open_cache(2, 64)
            slots = [cache.open() for _ in which]
            pieces = [texts[i] for i in which]
            first = decoder(chains(pieces, slots), cache).logits
            bounds = [0, *torch.tensor([len(p) for p in pieces]).cumsum(0).tolist()]
            cache.commit({s: range(bounds[i], bounds[i + 1]) for i, s in enumerate(slots)})
            second = decoder(chains([[7]] * len(slots), slots), cache).logits
            return [torch.cat([first[bounds[i] : bounds[i + 1]], second[i : i + 1]]) for i in range(len(slots))]

        for i, got in enumerate(run([0, 1])):
            torch.testing.assert_close(got, run([i])[0], rtol=0, atol=1e-11)


def test_an_overflow_is_refused_before_anything_is_written() -> None:
    cache = layered(capacity=64)
    a, b = cache.open(), cache.open()
    cache.stage(chains([[0] * 60], [b]))
    with pytest.raises(
        ValueError, match=f"KV cache overflow: 5 rows for sequence {b}, which has room for 4 of 64; open"
    ):
        cache.stage(chains([[0, 0], [0] * 5], [a, b], last=[-1, 59], first=60))
    assert (cache.room(a), cache.room(b), cache.staged) == (64, 4, 60)
    with pytest.raises(ValueError, match="rows are numbered from 0, but 60 rows are staged"):
        cache.stage(chains([[0]], [a]))
    with pytest.raises(ValueError, match=f"sequence {b} has staged rows; commit or drop them before it is freed"):
        cache.free(b)
    with pytest.raises(ValueError, match="all 2 sequences of the cache are in use; free one first"):
        cache.open()


def test_what_a_request_left_never_reaches_the_next() -> None:
    cache, listed = layered(), Listed()
    a = cache.open()
    (part,) = cache.stage(chains([[0] * 9], [a])).parts
    for layer in LAYOUT.owners:
        nan = torch.full((9, LAYOUT.layers[layer].kv_heads, 3), torch.nan)
        cache.write(layer, part, nan, nan)
    cache.commit({a: range(9)})
    cache.free(a)
    assert cache.open() == a
    listed.committed[a] = []
    (part,) = cache.stage(chains([[0]], [a])).parts
    write(cache, part, [1])
    for layer in LAYERS:
        assert all(x.isfinite().all() for x in cache.view(layer, part))
    cache.drop()
    stage(cache, listed, chains([[0, 0]], [a]))


def test_no_slot_is_written_twice_by_a_commit() -> None:
    """Of more rows than a ring holds; which of two would stay is not defined."""
    cache = layered()
    sequence = cache.open()
    cache.stage(chains([[0] * 9], [sequence]))
    for sight in cache._rings:
        _, to = cache._moves(sight, sequence, range(9))
        assert len(set(to)) == len(to)


def test_it_is_a_cache() -> None:
    assert isinstance(layered(), Cache)
