"""From a source to a decoder that runs."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from ...attention.conversion import ConvertedTensors, converts
from ...attention.layout import Layout
from ...errors import UserError
from ...kernels.dispatch import Kernels
from .config import ModelConfig
from .decoder import Decoder
from .source import Source


def load_decoder(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
    kernels: Kernels | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Decoder:
    """Read the weights of `source` into a decoder. `layout`: of its keys and values, where that is not the model's own;
    weights that go with other heads or owners are converted. `kernels`: as of a `Decoder`. `progress(what, done,
    total)` counts layers."""
    config = ModelConfig.from_hf(source.config)
    tensors = source.tensors(progress)
    if layout is not None and converts(layout, config.layout):
        check_convertible(source)
        tensors = ConvertedTensors(tensors, config.layout, layout)

    def layer(done: int, total: int) -> None:
        _let_go()
        if progress is not None:
            progress(f"loading {source.label}", done, total)

    decoder = Decoder(
        config if layout is None else replace(config, layout=layout),
        tensors,
        dtype=dtype,
        device=device,
        codes=source.codes,
        kernels=kernels,
        progress=layer,
    )
    _let_go()
    return decoder


def _let_go() -> None:
    """What packing took on the way goes back to the system, which the C library would keep for later."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def check_convertible(source: Source) -> None:
    """Refuses weights that cannot go with another number of KV heads, or of caches."""
    if source.codes:
        raise UserError(
            f"{source.label} is quantised, and quantised keys and values are not converted to other KV heads or shared "
            "caches: give the unquantised model"
        )
