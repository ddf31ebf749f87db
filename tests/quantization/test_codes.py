"""Codes: bits packed and unpacked, and the weight they stand for."""

from dataclasses import replace

import pytest
import torch

from decodelab.quantization.codes import Codes, alike, pack, stacked, unpack


def drawn(rng: torch.Generator, N: int, K: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (N, K), generator=rng, dtype=torch.uint8)


def codes_of(rng: torch.Generator, *, shift: bool = False, groups: bool = False, K: int = 21, size: int = 8) -> Codes:
    G = -(-K // size)
    return Codes(
        drawn(rng, 4, K, 3),
        torch.rand(4, G, generator=rng).half(),
        3,
        size,
        zero=None if shift else drawn(rng, 4, G, 3),
        shift=torch.randn(4, G, generator=rng).half() if shift else None,
        groups=(torch.randperm(K, generator=rng) // size).int() if groups else None,
    )


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("K", [1, 7, 8, 32, 33])
def test_packing_is_a_stream_of_bits_the_lowest_first(rng: torch.Generator, bits: int, K: int) -> None:
    codes = drawn(rng, 3, K, bits)
    packed = pack(codes, bits)
    assert packed.shape == (3, -(-K * bits // 8))
    for row, bytes_ in zip(codes.tolist(), packed.tolist(), strict=True):
        assert int.from_bytes(bytes(bytes_), "little") == sum(code << (bits * i) for i, code in enumerate(row))
    assert torch.equal(unpack(packed, bits, K), codes)


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_a_code_out_of_range_is_refused(bits: int) -> None:
    """GPTQModel#2963: it would run over into its neighbour."""
    with pytest.raises(ValueError, match=f"a code is {2**bits}, but {bits} bits hold at most {2**bits - 1}"):
        pack(torch.full((1, 4), 2**bits, dtype=torch.uint8), bits)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_a_weight_is_what_a_loop_says(rng: torch.Generator, shift: bool, groups: bool) -> None:
    """With a last group that is shorter, and with columns in any groups."""
    c = codes_of(rng, shift=shift, groups=groups)
    got = c.dequantise(torch.float64)
    for n in range(4):
        for k in range(21):
            g = int(c.groups[k]) if c.groups is not None else k // 8
            scale, code = float(c.scale[n, g]), int(c.codes[n, k])
            want = scale * code + float(c.shift[n, g]) if c.shift is not None else scale * (code - int(c.zero[n, g]))
            assert float(got[n, k]) == want
    assert torch.equal(c.dequantise(), got.float())


def test_bytes_are_those_of_what_is_stored(rng: torch.Generator) -> None:
    assert codes_of(rng).nbytes == 4 * 8 + 4 * 3 * 2 + 4 * 3
    assert codes_of(rng, shift=True, groups=True).nbytes == 4 * 8 + 2 * (4 * 3 * 2) + 21 * 4


def test_layers_one_above_the_other(rng: torch.Generator) -> None:
    a, b = codes_of(rng), codes_of(rng)
    whole = stacked([a, b])
    assert torch.equal(whole.dequantise(), torch.cat([a.dequantise(), b.dequantise()]))
    assert torch.equal(whole.rows(3, 6).dequantise(), whole.dequantise()[3:6])
    shuffled = replace(a, groups=a.column_groups.flip(0).int())
    assert not alike([a, shuffled])
    assert alike([a, replace(b, groups=b.column_groups.int())])  # in order, said or not
    assert not alike([a, codes_of(rng, shift=True)])
    assert not alike([a, replace(b, bits=4)])
    assert not alike([a, codes_of(rng, size=16)])


def test_symmetric_is_a_zero_in_the_middle(rng: torch.Generator) -> None:
    c = codes_of(rng)
    assert replace(c, zero=torch.full_like(c.zero, 4)).symmetric
    assert not replace(c, zero=torch.full_like(c.zero, 3)).symmetric
    assert not codes_of(rng, shift=True).symmetric
