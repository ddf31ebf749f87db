"""The packed product against the float64 definition, and a row's bits whatever rows stand beside it."""

import pytest
import torch

from decodelab.kernels.linear import Linear, linear_reference
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.native import missing

# Root mean square over all outputs. float32: K terms summed in some order, a few units of 6e-8. bfloat16: summed in
# float32 and rounded once, by at most 2^-8 of the output; float16: 2^-11, or 2^-10 where it is summed in pieces.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

# (N, K) of SmolLM2-135M, Qwen2.5-Coder-0.5B and 1.5B: qkv, output, gate and up, down, a slice of the unembedding
REAL = [
    (960, 576),
    (3072, 576),
    (576, 1536),
    (12288, 576),
    (1152, 896),
    (896, 4864),
    (9728, 896),
    (2048, 1536),
    (1536, 8960),
]
ODD = [(1, 1), (5, 3), (61, 64), (17, 100), (100, 33)]


def linear(N: int, K: int, dtype: torch.dtype, rng: torch.Generator, bias: bool = False) -> Linear:
    weight = torch.randn(N, K, generator=rng).to(dtype)
    return Linear(weight, torch.randn(N, generator=rng).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("N", "K"), [*ODD, (576, 1536), (45, 352)])
def test_product_is_the_reference(N: int, K: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    for bias in (False, True):
        layer = linear(N, K, dtype, rng, bias)
        for rows in (1, 2, 7, 64):
            x = torch.randn(rows, K, generator=rng).to(dtype)
            want = linear_reference(
                x.double(), layer.dense().double(), None if layer.bias is None else layer.bias.double()
            )
            for prefill in (False, True):
                got = layer(x, prefill)
                assert got.dtype == dtype
                assert got.shape == (rows, N)
                assert relative_error(got, want) < TOLERANCE[dtype]


def test_the_reference_is_exact_on_integers() -> None:
    x, weight = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    want = torch.tensor([[12.0, 18.0, 24.0], [-3.0, -5.0, -7.0]])
    assert torch.equal(linear_reference(x, weight, torch.ones(3)), want)


def row_invariant(layer: Linear) -> None:
    if (layer.packed is None and layer.native is None) or "not row-invariant" in layer.implementation:
        pytest.skip(f"the product of this machine is {layer.implementation!r}, which promises nothing to the bit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "K"), [*REAL, *ODD])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    N: int, K: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """What makes greedy speculation bit-exact: k rows verify what one row would have said (EAGLE#79, vllm#41758)."""
    layer = linear(N, K, dtype, rng, bias=True)
    row_invariant(layer)
    x = torch.randn(48, K, generator=rng).to(dtype)
    want = layer(x)
    for rows in (*range(1, 17), 33):
        assert torch.equal(layer(x[:rows]), want[:rows]), rows
    for at in range(1, 16):
        assert torch.equal(layer(x[at : at + 1]), want[at : at + 1]), at
    if layer.native is not None:
        prompt = layer(x, prefill=True)
        for rows in (1, 2, 11, 12, 13, 31, 47):
            assert torch.equal(layer(x[-rows:], prefill=True), prompt[-rows:]), rows


def test_threads_that_take_a_prompt_s_tiles_as_they_come_change_nothing(rng: torch.Generator) -> None:
    layer = linear(12288, 576, torch.bfloat16, rng)
    row_invariant(layer)
    x = torch.randn(64, 576, generator=rng).bfloat16()
    want = layer(x, prefill=True)
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(layer(x, prefill=True), want) for _ in range(5))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("K", [64, 1536, 4864, 8960])
def test_a_lone_row_is_summed_as_several_are_where_rounding_would_hide_it(K: int, rng: torch.Generator) -> None:
    """All terms cancel and only the rounding of the sums is left; oneDNN has an order of its own for one long row."""
    left = torch.randn(16, K // 2, generator=rng).bfloat16()
    right = torch.randn(576, K // 2, generator=rng).bfloat16()
    mirrored = torch.randperm(K // 2, generator=rng)
    layer = Linear(torch.cat([right, -right[:, mirrored]], 1))
    row_invariant(layer)
    x = torch.cat([left, left[:, mirrored]], 1)
    want = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], want[i]) for i in range(16))


def test_our_own_product_holds_the_weight_as_it_is(rng: torch.Generator) -> None:
    """Nothing is packed, so that a table of embeddings that is the unembedding too is held once."""
    if (why := missing()) is not None:
        pytest.skip(why)
    weight = torch.randn(100, 64, generator=rng).bfloat16()
    layer = Linear(weight)
    assert layer.implementation == "native"
    assert layer.dense().data_ptr() == weight.data_ptr()
    x = torch.randn(200, 64, generator=rng).bfloat16()
    assert relative_error(layer(x), layer(x, prefill=True)) < 2**-8
    shifted = torch.zeros(6401, dtype=torch.bfloat16)[1:].view(100, 64).copy_(weight)
    assert torch.equal(Linear(shifted)(x), layer(x))
    spoiled = x.clone()
    spoiled[3, 5] = torch.nan
    assert layer(spoiled)[3].isnan().all()
    assert torch.equal(layer(spoiled)[4:], layer(x)[4:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dense_gives_back_what_was_packed(dtype: torch.dtype, rng: torch.Generator) -> None:
    for N, K in ((61, 64), (5, 3), (576, 1536)):
        weight = torch.randn(N, K, generator=rng).to(dtype)
        layer = Linear(weight.clone())
        assert torch.equal(layer.dense(), weight)
        assert layer.nbytes == N * K * dtype.itemsize


def test_what_cannot_be_packed_stays_as_it_is(rng: torch.Generator) -> None:
    assert linear(8, 8, torch.float64, rng).implementation == "torch"
    assert linear(8, 8, torch.float16, rng).implementation == "torch"


def test_a_weight_that_is_a_view_of_another_is_packed_alone(rng: torch.Generator) -> None:
    whole = torch.randn(64, 100, generator=rng)
    layer = Linear(whole.T[10:30])
    x = torch.randn(3, 64, generator=rng)
    assert relative_error(layer(x), linear_reference(x, whole.T[10:30])) < TOLERANCE[torch.float32]
