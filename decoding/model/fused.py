"""A decoder's layers where our kernels run: norms with their residual, rotation, gate and one attention of all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...attention.book import Part, Placement
from ...attention.cache import Cache
from ...attention.kept import spread
from ...attention.reads import Reads, write
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import rope
from ...kernels.swiglu import swiglu
from ...kernels.verify_attention import causal_attention
from ...kernels.verify_attention.batch import verify_attention_batch
from .block import Block
from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Fused:
    """What all forwards of one decoder share."""

    inv_freq: Float[Tensor, " half"]
    rope_scale: float
    row_invariant: bool

    @staticmethod
    def of(config: ModelConfig, device: torch.device, row_invariant: bool) -> "Fused":
        return Fused(torch.tensor(config.inv_freq, device=device), config.rope_scale, row_invariant)

    @property
    def attention(self) -> str:
        """Which code computes it, for a run's record."""
        return f"triton, {'' if self.row_invariant else 'not '}row-invariant; prefill torch sdpa"

    def step(self, cache: Cache, place: Placement) -> "Step":
        """Of rows that were staged."""
        few = [part for part in place.parts if not part.causal]
        reads = cache.told(few).on(place.device) if few else None
        if reads is not None and len(few) == len(place.parts):
            return self.few(cache, reads)
        return Step(self, cache, place.parts, place.positions, reads)

    def few(self, cache: Cache, reads: Reads) -> "Step":
        """Of rows none of which is of a long chain; the host is asked for nothing."""
        return Step(self, cache, (), reads.looks.positions, reads)


class Step:
    """One forward. What the last product of a layer adds to its stream x is summed by the next layer's norm.

    `parts`: where some are of a long chain, which attends by itself; `reads`: of the others."""

    def __init__(
        self, shared: Fused, cache: Cache, parts: Sequence[Part], positions: Int[Tensor, " T"], reads: Reads | None
    ) -> None:
        self._shared, self._cache, self._parts, self._positions, self._reads = shared, cache, parts, positions, reads
        self._prefill = reads is None
        self._at: dict[int, tuple[Tensor, Tensor]] = {}  # where rows of each kind of pool are written, by its table
        self._added: Tensor | None = None

    @cached_property
    def _rows(self) -> Int[Tensor, " n"]:
        """Those of no long chain."""
        numbers = [row for part in self._parts if not part.causal for row in range(part.first, part.stop)]
        return torch.tensor(numbers, device=self._positions.device)

    def _short(self, x: Float[Tensor, "T *_"]) -> Float[Tensor, "n *_"]:
        return x[self._rows] if self._parts else x

    def stream(self, x: Float[Tensor, "T dim"]) -> Float[Tensor, "T dim"]:
        """What has gone through the layers so far, where `x` is what the last one returned."""
        return x if self._added is None else x + self._added

    def through(self, block: Block, x: Float[Tensor, "T dim"]) -> Float[Tensor, "T dim"]:
        """One layer."""
        normed, x = rms_norm(x, block.attention_norm, block.eps, self._added)
        attended = self._attend(block, block.qkv(normed, prefill=self._prefill))
        normed, x = rms_norm(x, block.mlp_norm, block.eps, block.output(attended, prefill=self._prefill))
        gated = swiglu(block.gate_up(normed, prefill=self._prefill))
        self._added = block.down(gated, prefill=self._prefill)
        return x

    def _attend(self, block: Block, qkv: Float[Tensor, "T HD"]) -> Float[Tensor, "T HqD"]:
        H, Hkv = block.heads, block.kv_heads if block.owns else 0
        heads = qkv.view(len(qkv), -1, block.head_dim)
        q = self._turned(block, heads[:, :H], None if block.qk_norm is None else block.qk_norm[0])
        if block.owns:
            k = self._turned(block, heads[:, H : H + Hkv], None if block.qk_norm is None else block.qk_norm[H])
            self._write(block, k, heads[:, H + Hkv :])
        return self._seen(block, q)

    def _write(self, block: Block, k: Float[Tensor, "T Hkv D"], v: Float[Tensor, "T Hkv D"]) -> None:
        for part in self._parts:
            if part.causal:
                own = slice(part.first, part.stop)
                self._cache.write(block.layer, part, k[own], v[own])
        if self._reads is not None:
            keys = self._cache.keys(block.layer, self._reads)
            if (kind := id(keys.tables)) not in self._at:
                self._at[kind] = self._reads.at(keys)
            write(keys, self._at[kind], self._short(k), self._short(v))

    def _turned(
        self, block: Block, x: Float[Tensor, "T H D"], norm: Float[Tensor, " D"] | None
    ) -> Float[Tensor, "T H D"]:
        """Queries or keys as they are compared."""
        if norm is not None:
            x = rms_norm(x.reshape(-1, block.head_dim), norm, block.eps)[0].view(x.shape)
        if block.rotates:
            x = rope(x, self._positions, self._shared.inv_freq, self._shared.rope_scale)
        return spread(x) if block.bits == 4 else x

    def _seen(self, block: Block, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T HqD"]:
        if not self._parts:
            return self._at_once(block, q)
        out = q.new_empty(len(q), block.heads * block.head_dim)
        if self._reads is not None:
            out[self._rows] = self._at_once(block, self._short(q))
        for part in self._parts:
            if part.causal:
                own = slice(part.first, part.stop)
                k, v = self._cache.view(block.layer, part)
                out[own] = causal_attention(q[own].contiguous(), k, v, block.scale, *block.sight)
        return out

    def _at_once(self, block: Block, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T HqD"]:
        assert self._reads is not None
        keys, looks = self._cache.keys(block.layer, self._reads), self._reads.looks
        return verify_attention_batch(q, keys, looks, block.scale, *block.sight, self._shared.row_invariant)
