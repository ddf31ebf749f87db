"""The CPU path: every row comes out the same, to the bit, whatever rows stand beside it.

Products and the softmax run in float32 (bfloat16 keys are widened as they are read: faster than the bf16 product for a
few rows, and exact). The float32 batched product sums alike for any row count from 4 and any key count from 64
(measured; MKL takes other orders below), so fewer rows are padded with zero rows and callers hand in at least `ALIGN`
keys, blocked where they hold nothing. Query heads that share a KV head are rows of one product: K and V are never
expanded.
"""

import torch
from torch import Tensor

ALIGN = 64  # keys handed in are at least this many
_ROWS = 4


def verify(q: Tensor, k: Tensor, v: Tensor, blocked: Tensor | None, scale: float) -> Tensor:
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    group = Hq // Hkv
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [T, Hkv, group, D] -> [Hkv, T * group, D]
    rows = q.view(T, Hkv, group, D).transpose(0, 1).reshape(Hkv, T * group, D).to(wide).mul_(scale)
    if T * group < _ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, _ROWS - T * group))
    scores = torch.bmm(rows, k.transpose(1, 2).to(wide))
    if blocked is not None:
        hide = blocked if group == 1 else blocked.repeat_interleave(group, 0)
        scores[:, : T * group, S - blocked.shape[1] :].masked_fill_(hide, -torch.inf)
    out = torch.bmm(torch.softmax(scores, -1), v.to(wide))[:, : T * group]
    return out.view(Hkv, T, group, D).transpose(0, 1).reshape(T, Hq * D).to(q.dtype)
