"""HQQ (Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning Models"): a zero point that is no
integer, moved so that few weights lose much and most lose little. No calibration.

With z = s · q + shift, the sum of |w − z|^p, p < 1, is brought down by turns: the codes q are the nearest, e takes the
large errors out of w − z, and shift becomes the mean of w − e − s · q. It departs from the authors' code in three
points. Errors are measured in steps of the grid: as weights they are so small that e is 0 throughout, and the norm
without effect. The sum need not fall at every turn: each group keeps its best, and it ends when none moves. And scale
and shift are rounded to what is stored before they are judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from .codes import Codes, Scheme
from .grid import Grid, check_grid
from .quantiser import Calibration, Inputs, Overrides, Quantised

_NORM, _BETA, _KAPPA = 0.7, 10.0, 1.01  # p; β and what it is multiplied by a turn


@dataclass(frozen=True, slots=True)
class HQQ:
    """`iterations`: turns at most."""

    bits: int = 4
    group_size: int = 64
    iterations: int = 20
    overrides: Overrides = field(default_factory=dict)

    kind: ClassVar[str] = "hqq"
    calibration: ClassVar[Calibration | None] = None

    def __post_init__(self) -> None:
        check_grid(self.bits, self.group_size)
        if self.iterations < 1:
            raise UserError(f"quantization.iterations must be at least 1, got {self.iterations}")

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        return []  # a last group may be shorter

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        return replace(Grid(self.bits, self.group_size, symmetric=False).scheme(shape), shift=True)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        N, K = weight.shape
        grid = Grid(self.bits, self.group_size, symmetric=False)
        width = grid.width(K)
        whole = K // width * width
        parts = [self._fit(weight[:, :whole].reshape(-1, width), grid)]
        if whole < K:
            parts.append(self._fit(weight[:, whole:], grid))
        codes, scale, shift = (torch.cat([part.view(N, -1) for part in each], 1) for each in zip(*parts, strict=True))
        kind = grid.scale_dtype
        return Quantised(Codes(codes, scale.to(kind), self.bits, width, shift=shift.to(kind)))

    def _fit(self, w: Float[Tensor, "M C"], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scale, shift) of one group a row."""
        low = w.amin(1, keepdim=True)
        scale = grid.of_range(torch.zeros_like(low), w.amax(1, keepdim=True) - low)[0]

        def stored(shift: Tensor) -> Tensor:
            most = torch.finfo(grid.scale_dtype).max
            return shift.clamp(-most, most).to(grid.scale_dtype).to(w.dtype)

        shift = kept = stored(low)
        least = torch.full_like(low, torch.inf)
        beta = _BETA
        for _ in range(self.iterations):
            codes = self._nearest(w, scale, shift, grid)
            error = (w - shift) / scale - codes
            loss = error.abs().pow(_NORM).sum(1, keepdim=True)
            better = loss < least
            least, kept = torch.where(better, loss, least), torch.where(better, shift, kept)
            moved = stored((w - scale * (shrunk(error, beta) + codes)).mean(1, keepdim=True))
            if torch.equal(moved, shift):
                break
            shift, beta = moved, beta * _KAPPA
        return self._nearest(w, scale, kept, grid).to(torch.uint8), scale, kept

    @staticmethod
    def _nearest(w: Tensor, scale: Tensor, shift: Tensor, grid: Grid) -> Tensor:
        return ((w - shift) / scale).round().clamp(0, grid.top)


def shrunk(error: Float[Tensor, "..."], beta: float) -> Float[Tensor, "..."]:
    """The errors that are large, less what a p-norm takes from them: sign(x) · max(0, |x| − |x|^(p − 1) / β)."""
    size = error.abs()
    return error.sign() * (size - size.pow(_NORM - 1) / beta).clamp_min(0)
