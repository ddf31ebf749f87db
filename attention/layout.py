"""How each layer keeps its keys and values, as data. The model, the cache and the planner read this one table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's entry. `owner`: the layer whose K and V it reads (itself unless shared across layers);
    `window`: a row sees keys i − W + 1 … i (None: all); `sink`: first keys always seen; `bits`: 16, as computed.
    """

    owner: int
    kv_heads: int
    window: int | None = None
    sink: int = 0
    bits: int = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """One entry a layer, and the width of a head."""

    layers: tuple[LayerKV, ...]
    head_dim: int

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if not 0 <= layer.owner <= i:
                raise ValueError(f"layer {i}: owner {layer.owner} is not one of layers 0 to {i}")
            owner = self.layers[layer.owner]
            if layer.owner != i and layer != owner:
                raise ValueError(f"layer {i} shares the cache of layer {layer.owner}, so their entries must be equal")
            if layer.owner == i and layer.kv_heads < 1:
                raise ValueError(f"layer {i}: kv_heads must be at least 1, got {layer.kv_heads}")
            if layer.window is not None and layer.window < 1:
                raise ValueError(f"layer {i}: window must be at least 1, got {layer.window}")

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers that hold K and V of their own, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.owner == i)

    def bytes_per_token(self, itemsize: int) -> int:
        """2 × Σ over owners of kv_heads × head_dim × bytes: one token of one sequence, before any window."""
        return sum(2 * self.layers[i].kv_heads * self.head_dim * itemsize for i in self.owners)


def uniform(layers: int, kv_heads: int, head_dim: int, windows: Sequence[int | None] | None = None) -> Layout:
    """Every layer its own owner with the same heads; `windows` has one entry a layer."""
    per_layer = windows if windows is not None else [None] * layers
    return Layout(tuple(LayerKV(i, kv_heads, window) for i, window in enumerate(per_layer)), head_dim)
