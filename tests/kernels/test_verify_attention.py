"""Attention paths against the float64 definition, and a row's bits whatever rows and keys stand beside its own."""

import pytest
import torch
from torch import Tensor

from decodelab.attention.cache import DenseCache
from decodelab.attention.layered import LayeredCache
from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.rows import chains
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.verify_attention import (
    causal_attention,
    padded_keys,
    row_invariant,
    sdpa,
    verify_attention,
    verify_attention_reference,
)

# Root mean square. float32: sums over D and S of a few units of 6e-8. bfloat16, row-wise: float32 inside, one rounding
# of at most 2^-8 at the end (float16: 2^-11); torch's own rounds the weights too, so twice that.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
TORCH_TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

DTYPES = list(TOLERANCE)
GROUPS = [
    (1, 1),
    (3, 2),
    (3, 3),
    (2, 5),
    (2, 7),
]  # KV heads, query heads for each: 2, 3, 5 and 7 too (flashinfer#258, #2684)


def tensors(T: int, S: int, heads: tuple[int, int], D: int, dtype: torch.dtype, rng: torch.Generator) -> list[Tensor]:
    Hkv, group = heads
    shapes = ((T, Hkv * group, D), (Hkv, S, D), (Hkv, S, D))
    return [torch.randn(*shape, generator=rng).to(dtype) for shape in shapes]


def random_mask(T: int, B: int, rng: torch.Generator) -> Tensor:
    blocked = torch.rand(T, B, generator=rng) < 0.5
    blocked[:, 0] = False  # every row sees a key
    return blocked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", GROUPS)
def test_rows_against_the_reference(dtype: torch.dtype, heads: tuple[int, int], rng: torch.Generator) -> None:
    """Odd sizes, one row, fewer keys than the padding, a mask over all keys or the last of them."""
    for T, S, D, B in ((1, 64, 64, 0), (1, 5, 8, 5), (3, 77, 80, 9), (16, 200, 16, 200), (5, 385, 128, 21)):
        q, k, v = tensors(T, S, heads, D, dtype, rng)
        blocked = random_mask(T, B, rng) if B else None
        want = verify_attention_reference(q.double(), k.double(), v.double(), blocked, D**-0.5)
        got = verify_attention(q, k, v, blocked, D**-0.5)
        assert got.dtype == dtype
        assert relative_error(got, want) < TOLERANCE[dtype], (T, S, D)
        assert relative_error(sdpa.verify(q, k, v, blocked, D**-0.5), want) < TORCH_TOLERANCE[dtype], (T, S, D)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "sink"), [(None, 0), (1, 0), (5, 0), (300, 0), (5, 3), (1, 100), (40, 400)])
def test_long_chains_against_the_reference(
    dtype: torch.dtype, window: int | None, sink: int, rng: torch.Generator
) -> None:
    """Window W means keys i − W + 1 … i (transformers#39408); fewer rows than keys end together (flashinfer#348)."""
    for T, S, heads in ((70, 70, (2, 3)), (300, 300, (1, 1)), (65, 130, (1, 2)), (270, 600, (1, 1))):
        q, k, v = tensors(T, S, heads, 16, dtype, rng)
        row, key = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
        unseen = (key > row) if window is None else (key > row) | ((key <= row - window) & (key >= sink))
        want = verify_attention_reference(q.double(), k.double(), v.double(), unseen, 0.25)
        assert relative_error(causal_attention(q, k, v, 0.25, window, sink), want) < TORCH_TOLERANCE[dtype], (T, S)


def test_the_reference_on_a_case_done_by_hand() -> None:
    """Two keys with weights 1/4 and 3/4; blocked, the first one has weight 0."""
    q = torch.tensor([[[1.0]], [[1.0]]])
    k, v = torch.tensor([[[0.0], [torch.log(torch.tensor(3.0))]]]), torch.tensor([[[4.0], [8.0]]])
    blocked = torch.tensor([[False, False], [True, False]])
    want = torch.tensor([[7.0], [8.0]])
    torch.testing.assert_close(verify_attention_reference(q, k, v, blocked, 1.0), want)
    torch.testing.assert_close(verify_attention(q, k, v, blocked, 1.0), want)
    torch.testing.assert_close(verify_attention(2 * q, k, v, blocked, 0.5), want)


def products_keep_their_order() -> bool:
    """Whether torch's own product sums a row alike among other rows and before other zeros, where it is asked to."""
    generator = torch.Generator().manual_seed(1)
    p, v = torch.rand(1, 64, 1000, generator=generator), torch.randn(1, 1000, 64, generator=generator)
    p[:, :, 300:] = 0
    want = torch.bmm(p[:, :4, :384], v[:, :384])
    return all(
        torch.equal(torch.bmm(p[:, :rows, :keys], v[:, :keys])[:, :4], want)
        for rows in (4, 5, 16, 64)
        for keys in (384, 385, 500, 1000)
    )


bits = pytest.mark.skipif(
    not products_keep_their_order(), reason="the products of this machine promise nothing to the bit"
)


@bits
def test_it_keeps_a_rows_bits_where_the_machine_does() -> None:
    assert row_invariant()


@bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [*GROUPS, (2, 6)])
@pytest.mark.parametrize("D", [8, 64, 128])
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(
    dtype: torch.dtype, heads: tuple[int, int], D: int, rng: torch.Generator
) -> None:
    for S in (64, 77, 192, 384, 511):
        q, k, v = tensors(33, S, heads, D, dtype, rng)
        want = verify_attention(q, k, v, None, D**-0.5)
        for rows in (*range(1, 17), 32):
            assert torch.equal(verify_attention(q[:rows], k, v, None, D**-0.5), want[:rows]), (S, rows)
            assert torch.equal(verify_attention(q[-rows:], k, v, None, D**-0.5), want[-rows:]), (S, rows)


@bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "D"), [((3, 3), 64), ((2, 7), 64), ((2, 6), 128), ((1, 1), 8), ((4, 1), 16)])
def test_a_row_has_the_same_bits_whatever_keys_stand_behind_its_own(
    dtype: torch.dtype, heads: tuple[int, int], D: int, rng: torch.Generator
) -> None:
    """A row that sees n keys, alone and with up to 60 rows behind it: MKL sums long rows in blocks."""
    q, k, v = tensors(1, 1100, heads, D, dtype, rng)

    def seen(n: int, keys: int) -> Tensor:
        blocked = torch.ones(1, keys, dtype=torch.bool)
        blocked[:, :n] = False
        return verify_attention(q, k[:, :keys], v[:, :keys], blocked, D**-0.5)

    for n in (
        1,
        2,
        3,
        15,
        16,
        63,
        64,
        65,
        100,
        130,
        *range(176, 194),
        200,
        256,
        300,
        380,
        383,
        384,
        385,
        500,
        577,
        1000,
    ):
        alone = seen(n, padded_keys(n))
        for more in (1, 2, 3, 7, 15, 16, 60):
            assert torch.equal(seen(n, padded_keys(n + more)), alone), (n, more)


def test_what_is_handed_in_stays_as_it_is(rng: torch.Generator) -> None:
    q, k, v = tensors(1, 64, (1, 2), 8, torch.float32, rng)
    before = [t.clone() for t in (q, k, v)]
    verify_attention(q, k, v, None, 0.5)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


def test_scores_far_apart_do_not_overflow(rng: torch.Generator) -> None:
    """executorch#22133, flashinfer#4401: logits of ± 1e4."""
    q, k, v = tensors(3, 64, (1, 1), 8, torch.float32, rng)
    want = verify_attention_reference(q.double() * 100, k.double() * 100, v.double(), None, 1.0)
    assert relative_error(verify_attention(q * 100, k * 100, v, None, 1.0), want) < TOLERANCE[torch.float32]


def test_blocked_keys_do_not_count_whatever_they_are(rng: torch.Generator) -> None:
    """mlx-vlm#2113: a zeroed key would still add e^0. Values are multiplied by 0, so the cache keeps them finite."""
    q, k, v = tensors(4, 64, (2, 2), 8, torch.float32, rng)
    blocked = torch.zeros(4, 14, dtype=torch.bool)
    blocked[:, 4:] = True
    want = verify_attention(q, k, v, blocked, 0.5)
    k[:, 54:], v[:, 54:] = torch.nan, 1e30
    assert torch.equal(verify_attention(q, k, v, blocked, 0.5), want)


def test_the_number_of_keys_skips_where_sums_are_halved() -> None:
    assert [padded_keys(n) for n in (1, 64, 65, 192, 193, 383, 384, 385)] == [64, 64, 65, 192, 384, 384, 384, 385]


def every_path(blocked: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Each path over keys that are alike, the values of which are unit vectors: row i gets the share of each key."""
    T, S = blocked.shape
    q, k, v = torch.zeros(T, 1, S, dtype=dtype), torch.zeros(1, S, S, dtype=dtype), torch.eye(S, dtype=dtype)[None]
    paths = {"rows": verify_attention, "torch": sdpa.verify, "reference": verify_attention_reference}
    return {name: path(q, k, v, blocked, 1.0) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("window", "sink", "counts"),
    [(3, 0, [1, 2, 3, 3, 3, 3]), (1, 0, [1] * 6), (2, 1, [1, 2, 3, 3, 3, 3]), (1, 2, [1, 2, 3, 3, 3, 3])],
)
def test_windows_mean_the_same_on_every_path(window: int, sink: int, counts: list[int]) -> None:
    """6 rows: transformers#29623, #35924 (backends that differ by one, or forget the window); fla#431: fewer keys than
    positions. The cache says which keys; a row alone and all rows at once say the same as a long chain does."""
    layout = Layout((LayerKV(0, 1, window=window, sink=sink),), 8)
    for kind in (DenseCache, LayeredCache):
        for size in (1, 2, 6):
            cache = kind(layout, sequences=1, capacity=64, dtype=torch.float64, device="cpu")
            sequence, seen = cache.open(), []
            for at in range(0, 6, size):
                (part,) = cache.stage(chains([[0] * size], [sequence])).parts
                keys = torch.eye(8, dtype=torch.float64)[at : at + size, None]  # tell which position is seen
                cache.write(0, part, keys, keys)
                k, v = cache.view(0, part)
                for path in (verify_attention, sdpa.verify, verify_attention_reference):
                    out = path(torch.zeros(size, 1, 8, dtype=torch.float64), k, v, part.blocked[window, sink], 1.0)
                    assert [int((row > 0).sum()) for row in out] == counts[at : at + size]
                    torch.testing.assert_close(out.sum(1), torch.ones(size, dtype=torch.float64))
                seen.append(out > 0)
                cache.commit({sequence: range(size)})
            row, key = torch.arange(6)[:, None], torch.arange(8)
            want = (key <= row) & ((key > row - window) | (key < sink))
            assert torch.equal(torch.cat(seen), want)
    q, k = torch.zeros(6, 1, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)[None, :6]
    assert torch.equal(causal_attention(q, k, k, 1.0, window, sink) > 0, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_that_sees_nothing_gets_zeros(dtype: torch.dtype) -> None:
    """transformers#47651, unsloth#9708: no NaN, and none for the rows beside it."""
    blocked = torch.zeros(3, 70, dtype=torch.bool)
    blocked[1] = True
    for name, out in every_path(blocked, dtype).items():
        assert not out[1].any(), name
        torch.testing.assert_close(out[[0, 2]], torch.full((2, 70), 1 / 70, dtype=dtype), rtol=1e-3, atol=0)


def test_a_mask_of_bools_is_one_of_infinities(rng: torch.Generator) -> None:
    q, k, v = tensors(4, 64, (2, 2), 8, torch.float64, rng)
    blocked = random_mask(4, 64, rng)
    infinite = torch.zeros(4, 64, dtype=torch.float64).masked_fill(blocked, -torch.inf)
    expanded = (x.repeat_interleave(2, 0)[None] for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], *expanded, infinite, scale=0.5)
    want = want[0].transpose(0, 1).flatten(1)
    for path in (verify_attention, sdpa.verify, verify_attention_reference):
        torch.testing.assert_close(path(q, k, v, blocked, 0.5), want)
