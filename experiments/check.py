"""The job `check`: what a configuration would do, and whether it can."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from rich.console import Console
from rich.table import Table

from ..attention.picture import picture
from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings, Needs
from ..decoding.law import LawSettings
from ..decoding.model.config import ModelConfig
from ..decoding.model.fetch import NotHere
from ..decoding.model.source import ModelSpec, Source, open_source
from ..errors import UserError
from ..quantization.formats import NATIVE
from .columns import stdout
from .composition import Composition, Exactness, draft_models, resolve, resolve_device, resolve_dtype, unused_gpu
from .config import PageSettings, RunConfig
from .format import counted, size
from .hardware import describe_device
from .identity import calibrated_on, overlaps
from .quality.evaluate import check_quality
from .quantise import as_read, kept_blocks, planned
from .quantising import Quantising
from .replay import Recording, open_recording
from .sweep.grid import Cell
from .targets import Answer, answer
from .tasks import FORMATS, Task, TaskSettings, load_task, read_rows

_EXPECTED: dict[Exactness, str] = {
    "exact": "plain decoding's own tokens (where two tie within rounding, perhaps the other one)",
    "same law": "other tokens than plain sampling's, of the same distribution",
    "lossy": "another distribution than the target's, by design",
}
_NAMED = 3  # cells of a warning
_ABSENT = "what the files of the models decide is known once they are fetched"
_NEEDS = {
    "prefill_hidden": "hidden states of the prompt",
    "argmax": "the target's likeliest token at every row",
    "choices": "what plain decoding would emit at every row",
    "target_cache": "the target's KV cache",
    "second_model": "a second model",
    "documents": "documents",
    "costs": "what rows cost the target",
}


@dataclass(frozen=True)
class _Look:
    """What can be known of a configuration from here. `absent`: models that are to be fetched; `overlaps`: texts that a
    run is judged by and was calibrated on; `served`: by the key `target`. A replay of ids has no target."""

    target: Source | NotHere | None
    absent: list[str]
    task: Task | None
    composition: Composition
    recording: Recording | None = None
    quantising: Quantising | None = None
    overlaps: Sequence[str] = ()
    served: Answer | None = None

    def __str__(self) -> str:
        if self.refused and self.served is not None:
            return f"refused, because {self.served.target} has no kernel for all of these layers"
        return str(self.composition)

    @property
    def refused(self) -> bool:
        return self.composition.verdict == "refused" or (self.served is not None and self.served.found is False)


def check(config: RunConfig) -> int:
    """Print it; 0 if it runs, 2 if it is refused. Loads no weights and fetches nothing."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    look = _look(config, _opened, _task)
    target, absent, task, composition = look.target, look.absent, look.task, look.composition
    kept = kept_blocks(target) if isinstance(target, Source) else None
    to_fetch = list(absent)

    table = Table.grid(padding=(0, 2))
    rows: dict[str, str] = {}
    if target is not None:
        rows["model"] = f"{target}: not here yet" if isinstance(target, NotHere) else _model(target)
    if look.recording is not None:
        rows["replay"] = _answers(look.recording, config.task)
        rows["drafting"] = _drafter(config.drafting)
        rows["output"] = "the answers as they are; acceptance and tokens a step are what a run would come to"
    else:
        rows["dtype"] = f"{str(dtype).removeprefix('torch.')} ({why})"
        rows["device"] = f"{device} ({describe_device(device)})"
        if isinstance(target, Source):
            rows["attention"] = _layout(config, target, dtype)
        if config.pages.size is not None:
            rows["pages"] = _pages(config.pages)
        if look.quantising is not None:
            rows["quantization"] = str(look.quantising)
        if kept is not None:
            rows["quantization"] = kept["settings"]
        if look.served is not None:
            rows[look.served.target] = str(look.served)
        rows["drafting"] = _drafter(config.drafting)
        rows["acceptance"] = _rule(config.acceptance)
        rows["task"] = _prompts(task, config.task)
        if config.quality.tasks:
            rows["quality"] = ", ".join(t if isinstance(t, str) else t.title for t in config.quality.tasks)
        rows["output"] = _EXPECTED[composition.exactness]
        to_fetch += [] if task else [f"{config.task.dataset} (by the datasets library, unless it has it)"]
    rows["to fetch"] = "; ".join(to_fetch) or "nothing"
    for name, text in rows.items():
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)
    doubts = look.quantising.warnings if look.quantising is not None else () if kept is None else kept["warnings"]
    for warning in [*composition.warnings, *look.overlaps, *doubts, *filter(None, [unused_gpu()])]:
        stdout().print(f"warning: {warning}")
    if absent:
        stdout().print(f"warning: {_ABSENT}")
    print(look)
    return 2 if look.refused else 0


def check_cells(cells: Sequence[Cell], configs: Sequence[RunConfig]) -> int:
    """A line for each cell of a sweep, and what is warned of, once; 2 if any is refused."""
    opened, loaded = cache(_opened), cache(_task)  # by cells that share them
    width = max(len(cell.label) for cell in cells)
    refused, absent, warnings = 0, dict[str, None](), dict[str, list[str]]()
    for cell, config in zip(cells, configs, strict=True):
        try:
            resolve_dtype(config.dtype, resolve_device(config.device))
            look = _look(config, opened, loaded)
            told, wrong = str(look), look.refused
            for warning in dict.fromkeys([*look.composition.warnings, *look.overlaps]):
                warnings.setdefault(warning, []).append(cell.label)
            absent.update(dict.fromkeys(look.absent))
        except UserError as error:
            told, wrong = f"refused, because {error}", True
        refused += wrong
        print(f"{cell.label:{width}}  {told}")
    for warning, labels in warnings.items():
        named = "; ".join(labels[:_NAMED]) + "; …" * (len(labels) > _NAMED)
        of = "" if len(labels) == len(cells) else f" of {counted(len(labels), 'cell')} ({named})"
        stdout().print(f"warning{of}: {warning}")
    if absent:
        stdout().print(f"warning: to fetch: {'; '.join(absent)}; {_ABSENT}")
    print(f"{counted(len(cells), 'cell')}, {refused} refused")
    return 2 if refused else 0


def _look(
    config: RunConfig,
    opened: Callable[[ModelSpec], Source | NotHere],
    loaded: Callable[[TaskSettings], Task | None],
) -> _Look:
    config.tracking.check()
    if config.replay is not None:
        recording = open_recording(config.replay, config.task)
        reader = opened(config.model) if recording.task else None
        absent = [str(reader)] if isinstance(reader, NotHere) else []
        known = reader if isinstance(reader, Source) else None
        return _Look(reader, absent, recording.task, resolve(config, known, recording.task), recording)
    target, *drafts = [opened(spec) for spec in (config.model, *draft_models(config.drafting))]
    target = as_read(config, target) if isinstance(target, Source) else target
    absent = [str(model) for model in (target, *drafts) if isinstance(model, NotHere)]
    task = loaded(config.task)
    exam = check_quality(config, target if isinstance(target, Source) else None)
    known = None if absent or isinstance(target, NotHere) else target
    composition = resolve(config, known, task)
    if config.train is not None and (reason := _untrainable(config, known)) is not None:
        composition = replace(composition, verdict="refused", reasons=(reason,))
    dtype, _ = resolve_dtype(config.dtype, resolve_device(config.device))
    quantising = None if known is None else planned(config, known, dtype)
    overlapping: Sequence[str] = ()
    if known is not None and config.format == NATIVE.title:  # another one is of quantize, which judges nothing
        calibrated = calibrated_on(quantising, config.model.path)
        overlapping = overlaps(calibrated, task, {} if exam is None else exam.tasks)
    served = None if config.target is None else answer(config.target, quantising, known)
    return _Look(target, absent, task, composition, None, quantising, overlapping, served)


def _untrainable(config: RunConfig, target: Source | None) -> str | None:
    """Why `train` would refuse it."""
    from .train import check_settings

    try:
        settings = check_settings(config)
        if target is not None:
            settings.check(target)
    except UserError as error:
        return str(error)
    return None


def _opened(spec: ModelSpec) -> Source | NotHere:
    try:
        return open_source(spec, fetch=False)
    except NotHere as absent:
        return absent


def _task(settings: TaskSettings) -> Task | None:
    """None for a dataset that may have to be fetched."""
    if settings.dataset is not None and settings.dataset not in FORMATS:
        return None
    return load_task(settings)


def _model(source: Source) -> str:
    config = source.config
    shape = f"{config.model_type}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size:,}"
    return f"{source.label}: {shape}, context {config.max_position_embeddings:,}, {size(float(source.bytes))} on disk"


def _layout(config: RunConfig, source: Source, dtype: torch.dtype) -> str:
    """The layers, and what a token of one sequence takes."""
    model = ModelConfig.from_hf(source.config)
    layout = config.attention.layout(model.layout, model.heads)
    return f"{layout.bytes_per_token(dtype.itemsize) / 1024:.1f} KiB a token\n{picture(layout)}"


def _pages(pages: PageSettings) -> str:
    pool = "as many as are needed" if pages.blocks is None else f"a pool of {pages.blocks}"
    return (
        f"blocks of {counted(pages.size or 0, 'token')}, {pool}{', shared by prompts that begin alike' * pages.share}"
    )


def _drafter(settings: DrafterSettings) -> str:
    gives = settings.gives
    name = type(settings).__name__
    if not gives.rows:
        return f"{name}: proposes nothing"
    drawn = "sampled" if gives.q == "sampled" else "one-hot"
    kind = f"a {gives.shape} of at most {gives.rows} {drawn} candidates, {gives.depth} deep"
    needs = _needs(settings.needs)
    return f"{name}: {kind}; needs {', '.join(needs) or 'the tokens alone'}"


def _needs(needs: Needs) -> list[str]:
    told = [f"hidden states at {', '.join(map(str, needs.taps))}"] if needs.taps else []
    told += [f"the {needs.topk} likeliest tokens of every row"] if needs.topk else []
    return told + [text for key, text in _NEEDS.items() if getattr(needs, key)]


def _rule(acceptance: Acceptance) -> str:
    law, off = acceptance.law(), LawSettings()
    keys = [name for name in LawSettings.__dataclass_fields__ if name != "sample"]
    changed = [f"{key}={getattr(law, key)}" for key in keys if getattr(law, key) != getattr(off, key)]
    return f"{', '.join([type(acceptance).__name__, *changed])}: guarantees the {acceptance.guarantee}"


def _answers(recording: Recording, settings: TaskSettings) -> str:
    if recording.task is not None:
        return f"{_prompts(recording.task, settings)}, with their answers"
    return f"{sum(1 for _ in read_rows(recording.file, 'replay'))} recorded answers of {recording.label}"


def _prompts(task: Task | None, settings: TaskSettings) -> str:
    if task is None:
        return f"{settings.dataset}: its prompts are counted once it is here"
    prompts = sum(item.turns for item in task.items)
    return f"{task.label}: {counted(prompts, 'prompt')}, at most {settings.max_new_tokens} new tokens each"
