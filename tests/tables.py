"""A step of the loop over a table in place of a model, and the law of what it emits against that of plain draws."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cache

import pytest
import torch
from torch import Tensor

from decodelab.decoding.acceptance import Acceptance, Sampling
from decodelab.decoding.draft import EMPTY, Draft, Room, tree
from decodelab.decoding.law import Law, Processors
from decodelab.decoding.noise import Noise
from decodelab.tests.enumeration import outcomes, total_variation
from decodelab.tests.rigged import Plan, State

PROMPT = (0,)
EXACT = 1e-6  # total variation; p, q and residuals are float32, and a few of them are multiplied
BIASED = 0.01  # what a wrong rule shows at the least

Table = Callable[[tuple[int, ...]], Tensor]


def table(seed: int, V: int, sharp: float = 1.5) -> Table:
    """A law [V] after any tokens, told by the last two of them."""

    @cache
    def law(before: int, last: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * before + last)
        return torch.softmax(sharp * torch.randn(V, generator=generator), -1)

    return lambda tokens: law(*(0, *tokens)[-2:])


def step(rule: Acceptance, plan: Plan, p: Table, tokens: tuple[int, ...], left: int, seed: int = 0) -> tuple[int, ...]:
    """One step of the loop over a table in place of a model: what it emits, `left` tokens at most."""
    emitted = len(tokens) - len(PROMPT)
    state, noise = State(list(tokens), len(PROMPT), 0), Noise(seed, 0, emitted)
    draft = plan(state, Room(left - 1, 99), noise) if left > 1 else EMPTY
    paths = [tokens]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    logits = torch.stack([p(path).log() for path in paths])
    law = Law(Processors.build(rule.law(), len(PROMPT), ()), logits, tokens, draft.tokens, draft.parents)
    verdict = rule.judge(draft, law, noise)
    return (*(draft.tokens[row] for row in verdict.path), verdict.next)[:left]


def plainly(rule: Acceptance, p: Table, begun: tuple[int, ...], n: int) -> dict[Hashable, float]:
    """The law of n tokens that begin so and are drawn one by one from there on."""
    processors = Processors.build(rule.law(), len(PROMPT), ())
    law = {begun: 1.0}
    for _ in range(n - len(begun)):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, weight in law.items():
            context = (*PROMPT, *tokens)
            after = torch.softmax(processors.scores(p(context).log(), context).double(), -1)
            longer |= {(*tokens, token): weight * x for token, x in enumerate(after.tolist())}
        law = longer
    return dict(law)


def bias(monkeypatch: pytest.MonkeyPatch, plan: Plan, p: Table, n: int, rule: Acceptance | None = None) -> float:
    """Total variation between the joint laws of n tokens that begin with a drafted step and of n drawn one by one."""
    rule = Sampling() if rule is None else rule
    got: dict[Hashable, float] = defaultdict(float)
    for begun, weight in outcomes(monkeypatch, lambda: step(rule, plan, p, PROMPT, n)).items():
        assert isinstance(begun, tuple)
        for tokens, rest in plainly(rule, p, begun, n).items():
            got[tokens] += weight * rest
    assert sum(got.values()) == pytest.approx(1, abs=1e-9)
    return total_variation(got, plainly(rule, p, (), n))


def one_hot(choose: Callable[[tuple[int, ...]], list[int]], depth: int) -> Plan:
    """The chosen tokens as siblings, at each depth behind the first of them."""

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        path, at = tuple(state.tokens), -1
        for _ in range(min(depth, room.depth)):
            siblings = choose(path)
            first = len(tokens)
            tokens += siblings
            parents += [at] * len(siblings)
            path, at = (*path, siblings[0]), first
        return tree(tokens, parents)

    return plan
