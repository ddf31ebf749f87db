"""Whether a weight was quantised before: its groups lie on grids of few steps, as those of a GGUF file do."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

GROUPS = (256, 128, 64, 32, 16)  # columns; tried from the widest on
MOST_BITS = 8
ROWS = 64  # of a weight that are looked at
SHARE = 0.99  # of the groups that must lie on such a grid
NEAR = 0.15  # of a step that a value may be off, by a rounding since


@dataclass(frozen=True, slots=True)
class Stored:
    """A grid that weights lie on: groups of `group_size` columns, each of at most 2^bits evenly spaced values."""

    bits: int
    group_size: int


def stored_grid(weight: Float[Tensor, "N K"]) -> Stored | None:
    """The grid of the widest groups; None of weights that are on none."""
    N, K = weight.shape
    rows = weight[torch.linspace(0, N - 1, min(N, ROWS)).round().long().unique()].float()
    for size in GROUPS:
        if size <= K and (steps := _steps(rows[:, : K // size * size].reshape(-1, size))) is not None:
            return Stored(max(1, steps.bit_length()), size)
    return None


def _steps(groups: Float[Tensor, "G C"]) -> int | None:
    """The most steps between the least and the greatest value of a group; None if too many are on no grid."""
    values = groups.sort(1).values
    span = values[:, -1] - values[:, 0]
    gaps = values.diff(dim=1)
    least = torch.where(gaps > 0, gaps, torch.inf).amin(1)
    some = span > 0
    if not bool(some.any()):
        return None
    near = (gaps > 0) & (gaps < 1.5 * least[:, None])  # roundings since make some of them narrower
    step = torch.where(near, gaps, 0).sum(1) / near.sum(1)
    values, span, step = values[some], span[some], step[some]
    on, most = torch.zeros_like(span, dtype=torch.bool), torch.zeros_like(span)
    for parts in (1, 2, 3):  # the narrowest gap may be more than one step
        steps = (parts * span / step).round()
        place = (values - values[:, :1]) * (steps / span)[:, None]
        fits = ~on & ((place - place.round()).abs().amax(1) < NEAR) & (steps < 2**MOST_BITS)
        on, most = on | fits, torch.where(fits, steps, most)
    return int(most.max()) if float(on.float().mean()) >= SHARE else None


def most_common(found: Iterable[Stored | None]) -> tuple[Stored | None, int]:
    """(the grid of most weights, how many are on it)."""
    each = [grid for grid in found if grid is not None]
    grid = max(dict.fromkeys(each), key=each.count, default=None)
    return grid, 0 if grid is None else each.count(grid)
