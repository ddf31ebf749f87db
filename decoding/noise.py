"""Randomness as a function of a key, so that a request draws the same whatever batch, budget or draft it runs with."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WORD = (1 << 64) - 1
# SplitMix64 (Steele, Lea and Flood 2014): the increment and the two multipliers of its finaliser.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TARGET, _DRAFT, _ACCEPT, _REST = 1, 2, 3, 4


def mix(*words: int) -> int:
    """A 64-bit key from integers, order mattering."""
    state = 0
    for word in words:
        state = (state ^ (word & _WORD)) + _STEP & _WORD
        state = (state ^ state >> 30) * _FIRST & _WORD
        state = (state ^ state >> 27) * _SECOND & _WORD
        state ^= state >> 31
    return state


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def uniforms(key: int, ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """One float64 in (0, 1) for each id, the same on every device: a counter hash in wrapping 64-bit integers.

    52 bits and a half, which float64 holds exactly: with 53 the largest would round to 1.
    """
    state = ids.long() * _signed(_STEP) + _signed(key)
    # shifts of a signed word are arithmetic: the mask takes the copied sign bits off
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * _signed(_FIRST)
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * _signed(_SECOND)
    state = state ^ (state >> 31 & (1 << 33) - 1)
    return ((state >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def gumbels(key: int, ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Standard Gumbel noise: argmax(log p + gumbels) is a draw from p."""
    return -torch.log(-torch.log(uniforms(key, ids)))


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one request from token number `position` (of those generated) on.

    The target's draw at a position depends on (seed, request, position) alone. Draws of a drafter and of an acceptance
    rule have streams of their own, with the sibling's index in the key: sharing them would bias the law. `begin`: where
    the step began, for rules that read all rows: what they keep depends on tokens behind it, so that no draw of a
    position may return in a later step.
    """

    seed: int
    request: int
    position: int
    begin: int | None = None

    def target(self, offset: int = 0) -> int:
        """The key of the target's own draw `offset` tokens ahead."""
        return self._key(offset, _TARGET)

    def draft(self, offset: int = 0, sibling: int = 0) -> int:
        """The key with which a drafter draws candidate number `sibling` at `offset`."""
        return self._key(offset, _DRAFT, sibling)

    def rest(self, offset: int = 0) -> int:
        """The key of a rule's draw behind what it kept, where the drafter may have looked at the target's."""
        return self._key(offset, _REST)

    def accept(self, offset: int = 0, sibling: int = 0) -> float:
        """The uniform that decides on candidate number `sibling` at `offset`."""
        return (float(self._key(offset, _ACCEPT, sibling) >> 12) + 0.5) * 2.0**-52

    def _key(self, offset: int, *stream: int) -> int:
        begun = () if self.begin is None else (self.begin,)
        return mix(self.seed, self.request, self.position + offset, *stream, *begun)
