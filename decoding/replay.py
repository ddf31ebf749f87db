"""What a drafter that looks at tokens alone would have done on answers that are known: no model, no time.

The steps are those of the loop on a target that gives these answers: the same room, the same cut, the same events,
without seconds.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..attention.cache import DenseCache
from ..attention.layout import uniform
from .acceptance.rule import Verdict, walk
from .draft import EMPTY, Draft, Drafter, Opened, Seen
from .errors import UserError
from .events import Generation
from .live import Live, each_of
from .noise import Noise
from .reference import PREFILL_CHUNK
from .request import Request


def can_replay(drafter: Drafter[Any]) -> None:
    """Refuses a drafter that needs more than tokens."""
    n = drafter.needs
    if n.taps or n.argmax or n.choices or n.topk or n.target_cache or n.second_model:
        raise UserError(
            f"replay has answers and no model, and {drafter.sources[0]} needs one: choose a drafter that looks at "
            "tokens alone, or leave replay out"
        )


def replay(
    drafter: Drafter[Any], requests: Sequence[Request], answers: Sequence[Sequence[int]], *, budget: int | None = None
) -> list[Generation]:
    """One request after the other. An answer is what the request's stop rule left of it, one token at least."""
    can_replay(drafter)
    return [_one(drafter, r, answer, i, budget) for i, (r, answer) in enumerate(zip(requests, answers, strict=True))]


def _one(drafter: Drafter[Any], request: Request, answer: Sequence[int], index: int, budget: int | None) -> Generation:
    if not answer:
        raise UserError(f"answer {index} is empty; an answer has at least the token that its prompt decides")
    # one number a token: it has room, and holds nothing
    slots = len(request.prompt) + request.stop.limit + drafter.gives.rows
    cache = DenseCache(uniform(1, 1, 1), sequences=1, capacity=slots, dtype=torch.bool, device="cpu")
    out = Generation(index, len(request.prompt))
    s = Live(request, cache.open(), out, list(request.prompt))
    nodes = drafter.gives.rows if budget is None else min(budget, drafter.gives.rows)
    opened = Opened(request.prompt, request.documents, request.stop.limit, request.processors, s.slot, cache)
    (s.state,) = each_of(drafter, "start", drafter.start([opened]), [s])
    s.take(EMPTY, Verdict((), answer[0]), None)
    for at in range(0, len(request.prompt), PREFILL_CHUNK):
        size = min(PREFILL_CHUNK, len(request.prompt) - at)
        _tell(drafter, s, Seen(tuple(s.tokens[at + 1 : at + size + 1]), at + 1, prefill=True))
    while out.reason is None and len(out.tokens) < len(answer):
        room = s.room(cache, nodes, drafter.gives.depth)
        draft = EMPTY
        if room.rows:
            noise = Noise(0, request.key, len(out.tokens))
            (draft,) = each_of(drafter, "propose", drafter.propose([s.state], [room], [noise]), [s])
            s.check(draft, room, 1 << 62, drafter.sources)
        kept = s.take(draft, _judge(draft, answer[len(out.tokens) :]), None)
        _tell(drafter, s, Seen(kept.run, len(s.tokens) - len(kept.run), kept.path))
        out.steps.append(s.step(len(out.steps), 1, draft, kept, drafter.sources, cache))
    drafter.finish(s.state)
    return out


def _judge(draft: Draft, answer: Sequence[int]) -> Verdict:
    """Keep what the answer says; behind its end nothing is kept."""

    def decide(row: int, offset: int, candidates: list[int]) -> tuple[int | None, int]:
        token = answer[offset]
        same = (c for c in candidates if draft.tokens[c] == token)
        return (next(same, None) if offset + 1 < len(answer) else None), token

    return walk(draft, decide)


def _tell(drafter: Drafter[Any], s: Live, news: Seen) -> None:
    (s.state,) = each_of(drafter, "observe", drafter.observe([s.state], [news]), [s])
