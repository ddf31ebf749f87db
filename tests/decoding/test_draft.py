"""What a draft may be."""

from typing import Any

import pytest
import torch

from decodelab.decoding.draft import EMPTY, Draft, Drafter, Room, chain, tree
from decodelab.drafting.none import Nothing
from decodelab.tests.rigged import Rigged


def forest(parents: tuple[int, ...], judged: tuple[bool, ...]) -> Draft:
    K = len(parents)
    return Draft((1,) * K, parents, None, (-1,) * K, judged, (0,) * K)


def test_chains_and_trees() -> None:
    q = torch.rand(2, 5)
    assert chain([3, 4], q) == Draft((3, 4), (-1, 0), q, (0, 1), (True, True), (0, 0))
    assert chain([3, 4], source=1).q_row == (-1, -1)
    assert chain([3, 4], source=1).source == (1, 1)
    assert tree([3, 4, 5], [-1, -1, 0]).parents == (-1, -1, 0)
    assert chain([3, 4]).is_chain
    assert EMPTY.is_chain
    assert not tree([3, 4], [-1, -1]).is_chain
    assert len(EMPTY) == 0


def test_depth_is_that_of_the_candidates() -> None:
    """Rows that are no candidates may stand deeper; they take rows, not depth."""
    assert EMPTY.depth == 0
    assert tree([1, 1, 1, 1], [-1, 0, 0, 2]).depth == 3
    assert forest((-1, 0, 1, -1), (True, False, False, True)).depth == 1
    assert forest((-1, 0), (False, False)).depth == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parents": (-1,)}, "a draft of 2 tokens has 1 parents"),
        ({"q_row": (-1,)}, "a draft of 2 tokens has 1 q_row"),
        ({"judged": ()}, "a draft of 2 tokens has 0 judged"),
        ({"source": (0, 0, 0)}, "a draft of 2 tokens has 3 source"),
        ({"parents": (-1, 1)}, "draft row 1 has parent 1; a parent is -1 or an earlier row"),
        ({"parents": (-2, 0)}, "draft row 0 has parent -2; a parent is -1 or an earlier row"),
        ({"judged": (False, True)}, "draft row 1 is a candidate behind row 0, which is not"),
        ({"q_row": (0, -1)}, "a draft names rows of q but brings none"),
    ],
)
def test_what_a_draft_refuses(fields: dict[str, Any], message: str) -> None:
    whole = {"tokens": (1, 2), "parents": (-1, 0), "q_row": (-1, -1), "judged": (True, True), "source": (0, 0)}
    with pytest.raises(ValueError, match=message):
        Draft(**whole | fields)


def test_a_chain_fits_both_bounds() -> None:
    assert [Room(d, r).chain for d, r in ((3, 5), (5, 3), (0, 4), (4, 0))] == [3, 3, 0, 0]


def test_drafters_are_drafters() -> None:
    assert isinstance(Nothing(), Drafter)
    assert isinstance(Rigged(lambda *_: EMPTY), Drafter)
