"""Where a run of tokens stands in texts that are kept, how often, and what follows it: suffix arrays.

A suffix array (Manber and Myers 1993, doi:10.1137/0222058) lists the places of a text in the order of what stands
there, so that all places of a run of tokens are side by side, found by binary search and counted by subtraction; so are
those of the run with one more token. It takes 8 bytes a token, text and order, in a file as in memory; a counting
automaton or tree needs no sorting, but is made of nodes, which take some hundred bytes a token in Python.

Here the order goes by the first `DEPTH` tokens, so that a text is sorted in a few passes however much it repeats
itself. Texts that grow are kept as several arrays, each more than `GROWTH` times as long as the next; a new one is
joined with those that are not, and sorted again. So a token is sorted O(log n) times, and a search looks into
O(log n) arrays.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from jaxtyping import UInt32

BORDER = 0xFFFF_FFFF  # ends every document; no token
DEPTH = 128  # tokens by which places are ordered, and so the most of match and continuation together
GROWTH = 4

Text = UInt32[np.ndarray, "n"]


class SuffixArray:
    """A `text` that ends in a BORDER and the `order` of its places."""

    __slots__ = ("_places", "_tokens", "order", "text")

    def __init__(self, text: Text, order: Text) -> None:
        assert len(text) == len(order)
        assert text[-1] == BORDER
        self.text, self.order = text, order
        self._tokens, self._places = text.data, order.data  # of which single items are read quickly

    @staticmethod
    def of(text: Text) -> "SuffixArray":
        return SuffixArray(text, sort_places(text))

    def __len__(self) -> int:
        return len(self.text)

    def find(self, run: list[int]) -> tuple[int, int]:
        """The part [low, high) of the order in which `run` stands."""
        key = self._start(len(run))
        low = bisect_left(self._places, run, key=key)
        return low, bisect_right(self._places, run, low, key=key)

    def holds(self, run: list[int]) -> bool:
        key = self._start(len(run))
        low = bisect_left(self._places, run, key=key)
        return low < len(self) and key(self._places[low]) == run

    def _start(self, length: int) -> Callable[[int], list[int]]:
        tokens = self._tokens
        return lambda place: tokens[place : place + length].tolist()

    def frequent(self, low: int, high: int, depth: int, least: int) -> list[tuple[int, int, int]]:
        """(token, its low, its high) of all that `least` places or more in [low, high) have behind their first `depth`
        tokens, which are one run. Equal ones are side by side, so a frequent one is at one of every `least` places:
        only those are looked at."""
        token_at = self._token_behind(depth)
        found = []
        for at in range(low + least - 1, high, least):
            if at < low:  # of a token that is known
                continue
            token = token_at(at)
            begin = bisect_left(range(at), token, low, key=token_at)
            low = self._end(token, at, high, token_at)
            if token != BORDER and low - begin >= least:
                found.append((token, begin, low))
        return found

    def narrow(self, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
        """The part of [low, high) that has `token` behind its first `depth` tokens, which are one run."""
        token_at = self._token_behind(depth)
        low = bisect_left(range(high), token, low, key=token_at)
        return low, self._end(token, low, high, token_at)

    def _token_behind(self, depth: int) -> Callable[[int], int]:
        tokens, places = self._tokens, self._places
        return lambda at: tokens[places[at] + depth]

    @staticmethod
    def _end(token: int, at: int, high: int, token_at: Callable[[int], int]) -> int:
        """Where `token` ends that may stand from `at` on; often it is all that there is."""
        if at < high and token_at(high - 1) == token:
            return high
        return bisect_right(range(high), token, at, key=token_at)

    def without(self, count: int) -> "SuffixArray | None":
        """Without its oldest documents: as few as make it shorter by `count` tokens at least. None: nothing is left."""
        cut = count + int((self.text[count - 1 :] == BORDER).argmax())
        if cut >= len(self):
            return None
        return SuffixArray(self.text[cut:].copy(), self.order[self.order >= cut] - np.uint32(cut))


def sort_places(text: Text, depth: int = DEPTH) -> Text:
    """Places by the first `depth` tokens there; where these are the same, or a text ends within them, any order holds.

    Prefix doubling: each pass orders places by twice as many tokens, looking only at those not yet told apart.
    """
    n = len(text)
    order = np.argsort(text, kind="stable")
    rank = np.zeros(n, np.int64)  # the first slot of those that are the same so far
    slots, keys, known = np.arange(n), text[order], 1
    while len(slots):
        new = np.empty(len(slots), bool)
        new[0], new[1:] = True, keys[1:] != keys[:-1]
        rank[order[slots]] = slots[np.maximum.accumulate(np.where(new, np.arange(len(slots)), 0))]
        if known >= depth:
            break
        alone = new.copy()
        alone[:-1] &= new[1:]
        slots = slots[~alone]
        places = order[slots]
        ahead = places + known
        keys = rank[places] * (n + 1)
        keys[ahead < n] += rank[ahead[ahead < n]] + 1
        sorted_ = np.argsort(keys, kind="stable")
        order[slots], keys = places[sorted_], keys[sorted_]
        known *= 2
    return order.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run of `depth` tokens stands: in parts [low, high) of the orders of several arrays."""

    parts: tuple[tuple[SuffixArray, int, int], ...]
    depth: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Several arrays as one text."""

    arrays: tuple[SuffixArray, ...]

    def longest_end(self, tokens: Sequence[int], least: int, most: int) -> Places | None:
        """Where the longest end of `tokens` stands, of `least` tokens or more and `most` at most."""
        low, high = least - 1, min(most, len(tokens))  # the longest has one of low … high tokens
        tail = list(tokens[len(tokens) - high :]) if high > 0 else []
        tried = least
        while low < high:
            if self._hold(tail[len(tail) - tried :]):
                low = tried
            else:
                high = tried - 1
            tried = (low + high + 1) // 2
        return self.find(tail[len(tail) - low :]) if low >= least else None

    def _hold(self, run: list[int]) -> bool:
        return any(a.holds(run) for a in self.arrays)

    def find(self, run: list[int]) -> Places:
        parts = [(a, *a.find(run)) for a in self.arrays]
        return Places(tuple(p for p in parts if p[1] < p[2]), len(run))

    def total(self, node: Places) -> int:
        """How often the run stands there; at the end of a document nothing follows it."""
        return sum(high - low for _, low, high in node.parts)

    def followers(self, node: Places, least: int) -> list[tuple[int, int, Places]]:
        """(token, count, the run with it) of all tokens that follow the run `least` times or more, by token."""
        share = ceil(least / len(node.parts))  # in one of the arrays a token must be as frequent as that
        tokens = {t for a, low, high in node.parts for t, _, _ in a.frequent(low, high, node.depth, share)}
        found = []
        for token in sorted(tokens):
            parts = [(a, *a.narrow(low, high, node.depth, token)) for a, low, high in node.parts]
            run = Places(tuple(p for p in parts if p[1] < p[2]), node.depth + 1)
            if (count := self.total(run)) >= least:
                found.append((token, count, run))
        return found


class Memory:
    """Documents, the oldest of which go: at most `capacity` tokens (a border counts), and 15/16 of it once it is full,
    up to a document."""

    __slots__ = ("arrays", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.arrays: list[SuffixArray] = []  # the oldest first, each more than GROWTH times as long as the next

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    @property
    def nbytes(self) -> int:
        return sum(a.text.nbytes + a.order.nbytes for a in self.arrays)

    def clear(self) -> None:
        self.arrays.clear()

    def add(self, tokens: Sequence[int]) -> None:
        """Of a document longer than the capacity its end is kept."""
        kept = np.array([*tokens[max(0, len(tokens) - self.capacity + 1) :], BORDER], np.uint32)
        if len(kept) < 3:  # nothing follows anything
            return
        self._evict(len(kept))
        joined, size = len(self.arrays), len(kept)
        while joined and len(self.arrays[joined - 1]) <= GROWTH * size:
            joined -= 1
            size += len(self.arrays[joined])
        texts = [*(a.text for a in self.arrays[joined:]), kept]
        self.arrays[joined:] = [SuffixArray.of(np.concatenate(texts))]

    def _evict(self, size: int) -> None:
        """Makes room for `size` tokens more; a bit more than that, since it takes a pass over the oldest array."""
        if len(self) + size <= self.capacity:
            return
        excess = len(self) + size - self.capacity + self.capacity // 16
        while self.arrays and excess > 0:
            oldest = self.arrays.pop(0)
            if len(oldest) > excess and (left := oldest.without(excess)) is not None:
                self.arrays.insert(0, left)
                return
            excess -= len(oldest)
