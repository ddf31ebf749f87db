"""How each layer keeps its keys and values, as data. The model, the cache and the planner read this one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pool = Literal["mean", "first"]
Sight = tuple[int | None, int]  # (window, sinks)
FULL: Sight = (None, 0)
BITS = (16, 8, 4)
# Of the scale that each token has for each head of K and of V, at 8 and 4 bits. float16, as the scales of weights: its
# rounding (2⁻¹¹) is far below a step of 8 bits (1/127), codes are chosen with the rounded scale, and it costs half of
# float32: at a head of 128, 1.6 % on top of 8 bits and 3.1 % on top of 4, not 3.1 and 6.3.
SCALE_BYTES = 2
_MOST = 2**31 - 1  # of a window and of sinks: positions are counted in 64 bits


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's entry. `owner`: the layer whose K and V it reads (itself unless shared across layers);
    `window`: a row sees keys i − W + 1 … i (None: all); `sink`: first keys always seen; `bits`: 16, as computed; 8 or
    4, each token's keys and values of a head as integers with a scale.
    """

    owner: int
    kv_heads: int
    window: int | None = None
    sink: int = 0
    bits: int = 16

    @property
    def sight(self) -> Sight:
        """What its rows see of what they could: the key to their mask."""
        return self.window, self.sink

    def held(self, tokens: int) -> int:
        """Tokens of a sequence whose keys are kept: what neither its window nor its sinks will see again is not."""
        return tokens if self.window is None else min(tokens, self.window + self.sink)


@dataclass(frozen=True, slots=True)
class Pooling:
    """What becomes of the weights of a model that goes with another layout. `heads`: one head of several; `layers`: one
    cache of several layers."""

    heads: Pool = "mean"
    layers: Pool = "mean"


@dataclass(frozen=True, slots=True)
class Layout:
    """One entry a layer, and the width of a head. `pooling`: of a model whose own layout is another one."""

    layers: tuple[LayerKV, ...]
    head_dim: int
    pooling: Pooling = Pooling()

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if not 0 <= layer.owner <= i:
                raise ValueError(f"layer {i}: owner {layer.owner} is not one of layers 0 to {i}")
            owner = self.layers[layer.owner]
            if layer.owner != i and layer != owner:
                raise ValueError(f"layer {i} shares the cache of layer {layer.owner}, so their entries must be equal")
            if layer.owner == i and layer.kv_heads < 1:
                raise ValueError(f"layer {i}: kv_heads must be at least 1, got {layer.kv_heads}")
            if layer.window is not None and not 1 <= layer.window <= _MOST:
                raise ValueError(f"layer {i}: window must be at least 1 and at most {_MOST}, got {layer.window}")
            if not 0 <= layer.sink <= _MOST:
                raise ValueError(f"layer {i}: sinks must be at least 0 and at most {_MOST}, got {layer.sink}")
            if layer.sink and layer.window is None:
                raise ValueError(f"layer {i}: {layer.sink} sinks without a window, but without one all keys are seen")
            if layer.bits not in BITS:
                raise ValueError(f"layer {i}: bits must be one of {', '.join(map(str, BITS))}, got {layer.bits}")
            if layer.bits == 4 and self.head_dim % 2:
                raise ValueError(f"layer {i}: 4 bits are packed in pairs, and heads of {self.head_dim} are odd")

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers that hold K and V of their own, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.owner == i)

    @property
    def plain(self) -> bool:
        """Whether every layer keeps all rows as they are computed."""
        return all(layer.window is None and layer.bits == 16 for layer in self.layers)

    def layer_bytes(self, layer: int, itemsize: int) -> int:
        """What one token takes in one layer: nothing where it reads another layer's cache."""
        entry = self.layers[layer]
        if entry.owner != layer:
            return 0
        head = self.head_dim * itemsize if entry.bits == 16 else self.head_dim * entry.bits // 8 + SCALE_BYTES
        return 2 * entry.kv_heads * head

    def bytes_per_token(self, itemsize: int) -> int:
        """2 × Σ over owners of kv_heads × head_dim × bytes: one token of one sequence, before any window. `itemsize`:
        of what is computed, which 16 bits stand for."""
        return sum(self.layer_bytes(i, itemsize) for i in self.owners)

    def sequence_bytes(self, tokens: int, itemsize: int) -> int:
        """What one sequence of so many tokens takes where windowed layers keep no more than they will see."""
        return sum(self.layers[i].held(tokens) * self.layer_bytes(i, itemsize) for i in self.owners)


def uniform(layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] | None = None) -> Layout:
    """Every layer its own owner with the same heads; `windows` has one entry a layer."""
    per_layer = windows if windows is not None else [None] * layers
    return Layout(tuple(LayerKV(i, kv_heads, window) for i, window in enumerate(per_layer)), head_dim)
