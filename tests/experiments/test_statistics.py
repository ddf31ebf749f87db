import numpy as np
import pytest

from decodelab.experiments.statistics import Interval, mean_interval, ratio_interval, speedup_interval


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
