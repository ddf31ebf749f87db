"""Intervals over prompts, and tests of one run's items against another's. Every number of a table that has an interval
gets it here.

The interval is a paired bootstrap: prompts are drawn with replacement, all columns of a prompt together. It is the
expanded percentile interval (Hesterberg 2014, arXiv 1411.5279): the percentile one at the level
1 - 2Φ(-√(n/(n-1)) t(0.975, n-1)), since the plain one is too narrow for few prompts. In 3,000 simulated ratios of
lognormal times, the truth lay in it in 0.92, 0.94 and 0.95 of the cases at n = 5, 10 and 20; in the plain percentile
interval in 0.83, 0.89 and 0.92, in BCa's in 0.82, 0.88 and 0.91. BCa, besides, has no value where all prompts agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
from jaxtyping import Num

LEAST = 5  # prompts; no interval under that
RESAMPLES = 9_999
BATCH = 1_000  # resamples held in memory at once
FEWEST = 499  # draws of many values, each of which takes long
ITEMS = 10  # below, draws of items gave a false alarm in one of six runs
WORK = 4_000_000  # values drawn
SIGNIFICANT = 0.05  # two-sided
POWER = 0.8

Column = Num[np.ndarray, " n"]
Stratum = Num[np.ndarray, " _"]  # each of a length of its own


@dataclass(frozen=True, slots=True)
class Interval:
    """A value over `n` prompts with its 95 % interval. Null where undefined; no bounds under 5 prompts."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def ratio_interval(numerator: Column, denominator: Column, level: float = 0.95) -> Interval:
    """Σ numerator ÷ Σ denominator, a ratio of sums, never a mean of ratios."""
    return _interval(lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), numerator, denominator, level=level)


def speedup_interval(baseline_seconds: Column, baseline_tokens: Column, seconds: Column, tokens: Column) -> Interval:
    """Seconds per token of the baseline ÷ those of the strategy, each a ratio of sums over the same prompts."""
    return _interval(
        lambda a, b, c, d, axis=-1: (a.sum(axis) * d.sum(axis)) / (b.sum(axis) * c.sum(axis)),
        baseline_seconds, baseline_tokens, seconds, tokens,
    )  # fmt: skip


def mean_interval(values: Column, level: float = 0.95) -> Interval:
    """The mean of a value that each prompt has, such as a score."""
    return _interval(lambda a, axis=-1: a.mean(axis), values, level=level)


def share_interval(values: Column) -> Interval:
    """The mean of 0/1 values, with Wilson's score interval: where all agree, a bootstrap has no width."""
    from scipy.stats import binomtest

    n, ones = len(values), int(values.sum())
    if n < LEAST:
        return Interval(ones / n if n else None, None, None, n)
    bounds = binomtest(ones, n).proportion_ci(method="wilson")
    return Interval(ones / n, float(bounds.low), float(bounds.high), n)


def macro_interval(strata: Sequence[Stratum], level: float = 0.95) -> Interval:
    """The mean of the strata's means, each stratum resampled by itself; n counts all values.

    As for one stratum the percentiles are expanded: deviations of a stratum's mean by √(n/(n-1)), and Student's t for
    the normal law, of Welch's degrees of freedom. No interval where a stratum has fewer than 5 values.
    """
    from scipy.stats import norm, t

    n = sum(map(len, strata))
    if not n or not all(map(len, strata)):
        return Interval(None, None, None, n)
    means = [float(values.mean()) for values in strata]
    value = float(np.mean(means))
    if min(map(len, strata)) < LEAST:
        return Interval(value, None, None, n)
    rng = np.random.default_rng(0)
    drawn = np.zeros(RESAMPLES)
    for values, mean in zip(strata, means, strict=True):
        k = len(values)
        for first in range(0, RESAMPLES, BATCH):
            some = slice(first, first + BATCH)
            picked = values[rng.integers(k, size=(len(drawn[some]), k))]
            drawn[some] += (mean + (picked.mean(1) - mean) * sqrt(k / (k - 1))) / len(strata)
    errors = np.array([values.var(ddof=1) / len(values) for values in strata])
    spread = float((errors**2 / [len(values) - 1 for values in strata]).sum())
    tail = norm.cdf(t.ppf((1 - level) / 2, errors.sum() ** 2 / spread if spread else n - len(strata)))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value, float(low), float(high), n)


def score_interval(lost: int, gained: int, n: int, level: float = 0.95) -> Interval:
    """(gained − lost) ÷ n, of n pairs of 0/1 scores, with Tango's interval (1998, Statistics in Medicine 17:891).

    It holds the differences that the score test does not reject, so it has a width where nothing, or little, flipped:
    without a flip it reaches z²/(n + z²). A bootstrap of pairs without flips has none, and says that all is proven.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    if n < LEAST:
        return Interval((gained - lost) / n if n else None, None, None, n)
    z = norm.ppf((1 + level) / 2)
    edge = 1 - 1e-12
    low = brentq(lambda d: _tango(lost, gained, n, d) - z, -edge, edge) if lost < n else -1.0
    high = brentq(lambda d: _tango(lost, gained, n, d) + z, -edge, edge) if gained < n else 1.0
    return Interval((gained - lost) / n, float(low), float(high), n)


def _tango(lost: int, gained: int, n: int, d: float) -> float:
    """The score statistic of the hypothesis that the difference is d. P(lost) is the likeliest under it."""
    linear = -(gained + lost) + (2 * n - gained + lost) * d
    p_lost = (sqrt(max(0.0, linear**2 + 8 * n * lost * d * (1 - d))) - linear) / (4 * n)
    return (gained - lost - n * d) / sqrt(n * max(1e-300, 2 * p_lost + d * (1 - d)))


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact p, two-sided: were the flips a fair coin's?"""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


def sign_flip(*strata: Stratum) -> float:
    """p, two-sided, of the hypothesis that each difference had either sign alike: of their mean, or of the mean of the
    strata's means. Exact up to 13 differences, by 9,999 draws above."""
    from scipy.stats import permutation_test

    weighted = np.concatenate([values / len(values) for values in strata])
    weighted = weighted[weighted != 0]  # a zero has no sign
    if len(weighted) < 2:
        return 1.0
    found = permutation_test(
        (weighted,),
        lambda x, axis=-1: x.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=BATCH,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


@dataclass(frozen=True, slots=True)
class Slice:
    """The slice with the most that is not explained by its size. `share`: of all loss; `size`: of all tokens; `p`: were
    the slices drawn by chance, how often would the worst of them be as bad?"""

    name: str
    share: float
    size: float
    p: float


def worst_slice(losses: Column, sizes: Column, names: Sequence[str], draws: int | None = None) -> Slice | None:
    """Of items, each in the slice that `names` says, with so much loss in so many tokens. Items are drawn anew, since
    tokens of one item are alike; what they lose beyond the mean is taken by its spread at their size, so that a long
    item's may stand in a short one's place. None without loss, with one slice, or of fewer than 10 items."""
    slices, member = np.unique(np.asarray(names), return_inverse=True)
    if len(slices) < 2 or len(losses) < ITEMS or not losses.sum() > 0:
        return None
    share, size = losses / losses.sum(), sizes / sizes.sum()
    spread = _spread(share - size, sizes)
    excess = (share - size) / spread
    one = np.eye(len(slices))[member]
    weighted = spread[:, None] * (one - size @ one)  # what is left of a draw once its own mean is taken away
    rng = np.random.default_rng(0)

    def drawn(some: int) -> Num[np.ndarray, "some n"]:
        return rng.permuted(np.broadcast_to(excess, (some, len(excess))), axis=1)

    return _worst(
        slices, excess @ weighted, lambda some: drawn(some) @ weighted, share @ one, size @ one, draws, len(excess)
    )


def _spread(excess: Column, sizes: Column) -> Column:
    """The standard deviation of an item's excess by its size: tokens scatter by themselves, and with their item."""
    from scipy.optimize import nnls

    if not excess.any():
        return np.ones(len(excess))
    found, _ = nnls(np.stack([np.ones(len(sizes)), sizes], 1), excess**2 / sizes)
    return np.sqrt(sizes * (found[0] + found[1] * sizes))


def worst_step(losses: Column, items: Column, names: Sequence[str], draws: int | None = None) -> Slice | None:
    """Of tokens, each in an item and in the slice that `names` says: what they lose beyond their item's mean is turned
    round within the item, all of it by as many steps, since a token is like the one before it (drawn anew one by one,
    they gave a false alarm in a third of runs). None without loss, or with one slice."""
    slices, member = np.unique(np.asarray(names), return_inverse=True)
    if len(slices) < 2 or not losses.sum() > 0:
        return None
    share = losses / losses.sum()
    _, item = np.unique(items, return_inverse=True)
    excess = share - (np.bincount(item, share) / np.bincount(item))[item]
    order = np.argsort(item, kind="stable")
    one, excess, item = np.eye(len(slices))[member[order]], excess[order], item[order]
    rng = np.random.default_rng(0)
    lengths = np.bincount(item)
    starts = np.cumsum(lengths) - lengths
    place, length, start = np.arange(len(item)) - starts[item], lengths[item], starts[item]

    def drawn(some: int) -> Num[np.ndarray, "some n"]:
        turned = rng.integers(0, lengths, (some, len(lengths)))[:, item]
        return excess[start + (place + turned) % length]

    size = one.mean(0)
    return _worst(slices, excess @ one, lambda some: drawn(some) @ one, share[order] @ one, size, draws, len(excess))


def _worst(
    slices: np.ndarray,
    found: Column,
    drawn: Callable[[int], Num[np.ndarray, "some k"]],
    share: Column,
    size: Column,
    draws: int | None,
    n: int,
) -> Slice:
    """`drawn(some)`: what `found` would have been in so many draws of `n` values."""
    draws = draws or max(FEWEST, min(RESAMPLES, WORK // n))
    worst, beyond, done = int(found.argmax()), 0, 0
    while done < draws:
        some = min(draws - done, max(1, BATCH * BATCH // n))
        beyond += int((drawn(some).max(1) >= found[worst] - 1e-12).sum())
        done += some
    return Slice(str(slices[worst]), float(share[worst]), float(size[worst]), (1 + beyond) / (1 + draws))


def holm(p: Sequence[float]) -> list[float]:
    """Each p corrected for all of them (Holm 1979): under 0.05, at most 1 in 20 such lists holds a false alarm."""
    corrected = [0.0] * len(p)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def detectable_flips(n: int, flipped: int) -> float | None:
    """The smallest difference of 0/1 scores that McNemar's exact test finds in n pairs with 80 % power, at 5 %.

    The share of pairs that flip is taken as observed; where it is smaller than the difference itself (as without any
    flip), all flips go one way. The power is the exact one, a sum over the number of flips (Schork & Williams 1980,
    Communications in Statistics B9:349), not the normal approximation, n = (z √ψ + z' √(ψ − δ²))²/δ² (Connor 1987,
    Biometrics 43:207). None where no difference can be found: under 6 pairs.
    """
    from scipy.optimize import brentq
    from scipy.stats import binom

    m = np.arange(n + 1)
    # the most of m flips that may go the other way: 2 P(Bin(m, ½) ≤ most) ≤ 5 %
    most = binom.ppf(SIGNIFICANT / 2, m, 0.5)
    most -= 2 * binom.cdf(most, m, 0.5) > SIGNIFICANT

    def missing(difference: float) -> float:
        share = max(flipped / n, difference)
        against = (1 - difference / share) / 2
        return float(binom.pmf(m, n, share) @ binom.cdf(most, m, against)) - POWER

    return float(brentq(missing, 1e-9, 1.0)) if n and missing(1.0) > 0 else None


def detectable_mean(values: Column) -> float | None:
    """The smallest mean that a paired t test of so many such differences finds with 80 % power, at 5 %:
    (t(0.975, n − 1) + t(0.8, n − 1)) sd ÷ √n (Cohen 1988, chapter 2). None where the values do not differ."""
    from scipy.stats import t

    n = len(values)
    if n < LEAST or (sd := float(values.std(ddof=1))) == 0:
        return None
    return float((t.ppf(1 - SIGNIFICANT / 2, n - 1) + t.ppf(POWER, n - 1)) * sd / sqrt(n))


def _interval(statistic: Callable[..., Any], *columns: Column, level: float = 0.95) -> Interval:
    from scipy.stats import bootstrap, norm, t  # half a second, so not with the module

    n = len(columns[0])
    if n == 0:
        return Interval(None, None, None, 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # a denominator that sums to 0: undefined, so null
        value = _finite(statistic(*columns))
        if n < LEAST or value is None:
            return Interval(value, None, None, n)
        expanded = 1 - 2 * norm.cdf(-sqrt(n / (n - 1)) * t.ppf((1 + level) / 2, n - 1))
        bounds = bootstrap(
            columns,
            statistic,
            paired=True,
            vectorized=True,
            method="percentile",
            confidence_level=expanded,
            n_resamples=RESAMPLES,
            batch=BATCH,
            rng=np.random.default_rng(0),
        ).confidence_interval
    low, high = _finite(bounds.low), _finite(bounds.high)
    return Interval(value, None, None, n) if low is None or high is None else Interval(value, low, high, n)


def _finite(value: Any) -> float | None:
    return float(value) if isfinite(value) else None
