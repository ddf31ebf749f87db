"""torch's own attention: long chains on any device, and verification on a GPU until a kernel of ours takes over."""

import torch
import torch.nn.functional as F
from torch import Tensor

# A chain behind a prefix needs a mask; it is built for this many rows at a time, never T × T.
_BLOCK = 256


def verify(q: Tensor, k: Tensor, v: Tensor, blocked: Tensor | None, scale: float) -> Tensor:
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    group = Hq // Hkv
    rows = q.view(T, Hkv, group, D).transpose(0, 1).reshape(1, Hkv, T * group, D)
    mask = None
    if blocked is not None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
        mask[:, S - blocked.shape[1] :] = ~blocked
        mask = mask.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scale)[0]
    out = out.view(Hkv, T, group, D).transpose(0, 1).reshape(T, Hq * D)
    if blocked is not None and blocked.shape[1] == S:  # torch's backends differ in what they make of it
        out = out.masked_fill(blocked.all(1, keepdim=True), 0)
    return out


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sink: int) -> Tensor:
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    grouped = q.view(T, Hkv, Hq // Hkv, D).permute(
        2, 1, 0, 3
    )  # [group, Hkv, T, D]: one call a member, K and V unexpanded
    start = S - T
    if start == 0 and (window is None or window >= T):
        parts = [
            F.scaled_dot_product_attention(g[None], k[None], v[None], is_causal=True, scale=scale) for g in grouped
        ]
        return torch.stack(parts)[:, 0].permute(2, 1, 0, 3).reshape(T, Hq * D)
    out = q.new_empty(T, Hkv, Hq // Hkv, D)
    for lo in range(0, T, _BLOCK):
        hi = min(lo + _BLOCK, T)
        first = 0 if window is None else max(0, start + lo - window + 1)
        at = torch.arange(first, start + hi, device=q.device)
        keys, values = k[:, first : start + hi], v[:, first : start + hi]
        if head := min(sink, first):
            at = torch.cat([torch.arange(head, device=q.device), at])
            keys, values = torch.cat([k[:, :head], keys], 1), torch.cat([v[:, :head], values], 1)
        row = torch.arange(start + lo, start + hi, device=q.device)[:, None]
        seen = at <= row if window is None else (at <= row) & ((at > row - window) | (at < sink))
        for g in range(grouped.shape[0]):
            part = F.scaled_dot_product_attention(
                grouped[g, None, :, lo:hi], keys[None], values[None], attn_mask=seen, scale=scale
            )
            out[lo:hi, :, g] = part[0].transpose(0, 1)
    return out.view(T, Hq * D)
