"""What a drafter that looks at tokens alone would have done on answers that are known: no model, no time.

The steps are those of the loop on a target that gives these answers: the same room, the same cut, the same events. Of
seconds they have what drafting takes here.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..attention.cache import DenseCache
from ..attention.layout import uniform
from ..errors import UserError
from .acceptance.rule import Verdict, walk
from .draft import EMPTY, Draft, Drafter, Needs, Opened, Seen
from .events import Generation
from .live import Live, each_of
from .noise import Noise
from .reference import PREFILL_CHUNK
from .request import Request


def needs_model(needs: Needs, name: str) -> str | None:
    """Why the drafter `name` cannot be replayed; None if it looks at tokens alone."""
    n = needs
    if n.taps or n.prefill_hidden or n.argmax or n.choices or n.topk or n.target_cache or n.second_model:
        return (
            f"replay has answers and no model, and {name} needs one: choose a drafter that looks at tokens alone, or "
            "leave replay out"
        )
    if n.costs:
        return (
            f"replay has answers and no model, on which {name} would measure what rows cost, as drafting.budget=auto "
            "does: give it a number of rows, or leave replay out"
        )
    return None


def can_replay(drafter: Drafter[Any]) -> None:
    """Refuses a drafter that needs more than tokens."""
    if (reason := needs_model(drafter.needs, drafter.sources[0])) is not None:
        raise UserError(reason)


def replay(
    drafter: Drafter[Any], requests: Sequence[Request], answers: Sequence[Sequence[int]], *, budget: int | None = None
) -> list[Generation]:
    """One request after the other. An answer is what the request's stop rule left of it, one token at least."""
    can_replay(drafter)
    return [_one(drafter, r, answer, i, budget) for i, (r, answer) in enumerate(zip(requests, answers, strict=True))]


def _one(drafter: Drafter[Any], request: Request, answer: Sequence[int], index: int, budget: int | None) -> Generation:
    if not answer:
        raise UserError(f"answer {index} is empty; an answer has at least the token that its prompt decides")
    # nothing is ever written into it: it has room for a step
    nodes = drafter.gives.within(budget, request.stop.limit)
    cache = DenseCache(uniform(1, 1, 1), sequences=1, capacity=1 + nodes, dtype=torch.bool, device="cpu")
    out = Generation(index, len(request.prompt))
    s = Live(request, cache.open(), out, list(request.prompt))
    opened = Opened(request.prompt, request.documents, request.stop.limit, request.processors, s.slot, cache)
    (s.state,) = each_of(drafter, "start", drafter.start([opened]), [s])
    s.take(EMPTY, Verdict((), answer[0]), None)
    for at in range(0, len(request.prompt), PREFILL_CHUNK):
        size = min(PREFILL_CHUNK, len(request.prompt) - at)
        _tell(drafter, s, Seen(tuple(s.tokens[at + 1 : at + size + 1]), at + 1, prefill=True))
    while out.reason is None and len(out.tokens) < len(answer):
        room = s.room(cache, nodes, drafter.gives.depth)
        draft, begin = EMPTY, time.perf_counter()
        if room.rows:
            noise = Noise(0, request.key, len(out.tokens))
            (draft,) = each_of(drafter, "propose", drafter.propose([s.state], [room], [noise]), [s])
        proposed = time.perf_counter() - begin
        s.check(draft, room, 1 << 62, drafter.sources)
        rest = answer[len(out.tokens) :]
        kept = s.take(draft, _judge(draft, rest), None, most=len(rest))
        begin = time.perf_counter()
        _tell(drafter, s, Seen(kept.run, len(s.tokens) - len(kept.run), kept.path))
        observed = time.perf_counter() - begin
        step = s.step(len(out.steps), 1, draft, kept, drafter.sources, cache)
        step.draft_s = proposed + observed
        out.steps.append(step)
    drafter.finish(s.state)
    return out


def _judge(draft: Draft, answer: Sequence[int]) -> Verdict:
    """Keep what the answer says; what a verdict has behind its end is cut off."""

    def decide(row: int, offset: int, candidates: list[int]) -> tuple[int | None, int]:
        if offset == len(answer):
            return None, answer[-1]
        token = answer[offset]
        return next((c for c in candidates if draft.tokens[c] == token), None), token

    return walk(draft, decide)


def _tell(drafter: Drafter[Any], s: Live, news: Seen) -> None:
    (s.state,) = each_of(drafter, "observe", drafter.observe([s.state], [news]), [s])
