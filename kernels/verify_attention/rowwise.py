"""The CPU path: every row comes out the same, to the bit, whatever rows stand beside it.

Products and the softmax run in float32 (bfloat16 keys are widened as they are read: faster than the bf16 product for a
few rows, and exact). MKL's batched product takes an order of its own below 4 rows and below 16 keys, and sums keys in
blocks of 192, except that between 192 and 384 keys there are two halves (measured). So fewer rows are padded with zero
rows, and callers hand in the number of keys that `padded_keys` says, blocked where they hold nothing. Query heads that
share a KV head are rows of one product: K and V are never expanded.
"""

from functools import lru_cache

import torch
from torch import Tensor

_ROWS = 4
_KEYS = 64
BLOCK = 192  # sums begin anew here: whole blocks of keys that a row does not see may be left out


def padded_keys(keys: int) -> int:
    """How many keys to hand in where a row sees `keys` of them, so that its sums do not depend on the number."""
    return max(keys, _KEYS) if keys <= BLOCK else max(keys, 2 * BLOCK)


@lru_cache(maxsize=1)
def row_invariant() -> bool:
    """Whether this machine keeps the promise: products are MKL's choice, by processor, so it is observed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 640, 64, generator=generator) for heads in (16, 1, 1))
    q = q[:, :1]

    def rows_that_see(n: int, rows: int, keys: int) -> Tensor:
        blocked = torch.arange(keys).expand(rows, -1) >= n
        return verify(q[:rows], k[:, :keys], v[:, :keys], blocked, 0.125)[:1]

    return all(
        torch.equal(rows_that_see(n, 1, padded_keys(n)), rows_that_see(n, 16, padded_keys(n + 60)))
        for n in (40, 140, 250, 500)
    )


def verify(q: Tensor, k: Tensor, v: Tensor, blocked: Tensor | None, scale: float) -> Tensor:
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    group = Hq // Hkv
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [T, Hkv, group, D] -> [Hkv, T * group, D]
    rows = q.view(T, Hkv, group, D).transpose(0, 1).reshape(Hkv, T * group, D).to(wide) * scale
    if T * group < _ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, _ROWS - T * group))
    scores = torch.bmm(rows, k.transpose(1, 2).to(wide))
    if blocked is not None:
        tail = scores[:, : T * group, S - blocked.shape[1] :].unflatten(1, (T, group))
        tail.masked_fill_(blocked[:, None], -torch.inf)
    out = torch.bmm(torch.softmax(scores, -1), v.to(wide))[:, : T * group]
    out = out.view(Hkv, T, group, D).transpose(0, 1).reshape(T, Hq * D)
    if blocked is not None and blocked.shape[1] == S and (blind := blocked.all(1)).any():
        out[blind] = 0
    return out.to(q.dtype)
