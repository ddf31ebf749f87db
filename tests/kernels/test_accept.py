"""The walk on the device against the rules' own, and its noise against theirs."""

import pytest
import torch
from torch import Tensor

from decodelab.decoding import noise
from decodelab.kernels.accept import _op, accept, accept_reference, gumbels

pytest.importorskip("triton", reason="kernels are interpreted by triton")


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def test_noise_is_the_program_s() -> None:
    keys = [noise.mix(i) for i in range(4)]
    for key, mine in zip(keys, gumbels(torch.tensor(list(map(signed, keys))), 50), strict=True):
        assert torch.equal(mine, noise.gumbels(key, torch.arange(50)))


def forest(rng: torch.Generator, sizes: list[int], vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores, tokens, parents, starts): half of the rows say what row follows, so that paths are kept."""
    T = sum(sizes)
    scores = torch.randn(T, vocab, generator=rng)
    tokens = torch.randint(0, vocab, (T,), generator=rng)
    starts = torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    parents = torch.full((T,), -1)
    for first, size in zip(starts.tolist(), sizes, strict=False):
        for i in range(1, size):
            parents[first + i] = int(torch.randint(0, i, (1,), generator=rng))
            if torch.rand(1, generator=rng) < 0.6:
                scores[first + int(parents[first + i]), tokens[first + i]] = 50
    return scores, tokens, parents, starts


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("vocab", [7, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paths_of_many_trees(vocab: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    scores, tokens, parents, starts = forest(rng, [1, 6, 4, 8], vocab)
    keys = torch.randint(-(1 << 62), 1 << 62, (19,), generator=rng)
    scores = scores.to(dtype)
    for noisy in (None, keys):
        want = accept_reference(scores, tokens, parents, starts, noisy, 9)
        assert want[1].max() > 2  # something is kept
        same(accept(scores, tokens, parents, starts, 9, noisy), want)
    same(accept(scores.double(), tokens, parents, starts, 9, keys), want)  # torch's own


def test_a_path_by_hand() -> None:
    """Children 1 and 2 of the root, 3 of 1, 4 of 2: the root says 2's token, and 2 says 4's; of twins the first."""
    tokens, parents = torch.tensor([9, 3, 4, 4, 1]), torch.tensor([-1, 0, 0, 0, 2])
    scores = torch.zeros(5, 10)
    for row, said in enumerate([4, 7, 1, 7, 5]):
        scores[row, said] = 1
    path, count, following = accept(scores, tokens, parents, torch.tensor([0, 5]).int(), 6)
    assert path.tolist() == [[0, 2, 4, -1, -1, -1]]
    assert count.tolist() == [3]
    assert following.tolist() == [5]


def test_ties_nan_and_nothing_but_minus_infinity() -> None:
    """Of equal scores the lowest token, over slices too; NaN is never chosen."""
    scores = torch.full((3, 4200), -torch.inf)
    scores[0, [4100, 70]] = 2.0
    scores[1, 5], scores[1, 9] = torch.nan, -3.0
    one = torch.tensor([0, 0, 0])
    for wide in (scores, scores.double()):
        _, _, following = accept(wide, one, one - 1, torch.tensor([0, 1, 2, 3]).int(), 1)
        assert following.tolist() == [70, 9, 0]


def test_sampling_keeps_what_plain_sampling_would_have_drawn(rng: torch.Generator) -> None:
    log_p = torch.log_softmax(torch.randn(3, 6, generator=rng), -1)
    for seed in range(20):
        mine = [noise.Noise(seed, 0, i).target() for i in range(3)]
        drawn = [int((log_p[i].double() + noise.gumbels(mine[i], torch.arange(6))).argmax()) for i in range(3)]
        keys = torch.tensor(list(map(signed, mine)))
        tokens = torch.tensor([0, drawn[0], drawn[1]])
        path, _, following = accept(log_p, tokens, torch.tensor([-1, 0, 1]), torch.tensor([0, 3]).int(), 3, keys)
        assert path.tolist() == [[0, 1, 2]]
        assert following.tolist() == [drawn[2]]


def test_it_is_an_op_for_torch_compile(rng: torch.Generator) -> None:
    scores, tokens, parents, starts = forest(rng, [2, 3], 11)
    torch.library.opcheck(_op, (scores, tokens, parents, starts, 4, None))
    torch.library.opcheck(_op, (scores, tokens, parents, starts, 4, tokens))
