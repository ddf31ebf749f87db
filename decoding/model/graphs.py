"""Steps of a few rows, recorded once for each shape and replayed, so that a launch costs the host nothing.

Rows, sequences and slots of staged keys are padded to powers of two. What a step is fed lies in one buffer of its
shape, which gets one copy a step; a replay reads nothing else of the host.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int32
from torch import Tensor

from ...attention.reads import Reads, Told, packed, unpacked

MOST_ROWS = 64
_MOST_GRAPHS = 64  # the one longest unused is forgotten first

# Logits and hidden states by tap, of the rows in a buffer.
Scored = tuple[Tensor, dict[Any, Tensor]]
Run = Callable[[], Scored]


@runtime_checkable
class Recorder(Protocol):
    """What computes the same again: `record` runs what it is given, and returns what does so once more, on the same
    tensors; each call returns the same tensors too."""

    @property
    def name(self) -> str: ...
    def record(self, run: Run) -> Run: ...


@dataclass(slots=True)
class CudaGraphs:
    """Of one device; all graphs share a pool of memory, since one runs at a time and its results are copied."""

    device: torch.device
    _pool: Any = None

    @property
    def name(self) -> str:
        return f"CUDA graphs of up to {MOST_ROWS} rows"

    def record(self, run: Run) -> Run:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # kernels are compiled, and libraries set aside what they need
                run()
            torch.cuda.current_stream().wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                found = run()

        def replay() -> Scored:
            graph.replay()
            return found

        return replay


@dataclass(frozen=True, slots=True)
class Asked:
    """Of one forward, on the host: its rows' tokens, what it reads of the cache, and of which rows logits are wanted
    (None: all)."""

    tokens: Int[np.ndarray, " T"]
    told: Told
    logits_of: Int[np.ndarray, " R"] | None

    def padded(self) -> "Asked":
        """To its bucket."""
        told = self.told
        rows, sequences = power(len(self.tokens)), power(len(told.prefix))
        told = told.padded(rows, sequences, power(told.blocked.shape[1]))
        wanted = self.logits_of
        if wanted is not None and len(wanted):
            wanted = np.pad(wanted, (0, power(len(wanted)) - len(wanted)), "edge")
        return Asked(np.pad(self.tokens, (0, rows - len(self.tokens)), "edge"), told, wanted)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.tokens, *([] if self.logits_of is None else [self.logits_of]), *self.told.arrays()]


@dataclass(frozen=True, slots=True)
class Fed:
    """The same on the device."""

    tokens: Int32[Tensor, " T"]
    reads: Reads
    logits_of: Int32[Tensor, " R"] | None


@dataclass(slots=True)
class Graphs:
    """The recorded steps of one decoder."""

    recorder: Recorder
    _recorded: OrderedDict[Hashable, tuple[Int32[Tensor, " n"], Run]] = field(default_factory=OrderedDict)

    def __call__(self, asked: Asked, where: Hashable, compute: Callable[[Fed], Scored], device: torch.device) -> Scored:
        """Logits and hidden states of the rows asked for, the caller's to keep. `where`: whatever else it is that
        `compute` launches otherwise for; the cache's place is part of it, and the cache is no other one's then."""
        bucket = asked.padded()
        arrays, most = bucket.arrays, power(bucket.told.max_rows)
        shapes = tuple(array.shape for array in arrays)
        key = (shapes, bucket.told.max_keys, most, asked.logits_of is None, where)
        whole = torch.from_numpy(packed(arrays))
        with torch.inference_mode():
            if (found := self._recorded.get(key)) is None:
                buffer = whole.to(device, copy=True)
                run = self._run(buffer, bucket, shapes, most, compute)
                found = self._recorded[key] = buffer, self.recorder.record(run)
                if len(self._recorded) > _MOST_GRAPHS:
                    self._recorded.popitem(last=False)
            else:
                self._recorded.move_to_end(key)
                found[0].copy_(whole)
            logits, hidden = found[1]()
        rows = len(asked.tokens)
        wanted = rows if asked.logits_of is None else len(asked.logits_of)
        return logits[:wanted].clone(), {tap: states[:rows].clone() for tap, states in hidden.items()}

    @staticmethod
    def _run(
        buffer: Int32[Tensor, " n"],
        bucket: Asked,
        shapes: Sequence[tuple[int, ...]],
        most: int,
        compute: Callable[[Fed], Scored],
    ) -> Run:
        tokens, *rest = unpacked(buffer, shapes)
        logits_of = None if bucket.logits_of is None else rest.pop(0)
        fed = Fed(tokens, bucket.told.reads(rest, most), logits_of)
        return lambda: compute(fed)


def power(count: int) -> int:
    """Of two: the least that is not below."""
    return 1 << (count - 1).bit_length()
