"""The products of 8 bits against the float64 definitions, and a row's bits whatever rows stand beside it."""

import pytest
import torch
from torch import Tensor

from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.matmul_w8 import cpu, matmul_w8_reference, matmul_w8a8_reference, rounded_rows

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 3, 8, 16, 64)


def parts(N: int, K: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = torch.randint(-128, 128, (N, K), generator=rng, dtype=torch.int8)
    return weight, (torch.rand(N, generator=rng) + 0.5).bfloat16()


def packed(weight: Tensor, scale: Tensor) -> cpu.Packed:
    if not cpu.can_pack(torch.bfloat16, CPU, weight.shape[1]):
        pytest.skip("this processor has no packed product of 8 bits")
    found = cpu.pack(weight, scale)
    if found is None:
        pytest.skip("this machine's product gives a row other bits beside other rows")
    return found


def rounded(weight: Tensor, scale: Tensor) -> cpu.PackedRounded:
    found = cpu.pack_rounded(weight, scale)
    if found is None:
        pytest.skip("this machine's product of integers is not exact")
    return found


@pytest.mark.parametrize(("N", "K"), [(1, 16), (5, 48), (61, 64), (960, 576), (100, 1536), (17, 4864)])
def test_product_is_the_reference(N: int, K: int, rng: torch.Generator) -> None:
    weight, scale = parts(N, K, rng)
    product = packed(weight, scale)
    x = torch.randn(64, K, generator=rng).bfloat16()
    want = matmul_w8_reference(x.double(), weight, scale)
    for rows in ROWS:
        got = product(x[:rows])
        assert got.shape == (rows, N)
        assert rows == 0 or relative_error(got, want[:rows]) < 2**-7  # rounded before and after the scale
    assert torch.equal(product.dense(torch.float64), weight.double() * scale.double()[:, None])
    assert torch.equal(product.dense(torch.float32, N // 2, N), product.dense(torch.float32)[N // 2 :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 3), (61, 64), (100, 33), (960, 576), (17, 4864)])
def test_product_of_rounded_rows_is_the_reference(N: int, K: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, scale = parts(N, K, rng)
    product = rounded(weight, scale)
    x = torch.randn(64, K, generator=rng).to(dtype)
    want = matmul_w8a8_reference(x, weight, scale).double()
    for rows in ROWS:
        got = product(x[:rows])
        assert (got.shape, got.dtype) == ((rows, N), dtype)
        assert rows == 0 or relative_error(got, want[:rows]) < torch.finfo(dtype).eps


def test_the_references_are_exact_on_integers() -> None:
    x, weight = torch.tensor([[127.0, 2.0], [0.0, 0.0]]), torch.tensor([[3, 4], [-128, 1]], dtype=torch.int8)
    want = torch.tensor([[389.0 * 2, -16254.0 / 2], [0.0, 0.0]])
    for reference in (matmul_w8_reference, matmul_w8a8_reference):  # the greatest is 127: rounding loses nothing
        assert torch.equal(reference(x, weight, torch.tensor([2.0, 0.5])), want)


def test_rows_are_rounded_to_their_own_greatest(rng: torch.Generator) -> None:
    x = torch.randn(5, 33, generator=rng) * torch.tensor([1.0, 100.0, 1e-30, 0.0, 1e-42])[:, None]
    values, scale = rounded_rows(x)
    assert values.abs().amax(1).tolist()[:3] == [127, 127, 127]
    assert ((values * scale - x).abs() <= scale / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize(("N", "K"), [(960, 576), (61, 64), (17, 4864)])
def test_a_row_has_the_same_bits_where_rounding_would_hide_it(N: int, K: int, rng: torch.Generator) -> None:
    """All terms cancel, and only the rounding of the sums is left (llama.cpp#25618, vllm#54506)."""
    mirrored = torch.randperm(K // 2, generator=rng)
    left = torch.randint(-127, 128, (N, K // 2), generator=rng, dtype=torch.int8)
    product = packed(torch.cat([left, -left[:, mirrored]], 1), torch.rand(N, generator=rng).bfloat16())
    some = torch.randn(80, K // 2, generator=rng).bfloat16()
    x = torch.cat([some, some[:, mirrored]], 1)
    want = product(x)
    assert want.abs().max() > 0
    for rows in (*range(1, 17), 33):
        assert torch.equal(product(x[:rows]), want[:rows]), rows
    assert all(torch.equal(product(x[at : at + 1])[0], want[at]) for at in range(16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "K"), [(960, 576), (5, 3), (17, 4864)])
def test_a_row_that_is_rounded_has_the_same_bits(N: int, K: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """A scale for all rows together would make each depend on the others."""
    product = rounded(*parts(N, K, rng))
    x = (torch.randn(80, K, generator=rng) * torch.linspace(0.1, 10, 80)[:, None]).to(dtype)
    want = product(x)
    for rows in (*range(1, 17), 33):
        assert torch.equal(product(x[:rows]), want[:rows]), rows
    assert all(torch.equal(product(x[at : at + 1])[0], want[at]) for at in range(80))


def test_rows_that_the_operator_would_read_past_are_not_taken() -> None:
    """bfloat16 with K % 16 is not a number, or a crash (pytorch#136709)."""
    assert not any(cpu.can_pack(torch.bfloat16, CPU, K) for K in (1, 8, 17, 100))
    assert not any(cpu.can_pack(dtype, CPU, 64) for dtype in (torch.float16, torch.float32))  # a scalar loop
    with pytest.raises(AssertionError):
        cpu.pack(torch.zeros(4, 24, dtype=torch.int8), torch.ones(4))


def test_the_greatest_sums_are_exact() -> None:
    """Some processors saturate where two products of integers are added in 16 bits."""
    K = 8960
    product = rounded(torch.full((3, K), -128, dtype=torch.int8), torch.ones(3))
    assert torch.equal(product(torch.full((2, K), 127.0)), torch.full((2, 3), -128.0 * 127 * K))


def test_a_product_of_integers_that_saturates_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = cpu._scaled_sums
    monkeypatch.setattr(cpu, "_scaled_sums", lambda *parts: exact(*parts).clamp(-(2**20), 2**20))
    cpu._exact.cache_clear()
    try:
        assert cpu.pack_rounded(torch.ones(3, 512, dtype=torch.int8), torch.ones(3)) is None
    finally:
        cpu._exact.cache_clear()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so_and_stays_alone(bad: float, rng: torch.Generator) -> None:
    weight, scale = parts(8, 64, rng)
    x = torch.randn(4, 64, generator=rng).bfloat16()
    spoiled = x.clone()
    spoiled[1, 7] = bad
    for product in (packed(weight, scale), rounded(weight, scale)):
        got = product(spoiled)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2, 3]], product(x)[[0, 2, 3]])
