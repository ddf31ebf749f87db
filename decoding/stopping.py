"""When a sequence ends: one rule for plain decoding and for the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError

Reason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class StopRule:
    """The first of: an EOS id, a stop string in the generated text, `max_new_tokens`, the end of the context.

    The token that ends the text is kept (an EOS, or the token that completes a stop string), so tokens, text,
    log-probabilities and counts speak of one run. `text` decodes token ids; it is needed for stop strings only.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    text: Callable[[list[int]], str] | None = None
    context_room: int | None = None  # tokens that the context holds behind the prompt

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if "" in self.stop:
            raise UserError("a stop string is empty; it would end every text at once; leave it out")
        if self.stop and self.text is None:
            raise UserError("stop strings need a tokenizer to read the text with")

    @property
    def limit(self) -> int:
        """The most tokens that may be emitted."""
        return self.max_new_tokens if self.context_room is None else min(self.max_new_tokens, self.context_room)

    def cut(self, emitted: Sequence[int], run: Sequence[int]) -> tuple[int, Reason | None]:
        """(how many of `run`'s tokens are emitted behind `emitted`, why the sequence ends there or None).

        A stop inside the run wins over the length cap behind it.
        """
        for i, token in enumerate(run):
            count = len(emitted) + i + 1
            if token in self.eos_ids:
                return i + 1, "eos"
            if self.stop and self._completes_a_stop([*emitted, *run[: i + 1]]):
                return i + 1, "stop"
            if count >= self.limit:
                return i + 1, "length" if self.limit == self.max_new_tokens else "context"
        return len(run), None

    def _completes_a_stop(self, tokens: list[int]) -> bool:
        """Only the newest token can complete one; as many tokens as the longest has bytes, and a few, hold it."""
        assert self.text is not None
        window = max(len(s.encode()) for s in self.stop) + 8
        text = self.text(tokens[-window:])
        return any(s in text for s in self.stop)
