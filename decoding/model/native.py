"""A decoder's layers in one call, where the CPU's kernels in C++ run and every layer's products are among them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ...attention.book import Placement
from ...attention.cache import Cache
from ...kernels.step import HEAD_DIMS, UNIT, Call, Fused, Layer, Part, run
from ...quantization.linear import natives
from .block import Block
from .config import ModelConfig

_MOST = 512  # rows that go through all layers together: what they need of room beside weights and keys is bounded


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """What all forwards of one decoder share; `layers` point into `blocks`."""

    config: ModelConfig
    blocks: Sequence[Block]
    layers: ctypes.Array[Layer]

    @staticmethod
    def of(
        config: ModelConfig, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device
    ) -> "NativeLayers | None":
        """None where something of them is computed elsewhere."""
        c = config
        widths = (c.dim, c.mlp_dim, c.heads * c.head_dim)
        fits = c.head_dim in HEAD_DIMS and not any(width % UNIT for width in widths)
        if dtype != torch.bfloat16 or device.type != "cpu" or not fits:
            return None
        products = [[natives(each) for each in (b.qkv, b.output, b.gate_up, b.down)] for b in blocks]
        if not all(all(each) for each in products):
            return None
        found = (Layer * len(blocks))()
        for i, (b, each) in enumerate(zip(blocks, products, strict=True)):
            norms = [None if norm is None else norm.data_ptr() for norm in (b.attention_norm, b.mlp_norm, b.qk_norm)]
            window, sink = b.sight
            heads = (b.heads, b.kv_heads, b.rotates, b.owns, -1 if window is None else window, sink)
            found[i] = Layer(*map(Fused.of, each), *norms, b.eps, b.scale, *heads)
        return NativeLayers(c, blocks, found)

    def __call__(
        self,
        x: BFloat16[Tensor, "T dim"],
        order: Sequence[int],
        cache: Cache,
        place: Placement,
        cos: Tensor,
        sin: Tensor,
    ) -> BFloat16[Tensor, "T dim"]:
        """The stream behind the layers `order`, in place. `cos`, `sin`: of all positions."""
        c, lies = self.config, cache.lying(place.parts)
        numbers, cut = _numbers(tuple(order)), -(-len(x) // _MOST)
        for i in range(cut):
            a, b = len(x) * i // cut, len(x) * (i + 1) // cut
            parts = (Part * len(place.parts))()
            for at, part in zip(parts, place.parts, strict=True):
                first, stop = (min(max(row, a), b) for row in (part.first, part.stop))
                if first == stop:
                    continue
                staged = part.stop - part.first if part.causal else len(part.sees)
                if not part.causal and staged > 1:
                    at.sees, at.width = part.sees.ctypes.data, staged
                at.first, at.stop, at.prefix, at.staged = first - a, stop - a, part.committed, staged - part.stop + stop
            addresses = (ctypes.addressof(each) for each in (self.layers, lies.pools, lies.places, numbers, parts))
            tensors = (each.data_ptr() for each in (place.positions[a:b], cos, sin, x[a:b]))
            sizes = (len(order), len(parts), b - a, c.dim, c.head_dim, c.mlp_dim, torch.get_num_threads(), place.prompt)
            run(Call(*addresses, *tensors, *sizes))
        return x


@lru_cache
def _numbers(order: tuple[int, ...]) -> Any:
    return (ctypes.c_int32 * len(order))(*order)
