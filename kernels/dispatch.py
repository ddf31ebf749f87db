"""Which of an op's two implementations a tensor gets: the Triton kernel, or the same in torch's own operations."""

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@cache
def installed() -> bool:
    """Whether triton can be imported: there is none for Macs and Windows."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU. To be set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(x: Tensor) -> bool:
    """On a GPU (CUDA or ROCm), and where kernels are interpreted; nothing in float64, which is the references'."""
    return x.dtype != torch.float64 and (x.is_cuda or (x.device.type == "cpu" and interpreted())) and installed()


def launches(x: Tensor) -> bool:
    """Whether to launch the kernel at once: what torch.compile is told of an op is not needed, and takes its time."""
    return runs_triton(x) and not torch.compiler.is_compiling()


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a model is computed where our kernels run. `row_invariant`: a row has the same bits whatever rows stand
    beside it, so that greedy speculation emits what plain decoding does; else products are the fastest there are, whose
    sums have an order by the number of rows. `graphs`: its steps are CUDA graphs. `interpreted`: also on a CPU, where
    kernels are interpreted.
    """

    row_invariant: bool = True
    graphs: bool = True
    interpreted: bool = False

    def run_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        on = device.type == "cuda" or (self.interpreted and device.type == "cpu" and interpreted())
        return on and dtype != torch.float64 and installed()


def operand(dtype: torch.dtype) -> torch.dtype:
    """What the factors of `tl.dot` are held in: the interpreter multiplies the bit patterns of bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 and interpreted() else dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """What torch's own operations compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
