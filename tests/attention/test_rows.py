"""Rows: which row sees which, and where each stands."""

import random

import pytest
import torch

from decodelab.attention.rows import chains, forest, segments


def test_a_forest_seen_by_hand() -> None:
    """Two trees: 0 ← 1 ← 3, 0 ← 2; 4 ← 5."""
    depth, sees = forest((-1, 0, 0, 1, -1, 4))
    assert depth == (0, 1, 1, 2, 0, 1)
    assert [set(row.nonzero()[0]) for row in sees] == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}, {4, 5}]


def test_a_row_sees_its_ancestors_and_itself_in_any_forest() -> None:
    """sglang#8409: a child follows its parent, not the slot before its own."""
    rng = random.Random(0)
    for _ in range(50):
        parents = tuple(rng.randrange(-1, i) for i in range(rng.randrange(20)))
        depth, sees = forest(parents)
        for i in range(len(parents)):
            ancestors, at = [i], parents[i]
            while at >= 0:
                ancestors.append(at)
                at = parents[at]
            assert set(sees[i].nonzero()[0]) == set(ancestors)
            assert depth[i] == len(ancestors) - 1


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, -2), (-1, 2, 0)])
def test_a_parent_is_an_earlier_row(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"row \d has parent -?\d; a parent is -1 or an earlier row"):
        forest(parents)


def test_what_is_cached_cannot_be_written_to() -> None:
    _, sees = forest((-1, 0))
    with pytest.raises(ValueError, match="read-only"):
        sees[0, 1] = True


def test_chains_side_by_side() -> None:
    rows = chains([[5, 6, 7], [8], [9, 10]], [2, 0, 1])
    assert rows.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert rows.parents.tolist() == [-1, 0, 1, -1, -1, 4]
    assert rows.sequence.tolist() == [2, 2, 2, 0, 1, 1]
    assert (rows.chain, rows.first, len(rows)) == (True, 0, 6)


def test_chains_that_go_on_from_staged_rows() -> None:
    rows = chains([[5], [6, 7]], [0, 1], last=[3, -1], first=4)
    assert rows.parents.tolist() == [3, -1, 5]
    assert rows.first == 4


def test_segments() -> None:
    assert segments(torch.tensor([3, 3, 0, 1, 1, 1])) == [(3, 0, 2), (0, 2, 3), (1, 3, 6)]
    with pytest.raises(ValueError, match="must stand side by side"):
        segments(torch.tensor([0, 1, 0]))
