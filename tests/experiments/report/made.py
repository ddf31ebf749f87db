"""Folders of runs, made up: only what a report reads, so that each number is known beforehand."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from decodelab.experiments.format import NOISY
from decodelab.experiments.report.load import Run

LOOKUP = "decodelab.drafting.prompt_lookup.PromptLookup"
GREEDY = "decodelab.decoding.acceptance.Greedy"
POSITIONS = [{"rate": 0.8, "conditional": 0.8, "reached": 20}, {"rate": 0.4, "conditional": 0.5, "reached": 16}]
SHARES = {"draft": 0.1, "verify": 0.7, "accept": 0.1, "commit": 0.06, "other": 0.04}


def interval(value: float | None, low: float | None = None, high: float | None = None, n: int = 9) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n}


RESULT: Mapping[str, Any] = {
    "schema": 1,
    "key": "key",
    "config": {
        "model": {"name": "tiny", "path": None, "adapter": None},
        "drafting": {"_target_": LOOKUP, "max_draft": 15, "min_ngram": 1},
        "acceptance": {"_target_": GREEDY, "repetition_penalty": 1.0},
        "task": {"name": "demo", "path": None, "max_new_tokens": 32, "chat": None, "template": None},
        "batch": 1, "seed": 0, "output": None,
    },
    "digests": {"weights": "a" * 64, "draft": None, "task": "b" * 64, "quality": None},
    "provenance": {"device": "a laptop", "dtype": "float32", "started_at": "2026-01-01T00:00:00+00:00", "commit": "c0"},
    "status": "done",
    "prompts": 9,
    "baseline": {"kind": "plain decoder", "tokens_per_second": 50.0, "tpot_s": 0.02},
    "strategy": {
        "tokens_per_step": 2.2, "acceptance_rate": 0.6, "tokens_per_second": 100.0, "ttft_s": 0.1, "tpot_s": 0.01,
        "latency_s": 0.5, "rows_verified_per_step": 3.0, "acceptance_by_position": POSITIONS, "time_share": SHARES,
    },
    "by_category": {
        "chat": {"n": 4, "speedup": interval(0.9), "tokens_per_step": 1.1, "acceptance_rate": 0.1},
        "code": {"n": 5, "speedup": interval(3.0), "tokens_per_step": 4.0, "acceptance_rate": 0.9},
    },
    "speedup": interval(2.0, 1.5, 2.5),
    "end_to_end_speedup": interval(1.6, 1.2, 2.0),
    "predicted_speedup": 1.9,
    "exactness": {"verdict": "exact", "identical": 9, "prompts": 9, "divergences": []},
    "memory": {"weights_bytes": 2**20, "kv_bytes": 2**10, "peak_bytes": 2**30},
    "decode": {"mbu": 0.3},
    "quality": None,
    "profile": {"context": 64, "seconds": {"1": 0.01, "2": 0.011, "4": 0.012, "8": 0.016}, "explained": ["in words"],
                "draft": {"step_s": 0.0, "token_s": 0.0, "host_s": 0.0}},
    "warnings": [],
}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    """RESULT, with values at dotted keys written with __: speedup__value=3.0."""
    found = deepcopy(dict(RESULT))
    for path, value in changes.items():
        *outer, last = path.split("__")
        at = found
        for name in outer:
            at = at[name]
        at[last] = value
    return found


def brief(**changes: Any) -> dict[str, Any]:
    """With one picture's worth of numbers: pictures take a quarter of a second each."""
    return result(**{"strategy": {"tokens_per_step": 2.2}, "by_category": {}, "profile": None} | changes)


def run(folder: str = "here", **changes: Any) -> Run:
    """In memory."""
    return Run(Path(folder), result(**changes))


def quality(measures: str = "decoding", higher: bool = True, n: int = 10, **scores: float) -> dict[str, Any]:
    """What result.json holds of tasks by name: their score, ± 0.1."""
    settings = {"shots": 0, "limit": None, "batch": 1}
    return {
        "tasks": {
            name: {
                "kind": "generate", "measures": measures, "main": "acc", "higher_is_better": higher, "n": n,
                "repeats": 1, "truncated": 0.0, "digest": name, "settings": settings,
                "metrics": {"acc": interval(score, score - 0.1, score + 0.1, n)},
            }
            for name, score in scores.items()
        },
        "backend": "ours", "against": None, "interrupted": False,
    }  # fmt: skip


def quantised() -> list[Run]:
    """Weights as stored and quantised, plain and drafted for: of two prompts, the quantised ones on a busy machine."""
    found = []
    for bits, score, rate, held in ((None, 0.6, 10.0, 400), (4, 0.5, 15.0, 200), (3, 0.4, 14.0, 200)):
        for drafted in (False, True):
            form = {"_target_": f"decodelab.quantization.{'rtn.RTN' if bits else 'none.AsStored'}"}
            drafting = {"_target_": LOOKUP if drafted else "decodelab.drafting.none.Nothing"}
            changes: dict[str, Any] = {
                "config__drafting": drafting,
                "config__quantization": {**form, "bits": bits} if bits else form,
                "speedup": interval(2.0 if drafted else 1.0, n=2),
                "strategy__tokens_per_second": rate * (1 + drafted),
                "baseline__tokens_per_second": rate,
                "memory__weights_bytes": held * 2**20,
                "quality": quality(gsm=score),
                "warnings": [NOISY] if bits else [],
            }
            made = run(f"{bits}-{drafted}", **changes)
            made = Run(made.folder, {**made.result, "implementation": {"linear": f"int{bits} (int4pack), onednn"}})
            found.append(made)
    return found


def sample(name: str, plain: float, ours: float, tokens: int = 11, batch: int = 0, **more: Any) -> dict[str, Any]:
    """Decode seconds of both sides behind a first token after one second."""
    sides = {
        side: {
            "text": f"{side} of {name}", "tokens": list(range(tokens)), "ttft_s": 1.0, "latency_s": 1.0 + spent,
            "tpot_s": spent / (tokens - 1) if tokens > 1 else None,
        }
        for side, spent in (("baseline", plain), ("strategy", ours))
    }  # fmt: skip
    return {"id": name, "category": "chat", "batch": batch, "prompt": f"prompt {name}", **sides, **more}


def write(folder: Path, found: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> Path:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(found))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder
