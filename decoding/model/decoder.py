"""The lean decoder: the Llama family over rows of many sequences, one fused product where others have three."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...attention.book import Placement
from ...attention.cache import Cache, DenseCache, rounded
from ...attention.layered import LayeredCache
from ...attention.paged import PagedCache
from ...attention.rows import Rows
from ...errors import UserError
from ...kernels.dispatch import Kernels
from ...kernels.step import normed
from ...kernels.verify_attention import row_invariant
from ...quantization.codes import Codes
from .block import Block
from .config import ModelConfig
from .fused import Fused, Step
from .graphs import MOST_ROWS, Asked, CudaGraphs, Fed, Graphs, Recorder, Scored, power
from .native import NativeLayers
from .reading import Product, Weights

_CLOSED = 2  # caches that are kept at most

# The residual stream that enters layer i (i = layers: that leaves the last one), or what the unembedding reads.
Tap = int | Literal["final"]


@dataclass(frozen=True, slots=True)
class Output:
    """`logits` [R, V] of the rows asked for, in the model's dtype; `hidden[tap]` [T, dim] of all rows."""

    logits: Float[Tensor, "R V"]
    hidden: dict[Tap, Float[Tensor, "T dim"]]


def angles(
    config: ModelConfig, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "P 1 D"], Float[Tensor, "P 1 D"]]:
    """cos and sin of the first positions, in float32 and then rounded, as transformers does."""
    angle = torch.outer(torch.arange(positions).float(), torch.tensor(config.inv_freq))
    turned = torch.cat([angle, angle], -1)[:, None] if positions else torch.zeros(0, 1, config.head_dim)
    sign = torch.ones(config.head_dim)
    sign[: config.head_dim // 2] = -1
    scale = config.rope_scale
    return (turned.cos() * scale).to(device, dtype), (turned.sin() * scale * sign).to(device, dtype)


class Decoder(nn.Module):
    """A model of the Llama family, in one dtype on one device."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        codes: Mapping[str, Codes] | None = None,
        kernels: Kernels | None = None,
        recorder: Recorder | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`tensors` has transformers' parameter names; `codes`: of the layers that are quantised, by name without
        `.weight`. `kernels`: how a GPU computes (None: row-invariant). `recorder`: of its steps (None: CUDA graphs, as
        `kernels` says). `progress(done, total)` is called after each layer."""
        super().__init__()

        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.kernels = kernels = kernels or Kernels()
        ours = kernels if kernels.run_on(self.device, dtype) else None
        weights = Weights(tensors, dtype, self.device, codes or {}, ours)
        self.embedding = weights.read("model.embed_tokens.weight")
        if self.embedding.shape != (config.vocab, config.dim):
            said = (config.vocab, config.dim)
            raise UserError(f"the embedding is {tuple(self.embedding.shape)}, but the config says {said}")
        blocks = []
        for layer in range(config.layers):
            blocks.append(Block(config, layer, weights))
            if progress is not None:
                progress(layer + 1, config.layers)
        self.blocks = nn.ModuleList(blocks)
        self.norm = weights.read("model.norm.weight")
        self.unembedding = weights.linear(self.embedding) if config.tied else weights.product(["lm_head"], False)
        self._fused = None if ours is None else Fused.of(config, self.device, ours.row_invariant)
        self._native = NativeLayers.of(config, list(cast(Iterable[Block], self.blocks)), dtype, self.device)
        if recorder is None and ours is not None and ours.graphs and self.device.type == "cuda":
            recorder = CudaGraphs(self.device)
        self._closed: list[DenseCache | LayeredCache] = []
        self._graphs = None if ours is None or recorder is None else Graphs(recorder)
        self._grow(0)

    def _grow(self, positions: int) -> None:
        self.cos, self.sin = angles(self.config, positions, self.device, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one forward of a few rows reads: everything but the embedding table's other rows."""
        return sum(product.nbytes for product in self._products)

    @property
    def product_elements(self) -> int:
        """Weights in the products of one forward: half of its operations a row, attention apart."""
        return sum(product.in_features * product.out_features for product in self._products)

    @property
    def _products(self) -> list[Product]:
        blocks = cast(Iterable[Block], self.blocks)
        each = [product for b in blocks for product in (b.qkv, b.output, b.gate_up, b.down)]
        return [*each, self.unembedding]

    @property
    def implementation(self) -> dict[str, str]:
        """Which code computes what, for a run's record."""
        products = sorted({product.implementation for product in self._products})
        attention = "torch sdpa"
        if self._fused is not None:
            step = "launched" if self._graphs is None else self._graphs.recorder.name
            return {"linear": ", ".join(products), "attention": self._fused.attention, "step": step}
        if self._native is not None:
            attention = "native"
        elif self.device.type == "cpu":
            attention = "row-wise float32" if row_invariant() else "row-wise float32, not row-invariant"
        return {"linear": ", ".join(products), "attention": attention}

    def open_cache(self, sequences: int, capacity: int, pages: PagedCache | None = None) -> Cache:
        """A cache of the model's own layout with `capacity` slots for each of `sequences` sequences; or `pages`, which
        goes on from request to request, with room for them."""
        self._reach(capacity)
        if pages is not None:
            pages.reserve(sequences, capacity)
            return pages
        layout = self.config.layout
        kind = DenseCache if layout.plain else LayeredCache
        least = rounded(capacity)
        for i, closed in enumerate(self._closed):  # the order of a row's sums follows from the power of two
            if closed.sequences == sequences and least <= closed.capacity <= power(least):
                return self._closed.pop(i)
        sizes = {"sequences": sequences, "capacity": capacity}
        return kind(layout, **sizes, dtype=self.dtype, device=self.device, kernels=self.kernels)

    def close_cache(self, cache: Cache) -> None:
        """The caller is done with it. Where steps are recorded, for keys that lie where they lay, one in which no
        sequence is open any more is kept for the next request that fits."""
        if self._graphs is not None and isinstance(cache, DenseCache | LayeredCache) and cache.idle:
            self._closed = [*self._closed[1 - _CLOSED :], cache]

    def _reach(self, positions: int) -> None:
        if positions > self.cos.shape[0]:
            self._grow(-(-positions // 1024) * 1024)

    def forward(
        self,
        rows: Rows,
        cache: Cache,
        *,
        logits_of: Int[Tensor, " R"] | None = None,
        taps: Collection[Tap] = (),
        layers: Sequence[int] | None = None,
    ) -> Output:
        """Stage `rows` in the cache and score them. `logits_of`: the rows whose logits are wanted (None: all).

        Decoding calls it in inference mode; hidden states that a head is trained on are taken under no_grad.
        """
        place = cache.stage(rows)
        order = tuple(range(len(self.blocks)) if layers is None else layers)
        if self._fused is not None:
            if self._graphs is not None and 0 < len(rows) <= MOST_ROWS and not rows.prompt:
                return self._replayed(self._fused, self._graphs, rows, cache, place, logits_of, taps, order)
            wanted = None if logits_of is None else logits_of.to(self.device)
            step = self._fused.step(cache, place)
            return self._scored(step, rows.tokens.to(self.device, non_blocking=True), wanted, taps, order)
        x = F.embedding(rows.tokens.to(self.device, non_blocking=True), self.embedding)
        hidden: dict[Tap, Tensor] = {}
        self._reach(max((part.slot + part.stop - part.first for part in place.parts), default=0))
        if self._native is not None:
            x = self._natively(x, order, cache, place, hidden, taps)
        else:
            cos, sin = self.cos[place.positions], self.sin[place.positions]
            for layer in order:
                if layer in taps:
                    hidden[layer] = x
                x = self.blocks[layer](x, cos, sin, cache, place)
        # the logits of a prompt's last row decide a token, as those of any row do
        prefill = rows.prompt and logits_of is None
        return self._out(x, hidden, None if logits_of is None else logits_of.to(self.device), taps, prefill)

    def _replayed(
        self,
        fused: Fused,
        graphs: Graphs,
        rows: Rows,
        cache: Cache,
        place: Placement,
        logits_of: Int[Tensor, " R"] | None,
        taps: Collection[Tap],
        order: tuple[int, ...],
    ) -> Output:
        def compute(fed: Fed) -> Scored:
            out = self._scored(fused.few(cache, fed.reads), fed.tokens, fed.logits_of, taps, order)
            return out.logits, out.hidden

        asked = Asked(rows.tokens.numpy(), cache.told(place.parts), None if logits_of is None else logits_of.numpy())
        return Output(*graphs(asked, (cache.lies, order, frozenset(taps)), compute, self.device))

    def _scored(
        self,
        step: Step,
        tokens: Int[Tensor, " T"],
        logits_of: Int[Tensor, " R"] | None,
        taps: Collection[Tap],
        order: Sequence[int],
    ) -> Output:
        x, hidden = F.embedding(tokens, self.embedding), dict[Tap, Tensor]()
        for layer in order:
            if layer in taps:
                hidden[layer] = step.stream(x)
            x = step.through(cast(Block, self.blocks[layer]), x)
        return self._out(step.stream(x), hidden, logits_of, taps)

    def _out(
        self,
        x: Float[Tensor, "T dim"],
        hidden: dict[Tap, Tensor],
        logits_of: Int[Tensor, " R"] | None,
        taps: Collection[Tap],
        prefill: bool = False,
    ) -> Output:
        if len(self.blocks) in taps:
            hidden[len(self.blocks)] = x
        if "final" not in taps and logits_of is not None:
            x = self._normed(x[logits_of])
            return Output(self.unembedding(x, prefill), hidden)
        x = self._normed(x)
        if "final" in taps:
            hidden["final"] = x
        return Output(self.unembedding(x if logits_of is None else x[logits_of], prefill), hidden)

    def _normed(self, x: Float[Tensor, "R dim"]) -> Float[Tensor, "R dim"]:
        if self._native is not None:
            return normed(x, self.norm, self.config.norm_eps)
        return F.rms_norm(x, x.shape[1:], self.norm, self.config.norm_eps)

    def _natively(
        self,
        x: Float[Tensor, "T dim"],
        order: Sequence[int],
        cache: Cache,
        place: Placement,
        hidden: dict[Tap, Tensor],
        taps: Collection[Tap],
    ) -> Float[Tensor, "T dim"]:
        """All layers between two taps in one call."""
        assert self._native is not None
        borders = [i for i, layer in enumerate(order) if layer in taps]
        for a, b in pairwise([0, *borders, len(order)]):
            if b > a:
                x = self._native(x, order[a:b], cache, place, self.cos, self.sin)
            if b < len(order):
                hidden[order[b]] = x.clone()
        return x
