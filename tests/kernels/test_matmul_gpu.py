"""Products of 4, 8 and 16 bits against the dequantised float64 product, and a row's bits whatever stands beside it."""

import pytest
import torch
from torch import Tensor

from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.matmul_w4.op import Weight, _op, matmul
from decodelab.quantization.codes import Codes, pack

pytest.importorskip("triton", reason="kernels are interpreted by triton")

# Root mean square: sums of float32. x and, of columns in any group, the weight are rounded to the dtype; Triton's
# interpreter does not round the result to bfloat16 but cuts off.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def codes(N: int, K: int, bits: int, group: int, kind: str, rng: torch.Generator) -> Codes:
    """`kind`: with zeros, with shifts, or with columns in any group."""
    G = -(-K // group)
    scale = (torch.rand(N, G, generator=rng) + 0.5).half() / 2**bits
    zero = torch.randint(0, 2**bits, (N, G), generator=rng, dtype=torch.uint8)
    return Codes(
        torch.randint(0, 2**bits, (N, K), generator=rng, dtype=torch.uint8),
        scale,
        bits,
        group,
        zero=None if kind == "shift" else zero,
        shift=torch.randn(N, G, generator=rng).half() if kind == "shift" else None,
        groups=torch.randint(0, G, (K,), generator=rng) if kind == "any" else None,
    )


def weight(of: Codes) -> Weight:
    groups = None if of.groups is None else of.groups.int()
    return Weight(pack(of.codes, of.bits), of.bits, of.scale, of.zero, of.shift, groups, of.group_size)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["zero", "shift", "any"])
def test_low_bits_are_the_dequantised_product(bits: int, kind: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Any N and K, the last group and byte not full; one scale a block of columns, and not."""
    for N, K, group, T in ((5, 7, 3, 1), (33, 160, 32, 3), (3, 130, 128, 17), (4, 65, 65, 2)):
        made = codes(N, K, bits, group, kind, rng)
        x, bias = torch.randn(T, K, generator=rng).to(dtype), torch.randn(N, generator=rng).to(dtype)
        want = x.double() @ made.dequantise(torch.float64).T + bias.double()
        assert torch.equal(weight(made).dense(K), made.dequantise(torch.float64))
        for row_invariant in (True, False):
            got = matmul(x, weight(made), bias, row_invariant)
            assert got.dtype == dtype
            assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sixteen_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    for N, K, T in ((5, 7, 1), (33, 100, 18)):
        x, w = torch.randn(T, K, generator=rng).to(dtype), torch.randn(N, K, generator=rng).to(dtype)
        assert relative_error(matmul(x, Weight(w, 16)), x.double() @ w.double().T) < TOLERANCE[dtype]


def test_tiles_and_parts_are_of_the_weight_s_shape_alone_where_rows_must_not_matter() -> None:
    from decodelab.kernels.matmul_w4.triton import tiles

    for N, K, bits, group in ((2048, 1536, 4, 128), (151936, 1536, 16, None), (1536, 8960, 8, None)):
        assert len({tiles(T, N, K, bits, group, True) for T in range(1, 65)}) == 1
        assert len({tiles(T, N, K, bits, group, False) for T in range(1, 65)}) > 1


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_row_has_the_same_bits_where_rounding_would_hide_it(bits: int, rng: torch.Generator) -> None:
    """All terms cancel and only the rounding of the sums is left, over several parts (llama.cpp#25618)."""
    N, half = 4, 1024
    mirrored = torch.randperm(half, generator=rng)
    some = torch.randn(20, half, generator=rng)
    x = torch.cat([some, some[:, mirrored]], 1)

    def both(left: Tensor, most: int) -> Tensor:
        return torch.cat([left, most - left[:, mirrored]], 1)

    if bits == 16:
        w = Weight(both(torch.randn(N, half, generator=rng), 0), 16)
    else:
        left = torch.randint(1, 2**bits, (N, half), generator=rng, dtype=torch.uint8)
        zero = torch.full((N, 16), 2 ** (bits - 1), dtype=torch.uint8)
        stored = pack(both(left.int(), 2**bits).to(torch.uint8), bits)
        w = Weight(stored, bits, torch.ones(N, 16).half(), zero, group_size=128)
    want = matmul(x, w)
    assert want.abs().max() > 0
    for rows in (1, 2, 16):
        assert torch.equal(matmul(x[:rows], w), want[:rows]), rows
    assert torch.equal(matmul(x[15:17], w), want[15:17])


def test_no_rows(rng: torch.Generator) -> None:
    assert matmul(torch.zeros(0, 8), weight(codes(5, 8, 4, 8, "zero", rng))).shape == (0, 5)


def test_it_is_an_op_for_torch_compile(rng: torch.Generator) -> None:
    w = weight(codes(3, 10, 4, 5, "shift", rng))
    x = torch.randn(2, 10, generator=rng)
    torch.library.opcheck(_op, (x, w.codes, 4, w.scale, w.zero, w.shift, w.groups, 5, None, True))
