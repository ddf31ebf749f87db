"""Attention of many sequences' forests against the float64 definition, and a row's bits whatever stands beside it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decodelab.kernels import cases
from decodelab.kernels.cases import paged, quantised, ringed
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.verify_attention import verify_attention_reference
from decodelab.kernels.verify_attention.batch import _op, verify_attention_batch
from decodelab.kernels.verify_attention.batch_reference import verify_attention_batch_reference
from decodelab.kernels.verify_attention.keys import Keys, Looks

pytest.importorskip("triton", reason="kernels are interpreted by triton")

# Root mean square; weights and values are rounded once to the dtype, sums are of float32. (Triton's
# interpreter does not round to bfloat16 but cuts off.)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
FORESTS = {  # parents: lone row, chain, tree, forest of two
    "row": [-1],
    "chain": [-1, 0, 1, 2],
    "tree": [-1, 0, 0, 1, 1, 2],
    "forest": [-1, -1, 0, 1, 1],
    "none": [],
}


def looks(prefixes: list[int], shapes: list[str], spare: int = 0) -> Looks:
    """`spare`: columns of `blocked` that no sequence has rows for, and keys by which the bound is too high."""
    return cases.looks(prefixes, [FORESTS[shape] for shape in shapes], spare)


def tensors(
    N: int, S: int, heads: tuple[int, int], D: int, dtype: torch.dtype, rng: torch.Generator, T: int
) -> tuple[Tensor, Keys]:
    q = torch.randn(T, heads[0], D, generator=rng).to(dtype)
    k, v = (torch.randn(N, S, heads[1], D, generator=rng).to(dtype) for _ in range(2))
    return q, Keys(k, v)


def check(q: Tensor, keys: Keys, some: Looks, window: int | None = None, sink: int = 0) -> Tensor:
    want = verify_attention_batch_reference(q.double(), keys, some, 0.3, window, sink)
    got = verify_attention_batch(q, keys, some, 0.3, window, sink)
    assert got.dtype == q.dtype
    assert relative_error(got, want) < TOLERANCE[q.dtype]
    return got


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "D"), [((2, 2), 16), ((4, 2), 32), ((7, 1), 20)])
def test_rows_of_many_sequences(heads: tuple[int, int], D: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Groups that are no power of two (flashinfer#2684, mlc-llm#2543); a child sees its parent alone (sglang#8409)."""
    some = looks([5, 0, 33], ["tree", "row", "forest"], spare=1)
    check(*tensors(3, 64, heads, D, dtype, rng, 12), some)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("window", "sink"), [(None, 0), (6, 2)])
def test_where_blocks_lie_and_what_is_unused_does_not_matter(
    bits: int, window: int | None, sink: int, rng: torch.Generator
) -> None:
    """Bit-equal (vllm#50427): strewn pages, other bounds, a sequence without rows, one more beside it."""
    q, keys = tensors(2, 48, (2, 1), 32, torch.float32, rng, 7)
    keys = keys if bits == 16 else quantised(keys, bits)
    some = looks([40, 3], ["tree", "row"])
    got = check(q, keys, some, window, sink)
    assert torch.equal(check(q, paged(keys, 16, rng), some, window, sink), got)
    assert torch.equal(verify_attention_batch(q, keys, looks([40, 3], ["tree", "row"], 3), 0.3, window, sink), got)
    alone = Keys(*(None if part is None else part[:1] for part in (keys.k, keys.v, keys.k_scale, keys.v_scale)))
    assert torch.equal(verify_attention_batch(q[:6], alone, looks([40], ["tree"]), 0.3, window, sink), got[:6])
    empty = looks([40, 3], ["tree", "none"])
    assert torch.equal(verify_attention_batch(q[:6], keys, empty, 0.3, window, sink), got[:6])


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (20, 0), (20, 3), (300, 0)])
def test_several_chunks_and_windows_across_them(window: int | None, sink: int, rng: torch.Generator) -> None:
    """A row of five keys beside one of 500: its later chunks are empty, and left as NaN (vllm#39148)."""
    q, keys = tensors(2, 512, (2, 1), 16, torch.float32, rng, 5)
    got = check(q, keys, looks([500, 5], ["chain", "row"]), window, sink)
    alone = looks([500, 5], ["row", "row"])
    alone = replace(alone, max_keys=504)
    first = verify_attention_batch(q[[0, 4]], keys, alone, 0.3, window, sink)
    assert torch.equal(first[0], got[0])
    assert torch.equal(first[1], got[4])
    taller = verify_attention_batch(q, keys, looks([500, 5], ["chain", "row"]), 0.3, window, sink, row_invariant=False)
    assert relative_error(taller, got) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("window", "sink"), [(6, 0), (6, 2), (20, 3)])
def test_windows_may_be_kept_as_rings(bits: int, window: int, sink: int, rng: torch.Generator) -> None:
    """Bit-equal to keys at their positions: prefixes within the sinks, of less than a window, and around it often."""
    q, keys = tensors(4, 320, (2, 1), 16, torch.float32, rng, 14)
    keys = keys if bits == 16 else quantised(keys, bits)
    prefixes = [300, 1, 5, 24]
    some = looks(prefixes, ["tree", "row", "row", "tree"])
    ring = ringed(keys, prefixes, 6, window, sink, gap=1)
    want = check(q, keys, some, window, sink)
    assert torch.equal(check(q, ring, some, window, sink), want)
    assert torch.equal(check(q, paged(ring, 4, rng), some, window, sink), want)


def test_a_window_is_of_positions_and_counts_the_row_itself(rng: torch.Generator) -> None:
    """W keys: i − W + 1 … i (transformers#39408), by depth: siblings stand at one position."""
    q, keys = tensors(1, 16, (1, 1), 16, torch.float32, rng, 6)
    keys = replace(keys, v=torch.eye(16)[None, :, None])
    got = verify_attention_batch(torch.zeros_like(q), keys, looks([6], ["tree"]), 1.0, 3)
    seen = [torch.nonzero(row).flatten().tolist() for row in got]
    # slots 6 … 11 have parents −1, 0, 0, 1, 1, 2, and depths 0, 1, 1, 2, 2, 2
    assert seen == [[4, 5, 6], [5, 6, 7], [5, 6, 8], [6, 7, 9], [6, 7, 10], [6, 8, 11]]
    assert torch.equal(got.sum(1), torch.ones(6))


def test_a_row_that_sees_nothing_gets_zeros(rng: torch.Generator) -> None:
    """flash-attention#1133, unsloth#9708."""
    for S in (16, 512):
        q, keys = tensors(2, S, (2, 1), 16, torch.float32, rng, 2)
        some = looks([0, 3], ["row", "row"])
        some.blocked[0] = True
        got = check(q, keys, replace(some, max_keys=S))
        assert torch.equal(got[0], torch.zeros(32))
        assert got[1].abs().sum() > 0


def test_scores_far_apart_do_not_overflow(rng: torch.Generator) -> None:
    """executorch#22133, flashinfer#4401: logits of ± 1e4."""
    q, keys = tensors(1, 32, (2, 1), 16, torch.float32, rng, 4)
    check(q * 100, replace(keys, k=keys.k * 100), looks([20], ["chain"]))


def test_heads_may_come_before_slots(rng: torch.Generator) -> None:
    """A dense cache keeps [sequence, head, slot, D]: its view is taken as it is."""
    q, keys = tensors(2, 32, (4, 2), 16, torch.float32, rng, 7)
    some = looks([9, 20], ["tree", "row"])
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys.k, keys.v))
    turned = replace(keys, k=k, v=v)
    assert torch.equal(check(q, turned, some), check(q, keys, some))


def test_one_sequence_is_what_verify_attention_says(rng: torch.Generator) -> None:
    q, keys = tensors(1, 26, (4, 2), 16, torch.float64, rng, 6)
    some = looks([20], ["tree"])
    got = verify_attention_batch(q, keys, some, 0.3)  # float64 is torch's
    k, v = (x[0].transpose(0, 1) for x in (keys.k, keys.v))
    assert relative_error(got, verify_attention_reference(q, k, v, some.blocked, 0.3)) < 1e-14


def test_the_op_is_one_for_torch_compile(rng: torch.Generator) -> None:
    q, keys = tensors(2, 16, (2, 1), 16, torch.float32, rng, 7)
    some = looks([5, 3], ["tree", "row"])
    for stored in (keys, paged(quantised(keys, 8), 8, rng)):
        torch.library.opcheck(
            _op,
            (
                *(q, stored.k, stored.v, stored.k_scale, stored.v_scale, stored.tables, some.starts, some.prefix),
                *(some.staged, some.positions, some.key_positions, some.blocked, some.max_rows, some.max_keys),
                *(0.3, None, 0, True),
            ),
        )
