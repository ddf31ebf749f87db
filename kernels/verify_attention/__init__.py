"""Attention of a few new rows of one sequence over its keys, for decoding and for verifying a forest of drafts."""

from jaxtyping import Bool, Float
from torch import Tensor

from . import rowwise, sdpa
from .reference import verify_attention_reference

__all__ = [
    "BLOCK",
    "causal_attention",
    "padded_keys",
    "row_invariant",
    "verify_attention",
    "verify_attention_reference",
]

BLOCK, padded_keys, row_invariant = rowwise.BLOCK, rowwise.padded_keys, rowwise.row_invariant


def verify_attention(
    q: Float[Tensor, "T Hq D"],
    k: Float[Tensor, "Hkv S D"],
    v: Float[Tensor, "Hkv S D"],
    blocked: Bool[Tensor, "T B"] | None,
    scale: float,
) -> Float[Tensor, "T HqD"]:
    """softmax(q kᵀ · scale) v with query head h reading KV head h // (Hq / Hkv).

    `blocked[i, j]`: row i must not see key S − B + j; keys before S − B are seen by all rows. None: all are seen. A row
    that sees no key gets zeros. Values that no row sees are finite.
    """
    path = rowwise if q.device.type == "cpu" else sdpa
    return path.verify(q, k, v, blocked, scale)


def causal_attention(
    q: Float[Tensor, "T Hq D"],
    k: Float[Tensor, "Hkv S D"],
    v: Float[Tensor, "Hkv S D"],
    scale: float,
    window: int | None = None,
    sink: int = 0,
) -> Float[Tensor, "T HqD"]:
    """The same for a long chain: row i is key S − T + i and sees the keys up to itself; with a window the last `window`
    of them, and the first `sink`. Keys that no row sees may be missing from between those."""
    return sdpa.causal(q, k, v, scale, window, sink)
