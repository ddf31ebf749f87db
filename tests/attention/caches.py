"""Caches against lists: what is written into them, and what they must show."""

import random
from dataclasses import dataclass, field

import torch

from decodelab.attention.book import Part
from decodelab.attention.cache import Cache, DenseCache
from decodelab.attention.layered import LayeredCache
from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.paged import PagedCache
from decodelab.attention.rows import Rows

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


def operate(cache: DenseCache | LayeredCache | PagedCache, seed: int = 0) -> None:
    """Random operations on three sequences, and forks and a full pool where there are pages."""
    rng, listed, kind = random.Random(seed), Listed(), torch.tensor
    pages = cache.pages if isinstance(cache, PagedCache) else None
    forks, full, longest = 0, 0, 0
    for _ in range(300):
        match rng.choice(["open", *["stage"] * 3, "commit", "commit", "drop", "fork", "free"]):
            case "open" if len(listed.committed) < 3:
                listed.committed[cache.open()] = []
            case "stage" if listed.committed:
                first, parents, owner = len(listed.staged), [], []
                for sequence in rng.sample(sorted(listed.committed), rng.randrange(1, len(listed.committed) + 1)):
                    full += not cache.room(sequence)
                    for _ in range(min(rng.randrange(1, 9), cache.room(sequence))):
                        earlier = [i for i, (_, _, s) in enumerate(listed.staged) if s == sequence]
                        mine = [first + i for i, s in enumerate(owner) if s == sequence]
                        parents.append(rng.choice([-1, *earlier, *mine]))
                        owner.append(sequence)
                if owner:
                    stage(cache, listed, Rows(kind([0] * len(owner)), kind(parents), kind(owner), False, first))
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
            case "fork" if isinstance(cache, PagedCache) and 0 < len(listed.committed) < 3 and not listed.staged:
                sequence = rng.choice(sorted(listed.committed))
                listed.committed[cache.fork(sequence)] = list(listed.committed[sequence])
                forks += 1
            case "free" if listed.committed and not listed.staged and rng.random() < 0.4:
                sequence = rng.choice(sorted(listed.committed))
                cache.free(sequence)
                del listed.committed[sequence]
        assert cache.staged == len(listed.staged)
        for sequence, marks in listed.committed.items():
            staged = sum(s == sequence for _, _, s in listed.staged)
            assert cache.length(sequence) == len(marks)
            room = cache.capacity - len(marks) - staged
            if pages is None:
                assert cache.room(sequence) == room
            else:
                assert cache.room(sequence) == min(room, pages.room(sequence))
                assert (pages.length(sequence), pages.staged(sequence)) == (len(marks), staged)
            longest = max(longest, len(marks))
        if pages is not None:
            pages.check()
    assert longest > 30
    assert pages is None or (forks > 3 and full)
