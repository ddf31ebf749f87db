"""Runs made up of steps and prompts, written as real ones are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.events import Generation, Prefill, Step
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import Measurement, Sample
from decodelab.experiments.result import build_result, provenance, write_run
from decodelab.tests.rigged import ask

PLAIN = 0.010  # seconds of a plain step


def step(
    depth: int = 0, accepted: int = 0, *, verify: float = PLAIN, draft: float = 0.0, loop: float = 0.0, **more: Any
) -> Step:
    """A chain of `depth` tokens, of which `accepted` are kept; seconds of its phases."""
    made = Step(
        request=0, step=0, batch=1, drafted=depth, verified=1 + depth, depth=depth, accepted=accepted,
        emitted=accepted + 1, sources=("made up",) * accepted, also_proposed=((),) * accepted, kv_bytes=0, kv_formula=0,
        draft_s=draft, verify_s=verify, commit_s=loop,
    )  # fmt: skip
    return replace(made, **more)


def prompt(
    steps: Sequence[Step], category: str = "text", *, ttft: float = PLAIN, start: float = 0.0, **more: Any
) -> Sample:
    """Plain decoding takes PLAIN a token, the strategy what its steps take; both read the prompt in `ttft`."""
    emitted = [s.emitted for s in steps]
    tokens = list(range(1 + sum(emitted)))
    times = [ttft + start, *(ttft + start + at for at in accumulate(s.total_s for s in steps))]
    ours = list(zip(times, [1, *emitted], strict=True))
    plain = [(ttft + PLAIN * i, 1) for i in range(len(tokens))]
    sides = {
        "baseline": Generation(0, 4, tokens, None, "length", Prefill(0, 4, ttft, 0.0), [], plain),
        "strategy": Generation(0, 4, tokens, None, "length", Prefill(0, 4, ttft, start), list(steps), ours),
    }
    return Sample("made up", category, 0, None, plain=tokens, **sides, **more)  # type: ignore[arg-type]


def write(
    folder: Path, lab: Lab, *samples: Sample, config: Any = None, made: Any = None, result: Any = None, **measured: Any
) -> None:
    """A run's folder. `config`, `made` (its provenance) and `result` overwrite what is there without them."""
    units = [replace(s, unit=i, request=ask((1, 2, 3, 4), Greedy())) for i, s in enumerate(samples)]
    found = build_result(
        {"drafting": {"max_draft": 8}, "task": {"max_new_tokens": 40}, "batch": 1} | (config or {}),
        lab,
        replace(Measurement(timed=True, samples=units), **measured),
        digests={},
        provenance=provenance(torch.float32, 0, device="made up", load_before=0.1) | (made or {}),
        peaks=None,
        peak_bytes=None,
        warnings=[],
    )
    write_run(folder, found | (result or {}), units, lab.tokenizer)
