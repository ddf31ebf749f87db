"""Which drafted rows are kept and what comes behind them, decided on the device: greedily, or by sampling, which keeps
one-hot candidates that plain sampling with the same noise would have drawn, and judges drawn ones by rejection."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int, Int32
from torch import Tensor

from ..dispatch import runs_triton
from .reference import accept_reference, gumbels

__all__ = ["Drawn", "accept", "accept_reference", "gumbels"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of candidates that were drawn: row i from `q[rows[i]]`, given its siblings before it (−1: it is one-hot).

    `uniforms[i]` in (0, 1) decides on it. `siblings`: a bound, known without asking the device, of the drawn
    candidates behind one row.
    """

    q: Float[Tensor, "P V"]
    rows: Int[Tensor, " T"]
    uniforms: Float64[Tensor, " T"]
    siblings: int


def accept(
    scores: Float[Tensor, "T V"],
    tokens: Int[Tensor, " T"],
    parents: Int[Tensor, " T"],
    starts: Int32[Tensor, " N1"],
    max_rows: int,
    keys: Int[Tensor, " T"] | None = None,
    drawn: Drawn | None = None,
) -> tuple[Int32[Tensor, "N R"], Int32[Tensor, " N"], Int[Tensor, " N"]]:
    """(path, count, next) of each sequence, whose rows are starts[s] … starts[s + 1] − 1, at most `max_rows`.

    Row 0 of a sequence is the token emitted last and always kept; `parents` count from it, and come before their
    children; a row of token −1 is no candidate. `scores[i]` is of the token behind row i; `keys`: log-probabilities to
    which the Gumbel noise of the row's key is added (None: greedy). Of equal scores the first token wins; of equal
    siblings the first row. `path` is filled up with −1. NaN is never chosen.

    `drawn`: candidates with a q are judged first, in order: x is kept if u q(x) < p(x), else p becomes
    norm(max(0, p − q)), or stays if nothing is left; then a token is drawn from what p has become, and a one-hot
    candidate is kept iff it is that (the rule and the noise of `Sampling`, here in float64).
    """
    if drawn is None:
        return _op(scores, tokens, parents, starts, max_rows, keys)
    assert keys is not None, "candidates that were drawn are judged by sampling"
    return _op(scores, tokens, parents, starts, max_rows, keys, drawn.q, drawn.rows, drawn.uniforms, drawn.siblings)


@torch.library.custom_op("decodelab::accept", mutates_args=())
def _op(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    starts: Tensor,
    max_rows: int,
    keys: Tensor | None,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
    siblings: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(scores):
        from .triton import walked

        return walked(scores, tokens, parents, starts, max_rows, keys, q, q_rows, uniforms, siblings)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return accept_reference(scores, tokens, parents, starts, keys, max_rows, q, q_rows, uniforms)


@_op.register_fake
def _(
    scores: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_rows: int, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    N = starts.shape[0] - 1
    return (
        scores.new_empty((N, max_rows), dtype=torch.int32),
        scores.new_empty((N,), dtype=torch.int32),
        scores.new_empty((N,), dtype=torch.int64),
    )
