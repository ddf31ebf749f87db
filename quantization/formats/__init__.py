"""How quantised layers lie in safetensors files: one file a format."""

from collections.abc import Mapping

from .format import Format, QuantisedLayers
from .native import Native

FORMATS: Mapping[str, Format] = {Native.name: Native()}  # by quant_method in config.json

__all__ = ["FORMATS", "Format", "QuantisedLayers"]
