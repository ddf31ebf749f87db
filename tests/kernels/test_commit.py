"""Kept rows of all layers in one launch, against reading all before writing any."""

import pytest
import torch
from torch import Tensor

from decodelab.kernels.commit import _op, commit, commit_reference, owners

pytest.importorskip("triton", reason="kernels are interpreted by triton")

KEPT = torch.tensor([[0, 3, 4, 6], [5, 4, 0, 1], [2, 7, 7, 7]]).int()  # any order; −1 and the like behind count
COUNT = torch.tensor([4, 4, 1]).int()
PREFIX = torch.tensor([3, 0, 8]).int()


def caches(blocks: int, slots: int, rng: torch.Generator) -> list[Tensor]:
    """Keys of two widths, one with heads before slots; 8 and 4 bits with their scales."""
    return [
        torch.randn(blocks, slots, 2, 20, generator=rng).half(),
        torch.randn(blocks, 1, slots, 16, generator=rng).bfloat16().transpose(1, 2),
        torch.randint(-9, 9, (blocks, slots, 2, 6), generator=rng, dtype=torch.int8),
        torch.randn(blocks, slots, 2, generator=rng).half(),
        torch.randn(blocks, slots, 1, 5, generator=rng),
    ]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_all_layers_at_once(paged: bool, odd: bool, rng: torch.Generator) -> None:
    """Overlapping sources and destinations, across blocks (sglang#26866); what is not kept stays."""
    slots, blocks = (4, 17) if paged else (16, 3)
    tables = torch.randperm(17, generator=rng)[:12].view(3, 4).int() if paged else None
    mine = caches(blocks, slots, rng)
    if odd:  # bytes that cannot be moved in pairs
        mine.append(torch.randint(0, 255, (blocks, slots, 1, 3), generator=rng, dtype=torch.uint8))
    want = [cache.clone() for cache in mine]
    commit_reference(want, tables, PREFIX, KEPT, COUNT)
    to = owners(mine)
    assert to.unit == (1 if odd else 2)
    commit(to, PREFIX, KEPT, COUNT, tables)
    assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


def test_rows_by_hand() -> None:
    cache = torch.arange(8.0)[None, :, None, None].clone()
    commit(owners([cache]), torch.tensor([2]).int(), torch.tensor([[0, 3, 5, -1]]).int(), torch.tensor([3]).int())
    assert cache.flatten().tolist() == [0, 1, 2, 5, 7, 5, 6, 7]


def test_a_row_past_the_end_of_a_great_pool_is_found() -> None:
    """vllm#47671: a slot's offset times its stride beyond 2^31; the strides are real, the memory is one block's."""
    base = torch.arange(16, dtype=torch.int16)
    cache = base.as_strided((1 << 20, 2, 1, 4), (0, 8, 8, 1))
    wide = owners([cache])
    table = wide.table.clone()
    table[0, 1] = 1 << 31  # units from block to block
    table[0, 0] -= 2 * (3 << 31)  # so that block 3 is where the memory is
    tables = torch.tensor([[3]]).int()
    _op(list(wide.caches), table, 2, 4, torch.tensor([0]).int(), torch.tensor([[1]]).int(), COUNT[2:], tables)
    assert base.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def test_it_is_an_op_for_torch_compile(rng: torch.Generator) -> None:
    to = owners(caches(3, 16, rng)[2:4])
    # only fakes and the schema: a copy of the caches lies elsewhere than the table says
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        _op, (list(to.caches), to.table, to.unit, to.columns, PREFIX, KEPT, COUNT, None), test_utils=kinds
    )
