"""Block verification keeps the law and never keeps less than judging token by token."""

from collections import defaultdict
from collections.abc import Hashable

import pytest
import torch
from scipy.stats import chisquare

from decodelab.decoding import loop
from decodelab.decoding.acceptance import Block, Sampling
from decodelab.decoding.draft import Gives, chain
from decodelab.decoding.noise import Noise
from decodelab.tests.enumeration import outcomes, total_variation, unchecked
from decodelab.tests.rigged import PROMPTS, Rigged, ask, drawn
from decodelab.tests.tables import EXACT, PROMPT, bias, one_hot, plainly, step, table
from decodelab.tests.tiny import tiny_decoder


@pytest.mark.parametrize(("V", "gamma"), [(5, 1), (3, 2), (2, 4)])
def test_drawn_chains_keep_the_law(monkeypatch: pytest.MonkeyPatch, V: int, gamma: int) -> None:
    """The joint law of all tokens of a step and of one token behind it."""
    assert bias(monkeypatch, drawn(table(7, V), (1,) * gamma), table(1, V), n=gamma + 2, rule=Block()) < EXACT


def test_three_steps_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    p, plan, rule = table(2, 2), drawn(table(9, 2), (1, 1)), Block()

    def run() -> tuple[int, ...]:
        tokens = PROMPT
        while len(tokens) < 4:
            tokens += step(rule, plan, p, tokens, 4 - len(tokens))
        return tokens[1:]

    assert total_variation(outcomes(monkeypatch, run), plainly(rule, p, (), 3)) < EXACT


def test_one_hot_chains_and_supports_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    p = table(5, 4)
    for descending in (True, False):
        plan = one_hot(lambda t, d=descending: p(t).argsort(descending=d)[:1].tolist(), depth=2)
        assert bias(monkeypatch, plan, p, n=3, rule=Block()) < EXACT
    forbids, draws = torch.tensor([0, 0.3, 0.7]), torch.tensor([0.9, 0.1, 0])
    assert bias(monkeypatch, drawn(lambda _: draws, (1, 1)), lambda _: forbids, n=3, rule=Block()) < EXACT


def test_the_law_is_the_processed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Block(temperature=0.6, top_k=3)
    assert bias(monkeypatch, drawn(table(11, 5), (1, 1)), table(10, 5), n=3, rule=rule) < EXACT


def accepted(monkeypatch: pytest.MonkeyPatch, rule: Block | Sampling, seed: int) -> float:
    plan = drawn(table(seed, 3), (1, 1, 1))
    found = outcomes(monkeypatch, lambda: len(step(rule, plan, table(seed + 50, 3), PROMPT, 9)) - 1)
    return sum(n * weight for n, weight in found.items())  # type: ignore[misc]


def test_it_keeps_no_less_than_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theorem 2 of the paper: on average at least as many, and here more."""
    pairs = [(accepted(monkeypatch, Block(), s), accepted(monkeypatch, Sampling(), s)) for s in range(4)]
    assert all(block >= token - 1e-9 for block, token in pairs)
    assert max(block - token for block, token in pairs) > 0.01


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_token_that_q_cannot_have_drawn_is_never_kept(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """A draft model whose numbers overflow: the law is the target's all the same."""
    p = table(1, 3)

    def plan(state, room, noise):
        return chain([0, 1], torch.full((2, 3), value))

    found = outcomes(monkeypatch, lambda: step(Block(), plan, p, PROMPT, 3)[0])
    assert [found.get(t, 0.0) for t in range(3)] == pytest.approx(p(PROMPT).tolist(), abs=1e-6)


def test_the_papers_example() -> None:
    """Section 1: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 kept token by token, 11/9 in blocks."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    with pytest.MonkeyPatch.context() as patched:
        for rule, mean in ((Sampling(), 10 / 9), (Block(), 11 / 9)):
            found = outcomes(
                patched, lambda rule=rule: len(step(rule, drawn(lambda _: q, (1, 1)), lambda _: p, PROMPT, 9)) - 1
            )
            assert sum(n * weight for n, weight in found.items()) == pytest.approx(mean, abs=1e-6)  # type: ignore[misc]


def test_noise_as_it_is_gives_the_joint_law_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block keeps depends on tokens behind it, so a later step must draw them anew: with noise that does not
    know where its step began the law of three tokens is biased, with the loop's it is not."""
    V, n = 3, 4000
    p, plan, rule = table(17, V), drawn(table(18, V), (1, 1)), Block()
    unchecked(monkeypatch)

    def law(begins: bool) -> dict[Hashable, int]:
        made = Noise.__init__

        def init(self: Noise, seed: int, request: int, position: int, begin: int | None = None) -> None:
            made(self, seed, request, position, position if begins else None)

        counts: dict[Hashable, int] = defaultdict(int)
        with monkeypatch.context() as patched:
            patched.setattr(Noise, "__init__", init)
            for seed in range(n):
                tokens = PROMPT
                while len(tokens) < 4:
                    tokens += step(rule, plan, p, tokens, 4, seed)
                counts[tokens[1:4]] += 1
        return counts

    want = plainly(rule, p, (), 3)

    def pvalue(counts: dict[Hashable, int]) -> float:
        return chisquare([counts[t] for t in want], [n * x / sum(want.values()) for x in want.values()]).pvalue

    assert pvalue(law(begins=True)) > 1e-3
    assert pvalue(law(begins=False)) < 1e-4


def test_the_loop_says_where_a_step_began() -> None:
    """And a request's output is its own in any batch."""
    noises: list[Noise] = []

    def plan(state, room, noise):
        noises.append(noise)
        return chain([3, 4][: room.chain])

    decoder, rule = tiny_decoder(scale=4.0), Block()
    drafter = Rigged(plan, gives=Gives("chain", 2, 2))
    requests = [ask(p, rule, 8) for p in PROMPTS]
    batch = loop.generate(decoder, requests, drafter, rule, seed=1)
    assert noises
    assert all(noise.begin == noise.position for noise in noises)
    alone = [loop.generate(decoder, [r], drafter, rule, seed=1)[0] for r in requests]
    assert [g.tokens for g in batch] == [g.tokens for g in alone]
