"""What a sweep does with its cells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UserError

VERDICTS = ("exact", "near-tie", "same law", "lossy")  # of exactness; broken is never within a bound


@dataclass(frozen=True, slots=True)
class CellSettings:
    """`timeout`: seconds after which a cell is stopped; null: never."""

    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"cell.timeout={self.timeout}: seconds above 0, or null for none")


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What holds for a sweep as a whole. `output`: its folder; `rerun`: null runs the cells that are not done, stale
    those of another version of the code too, all every cell; `budget_hours`: no cell starts that would not be done by
    then, and one that runs is not stopped."""

    output: str | None = None
    rerun: Literal["stale", "all"] | None = None
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
class Range:
    """Numbers from `low` to `high`, both included, and whole where both are. `log`: 1 to 10 counts like 10 to 100."""

    low: int | float
    high: int | float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        return (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Choices:
    """Values without an order."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class Bound:
    """What a result must be: of `allowed` texts, or a number from `min` to `max`."""

    min: int | float | None = None
    max: int | float | None = None
    allowed: tuple[str, ...] | None = None

    def excess(self, found: Any) -> float:
        """How far it is out of bounds; 0 and less is inside."""
        if self.allowed is not None:
            return float(found not in self.allowed)
        below = [] if self.min is None else [self.min - found]
        above = [] if self.max is None else [found - self.max]
        return float(max(below + above))


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The best values of a few keys, looked for by optuna.

    `space`: key -> [low, high], {low, high, log: true}, or a list of choices (texts, or more than two values;
    {choices: [4, 8]} says so of two numbers). `objective`: where a number stands in result.json, or
    quality/TASK/METRIC. `bound`: the same names -> {min, max}, and exactness -> the verdicts that are allowed.
    """

    space: Mapping[str, Any]
    trials: int = 20
    objective: str = "speedup.value"
    maximise: bool = True
    bound: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UserError(f"search.trials={self.trials}: at least 1")
        if not self.space:
            raise UserError("search.space is empty: name keys and their ranges, {drafting.max_draft: [2, 32]}")
        self.dimensions()
        for name in (self.objective, *self.bounds()):
            if name.startswith("quality/") and name.count("/") < 2:
                raise UserError(f"search: {name} is no number of a task: quality/TASK/METRIC")

    def dimensions(self) -> dict[str, Range | Choices]:
        return {key: _dimension(f"search.space.{key}", value) for key, value in self.space.items()}

    def bounds(self) -> dict[str, Bound]:
        return {name: _bound(name, value) for name, value in (self.bound or {}).items()}


def _dimension(key: str, value: Any) -> Range | Choices:
    log = False
    if isinstance(value, Mapping):
        if set(value) == {"choices"} and isinstance(value["choices"], list):
            return _choices(key, value["choices"])
        if not {"low", "high"} <= set(value) <= {"low", "high", "log"} or not isinstance(value.get("log", False), bool):
            raise UserError(f"{key} has {', '.join(value)}: a mapping is {{low, high, log: true}} or {{choices: […]}}")
        value, log = [value["low"], value["high"]], value.get("log", False)
    elif not isinstance(value, list):
        raise UserError(f"{key} is {value!r}: give [low, high], or a list of choices")
    elif len(value) != 2 or not all(map(_is_number, value)):
        return _choices(key, value)
    low, high = value
    if not (_is_number(low) and _is_number(high)):
        raise UserError(f"{key} goes from {low!r} to {high!r}: both must be finite numbers")
    if not low < high:
        raise UserError(f"{key} goes from {low} to {high}: low must be below high")
    if log and not low > 0:
        raise UserError(f"{key} goes from {low} with log: low must be above 0")
    return Range(low, high, log)


def _choices(key: str, values: Sequence[Any]) -> Choices:
    if len(values) < 2:
        raise UserError(f"{key} has {'one choice' if values else 'no choices'}: give two or more, or leave it out")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise UserError(f"{key} has a choice twice")
    return Choices(tuple(values))


def _bound(name: str, value: Any) -> Bound:
    at = f"search.bound.{name}"
    if name == "exactness":
        verdicts = value if isinstance(value, list) else [value]
        if not verdicts or not set(verdicts) <= set(VERDICTS):
            raise UserError(f"{at}={value}: one or several of {', '.join(VERDICTS)}")
        return Bound(allowed=tuple(verdicts))
    known = isinstance(value, Mapping) and value and set(value) <= {"min", "max"}
    if not known or not all(map(_is_number, value.values())):
        raise UserError(f"{at}={value}: a number is bound by {{min: 0.4}}, {{max: 0.6}} or both")
    return Bound(**value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
