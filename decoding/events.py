"""The event log: what happened at each step. Every number that is reported derives from it."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from .stopping import Reason


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt was read and its first token decided. `seconds`: the target's forwards; `draft_s`: start and observe;
    `found`: how many of its tokens were in the cache already."""

    request: int
    tokens: int
    seconds: float
    draft_s: float
    found: int = 0


@dataclass(slots=True)
class Step:
    """One sequence in one step of the loop. Seconds are the step's, shared by the `batch` sequences in it.

    `drafted`: candidates; `verified`: rows in the target's forward, the last emitted token's included; `depth`: the
    longest path of candidates; `accepted`: candidates kept and emitted, after the cut; `emitted`: tokens. `sources[i]`
    proposed accepted token i, `also_proposed[i]` are the others that offered the same token there. `draft_s` holds
    propose and observe, `other_s` what belongs to no phase. Seconds are filled in when the request is over.

    `ranks[i]`: the place of accepted token i among its siblings. `offered[i]`: how many candidates there were for
    emitted token i (0 for the target's own behind a leaf); both are empty where nothing was drafted. `drafted_by`: how
    many candidates each of the drafter's sources offered, those that others offered too among them. `kv_bytes`: of the
    cache's committed part, `kv_formula`: the same by the layout's arithmetic; `kv_blocks`: of a paged cache, in use by
    all of its sequences.
    """

    request: int
    step: int
    batch: int
    drafted: int
    verified: int
    depth: int
    accepted: int
    emitted: int
    sources: tuple[str, ...]
    also_proposed: tuple[tuple[str, ...], ...]
    kv_bytes: int = 0
    kv_formula: int = 0
    kv_blocks: int | None = None
    at_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    other_s: float = 0.0
    ranks: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    drafted_by: dict[str, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.accept_s + self.commit_s + self.other_s


@dataclass(slots=True)
class Generation:
    """What one request came to. `delivered`: (seconds since the request began, tokens delivered then)."""

    request: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    reason: Reason | None = None
    prefill: Prefill | None = None
    steps: list[Step] = field(default_factory=list)
    delivered: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds from the request's begin to its first token."""
        return self.delivered[0][0]

    @property
    def latency_s(self) -> float:
        """Seconds from the request's begin to its last token."""
        return self.delivered[-1][0]

    @property
    def decode_s(self) -> float:
        """Seconds after the first delivery."""
        return self.latency_s - self.ttft_s


def finish(steps: Iterable[list[Generation]]) -> list[Generation]:
    """Run a decoding to its end and return what it came to."""
    (done,) = deque(steps, maxlen=1)
    return done


class Clock:
    """Marks of time. On a GPU they are device events, read when all is done: no phase waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between neighbours, once the device has caught up (`settle`)."""
        if not self._cuda:
            return [b - a for a, b in pairwise(marks)]
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
