"""What a run is, known before any weight is loaded: its files, its configuration as it came out, its key."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attention.layout import Layout
from ..decoding.model.source import ModelSpec, Source, open_source
from ..errors import UserError
from ..kernels.native import missing
from ..quantization.formats import NATIVE
from .composition import layout_of, resolve_device, resolve_dtype
from .config import RunConfig
from .lab import Progress, draft_digest
from .overlap import Marks, Overlap, check_overlap, judging
from .quality.evaluate import quality_digest
from .quantise import as_read, kept_blocks, planned
from .quantised_folder import READ, REPORT, copy_of, read_record
from .quantising import Quantising
from .replay import Recording, open_recording
from .result import run_key
from .tasks import Task, load_task


@dataclass(frozen=True)
class Identity:
    """What a run is before any weight is loaded. `key` is a hash of `resolved` and `digests`. `layout`: of keys and
    values, None for the model's own. A replay has a recording, and no source but to read its texts."""

    source: Source | None
    task: Task | None
    device: torch.device
    dtype: torch.dtype
    why: str  # the reason of the dtype
    digests: Mapping[str, str | None]
    resolved: Mapping[str, Any]
    slug: str  # drafter and model
    key: str
    recording: Recording | None = None
    quantising: Quantising | None = None
    layout: Layout | None = None

    def target(self, progress: Progress | None = None) -> Source:
        """What is decoded: the model, or its quantised copy, which is made where it is not there."""
        assert self.source is not None, "a replay decodes nothing"
        return self.source if self.quantising is None else open_source(copy_of(self.quantising, progress), progress)

    @property
    def quantised(self) -> Mapping[str, Any] | None:
        """How the quantised weights that are decoded came to be, by their folder; None of weights as stored."""
        made = self.quantising
        folder = _folder(self.resolved["model"]["path"] if made is None else copy_of(made).path)
        if not (folder / REPORT).is_file():
            return None if self.source is None else kept_blocks(self.source)
        known = read_record(folder, REPORT)
        found = {key: known.get(key) for key in ("kind", "settings", "calibration", "source", "warnings")}
        notes = Counter(note for layer in known.get("layers") or () for note in layer["notes"])
        left = Counter((known.get("skipped") or {}).values())
        said = [f"of {n} quantised layers: {note}" for note, n in notes.items()]
        said += [f"{n} layers are not quantised ({why})" for why, n in left.items()]
        return found | {"warnings": [*(found["warnings"] or ()), *said]}

    @property
    def calibrated(self) -> tuple[Marks, Overlap] | None:
        """What the quantised weights that are decoded, or will be, were calibrated on; and what to do where they are
        judged by it."""
        return calibrated_on(self.quantising, self.resolved["model"]["path"])


def calibrated_on(made: Quantising | None, path: str | None) -> tuple[Marks, Overlap] | None:
    """As `Identity.calibrated`, of the model at `path`."""
    if made is not None:
        read = made.settings.calibration
        return None if read is None or made.pieces is None else (Marks.of_pieces(made.pieces), read.overlap)
    folder = _folder(path)
    if not (folder / READ).is_file():
        return None
    known = read_record(folder, READ)
    return Marks(known["marks"]), known["overlap"]


def overlaps(calibrated: tuple[Marks, Overlap] | None, task: Task | None, asked: Mapping[str, Any]) -> list[str]:
    """What the target was, or will be, calibrated on must not be what it is judged by. `asked`: lm-eval's tasks."""
    if calibrated is None:
        return []
    marks, how = calibrated
    return check_overlap(marks, judging(task.items if task is not None else (), asked), how)


def _folder(path: str | None) -> Path:
    """That of a GGUF file, or the path itself: where a quantised model says how it came to be."""
    found = Path(path or "").expanduser()
    return found.parent if found.is_file() else found


def identify(
    config: RunConfig,
    progress: Progress | None = None,
    *,
    speed: bool = True,
    opened: Callable[[ModelSpec], Source] | None = None,
) -> Identity:
    """Opens the files of the model and the task. Without `speed`, the job is `evaluate` and the task plays no part.
    `opened`: of many cells, what opens a model once for all."""
    opened = opened or partial(open_source, progress=progress)
    if config.replay is not None:
        return _identify_replay(config, config.replay, opened, speed)
    if not speed and not config.quality.tasks:
        raise UserError("evaluate has nothing to do: name tasks, such as tasks=[{path: my.jsonl}]")
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    task = load_task(config.task) if speed else None
    source = as_read(config, opened(config.model))
    if config.format != NATIVE.title:
        raise UserError(f"format={config.format} is of the job quantize, whose folder is then named as model.path")
    layout = layout_of(config, source)
    quantising = planned(config, source, dtype)
    digests = {
        "weights": source.digest,
        "model": source.identity,
        **({} if quantising is None else {"quantised": quantising.key}),
        "draft": draft_digest(config.drafting, opened),
        "task": None if task is None else task.digest,
        "quality": quality_digest(config),
        "replay": None,
        **({} if standing_in(dtype, device) is None else {"kernels": "torch"}),
    }
    # what `auto` and null came to is part of what was run
    settled = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "threads": config.threads or torch.get_num_threads(),
    }
    resolved = config.resolved | settled
    label = source.label if quantising is None else quantising.label
    slug = f"{drafter_name(config)}-{label}".replace("/", "_")
    key = run_key(resolved, digests)
    return Identity(
        source, task, device, dtype, why, digests, resolved, slug, key, quantising=quantising, layout=layout
    )


def _identify_replay(config: RunConfig, replay: str, opened: Callable[[ModelSpec], Source], speed: bool) -> Identity:
    if not speed:
        raise UserError("evaluate needs a model, and replay has answers and none: leave replay out")
    recording = open_recording(replay, config.task)
    source = opened(config.model) if recording.task else None
    known = recording.run.get("digests", {})
    digests = {
        "weights": source.digest if source else known.get("weights"),
        "model": source.identity if source else known.get("model"),
        "draft": draft_digest(config.drafting, opened),
        "task": recording.task.digest if recording.task else known.get("task", recording.digest),
        "quality": None,
        "replay": recording.digest,
    }
    threads = {"device": "cpu", "threads": config.threads or torch.get_num_threads()}
    resolved = recording.settled(config.resolved) | threads
    slug = f"{drafter_name(config)}-replay-{recording.label}".replace("/", "_")
    cpu, why = torch.device("cpu"), "nothing is computed in it"
    key = run_key(resolved, digests)
    return Identity(source, recording.task, cpu, torch.float32, why, digests, resolved, slug, key, recording)


def standing_in(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why PyTorch computes what our own kernels of the CPU would, and round otherwise; None where they do."""
    if dtype != torch.bfloat16 or device.type != "cpu" or (why := missing()) is None:
        return None
    return f"PyTorch's operations stand in for our own kernels of the CPU: {why}"


def drafter_name(config: RunConfig) -> str:
    return type(config.drafting).__module__.rpartition(".")[2]  # one file a drafter
