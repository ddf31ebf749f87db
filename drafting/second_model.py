"""A second model that reads along: its keys and values of each sequence, and the rows it has staged behind them."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.cache import Cache
from ..attention.rows import chains
from ..decoding.model.decoder import Decoder
from ..decoding.reference import PREFILL_CHUNK


@dataclass(slots=True)
class Reading:
    """One sequence. `tokens`: what is decided, in the model's own ids, of which the first `settled` stay as they are
    whatever follows: rows behind those are never committed. `staged`: (number in the cache, token) of this sequence's
    rows since the last commit, in order."""

    tokens: list[int]
    settled: int
    cache: Cache
    slot: int
    staged: list[tuple[int, int]] = field(default_factory=list)
    changed: bool = False  # tokens that were committed: all has to be read again

    @property
    def cached(self) -> int:
        """Committed and staged rows; they hold the first tokens."""
        return self.cache.length(self.slot) + len(self.staged)

    def rewrite(self, start: int, tokens: Sequence[int], open_end: int) -> None:
        """These are the tokens from `start` on, whatever they were; all but the last `open_end` are settled."""
        committed = self.cache.length(self.slot)
        self.changed |= self.tokens[start:committed] != list(tokens[: max(0, committed - start)])
        self.tokens[start:] = tokens
        self.settled = max(0, len(self.tokens) - open_end)


@dataclass(frozen=True, slots=True)
class Reader:
    """The model and what it does with its readings."""

    model: Decoder

    def open(self, texts: Sequence[list[int]], open_end: int, capacity: int) -> list[Reading]:
        """All but the last `open_end` tokens of each text are settled and, where they can be, read. `capacity`: tokens
        of the longest."""
        cache = self.model.open_cache(len(texts), min(capacity, self.model.config.max_positions))
        readings = [Reading(tokens, max(0, len(tokens) - open_end), cache, cache.open()) for tokens in texts]
        for reading in readings:
            if self.can_read(reading):
                self._read(reading)
        return readings

    def _read(self, reading: Reading) -> None:
        cache, slot = reading.cache, reading.slot
        for at in range(cache.length(slot), reading.settled, PREFILL_CHUNK):
            piece = reading.tokens[at : min(at + PREFILL_CHUNK, reading.settled)]
            self.model(chains([piece], [slot], prompt=True), cache, logits_of=torch.tensor([len(piece) - 1]))
            cache.commit({slot: range(len(piece))})

    def can_read(self, reading: Reading) -> bool:
        """Whether the model can be fed what is decided: its context and its embedding have an end."""
        config = self.model.config
        if len(reading.tokens) > config.max_positions:
            text = f"the draft model's context of {config.max_positions} tokens is full: no drafts past it"
        elif max(reading.tokens[reading.cached :], default=0) >= config.vocab:
            text = f"the text holds a token beyond the draft model's {config.vocab} embeddings: no drafts behind it"
        else:
            return True
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False

    def depth(self, reading: Reading, wanted: int) -> int:
        """How many tokens to draft; none past the model's own context."""
        if not wanted or not reading.tokens or not self.can_read(reading):
            return 0
        # drafting n tokens feeds all tokens so far and n - 1 drafted ones
        n = min(wanted, self.model.config.max_positions - len(reading.tokens) + 1)
        needed = len(reading.tokens) + n - 1
        if needed > reading.cached + reading.cache.room(reading.slot):
            reading.cache.free(reading.slot)
            reading.cache = self.model.open_cache(1, min(2 * needed, self.model.config.max_positions))
            reading.slot = reading.cache.open()
            self._read(reading)
        return n

    def feed(self, readings: Sequence[Reading], fed: Sequence[list[int]]) -> Tensor:
        """Logits [n, V] behind the last token fed of each. The readings share one cache."""
        cache = readings[0].cache
        first = cache.staged
        last = [r.staged[-1][0] if r.staged else -1 for r in readings]
        rows = chains(fed, [r.slot for r in readings], last, first)
        ends = []
        for reading, piece in zip(readings, fed, strict=True):
            reading.staged += [(first + i, token) for i, token in enumerate(piece)]
            first += len(piece)
            ends.append(first - rows.first - 1)
        return self.model(rows, cache, logits_of=torch.tensor(ends)).logits

    def keep(self, readings: Sequence[Reading]) -> None:
        """Commit what was staged and came true, as far as it is settled."""
        keep: dict[int, tuple[Cache, dict[int, list[int]]]] = {}
        for reading in readings:
            start, kept = reading.cache.length(reading.slot), list[int]()
            for i, (number, token) in enumerate(reading.staged):
                if start + i >= reading.settled or reading.tokens[start + i] != token:
                    break
                kept.append(number)
            keep.setdefault(id(reading.cache), (reading.cache, {}))[1][reading.slot] = kept
        for cache, kept_of in keep.values():
            cache.commit(kept_of)
        for reading in readings:
            reading.staged.clear()
            if reading.changed:
                reading.cache.free(reading.slot)
                reading.slot, reading.changed = reading.cache.open(), False
                if self.can_read(reading):
                    self._read(reading)

    def close(self, reading: Reading) -> None:
        if reading.cache.staged:  # aborted between propose and observe
            reading.cache.drop()
        reading.staged.clear()
        reading.cache.free(reading.slot)
        self.model.close_cache(reading.cache)


def by_cache(readings: Sequence[Reading], which: Iterable[int]) -> list[list[int]]:
    """Those of `which` that share a cache, and so a forward."""
    found: dict[int, list[int]] = {}
    for i in which:
        found.setdefault(id(readings[i].cache), []).append(i)
    return list(found.values())
