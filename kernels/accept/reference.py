"""The definition: what each row says comes next, and the path from the root that says the same."""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor


def gumbels(keys: Int[Tensor, " T"], vocab: int) -> Float[Tensor, "T V"]:
    """Standard Gumbel noise of (key, token): SplitMix64's finaliser of a counter (Steele, Lea and Flood 2014), in
    wrapping 64-bit integers, 52 bits and a half of it."""
    state = torch.arange(vocab, device=keys.device) * -0x61C8864680B583EB + keys.long()[:, None]
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    state = state ^ (state >> 31 & (1 << 33) - 1)
    uniform = ((state >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def accept_reference(
    scores: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, keys: Tensor | None, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `accept`."""
    noisy = scores.double() if keys is None else scores.double() + gumbels(keys, scores.shape[1])
    best = (noisy == noisy.amax(1, keepdim=True)).int().argmax(1).tolist()  # of equal ones the first
    paths, following, counts = [], [], []
    bounds, of, behind = starts.tolist(), tokens.tolist(), parents.tolist()
    for first, last in pairwise(bounds):
        path = [0]
        for i in range(1, last - first):
            if behind[first + i] == path[-1] and of[first + i] == best[first + path[-1]]:
                path.append(i)
        following.append(best[first + path[-1]])
        counts.append(len(path))
        paths.append(path + [-1] * (max_rows - len(path)))
    on = scores.device
    chosen = torch.tensor(paths, dtype=torch.int32, device=on).view(-1, max_rows)
    ends = torch.tensor(following, dtype=torch.int64, device=on)
    return chosen, torch.tensor(counts, dtype=torch.int32, device=on), ends
