"""The rules that change the law, and by how much they say they do."""

import pytest
import torch

from decodelab.decoding.acceptance import Ensemble, Sampling, Typical, Verdict
from decodelab.decoding.draft import EMPTY, Draft, Room, chain, tree
from decodelab.decoding.law import Law, Processors
from decodelab.decoding.noise import Noise, gumbels
from decodelab.errors import UserError
from decodelab.tests.enumeration import outcomes, unchecked
from decodelab.tests.rigged import State, drawn
from decodelab.tests.tables import EXACT, PROMPT, bias, one_hot, step, table


@pytest.mark.parametrize(("n", "threshold"), [(2, 0.09), (4, 0.0750), (50, 0.0060)])
def test_typical_thresholds_of_uniform_laws(n: int, threshold: float) -> None:
    """Medusa's helper functions swap the two constants (.045, .0225, .0018); the paper's are these."""
    assert Typical().threshold(float(torch.tensor(float(n)).log())) == pytest.approx(threshold, abs=5e-5)


def typical(draft: Draft, *laws: list[float], rule: Typical | None = None) -> Verdict:
    rule = Typical() if rule is None else rule
    logits = torch.tensor(laws).log()
    law = Law(Processors.build(rule.law(), 1, ()), logits, [0], draft.tokens, draft.parents)
    return rule.judge(draft, law, Noise(0, 0, 0))


def test_typical_keeps_what_is_plausible() -> None:
    """H([.8, .1, .1]) = .639 nats: min(.09, .3 e^−.639 = .158) = .09, so .1 is kept and .05 is not."""
    sharp, other = [0.8, 0.1, 0.1, 0.0], [0.85, 0.05, 0.05, 0.05]
    assert typical(chain([1]), sharp, other) == Verdict((0,), 0)
    assert typical(chain([1]), other, sharp) == Verdict((), 0)
    assert typical(EMPTY, sharp) == Verdict((), 0)


def test_the_longest_path_wins_and_ties_go_to_the_likelier() -> None:
    even = [0.3, 0.3, 0.4, 0.0]
    #            0 ─ 1        2
    draft = tree([0, 1, 2], [-1, 0, -1])
    assert typical(draft, even, even, even, even) == Verdict((0, 1), 2)
    assert typical(tree([0, 2], [-1, -1]), even, even, even) == Verdict((1,), 2)
    assert typical(tree([0, 1], [-1, -1]), even, even, even) == Verdict((0,), 2)  # equal: the first


def test_typical_leaves_a_window_alone() -> None:
    even = [0.5, 0.5, 0.0]
    window = Draft((0, 1), (-1, 0), None, (-1, -1), (True, False), (0, 0))
    assert typical(window, even, even, even) == Verdict((0,), 0)


def test_a_sharper_temperature_changes_what_is_plausible() -> None:
    law = [0.85, 0.15, 0.0]
    assert typical(chain([1]), law, law) == Verdict((0,), 0)
    assert typical(chain([1]), law, law, rule=Typical(temperature=0.5)) == Verdict((), 0)  # .15² ÷ (.85² + .15²) = .03


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.0])
def test_an_ensemble_has_the_law_that_it_says(monkeypatch: pytest.MonkeyPatch, weight: float) -> None:
    """Of drawn and of one-hot candidates, one or several behind a row: w p + (1 − w) mean q."""
    p, q = table(1, 4), table(7, 4)
    rule = Ensemble(weight=weight)
    for plan in (drawn(q, (1,)), drawn(q, (2,), replace=True)):
        found = outcomes(monkeypatch, lambda plan=plan: step(rule, plan, p, PROMPT, 2)[0])
        want = weight * p(PROMPT) + (1 - weight) * q(PROMPT)
        assert [found.get(t, 0.0) for t in range(4)] == pytest.approx(want.tolist(), abs=1e-6)
    fixed = one_hot(lambda t: [2, 0], depth=1)
    found = outcomes(monkeypatch, lambda: step(rule, fixed, p, PROMPT, 2)[0])
    want = weight * p(PROMPT) + (1 - weight) * torch.tensor([0.5, 0, 0.5, 0])
    assert [found.get(t, 0.0) for t in range(4)] == pytest.approx(want.tolist(), abs=1e-6)


def test_an_ensemble_has_its_law_whatever_noise_the_drafter_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is coupled to the target chooses by the noise of the target's own draw."""
    unchecked(monkeypatch)
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])

    def coupled(state: State, room: Room, noise: Noise) -> Draft:
        return chain([int((q.log() + gumbels(noise.target(), torch.arange(2))).argmax())])

    n = 4000
    kept = sum(step(Ensemble(weight=0.5), coupled, lambda t: p, PROMPT, 2, seed)[0] == 0 for seed in range(n))
    assert abs(kept / n - 0.7) < 0.03  # four standard deviations


def test_of_siblings_drawn_without_replacement_an_ensemble_mixes_the_first_one_s_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, q = table(1, 4), table(7, 4)
    plan = drawn(q, (2,), replace=False)
    found = outcomes(monkeypatch, lambda: step(Ensemble(weight=0.5), plan, p, PROMPT, 2)[0])
    want = 0.5 * p(PROMPT) + 0.5 * q(PROMPT)
    assert [found.get(t, 0.0) for t in range(4)] == pytest.approx(want.tolist(), abs=1e-6)


def test_of_weight_1_an_ensemble_is_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bias(monkeypatch, drawn(table(7, 3), (1, 1)), table(1, 3), n=3, rule=Ensemble(weight=1.0)) < EXACT
    p = table(3, 4)
    plan = one_hot(lambda t: [1, 2], depth=1)
    for seed in range(20):
        a, b = (step(rule, plan, p, PROMPT, 3, seed) for rule in (Sampling(), Ensemble(weight=1.0)))
        assert a == b


def test_an_ensemble_emits_nothing_that_is_forbidden() -> None:
    """The drafter says so all the same: its law counts over what is left, and where nothing is, p alone does."""
    for draft in (chain([1]), tree([1, 2], [-1, -1])):
        for rule, eos in (
            (Ensemble(weight=0.0, bad_words=((1,),)), ()),
            (Ensemble(weight=0.0, min_new_tokens=2), (1,)),
        ):
            emitted = set()
            for seed in range(20):
                processors = Processors.build(rule.law(), 1, eos)
                law = Law(processors, torch.zeros(1 + len(draft), 3), [0], draft.tokens, draft.parents)
                verdict = rule.judge(draft, law, Noise(seed, 0, 0))
                emitted.add(draft.tokens[verdict.path[0]] if verdict.path else verdict.next)
            assert emitted == ({0, 2} if len(draft) == 1 else {2})


def test_a_q_that_is_no_law_leaves_the_targets_own() -> None:
    draft, rule, seen = chain([0], torch.full((1, 3), torch.nan)), Ensemble(weight=0.5), set()
    for seed in range(20):
        law = Law(Processors.build(rule.law(), 1, ()), torch.zeros(2, 3), [0], draft.tokens, draft.parents)
        verdict = rule.judge(draft, law, Noise(seed, 0, 0))
        assert verdict.path == ()
        seen.add(verdict.next)
    assert seen == {0, 1, 2}


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(UserError, match=r"acceptance.weight must be between 0 and 1, got 1.5"):
        Ensemble(weight=1.5)
    with pytest.raises(UserError, match=r"acceptance.epsilon must be above 0 and at most 1, got 0"):
        Typical(epsilon=0.0)
    with pytest.raises(UserError, match=r"use acceptance=greedy for argmax"):
        Typical(temperature=0.0)
