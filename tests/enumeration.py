"""Every way that chance can go, with its probability: laws are computed, not sampled."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import jaxtyping
import pytest
import torch
from torch import Tensor

from decodelab.decoding import law
from decodelab.decoding.acceptance import block, sampling
from decodelab.decoding.noise import Noise
from decodelab.drafting import draft_model

from . import rigged


@dataclass(slots=True)
class Chance:
    """Takes the scripted choices, then the first of those that can happen; remembers what else it could have taken."""

    script: list[int]
    taken: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)
    weight: float = 1.0

    def pick(self, weights: Sequence[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        scripted = len(self.taken) < len(self.script)
        choice = self.script[len(self.taken)] if scripted else possible[0]
        self.others.append([] if scripted else possible[1:])
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice


@dataclass(frozen=True, slots=True)
class Uniform:
    """u, or u · factor: below a bound with the bound's probability."""

    chance: Chance
    factor: float = 1.0

    def __mul__(self, factor: float) -> "Uniform":
        return Uniform(self.chance, self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        below = min(1.0, bound / self.factor) if self.factor else float(bound > 0)
        return self.chance.pick([below, 1 - below]) == 0


def outcomes(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Hashable]) -> dict[Hashable, float]:
    """The law of what `run` returns, with every keyed draw and every uniform that it asks for a branch of its own."""
    chance = Chance([])

    def branch(log_p: Tensor, key: int) -> Tensor:
        p = log_p.double().exp()
        scores = torch.full_like(p, -torch.inf)
        scores[chance.pick((p / p.sum()).tolist())] = 0
        return scores

    for module in (law, block, sampling, draft_model, rigged):
        monkeypatch.setattr(module, "perturbed", branch)
    monkeypatch.setattr(Noise, "accept", lambda self, offset=0, sibling=0: Uniform(chance))
    found: dict[Hashable, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    with monkeypatch.context() as patched:
        while scripts:
            chance = Chance(scripts.pop())
            found[run()] += chance.weight
            for i, others in enumerate(chance.others):
                scripts += [[*chance.taken[:i], other] for other in others]
            unchecked(patched)  # one run with types and shapes checked will do
    return dict(found)


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the run-time checks of types and shapes, which cost more than what they check where calls are many."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def total_variation(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
