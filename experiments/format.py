"""Numbers as people read them. What is not known is –."""

from collections.abc import Mapping
from typing import Any


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def size(value: int | float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def interval(found: Mapping[str, Any]) -> str:
    """A speedup with its 95 % interval; with n where there are too few prompts for one."""
    if found["value"] is None:
        return "–"
    if found["low"] is None:
        return f"{found['value']:.2f}× (n={found['n']})"
    return f"{found['value']:.2f}× [{found['low']:.2f}, {found['high']:.2f}]"
