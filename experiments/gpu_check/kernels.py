"""Sections of single kernels: right, and how fast beside what torch has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels import cases
from ...kernels.checks import checked
from ...kernels.linear.reference import relative_error
from ...kernels.matmul_w4.op import Weight, matmul
from ...kernels.verify_attention import causal_attention
from ...kernels.verify_attention.batch import verify_attention_batch
from ...kernels.verify_attention.keys import Keys, Looks
from .bars import Row
from .lab import Call, Lab

# A Llama of 8 billion weights: (outputs, inputs) of a layer's products
_PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_GROUP = 128
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


def correctness(lab: Lab) -> Iterator[Row]:
    for one in checked(lab.device, not lab.tiny):
        yield asdict(one)


@torch.inference_mode()
def products(lab: Lab) -> Iterator[Row]:
    """Products of 4, 8 and 16 bits; `floor_s`: their bytes at copy bandwidth; `seconds`: of the fast mode."""
    rng = torch.Generator().manual_seed(0)
    for N, K in ((32, 128),) if lab.tiny else _PRODUCTS:
        for bits in (4, 8, 16):
            one = _placed(cases.weight(N, K, bits, _GROUP, "zero", rng), lab)
            nbytes = sum(x.nbytes for x in (one.codes, one.scale, one.zero) if x is not None)
            some = [_copied(one) for _ in range(lab.copies(nbytes))]
            for rows in (1, 2) if lab.tiny else (1, 2, 4, 8, 16):
                x = torch.randn(rows, K, generator=rng).to(lab.device, lab.dtype)
                found: dict[str, Any] = {"rows": rows, "N": N, "K": K, "bits": bits}
                want = x.float() @ one.dense(K, torch.float32).T
                for mode, row_invariant in (("fast", False), ("exact", True)):
                    calls = [partial(matmul, x, w, None, row_invariant) for w in some]
                    error = relative_error(calls[0](), want)
                    assert error < 2**-6, f"{rows} rows, {N} × {K}, {bits} bits, {mode}: off by {error:.3g}"
                    seconds = lab.seconds(calls)
                    floor = (nbytes + x.nbytes + rows * N * lab.dtype.itemsize) / lab.bandwidth
                    found |= {f"{mode}_s": seconds, f"{mode}_of_bandwidth": floor / seconds, "floor_s": floor}
                others = {"cublas bf16": partial(_dense, x, N, lab)}
                if bits == 4:
                    others["torch int4"] = partial(_int4, x, N, lab)
                times, absent = lab.alternatives(others)
                yield found | {"seconds": found["fast_s"], "alternatives": times, "absent": absent}


def _placed(w: Weight, lab: Lab) -> Weight:
    codes = w.codes.to(lab.device, lab.dtype if w.bits == 16 else w.codes.dtype)
    scale, zero = (None if part is None else part.to(lab.device) for part in (w.scale, w.zero))
    return replace(w, codes=codes, scale=scale, zero=zero)


def _copied(w: Weight) -> Weight:
    return replace(w, codes=w.codes.clone())


def _dense(x: Tensor, N: int, lab: Lab) -> list[Call]:
    nbytes = N * x.shape[1] * lab.dtype.itemsize
    weights = [torch.randn(N, x.shape[1], device=lab.device).to(lab.dtype) for _ in range(lab.copies(nbytes))]
    return [partial(F.linear, x, w) for w in weights]


def _int4(x: Tensor, N: int, lab: Lab) -> list[Call]:
    K = x.shape[1]
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=lab.device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.ones(K // _GROUP, N, 2, dtype=torch.bfloat16, device=lab.device)
    some = [packed.clone() for _ in range(lab.copies(codes.nbytes))]
    return [partial(torch.ops.aten._weight_int4pack_mm, x.bfloat16(), w, _GROUP, scales) for w in some]


@torch.inference_mode()
def attention(lab: Lab) -> Iterator[Row]:
    """One row and trees behind long prefixes, beside FlashAttention, which sees all keys, and SDPA with the mask."""
    rng = torch.Generator().manual_seed(0)
    heads, kv_heads, D = (4, 2, 16) if lab.tiny else (_HEADS, _KV_HEADS, _HEAD_DIM)
    for prefix in (40,) if lab.tiny else (4096, 8192, 16384, 32768):
        nbytes = 2 * prefix * kv_heads * D * lab.dtype.itemsize
        for rows in (1, 4) if lab.tiny else (1, 8, 16, 32, 64):
            S = prefix + rows
            kept = [
                Keys(_random(1, S, kv_heads, D, lab=lab), _random(1, S, kv_heads, D, lab=lab))
                for _ in range(lab.copies(nbytes))
            ]
            q = torch.randn(rows, heads, D, generator=rng).to(lab.device, lab.dtype)
            looks = _there(cases.looks([prefix], [cases.tree(rows)]), lab)
            mask = torch.cat([torch.ones(rows, prefix, dtype=torch.bool, device=lab.device), ~looks.blocked], 1)
            want = _masked(q, kept[0], mask)().double()
            found: dict[str, Any] = {"rows": rows, "keys": S, "floor_s": nbytes / lab.bandwidth}
            for mode, row_invariant in (("fast", False), ("exact", True)):
                calls = [partial(verify_attention_batch, q, k, looks, D**-0.5, None, 0, row_invariant) for k in kept]
                error = relative_error(calls[0](), want)
                assert error < 2**-6, f"{rows} rows over {S} keys, {mode}: off by {error:.3g}"
                seconds = lab.seconds(calls)
                found |= {f"{mode}_s": seconds, f"{mode}_of_bandwidth": found["floor_s"] / seconds}
            others = {"flash": partial(_flash_of, q, kept), "masked": partial(_masked_of, q, kept, mask)}
            times, absent = lab.alternatives(others)
            best = min(found["fast_s"], found["exact_s"])
            yield found | {"seconds": best, "alternatives": times, "absent": absent}


def _there(looks: Looks, lab: Lab) -> Looks:
    names = ("starts", "prefix", "staged", "positions", "key_positions", "blocked")
    return replace(looks, **{name: getattr(looks, name).to(lab.device) for name in names})


def _packed(q: Tensor, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
    """A group's heads as rows of one head, so that nobody reads a key twice."""
    T, Hq, D = q.shape
    Hkv = keys.k.shape[2]
    rows = q.view(T, Hkv, Hq // Hkv, D).transpose(0, 1).reshape(1, Hkv, -1, D)
    return rows, keys.k.transpose(1, 2), keys.v.transpose(1, 2)


def _flash(q: Tensor, keys: Keys) -> Call:
    rows, k, v = _packed(q, keys)

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(rows, k, v)

    return call


def _random(*shape: int, lab: Lab) -> Tensor:
    return torch.randn(*shape, device=lab.device).to(lab.dtype)


def _flash_of(q: Tensor, kept: Sequence[Keys]) -> list[Call]:
    return [_flash(q, keys) for keys in kept]


def _masked_of(q: Tensor, kept: Sequence[Keys], mask: Tensor) -> list[Call]:
    return [_masked(q, keys, mask) for keys in kept]


def _masked(q: Tensor, keys: Keys, mask: Tensor) -> Callable[[], Tensor]:
    rows, k, v = _packed(q, keys)
    T, Hq, D = q.shape
    wide = mask.repeat_interleave(Hq // keys.k.shape[2], 0)

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=wide)[0]
        return out.view(keys.k.shape[2], T, -1, D).transpose(0, 1).reshape(T, Hq * D)

    return call


@torch.inference_mode()
def prefill_attention(lab: Lab) -> Iterator[Row]:
    heads, kv_heads, D = (4, 2, 16) if lab.tiny else (_HEADS, _KV_HEADS, _HEAD_DIM)
    for T, S in ((32, 32), (32, 48)) if lab.tiny else ((2048, 2048), (2048, 8192)):
        q = torch.randn(T, heads, D, device=lab.device).to(lab.dtype)
        k, v = (torch.randn(kv_heads, S, D, device=lab.device).to(lab.dtype) for _ in range(2))
        ours = lab.seconds([partial(causal_attention, q, k, v, D**-0.5)])
        times, absent = lab.alternatives({"sdpa": partial(_causal, q, k, v)})
        yield {"what": f"attention of {T} rows over {S}", "seconds": ours, "alternatives": times, "absent": absent}


def _causal(q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
    """SDPA's own way: whole, or with a mask aligned to the last key."""
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(q.shape[0], k.shape[1])
    group = q.shape[1] // k.shape[0]
    rows, wide = q.transpose(0, 1)[None], [x.repeat_interleave(group, 0)[None] for x in (k, v)]
    if q.shape[0] == k.shape[1]:
        return [lambda: F.scaled_dot_product_attention(rows, k[None], v[None], is_causal=True, enable_gqa=True)]
    return [lambda: F.scaled_dot_product_attention(rows, wide[0], wide[1], attn_mask=bias)]
