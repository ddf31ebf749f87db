"""The job `quantize`, and the quantised copy that a run with quantization= decodes."""

import time
from pathlib import Path
from typing import Any

import torch

from ..decoding.model.source import Source, open_source
from ..errors import UserError
from ..quantization.formats import WRITTEN, Format
from ..quantization.formats.gguf import GGUFBlocks
from ..quantization.gguf import GGUF
from ..quantization.none import AsStored
from .composition import resolve_device, resolve_dtype
from .config import RunConfig
from .lab import Heard, Progress
from .progress import Watch
from .quantised_folder import REPORT, check_output, copy_of, read_record, write
from .quantising import AUTO, Quantising, plan


def planned(config: RunConfig, source: Source, dtype: torch.dtype) -> Quantising | None:
    """None where the model is decoded as it is stored."""
    form = written_format(config.format)
    if isinstance(config.quantization, AsStored) or keeps_blocks(config):
        return None
    return plan(config.quantization, source, dtype, form, config.quantize.least)


def keeps_blocks(config: RunConfig) -> bool:
    return isinstance(config.quantization, GGUF) and config.quantization.type is None


def as_read(config: RunConfig, source: Source) -> Source:
    """The model, its layers packed as its GGUF file has them if that is asked for."""
    from ..decoding.model.packed import packed

    return packed(source) if keeps_blocks(config) else source


def kept_blocks(source: Source) -> dict[str, Any] | None:
    """For the record of a run: what is packed as the file has it; None if nothing is."""
    from ..decoding.model.packed import layer_types, told

    if source.file is None or not source.codes:
        return None
    kept, left = told(layer_types(source))
    about = {"label": source.label, "digest": source.origin}
    warnings = [] if left is None else [left]
    return {"kind": GGUF.kind, "settings": kept, "calibration": None, "source": about, "warnings": warnings}


def target_of(config: RunConfig, dtype: torch.dtype, progress: Progress | None = None) -> Source:
    """What is decoded: the model, or its quantised copy, which is made where it is not there."""
    source = as_read(config, open_source(config.model, progress))
    made = planned(config, source, dtype)
    return source if made is None else open_source(copy_of(made, progress), progress)


def written_format(name: str) -> Format:
    if name not in WRITTEN:
        raise UserError(f"format must be one of {', '.join(WRITTEN)}, got {name!r}")
    return WRITTEN[name]


def quantize_job(config: RunConfig) -> int:
    """A folder that model.path=DIR loads."""
    from .gguf_export import export
    from .overrides import search
    from .quantise_table import show

    if isinstance(config.quantization, AsStored):
        raise UserError("name how, such as quantization=rtn")
    if config.output is None or not config.output.strip():
        raise UserError("quantize writes a folder: name it with output=DIR")
    folder, form = Path(config.output).expanduser(), written_format(config.format)
    if form.title == GGUFBlocks.title and config.quantization.overrides == AUTO:
        raise UserError(
            "overrides=auto is not of format=gguf: find them with format=native, and name the file it writes"
        )
    dtype, _ = resolve_dtype(config.dtype, resolve_device(config.device))
    check_output(folder)
    settings, chosen, began = config.quantization, None, time.monotonic()
    with Watch() as watch, Heard() as heard:
        source = open_source(config.model, watch.step)
        if settings.overrides == AUTO:
            try:
                chosen = search(settings, source, dtype, form, config.quantize, watch.step)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("interrupted; of what was tried nothing is kept") from None
            settings = chosen.settings
        made = plan(settings, source, dtype, form, config.quantize.least)
        if chosen is not None:
            chosen.keep(folder)
        (export if form.title == GGUFBlocks.title else write)(made, folder, watch.step)
        if chosen is not None:
            chosen = chosen.verified(folder)
    show(folder, read_record(folder, REPORT), time.monotonic() - began, chosen)
    for told in heard.texts:
        print(f"note: {told}")
    return 0
