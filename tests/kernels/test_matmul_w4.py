"""The packed product of 4 bits against the float64 definition, and a row's bits whatever rows stand beside it."""

import pytest
import torch
from torch import Tensor

from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.matmul_w4 import cpu, matmul_w4_reference

SHAPES = [(1, 32), (16, 64), (61, 96), (960, 576), (100, 1536), (81, 4864)]  # of the last tile, all widths are tried
GROUPED = [(N, K, group) for N, K in SHAPES for group in cpu.GROUPS if K % group == 0]


@pytest.fixture(autouse=True)
def packs() -> None:
    if not cpu.can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this processor has no packed product of 4 bits")


def parts(N: int, K: int, group: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and scales and shifts as bfloat16 has them."""
    codes = torch.randint(0, 16, (N, K), generator=rng, dtype=torch.uint8)
    scale = (torch.rand(N, K // group, generator=rng) + 0.5).bfloat16()
    return codes, scale, torch.randn(N, K // group, generator=rng).bfloat16()


def packed(codes: Tensor, scale: Tensor, shift: Tensor, group: int) -> cpu.Packed:
    found = cpu.pack(codes, scale, shift, group)
    if found is None:
        pytest.skip("this machine's product gives a row other bits beside other rows")
    return found


@pytest.mark.parametrize(("N", "K", "group"), GROUPED)
def test_product_is_the_reference_at_every_count_of_rows(N: int, K: int, group: int, rng: torch.Generator) -> None:
    """One row and large groups together have gone wrong before (torch-xpu-ops#4765)."""
    codes, scale, shift = parts(N, K, group, rng)
    product = packed(codes, scale, shift, group)
    x = torch.randn(64, K, generator=rng).bfloat16()
    want = matmul_w4_reference(x.double(), codes, scale, shift, group)
    for rows in (0, 1, 2, 3, 8, 16, 64):
        got = product(x[:rows])
        assert got.shape == (rows, N)
        assert rows == 0 or relative_error(got, want[:rows]) < 2**-8
    if K < 1000:
        assert relative_error(product.dense(torch.float64), weight(codes, scale, shift, group)) < 1e-7
    assert torch.equal(product.dense(torch.float32, N // 2, N), product.dense(torch.float32)[N // 2 :])


def weight(codes: Tensor, scale: Tensor, shift: Tensor, group: int) -> Tensor:
    eye = torch.eye(codes.shape[1], dtype=torch.float64)
    return matmul_w4_reference(eye, codes, scale, shift, group).T


def test_the_reference_is_exact_on_integers() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    codes = torch.tensor([[8, 9, 15, 0], [10, 8, 8, 8]], dtype=torch.uint8)
    scale, shift = torch.tensor([[1.0, 2.0], [0.5, 1.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    # weights: [0, 1, 14, −16] and [1, 0, 1, 1]
    want = torch.tensor([[44.0, 4.0], [-16.0, 1.0]])
    assert torch.equal(matmul_w4_reference(x, codes, scale, shift, 2), want)


@pytest.mark.parametrize(("N", "K", "group"), [(960, 576, 64), (61, 96, 32), (100, 1536, 256), (81, 4864, 128)])
def test_a_row_has_the_same_bits_where_rounding_would_hide_it(N: int, K: int, group: int, rng: torch.Generator) -> None:
    """The terms of each group cancel, and only the rounding of the sums is left (llama.cpp#25618, vllm#54506)."""
    half = group // 2
    mirrored = torch.randperm(half, generator=rng)
    left = torch.randint(1, 16, (N, K // group, half), generator=rng, dtype=torch.uint8)
    codes = torch.cat([left, 16 - left[..., mirrored]], -1).view(N, K)
    scale = (torch.rand(N, K // group, generator=rng) + 0.5).bfloat16()
    product = packed(codes, scale, torch.zeros_like(scale), group)
    some = torch.randn(80, K // group, half, generator=rng).bfloat16()
    x = torch.cat([some, some[..., mirrored]], -1).view(80, K)
    want = product(x)
    assert want.abs().max() > 0
    for rows in (*range(1, 17), 33):
        assert torch.equal(product(x[:rows]), want[:rows]), rows
    assert all(torch.equal(product(x[at : at + 1])[0], want[at]) for at in range(16))


def test_a_lone_row_is_fed_twice_where_it_is_summed_in_another_order(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    whole = cpu._product

    def other(x: Tensor, *rest: object) -> Tensor:
        fed.append(len(x))
        return whole(x, *rest) + (len(x) == 1)

    monkeypatch.setattr(cpu, "_product", other)
    cpu._orders.cache_clear()
    try:
        codes, scale, shift = parts(16, 64, 32, rng)
        product = packed(codes, scale, shift, 32)
        x = torch.randn(2, 64, generator=rng).bfloat16()
        fed.clear()
        assert torch.equal(product(x[:1]), product(x)[:1])
        assert fed == [2, 2]
    finally:
        cpu._orders.cache_clear()


def test_a_product_whose_rows_depend_on_each_other_is_not_taken(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cpu._product
    monkeypatch.setattr(cpu, "_product", lambda x, *rest: whole(x, *rest) + (len(x) == 5))
    cpu._orders.cache_clear()
    try:
        assert cpu.pack(*parts(16, 64, 32, rng), 32) is None
    finally:
        cpu._orders.cache_clear()


def test_a_code_of_more_bits_is_refused(rng: torch.Generator) -> None:
    """The operator does not look, and would write into the neighbour (GPTQModel#2963)."""
    codes, scale, shift = parts(16, 64, 32, rng)
    codes[3, 5] = 16
    with pytest.raises(ValueError, match="a code is 16, but 4 bits hold at most 15"):
        cpu.pack(codes, scale, shift, 32)


def test_scales_of_another_shape_do_not_reach_the_operator(rng: torch.Generator) -> None:
    """Which would crash (pytorch#128692)."""
    codes, scale, shift = parts(16, 64, 32, rng)
    with pytest.raises(AssertionError):
        cpu.pack(codes, scale[:, :1], shift[:, :1], 32)


def test_which_groups_it_takes() -> None:
    assert cpu.group_of(128, 1536) == 128
    assert cpu.group_of(1536, 1536) == 256  # a whole row: its scale is repeated
    assert cpu.group_of(512, 1024) == 256
    assert cpu.group_of(128, 576) == 64  # four groups and half of one
    assert cpu.group_of(16, 64) is None
    assert cpu.group_of(64, 100) is None
    assert cpu.group_of(100, 100) is None


def test_a_row_that_is_not_finite_stays_alone(rng: torch.Generator) -> None:
    product = packed(*parts(32, 64, 32, rng), 32)
    x = torch.randn(4, 64, generator=rng).bfloat16()
    want = product(x)
    x[1, 7] = float("nan")
    got = product(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])


def test_other_dtypes_are_not_taken() -> None:
    """They run in a scalar loop, 30 to 100 times slower."""
    assert not any(cpu.can_pack(dtype, torch.device("cpu")) for dtype in (torch.float16, torch.float32, torch.float64))
    assert not cpu.can_pack(torch.bfloat16, torch.device("meta"))
