"""`result.json`, schema 1, and the files beside it. What is not known is null, never 0."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..decoding.events import Generation, Step
from ..decoding.model.decoder import Decoder
from . import exactness, metrics
from .files import NOT_IN_KEY, SCHEMA, write_atomic, write_result
from .hardware import Peaks
from .lab import Lab, text_of
from .measure import Measurement, Sample, units
from .statistics import Interval, speedup_interval


def run_key(resolved: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    """A hash of the configuration and of the weights and task that it names."""
    config = {k: v for k, v in resolved.items() if k not in NOT_IN_KEY}
    return hashlib.sha256(json.dumps([config, digests], sort_keys=True, default=str).encode()).hexdigest()[:12]


def build_result(
    config: Mapping[str, Any],
    lab: Lab | None,
    measured: Measurement | None,
    *,
    digests: Mapping[str, Any],
    provenance: Mapping[str, Any],
    peaks: Peaks | None,
    peak_bytes: int | None,
    warnings: Sequence[str],
    profile: Mapping[str, Any] | None = None,
    compare_hf: Mapping[str, Any] | None = None,
    quality: Mapping[str, Any] | None = None,
    replay: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything a run found, as plain data. Without `measured`, quality alone: what speaks of speed is null. Without
    a `lab`, a replay: no model ran, so there is no output to judge."""
    found = _speed(lab, measured, peaks)
    verdict = found["exactness"]["verdict"] if found["exactness"] else None
    notes = [*warnings, *(measured.warnings if measured else ())]
    drawn = lab is not None and (lab.drafter.gives.q == "sampled" or lab.acceptance.needs_q)
    if lab is not None and verdict == "broken" and drawn and lab.acceptance.law().sample:
        pair = f"{type(lab.drafter).__name__} with {type(lab.acceptance).__name__}"
        notes.append(f"no test of ours proves the law of {pair}, so its output counts as broken")
    interrupted = (measured is not None and measured.interrupted) or (quality or {}).get("interrupted", False)
    failed = bool((quality or {}).get("failed"))
    steps = [step for s in measured.samples for step in s.strategy.steps] if measured else []
    return {
        "schema": SCHEMA,
        "key": run_key(config, digests),
        "config": dict(config),
        "digests": dict(digests),
        "provenance": dict(provenance),
        "status": _status(verdict, interrupted, failed),
        **found,
        "predicted_speedup": profile["predicted_speedup"] if profile else None,
        "memory": _memory(lab.target if lab else None, steps, peak_bytes),
        "pages": _pages(lab, measured.samples) if lab and measured else None,
        "quality": dict(quality) if quality else None,
        "compare_hf": dict(compare_hf) if compare_hf else None,
        "profile": dict(profile) if profile else None,
        "replay": dict(replay) if replay else None,
        "implementation": lab.target.implementation if lab else None,
        "warnings": list(dict.fromkeys(notes)),
    }


def _status(verdict: str | None, interrupted: bool, failed: bool) -> str:
    """The worst of what happened. `failed`: what was measured is whole, and a task of quality is not."""
    if verdict == "broken":
        return "broken"
    return "interrupted" if interrupted else "failed" if failed else "done"


def _speed(lab: Lab | None, measured: Measurement | None, peaks: Peaks | None) -> dict[str, Any]:
    """What was found of speed and exactness."""
    if measured is None:
        untimed = dict.fromkeys(("value", "low", "high", "n"))
        absent = dict.fromkeys(("baseline", "strategy", "exactness", "decode", "prefill", "timing"))
        return {"prompts": 0, "by_category": {}, "speedup": untimed, "end_to_end_speedup": untimed, **absent}
    samples, timed = measured.samples, measured.timed
    baseline, strategy = [s.baseline for s in samples], [s.strategy for s in samples]
    steps = [step for g in strategy for step in g.steps]
    target = lab.target if lab else None
    return {
        "prompts": len(samples),
        "timing": asdict(measured.timing),
        "baseline": {"kind": measured.baseline_kind, **metrics.timing(baseline, timed)},
        "strategy": {
            **metrics.timing(strategy, timed),
            **metrics.acceptance(steps),
            "time_share": metrics.time_share(steps if timed else ()),
        },
        "by_category": by_category(samples, timed),
        "speedup": _interval(samples, "decode", timed),
        "end_to_end_speedup": _interval(samples, "latency", timed),
        "exactness": _exactness(lab, samples) if lab else None,
        "decode": _mbu(target, measured, peaks if timed else None),
        "prefill": _mfu(target, strategy, peaks if timed else None),
    }


def _exactness(lab: Lab, samples: Sequence[Sample]) -> dict[str, Any]:
    divergences = [s.divergence for s in samples if s.divergence]
    return {
        "verdict": exactness.verdict(divergences, len(samples), lab.drafter, lab.acceptance, lab.target.dtype),
        "identical": len(samples) - len(divergences),
        "prompts": len(samples),
        "divergences": [d.as_dict() for d in divergences],
    }


def speedup(samples: Sequence[Sample], kind: Literal["decode", "latency"]) -> Interval:
    """Over units: a prompt, or the prompts of one batch, whose time is that of its slowest."""
    columns: list[list[float]] = [[], [], [], []]
    for unit in units(samples):
        row: list[float] = []
        for done in ([s.baseline for s in unit], [s.strategy for s in unit]):
            # the first token belongs to the prefill
            tokens = sum(len(g.tokens) - (kind == "decode") for g in done)
            row += [metrics.decode_seconds(done) if kind == "decode" else max(g.latency_s for g in done), tokens]
        if row[1] and row[3]:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return speedup_interval(*(np.array(column) for column in columns))


def _interval(samples: Sequence[Sample], kind: Literal["decode", "latency"], timed: bool) -> dict[str, Any]:
    return asdict(speedup(samples, kind)) if timed else dict.fromkeys(("value", "low", "high", "n"))


def by_category(samples: Sequence[Sample], timed: bool) -> dict[str, Any]:
    out = {}
    for name in dict.fromkeys(s.category for s in samples):
        mine = [s for s in samples if s.category == name]
        found = metrics.acceptance([step for s in mine for step in s.strategy.steps])
        out[name] = {
            "n": len(mine),
            "speedup": _interval(mine, "decode", timed),
            "tokens_per_step": found["tokens_per_step"],
            "acceptance_rate": found["acceptance_rate"],
        }
    return out


def _memory(target: Decoder | None, steps: Sequence[Step], peak_bytes: int | None) -> dict[str, Any]:
    """`weights_bytes`: of all products, and of the embedding table where it is held beside the unembedding."""
    if target is None:
        names = ("weights_bytes", "kv_bytes", "kv_bytes_formula", "kv_bytes_per_token")
        return {**dict.fromkeys(names), "peak_bytes": peak_bytes}
    per_token = target.config.layout.bytes_per_token(target.dtype.itemsize)
    kv_bytes, formula = max(((step.kv_bytes, step.kv_formula) for step in steps), default=(None, None))
    shared = getattr(target.unembedding, "weight", None) is target.embedding
    return {
        "weights_bytes": target.weight_bytes + (0 if shared else target.embedding.nbytes),
        "kv_bytes": kv_bytes,
        "kv_bytes_formula": formula,
        "kv_bytes_per_token": per_token,
        "peak_bytes": peak_bytes,
    }


def _pages(lab: Lab, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Of prompts' tokens, how many were found; of blocks, how many were in use at once. None: the cache is
    contiguous. A side whose tokens were stored by an earlier run has no blocks."""
    if lab.pages.size is None:
        return None
    found: dict[str, Any] = {"size": lab.pages.size, "share": lab.shares}
    for side in ("baseline", "strategy"):
        done: list[Generation] = [getattr(s, side) for s in samples]
        read = [g.prefill for g in done if g.prefill is not None]
        blocks = [step.kv_blocks for g in done for step in g.steps if step.kv_blocks is not None]
        asked = sum(p.tokens for p in read)
        found[side] = {
            "prompt_tokens": asked,
            "found_tokens": sum(p.found for p in read),
            "hit_rate": metrics.ratio(sum(p.found for p in read), asked),
            "blocks": max(blocks, default=None),
        }
    return found


def _mbu(target: Decoder | None, measured: Measurement, peaks: Peaks | None) -> dict[str, Any]:
    """Bytes that the steps read (weights, committed KV) ÷ their seconds ÷ the peak measured here; the textbook's value
    (bytes of weights × tokens/s of one sequence ÷ peak) beside it."""
    if peaks is None or target is None:
        return dict.fromkeys(("mbu", "mbu_baseline", "mbu_textbook", "peak"))
    per_token = target.config.layout.bytes_per_token(target.dtype.itemsize)
    batches = units(measured.samples)

    def used(side: Literal["baseline", "strategy"]) -> float | None:
        read = seconds = 0.0
        for unit in batches:
            done: list[Generation] = [getattr(s, side) for s in unit]
            seconds += metrics.decode_seconds(done)
            read += target.weight_bytes * max(len(g.delivered) - 1 for g in done)
            for g in done:
                # a step reads what the steps before it committed
                committed = accumulate((n for _, n in g.delivered[1:-1]), initial=g.prompt_tokens)
                read += per_token * sum(committed) if len(g.delivered) > 1 else 0
        return metrics.ratio(read, seconds * peaks.read_bytes_per_s)

    rate = metrics.timing([s.strategy for s in measured.samples])["tokens_per_second"]
    textbook = None if rate is None else target.weight_bytes * rate / peaks.read_bytes_per_s
    return {"mbu": used("strategy"), "mbu_baseline": used("baseline"), "mbu_textbook": textbook, "peak": "measured"}


def _mfu(target: Decoder | None, done: Sequence[Generation], peaks: Peaks | None) -> dict[str, Any]:
    """FLOPs of the prompts' rows ÷ prefill seconds ÷ the peak measured here. Prefill computes no row in vain."""
    if peaks is None or target is None:
        return dict.fromkeys(("mfu_useful", "mfu_hardware"))
    c = target.config
    head = target.unembedding.in_features * target.unembedding.out_features
    inner = target.product_elements - head
    flops = 0.0
    for g in done:
        found = g.prefill.found if g.prefill else 0  # these were not computed, and rows behind them see them
        context = (found + g.prompt_tokens) / 2
        each = metrics.decode_flops_per_token(inner, c.layers, c.heads, c.head_dim, context)
        flops += (g.prompt_tokens - found) * each + 2.0 * head
    used = metrics.ratio(flops, sum(g.prefill.seconds for g in done if g.prefill) * peaks.flops_per_s)
    return {"mfu_useful": used, "mfu_hardware": used}


def provenance(dtype: torch.dtype, seed: int, *, device: str, **more: Any) -> dict[str, Any]:
    """Where and with what a run was made."""
    from .. import __version__

    commit, dirty = _commit()
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "version": __version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
        **more,
    }


def _commit() -> tuple[str | None, bool | None]:
    """Of the checkout that the package runs from; (None, None) for an installed one."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None, None
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head, bool(status.strip())


def write_run(
    folder: Path, result: Mapping[str, Any], samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase
) -> None:
    """`events.jsonl` and `samples.jsonl` first, `result.json` last: a folder with a result is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "events.jsonl", _events(samples))
    write_lines(folder / "samples.jsonl", (_sample(s, tokenizer) for s in samples))
    write_result(folder, result)


def write_replay(folder: Path, result: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """`events.jsonl` and `result.json`: prompts and answers are where they were read. Steps are without a cache and
    without seconds but those of drafting."""
    unknown = {"at_s", "verify_s", "accept_s", "commit_s", "other_s", "kv_bytes", "kv_formula", "kv_blocks"}
    known = ({key: value for key, value in row.items() if key not in unknown} for row in _events(samples))
    write_lines(folder / "events.jsonl", known)
    write_result(folder, result)


def _events(samples: Sequence[Sample]) -> Iterable[dict[str, Any]]:
    names = [field.name for field in fields(Step)]  # all of them plain: `asdict` would copy each value
    for sample in samples:
        for side, g in (("baseline", sample.baseline), ("strategy", sample.strategy)):
            if g.prefill is not None:
                yield {"id": sample.id, "side": side, "event": "prefill", **asdict(g.prefill)}
            for step in g.steps:
                yield {"id": sample.id, "side": side, "event": "step", **{name: getattr(step, name) for name in names}}


def _sample(s: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": s.id,
        "category": s.category,
        "batch": s.unit,
        "prompt_tokens": len(s.prompt),
        "prompt": text_of(tokenizer, s.prompt),
        "prompt_ids": s.prompt,  # this and the next two are what a replay reads
        "documents": s.request.documents,
        "max_new_tokens": s.request.stop.limit,
    }
    for side, g in (("baseline", s.baseline), ("strategy", s.strategy)):
        timed = bool(g.delivered)
        row[side] = {
            "text": text_of(tokenizer, g.tokens),
            "tokens": g.tokens,
            "reason": g.reason,
            "ttft_s": g.ttft_s if timed else None,
            "tpot_s": metrics.tpot(g) if timed else None,
            "latency_s": g.latency_s if timed else None,
            "delivered": g.delivered if timed else None,  # (seconds since the request began, tokens delivered then)
        }
    row["divergence"] = s.divergence.as_dict() if s.divergence else None
    return row


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
