"""quantization=none."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AsStored:
    """The weights as they are stored."""
