"""From a source to a decoder that runs."""

from collections.abc import Callable

import torch

from .config import ModelConfig
from .decoder import Decoder
from .source import Source


def load_decoder(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> Decoder:
    """Read the weights of `source` into a decoder. `progress(what, done, total)` counts layers."""
    report = None if progress is None else (lambda done, total: progress(f"loading {source.label}", done, total))
    return Decoder(
        ModelConfig.from_hf(source.config),
        source.tensors(progress),
        dtype=dtype,
        device=device,
        codes=source.codes,
        progress=report,
    )
