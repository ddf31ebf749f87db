"""The definition of `verify_attention_batch`: one row and one query head at a time, its keys gathered from the pool."""

import torch
from torch import Tensor

from .keys import Keys, Looks


def keys_of(stored: Tensor, scale: Tensor | None, tables: Tensor | None, sequence: int, slots: Tensor) -> Tensor:
    """[count, Hkv, D] of one sequence's slots, dequantised to float64."""
    block = stored.shape[1]
    blocks = torch.full_like(slots, sequence) if tables is None else tables[sequence, slots // block].long()
    found = stored[blocks, slots % block]
    if scale is None:
        return found.double()
    if stored.dtype == torch.uint8:
        found = torch.stack([found & 15, found >> 4], -1).flatten(-2).to(torch.int8) - 8
    return found.double() * scale[blocks, slots % block].double()[..., None]


def verify_attention_batch_reference(
    q: Tensor, keys: Keys, looks: Looks, scale: float, window: int | None = None, sink: int = 0
) -> Tensor:
    """See `verify_attention_batch`."""
    T, Hq, _ = q.shape
    group = Hq // keys.k.shape[2]
    out = torch.zeros(T, Hq, q.shape[2], dtype=torch.float64, device=q.device)
    for s, (prefix, staged) in enumerate(zip(looks.prefix.tolist(), looks.staged.tolist(), strict=True)):
        slots = torch.arange(prefix + staged, device=q.device)
        if keys.ring is not None and window is not None:
            slots[sink:prefix] = sink + (slots[sink:prefix] - sink) % window
            slots[prefix:] = keys.ring + torch.arange(staged, device=q.device)
        k = keys_of(keys.k, keys.k_scale, keys.tables, s, slots)
        v = keys_of(keys.v, keys.v_scale, keys.tables, s, slots)
        position = torch.cat([torch.arange(prefix, device=q.device), looks.key_positions[s, :staged].long()])
        for i in range(int(looks.starts[s]), int(looks.starts[s + 1])):
            seen = torch.ones(prefix + staged, dtype=torch.bool, device=q.device)
            seen[prefix:] = ~looks.blocked[i, :staged]
            if window is not None:
                seen &= (position > looks.positions[i] - window) | (position < sink)
            if not seen.any():
                continue
            for h in range(Hq):
                weight = torch.softmax(k[seen, h // group] @ q[i, h].double() * scale, 0)
                out[i, h] = weight @ v[seen, h // group]
    return out.view(T, -1).to(q.dtype)
