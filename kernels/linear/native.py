"""Our own product of bfloat16 on a CPU (native.h): over the weight as it is, so that nothing is held twice. A row has
the same bits whatever rows stand beside it."""

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ..native import Product, library

COLUMNS = 32  # that a width must be a multiple of
_LINE = 64  # bytes of a line of the processor's caches


def multiplies(columns: int, dtype: torch.dtype) -> bool:
    """Weights of such a width and dtype, on a CPU."""
    return dtype == torch.bfloat16 and columns % COLUMNS == 0 and library() is not None


def can_multiply(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dim() == 2 and multiplies(weight.shape[1], weight.dtype)


def aligned(weight: Tensor) -> Tensor:
    """A weight that is read a whole line at a time: not where a file had it, then."""
    whole = weight.contiguous()
    return whole if whole.data_ptr() % _LINE == 0 else whole.clone()


def product(weight: BFloat16[Tensor, "N K"], bias: BFloat16[Tensor, " N"] | None) -> Product:
    assert weight.is_contiguous()
    (N, K), added = weight.shape, None if bias is None else bias.data_ptr()
    return Product(weight.data_ptr(), added, None, N, K, K, 16, 0, 0)
