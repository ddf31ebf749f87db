"""y = x Wᵀ + b for a few rows of x at a time, the product that decoding spends its time in.

On a CPU it costs nearly the same for 1 to 16 rows and gives a row the same bits whatever rows stand beside it: our own
in bfloat16, where it can be compiled, else oneDNN's with a weight packed once, in float32 and bfloat16. Speculation
verifies many rows where plain decoding feeds one, so both properties matter: the first is the speedup, the second makes
greedy output bit-exact.
"""

from torch import Tensor, nn

from . import cpu, native
from .reference import linear_reference

__all__ = ["Linear", "linear_reference"]


class Linear(nn.Module):
    """Weight [N, K] and bias [N] | None; packed where oneDNN has a packed product for the dtype, dense elsewhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.bias = bias
        ours = native.can_multiply(weight)
        self.packed = cpu.pack(weight) if not ours and cpu.can_pack(weight) else None
        self.weight = native.aligned(weight) if ours else weight if self.packed is None else None  # or it is packed
        self.native = None if self.weight is None or not ours else native.product(self.weight, bias)

    @property
    def implementation(self) -> str:
        """The name of the product in use, for a run's record."""
        if self.native is not None:
            return "native"
        if self.packed is None:
            return "torch"
        return "onednn" if self.packed.row_invariant else "onednn, not row-invariant"

    @property
    def nbytes(self) -> int:
        """Bytes of weight read by one call."""
        extra = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.out_features * self.in_features * self.dtype.itemsize + extra

    def forward(self, x: Tensor, prefill: bool = False) -> Tensor:  # [T, K] -> [T, N]
        """`prefill`: the rows are a prompt's, which may be summed in another order: that of a product of many."""
        if self.packed is not None:
            return self.packed(x, self.bias)
        assert self.weight is not None
        if self.native is not None:
            return self.native(x, prefill)
        return nn.functional.linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        """The weight [N, K] as it was handed in."""
        if self.packed is not None:
            return self.packed.dense()
        assert self.weight is not None
        return self.weight
