"""A model block by block: each layer is quantised from inputs that have come through all that was quantised before it.

Memory holds one block in float32 (twice while it runs, with dequantised weights), the calibration text's hidden states
and what the block makes of one passage of it, for the layers that read the same input a K × K matrix in float32, and
what the method takes for a layer: see there; `gptq` takes most, by some eight such matrices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from .codes import Codes
from .quantiser import Inputs, Quantised, Quantiser, Scales


@runtime_checkable
class Stage(Protocol):
    """Linear layers that read the same input, by name."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def weight(self, name: str) -> Float[Tensor, "N K"]: ...
    def put(self, name: str, codes: Codes) -> None:
        """In place of the weight."""

    def inputs(self, sink: float = 1.0) -> Iterator[Float[Tensor, "T K"]]:
        """What the layers read of the calibration text, a piece at a time; no padding is among it. A row that matters
        w times as much as others is √w times as long: the first of a text, by `sink`, where keys and values are made.
        """

    def feasible(self, by: Float[Tensor, " K"]) -> Float[Tensor, " K"] | None:
        """The nearest scale that what feeds the layers can be divided by; None: it cannot be divided, by whatever."""

    def scale(self, by: Float[Tensor, " K"]) -> None:
        """Multiply the layers' columns, and divide what feeds them."""


@runtime_checkable
class QuantisableBlock(Protocol):
    """A block of a model; its stages in the order in which they run."""

    @property
    def stages(self) -> Sequence[Stage]: ...
    def advance(self) -> None:
        """The calibration text's hidden states go through the block as it is now."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a layer. `error`: of its output, ‖(W − Ŵ) x‖² / ‖W x‖² over the calibration text, its rows weighed
    as they were for the layer (None without one: of the weight itself)."""

    name: str
    bits: int
    group_size: int
    nbytes: int
    error: float
    notes: tuple[str, ...] = ()


def quantise(
    block: QuantisableBlock,
    settings: Mapping[str, Quantiser | None],
    fit: Callable[[Codes], Quantised] = Quantised,
) -> Iterator[Report]:
    """Stage by stage; `settings` by layer, None for those that stay. `fit`: what is kept of a layer's codes, where a
    format does not express all; errors are of that. The caller advances the block.

    Scales are moved first, in all stages: they go into layers that an earlier stage quantises (from o into v)."""
    left: dict[Stage, tuple[str, ...]] = {}
    chosen = {stage: {name: q for name in stage.names if (q := settings[name]) is not None} for stage in block.stages}
    for stage, layers in chosen.items():
        scales = next((q for q in layers.values() if isinstance(q, Scales)), None)
        if scales is None:
            continue
        read = [(q, stage.weight(name)) for name, q in layers.items()]
        if stage.feasible(torch.ones_like(read[0][1][0])) is None:
            left[stage] = ("its input's scale is left as it is: what it comes from cannot be divided",)
            continue
        by = scales.scale(read, Inputs.of(stage.inputs()), partial(_feasible, stage))
        if by is not None:
            stage.scale(by)
    for stage, layers in chosen.items():
        reads = any(q.calibration is not None for q in layers.values())
        sink = max((getattr(q, "sink", 1.0) for q in layers.values()), default=1.0)
        seen = Inputs.of(stage.inputs(sink)) if reads else None
        for name, q in layers.items():
            weight = stage.weight(name)
            if not bool(weight.isfinite().all()):
                raise UserError(f"{name}.weight is not finite: the checkpoint is corrupt; fetch it again")
            done = q.layer(weight, seen)
            kept = fit(done.codes)
            codes = kept.codes
            stage.put(name, codes)
            notes = (*left.get(stage, ()), *done.notes, *kept.notes)
            error = output_error(weight, codes, seen)
            yield Report(name, codes.bits, codes.group_size, codes.nbytes, error, notes)


def _feasible(stage: Stage, by: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    found = stage.feasible(by)
    assert found is not None, "whether it can be divided does not depend on the scale"
    return found


def output_error(weight: Float[Tensor, "N K"], codes: Codes, seen: Inputs | None) -> float:
    """‖(W − Ŵ) x‖² / ‖W x‖² in the mean over x; without inputs, x of every direction alike."""
    lost = codes.dequantise() - weight
    if seen is None:
        return float(lost.pow(2).sum() / weight.pow(2).sum().clamp_min(torch.finfo(torch.float32).tiny))
    whole = ((weight @ seen.hessian) * weight).sum()
    return float(((lost @ seen.hessian) * lost).sum() / whole.clamp_min(torch.finfo(torch.float32).tiny))
