from collections.abc import Iterator
from itertools import product
from math import comb

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from decodelab.experiments.statistics import (
    Interval,
    detectable_flips,
    detectable_mean,
    holm,
    macro_interval,
    mcnemar,
    mean_interval,
    ratio_interval,
    score_interval,
    share_interval,
    sign_flip,
    speedup_interval,
)


def lognormal(seed: int, n: int, sigma: float) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, sigma, n)


def bounds(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


def test_a_constant_ratio_has_an_interval_of_no_width():
    seconds = lognormal(0, 12, 1.0)
    assert ratio_interval(2 * seconds, seconds) == Interval(2.0, 2.0, 2.0, 12)
    assert mean_interval(np.full(5, 0.25)) == Interval(0.25, 0.25, 0.25, 5)


def test_the_ratio_is_of_sums_not_a_mean_of_ratios():
    # Spec-Bench's published harness averages rates: here that would say 5.5
    assert ratio_interval(np.array([10.0, 100.0]), np.array([1.0, 100.0])).value == pytest.approx(110 / 101)


@pytest.mark.parametrize("n", [1, 4])
def test_no_interval_under_five_prompts(n):
    assert ratio_interval(np.arange(1, n + 1), np.full(n, 2)) == Interval((n + 1) / 4, None, None, n)


def test_an_interval_from_five_prompts_on():
    low, high = bounds(ratio_interval(np.arange(1, 6), np.full(5, 2)))
    assert low < 1.5 < high


def test_unknown_is_null_not_zero():
    none = np.zeros(6)
    assert mean_interval(np.zeros(0)) == Interval(None, None, None, 0)
    assert ratio_interval(none, none) == Interval(None, None, None, 6)
    some = np.array([1.0, 0, 0, 0, 0, 0])  # a third of the resamples has no denominator
    assert ratio_interval(np.ones(6), some) == Interval(6.0, None, None, 6)


def test_columns_are_resampled_together():
    seconds = lognormal(1, 40, 1.0)
    ratio = lognormal(2, 40, 0.05)
    low, high = bounds(ratio_interval(seconds * ratio, seconds))
    assert high - low < 0.06
    low, high = bounds(ratio_interval(seconds * ratio, seconds[::-1].copy()))
    assert high - low > 0.3


def test_speedup_is_seconds_per_token_against_seconds_per_token():
    # twice the tokens in the same time, prompt by prompt: a speedup of 2 although the seconds are equal
    seconds, tokens = lognormal(3, 8, 0.5), np.arange(10, 18)
    assert speedup_interval(seconds, tokens, seconds, 2 * tokens) == Interval(2.0, 2.0, 2.0, 8)
    # with equal tokens it is the ratio of the seconds
    slower = seconds * lognormal(4, 8, 0.3)
    same = np.full(8, 48)
    got, want = speedup_interval(slower, same, seconds, same), ratio_interval(slower, seconds)
    assert (got.value, got.low, got.high) == pytest.approx((want.value, want.low, want.high))


def test_the_interval_is_reproducible_whatever_the_global_seed():
    a, b = lognormal(5, 9, 0.4), lognormal(6, 9, 0.4)
    first = ratio_interval(a, b)
    np.random.seed(7)
    assert ratio_interval(a, b) == first


def test_the_mean_agrees_with_the_normal_interval_for_many_prompts():
    values = np.random.default_rng(0).normal(3, 1, 400)
    half = 1.96 * values.std(ddof=1) / 20
    assert bounds(mean_interval(values)) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_ten_prompts_cover_the_truth_as_often_as_promised():
    # E[Σ a] ÷ E[Σ b] = E[ratio], as ratio and b are independent. The plain percentile interval covers 0.89 here.
    rng, trials, n = np.random.default_rng(0), 1000, 10
    truth, covered = np.exp(0.3 + 0.15**2 / 2), 0
    for _ in range(trials):
        seconds = rng.lognormal(0, 0.5, n)
        low, high = bounds(ratio_interval(seconds * rng.lognormal(0.3, 0.15, n), seconds))
        covered += low <= truth <= high
    assert 0.925 <= covered / trials <= 0.965


def test_columns_of_different_prompts_are_refused():
    with pytest.raises(TypeError, match="denominator"):
        ratio_interval(np.ones(5), np.ones(6))


def pairs(n: int, lost: float, gained: float) -> Iterator[tuple[int, int, float]]:
    """Every outcome (lost, gained) of n pairs of 0/1 scores, with its probability."""
    for b in range(n + 1):
        for c in range(n + 1 - b):
            yield b, c, comb(n, b) * comb(n - b, c) * lost**b * gained**c * (1 - lost - gained) ** (n - b - c)


def score_statistic(lost: int, gained: int, n: int, d: float) -> float:
    """Tango's, with the likelihood maximised by search."""

    def cost(p: float) -> float:
        cells = ((lost, p), (gained, p + d), (n - lost - gained, 1 - 2 * p - d))
        return -sum(k * np.log(max(q, 1e-300)) for k, q in cells if k)

    p = minimize_scalar(cost, bounds=(max(0.0, -d), (1 - d) / 2), method="bounded", options={"xatol": 1e-10}).x
    return (gained - lost - n * d) / np.sqrt(n * (2 * p + d * (1 - d)))


@pytest.mark.parametrize(("lost", "gained", "n"), [(1, 0, 44), (9, 2, 60), (3, 3, 12), (0, 4, 5), (20, 31, 200)])
def test_the_score_interval_ends_where_the_score_test_rejects(lost, gained, n):
    found = score_interval(lost, gained, n)
    low, high = bounds(found)
    assert found.value == (gained - lost) / n
    assert score_statistic(lost, gained, n, low) == pytest.approx(1.95996, abs=1e-3)
    assert score_statistic(lost, gained, n, high) == pytest.approx(-1.95996, abs=1e-3)
    mirrored = score_interval(gained, lost, n)
    assert bounds(mirrored) == pytest.approx((-high, -low))


@pytest.mark.parametrize("n", [5, 133, 5000])
def test_without_a_flip_the_score_interval_still_has_a_width(n):
    z2 = norm.ppf(0.95) ** 2
    assert bounds(score_interval(0, 0, n, 0.90)) == pytest.approx((-z2 / (n + z2), z2 / (n + z2)))


def test_the_score_interval_of_few_or_all_flipped():
    assert score_interval(0, 0, 0) == Interval(None, None, None, 0)
    assert score_interval(1, 3, 4) == Interval(0.5, None, None, 4)
    low, high = bounds(score_interval(0, 6, 6))
    assert 0 < low < high == 1.0
    low, high = bounds(score_interval(6, 0, 6))
    assert -1.0 == low < high < 0


@pytest.mark.parametrize(("lost", "gained"), [(0.0, 0.05), (0.02, 0.02), (0.1, 0.2), (0.4, 0.1)])
def test_the_score_interval_covers_the_truth_as_often_as_promised(lost, gained):
    # by enumeration; the bootstrap's covers 0.78 in the first case, as it has no width where nothing flipped
    covered = 0.0
    for b, c, chance in pairs(30, lost, gained):
        if chance > 1e-9:
            low, high = bounds(score_interval(b, c, 30))
            covered += chance * (low <= gained - lost <= high)
    assert covered > 0.935


def test_mcnemar_is_a_fair_coin_by_hand():
    # 2 (C(11,0) + C(11,1) + C(11,2)) / 2^11
    assert mcnemar(9, 2) == mcnemar(2, 9) == pytest.approx(2 * (1 + 11 + 55) / 2**11)
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0  # evaluate#795 divides by zero here


def test_paired_scores_are_tested_as_pairs():
    # lm-eval#3831, lm-eval#3868: of 220 items the unpaired z of lm-eval's script says 0.080, the paired test 0.008
    n, both, lost, gained = 220, 110, 12, 30
    here, there = (both + gained) / n, (both + lost) / n
    z = (here - there) / np.sqrt((here * (1 - here) + there * (1 - there)) / (n - 1))
    assert round(2 * norm.sf(z), 3) == 0.080
    assert round(mcnemar(lost, gained), 3) == 0.008
    assert score_interval(lost, gained, n).low > 0


def test_sign_flips_are_all_enumerated_for_few_differences():
    changes = np.array([0.3, -0.1, 0.25, 0.0, 0.4, 0.0, -0.05, 0.2])
    signs = np.array(list(product((1, -1), repeat=8)))
    means = np.abs((signs * changes).mean(1))
    assert sign_flip(changes) == pytest.approx((means >= abs(changes.mean()) - 1e-12).mean())
    assert sign_flip(np.zeros(9)) == 1.0
    assert sign_flip(np.array([0.0, 0.3])) == 1.0  # either sign, alike


def test_sign_flips_of_strata_weigh_tasks_alike():
    small, large = np.full(2, 1.0), np.tile([1.0, -1.0], 4)
    signs = np.array(list(product((1, -1), repeat=10)))
    means = np.abs((signs[:, :2] * small).mean(1) + (signs[:, 2:] * large).mean(1))
    assert sign_flip(small, large) == pytest.approx((means >= 1 - 1e-12).mean())


def test_sign_flips_of_zeros_and_ones_are_mcnemar():
    changes = np.array([-1.0] * 9 + [1.0] * 2 + [0.0] * 30)
    assert sign_flip(changes) == pytest.approx(mcnemar(9, 2))


def test_many_sign_flips_agree_with_the_t_test():
    from scipy.stats import ttest_1samp

    changes = np.random.default_rng(3).normal(0.3, 1, 60)
    assert sign_flip(changes) == pytest.approx(ttest_1samp(changes, 0).pvalue, abs=0.01)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@pytest.mark.parametrize(("n", "flipped"), [(6, 0), (20, 0), (20, 5), (30, 12)])
def test_the_detectable_difference_is_found_four_times_in_five(n, flipped):
    difference = detectable_flips(n, flipped)
    assert difference is not None
    share = max(flipped / n, difference)
    lost, gained = (share - difference) / 2, (share + difference) / 2
    outcomes = pairs(n, lost, gained)
    power = sum(chance for b, c, chance in outcomes if c > b and mcnemar(b, c) < 0.05)
    assert power == pytest.approx(0.8, abs=1e-6)


def test_the_detectable_difference_agrees_with_connor_for_many_pairs():
    n, share, a, b = 4000, 0.1, norm.ppf(0.975), norm.ppf(0.8)
    connor = np.sqrt(share) * (a * np.sqrt(n) + b * np.sqrt(n - a**2 + b**2)) / (n + b**2)
    assert detectable_flips(n, 400) == pytest.approx(connor, rel=0.02)


def test_what_no_test_can_find():
    assert detectable_flips(0, 0) is None
    assert detectable_flips(5, 2) is None  # 5 flips one way have p = 0.0625
    assert detectable_mean(np.full(9, 0.1)) is None
    assert detectable_mean(np.array([0.1, 0.2])) is None


def test_the_detectable_mean_is_found_four_times_in_five():
    from scipy.stats import ttest_1samp

    rng, n = np.random.default_rng(0), 25
    values = rng.normal(0, 1, n)
    values = (values - values.mean()) / values.std(ddof=1)  # sd 1
    difference = detectable_mean(values)
    found = ttest_1samp(rng.normal(difference, 1, (4000, n)), 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.03)


def test_the_mean_of_tasks_counts_tasks_alike_and_resamples_each_by_itself():
    few, many = np.full(5, 1.0), np.zeros(50)
    # no stratum varies, so neither does their mean; pooled, it would
    assert macro_interval([few, many]) == Interval(0.5, 0.5, 0.5, 55)
    values = lognormal(8, 30, 0.5)
    one, plain = macro_interval([values]), mean_interval(values)
    assert one.value == pytest.approx(plain.value)
    assert bounds(one) == pytest.approx(bounds(plain), abs=0.01)
    few = np.random.default_rng(2).normal(0, 1, 6)
    (low, high), (least, most) = bounds(macro_interval([few])), bounds(mean_interval(few))
    assert high - low == pytest.approx(most - least, rel=0.04)  # as much expanded


def test_the_mean_of_tasks_without_an_interval():
    assert macro_interval([np.ones(9), np.zeros(4)]) == Interval(0.5, None, None, 13)
    assert macro_interval([np.ones(9), np.zeros(0)]) == Interval(None, None, None, 9)
    assert macro_interval([]) == Interval(None, None, None, 0)


def test_the_mean_of_tasks_covers_the_truth_as_often_as_promised():
    rng, trials, covered = np.random.default_rng(1), 400, 0
    for _ in range(trials):
        low, high = bounds(macro_interval([rng.normal(0.2, 1, 6), rng.normal(0.0, 0.5, 20)]))
        covered += low <= 0.1 <= high
    assert 0.92 <= covered / trials <= 0.975


def test_a_90_percent_interval_is_the_narrower_one():
    values = np.random.default_rng(4).normal(0, 1, 400)
    half = 1.645 * values.std(ddof=1) / 20
    assert bounds(mean_interval(values, 0.90)) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_a_share_has_wilsons_interval():
    """All six of six right is no proof of all: Wilson 1927, the textbook's formula."""
    assert share_interval(np.zeros(4)) == Interval(0.0, None, None, 4)
    assert share_interval(np.zeros(0)) == Interval(None, None, None, 0)
    for ones, n in ((0, 6), (6, 6), (3, 10)):
        found = share_interval(np.array([1.0] * ones + [0.0] * (n - ones)))
        z, share = 1.959963984540054, ones / n
        middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
        assert found.value == share
        assert (found.low, found.high) == pytest.approx((middle - half, middle + half))
