"""Intervals over prompts. Every number of a table that has one gets it here.

The interval is a paired bootstrap: prompts are drawn with replacement, all columns of a prompt together. It is the
expanded percentile interval (Hesterberg 2014, arXiv 1411.5279): the percentile one at the level
1 - 2Φ(-√(n/(n-1)) t(0.975, n-1)), since the plain one is too narrow for few prompts. In 3,000 simulated ratios of
lognormal times, the truth lay in it in 0.92, 0.94 and 0.95 of the cases at n = 5, 10 and 20; in the plain percentile
interval in 0.83, 0.89 and 0.92, in BCa's in 0.82, 0.88 and 0.91. BCa, besides, has no value where all prompts agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
from jaxtyping import Num

LEAST = 5  # prompts; no interval under that
RESAMPLES = 9_999
BATCH = 1_000  # resamples held in memory at once

Column = Num[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value over `n` prompts with its 95 % interval. Null where undefined; no bounds under 5 prompts."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def ratio_interval(numerator: Column, denominator: Column) -> Interval:
    """Σ numerator ÷ Σ denominator, a ratio of sums, never a mean of ratios."""
    return _interval(lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), numerator, denominator)


def speedup_interval(baseline_seconds: Column, baseline_tokens: Column, seconds: Column, tokens: Column) -> Interval:
    """Seconds per token of the baseline ÷ those of the strategy, each a ratio of sums over the same prompts."""
    return _interval(
        lambda a, b, c, d, axis=-1: (a.sum(axis) * d.sum(axis)) / (b.sum(axis) * c.sum(axis)),
        baseline_seconds, baseline_tokens, seconds, tokens,
    )  # fmt: skip


def mean_interval(values: Column) -> Interval:
    """The mean of a value that each prompt has, such as a score."""
    return _interval(lambda a, axis=-1: a.mean(axis), values)


def _interval(statistic: Callable[..., Any], *columns: Column) -> Interval:
    from scipy.stats import bootstrap, norm, t  # half a second, so not with the module

    n = len(columns[0])
    if n == 0:
        return Interval(None, None, None, 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # a denominator that sums to 0: undefined, so null
        value = _finite(statistic(*columns))
        if n < LEAST or value is None:
            return Interval(value, None, None, n)
        level = 1 - 2 * norm.cdf(-sqrt(n / (n - 1)) * t.ppf(0.975, n - 1))
        bounds = bootstrap(
            columns,
            statistic,
            paired=True,
            vectorized=True,
            method="percentile",
            confidence_level=level,
            n_resamples=RESAMPLES,
            batch=BATCH,
            rng=np.random.default_rng(0),
        ).confidence_interval
    low, high = _finite(bounds.low), _finite(bounds.high)
    return Interval(value, None, None, n) if low is None or high is None else Interval(value, low, high, n)


def _finite(value: Any) -> float | None:
    return float(value) if isfinite(value) else None
