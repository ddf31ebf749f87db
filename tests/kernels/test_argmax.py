"""The token of the largest logit is PyTorch's, ties and all."""

import pytest
import torch

from decodelab.kernels.argmax import largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("V", [1, 31, 32, 100, 4097])
def test_it_is_the_first_of_the_largest(V: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    spread = torch.randn(8, V, generator=rng).to(dtype)
    tied = torch.randint(-2, 3, (8, V), generator=rng).to(dtype)
    zeros = torch.where(torch.rand(8, V, generator=rng) < 0.5, 0.0, -0.0).to(dtype)
    odd = spread.clone()
    odd[:4, V // 2], odd[4:] = torch.inf, -torch.inf
    nan = spread.clone()
    nan[2, V - 1], nan[3, V // 3] = torch.nan, -torch.nan
    for x in (spread, -spread.abs(), tied, zeros, odd, nan, spread.T.contiguous().T):
        want = [
            int((row == row.max()).nonzero()[0]) if not row.isnan().any() else int(row.isnan().nonzero()[0])
            for row in x
        ]
        assert largest(x) == want
