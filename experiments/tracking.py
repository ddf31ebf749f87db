"""Where a run or a training is mirrored while it goes on. The files of its folder stay the truth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..decoding.events import Generation
from .metrics import decode_seconds, ratio

RUN_FILES = ("samples.jsonl", "events.jsonl", "quality.jsonl", "flips.jsonl")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known before it runs. `sweep`: the id of the sweep it is a cell of; `job`: speed, quality,
    both, replay or train."""

    key: str
    label: str
    job: str
    folder: Path
    config: Mapping[str, Any]  # resolved, with dtype and device as they came to be
    digests: Mapping[str, Any]
    provenance: Mapping[str, Any]
    sweep: str | None = None


@runtime_checkable
class Tracker(Protocol):
    """One run, open: a context that always ends it, whatever happens inside.

    A tracker that fails says so in `warnings`, one line each, and lets the run go on.
    """

    @property
    def warnings(self) -> Sequence[str]: ...
    def __enter__(self) -> "Tracker": ...
    def __exit__(self, *error: object) -> None: ...
    def row(self, row: Mapping[str, Any]) -> None:
        """Flat numbers: after each prompt those so far, as `Running` has them; of a training those of a `step`."""

    def done(self, result: Mapping[str, Any], files: Sequence[str] = RUN_FILES) -> None:
        """Once the folder is written: `result` is what result.json holds, of a training flat numbers and its `status`;
        `files` of the folder are kept with it, as far as they are there."""


@runtime_checkable
class Tracking(Protocol):
    """Settings of the group `tracking`."""

    def check(self) -> None:
        """Raises UserError for what cannot work, before any weight is loaded."""

    def open(self, run: RunInfo) -> Tracker: ...


@dataclass(frozen=True, slots=True)
class Untracked:
    """tracking=none."""

    @property
    def warnings(self) -> Sequence[str]:
        return ()

    def check(self) -> None: ...
    def open(self, run: RunInfo) -> "Untracked":
        return self

    def __enter__(self) -> "Untracked":
        return self

    def __exit__(self, *error: object) -> None: ...
    def row(self, row: Mapping[str, Any]) -> None: ...
    def done(self, result: Mapping[str, Any], files: Sequence[str] = RUN_FILES) -> None: ...


@dataclass(slots=True)
class Running:
    """What the prompts so far say, as sums: a row costs no more for the thousandth prompt than for the first."""

    prompts: int = 0
    identical: int = 0
    steps: int = 0
    emitted: int = 0
    accepted: int = 0
    offered: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)  # of decoding: baseline, strategy
    tokens: tuple[int, int] = (0, 0)

    def add(
        self, baseline: Sequence[Generation], strategy: Sequence[Generation], identical: int, timed: bool
    ) -> list[dict[str, Any]]:
        """A batch of prompts that ran side by side: its rows, one a prompt, numbered from 1. They share all but the
        number, because the batch's time is no one prompt's. What is not known is None."""
        steps = [step for g in strategy for step in g.steps]
        self.identical += identical
        self.steps += len(steps)
        self.emitted += sum(step.emitted for step in steps)
        self.accepted += sum(step.accepted for step in steps)
        self.offered += sum(step.depth for step in steps)
        if timed:
            base, ours = self.seconds
            self.seconds = base + decode_seconds(baseline), ours + decode_seconds(strategy)
            base_tokens, our_tokens = self.tokens
            self.tokens = base_tokens + _decoded(baseline), our_tokens + _decoded(strategy)
        before, self.prompts = self.prompts, self.prompts + len(strategy)
        plain, fast = (ratio(s, n) for s, n in zip(self.seconds, self.tokens, strict=True))
        row = {
            "running/speedup": ratio(plain, fast) if plain is not None and fast else None,
            "running/tokens_per_step": ratio(self.emitted, self.steps),
            "running/acceptance_rate": ratio(self.accepted, self.offered),
            "running/identical": self.identical / self.prompts,
        }
        return [{"prompt": before + i, **row} for i in range(1, len(strategy) + 1)]


def _decoded(done: Sequence[Generation]) -> int:
    """Tokens behind the first, which belongs to the prefill."""
    return sum(len(g.tokens) - 1 for g in done)
