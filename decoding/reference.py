"""The plain decoder: one token a step. It is the oracle of exactness and shares no draft, acceptance or loop code."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.paged import PagedCache
from ..attention.rows import chains
from ..kernels.argmax import largest
from .events import Generation, Prefill, finish
from .law import LawSettings, best, keyed_scores
from .model.decoder import Decoder
from .noise import Noise
from .request import Request

# Rows of a prompt in one forward, here and in the loop: the same rows give the same bits.
PREFILL_CHUNK = 2048


@torch.inference_mode()
def decode(
    target: Decoder,
    requests: Sequence[Request],
    law: LawSettings,
    *,
    seed: int = 0,
    logprobs: bool = False,
    watch: Callable[[int, int, Float[Tensor, " V"], Float[Tensor, " V"]], None] | None = None,
    pages: PagedCache | None = None,
) -> Iterator[list[Generation]]:
    """Yields the generations after each step, all of them growing in place.

    `watch(request, position, scores, logits)` sees what each choice maximises, and the raw logits. `pages`: the cache,
    where it is not to be one of this call's own.
    """
    begin = time.perf_counter()
    cache = target.open_cache(len(requests), max(len(r.prompt) + r.stop.limit for r in requests), pages)
    slots = [cache.open() for _ in requests]
    done = [Generation(i, len(r.prompt), logprobs=[] if logprobs else None) for i, r in enumerate(requests)]

    def choose(i: int, logits: Tensor) -> None:
        request, out = requests[i], done[i]
        position = len(out.tokens)
        if law.plain and watch is None:
            (token,) = largest(logits[None])
        else:
            scores = request.processors.scores(logits, [*request.prompt, *out.tokens] if law.reads_context else ())
            keyed = keyed_scores(law, scores, Noise(seed, request.key, position).target())
            if watch is not None:
                watch(i, position, keyed, logits)
            token = best(keyed)
        if out.logprobs is not None:
            out.logprobs.append(float(torch.log_softmax(logits.float(), -1)[token]))
        _, out.reason = request.stop.cut(out.tokens, [token])
        out.tokens.append(token)
        out.delivered.append((time.perf_counter() - begin, 1))

    try:
        for i, request in enumerate(requests):
            started = time.perf_counter()
            found = 0 if pages is None else pages.adopt(slots[i], request.prompt)
            for at in range(found, len(request.prompt), PREFILL_CHUNK):
                piece = request.prompt[at : at + PREFILL_CHUNK]
                out = target(chains([piece], [slots[i]], prompt=True), cache, logits_of=torch.tensor([len(piece) - 1]))
                cache.commit({slots[i]: range(len(piece))})
            choose(i, out.logits[0])
            done[i].prefill = Prefill(i, len(request.prompt), time.perf_counter() - started, 0.0, found)
        yield done

        while live := [i for i, g in enumerate(done) if g.reason is None]:
            out = target(chains([[done[i].tokens[-1]] for i in live], [slots[i] for i in live]), cache)
            cache.commit({slots[i]: [row] for row, i in enumerate(live)})
            for row, i in enumerate(live):
                choose(i, out.logits[row])
            yield done
    finally:
        cache.drop()
        for slot in slots:
            cache.free(slot)
        target.close_cache(cache)


def generate(target: Decoder, requests: Sequence[Request], law: LawSettings, **options: Any) -> list[Generation]:
    """Every request to its end."""
    return finish(decode(target, requests, law, **options))
