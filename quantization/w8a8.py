"""Weights and what they are multiplied with in 8 bits: round to nearest, a scale an output; each row of the input is
rounded as it comes, with a scale of its own (LLM.int8 and SmoothQuant call it per token, dynamic). No calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from .codes import Scheme
from .grid import Grid, round_to_nearest
from .quantiser import Calibration, Inputs, Overrides, Quantised


@dataclass(frozen=True, slots=True)
class W8A8:
    """Settings. The grid is symmetric and a scale holds for a whole row: the sums are of integers."""

    clip: bool = False
    overrides: Overrides = field(default_factory=dict)

    kind: ClassVar[str] = "w8a8"
    calibration: ClassVar[Calibration | None] = None
    bits: ClassVar[int] = 8

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        return []

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        return replace(Grid(self.bits, -1, symmetric=True).scheme(shape), activation_bits=8)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        codes = round_to_nearest(weight, Grid(self.bits, -1, symmetric=True, clip=self.clip))
        return Quantised(replace(codes, activation_bits=8))
