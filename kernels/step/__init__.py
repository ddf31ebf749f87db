"""The layers of a model over rows of sequences in one call, on a CPU: native.cpp, as C has it.

Pointers keep nothing alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ..native import Product, library

HEAD_DIMS = (32, 64, 96, 128, 256)
UNIT = 32  # every width is a multiple of it


class Fused(ctypes.Structure):
    """Products of one input, side by side: up to three."""

    _fields_ = (("parts", Product * 3), ("count", ctypes.c_int32), ("N", ctypes.c_int32))

    @classmethod
    def of(cls, products: Sequence[Product]) -> "Fused":
        return cls((Product * 3)(*products), len(products), sum(each.N for each in products))


class Layer(ctypes.Structure):
    """`qk_norm`: a weight a head, queries' then keys', or null. `window`: −1 for none."""

    _fields_ = (
        *((name, Fused) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "qk_norm")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "rotates", "owns", "window", "sink")),
    )


class Pool(ctypes.Structure):
    """The keys and values that a layer reads, of all sequences: [Hkv, slots, D] each, with scales [Hkv, slots] below 16
    bits. `kind`: which of a part's places tells where its rows lie."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        ("slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bits", "kind")),
    )


class Place(ctypes.Structure):
    """Where the keys of a sequence lie: key n in slot base + n. With a `page`, n in place n % page of block table[n //
    page]. With a `ring` of so many slots behind those of `sink`, committed keys there, and staged row j in slot
    `staging` + numbers[j]."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("base", "staging")),
        *((name, ctypes.c_void_p) for name in ("table", "numbers")),
        *((name, ctypes.c_int32) for name in ("page", "ring", "sink")),
    )


class Part(ctypes.Structure):
    """Rows `first` to `stop` of a forward are the last staged ones of a sequence, of which `prefix` are committed and
    `staged` staged. `sees` [.., width]: bytes; null where each sees all before it."""

    _fields_ = (
        ("sees", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("first", "stop", "prefix", "staged", "width")),
    )


@dataclass(frozen=True, slots=True)
class Lies:
    """Where a cache's rows are, for one forward: a pool a layer; by kind and part, where its rows lie. `held`: what
    those point into."""

    pools: "ctypes.Array[Pool]"
    places: "ctypes.Array[Place]"
    held: Sequence[object] = ()


class Call(ctypes.Structure):
    """One forward of the layers `order`; x [T, dim] goes in and comes out. `prompt`: with the product
    for many rows, which sums in another order."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "pools", "places", "order", "parts", "positions", "cos", "sin", "x")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("count", "part_count", "T", "dim", "head_dim", "mlp", "threads", "prompt")
        ),
    )


def run(call: Call) -> None:
    found = library()
    assert found is not None
    if found.layers(ctypes.byref(call)):
        raise MemoryError(f"no memory for {call.T} rows of {call.dim}")


def normed(x: BFloat16[Tensor, "T D"], weight: BFloat16[Tensor, " D"], eps: float) -> BFloat16[Tensor, "T D"]:
    """x / √(mean x² + eps) · weight, as the layers compute it: D a multiple of 16."""
    found = library()
    assert found is not None
    x = x.contiguous()
    y = torch.empty_like(x)
    found.norm_rows(x.data_ptr(), weight.data_ptr(), eps, *x.shape, y.data_ptr())
    return y
