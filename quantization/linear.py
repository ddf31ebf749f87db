"""A linear layer over quantised weights: which product multiplies with them, by their codes, the dtype and the device.

All of them give a row the same bits whatever rows stand beside it, where `implementation` says nothing else: greedy
speculation over quantised weights emits what plain decoding over the same weights does.
"""

from collections.abc import Sequence
from math import gcd

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor, nn

from ..kernels.linear import Linear
from ..kernels.matmul_w4 import cpu as w4
from ..kernels.matmul_w4 import native
from ..kernels.matmul_w4.layer import TritonLinear
from ..kernels.matmul_w4.op import Weight
from ..kernels.matmul_w8 import cpu as w8
from ..kernels.matmul_w8 import rounded_rows
from ..kernels.native import Product
from .codes import Codes, pack

_SLICE = 2048  # output rows of the weight that are dequantised at a time, for a prompt

_Packed = native.Packed | w4.Packed | w8.Packed | w8.PackedRounded


class QuantisedLinear(nn.Module):
    """y = x Ŵᵀ + b. `dtype`: of x and y. Our own product ("native") reads x in 8 bits with a scale for 32 columns, and
    takes scales and shifts in float16. PyTorch's take them in bfloat16, to which they are rounded: that loses nothing
    of our quantisers' scales and up to 2^-9 of others', and up to 2^-9 of the shifts."""

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.dtype, self.device, self.bias = dtype, codes.codes.device, bias
        self.bits, self.rounds = codes.bits, codes.activation_bits is not None
        self.packed, self.order = _packed(codes, dtype)
        self.whole = Linear(codes.dequantise(dtype), bias) if self.packed is None else None  # one of the two holds it
        self.native = None if self.whole is None or self.rounds else self.whole.native
        if isinstance(self.packed, native.Packed):
            self.order = None if self.order is None else self.order.int()
            self.native = self.packed.product(bias, self.order)

    @property
    def implementation(self) -> str:
        """The name of the product in use, for a run's record."""
        about = f"int{self.bits}" + (" × int8" if self.rounds else "")
        match self.packed:
            case native.Packed():
                return f"{about} (native)" if self.rounds else f"{about} (native, inputs in 8 bits)"
            case w4.Packed():
                return f"{about} (int4pack, prefill dequantised)"
            case w8.Packed():
                return f"{about} (int8pack, prefill dequantised)"
            case w8.PackedRounded():
                return f"{about} (onednn)"
        assert self.whole is not None
        return f"{about} dequantised ({self.whole.implementation})"

    @property
    def nbytes(self) -> int:
        """Bytes of weight read by one call of a few rows."""
        if self.whole is not None:
            return self.whole.nbytes
        assert self.packed is not None
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: Float[Tensor, "T K"], prefill: bool = False) -> Float[Tensor, "T N"]:
        """`prefill`: the rows are a prompt's, which may be summed in another order than others."""
        if self.whole is not None:
            return self.whole(_rounded(x) if self.rounds else x, prefill)
        if self.native is not None:  # as fast for a prompt
            return self.native(x, prefill)
        assert self.packed is not None
        assert not isinstance(self.packed, native.Packed)
        if self.order is not None:
            x = x[:, self.order]
        if isinstance(self.packed, w8.PackedRounded) or not prefill:
            y = self.packed(x)
        else:  # the products of few rows dequantise the weight again for every few of them
            y = torch.cat([F.linear(x, self.packed.dense(self.dtype, *part)) for part in self._slices], 1)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def _slices(self) -> list[tuple[int, int]]:
        return [(at, at + _SLICE) for at in range(0, self.out_features, _SLICE)]

    def dense(self) -> Float[Tensor, "N K"]:
        """The weight that x is multiplied with, rounded once to `dtype`."""
        if self.whole is not None:
            return self.whole.dense()
        assert self.packed is not None
        weight = self.packed.dense(self.dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]


def _packed(codes: Codes, dtype: torch.dtype) -> tuple[_Packed | None, Int[Tensor, " K"] | None]:
    """(what multiplies with the codes as they are, the order in which it takes the columns); None, None where nothing
    does, and the weight is dequantised once for all."""
    device, K = codes.codes.device, codes.shape[1]
    if codes.activation_bits is not None:
        if (weight := _integers(codes)) is None:
            return None, None
        whole = _of_whole_rows(weight, codes.scale) if native.can_pack(dtype, device) else None
        return (w8.pack_rounded(weight, codes.scale[:, 0]) if whole is None else whole), None
    if native.can_pack(dtype, device) and (ours := _native(codes)) is not None:
        return ours
    group = w4.group_of(codes.group_size, K) if codes.bits <= 4 and w4.can_pack(dtype, device) else None
    if group is not None and (found := _in_groups(codes, group)) is not None:
        order, at = found
        four, shift = _four_bits(codes)
        packed = w4.pack(four if order is None else four[:, order], codes.scale[:, at], shift[:, at], group)
        if packed is not None:
            return packed, order
    if w8.can_pack(dtype, device, K) and (weight := _integers(codes)) is not None:
        return w8.pack(weight, codes.scale[:, 0]), None
    return None, None


def _of_whole_rows(weight: Int8[Tensor, "N K"], scale: Float[Tensor, "N 1"]) -> native.Packed | None:
    """What rounds its inputs with one scale a row."""
    K = weight.shape[1]
    if K % native.BLOCK:
        return None
    zero = torch.full_like(scale, 128, dtype=torch.uint8)
    return native.pack((weight.short() + 128).to(torch.uint8), scale, zero, K, 8, whole=True)


def _native(codes: Codes) -> tuple[native.Packed, Int[Tensor, " K"] | None] | None:
    group = gcd(codes.group_size, codes.shape[1])
    if group % native.BLOCK or (found := _in_groups(codes, group)) is None:
        return None
    order, at = found
    values = codes.codes if order is None else codes.codes[:, order]
    zero = codes.shift if codes.zero is None else codes.zero
    assert zero is not None
    packed = native.pack(values, codes.scale[:, at], zero[:, at], group, 4 if codes.bits <= 4 else 8)
    return None if packed is None else (packed, order)


def _in_groups(codes: Codes, group: int) -> tuple[Int[Tensor, " K"] | None, Int[Tensor, " G"]] | None:
    """(an order of the columns in which each `group` neighbours have one scale, None where they stand so; which scale
    that is). None where there is no such order."""
    order = codes.column_groups.argsort(stable=True)
    at = codes.column_groups[order].view(-1, group)
    if not bool((at == at[:, :1]).all()):
        return None
    return None if bool((order[1:] > order[:-1]).all()) else order, at[:, 0]


def _four_bits(codes: Codes) -> tuple[UInt8[Tensor, "N K"], Float[Tensor, "N G"]]:
    """(code, shift) of w = (code − 8) · scale + shift."""
    scale = codes.scale.float()
    if codes.zero is None:
        assert codes.shift is not None
        return codes.codes, codes.shift.float() + 8 * scale
    moved = codes.codes.to(torch.int8) - codes.zero.to(torch.int8)[:, codes.column_groups] + 8
    if int(moved.min()) >= 0 and int(moved.max()) <= 15:  # of fewer bits always: no shift is left to be rounded
        return moved.to(torch.uint8), torch.zeros_like(scale)
    return codes.codes, (8 - codes.zero.float()) * scale.bfloat16()  # by the scale as it will be: 0 stays nearly 0


def _integers(codes: Codes) -> Int8[Tensor, "N K"] | None:
    """code − zero, where a row has one scale and they fit."""
    if codes.scale.shape[1] != 1 or codes.zero is None:
        return None
    whole = codes.codes.short() - codes.zero.short()
    return whole.to(torch.int8) if int(whole.min()) >= -128 and int(whole.max()) <= 127 else None


def _rounded(x: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
    values, scale = rounded_rows(x)
    return (values * scale).to(x.dtype)


def by_triton(codes: Codes, bias: Tensor | None, dtype: torch.dtype, row_invariant: bool) -> TritonLinear:
    """The layer where our kernels run: they take any codes as they are, two a byte or one."""
    bits = 4 if codes.bits <= 4 else 8
    groups = None if codes.groups is None else codes.groups.int()
    stored = pack(codes.codes, 4) if bits == 4 else codes.codes
    weight = Weight(stored, bits, codes.scale, codes.zero, codes.shift, groups, codes.group_size)
    rounds = codes.activation_bits is not None
    name = f"int{codes.bits}" + (" × int8" if rounds else "")
    K = codes.shape[1]
    return TritonLinear(weight, K, bias, dtype, name=name, row_invariant=row_invariant, rounds=rounds)


class Beside(nn.Module):
    """Layers that read the same input and are quantised differently, as one: their outputs side by side."""

    def __init__(self, parts: Sequence[Linear | QuantisedLinear | TritonLinear]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.dtype, self.device = parts[0].dtype, parts[0].device

    @property
    def implementation(self) -> str:
        return ", ".join(sorted({part.implementation for part in self.parts}))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def forward(self, x: Float[Tensor, "T K"], prefill: bool = False) -> Float[Tensor, "T N"]:
        return torch.cat([part(x, prefill) for part in self.parts], -1)

    def dense(self) -> Float[Tensor, "N K"]:
        return torch.cat([part.dense() for part in self.parts])


def natives(layer: Linear | QuantisedLinear | TritonLinear | Beside) -> list[Product]:
    """Our own products of the CPU that a layer consists of; none where another computes it, or a part of it."""
    parts = layer.parts if isinstance(layer, Beside) else (layer,)
    found = [part.native for part in parts if not isinstance(part, TritonLinear) and part.native is not None]
    return found if len(found) == len(parts) else []
