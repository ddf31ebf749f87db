"""One sequence while it runs: what it may draft, what a verdict leaves of a draft, and what its drafter is told."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, compress
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.cache import Cache
from ..attention.paged import PagedCache
from ..attention.rows import Rows
from ..errors import UserError
from .acceptance import Verdict
from .acceptance.rule import children
from .draft import Draft, Needs, Room, Seen
from .events import Generation, Step
from .model.decoder import Output
from .request import Request


@dataclass(frozen=True, slots=True)
class Kept:
    """`path`: the draft's rows that were emitted, root to leaf; `run`: the tokens emitted, the last one not cached."""

    path: tuple[int, ...]
    run: tuple[int, ...]

    @property
    def cached(self) -> tuple[int, ...]:
        """The draft's rows that the cache keeps behind the root row."""
        return self.path[: len(self.run) - 1]


@dataclass(slots=True)
class Live:
    request: Request
    slot: int
    out: Generation
    tokens: list[int] = field(default_factory=list)  # prompt and output
    state: Any = None  # the drafter's
    started: bool = False  # the drafter has a state of it that is not finished
    held: bool = True  # it has its slot in the cache

    @property
    def pending(self) -> int:
        """The last emitted token: decided, not yet in the cache."""
        return self.tokens[-1]

    def room(self, cache: Cache, nodes: int, depth: int) -> Room:
        """A step emits one token more than it accepts, so a draft may be one shorter than what is left."""
        left = self.request.stop.limit - len(self.out.tokens) - 1
        return Room(max(0, min(depth, left)), max(0, min(nodes, cache.room(self.slot) - 1)) if left > 0 else 0)

    def check(self, draft: Any, room: Room, vocab: int, sources: Sequence[str]) -> None:
        """A drafter of the user's may err; the loop says so instead of writing past the cache."""
        drafter = sources[0]
        if not isinstance(draft, Draft):
            raise UserError(f"{drafter} proposed a {type(draft).__name__}; propose returns a Draft for each state")
        if draft.q is not None and getattr(draft.q, "ndim", 0) != 2:
            raise UserError(f"{drafter} gives a q that is no tensor [rows, {vocab}]; see Draft")
        if wrong := [t for t in draft.tokens if not isinstance(t, int)]:
            raise UserError(f"{drafter} drafted {wrong[0]!r}, which is no token id; ids are plain integers")
        if len(draft) > room.rows or draft.depth > room.depth:
            raise UserError(
                f"{drafter} drafted {len(draft)} rows of depth {draft.depth}, but there is room for {room.rows} of "
                f"depth {room.depth}; keep to the room that propose is given"
            )
        if wrong := [t for t in draft.tokens if not 0 <= t < vocab]:
            raise UserError(f"{drafter} drafted token id {wrong[0]}, but the target's vocabulary is 0 to {vocab - 1}")
        if wrong := [i for i in (*draft.source, *chain.from_iterable(draft.also)) if not 0 <= i < len(sources)]:
            raise UserError(
                f"{drafter} names source {wrong[0]}, but it has {len(sources)}; correct `source` or `sources`"
            )
        if draft.q is not None and (draft.q.shape[1] != vocab or max(draft.q_row, default=-1) >= len(draft.q)):
            raise UserError(
                f"{drafter} gives q of shape {tuple(draft.q.shape)} for rows {max(draft.q_row, default=-1)} and below; "
                f"it must have {vocab} columns, the target's vocabulary, and the rows that q_row names"
            )

    def take(
        self, draft: Draft, verdict: Verdict, logits: Float[Tensor, "K1 V"] | None, most: int | None = None
    ) -> Kept:
        """Emit what the stop rule leaves of a verdict, `most` tokens at most. `logits` of the root and the draft's
        rows, for log p."""
        run = [*(draft.tokens[row] for row in verdict.path), verdict.next][:most]
        count, self.out.reason = self.request.stop.cut(self.out.tokens, run)
        kept = Kept(verdict.path[:count], tuple(run[:count]))
        if self.out.logprobs is not None and logits is not None:
            rows = [0, *(row + 1 for row in verdict.path)][:count]
            log_p = torch.log_softmax(logits[rows].float(), -1)
            self.out.logprobs += log_p[range(count), list(kept.run)].tolist()
        self.out.tokens += kept.run
        self.tokens += kept.run
        return kept

    def step(self, number: int, batch: int, draft: Draft, kept: Kept, sources: Sequence[str], cache: Cache) -> Step:
        siblings = children(draft)
        # the candidates for each emitted token; a token of the draft that the cut left last was followed by none
        offered = tuple(len(siblings.get(row, ())) for row in (-1, *kept.path))[: len(kept.run)]
        return Step(
            request=self.out.request,
            step=number,
            batch=batch,
            drafted=sum(draft.judged),
            verified=1 + len(draft),
            depth=draft.depth,
            accepted=len(kept.path),
            emitted=len(kept.run),
            sources=tuple(sources[draft.source[row]] for row in kept.path),
            also_proposed=tuple(_rivals(draft, row, sources) for row in kept.path),
            kv_bytes=cache.nbytes,
            kv_formula=cache.formula_bytes,
            kv_blocks=cache.pages.used if isinstance(cache, PagedCache) else None,
            ranks=tuple(siblings[draft.parents[row]].index(row) for row in kept.path),
            offered=offered if len(draft) else (),
            drafted_by=_proposed(draft, sources),
        )


def _proposed(draft: Draft, sources: Sequence[str]) -> dict[str, int]:
    """How many candidates each source offered; 0 for those that did not."""
    if not draft.tokens:
        return dict.fromkeys(sources, 0)
    offered = Counter(chain(compress(draft.source, draft.judged), *compress(draft.also, draft.judged)))
    return {name: offered[source] for source, name in enumerate(sources)}


def _rivals(draft: Draft, kept: int, sources: Sequence[str]) -> tuple[str, ...]:
    """The other sources that offered the kept row's token in the same place."""
    same = [
        i
        for i in range(len(draft))
        if draft.judged[i] and (draft.parents[i], draft.tokens[i]) == (draft.parents[kept], draft.tokens[kept])
    ]
    offered = chain(*((draft.source[i], *(draft.also[i] if draft.also else ())) for i in same))
    names = dict.fromkeys(sources[source] for source in offered)
    return tuple(name for name in names if name != sources[draft.source[kept]])


def each_of(drafter: Any, method: str, found: Any, live: Sequence[Live]) -> list[Any]:
    """What a drafter's method returned, if it is one thing for each sequence."""
    if isinstance(found, list | tuple) and len(found) == len(live):
        return list(found)
    got = f"{len(found)} things" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
    name = next(iter(drafter.sources), type(drafter).__name__)
    raise UserError(f"{name}: {method} returned {got} for {len(live)} sequences; it returns a list with one for each")


def assemble(live: Sequence[Live], drafts: Sequence[Draft]) -> tuple[Rows, list[int]]:
    """(the rows of one verification, where each sequence's rows begin): its last emitted token, then its draft."""
    tokens: list[int] = []
    parents: list[int] = []
    owner: list[int] = []
    starts: list[int] = []
    for s, draft in zip(live, drafts, strict=True):
        at = len(tokens)
        starts.append(at)
        tokens += [s.pending, *draft.tokens]
        parents += [-1, *(at + 1 + parent for parent in draft.parents)]
        owner += [s.slot] * (1 + len(draft))
    chain = all(draft.is_chain for draft in drafts)
    return Rows(torch.tensor(tokens), _tensor(tuple(parents)), _tensor(tuple(owner)), chain=chain), starts


@lru_cache(maxsize=1024)
def _tensor(numbers: tuple[int, ...]) -> Int[Tensor, " T"]:
    """Read only. Drafts repeat their shape step after step."""
    return torch.tensor(numbers)


def seen(
    s: Live,
    kept: Kept,
    draft: Draft,
    out: Output,
    argmax: list[int],
    choices: tuple[int, ...] | None,
    at: int,
    needs: Needs,
) -> Seen:
    """What the drafter is told of one verification; `at` is where the sequence's rows begin in it."""
    rows = slice(at, at + 1 + len(draft))
    committed = [at, *(at + 1 + row for row in kept.cached)]
    return Seen(
        tokens=kept.run,
        position=len(s.tokens) - len(kept.run),
        own_path=kept.path,
        argmax=tuple(argmax[rows]) if needs.argmax else None,
        choices=choices,
        topk=_topk(out.logits[rows], needs.topk),
        hidden={tap: h[rows] for tap, h in out.hidden.items()} if needs.taps else None,
        committed={tap: h[committed] for tap, h in out.hidden.items()} if needs.taps else None,
    )


def seen_prompt(s: Live, at: int, size: int, out: Output, needs: Needs) -> Seen:
    """What it is told of prompt rows [at, at + size); behind the last of them stands the first generated token."""
    last = at + size == len(s.request.prompt)
    told = bool(needs.taps) and (needs.prefill_hidden or last)
    return Seen(
        tokens=tuple(s.tokens[at + 1 : at + size + 1]),
        position=at + 1,
        prefill=True,
        argmax=(int(out.logits[0].argmax()),) if needs.argmax and last else None,
        choices=(s.tokens[at + size],) if needs.choices and last else None,
        topk=_topk(out.logits, needs.topk) if last else None,
        hidden={tap: h[-1:] for tap, h in out.hidden.items()} if told and last else None,
        committed=out.hidden if told and needs.prefill_hidden else None,
    )


def _topk(logits: Tensor, k: int) -> tuple[tuple[int, ...], ...] | None:
    return tuple(map(tuple, logits.topk(k, -1).indices.tolist())) if k else None
