"""Round to nearest: each weight to the nearest step of its group's range. No calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from .codes import Scheme
from .grid import Grid, check_grid, round_to_nearest
from .quantiser import Calibration, Inputs, Overrides, Quantised


@dataclass(frozen=True, slots=True)
class RTN:
    """Settings; what the keys mean is said in `Grid`."""

    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    clip: bool = False
    overrides: Overrides = field(default_factory=dict)

    kind: ClassVar[str] = "rtn"
    calibration: ClassVar[Calibration | None] = None

    def __post_init__(self) -> None:
        check_grid(self.bits, self.group_size)

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size, self.symmetric, self.clip)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        return []  # a last group may be shorter

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        return self.grid.scheme(shape)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        return Quantised(round_to_nearest(weight, self.grid))
