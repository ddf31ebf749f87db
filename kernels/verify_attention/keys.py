"""What `verify_attention_batch` is given: where keys lie, and which of them a row looks at."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float16, Int, Int32, Shaped
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """A pool of P blocks of B slots. Slot j of sequence s is slot j % B of block tables[s, j // B]; `tables` None: of
    block s, so that B is a sequence's capacity.

    Stored in q's dtype; or as int8 codes, or two 4-bit codes a byte along the head dimension (uint8; the even element's
    low, 8 added to each), either with a scale a slot and head: key = code · scale. Any strides, but the last one is 1.

    `ring`: None, and key j of a sequence, its staged ones behind the committed, is in its slot j. Or, of a layer with a
    window W and S sinks, only the last W committed keys are there and the first S: that of position p in slot p if
    p < S, else in slot S + (p − S) mod W; and staged ones from slot `ring` on.
    """

    k: Shaped[Tensor, "P B Hkv Dk"]
    v: Shaped[Tensor, "P B Hkv Dk"]
    k_scale: Float16[Tensor, "P B Hkv"] | None = None
    v_scale: Float16[Tensor, "P B Hkv"] | None = None
    tables: Int32[Tensor, "N M"] | None = None
    ring: int | None = None

    def __post_init__(self) -> None:
        quantised = self.k.dtype in (torch.int8, torch.uint8)
        assert self.k.dtype == self.v.dtype
        assert quantised == (self.k_scale is not None) == (self.v_scale is not None)
        assert self.k.stride(-1) == self.v.stride(-1) == 1
        assert self.k.stride() == self.v.stride()
        assert self.k_scale is None or self.v_scale is None or self.k_scale.stride() == self.v_scale.stride()


@dataclass(frozen=True, slots=True)
class Looks:
    """The rows of N sequences, one sequence's after the other's: those of s are starts[s] … starts[s + 1] − 1.

    Sequence s has `prefix[s]` committed slots, which all of its rows see, and `staged[s]` behind them, of which row i
    sees those with no `blocked[i, j]`. Positions: of a committed slot its number; of a row `positions`, of the staged
    slots `key_positions` (prefix + depth). `max_rows` and `max_keys`: bounds, known without asking the device, of a
    sequence's rows and of its slots; kept the same from step to step, they keep the order of a row's sums.
    """

    starts: Int32[Tensor, " N1"]
    prefix: Int32[Tensor, " N"]
    staged: Int32[Tensor, " N"]
    positions: Int[Tensor, " T"]
    key_positions: Int[Tensor, "N W"]
    blocked: Bool[Tensor, "T W"]
    max_rows: int
    max_keys: int

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.prefix) + 1
        assert self.key_positions.shape == (len(self.prefix), self.blocked.shape[1])
        assert self.positions.shape == self.blocked.shape[:1]
