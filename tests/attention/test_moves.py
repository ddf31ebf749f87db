"""Kept rows of all layers moved by the kernel, against lists."""

from typing import Any

import pytest
import torch

from decodelab.attention import cache as dense
from decodelab.attention import moves
from decodelab.attention.cache import DenseCache
from decodelab.attention.kept import KeptRows
from decodelab.attention.layered import LayeredCache
from decodelab.attention.paged import PagedCache
from decodelab.kernels.dispatch import Kernels
from decodelab.tests.attention.caches import LAYOUT, operate
from decodelab.tests.enumeration import unchecked

pytest.importorskip("triton", reason="kernels are interpreted by triton")


@pytest.mark.parametrize("kind", [DenseCache, LayeredCache, PagedCache])
def test_against_lists_under_random_operations(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for each kind of table, and by no other way."""
    unchecked(monkeypatch)
    made: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kernels": Kernels(interpreted=True)}
    cache = (
        PagedCache(LAYOUT, size=3, blocks=32, **made)
        if kind is PagedCache
        else kind(LAYOUT, sequences=3, capacity=400, **made)
    )
    if isinstance(cache, PagedCache):
        cache.reserve(2, 400)
    launches = []
    where = dense if kind is DenseCache else moves
    commit = where.commit
    monkeypatch.setattr(where, "commit", lambda *args: (launches.append(args), commit(*args)))
    monkeypatch.setattr(KeptRows, "move", None)
    operate(cache)
    assert len(launches) > 5
