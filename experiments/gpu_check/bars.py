"""What a GPU must show: a number from a section's rows against its bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...kernels.checks import CHECKS

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """`value` of the section's rows (None: they do not say) must be at least or at most `bound`. `skipped`: why there
    may be no rows at all, where that is no failure."""

    name: str
    section: str
    sign: Literal["≥", "≤", ">"]
    bound: float
    value: Callable[[Sequence[Row]], float | None]
    skipped: str | None = None

    def holds(self, value: float) -> bool:
        if self.sign == ">":
            return value > self.bound
        return value >= self.bound if self.sign == "≥" else value <= self.bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed`: None where it was skipped. `reason`: why it does not hold, beside its value."""

    name: str
    section: str
    sign: str
    bound: float
    value: float | None
    passed: bool | None
    reason: str | None = None

    @property
    def line(self) -> str:
        value = "–" if self.value is None else f"{self.value:.3g}"
        why = f" ({self.reason})" if self.reason else ""
        said = "skip" if self.passed is None else "pass" if self.passed else "FAIL"
        return f"{said}  {self.name}: {value}, must be {self.sign} {self.bound:g}{why}"


def judged(bar: Bar, rows: Sequence[Row], failed: str | None) -> Verdict:
    """`failed`: why the section broke off, which fails its bars whatever it had measured until then."""
    if bar.skipped is not None and failed is None and not rows:
        return Verdict(bar.name, bar.section, bar.sign, bar.bound, None, None, bar.skipped)
    value = bar.value(rows)
    passed = failed is None and value is not None and bar.holds(value)
    reason = failed if failed is not None else "nothing was measured" if value is None else None
    return Verdict(bar.name, bar.section, bar.sign, bar.bound, value, passed, reason)


def _most(of: Callable[[Row], float], rows: Sequence[Row], **only: Any) -> float | None:
    return max((of(row) for row in _those(rows, only)), default=None)


def _least(of: Callable[[Row], float], rows: Sequence[Row], **only: Any) -> float | None:
    return min((of(row) for row in _those(rows, only)), default=None)


def _those(rows: Sequence[Row], only: Mapping[str, Any]) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in only.items())]


def _wrong(op: str) -> Callable[[Sequence[Row]], float | None]:
    """Checks that failed; a NaN is no error below its bound."""

    def count(rows: Sequence[Row]) -> float | None:
        mine = _those(rows, {"op": op})
        return float(sum(not row["error"] <= row["bound"] for row in mine)) if mine else None

    return count


def _faster(row: Row) -> float:
    """How many times as fast as the fastest alternative."""
    return min(row["alternatives"].values()) / row["seconds"]


def _compared(rows: Sequence[Row], trees: bool) -> float | None:
    some = [row for row in rows if (row.get("rows", 0) > 1) == trees and row.get("alternatives")]
    return _least(_faster, some)


def _invariance_cost(rows: Sequence[Row]) -> float | None:
    """The step in the row-invariant mode ÷ the step in the fast one, of the model that has both."""
    exact, fast = (_least(lambda row: row["step_s"], rows, mode=mode, model="random") for mode in ("exact", "fast"))
    return None if exact is None or fast is None else exact / fast


BARS = (
    *(Bar(f"{op} is its definition (wrong checks)", "correctness", "≤", 0.0, _wrong(op)) for op in CHECKS),
    Bar(
        "matmul_w4 at 1–16 rows ÷ its bytes at copy bandwidth",
        "matmul",
        "≤",
        1.15,
        lambda rows: _most(lambda row: row["seconds"] / row["floor_s"], rows, bits=4),
    ),
    Bar(
        "verify_attention at one row, times FlashAttention's speed",
        "attention",
        "≥",
        1.0,
        lambda rows: _compared(rows, trees=False),
    ),
    Bar(
        "verify_attention at trees of 8–64 rows over 4k–32k keys, times the fastest alternative's speed",
        "attention",
        ">",
        1.0,
        lambda rows: _compared(rows, trees=True),
    ),
    Bar("prefill, times SDPA's speed", "prefill", "≥", 0.95, lambda rows: _least(_faster, rows)),
    Bar(
        "plain decoding of a bf16 model, of copy bandwidth",
        "model",
        "≥",
        0.85,
        lambda rows: _most(lambda row: row["of_bandwidth"], rows, model="random"),
    ),
    Bar(
        "a replayed step is the launched one to the bit (share of chains)",
        "model",
        "≥",
        1.0,
        lambda rows: _least(lambda row: row["replayed"], rows, mode="exact"),
    ),
    Bar("T(8) ÷ T(1)", "model", "≤", 1.1, lambda rows: _most(lambda row: row["t8"], rows, model="random")),
    Bar(
        "greedy speculation is plain decoding to the bit (share of prompts)",
        "model",
        "≥",
        1.0,
        lambda rows: _least(lambda row: row["exact"], rows, mode="exact"),
    ),
    Bar("a row-invariant step ÷ the fast one", "model", "≤", 1.1, _invariance_cost),
    Bar(
        "a real model's greedy speculation is plain decoding to the bit (share of prompts)",
        "real",
        "≥",
        1.0,
        lambda rows: _least(lambda row: row["exact"], rows, mode="exact"),
        skipped="no model in the cache",
    ),
)
