"""Inputs for trying kernels: forests behind prefixes, keys in pages and rings and of low bits, weights of low bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .matmul_w4.op import Weight
from .verify_attention.keys import Keys, Looks


def looks(prefixes: Sequence[int], parents: Sequence[Sequence[int]], spare: int = 0) -> Looks:
    """One forest a sequence. `spare`: columns of `blocked` that none has rows for, and keys by which the bound is too
    high."""
    T, width = sum(map(len, parents)), max(map(len, parents)) + spare
    blocked = torch.ones(T, width, dtype=torch.bool)
    depth = torch.zeros(len(parents), width, dtype=torch.int64)
    row = 0
    for s, mine in enumerate(parents):
        for i, parent in enumerate(mine):
            if parent >= 0:
                blocked[row] = blocked[row - i + parent]
                depth[s, i] = depth[s, parent] + 1
            blocked[row, i] = False
            row += 1
    counts = torch.tensor([len(mine) for mine in parents])
    prefix = torch.tensor(prefixes, dtype=torch.int32)
    key_positions = depth + prefix[:, None]
    positions = torch.cat([key_positions[s, : len(mine)] for s, mine in enumerate(parents)])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    most = max(p + len(mine) for p, mine in zip(prefixes, parents, strict=True)) + spare
    return Looks(starts, prefix, counts.int(), positions, key_positions, blocked, int(counts.max()), most)


def tree(rows: int) -> list[int]:
    """Parents of a tree of two children a row."""
    return [(i - 1) // 2 if i else -1 for i in range(rows)]


def each(keys: Keys, change: Callable[[Tensor], Tensor]) -> Keys:
    k_scale, v_scale = (None if part is None else change(part) for part in (keys.k_scale, keys.v_scale))
    return Keys(change(keys.k), change(keys.v), k_scale, v_scale, keys.tables, keys.ring)


def paged(keys: Keys, block: int, rng: torch.Generator) -> Keys:
    """The same in blocks strewn over a pool, whose other blocks are as memory is."""
    N, S = keys.k.shape[:2]
    per = -(-S // block)
    total = N * per + 3
    tables = torch.randperm(total, generator=rng)[: N * per].view(N, per).int()

    def strewn(stored: Tensor) -> Tensor:
        pool = torch.empty(total, block, *stored.shape[2:], dtype=stored.dtype)
        fill = torch.empty(N, per * block - S, *stored.shape[2:], dtype=stored.dtype)
        pool[tables.long()] = torch.cat([stored, fill], 1).unflatten(1, (per, block))
        return pool

    return replace(each(keys, strewn), tables=tables)


def ringed(keys: Keys, prefixes: Sequence[int], staged: int, window: int, sink: int, gap: int = 0) -> Keys:
    """The same with the last `window` committed keys of a sequence in a ring behind its first `sink`, and `staged` rows
    in slots `gap` behind that; what is not written is as memory is."""
    start = window + sink + gap

    def kept(stored: Tensor) -> Tensor:
        ring = torch.empty(len(prefixes), start + staged, *stored.shape[2:], dtype=stored.dtype)
        for s, prefix in enumerate(prefixes):
            for p in [*range(min(sink, prefix)), *range(max(sink, prefix - window), prefix)]:
                ring[s, p if p < sink else sink + (p - sink) % window] = stored[s, p]
            ring[s, start:] = stored[s, prefix : prefix + staged]
        return ring

    return replace(each(keys, kept), ring=start)


def quantised(keys: Keys, bits: int) -> Keys:
    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        most = 2 ** (bits - 1) - 1
        scale = (x.float().abs().amax(-1) / most).half()
        codes = (x.float() / scale.float()[..., None]).round().clamp(-most, most).to(torch.int8)
        if bits == 4:
            codes = (codes + 8).view(torch.uint8)
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return codes, scale

    (k, k_scale), (v, v_scale) = rounded(keys.k), rounded(keys.v)
    return Keys(k, v, k_scale, v_scale)


def weight(N: int, K: int, bits: int, group: int, kind: str, rng: torch.Generator) -> Weight:
    """`kind` of low bits: with zeros ("zero"), with shifts ("shift"), or with columns in any group ("any")."""
    if bits == 16:
        return Weight(torch.randn(N, K, generator=rng), 16)
    G = -(-K // group)
    scale = (torch.rand(N, G, generator=rng) + 0.5).half() / 2**bits
    codes = torch.randint(0, 256, (N, -(-K // 2) if bits == 4 else K), generator=rng, dtype=torch.uint8)
    zero = torch.randint(0, 2**bits, (N, G), generator=rng, dtype=torch.uint8)
    shift = torch.randn(N, G, generator=rng).half()
    groups = torch.randint(0, G, (K,), generator=rng).int() if kind == "any" else None
    if kind == "shift":
        return Weight(codes, bits, scale, None, shift, group_size=group)
    return Weight(codes, bits, scale, zero, groups=groups, group_size=group)
