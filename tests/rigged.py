"""Drafters whose drafts are planned: they hold the loop to its promises and need no model."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decodelab.decoding.acceptance import Acceptance
from decodelab.decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Room, Seen, chain
from decodelab.decoding.law import perturbed
from decodelab.decoding.noise import Noise
from decodelab.decoding.request import Request, request

PROMPTS = ([7, 30, 12], [5, 9, 41, 3, 17, 22, 8, 60, 33], [(11 * i) % 58 + 3 for i in range(40)])


def ask(prompt: Sequence[int], rule: Acceptance, tokens: int = 20, *, context: int = 512, **options: Any) -> Request:
    """A request to a `tiny_decoder`."""
    return request(prompt, law=rule.law(), max_new_tokens=tokens, vocab=61, context=context, **options)


@dataclass(slots=True)
class State:
    """`tokens`: prompt and output so far, which the loop's reports must add up to."""

    tokens: list[int]
    prompt: int
    sequence: int
    step: int = 0

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt


Plan = Callable[[State, Room, Noise], Draft]


@dataclass(frozen=True, slots=True)
class Rigged:
    """Drafts what the plan says. `log`: ("draft", sequence, Draft), ("seen", sequence, Seen), ("finish", sequence)."""

    plan: Plan
    needs: Needs = field(default_factory=Needs)
    gives: Gives = field(default_factory=lambda: Gives("forest", rows=12, depth=6))
    sources: tuple[str, ...] = ("rigged",)
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def start(self, requests: Sequence[Opened]) -> list[State]:
        return [State(list(r.prompt), len(r.prompt), r.sequence) for r in requests]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = [self.plan(s, r, n) if r.rows else EMPTY for s, r, n in zip(states, room, noise, strict=True)]
        self.log.extend(("draft", s.sequence, draft) for s, draft in zip(states, drafts, strict=True))
        return drafts

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for state, news in zip(states, seen, strict=True):
            known = state.tokens[news.position :]  # of a prompt's chunk, all but what was generated behind it
            assert list(news.tokens[: len(known)]) == known[: len(news.tokens)]
            state.tokens += news.tokens[len(known) :]
            state.step += not news.prefill
            self.log.append(("seen", state.sequence, news))
        return list(states)

    def finish(self, state: State) -> None:
        self.log.append(("finish", state.sequence))


Answers = Mapping[tuple[int, ...], Sequence[int]]


def _answer(answers: Answers, state: State) -> list[int]:
    """What is still to come of the known answer."""
    return list(answers[tuple(state.tokens[: state.prompt])][state.emitted :])


def oracle(answers: Answers, lengths: Sequence[int] = (4,), stale: Sequence[int] = ()) -> Plan:
    """Chains of the right tokens, in turn of these lengths; after the steps in `stale` wrong ones."""

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        right = _answer(answers, state)[: min(lengths[state.step % len(lengths)], room.chain)]
        return chain([(t + 1) % 61 for t in right] if state.step in stale else right)

    return plan


def thicket(answers: Answers, seed: int, unjudged: bool = True) -> Plan:
    """Random forests of 0, 3 or as many rows as fit; six tokens in ten are right, one row in five is no candidate."""

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        rng = random.Random(f"{seed} {state.tokens}")
        right = _answer(answers, state)
        tokens: list[int] = []
        parents: list[int] = []
        judged: list[bool] = []
        depth: list[int] = []
        for _ in range(min(rng.choice([0, 3, room.rows]), room.rows)):
            parent = rng.randrange(-1, len(tokens))
            at = depth[parent] + 1 if parent >= 0 else 1
            candidate = (parent < 0 or judged[parent]) and not (unjudged and rng.random() < 0.2)
            if candidate and at > room.depth:
                continue
            tokens.append(right[at - 1] if at <= len(right) and rng.random() < 0.6 else rng.randrange(61))
            parents.append(parent)
            judged.append(candidate)
            depth.append(at)
        K = len(tokens)
        return Draft(tuple(tokens), tuple(parents), None, (-1,) * K, tuple(judged), (0,) * K)

    return plan


def drawn(
    q: Callable[[tuple[int, ...]], Tensor], widths: Sequence[int], *, replace: bool = False, fixed: Sequence[int] = ()
) -> Plan:
    """A tree drawn from q(tokens so far) [V]: `widths[d]` siblings at depth d, behind them one-hot ones of `fixed`."""

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[int] = []
        laws: list[Tensor] = []
        level = [(-1, tuple(state.tokens))]
        for offset, width in enumerate(widths[: room.depth]):
            below = []
            for parent, path in level:
                law = q(path)
                for sibling in range(width):
                    if not law.sum() > 0:
                        break
                    token = int(perturbed(law.log(), noise.draft(offset, sibling)).argmax())
                    below.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(parent)
                    rows.append(len(laws))
                    laws.append(law)
                    if not replace:
                        law = law.clone()
                        law[token] = 0
                        law = law / law.sum().clamp_min(1e-30)
                for token in fixed:
                    below.append((len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(parent)
                    rows.append(-1)
            level = below
        K = len(tokens)
        return Draft(tuple(tokens), tuple(parents), torch.stack(laws), tuple(rows), (True,) * K, (0,) * K)

    return plan
