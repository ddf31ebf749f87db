"""The definition: what each row says comes next, and the path from the root that says the same."""

from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int
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
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    starts: Tensor,
    keys: Tensor | None,
    max_rows: int,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `accept`."""
    noise = None if keys is None else gumbels(keys, scores.shape[1])
    paths, following, counts = [], [], []
    of, behind = tokens.tolist(), parents.tolist()
    laws, chances = ([-1] * len(of), []) if q_rows is None or uniforms is None else (q_rows.tolist(), uniforms.tolist())
    for first, last in pairwise(starts.tolist()):
        path, token = [0], -1
        while True:
            row = first + path[-1]
            children = [i for i in range(row + 1, last) if behind[i] == path[-1]]
            law, kept = scores[row].double(), None
            for c in [c for c in children if laws[c] >= 0]:
                assert q is not None
                p, theirs = law.exp(), q[laws[c]].double()
                if chances[c] * float(theirs[of[c]]) < float(p[of[c]]):
                    kept = c
                    break
                law = residual(p, theirs).log()
            if kept is None:
                noisy = law if noise is None else law + noise[row]
                token = int((noisy == noisy.max()).int().argmax())  # of equal ones the first
                kept = next((c for c in children if laws[c] < 0 and of[c] == token), None)
            if kept is None:
                break
            path.append(kept - first)
        following.append(token)
        counts.append(len(path))
        paths.append(path + [-1] * (max_rows - len(path)))
    on = scores.device
    chosen = torch.tensor(paths, dtype=torch.int32, device=on).view(-1, max_rows)
    ends = torch.tensor(following, dtype=torch.int64, device=on)
    return chosen, torch.tensor(counts, dtype=torch.int32, device=on), ends


def residual(p: Float64[Tensor, " V"], q: Float64[Tensor, " V"]) -> Float64[Tensor, " V"]:
    """norm(max(0, p − q)), or p where nothing is left."""
    left = (p - q).clamp_min(0)
    mass = float(left.sum())
    return left / mass if mass > 0 else p
