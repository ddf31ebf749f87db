"""Costs and the theory on top of them, against closed forms, brute force and fixed numbers."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import decodelab.decoding.cost as cost_module
from decodelab.attention.book import Book
from decodelab.attention.paged import PagedCache
from decodelab.decoding.acceptance.greedy import Greedy
from decodelab.decoding.cost import (
    DraftCost,
    Profile,
    acceptance_probability,
    best_gamma,
    break_even_alpha,
    draft_cost,
    expected_tokens,
    explain,
    fit_cost,
    measure_target,
    predict,
    speedup,
)
from decodelab.decoding.draft import EMPTY, Draft, Gives, Needs, chain
from decodelab.decoding.law import LawSettings
from decodelab.decoding.request import request
from decodelab.drafting.none import Nothing
from decodelab.tests.tiny import tiny_decoder


@dataclass
class Count:
    verified: int
    drafted: int
    depth: int
    accepted: int
    emitted: int


def kept(depth: int, accepted: int) -> Count:
    """A step that drafted a chain of `depth` tokens."""
    return Count(1 + depth, depth, depth, accepted, accepted + 1)


FLAT = Profile(0, {1: 1.0, 32: 1.0})  # the paper's: verifying more rows costs nothing
FREE = DraftCost(0.0, 0.0, 0.0)


def test_t_of_k_is_what_was_measured_and_a_line_between():
    profile = Profile(256, {1: 10.0, 2: 9.0, 4: 13.0, 8: 15.0})
    assert [profile.at(k) for k in (1, 2, 4, 8)] == [10.0, 9.0, 13.0, 15.0]
    assert profile.at(3) == 11.0
    assert profile.at(1.5) == 9.5
    assert profile.at(12) == 17.0  # along 4 and 8
    assert profile.ratio(4) == 1.3


def test_more_rows_than_were_measured_never_cost_less_than_the_last():
    """A T(32) that noise put below T(16) must not make 64 rows free."""
    assert Profile(0, {1: 1.0, 16: 3.0, 32: 2.0}).at(64) == 2.0
    assert Profile(0, {1: 1.0}).at(8) == 1.0


def test_times_that_fall_as_rows_are_added_are_doubted():
    busy = "other programs used the cores while T(k) was measured"
    noisy = ": what is predicted from T(k) is noisy; measure it again when quiet"
    even, falling = Profile(0, {1: 1.0, 2: 0.96, 4: 1.3}), Profile(0, {1: 1.0, 4: 0.8, 2: 0.91})
    assert even.doubt(False) is None
    assert even.doubt(True) == busy + noisy
    assert falling.doubt(False) == "T(2) is only 0.91 of T(1)" + noisy
    assert falling.doubt(True) == f"{busy} and T(2) is only 0.91 of T(1)" + noisy


def test_a_profile_needs_the_plain_step():
    with pytest.raises(ValueError, match=r"needs T\(1\).*\[2, 4\]"):
        Profile(0, {2: 1.0, 4: 1.0})
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        FLAT.at(0)


def test_profiling_feeds_every_k_behind_the_context_and_leaves_no_rows(monkeypatch: pytest.MonkeyPatch):
    fed: list[tuple[int, int]] = []
    drop = Book.drop

    def watched(book: Book) -> None:
        if book.staged:
            fed.append((book.length(0), book.staged))
        drop(book)

    monkeypatch.setattr(Book, "drop", watched)
    profile = measure_target(tiny_decoder(), context=20, rows=(1, 3, 8), repeats=2)
    assert profile.context == 20
    assert list(profile.seconds) == [1, 3, 8]
    assert all(s > 0 for s in profile.seconds.values())
    assert fed[0] == (20, 20)  # the context is read and committed
    assert sorted(fed[1:]) == sorted([(20, 1), (20, 3), (20, 8)] * 4)  # two rounds of warming up, two timed
    assert {rows for _, rows in fed[1:4]} == {1, 3, 8}  # taking turns


def test_rows_are_timed_where_they_will_lie(monkeypatch: pytest.MonkeyPatch):
    """In pages, if the run's are: the target's and those that the loop decodes in."""
    target = tiny_decoder()
    pages = PagedCache(target.config.layout, size=4, dtype=target.dtype, device="cpu")
    measure_target(target, context=20, rows=(1, 8), repeats=1, pages=pages)
    assert (pages.peak, pages.pages.used) == (7, 0)  # of 28 rows
    draft_cost(target, Nothing(), Greedy(), [_request([1] * 30, 6)], pages=pages)
    assert (pages.peak, pages.pages.used) == (9, 0)


def test_the_first_rounds_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([100.0, 100.0, 3.0, 1.0, 2.0])
    ticks = (tick for s in seconds for tick in (0.0, s))
    monkeypatch.setattr(cost_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert measure_target(tiny_decoder(), context=3, rows=(1,), repeats=3).seconds == {1: 2.0}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_expected_tokens_by_enumeration(alpha: float, gamma: int):
    total = 0.0
    for outcome in product([True, False], repeat=gamma):
        chance = 1.0
        for kept_token in outcome:
            chance *= alpha if kept_token else 1 - alpha
        accepted = next((i for i, kept_token in enumerate(outcome) if not kept_token), gamma)
        total += chance * (accepted + 1)
    assert expected_tokens(alpha, gamma) == pytest.approx(total)


@pytest.mark.parametrize("c", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_with_flat_t_the_speedup_is_the_papers(gamma: int, c: float):
    alpha = 0.7
    paper = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
    assert speedup(alpha, gamma, FLAT, DraftCost(0.0, c, 0.0)) == pytest.approx(paper)


def test_speedup_counts_rows_drafting_and_the_loop():
    profile = Profile(0, {1: 10.0, 2: 11.0, 3: 13.0})
    cost = DraftCost(step_s=2.0, token_s=1.0, host_s=0.5)
    # 1 + .5 + .25 tokens for 13 + (2 + 2 · 1) + .5, where a plain step takes 10.5
    assert speedup(0.5, 2, profile, cost) == pytest.approx(1.75 * 10.5 / 17.5)
    # a quarter of the steps find nothing: 10 + 2 + .5 for one token
    tokens, spent = 0.75 * 1.75 + 0.25, 0.75 * 17.5 + 0.25 * 12.5
    assert speedup(0.5, 2, profile, cost, share=0.75) == pytest.approx(tokens * 10.5 / spent)
    assert speedup(0.5, 0, profile, cost) == 1.0


def test_best_length_by_brute_force():
    profile = Profile(0, {1: 1.0, 2: 1.02, 4: 1.1, 8: 1.3, 16: 1.9, 32: 3.2})
    for alpha, token_s, step_s in product([0.1, 0.5, 0.8, 0.95], [0.0, 0.1, 0.5], [0.0, 0.2]):
        cost = DraftCost(step_s, token_s, 0.0)
        found = best_gamma(alpha, profile, cost)
        values = [speedup(alpha, gamma, profile, cost) for gamma in range(33)]
        assert values[found] == max(values)
        assert found == values.index(max(values))
    assert best_gamma(0.1, profile, DraftCost(0.0, 0.5, 0.0)) == 0  # better not to draft
    assert best_gamma(0.95, profile, FREE) > best_gamma(0.5, profile, FREE) > 0


def test_break_even_by_closed_form():
    # one candidate, T flat: 1 + α = 1 + c
    assert break_even_alpha(1, FLAT, DraftCost(0.0, 0.4, 0.0)) == pytest.approx(0.4)
    # two: α + α² = 2c
    assert break_even_alpha(2, FLAT, DraftCost(0.0, 0.375, 0.0)) == pytest.approx(0.5)
    # a step's cost counts in the steps that find nothing too: share · α = .1
    assert break_even_alpha(1, FLAT, DraftCost(0.1, 0.0, 0.0), share=0.5) == pytest.approx(0.2)
    assert break_even_alpha(3, FLAT, FREE) == 0.0


def test_no_acceptance_pays_for_a_draft_as_slow_as_the_target():
    assert break_even_alpha(4, FLAT, DraftCost(0.0, 1.01, 0.0)) is None
    assert break_even_alpha(1, Profile(0, {1: 1.0, 2: 2.5}), FREE) is None  # Lookahead#19: T(2) above 2 T(1)


def test_prediction_sums_over_the_steps_as_they_were():
    profile, cost = Profile(0, {1: 10.0, 5: 12.0}), DraftCost(1.0, 0.5, 0.25)
    steps = [kept(4, 4), kept(4, 0), kept(0, 0)]
    spent = (12 + 3 + 0.25) + (12 + 3 + 0.25) + (10 + 1 + 0.25)
    assert predict(profile, cost, steps) == pytest.approx(7 * 10.25 / spent)
    assert predict(profile, FREE, [kept(0, 0)] * 5) == 1.0
    assert predict(profile, cost, []) is None


def test_alpha_is_the_chance_of_the_next_token():
    """Not accepted ÷ drafted: what stands behind a rejection was never judged."""
    assert acceptance_probability([kept(4, 4), kept(4, 0), kept(4, 2), kept(0, 0)]) == pytest.approx(6 / (4 + 1 + 3))
    assert acceptance_probability([kept(0, 0)]) is None


def test_a_path_that_the_stop_rule_cut_was_not_rejected():
    cut = Count(verified=5, drafted=4, depth=4, accepted=2, emitted=2)
    assert acceptance_probability([kept(4, 4), cut]) == 1.0
    assert acceptance_probability([kept(4, 4), kept(4, 2)]) == pytest.approx(6 / 7)


def test_alpha_is_recovered_from_simulated_chains(rng: torch.Generator):
    draws = torch.rand(4000, 5, generator=rng) < 0.65
    steps = [kept(5, int(row.int().cumprod(0).sum())) for row in draws]
    assert acceptance_probability(steps) == pytest.approx(0.65, abs=0.02)


def test_fit_tells_a_step_from_a_token():
    assert fit_cost([1, 2, 4, 4], [3.0, 5.0, 9.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert fit_cost([0, 0, 7], [3.0, 3.0, 3.0]) == pytest.approx((3.0, 0.0))
    # one disturbed step of many does not move it
    assert fit_cost([1] * 5 + [3] * 5, [2.0] * 4 + [90.0] + [4.0] * 5) == pytest.approx((1.0, 1.0))


def test_fit_is_never_negative():
    assert fit_cost([1, 3], [4.0, 2.0]) == pytest.approx((3.0, 0.0))
    assert fit_cost([1, 3], [1.0, 9.0]) == pytest.approx((0.0, 2.8))  # through the origin: (1 + 27) ÷ (1 + 9)


def test_drafts_of_one_length_are_charged_by_the_token():
    """So that longer ones do not seem free."""
    assert fit_cost([4, 4], [8.0, 8.0]) == (0.0, 2.0)
    assert fit_cost([0, 0], [8.0, 8.0]) == (8.0, 0.0)
    assert fit_cost([], []) == (0.0, 0.0)


class Copies:
    """Drafts what fits of three tokens, and notes how many that was."""

    sources = ("copies",)
    needs = Needs()
    gives = Gives("chain", rows=3, depth=3)

    def __init__(self) -> None:
        self.drafted: list[int] = []

    def start(self, requests):
        return [True] * len(requests)

    def propose(self, states, room, noise):
        self.drafted += [r.chain for r in room]
        return [chain([7] * r.chain) if r.chain else EMPTY for r in room]

    def observe(self, states, seen):
        return list(states)

    def finish(self, state) -> None:
        pass


def _request(prompt: list[int], tokens: int):
    return request(prompt, law=LawSettings(), max_new_tokens=tokens, vocab=61, context=512)


def test_the_drafts_cost_is_taken_at_several_lengths():
    drafter = Copies()
    cost = draft_cost(tiny_decoder(), drafter, Greedy(), [_request([1, 2, 3], 30), _request([4, 5], 30)], tokens=9)
    assert set(drafter.drafted) == {1, 2, 3}
    assert cost.step_s >= 0
    assert cost.token_s >= 0
    assert cost.at(3) > 0
    assert cost.host_s > 0


def test_steps_in_which_no_draft_fits_are_no_measure_of_the_drafter(monkeypatch: pytest.MonkeyPatch):
    """The loop does not ask the drafter in the last step; one with a fixed price must not look cheaper for it."""
    steps: list[int] = []
    monkeypatch.setattr(cost_module, "fit_cost", lambda drafted, seconds: (steps.extend(drafted), (0.0, 0.0))[1])

    class Silent(Copies):
        def propose(self, states, room, noise):
            self.drafted += [r.chain for r in room]
            return [Draft()] * len(states)

    drafter = Silent()
    draft_cost(tiny_decoder(), drafter, Greedy(), [_request([1, 2, 3], 6)])
    # six tokens: one from the prefill, five steps, in the last of which nothing fits; three budgets, after a warm-up
    assert steps == [0] * 4 * 3
    assert len(drafter.drafted) == 4 * 4


def test_plain_decoding_drafts_at_no_cost_to_speak_of():
    cost = draft_cost(tiny_decoder(), Nothing(), Greedy(), [_request([1, 2, 3], 6)])
    assert cost.token_s == 0.0
    assert cost.host_s > 0


def test_explained_in_words():
    profile = Profile(256, {1: 0.020, 2: 0.0205, 4: 0.0212, 8: 0.0224})
    cost = DraftCost(step_s=0.0004, token_s=0.0016, host_s=0.0005)
    steps = [kept(4, 1)] * 5 + [kept(4, 0)] * 3 + [kept(4, 4)] + [kept(0, 0)]
    assert explain(profile, cost, steps, measured=1.25) == [
        "1.90 tokens a step, ÷ 1.07 for verifying 4.6 rows, ÷ 1.28 for drafting → predicted 1.39×; measured 1.25×, "
        "unexplained -10 %",
        "verifying: 21.4 ms a step for 4.6 rows, 1.07 × the 20 ms of one row",
        "drafting: 6.16 ms a step for 3.6 tokens (0.4 ms a step and 1.6 ms a token), 30 % of a plain step",
        "the loop's own time: 0.5 ms a step, 2 % of a plain step",
        "break-even: a step costs 1.37 plain ones and pays from 1.37 tokens on; it emits 1.90",
        "α = 0.53 (chance that a drafted token is kept); drafts of 4 pay from α = 0.29 on; "
        "best length at this α: 3 (expected 1.45×)",
    ]


def test_explained_where_nothing_can_pay():
    lines = explain(FLAT, DraftCost(0.0, 1.5, 0.0), [kept(2, 1), kept(2, 2)])
    assert lines[0] == "2.50 tokens a step, ÷ 1.00 for verifying 3 rows, ÷ 4.00 for drafting → predicted 0.62×"
    assert lines[-1] == (
        "α = 0.75 (chance that a drafted token is kept); drafts of 2 cannot pay here, even if every token were kept; "
        "best not to draft"
    )


def test_explained_where_nothing_was_drafted():
    lines = explain(FLAT, DraftCost(0.1, 0.0, 0.0), [kept(0, 0)] * 3)
    assert lines[-1] == "nothing was drafted: a step costs 1.10 plain steps and emits one token"
    assert explain(FLAT, FREE, []) == ["no step followed the first token, so there is nothing to explain"]


def test_trees_are_told_their_break_even_but_no_chain_length():
    tree = Count(verified=7, drafted=6, depth=3, accepted=2, emitted=3)
    lines = explain(FLAT, FREE, [tree])
    assert lines[-1] == "break-even: a step costs 1.00 plain ones and pays from 1.00 tokens on; it emits 3.00"
