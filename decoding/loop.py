"""The one loop: draft → verify → cut → commit → observe. Read this file first."""

import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch

from ..attention.cache import Cache
from ..attention.paged import PagedCache
from ..attention.rows import chains
from ..kernels.argmax import largest
from .acceptance import Acceptance
from .draft import EMPTY, Draft, Drafter, Opened, Seen
from .events import Clock, Generation, Prefill, Step, finish
from .law import Law
from .live import Live, assemble, each_of, seen, seen_prompt
from .model.decoder import Decoder
from .noise import Noise
from .reference import PREFILL_CHUNK
from .request import Request


@torch.inference_mode()
def decode(
    target: Decoder,
    requests: Sequence[Request],
    drafter: Drafter[Any],
    acceptance: Acceptance,
    *,
    seed: int = 0,
    budget: int | None = None,
    logprobs: bool = False,
    pages: PagedCache | None = None,
) -> Iterator[list[Generation]]:
    """Yields the generations after each step, all of them growing in place. `budget`: most draft rows a sequence;
    `pages`: the cache, where it is not to be one of this call's own."""
    begin, clock = time.perf_counter(), Clock(target.device)
    needs, gives, vocab = drafter.needs, drafter.gives, target.config.vocab
    nodes = gives.rows if budget is None else min(budget, gives.rows)
    slots = (len(r.prompt) + r.stop.limit + gives.within(budget, r.stop.limit) for r in requests)
    cache = target.open_cache(len(requests), max(slots), pages)
    out = [Generation(i, len(r.prompt), logprobs=[] if logprobs else None) for i, r in enumerate(requests)]
    live = [Live(r, cache.open(), g, list(r.prompt)) for r, g in zip(requests, out, strict=True)]
    laps: list[tuple[list[Any], list[Step]]] = []
    prefilled: list[tuple[list[Any], Live, int]] = []
    starting = [clock.mark()]
    try:
        opened = [
            Opened(r.prompt, r.documents, r.stop.limit, r.processors, s.slot, cache)
            for r, s in zip(requests, live, strict=True)
        ]
        for s, state in zip(live, each_of(drafter, "start", drafter.start(opened), live), strict=True):
            s.state, s.started = state, True
        starting.append(clock.mark())
        for s in live:
            found = 0 if pages is None else pages.adopt(s.slot, s.request.prompt)
            prefilled.append((_prefill(target, cache, drafter, acceptance, s, seed, clock, found), s, found))
            s.out.delivered.append((time.perf_counter() - begin, 1))
        yield out

        while live := _running(live, drafter, cache):
            marks = [clock.mark()]
            room = [s.room(cache, nodes, gives.depth) for s in live]
            noise = [_noise(seed, s, acceptance) for s in live]
            marks.append(clock.mark())
            if any(r.rows for r in room):
                drafts = each_of(drafter, "propose", drafter.propose([s.state for s in live], room, noise), live)
            else:
                drafts = [EMPTY] * len(live)
            marks.append(clock.mark())

            for s, draft, r in zip(live, drafts, room, strict=True):
                s.check(draft, r, vocab, drafter.sources)
            rows, at = assemble(live, drafts)
            marks.append(clock.mark())
            verified = target(rows, cache, taps=needs.taps)
            argmax = largest(verified.logits)
            marks.append(clock.mark())

            kept, laws = [], []
            for s, draft, a, n in zip(live, drafts, at, noise, strict=True):
                mine = slice(a, a + 1 + len(draft))
                logits = verified.logits[mine]
                law = Law(s.request.processors, logits, s.tokens, draft.tokens, draft.parents, argmax[mine])
                laws.append(law)
                kept.append(s.take(draft, acceptance.judge(draft, law, n), logits))
            marks.append(clock.mark())
            cache.commit(
                {s.slot: [a, *(a + 1 + row for row in k.cached)] for s, k, a in zip(live, kept, at, strict=True)}
            )
            marks.append(clock.mark())

            each = list(zip(live, kept, drafts, at, strict=True))
            choices = [_choices(*of) for of in zip(drafts, laws, noise, strict=True)] if needs.choices else repeat(None)
            news = [
                seen(s, k, draft, verified, argmax, chosen, a, needs)
                for (s, k, draft, a), chosen in zip(each, choices, strict=False)
            ]
            states = each_of(drafter, "observe", drafter.observe([s.state for s in live], news), live)
            for s, state in zip(live, states, strict=True):
                s.state = state
            marks.append(clock.mark())
            steps = [s.step(len(laps), len(live), d, k, drafter.sources, cache) for s, k, d, _ in each]
            for s, step in zip(live, steps, strict=True):
                step.at_s = time.perf_counter() - begin
                s.out.delivered.append((step.at_s, step.emitted))
                s.out.steps.append(step)
            laps.append(([*marks, clock.mark()], steps))
            yield out
    finally:
        cache.drop()
        for s in live:
            if s.held:
                cache.free(s.slot)
        for s in live:
            if s.started:
                drafter.finish(s.state)
        target.close_cache(cache)
        clock.settle()
        start = sum(clock.between(starting))  # 0 where an abort came first
        for marks, s, found in prefilled:
            forward, told = clock.between(marks)
            s.out.prefill = Prefill(s.out.request, len(s.request.prompt), forward, start / len(requests) + told, found)
        for marks, steps in laps:
            room_s, propose, build, verify, accept, commit, observe, book = clock.between(marks)
            for step in steps:
                step.draft_s, step.verify_s, step.accept_s, step.commit_s = propose + observe, verify, accept, commit
                step.other_s = room_s + build + book


def _prefill(
    target: Decoder,
    cache: Cache,
    drafter: Drafter[Any],
    acceptance: Acceptance,
    s: Live,
    seed: int,
    clock: Clock,
    found: int,
) -> list[Any]:
    """Read the prompt in chunks, behind the tokens `found` in the cache, and decide the first token. Returns marks
    around the forwards and the drafting."""
    marks = [clock.mark()]
    prompt, needs = s.request.prompt, drafter.needs
    pieces = []
    for at in range(found, len(prompt), PREFILL_CHUNK):
        piece = prompt[at : at + PREFILL_CHUNK]
        last = at + len(piece) == len(prompt)
        taps = needs.taps if needs.prefill_hidden or last else ()
        out = target(chains([piece], [s.slot], prompt=True), cache, logits_of=torch.tensor([len(piece) - 1]), taps=taps)
        cache.commit({s.slot: range(len(piece))})
        pieces.append((at, len(piece), out))
    law = Law(s.request.processors, out.logits, s.tokens, argmax=largest(out.logits))
    s.take(EMPTY, acceptance.judge(EMPTY, law, _noise(seed, s, acceptance)), out.logits)
    marks.append(clock.mark())
    news = [Seen(tuple(prompt[1 : found + 1]), 1, prefill=True)] if found else []
    for seen_of in [*news, *(seen_prompt(s, at, size, out, needs) for at, size, out in pieces)]:
        told = drafter.observe([s.state], [seen_of])
        (s.state,) = each_of(drafter, "observe", told, [s])
    marks.append(clock.mark())
    return marks


def _choices(draft: Draft, law: Law, noise: Noise) -> tuple[int, ...]:
    return tuple(law.choose(row, noise, depth) for row, depth in enumerate([0, *draft.depths]))


def _noise(seed: int, s: Live, acceptance: Acceptance) -> Noise:
    emitted = len(s.out.tokens)
    return Noise(seed, s.request.key, emitted, emitted if acceptance.reads == "all rows" else None)


def _running(live: list[Live], drafter: Drafter[Any], cache: Cache) -> list[Live]:
    """The sequences that go on; the others are handed back to the drafter and the cache."""
    for s in live:
        if s.out.reason is not None:
            s.started = False
            drafter.finish(s.state)
            s.state, s.held = None, False
            cache.free(s.slot)
    return [s for s in live if s.out.reason is None]


def generate(
    target: Decoder, requests: Sequence[Request], drafter: Drafter[Any], acceptance: Acceptance, **options: Any
) -> list[Generation]:
    """Every request to its end."""
    return finish(decode(target, requests, drafter, acceptance, **options))
