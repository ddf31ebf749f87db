"""How rows are kept: bytes, codes, what is lost, and what goes where."""

import pytest
import torch

from decodelab.attention.kept import KeptRows, dequantise, quantise, spread
from decodelab.attention.layout import LayerKV, Layout

BITS = (16, 8, 4)


def kept(bits: int, slots: int = 12, dtype: torch.dtype = torch.float32) -> KeptRows:
    return KeptRows(slots, 2, 6, bits, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_those_of_the_formula(bits: int, dtype: torch.dtype) -> None:
    layout = Layout((LayerKV(0, 2, bits=bits),), 6)
    assert kept(bits, 12, dtype).nbytes == 12 * layout.bytes_per_token(dtype.itemsize)


@pytest.mark.parametrize("bits", BITS)
def test_rows_go_where_they_are_put_and_move(bits: int, rng: torch.Generator) -> None:
    store = kept(bits)
    k, v = torch.randn(2, 5, 2, 6, generator=rng)
    at = torch.tensor([7, 0, 3, 11, 4])
    store.put(at, k, v)
    want = [x.transpose(0, 1) for x in (k, v)]
    if bits != 16:
        want = [dequantise(*quantise(x.contiguous(), bits), torch.float32) for x in want]
    for got, one in zip(store.get(at), want, strict=True):
        assert torch.equal(got, one)
        assert ((got - one).abs() <= one.abs().amax(-1, keepdim=True) / (2 * 7)).all()
    store.move(torch.tensor([0, 3, 4]), torch.tensor([1, 0, 3]))  # onto one another
    assert torch.equal(store.get(slice(0, 4))[0][:, [1, 0, 3]], want[0][:, [1, 2, 4]])
    for slots in (20, 8):
        store.resize(slots)
        assert store.slots == slots
        assert torch.equal(store.get(at[:1])[1], want[1][:, :1])
        assert store.nbytes == slots * store.slot_bytes
        assert store.codes.untyped_storage().nbytes() == store.codes.nbytes
    at = at[at < 8]
    store.clear(at)
    assert not any(x.any() for x in store.get(at))


def test_codes_done_by_hand() -> None:
    """Scale 1: the largest is 7, halves go to the even code, and the even element of a pair lies low."""
    codes, scale = quantise(torch.tensor([[7.0, -7.0, 2.5, -3.4]]), 4)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[15 | 1 << 4, 10 | 5 << 4]]
    assert dequantise(codes, scale, torch.float64).tolist() == [[7.0, -7.0, 2.0, -3.0]]
    assert quantise(torch.tensor([[127.0, -63.4]]), 8)[0].tolist() == [[127, -63]]


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_chosen_with_the_rounded_scale(bits: int, rng: torch.Generator) -> None:
    """Each value lands on the nearest code of the scale that is stored, so half a step is the most that is lost."""
    x = torch.randn(500, 16, generator=rng).double()
    codes, scale = quantise(x, bits)
    step = scale.double()[:, None]
    clipped = {8: 127, 4: 7}[bits] * step
    assert (
        (dequantise(codes, scale, torch.float64) - x.clamp(-clipped, clipped)).abs() <= step / 2 * (1 + 1e-12)
    ).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes_are_finite(bits: int) -> None:
    rows = torch.tensor([[0.0] * 4, [1e-30] * 4, [3e38, -3e38, 1.0, 0.0], [1e-7, 0.0, 0.0, -1e-7]])
    got = dequantise(*quantise(rows, bits), torch.float32)
    assert got.isfinite().all()
    assert not got[:2].any()
    largest = {8: 127, 4: 7}[bits]
    assert got[2].tolist() == [65504.0 * largest, -65504.0 * largest, 0.0, 0.0]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_codes_do_not_depend_on_its_neighbours(bits: int, rng: torch.Generator) -> None:
    rows = torch.randn(40, 2, 6, generator=rng) * torch.logspace(-3, 3, 40)[:, None, None]
    whole = quantise(rows, bits)
    for size in (1, 3, 7):
        parts = [quantise(piece, bits) for piece in rows.split(size)]
        for i in (0, 1):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_a_rotation_keeps_products_and_spreads_what_one_element_holds(rng: torch.Generator) -> None:
    for D in (1, 6, 16, 96):
        x = torch.randn(5, D, generator=rng).double()
        torch.testing.assert_close(spread(x) @ spread(x).T, x @ x.T)
        torch.testing.assert_close(spread(spread(x)), x)
        assert torch.equal(spread(x[:2]), spread(x)[:2])
    one = torch.zeros(16)
    one[3] = 8
    assert spread(one).abs().tolist() == [2.0] * 16
