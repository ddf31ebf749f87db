"""The job `run`: strategy against baseline on a task."""

import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from ..decoding import cost
from ..decoding.errors import UserError
from ..decoding.model.source import Source, open_source
from . import hardware, table
from .compare_hf import HfPeer, summarise, why_not
from .composition import draft_models, resolve, resolve_device, resolve_dtype, unused_gpu
from .config import RunConfig
from .lab import Heard, Lab, draft_digest, load_lab
from .measure import Measurement, measure
from .progress import Watch
from .result import build_result, provenance, run_key, speedup, write_run
from .tasks import load_task

PROFILED = 3  # prompts from which the draft's cost is taken
BUSY = 1.0  # load average before the run: something else wants a core
BATCHED = "no speedup is predicted for batch > 1: T(k) is measured for the rows of one sequence"


def run(config: RunConfig) -> int:
    """Measure, write the run's folder, print the table. 1 if the output is broken, 130 if interrupted, else 0."""
    with hardware.torch_threads(config.threads):
        return _run(config)


def _run(config: RunConfig) -> int:
    started = datetime.now(UTC)
    load_before = hardware.load_average()
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    task = load_task(config.task)
    if config.compare_hf and (reason := why_not(config.acceptance.law())) is not None:
        raise UserError(reason)
    with Watch() as watch, Heard() as heard:
        source = open_source(config.model, watch.step)
        notes = resolve(config, source, task).notes()
        if (idle := unused_gpu()) is not None:
            notes.append(idle)
        digests = {"weights": source.digest, "draft": draft_digest(config.drafting), "task": task.digest}
        # what `auto` and null came to is part of what was run
        settled = {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "threads": torch.get_num_threads(),
        }
        resolved = config.resolved | settled
        folder = _folder(config, run_key(resolved, digests), source, started)
        try:
            lab = load_lab(source, config.drafting, config.acceptance, dtype=dtype, device=device, progress=watch.step)
            hf = _peer(config, source, dtype, device) if config.compare_hf else None
            peaks = hardware.peaks(device, dtype, torch.get_num_threads()) if config.timing == "paired" else None
            if peaks is not None and (not peaks.quiet or (load_before or 0.0) > BUSY):
                notes.append("other programs use the cores: speeds are noisy and MBU is off; run it again when quiet")
            measured = measure(
                lab,
                task,
                config.task,
                seed=config.seed,
                batch=config.batch,
                timing=config.timing,
                hf=hf,
                progress=lambda done, total, note: watch.step("decoding", done, total, note),
            )
        except BaseException:
            with suppress(OSError):  # it is empty
                folder.rmdir()
            raise
        profiled = _profile(lab, measured, config.batch, config.seed) if config.profile else None
    result = build_result(
        resolved,
        lab,
        measured,
        digests=digests,
        provenance=provenance(
            dtype,
            config.seed,
            device=hardware.describe_device(device),
            dtype_reason=why,
            started_at=started.isoformat(timespec="seconds"),
            load_before=load_before,
            load_after=hardware.load_average(),
            clock_mhz=hardware.clock_mhz(),
        ),
        peaks=peaks,
        peak_bytes=hardware.peak_memory_bytes(device),
        warnings=[*notes, *heard.texts],
        profile=profiled,
        compare_hf=_summary(hf, measured) if hf else None,
    )
    rule = type(config.acceptance).__name__.lower()
    title = f"{lab.source.label}: {' + '.join(lab.drafter.sources)}, {rule}, {task.label}"
    console = Console(highlight=False, markup=False)
    table.show(result, measured.samples, title, console)  # first: a full disk does not take it away
    write_run(folder, result, measured.samples, lab)
    console.print(f"\nwritten to {folder}", soft_wrap=True)
    if measured.interrupted:
        print(f"decodelab: interrupted after {len(measured.samples)} prompts; they are in {folder}", file=sys.stderr)
        return 130
    return 1 if result["status"] == "broken" else 0


def _profile(lab: Lab, measured: Measurement, batch: int, seed: int) -> dict[str, Any] | None:
    """T(k) and the draft's cost, measured apart from the timed run, and what they say of it. T(k) is of one sequence.

    None where the run was interrupted or is now: what was measured before is kept.
    """
    if measured.interrupted:
        return None
    samples = measured.samples
    steps = [step for s in samples for step in s.strategy.steps]
    context = round(mean(len(s.prompt) + len(s.plain) / 2 for s in samples))
    some = [s.request for s in samples[:PROFILED]]
    try:
        profile = cost.measure_target(lab.target, context=max(1, min(context, lab.context - max(cost.ROWS))))
        draft = cost.draft_cost(lab.target, lab.drafter, lab.acceptance, some, seed=seed)
    except KeyboardInterrupt:
        measured.interrupted = True
        return None
    timed = speedup(samples, "decode").value if measured.timed else None
    return {
        "context": profile.context,
        "seconds": profile.seconds,
        "draft": asdict(draft),
        "alpha": cost.acceptance_probability(steps),
        "predicted_speedup": cost.predict(profile, draft, steps) if batch == 1 else None,
        "explained": cost.explain(profile, draft, steps, timed) if batch == 1 else [BATCHED],
    }


def _peer(config: RunConfig, source: Source, dtype: torch.dtype, device: torch.device) -> HfPeer:
    """transformers' model, assisted by the drafter's first model if it has one, with drafts as long as ours."""
    draft = next((open_source(spec) for spec in draft_models(config.drafting)), None)
    return HfPeer.build(source, dtype, device, draft, max(1, config.drafting.gives.depth))


def _summary(hf: HfPeer, measured: Measurement) -> dict[str, Any]:
    samples = measured.samples
    runs = {mode: [s.hf[mode] for s in samples] for mode in hf.modes}
    return summarise(hf, runs, [s.plain for s in samples])


def _folder(config: RunConfig, key: str, source: Source, started: datetime) -> Path:
    """`output`, or outputs/TIME-SLUG-KEY; made at once: a folder that cannot be written fails before the work."""
    if config.output is not None and not config.output.strip():
        raise UserError("output is empty; name a folder, or null for a new one under outputs/")
    if config.output is not None:
        folder = Path(config.output).expanduser()
    else:
        drafter = type(config.drafting).__module__.rpartition(".")[2]  # one file a drafter
        slug = f"{drafter}-{source.label}".replace("/", "_")
        folder = Path("outputs") / f"{started:%Y%m%d-%H%M%S}-{slug}-{key}"
    try:
        if config.output is not None and (folder / "result.json").exists():
            raise UserError(f"output={config.output} already holds a result; name another folder or delete that one")
        plain, count = folder, 1
        while config.output is None and folder.exists():  # two runs of one second
            count += 1
            folder = plain.with_name(f"{plain.name}-{count}")
        folder.mkdir(parents=True, exist_ok=config.output is not None)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"output folder {folder} cannot be written ({error.strerror}); name another with output=DIR"
        ) from error
    return folder
