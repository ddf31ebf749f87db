"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): a column at a time is rounded, and the columns that are still to come
make up for what its rounding did to the layer's output on the calibration text.

Departures: the Hessian's factor is had from one Cholesky decomposition and no inverse; columns without input are
rounded, not zeroed; a group's scale is made when its first column is reached, of columns that hold all corrections so
far, and so the size of the blocks in which corrections are passed on does not change the codes.

Memory, for a layer [N, K] of up to 8,192 inputs, beside its weight and its Hessian, which are float32: 32 K² bytes for
the factor, which is computed in float64, and then 12 K² and some 28 N K for the columns, in float64 too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import UserError
from .codes import Codes, Scheme
from .grid import Grid, check_grid, round_to_nearest
from .quantiser import Calibration, Inputs, Overrides, Quantised

_DAMPINGS = (0.001, 0.01, 0.1, 1.0)  # that are tried where the one that is asked for is too little
GROUPS = "groups"
_DOUBLE = 8192  # columns up to which a Hessian is decomposed in float64: half a GB


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Settings; what bits, group_size, symmetric and clip mean is said in `Grid`. `act_order`: columns in the order of
    the Hessian's diagonal, the greatest first; `groups`: so within each group of neighbours, and the groups by the sum
    of theirs (GPTQModel's group-aware order; a shorter last group stays last). `static_groups`: the scales are those of
    the weight as it was, and groups are neighbouring columns in any order; else they are made along the way, and with
    act_order=true, groups are neighbours in that order. `clip`: ranges are cut where that loses less, a column's error
    weighing what is left of it once the columns behind it have made up for theirs (the loss of the paper's equation 4).
    `damping`: added to the diagonal, times its mean. `block_size`:
    columns between two updates of all that follow; a matter of speed alone."""

    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    act_order: bool | str = True
    static_groups: bool = True
    damping: float = 0.01
    clip: bool = True
    block_size: int = 128
    overrides: Overrides = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)

    kind: ClassVar[str] = "gptq"
    # Nearly all queries look at the first token of a text (arXiv:2309.17453), which is one row of hundreds: with the
    # weight of one, corrections make its keys and values wrong, which moves every other token. 16 to 512 do alike.
    sink: ClassVar[float] = 32.0

    def __post_init__(self) -> None:
        check_grid(self.bits, self.group_size)
        if not 0 <= self.damping < math.inf:
            raise UserError(f"quantization.damping must be 0 or more, such as 0.01, got {self.damping}")
        if self.block_size < 1:
            raise UserError(f"quantization.block_size must be at least 1, got {self.block_size}")
        if self.act_order not in (True, False, GROUPS):
            raise UserError(f"quantization.act_order must be true, false or {GROUPS}, got {self.act_order!r}")
        sizes = sorted((self.block_size, self.group_size))
        if self.group_size != -1 and sizes[1] % sizes[0]:
            raise UserError(
                f"quantization.block_size={self.block_size} and quantization.group_size={self.group_size}: "
                "one must divide the other, so that no group begins among columns that lack corrections"
            )

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size, self.symmetric, self.clip)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        tokens = self.calibration.tokens // self.calibration.length * self.calibration.length
        wide = {name: K for name, (_, K) in shapes.items() if tokens < K}
        if not wide:
            return []
        name = max(wide, key=lambda name: wide[name])
        return [
            f"quantization.calibration.tokens={self.calibration.tokens} are fewer than the inputs of {len(wide)} "
            f"layers (of {name}: {wide[name]}), which are then fitted to noise: give more"
        ]

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        in_order = self.static_groups or self.act_order is not True or self.grid.width(shape[1]) == shape[1]
        return self.grid.scheme(shape, grouped=not in_order)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        assert seen is not None
        diagonal = seen.hessian.diagonal()
        if not seen.hessian.isfinite().all() or not diagonal.any():
            what = "no input was seen" if not diagonal.any() else "its inputs are not finite"
            return Quantised(round_to_nearest(weight, self.grid), (f"{what}: rounded to nearest",))
        order = self._order(diagonal)
        hessian = seen.hessian[order][:, order]
        for damping in self._dampings():
            factor = inverse_factor(hessian, damping)
            if factor is not None:
                notes = () if damping == self.damping else (f"damping raised from {self.damping} to {damping}",)
                return Quantised(self._codes(weight, factor, order), notes)
        tried = ", ".join(map(str, self._dampings()))
        told = f"the Hessian is not positive definite at a damping of {tried}: rounded to nearest"
        return Quantised(round_to_nearest(weight, self.grid), (told,))

    def _order(self, diagonal: Float[Tensor, " K"]) -> Int[Tensor, " K"]:
        if not self.act_order:
            return torch.arange(len(diagonal), device=diagonal.device)
        if self.act_order is True:
            return torch.argsort(diagonal, descending=True, stable=True)
        width = self.grid.width(len(diagonal))
        groups = diagonal.split(width)
        weights = torch.stack([group.sum() for group in groups])
        if len(groups[-1]) < width:
            weights[-1] = -1  # else the groups behind it would not begin at multiples of the width
        by = torch.argsort(weights, descending=True, stable=True).tolist()
        return torch.cat([g * width + torch.argsort(groups[g], descending=True, stable=True) for g in by])

    def _dampings(self) -> Iterator[float]:
        yield self.damping
        yield from (damping for damping in _DAMPINGS if damping > self.damping)

    def _codes(self, weight: Tensor, factor: Float[Tensor, "K K"], order: Int[Tensor, " K"]) -> Codes:
        """`factor`: of the columns in that order."""
        K, grid = weight.shape[1], self.grid
        width = grid.width(K)
        neighbours = torch.arange(K, device=weight.device) // width
        whole = self.static_groups or self.act_order == GROUPS
        group, scales = neighbours[order] if whole else neighbours, None  # the group of each column, as they come
        if self.static_groups:
            found = round_to_nearest(weight, grid, importance_of(factor)[torch.argsort(order)])
            assert found.zero is not None
            scales = found.scale.float(), found.zero
        codes, scale, zero = compensated(weight[:, order], factor, grid, group, scales, self.block_size)
        back = torch.argsort(order)
        columns = group[back]
        return Codes(
            codes[:, back].contiguous(),
            scale.to(grid.scale_dtype),
            self.bits,
            width,
            zero=zero,
            groups=None if torch.equal(columns, neighbours) else columns.int(),
        )


def inverse_factor(hessian: Float[Tensor, "K K"], damping: float) -> Float[Tensor, "K K"] | None:
    """U, upper triangular, Uᵀ U = (H + damping · I)⁻¹, with H divided by the mean of its diagonal over the columns that
    have any input; the others have a diagonal of 1. None where that is not positive definite.

    Turned about, H = R Rᵀ with R upper triangular, and U = R⁻¹."""
    H = hessian.flip(0, 1).to(torch.float64 if len(hessian) <= _DOUBLE else torch.float32)
    diagonal = H.diagonal()
    H /= diagonal[diagonal > 0].mean()
    diagonal[diagonal == 0] = 1
    diagonal += damping
    turned, failed = torch.linalg.cholesky_ex(H)
    del H, diagonal
    # the Hessian was summed in float32: what is less than that rounds off is noise, not a pivot
    if failed or not bool((turned.diagonal().square() > torch.finfo(torch.float32).eps).all()):
        return None
    eye = torch.eye(len(turned), dtype=turned.dtype, device=turned.device)
    return torch.linalg.solve_triangular(turned, eye, upper=False, out=eye).flip(0, 1)


def importance_of(factor: Float[Tensor, "K K"]) -> Float[Tensor, " K"]:
    """1 / U_kk²: what the squared error of a column costs when all behind it are fitted to it."""
    return factor.diagonal().float().pow(-2)


def compensated(
    weight: Float[Tensor, "N K"],
    factor: Float[Tensor, "K K"],
    grid: Grid,
    group: Int[Tensor, " K"],
    scales: tuple[Float[Tensor, "N G"], Tensor] | None,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K], scale, zero [N, G]) of columns rounded from left to right, all rows at once. Without `scales`, the
    columns of a group are neighbours, and its scale is made of them as its first is reached.

    In float64, where near-ties do not depend on the order of sums, and columns as rows, which lie side by side."""
    N, K = weight.shape
    width = grid.width(K)
    W = weight.T.to(torch.float64).contiguous()
    codes = torch.empty(K, N, dtype=torch.uint8, device=W.device)
    if scales is None:
        scale, zero = W.new_empty(-(-K // width), N), codes.new_empty(-(-K // width), N)
    else:
        scale, zero = scales[0].T.to(W.dtype).contiguous(), scales[1].T.contiguous()
    groups, weighs = group.tolist(), importance_of(factor)
    for start in range(0, K, block_size):
        stop = min(start + block_size, K)
        own = factor[start:stop, start:stop].to(W.dtype)
        lost = W.new_empty(stop - start, N)
        for i, k in enumerate(range(start, stop)):
            g = groups[k]
            if scales is None and k % width == 0:
                scale[g], zero[g] = grid.ranges(W[k : k + width].T.float(), weighs[k : k + width])
            codes[k] = grid.codes(W[k], scale[g], zero[g])
            rounded = scale[g] * (codes[k].to(W.dtype) - zero[g].to(W.dtype))
            lost[i] = (W[k] - rounded) / own[i, i]
            W[k + 1 : stop].addr_(own[i, i + 1 :], lost[i], alpha=-1)
        W[stop:] -= factor[start:stop, stop:].T.to(W.dtype) @ lost
    return codes.T, scale.T.contiguous(), zero.T.contiguous()
