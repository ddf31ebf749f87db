"""A run's configuration, typed: what the YAML groups and the command line resolve to."""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..attention.options import Attention, Native
from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings
from ..decoding.model.source import ModelSpec
from ..decoding.training import Trains
from ..errors import UserError
from ..kernels.dispatch import Kernels
from ..quantization.none import AsStored
from ..quantization.quantiser import Quantiser
from .peers.settings import PeersJob
from .planning import Hardware, PlanJob
from .quality.settings import QualitySettings, TaskSpec
from .sweep.settings import CellSettings, SearchSettings
from .tasks import TaskSettings
from .tracking import Tracking, Untracked

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
Timing = Literal["paired", "anchored", "untimed"]
Rerun = Literal["stale", "all"]


@dataclass(frozen=True, slots=True)
class LayerSearch:
    """Of the job `layers`. `tries`: sets of layers, at most; `max_draft`: the longest draft that is thought of."""

    tries: int = 100
    max_draft: int = 6

    def __post_init__(self) -> None:
        for name in ("tries", "max_draft"):
            if getattr(self, name) < 1:
                raise UserError(f"layers.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """`least`: share of the weights in the model's blocks that must come to be quantised. Of overrides=auto: `budget`,
    bits a weight, or bytes if it is above 32, of the quantised layers alone (None: what one bit more for all of them
    takes); `parts`: the blocks are tried in so many parts; `tokens` of text that the calibration does not read, from
    `path` (None: its own)."""

    least: float = 0.9
    budget: float | str | None = None  # a text is refused
    parts: int = 5
    tokens: int = 2048
    path: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise UserError(f"quantize.least must be between 0 and 1, got {self.least}")
        if isinstance(self.budget, str):
            raise UserError(f"quantize.budget must be bytes, or bits a weight up to 32, got {self.budget!r}")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(f"quantize.budget must be above 0 and finite, got {self.budget}")
        for name in ("parts", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"quantize.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Of the target's cache. `size`: tokens of a block (None: contiguous); `share`: prompts that begin alike hold the
    same blocks, for as long as the run goes on; `blocks`: of the pool (None: as many as are needed, and with `share`
    four times as many)."""

    size: int | None = None
    share: bool = False
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"pages.{name} must be at least 1, or null, got {value}")
        if self.size is None and (self.share or self.blocks is not None):
            key = "share=true" if self.share else f"blocks={self.blocks}"
            raise UserError(f"pages.{key} is of a cache in pages: give pages.size too, such as pages.size=16")


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Of a GPU, where our kernels run. `row_invariant`: a row has the same bits whatever rows stand beside it, so that
    greedy speculation emits what plain decoding does; else products are the fastest there are. `graphs`: steps of a few
    rows are CUDA graphs."""

    row_invariant: bool = True
    graphs: bool = True

    @property
    def kernels(self) -> Kernels:
        return Kernels(row_invariant=self.row_invariant, graphs=self.graphs)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Parts are built, weights are not loaded. `resolved` is the whole configuration as plain data, for the record."""

    model: ModelSpec
    drafting: DrafterSettings
    acceptance: Acceptance
    task: TaskSettings
    quality: QualitySettings = field(default_factory=QualitySettings)
    tracking: Tracking = field(default_factory=Untracked)
    attention: Attention = field(default_factory=Native)
    quantization: Quantiser | AsStored = field(default_factory=AsStored)
    format: str = "native"
    target: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: KernelSettings = field(default_factory=KernelSettings)
    threads: int | None = None
    seed: int = 0
    batch: int = 1
    timing: Timing = "paired"
    profile: bool = False
    compare_hf: bool = False
    replay: str | None = None
    tasks: tuple[str | TaskSpec, ...] = ()
    against: str | None = None
    output: str | None = None
    cell: CellSettings = field(default_factory=CellSettings)
    stop_after_failures: int | None = None
    budget_hours: float | None = None
    rerun: Rerun | None = None
    sweep: Any = None  # whoever composes has multiplied it out
    search: SearchSettings | None = None
    layers: LayerSearch = field(default_factory=LayerSearch)
    quantize: QuantizeJob = field(default_factory=QuantizeJob)
    context: int = 2048
    hardware: Hardware = field(default_factory=Hardware)
    plan: PlanJob = field(default_factory=PlanJob)
    peers: PeersJob = field(default_factory=PeersJob)
    pages: PageSettings = field(default_factory=PageSettings)
    train: Trains | None = None
    trusted: tuple[str, ...] = ()
    resolved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.timing not in ("paired", "anchored", "untimed"):
            raise UserError(f"timing must be paired, anchored or untimed, got {self.timing!r}")
        if self.sweep is not None:
            raise UserError("sweep lists several runs, and here is one: give its alternative, and sweep=null")
        if self.tasks:  # one list, whichever name it came by
            quality = replace(self.quality, tasks=self.tasks)
            if self.quality.tasks and quality != self.quality:  # equal: this is a copy of such a configuration
                raise UserError("tasks and quality.tasks are the same list: give one of them")
            object.__setattr__(self, "quality", quality)
        if self.batch < 1:
            raise UserError(f"batch must be at least 1, got {self.batch}")
        if self.context < 1:
            raise UserError(f"context must be at least 1, got {self.context}")
        if self.against is not None and not self.against.strip():
            raise UserError("against is empty; name the folder of a run, or null for none")
        if self.replay is not None:
            self._check_replay(self.replay)
        cores = os.cpu_count() or 1
        if self.threads is not None and not 1 <= self.threads <= cores:
            raise UserError(f"threads must be between 1 and the {cores} cores of this machine, got {self.threads}")

    def _check_replay(self, replay: str) -> None:
        """What asks for a model has no place in it."""
        if not replay.strip():
            raise UserError("replay is empty; name the folder of a run or a file of answers, or null for none")
        asked = {
            "quality.tasks": bool(self.quality.tasks),
            "compare_hf": self.compare_hf,
            "profile": self.profile,
            f"batch={self.batch}": self.batch > 1,
            "attention": not isinstance(self.attention, Native),
            "pages": self.pages.size is not None,
        }
        for key, given in asked.items():
            if given:
                raise UserError(f"{key} needs a model, and replay has answers and none: leave one of them out")
