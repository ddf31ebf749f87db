"""How quantised layers lie in safetensors files: one file a format."""

from collections.abc import Mapping

from .awq import AWQFormat
from .compressed_tensors import CompressedTensors
from .format import Format, QuantisedLayers, layers_of
from .gguf import GGUFBlocks
from .gptq import GPTQFormat
from .native import Native

NATIVE = Native()
# what is written, by the key `format`
WRITTEN: Mapping[str, Format] = {
    form.title: form for form in (NATIVE, GPTQFormat(1), GPTQFormat(2), AWQFormat(), CompressedTensors(), GGUFBlocks())
}
FORMATS: Mapping[str, Format] = {form.name: form for form in WRITTEN.values()}  # by quant_method in config.json

__all__ = ["FORMATS", "NATIVE", "WRITTEN", "Format", "QuantisedLayers", "layers_of"]
