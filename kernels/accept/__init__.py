"""Which drafted rows are kept and what comes behind them, decided on the device: greedily, or by sampling with one-hot
candidates, which keeps those that plain sampling with the same noise would have drawn."""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from ..dispatch import runs_triton
from .reference import accept_reference, gumbels

__all__ = ["accept", "accept_reference", "gumbels"]


def accept(
    scores: Float[Tensor, "T V"],
    tokens: Int[Tensor, " T"],
    parents: Int[Tensor, " T"],
    starts: Int32[Tensor, " N1"],
    max_rows: int,
    keys: Int[Tensor, " T"] | None = None,
) -> tuple[Int32[Tensor, "N R"], Int32[Tensor, " N"], Int[Tensor, " N"]]:
    """(path, count, next) of each sequence, whose rows are starts[s] … starts[s + 1] − 1, at most `max_rows`.

    Row 0 of a sequence is the token emitted last and always kept; `parents` count from it, and come before their
    children. `scores[i]` is of the token behind row i; `keys`: log-probabilities to which the Gumbel noise of the row's
    key is added (None: greedy). Of equal scores the first token wins; of equal siblings the first row. `path` is filled
    up with −1. NaN is never chosen.
    """
    return _op(scores, tokens, parents, starts, max_rows, keys)


@torch.library.custom_op("decodelab::accept", mutates_args=())
def _op(
    scores: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_rows: int, keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(scores):
        from .triton import walked

        return walked(scores, tokens, parents, starts, max_rows, keys)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return accept_reference(scores, tokens, parents, starts, keys, max_rows)


@_op.register_fake
def _(
    scores: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_rows: int, keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    N = starts.shape[0] - 1
    return (
        scores.new_empty((N, max_rows), dtype=torch.int32),
        scores.new_empty((N,), dtype=torch.int32),
        scores.new_empty((N,), dtype=torch.int64),
    )
