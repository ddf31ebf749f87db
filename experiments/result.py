"""`result.json`, schema 1, and the files beside it. What is not known is null, never 0."""

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from ..attention.layout import Layout
from ..decoding.events import Generation
from ..decoding.model.decoder import Decoder
from . import exactness, metrics
from .hardware import Peaks
from .lab import Lab
from .measure import Measurement, Sample
from .statistics import Interval, speedup_interval

SCHEMA = 1
# What does not change what is measured, so that it does not change a run's key.
_NOT_IN_KEY = ("output", "tracking", "hydra", "rerun")


def run_key(resolved: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    """A hash of the configuration and of the weights and task that it names."""
    config = {k: v for k, v in resolved.items() if k not in _NOT_IN_KEY}
    return hashlib.sha256(json.dumps([config, digests], sort_keys=True, default=str).encode()).hexdigest()[:12]


def build_result(
    config: Mapping[str, Any],
    batch: int,
    lab: Lab,
    measured: Measurement,
    *,
    digests: Mapping[str, Any],
    provenance: Mapping[str, Any],
    peaks: Peaks | None,
    peak_bytes: int | None,
    warnings: Sequence[str],
    profile: Mapping[str, Any] | None = None,
    compare_hf: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything a run found, as plain data."""
    samples = measured.samples
    baseline, strategy = _sides(samples)
    steps = [step for g in strategy for step in g.steps]
    timed = measured.timed
    verdict = exactness.verdict(
        [(s.divergence, s.top_logit) for s in samples if s.divergence],
        len(samples),
        lab.drafter,
        lab.acceptance,
        lab.target.dtype,
    )
    return {
        "schema": SCHEMA,
        "key": run_key(config, digests),
        "config": dict(config),
        "digests": dict(digests),
        "provenance": dict(provenance),
        "status": "broken" if verdict == "broken" else "interrupted" if measured.interrupted else "done",
        "prompts": len(samples),
        "baseline": {"kind": measured.baseline_kind, **(metrics.timing(baseline) if timed else _untimed(baseline))},
        "strategy": {
            **(metrics.timing(strategy) if timed else _untimed(strategy)),
            **metrics.acceptance(steps),
            "time_share": metrics.time_share(steps) if timed else None,
        },
        "by_category": by_category(samples, timed),
        "speedup": asdict(speedup(samples, "decode")) if timed else None,
        "end_to_end_speedup": asdict(speedup(samples, "latency")) if timed else None,
        "predicted_speedup": profile["predicted_speedup"] if profile else None,
        "exactness": {
            "verdict": verdict,
            "identical": sum(s.divergence is None for s in samples),
            "prompts": len(samples),
            "divergences": [s.divergence.as_dict() for s in samples if s.divergence],
        },
        "memory": _memory(lab.target, samples, peak_bytes),
        "decode": _mbu(lab.target, baseline, strategy, batch, peaks) if timed else None,
        "prefill": _mfu(lab.target, strategy, peaks) if timed else None,
        "quality": None,
        "compare_hf": dict(compare_hf) if compare_hf else None,
        "profile": dict(profile) if profile else None,
        "implementation": lab.target.implementation,
        "warnings": list(dict.fromkeys(warnings)),
    }


def _sides(samples: Sequence[Sample]) -> tuple[list[Generation], list[Generation]]:
    return [s.baseline for s in samples if s.baseline], [s.strategy for s in samples if s.strategy]


def _untimed(done: Sequence[Generation]) -> dict[str, Any]:
    names = ("ttft_s", "tpot_s", "itl_p50_s", "itl_p99_s", "tokens_per_second", "latency_s")
    return {"tokens": sum(len(g.tokens) for g in done), **dict.fromkeys(names)}


def speedup(samples: Sequence[Sample], kind: str) -> Interval:
    """Over units: a prompt, or the prompts of one batch, whose time is that of its slowest."""
    units: dict[int, list[Sample]] = {}
    for s in samples:
        units.setdefault(s.unit, []).append(s)
    columns: list[list[float]] = [[], [], [], []]
    for unit in units.values():
        row: list[float] = []
        for done in _sides(unit):
            first = 0.0 if kind == "latency" else max(g.ttft_s for g in done)
            # the first token belongs to the prefill
            tokens = sum(len(g.tokens) - (kind == "decode") for g in done)
            row += [max(g.latency_s for g in done) - first, tokens]
        if row[1] and row[3]:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return speedup_interval(*(torch.tensor(c, dtype=torch.float64).numpy() for c in columns))


def by_category(samples: Sequence[Sample], timed: bool) -> dict[str, Any]:
    out = {}
    for name in dict.fromkeys(s.category for s in samples):
        mine = [s for s in samples if s.category == name]
        found = metrics.acceptance([step for g in _sides(mine)[1] for step in g.steps])
        out[name] = {
            "n": len(mine),
            "speedup": asdict(speedup(mine, "decode")) if timed else None,
            "tokens_per_step": found["tokens_per_step"],
            "acceptance_rate": found["acceptance_rate"],
        }
    return out


def _memory(target: Decoder, samples: Sequence[Sample], peak_bytes: int | None) -> dict[str, Any]:
    per_token = target.config.layout.bytes_per_token(target.dtype.itemsize)
    held = [(step.kv_bytes, step.kv_slots) for s in samples if s.strategy for step in s.strategy.steps]
    kv_bytes, slots = max(held, default=(None, None))
    return {
        "weights_bytes": target.weight_bytes,
        "kv_bytes": kv_bytes,
        "kv_bytes_formula": None if slots is None else per_token * slots,
        "kv_bytes_per_token": per_token,
        "peak_bytes": peak_bytes,
    }


def _mbu(
    target: Decoder, baseline: Sequence[Generation], strategy: Sequence[Generation], batch: int, peaks: Peaks | None
) -> dict[str, Any] | None:
    """Bytes a step reads (weights, committed KV) ÷ its seconds ÷ the peak measured here; the textbook's beside it."""
    if peaks is None:
        return None
    per_token = target.config.layout.bytes_per_token(target.dtype.itemsize)

    def used(done: Sequence[Generation]) -> float | None:
        read = 0.0
        for g in done:
            lengths = g.prompt_tokens
            for emitted in [n for _, n in g.delivered[1:]]:
                read += target.weight_bytes / batch + lengths * per_token
                lengths += emitted
        return metrics.ratio(read, sum(g.decode_s for g in done) / batch * peaks.read_bytes_per_s)

    rate = metrics.timing(strategy)["tokens_per_second"]
    textbook = None if rate is None else target.weight_bytes * rate / peaks.read_bytes_per_s
    return {"mbu": used(strategy), "mbu_baseline": used(baseline), "mbu_textbook": textbook, "peak": "measured"}


def _mfu(target: Decoder, done: Sequence[Generation], peaks: Peaks | None) -> dict[str, Any] | None:
    """FLOPs of the prompts' rows ÷ prefill seconds ÷ the peak measured here. Prefill computes no row in vain."""
    if peaks is None:
        return None
    c = target.config
    head = target.unembedding.in_features * target.unembedding.out_features
    inner = target.weight_bytes // target.dtype.itemsize - head
    flops = sum(
        g.prompt_tokens * metrics.decode_flops_per_token(inner, c.layers, c.heads, c.head_dim, g.prompt_tokens / 2)
        + 2.0 * head
        for g in done
    )
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


def write_run(folder: Path, result: Mapping[str, Any], samples: Sequence[Sample], lab: Lab) -> None:
    """`events.jsonl` and `samples.jsonl` first, `result.json` last: a folder with a result is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "events.jsonl", _events(samples))
    write_lines(folder / "samples.jsonl", (_sample(s, lab) for s in samples))
    write_atomic(folder / "result.json", json.dumps(result, indent=1, default=str) + "\n")


def _events(samples: Sequence[Sample]) -> Iterable[dict[str, Any]]:
    for sample in samples:
        for side, g in (("baseline", sample.baseline), ("strategy", sample.strategy)):
            if g is None:
                continue
            if g.prefill is not None:
                yield {"id": sample.id, "side": side, "event": "prefill", **asdict(g.prefill)}
            for step in g.steps:
                yield {"id": sample.id, "side": side, "event": "step", **asdict(step)}


def _sample(s: Sample, lab: Lab) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": s.id,
        "category": s.category,
        "prompt_tokens": len(s.prompt),
        "prompt": lab.text(s.prompt),
    }
    for side, g in (("baseline", s.baseline), ("strategy", s.strategy)):
        if g is not None:
            timed = bool(g.delivered)
            row[side] = {
                "text": lab.text(g.tokens),
                "tokens": g.tokens,
                "reason": g.reason,
                "ttft_s": g.ttft_s if timed else None,
                "tpot_s": metrics.tpot(g) if timed else None,
                "latency_s": g.latency_s if timed else None,
            }
    row["divergence"] = s.divergence.as_dict() if s.divergence else None
    return row


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))


def write_atomic(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def layout_line(layout: Layout) -> str:
    """The KV layout in a few words."""
    first = layout.layers[0]
    windows = sorted({layer.window for layer in layout.layers if layer.window is not None})
    text = f"{len(layout.owners)} layers × {first.kv_heads} KV heads × {layout.head_dim}"
    return text + (f", windows {windows}" if windows else "")
