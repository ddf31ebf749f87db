"""Attention of the rows of many sequences at once, each a forest behind its own prefix: one call a layer of a step."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..dispatch import launches, runs_triton
from .batch_reference import verify_attention_batch_reference
from .keys import Keys, Looks


def verify_attention_batch(
    q: Float[Tensor, "T Hq D"],
    keys: Keys,
    looks: Looks,
    scale: float,
    window: int | None = None,
    sink: int = 0,
    row_invariant: bool = True,
) -> Float[Tensor, "T HqD"]:
    """softmax(q kᵀ · scale) v with query head h reading KV head h // (Hq / Hkv); a row that sees no key gets zeros.

    `window`: a row at position i sees keys at i − window + 1 and later, and the first `sink` ones. `row_invariant`: a
    row has the same bits whatever rows and sequences stand beside it, and wherever its blocks lie.
    """
    assert len(q) == len(looks.blocked)
    assert q.shape[1] % keys.k.shape[2] == 0
    assert keys.k.shape[3] * (2 if keys.k.dtype == torch.uint8 else 1) == q.shape[2]
    if keys.ring is None:
        assert keys.tables is None or keys.tables.shape[1] * keys.k.shape[1] >= looks.max_keys
    else:
        assert window is not None
        assert keys.ring >= window + sink
    if launches(q):
        from .triton import verify

        return verify(q, keys, looks, scale, window, sink, row_invariant)
    return _op(
        *(q, keys.k, keys.v, keys.k_scale, keys.v_scale, keys.tables, looks.starts, looks.prefix, looks.staged),
        *(looks.positions, looks.key_positions, looks.blocked, looks.max_rows, looks.max_keys),
        *(scale, window, sink, row_invariant, keys.ring),
    )


@torch.library.custom_op("decodelab::verify_attention_batch", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tables: Tensor | None,
    starts: Tensor,
    prefix: Tensor,
    staged: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    blocked: Tensor,
    max_rows: int,
    max_keys: int,
    scale: float,
    window: int | None,
    sink: int,
    row_invariant: bool,
    ring: int | None = None,
) -> Tensor:
    keys = Keys(k, v, k_scale, v_scale, tables, ring)
    looks = Looks(starts, prefix, staged, positions, key_positions, blocked, max_rows, max_keys)
    if runs_triton(q):
        from .triton import verify

        return verify(q, keys, looks, scale, window, sink, row_invariant)
    return verify_attention_batch_reference(q, keys, looks, scale, window, sink)


@_op.register_fake
def _(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
