"""How the rows of one layer are kept: as computed, or as integers of 8 or 4 bits with a scale a row and head."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Int, Int32, Integer
from torch import Tensor

from ..kernels.step import Pool
from ..kernels.verify_attention.keys import Keys

_LARGEST = {8: 127, 4: 7}  # symmetric: no code stands for −128 or −8
_MOST = torch.finfo(torch.float16).max

Slots = Int[Tensor, " n"] | slice


class KeptRows:
    """`slots` places for a row's keys and values of `heads` heads, zeroed. Which row lies where is the caller's affair.

    At 8 and 4 bits a key (or value) of a head is code · scale, codes chosen with the scale as it is rounded to float16,
    from that row alone: the codes of a row do not depend on what was written before, beside or after it. `codes`
    [2, Hkv, slots, D], keys first: in `dtype`; int8; or, two a byte along D, uint8 (the even element's low, 8 added).
    `scales` [2, Hkv, slots].
    """

    def __init__(
        self, slots: int, heads: int, head_dim: int, bits: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.bits, self.dtype = bits, dtype
        kind = {16: dtype, 8: torch.int8, 4: torch.uint8}[bits]
        self.codes = torch.zeros(2, heads, slots, head_dim // 2 if bits == 4 else head_dim, dtype=kind, device=device)
        self.scales = None
        if bits != 16:
            self.scales = torch.zeros(2, heads, slots, dtype=torch.float16, device=device)

    @property
    def slots(self) -> int:
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        return sum(part.shape[1] * 2 * part[0, 0, 0].nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def put(self, at: Slots, k: Float[Tensor, "n Hkv D"], v: Float[Tensor, "n Hkv D"]) -> None:
        for i, rows in enumerate((k.transpose(0, 1), v.transpose(0, 1))):
            if self.scales is None:
                self.codes[i, :, at] = rows
            else:
                self.codes[i, :, at], self.scales[i, :, at] = quantise(rows, self.bits)

    def get(self, at: Slots) -> tuple[Float[Tensor, "Hkv n D"], Float[Tensor, "Hkv n D"]]:
        """Keys and values, in `dtype`; where `at` is a slice and nothing is to be computed, no copy."""
        # index_select: a copy as fast as it gets, where indexing with a tensor takes its time
        found = [part[:, :, at] if isinstance(at, slice) else part.index_select(2, at) for part in self.parts]
        k, v = found[0] if self.scales is None else dequantise(found[0], found[1], self.dtype)
        return k, v

    def keys(self, block: int, tables: Int32[Tensor, "N M"], ring: int | None = None) -> Keys:
        """As they lie, for kernels: in blocks of so many slots."""
        k, v = (part.unflatten(1, (-1, block)).permute(1, 2, 0, 3) for part in self.codes)
        if self.scales is None:
            return Keys(k, v, tables=tables, ring=ring)
        k_scale, v_scale = (part.unflatten(1, (-1, block)).permute(1, 2, 0) for part in self.scales)
        return Keys(k, v, k_scale, v_scale, tables, ring)

    def pool(self, kind: int) -> Pool:
        """As they lie, for kernels in C++, until the next `resize`."""
        k, v = self.codes
        scales = (None, None) if self.scales is None else (part.data_ptr() for part in self.scales)
        return Pool(k.data_ptr(), v.data_ptr(), *scales, self.slots, self.bits, kind)

    def move(self, source: Int[Tensor, " n"], to: Int[Tensor, " n"]) -> None:
        """Copy slots to others, which may be among them."""
        for part in self.parts:
            part[:, :, to] = part.index_select(2, source)

    def clear(self, at: Slots) -> None:
        for part in self.parts:
            part[:, :, at] = 0

    def resize(self, slots: int) -> None:
        """To so many slots; those that stay keep what they hold."""
        if more := slots - self.slots:
            self.codes = F.pad(self.codes, (0, 0, 0, more))
            if self.scales is not None:
                self.scales = F.pad(self.scales, (0, more))


def spread(rows: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """A Hadamard rotation of heads, by sums of pairs. Done to queries and keys it leaves their products alone, but what
    few elements of a key held, which would coarsen the steps of 4 bits for all of them, is spread over all.
    """
    wide = rows if rows.dtype == torch.float64 else rows.float()
    size, step = rows.shape[-1] & -rows.shape[-1], 1  # blocks of the largest power of two that divides a head
    while step < size:
        a, b = wide.unflatten(-1, (-1, 2, step)).unbind(-2)
        wide = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return (wide * size**-0.5).to(rows.dtype)


def quantise(rows: Float[Tensor, "*B D"], bits: int) -> tuple[Integer[Tensor, "*B Dk"], Float16[Tensor, "*B"]]:
    """(codes, scales). A row of zeros has scale 0; what float16 cannot scale is as large as it gets."""
    largest = _LARGEST[bits]
    wide = rows if rows.dtype == torch.float64 else rows.float()
    scales = (wide.abs().amax(-1) / largest).clamp(max=_MOST).half()
    by = scales.to(wide.dtype)[..., None]
    codes = (wide / by.masked_fill(by == 0, 1)).round().clamp(-largest, largest)
    if bits == 8:
        return codes.to(torch.int8), scales
    low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scales


def dequantise(
    codes: Integer[Tensor, "*B Dk"], scales: Float16[Tensor, "*B"], dtype: torch.dtype
) -> Float[Tensor, "*B D"]:
    """The product is rounded to `dtype` once."""
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8) - 8
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scales.to(wide)[..., None]).to(dtype)
