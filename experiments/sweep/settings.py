"""What a sweep does with its cells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...decoding.errors import UserError


@dataclass(frozen=True, slots=True)
class CellSettings:
    """`timeout`: seconds after which a cell is stopped; null: never."""

    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"cell.timeout={self.timeout}: seconds above 0, or null for none")


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """A search over numeric keys by optuna: `space` maps a key to [low, high] or to a list of values."""

    space: Mapping[str, Any]
    trials: int = 20
    objective: str = "speedup.value"
    maximise: bool = True
    bound: Mapping[str, Any] | None = None
    seed: int = 0
