"""What a sweep does with its cells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...decoding.errors import UserError


@dataclass(frozen=True, slots=True)
class CellSettings:
    """`timeout`: seconds after which a cell is stopped; null: never."""

    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"cell.timeout={self.timeout}: seconds above 0, or null for none")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What holds for a sweep as a whole. `output`: its folder; `rerun`: null and failed run the cells that are not
    done, stale those of another version of the code too, all every cell; `budget_hours`: no cell starts that would not
    be done by then."""

    output: str | None = None
    rerun: Literal["failed", "stale", "all"] | None = None
    stop_after_failures: int | None = None
    budget_hours: float | None = None

    def __post_init__(self) -> None:
        if self.output is not None and not self.output.strip():
            raise UserError("output is empty; name a folder, or null for one under outputs/")
        if self.stop_after_failures is not None and self.stop_after_failures < 1:
            raise UserError(f"stop_after_failures={self.stop_after_failures}: at least 1, or null for any number")
        if self.budget_hours is not None and not self.budget_hours > 0:
            raise UserError(f"budget_hours={self.budget_hours}: hours above 0, or null for no limit")


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """A search over numeric keys by optuna: `space` maps a key to [low, high] or to a list of values."""

    space: Mapping[str, Any]
    trials: int = 20
    objective: str = "speedup.value"
    maximise: bool = True
    bound: Mapping[str, Any] | None = None
    seed: int = 0
