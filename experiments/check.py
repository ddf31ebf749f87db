"""The job `check`: what a configuration would do, and whether it can."""

import torch
from rich.console import Console
from rich.table import Table

from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings, Needs
from ..decoding.law import LawSettings
from ..decoding.model.fetch import NotHere
from ..decoding.model.source import ModelSpec, Source, open_source
from .composition import Exactness, draft_models, resolve, resolve_device, resolve_dtype, unused_gpu
from .config import RunConfig
from .hardware import describe_device
from .table import size
from .tasks import FORMATS, Task, TaskSettings, load_task

_EXPECTED: dict[Exactness, str] = {
    "exact": "plain decoding's own tokens (where two tie within rounding, perhaps the other one)",
    "same law": "other tokens than plain sampling's, of the same distribution",
    "lossy": "another distribution than the target's, by design",
}
_NEEDS = {
    "prefill_hidden": "hidden states of the prompt",
    "argmax": "the target's choice at every row",
    "target_cache": "the target's KV cache",
    "second_model": "a second model",
    "documents": "documents",
}


def check(config: RunConfig) -> int:
    """Print it; 0 if it runs, 2 if it is refused. Loads no weights and fetches nothing."""
    config.tracking.check()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    target, *drafts = [_opened(spec) for spec in (config.model, *draft_models(config.drafting))]
    absent = [str(model) for model in (target, *drafts) if isinstance(model, NotHere)]
    task = _task(config.task)
    composition = resolve(config, None if absent or isinstance(target, NotHere) else target, task)
    to_fetch = absent + ([] if task else [f"{config.task.dataset} (by the datasets library, unless it has it)"])

    table = Table.grid(padding=(0, 2))
    rows = {
        "model": f"{target}: not here yet" if isinstance(target, NotHere) else _model(target),
        "dtype": f"{str(dtype).removeprefix('torch.')} ({why})",
        "device": f"{device} ({describe_device(device)})",
        "drafting": _drafter(config.drafting),
        "acceptance": _rule(config.acceptance),
        "task": _prompts(task, config.task),
        "output": _EXPECTED[composition.exactness],
        "to fetch": "; ".join(to_fetch) or "nothing",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)
    for warning in [*composition.warnings, *filter(None, [unused_gpu()])]:
        print(f"warning: {warning}")
    if absent:
        print("warning: what the files of the models decide is known once they are fetched")
    print(composition)
    return 2 if composition.verdict == "refused" else 0


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


def _prompts(task: Task | None, settings: TaskSettings) -> str:
    if task is None:
        return f"{settings.dataset}: its prompts are counted once it is here"
    prompts = sum(item.turns for item in task.items)
    return f"{task.label}: {prompts} prompts, at most {settings.max_new_tokens} new tokens each"
