"""The job `run`: strategy against baseline on a task."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..decoding.errors import UserError
from ..drafting.draft_model import DraftModel
from . import hardware, table
from .compare_hf import HfPeer
from .composition import resolve, resolve_device, resolve_dtype
from .config import RunConfig
from .cost import measured_cost
from .lab import Heard, Lab, load_lab
from .measure import Measurement, measure
from .progress import Watch
from .result import build_result, provenance, run_key, write_run
from .tasks import load_task


def run(config: RunConfig) -> int:
    """Measure, write the run's folder, print the table. 1 if the output is broken, 130 if interrupted, else 0."""
    console = Console()
    started = datetime.now(UTC)
    load_before = hardware.load_average()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    task = load_task(config.task)
    with Watch() as watch, Heard() as heard:
        notes = list(resolve(config, None).warnings)
        lab = load_lab(config.model, config.drafting, config.acceptance, dtype=dtype, device=device, progress=watch.step)
        notes += lab.notes
        digests = {"weights": lab.source.digest, "draft": draft_digest(config), "task": task.digest}
        folder = _folder(config, run_key(config.resolved, digests), lab, started)
        hf = _peer(config, lab, dtype, device) if config.compare_hf else None
        peaks = hardware.peaks(device, dtype, torch.get_num_threads()) if config.timing == "paired" else None
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
        cost = measured_cost(lab, measured, config.seed, watch.step) if config.profile and not measured.interrupted else None
    result = build_result(
        config,
        lab,
        measured,
        digests=digests,
        provenance=provenance(
            device,
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
        predicted=cost.predicted if cost else None,
        profile=cost.as_dict() if cost else None,
        compare_hf=hf.summary([s for s in measured.samples]) if hf else None,
    )
    write_run(folder, result, measured.samples, lab)
    title = f"{lab.source.label}: {' + '.join(lab.drafter.sources)}, {type(config.acceptance).__name__.lower()}, {task.label}"
    table.show(result, measured.samples, title, result["provenance"]["device"], console)
    console.print(f"written to {folder}")
    if measured.interrupted:
        print(f"decodelab: interrupted after {len(measured.samples)} prompts; they are in {folder}", file=sys.stderr)
        return 130
    return 1 if result["status"] == "broken" else 0


def draft_digest(config: RunConfig) -> str | None:
    """The weights of the model that drafts, if one does."""
    from ..decoding.model.source import open_source

    return open_source(config.drafting.model.model).digest if isinstance(config.drafting, DraftModel) else None


def _peer(config: RunConfig, lab: Lab, dtype: torch.dtype, device: torch.device) -> HfPeer:
    from ..decoding.model.source import open_source

    if config.acceptance.law().sample or not config.acceptance.law().plain:
        raise UserError("compare_hf=true compares plain greedy decoding; it needs acceptance=greedy without penalties")
    draft = open_source(config.drafting.model.model) if isinstance(config.drafting, DraftModel) else None
    return HfPeer.build(lab.source, dtype, device, draft)


def _folder(config: RunConfig, key: str, lab: Lab, started: datetime) -> Path:
    """`output`, or outputs/TIME-SLUG-KEY; made at once, so that a folder that cannot be written fails before the work."""
    if config.output is not None:
        folder = Path(config.output).expanduser()
        if (folder / "result.json").exists():
            raise UserError(f"output={config.output} already holds a result; name another folder or delete that one")
    else:
        slug = "-".join([*lab.drafter.sources, lab.source.label]).replace("/", "_")
        folder = Path("outputs") / f"{started:%Y%m%d-%H%M%S}-{slug}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"output folder {folder} cannot be written ({error.strerror}); name another with output=DIR") from error
    return folder
