"""The dense cache against a list: what a row sees is its sequence's committed rows, its ancestors and itself."""

import pytest
import torch

from decodelab.attention.book import LONG_CHAIN
from decodelab.attention.cache import Cache, DenseCache
from decodelab.attention.layout import LayerKV, Layout, uniform
from decodelab.attention.rows import Rows, chains
from decodelab.tests.attention.caches import LAYERS, LAYOUT, Listed, dense, operate, stage


def test_against_lists_under_random_operations() -> None:
    """sglang#8409, #26866, TensorRT-LLM#12962: any forest, several forwards before a commit, any rows kept."""
    operate(dense(sequences=3, capacity=400))


@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [1, 2, 3], [0, 2, 5], [3, 4, 5], [5], []])
def test_a_commit_moves_rows_onto_one_another(keep: list[int]) -> None:
    """LookaheadDecoding copies slice to slice in place; here source and destination may overlap."""
    cache, listed = dense(), Listed()
    sequence = cache.open()
    listed.committed[sequence] = []
    stage(cache, listed, chains([[0, 0, 0]], [sequence]))
    cache.commit({sequence: [0, 1, 2]})
    listed.committed[sequence] = [1, 2, 3]
    listed.staged.clear()
    tree = Rows(torch.zeros(6).long(), torch.tensor([-1, 0, 1, 2, 3, 4]), torch.full((6,), sequence), chain=False)
    stage(cache, listed, tree)
    cache.commit({sequence: keep})
    listed.committed[sequence] += [4 + i for i in keep]
    listed.staged.clear()
    stage(cache, listed, chains([[0]], [sequence]))


def test_rows_stay_where_they_are() -> None:
    """transformers#30312, #32946, #46629: what was refused is cut off in place, and a window takes that too."""
    cache, listed = dense(), Listed()
    at = [storage.data_ptr() for storage in cache._storage]
    sequence = cache.open()
    listed.committed[sequence] = []
    for _ in range(3):
        first = len(listed.committed[sequence])
        stage(cache, listed, chains([[0] * 9], [sequence]))
        cache.commit({sequence: [0, 1]})
        listed.committed[sequence] += [listed.staged[i][0] for i in (0, 1)]
        listed.staged.clear()
        assert cache.length(sequence) == first + 2
    assert at == [storage.data_ptr() for storage in cache._storage]


def test_long_chains_have_no_mask() -> None:
    cache = dense(uniform(1, 1, 4), capacity=400)
    sequence = cache.open()
    n = LONG_CHAIN + 1
    (part,) = cache.stage(chains([[0] * n], [sequence], prompt=True)).parts
    assert part.causal
    assert not part.blocked
    assert part.keys == n
    cache.commit({sequence: range(n)})
    place = cache.stage(chains([[0] * n], [sequence]))
    assert place.parts[0].keys == 2 * n
    assert place.positions.tolist() == list(range(n, 2 * n))


def test_a_dense_cache_refuses_what_it_would_ignore() -> None:
    layout = Layout((LayerKV(0, 1, bits=4),), 4)
    with pytest.raises(ValueError, match="layer 0 has bits=4, and a dense cache keeps rows as they are computed"):
        DenseCache(layout, sequences=1, capacity=8, dtype=torch.float32, device="cpu")


def test_bytes_are_those_of_the_formula() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = DenseCache(LAYOUT, sequences=3, capacity=100, dtype=dtype, device="cpu")
        assert cache.nbytes == LAYOUT.bytes_per_token(dtype.itemsize) * cache.slots
        assert cache.slots == 3 * cache.capacity
        assert cache.capacity >= 100


def test_an_overflow_is_refused_before_anything_is_written() -> None:
    cache = dense(capacity=64)
    a, b = cache.open(), cache.open()
    cache.stage(chains([[0] * 60], [b]))
    with pytest.raises(
        ValueError, match=f"KV cache overflow: 5 rows for sequence {b}, which has room for 4 of 64; open"
    ):
        cache.stage(chains([[0, 0], [0] * 5], [a, b], last=[-1, 59], first=60))
    assert (cache.room(a), cache.room(b), cache.staged) == (64, 4, 60)
    cache.stage(chains([[0, 0], [0] * 4], [a, b], last=[-1, 59], first=60))


def test_rows_are_numbered_from_those_staged() -> None:
    cache = dense()
    sequence = cache.open()
    cache.stage(chains([[0, 0]], [sequence]))
    with pytest.raises(ValueError, match="rows are numbered from 0, but 2 rows are staged"):
        cache.stage(chains([[0]], [sequence]))


def test_sequences_are_opened_and_freed() -> None:
    cache = dense()
    a, b = cache.open(), cache.open()
    assert a != b
    with pytest.raises(ValueError, match="all 2 sequences of the cache are in use; free one first"):
        cache.open()
    cache.stage(chains([[0]], [a]))
    with pytest.raises(ValueError, match=f"sequence {a} has staged rows; commit or drop them before it is freed"):
        cache.free(a)
    cache.commit({a: [0]})
    cache.free(a)
    assert cache.open() == a
    assert cache.length(a) == 0


def test_what_a_request_left_never_reaches_the_next() -> None:
    """Blocked slots are multiplied by 0, which a NaN survives: a slot that is opened again is finite."""
    cache = dense()
    a = cache.open()
    (part,) = cache.stage(chains([[0] * 9], [a])).parts
    for layer in LAYOUT.owners:
        nan = torch.full((9, LAYOUT.layers[layer].kv_heads, 3), torch.nan)
        cache.write(layer, part, nan, nan)
    cache.commit({a: range(9)})
    cache.free(a)
    assert cache.open() == a
    (part,) = cache.stage(chains([[0]], [a])).parts
    for layer in LAYERS:
        if layer in LAYOUT.owners:
            one = torch.ones(1, LAYOUT.layers[layer].kv_heads, 3)
            cache.write(layer, part, one, one)
        k, v = cache.view(layer, part)
        assert k.isfinite().all()
        assert v.isfinite().all()


def test_it_is_a_cache() -> None:
    assert isinstance(dense(), Cache)
