"""What is emitted has the target's law: all draws are enumerated, so nothing is left to chance but rounding."""

from collections import defaultdict
from collections.abc import Hashable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from decodelab.decoding.acceptance import Sampling
from decodelab.decoding.acceptance.sampling import residual
from decodelab.decoding.draft import Draft, Room, chain
from decodelab.decoding.law import Processors
from decodelab.decoding.noise import Noise
from decodelab.tests.enumeration import outcomes, total_variation, unchecked
from decodelab.tests.rigged import State, drawn
from decodelab.tests.tables import BIASED, EXACT, PROMPT, bias, one_hot, plainly, step, table


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("V", "widths"), [(8, (1,)), (4, (3,)), (3, (1, 1, 1)), (3, (2, 1)), (2, (2, 2))])
def test_drawn_candidates_keep_the_law(
    monkeypatch: pytest.MonkeyPatch, V: int, widths: tuple[int, ...], replace: bool
) -> None:
    """p ≠ q, one or several siblings, with and without replacement, chains and trees; the joint law of all tokens."""
    plan = drawn(table(7, V), widths, replace=replace)
    assert bias(monkeypatch, plan, table(1, V), n=len(widths) + 1) < EXACT


def test_two_drafted_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joint law of three tokens whose every step is drafted."""
    p, plan, rule = table(2, 3), drawn(table(9, 3), (1, 1)), Sampling()

    def run() -> tuple[int, ...]:
        tokens = PROMPT
        while len(tokens) < 4:
            tokens += step(rule, plan, p, tokens, 4 - len(tokens))
        return tokens[1:]

    assert total_variation(outcomes(monkeypatch, run), plainly(rule, p, (), 3)) < EXACT


def test_a_drafter_that_equals_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """jaymody/speculative-sampling#5: p = q leaves no residual."""
    p = table(3, 4)
    assert bias(monkeypatch, drawn(p, (1, 1)), p, n=3) < EXACT
    found = outcomes(monkeypatch, lambda: len(step(Sampling(), drawn(p, (1, 1)), p, PROMPT, 9)))
    assert found[3] == pytest.approx(1, abs=EXACT)


def test_no_residual_is_nan() -> None:
    """jaymody/speculative-sampling#5, transformers#28508: nothing left, a speck left, all left."""
    p = torch.tensor([0.5, 0.25, 0.25])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.tensor([0.5, 0.25 - 2**-25, 0.25 + 2**-25])), torch.tensor([0.0, 1.0, 0.0]))
    tiny = torch.tensor([1e-45, 0.5, 0.5])
    assert residual(tiny, torch.tensor([0.0, 0.5, 0.5])).isfinite().all()
    # plain normalising, no softmax: [.2, .1] becomes [2/3, 1/3]
    got = residual(torch.tensor([0.6, 0.4, 0.0]), torch.tensor([0.4, 0.3, 0.3]))
    torch.testing.assert_close(got, torch.tensor([2 / 3, 1 / 3, 0.0]))


def test_at_a_temperature_near_zero_nothing_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """jaymody/speculative-sampling#5: identical models at temperature 1e-6."""
    rule, p = Sampling(temperature=1e-6), table(4, 4)

    def q(tokens: tuple[int, ...]) -> Tensor:
        return torch.softmax(p(tokens).log() / 1e-6, -1)

    assert bias(monkeypatch, drawn(q, (1, 1)), p, n=3, rule=rule) < EXACT


@pytest.mark.parametrize(
    ("p", "q"), [([0.6, 0.4], [0.8, 0.2]), ([0.2, 0.3, 0.5], [0.5, 0.5, 0.0]), ([0, 0.3, 0.7], [0.9, 0.1, 0])]
)
def test_supports_that_differ(monkeypatch: pytest.MonkeyPatch, p: list[float], q: list[float]) -> None:
    """A token that p forbids is never kept, one that q never draws is emitted all the same."""
    target, draft = torch.tensor(p), torch.tensor(q)
    assert bias(monkeypatch, drawn(lambda _: draft, (1,)), lambda _: target, n=2) < EXACT
    assert bias(monkeypatch, drawn(lambda _: draft, (2,)), lambda _: target, n=2) < EXACT


def test_one_hot_candidates_keep_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#32867, dflash#74, EAGLE#93: whatever picks them, the likeliest or the least likely."""
    p = table(5, 4)
    for descending in (True, False):
        for width in (1, 2, 4):
            plan = one_hot(lambda t, w=width, d=descending: p(t).argsort(descending=d)[:w].tolist(), depth=2)
            assert bias(monkeypatch, plan, p, n=3) < EXACT


def test_a_one_hot_candidate_is_kept_as_often_as_the_target_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#40551: E[accepted] is p(d) for a one-hot d; nothing is won by drawing again (p = [.6, .3, .1], d = 1)."""
    p = torch.tensor([0.6, 0.3, 0.1])
    found = outcomes(monkeypatch, lambda: step(Sampling(), lambda *_: chain([1]), lambda _: p, PROMPT, 9))
    lengths = {n: sum(w for run, w in found.items() if len(run) == n) for n in (1, 2)}  # type: ignore[arg-type]
    assert lengths == {1: pytest.approx(0.7), 2: pytest.approx(0.3)}
    first = {t: sum(w for run, w in found.items() if run[0] == t) for t in range(3)}  # type: ignore[index]
    assert first == {t: pytest.approx(x) for t, x in enumerate([0.6, 0.3, 0.1])}


@pytest.mark.parametrize("replace", [False, True])
def test_drawn_and_one_hot_siblings_together(monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    plan = drawn(table(8, 3), (1, 1), replace=replace, fixed=(2, 0))
    assert bias(monkeypatch, plan, table(6, 3), n=3) < EXACT
    plan = drawn(table(8, 3), (2,), replace=replace, fixed=(1,))
    assert bias(monkeypatch, plan, table(6, 3), n=2) < EXACT


@pytest.mark.parametrize(
    "rule",
    [
        Sampling(temperature=0.5),
        Sampling(top_k=2),
        Sampling(top_p=0.5),
        Sampling(min_p=0.4),
        Sampling(temperature=1.7, repetition_penalty=1.4, frequency_penalty=0.6, no_repeat_ngram=2),
    ],
)
def test_the_law_is_the_processed_one(monkeypatch: pytest.MonkeyPatch, rule: Sampling) -> None:
    """vllm#9834, vllm#10198, transformers#47932: top-k 2, a nucleus, penalties; a draft with settings of its own."""
    p = table(10, 6)
    hot = drawn(table(11, 6, sharp=0.7), (1,))
    assert bias(monkeypatch, hot, p, n=2, rule=rule) < EXACT
    processors = Processors.build(rule.law(), len(PROMPT), ())

    def same_settings(tokens: tuple[int, ...]) -> Tensor:
        return torch.softmax(processors.scores(table(12, 6)(tokens).log(), tokens), -1)

    assert bias(monkeypatch, drawn(same_settings, (1, 1)), p, n=3, rule=rule) < EXACT
    found = outcomes(monkeypatch, lambda: step(rule, hot, p, PROMPT, 1)[0])
    allowed = torch.isfinite(processors.scores(p(PROMPT).log(), PROMPT))
    assert {t for t, w in found.items() if w > 0} == set(allowed.nonzero()[:, 0].tolist())


def test_these_tests_see_a_dishonest_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#32867, vllm#40149, jaymody/speculative-sampling#3: an argmax that is passed off as drawn;
    vllm-ascend#13730: a token that q never draws, which any u accepts; transformers#47932: raw q, drawn by top-k.
    """
    soft = torch.tensor([0.8, 0.2])

    def argmax_with_soft_q(state: State, room: Room, noise: Noise) -> Draft:
        return chain([0], soft[None])

    def p(tokens: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.6, 0.4])

    found = outcomes(monkeypatch, lambda: step(Sampling(), argmax_with_soft_q, p, PROMPT, 2)[0])
    assert found == {0: pytest.approx(0.75), 1: pytest.approx(0.25)}  # the honest law is [.6, .4]

    def never_drawn(state: State, room: Room, noise: Noise) -> Draft:
        return chain([0], torch.tensor([[0.0, 1.0]]))

    assert bias(monkeypatch, never_drawn, p, n=2) > BIASED

    raw, rule = table(13, 8), Sampling(top_k=2)
    top = Processors.build(rule.law(), 1, ())

    def raw_q(state: State, room: Room, noise: Noise) -> Draft:
        draft = drawn(lambda t: torch.softmax(top.scores(raw(t).log(), t), -1), (1,))(state, room, noise)
        return chain(draft.tokens, raw(tuple(state.tokens))[None])

    assert bias(monkeypatch, raw_q, table(14, 8), n=2, rule=rule) > BIASED


def test_these_tests_see_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings without replacement need a q that shrinks; transformers#28508: the residual through a softmax."""
    p, q = table(15, 4), table(16, 4)

    def first_q_for_all(state: State, room: Room, noise: Noise) -> Draft:
        draft = drawn(q, (2,))(state, room, noise)
        return Draft(draft.tokens, draft.parents, draft.q, (0, 0), draft.judged, draft.source)

    assert bias(monkeypatch, first_q_for_all, p, n=2) > BIASED

    def softmax_residual(p: Tensor, q: Tensor) -> Tensor:
        return torch.softmax((p - q).clamp_min(0), -1)

    monkeypatch.setattr("decodelab.decoding.acceptance.sampling.residual", softmax_residual)
    assert bias(monkeypatch, drawn(q, (1,)), p, n=2) > BIASED


def test_noise_as_it_is_gives_the_joint_law_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream of noise repeats another: pairs of tokens over 2,000 seeds, drafted as a tree of drawn candidates."""
    p, plan, rule, n = table(17, 3), drawn(table(18, 3), (2, 1)), Sampling(), 2000
    unchecked(monkeypatch)
    counts: dict[Hashable, int] = defaultdict(int)
    for seed in range(n):
        tokens = PROMPT
        while len(tokens) < 3:
            tokens += step(rule, plan, p, tokens, 3, seed)
        counts[tokens[1:3]] += 1
    want = plainly(rule, p, (), 2)
    assert counts.keys() <= want.keys()
    assert chisquare([counts[pair] for pair in want], [n * x / sum(want.values()) for x in want.values()]).pvalue > 1e-3
