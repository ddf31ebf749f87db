"""From a source to a decoder that runs."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...attention.layout import Layout
from .config import ModelConfig
from .decoder import Decoder
from .source import Source


def load_decoder(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Decoder:
    """Read the weights of `source` into a decoder. `layout`: of its keys and values, where that is not the model's own.
    `progress(what, done, total)` counts layers."""
    config = ModelConfig.from_hf(source.config)
    report = None if progress is None else (lambda done, total: progress(f"loading {source.label}", done, total))
    return Decoder(
        config if layout is None else replace(config, layout=layout),
        source.tensors(progress),
        dtype=dtype,
        device=device,
        codes=source.codes,
        progress=report,
    )
