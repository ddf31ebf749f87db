"""What every quantiser makes and every format holds: the weight of a linear layer as small integers with scales.

Group g of a row holds `group_size` neighbouring columns, the last group what is left; by `groups`, a column may be in
any group (act-order). With an integer `zero`, w = scale · (code − zero), as GPTQ, AWQ and compressed-tensors store it;
with a `shift`, w = scale · code + shift, as HQQ and GGUF do: these are different quantisers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is known of a layer's codes without their data, before or after they are made. `shift`: with a float shift
    in the place of an integer zero; `grouped`: columns are in any groups."""

    shape: tuple[int, int]
    bits: int
    group_size: int
    symmetric: bool
    shift: bool = False
    grouped: bool = False
    activation_bits: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight [N, K]. `scale` and one of `zero` and `shift` are [N, G]. `activation_bits`: what the layer's input is
    rounded to, with a scale a row (None: not at all)."""

    codes: UInt8[Tensor, "N K"]
    scale: Float[Tensor, "N G"]
    bits: int
    group_size: int
    zero: UInt8[Tensor, "N G"] | None = None
    shift: Float[Tensor, "N G"] | None = None
    groups: Int[Tensor, " K"] | None = None
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        N, K = self.codes.shape
        assert 1 <= self.bits <= 8
        assert 1 <= self.group_size <= K
        assert (self.zero is None) != (self.shift is None)
        for part in (self.scale, self.zero, self.shift):
            assert part is None or part.shape == (N, -(-K // self.group_size))
        assert self.groups is None or self.groups.shape == (K,)

    @property
    def shape(self) -> tuple[int, int]:
        N, K = self.codes.shape
        return N, K

    @property
    def symmetric(self) -> bool:
        """All zeros stand in the middle, 2^(bits − 1)."""
        return self.zero is not None and bool((self.zero == 2 ** (self.bits - 1)).all())

    @property
    def scheme(self) -> Scheme:
        shift, grouped = self.shift is not None, self.groups is not None
        return Scheme(self.shape, self.bits, self.group_size, self.symmetric, shift, grouped, self.activation_bits)

    @property
    def column_groups(self) -> Int[Tensor, " K"]:
        """The group of each column."""
        if self.groups is not None:
            return self.groups.long()
        return torch.arange(self.shape[1], device=self.codes.device) // self.group_size

    @property
    def nbytes(self) -> int:
        """Of the codes, packed without gaps, and all that belongs to them."""
        N, K = self.shape
        rest = (self.scale, self.zero, self.shift, self.groups)
        return N * -(-K * self.bits // 8) + sum(part.nbytes for part in rest if part is not None)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "N K"]:
        """The weight, computed in float32 (in float64 if that is asked for)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        at = self.column_groups
        codes, scale = self.codes.to(wide), self.scale.to(wide)[:, at]
        if self.zero is not None:
            return (scale * (codes - self.zero.to(wide)[:, at])).to(dtype)
        assert self.shift is not None
        return (scale * codes + self.shift.to(wide)[:, at]).to(dtype)

    def rows(self, start: int, stop: int) -> "Codes":
        """Output rows start … stop − 1."""
        return self._each(lambda part: part[start:stop])

    def to(self, device: torch.device | str) -> "Codes":
        moved = self._each(lambda part: part.to(device))
        return moved if self.groups is None else replace(moved, groups=self.groups.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """With all that has a row for each output changed alike."""
        zero, shift = (None if part is None else change(part) for part in (self.zero, self.shift))
        return replace(self, codes=change(self.codes), scale=change(self.scale), zero=zero, shift=shift)


def alike(parts: Sequence[Codes]) -> bool:
    """Whether layers that read the same input can be one: their columns are grouped alike."""
    a = parts[0]
    return all(
        (a.bits, a.group_size, a.activation_bits, a.zero is None, a.scale.dtype)
        == (b.bits, b.group_size, b.activation_bits, b.zero is None, b.scale.dtype)
        and torch.equal(a.column_groups, b.column_groups)
        for b in parts[1:]
    )


def stacked(parts: Sequence[Codes]) -> Codes:
    """One above the other: layers that read the same input as one layer. They must be `alike`."""
    assert alike(parts)
    zeros, shifts = ([part for c in parts if (part := getattr(c, n)) is not None] for n in ("zero", "shift"))
    return replace(
        parts[0],
        codes=torch.cat([c.codes for c in parts]),
        scale=torch.cat([c.scale for c in parts]),
        zero=torch.cat(zeros) if zeros else None,
        shift=torch.cat(shifts) if shifts else None,
    )


def pack(codes: UInt8[Tensor, "N K"], bits: int) -> UInt8[Tensor, "N B"]:
    """A row's codes as one stream of bits without gaps, the lowest bit first; zeros fill the last byte up."""
    K = codes.shape[1]
    if int(codes.max()) >= 2**bits:  # it would run over into its neighbour (GPTQModel#2963)
        raise ValueError(f"a code is {int(codes.max())}, but {bits} bits hold at most {2**bits - 1}")
    if bits == 8:
        return codes.clone()
    words = _pieces(codes, 8, bits)  # of 8 codes, which take as many bytes as they have bits
    each = [(words >> 8 * i & 255).to(torch.uint8) for i in range(bits)]
    return torch.stack(each, -1).flatten(1)[:, : -(-K * bits // 8)].contiguous()


def _pieces(parts: UInt8[Tensor, "N P"], count: int, width: int) -> Int[Tensor, "N W"]:
    """So many of them side by side as one number, `width` bits each, the first one lowest."""
    each = torch.nn.functional.pad(parts, (0, -parts.shape[1] % count)).view(len(parts), -1, count)
    words = torch.zeros(each.shape[:2], dtype=torch.int64, device=parts.device)
    for i in range(count):
        words |= each[:, :, i].long() << width * i
    return words


def unpack(packed: UInt8[Tensor, "N B"], bits: int, K: int) -> UInt8[Tensor, "N K"]:
    """What `pack` was given."""
    if bits == 8:
        return packed.clone()
    words = _pieces(packed, bits, 8)
    each = [(words >> bits * i & 2**bits - 1).to(torch.uint8) for i in range(8)]
    return torch.stack(each, -1).flatten(1)[:, :K].contiguous()
