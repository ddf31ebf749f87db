"""ggml's own blocks: those that a GGUF file has, kept packed, or made by the rounding of ggml's reference. No
calibration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from .codes import Scheme
from .formats.gguf import GROUP, codes_of
from .quantiser import Calibration, Inputs, Overrides, Quantised

TYPES = ("Q4_0", "Q4_1", "Q8_0")  # that are made


@dataclass(frozen=True, slots=True)
class GGUF:
    """`type`: which blocks are made; None: those of a GGUF file are kept as they are."""

    type: str | None = None
    overrides: Overrides = field(default_factory=dict)

    kind: ClassVar[str] = "gguf"
    calibration: ClassVar[Calibration | None] = None

    def __post_init__(self) -> None:
        if self.type is not None and self.type not in TYPES:
            known = ", ".join(TYPES)
            raise UserError(f"quantization.type must be one of {known}, or null for a file's own, got {self.type!r}")

    @property
    def _type(self) -> str:
        if self.type is None:
            raise UserError(
                f"quantization.type=null keeps what a GGUF file has, for a run: name one of {', '.join(TYPES)}"
            )
        return self.type

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        odd = [name for name, (_, K) in shapes.items() if K % GROUP]
        if odd:
            raise UserError(
                f"blocks of {self._type} are {GROUP} columns, which do not divide those of {', '.join(odd)}: leave "
                "them out by quantization.overrides, or take quantization=rtn"
            )
        return []

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        shift = self._type == "Q4_1"
        return Scheme(shape, 8 if self._type == "Q8_0" else 4, GROUP, symmetric=not shift, shift=shift)

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised:
        import gguf  # a package of the same name as this module, and half a second

        raw = gguf.quantize(weight.float().cpu().numpy(), gguf.GGMLQuantizationType[self._type])
        return Quantised(codes_of(torch.from_numpy(raw), self._type))
