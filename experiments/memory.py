"""What models take in memory, before any is loaded, against what is free."""

from dataclasses import dataclass
from math import prod

import torch

from ..decoding.draft import DrafterSettings
from ..decoding.model.config import ModelConfig
from ..decoding.model.source import Source, open_source
from ..decoding.model.weights import shapes_of
from ..errors import UserError
from ..kernels.linear.native import multiplies
from .composition import draft_specs
from .format import size
from .hardware import available_memory

MARGIN = 1.2  # of the weights: KV, activations, and what loading needs for a while


@dataclass(frozen=True, slots=True)
class Held:
    """A model in memory. `bytes` are those of its weights; `packed`: those that our decoder holds on top."""

    label: str
    bytes: int
    packed: int

    @staticmethod
    def of(source: Source, dtype: torch.dtype, device: torch.device) -> "Held":
        config = ModelConfig.from_hf(source.config)
        parameters = sum(prod(shape) for shape in shapes_of(config).values())
        # a tied table is there twice where a CPU's product packs it
        packs = device.type == "cpu" and not multiplies(config.dim, dtype)
        twice = config.vocab * config.dim if config.tied and packs else 0
        return Held(source.label, parameters * dtype.itemsize, twice * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run holds: the target, the models that draft for it, and, if it compares itself with transformers, the
    same again. `loaded`: bytes of them that are in memory already; `free`: what else there is, None if unknown."""

    models: tuple[Held, ...]
    loaded: int
    free: int | None
    compares: bool

    @staticmethod
    def of(
        target: Source, drafting: DrafterSettings, dtype: torch.dtype, device: torch.device, compares: bool, held: bool
    ) -> "Plan":
        """`held`: the target is in memory."""
        ours = Held.of(target, dtype, device)
        drafts = [
            Held.of(open_source(spec.model), dtype if spec.dtype is None else getattr(torch, spec.dtype), device)
            for spec in draft_specs(drafting)
        ]
        loaded = ours.bytes + ours.packed if held else 0
        return Plan((ours, *drafts), loaded, available_memory(device), compares)

    def check(self) -> None:
        """Refuses models that cannot be in memory together: a target, and what drafts for it in every step."""
        needed = self._ours - self.loaded
        if self.free is None or needed <= self.free:
            return
        listed = " and ".join(f"{m.label} with {size(m.bytes + m.packed)}" for m in self.models)
        remedy = "a smaller draft model, " if len(self.models) > 1 else "a smaller model, "
        raise UserError(
            f"the weights of {listed} do not fit into the {size(self.free + self.loaded)} of memory that are free: "
            f"take {remedy}a dtype of fewer bytes, or another device"
        )

    @property
    def apart(self) -> bool:
        """Whether transformers' copies have to wait until ours are gone."""
        if not self.compares or self.free is None:
            return False
        return MARGIN * (self._ours + sum(m.bytes for m in self.models)) - self.loaded > self.free

    @property
    def _ours(self) -> int:
        return sum(m.bytes + m.packed for m in self.models)

    def why_apart(self) -> str:
        theirs = sum(m.bytes for m in self.models)
        return (
            f"transformers ran after us, not in turn with us: {size(self._ours)} of weights here and {size(theirs)} "
            f"there do not fit together into {size((self.free or 0) + self.loaded)}, so a drift of the machine is in "
            "the comparison"
        )
