"""AWQ (Lin et al., arXiv:2306.00978): columns that large inputs meet are scaled up before rounding, and their inputs
down; then the range of each group is cut where that loses less.

What is minimised is the error of the outputs over all calibration rows, tr((W − Ŵ) H (W − Ŵ)ᵀ) with H the mean of x xᵀ,
where the paper's code looks at a sample of them. So neither step is ever worse than rounding to
nearest on the rows that it was chosen by: the scales tried hold 1, and a cut is weighed with what the row's other
groups lose (the paper's code weighs each group by itself).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from .codes import Codes, Scheme
from .grid import Grid, check_grid, round_to_nearest
from .quantiser import Calibration, Inputs, Overrides, Quantised, Quantiser

_SHARES = tuple(1 - 0.05 * i for i in range(1, 11))  # of a group's range, from 0.95 to 0.5
_LEAST = 1e-4  # of a column's mean, before powers of it are taken
_NOT_FINITE = "its inputs are too large for float32: rounded to nearest"


@dataclass(frozen=True, slots=True)
class AWQ:
    """`grid`: how many powers of the inputs' mean magnitude are tried as scales, 0 among them; `duo`: tried too with
    the weights' magnitude in the denominator; `clip`: cut the ranges. q and k are not cut, as in the paper's code: that
    is said by `overrides`."""

    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    grid: int = 20
    clip: bool = True
    duo: bool = False
    calibration: Calibration = field(default_factory=Calibration)
    overrides: Overrides = field(default_factory=lambda: {"*.q_proj": {"clip": False}, "*.k_proj": {"clip": False}})

    kind: ClassVar[str] = "awq"

    def __post_init__(self) -> None:
        check_grid(self.bits, self.group_size)
        if self.grid < 1:
            raise UserError(f"quantization.grid must be at least 1, got {self.grid}")

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        return []  # a last group may be shorter

    def scale(
        self,
        layers: Sequence[tuple[Quantiser, Float[Tensor, "_ K"]]],
        seen: Inputs,
        feasible: Callable[[Float[Tensor, " K"]], Float[Tensor, " K"]],
    ) -> Float[Tensor, " K"] | None:
        """Of the feasible ones tried, the one with which the layers' outputs, rounded to nearest, lose least: the sum
        over the layers of ‖(W − Ŵ) x‖² / ‖W x‖²."""
        if not bool(torch.isfinite(seen.hessian).all()):
            return None
        sizes = [_squared(weight, seen.hessian).sum() for _, weight in layers]

        def loss(by: Tensor | float) -> float:
            lost = 0.0
            for (q, weight), size in zip(layers, sizes, strict=True):
                back = q.layer(weight * by, None).codes.dequantise() / by
                lost += float(_squared(back - weight, seen.hessian).sum() / size.clamp_min(_tiny(weight)))
            return lost

        best, found = loss(1.0), None
        for by in self._scales(layers, seen):
            by = feasible(by)
            if (lost := loss(by)) < best:
                best, found = lost, by
        return found

    def _scales(
        self, layers: Sequence[tuple[Quantiser, Float[Tensor, "_ K"]]], seen: Inputs
    ) -> Iterator[Float[Tensor, " K"]]:
        """All that are tried but 1. A column whose input was always 0 keeps its scale: nothing speaks for less."""
        alive = seen.magnitude > 0
        if not bool(alive.any()):
            return
        x = _relative(seen.magnitude)
        w = _relative(_column_magnitude(layers)) if self.duo else None
        for share in (i / self.grid for i in range(self.grid)):
            tried = [x**share] if share > 0 else []
            if w is not None:
                tried.append(x**share / w ** (1 - share))
            for by in tried:
                middle = (by[alive].max() * by[alive].min()).sqrt()
                yield torch.where(alive, by / middle, torch.ones_like(by))

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        return Grid(self.bits, self.group_size, self.symmetric).scheme(shape)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        grid = Grid(self.bits, self.group_size, self.symmetric)
        plain = round_to_nearest(weight, grid)
        if seen is None:
            return Quantised(plain)
        if not bool(torch.isfinite(seen.hessian).all()):
            return Quantised(plain, (_NOT_FINITE,))
        return Quantised(cut(weight, plain, grid, seen.hessian) if self.clip else plain)


def cut(weight: Float[Tensor, "N K"], plain: Codes, grid: Grid, hessian: Float[Tensor, "K K"]) -> Codes:
    """`plain`, with the ranges of groups cut: group by group, each row by itself, to the share of the range with which
    the row's output loses least, given what its other groups lose by now."""
    assert plain.zero is not None
    codes, scale, zero = plain.codes.clone(), plain.scale.float(), plain.zero.clone()
    lost = plain.dequantise() - weight
    width = plain.group_size
    for g in range(scale.shape[1]):
        at = slice(g * width, (g + 1) * width)
        group, own = weight[:, at], hessian[at, at]
        others = lost @ hessian[:, at] - lost[:, at] @ own
        best = _squared(lost[:, at], own) + 2 * (lost[:, at] * others).sum(1)
        low, high = group.amin(1), group.amax(1)
        for share in _SHARES:
            s, z = grid.of_range(share * low, share * high)
            c = grid.codes(group, s[:, None], z[:, None])
            error = s[:, None] * (c.float() - z[:, None].float()) - group
            tried = _squared(error, own) + 2 * (error * others).sum(1)
            better = tried < best
            best = torch.where(better, tried, best)
            scale[:, g], zero[:, g] = torch.where(better, s, scale[:, g]), torch.where(better, z, zero[:, g])
            codes[:, at] = torch.where(better[:, None], c, codes[:, at])
            lost[:, at] = torch.where(better[:, None], error, lost[:, at])
    return replace(plain, codes=codes, scale=scale.to(plain.scale.dtype), zero=zero)


def _squared(rows: Float[Tensor, "N C"], hessian: Float[Tensor, "C C"]) -> Float[Tensor, " N"]:
    """The mean over x of (row · x)², of each row."""
    return ((rows @ hessian) * rows).sum(1)


def _column_magnitude(layers: Sequence[tuple[Quantiser, Float[Tensor, "_ K"]]]) -> Float[Tensor, " K"]:
    """The sum over all rows of |w| as a share of the largest of its group."""
    total = torch.zeros_like(layers[0][1][0])
    for q, weight in layers:
        width = q.layer(weight, None).codes.group_size
        groups = weight.abs().split(width, 1)
        total += torch.cat([(g / g.amax(1, keepdim=True).clamp_min(_tiny(g))).sum(0) for g in groups])
    return total


def _relative(magnitude: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """To its mean, so that the scale of the whole does not matter; far from 0 (llm-awq#96)."""
    return (magnitude / magnitude.mean().clamp_min(_tiny(magnitude))).clamp_min(_LEAST)


def _tiny(of: Tensor) -> float:
    return torch.finfo(of.dtype).tiny
