"""The dense cache against a list: what a row sees is its sequence's committed rows, its ancestors and itself."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from decodelab.attention.cache import LONG_CHAIN, Cache, DenseCache, Part
from decodelab.attention.layered import LayeredCache
from decodelab.attention.layout import LayerKV, Layout, uniform
from decodelab.attention.rows import Rows, chains

# Layers 0 and 1 share keys, 2 has another number of heads, 3 and those behind it a window, 5 and 6 sinks.
LAYOUT = Layout(
    (
        LayerKV(0, 2),
        LayerKV(0, 2),
        LayerKV(2, 1),
        LayerKV(3, 2, window=4),
        LayerKV(4, 2, window=1),
        LayerKV(5, 1, window=3, sink=2),
        LayerKV(5, 1, window=3, sink=2),
    ),
    head_dim=3,
)
LAYERS = range(len(LAYOUT.layers))


def dense(layout: Layout = LAYOUT, sequences: int = 2, capacity: int = 128) -> DenseCache:
    return DenseCache(layout, sequences=sequences, capacity=capacity, dtype=torch.float32, device="cpu")


@dataclass
class Listed:
    """The same, as lists: the marks of a sequence's committed rows, and (mark, parent, sequence) of the staged ones."""

    committed: dict[int, list[int]] = field(default_factory=dict)
    staged: list[tuple[int, int, int]] = field(default_factory=list)
    marks: int = 0

    def path(self, row: int) -> list[int]:
        """Marks of a staged row's ancestors and its own."""
        out: list[int] = []
        while row >= 0:
            mark, row, _ = self.staged[row]
            out.append(mark)
        return out[::-1]

    def sees(self, row: int) -> list[int]:
        return self.committed[self.staged[row][2]] + self.path(row)


def write(cache: Cache, part: Part, marks: list[int]) -> None:
    """Rows are told apart by their marks: keys hold mark + layer / 10, values the negative."""
    for layer in LAYOUT.owners:
        kv_heads = LAYOUT.layers[layer].kv_heads
        k = (torch.tensor(marks[part.first : part.stop]).float() + layer / 10)[:, None, None].expand(-1, kv_heads, 3)
        cache.write(layer, part, k, -k)


def seen(cache: Cache, part: Part, layer: int) -> list[list[int]]:
    """The marks that each of the part's rows sees, by slot; keys and values of all heads must tell the same."""
    k, v = cache.view(layer, part)
    assert torch.equal(k, -v)
    assert torch.equal(k, k[:1, :, :1].expand_as(k))
    owner = LAYOUT.layers[layer].owner
    marks = (k[0, :, 0] - owner / 10).round().long()
    blocked = torch.zeros(part.stop - part.first, len(marks), dtype=torch.bool)
    mask = part.blocked.get(LAYOUT.layers[layer].sight)
    if mask is not None:
        blocked[:, len(marks) - mask.shape[1] :] = mask
    return [marks[~row].tolist() for row in blocked]


def stage(cache: Cache, listed: Listed, rows: Rows) -> None:
    marks = list(range(listed.marks + 1, listed.marks + 1 + len(rows)))
    listed.marks += len(rows)
    first = len(listed.staged)
    listed.staged += list(zip(marks, rows.parents.tolist(), rows.sequence.tolist(), strict=True))
    place = cache.stage(rows)
    for part in place.parts:
        write(cache, part, marks)
    for part in place.parts:
        for layer in LAYERS:
            window, sink = LAYOUT.layers[layer].sight
            for i, got in enumerate(seen(cache, part, layer)):
                want = listed.sees(first + part.first + i)  # by position
                if window is not None:
                    want = [mark for p, mark in enumerate(want) if p < sink or p >= len(want) - window]
                assert got == want
        for i in range(part.first, part.stop):
            depth = len(listed.path(first + i)) - 1
            assert int(place.positions[i]) == len(listed.committed[part.sequence]) + depth


def test_against_lists_under_random_operations() -> None:
    """sglang#8409, #26866, TensorRT-LLM#12962: any forest, several forwards before a commit, any rows kept."""
    operate(dense(sequences=3, capacity=400))


def operate(cache: DenseCache | LayeredCache) -> None:
    """On three sequences."""
    rng, listed = random.Random(0), Listed()
    longest = 0
    for _ in range(400):
        match rng.choice(
            ["open", "stage", "stage", "stage", "commit", "commit", "drop"] + ["free"] * (rng.random() < 0.2)
        ):
            case "open" if len(listed.committed) < 3:
                listed.committed[cache.open()] = []
            case "stage" if listed.committed:
                first, tokens, parents, owner = len(listed.staged), 0, [], []
                for sequence in rng.sample(sorted(listed.committed), rng.randrange(1, len(listed.committed) + 1)):
                    for _ in range(min(rng.randrange(1, 6), cache.room(sequence) - owner.count(sequence))):
                        earlier = [i for i, (_, _, s) in enumerate(listed.staged) if s == sequence]
                        mine = [first + i for i, s in enumerate(owner) if s == sequence]
                        parents.append(rng.choice([-1, *earlier, *mine]))
                        owner.append(sequence)
                        tokens += 1
                if tokens:
                    kind = torch.tensor
                    stage(cache, listed, Rows(kind([0] * tokens), kind(parents), kind(owner), chain=False, first=first))
            case "commit":
                keep = {}
                for sequence in listed.committed:
                    mine = [i for i, (_, _, s) in enumerate(listed.staged) if s == sequence]
                    if rng.random() < 0.8:  # a sequence that is not named keeps nothing
                        keep[sequence] = sorted(rng.sample(mine, rng.randrange(len(mine) + 1)))
                cache.commit(keep)
                for sequence, rows in keep.items():
                    listed.committed[sequence] += [listed.staged[i][0] for i in rows]
                listed.staged.clear()
            case "drop":
                cache.drop()
                listed.staged.clear()
            case "free" if listed.committed and not listed.staged:
                sequence = rng.choice(sorted(listed.committed))
                cache.free(sequence)
                del listed.committed[sequence]
        assert cache.staged == len(listed.staged)
        for sequence, marks in listed.committed.items():
            mine = sum(s == sequence for _, _, s in listed.staged)
            assert (cache.length(sequence), cache.room(sequence)) == (len(marks), cache.capacity - len(marks) - mine)
            longest = max(longest, len(marks))
    assert longest > 50


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
