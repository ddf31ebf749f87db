"""Prompt lookup: copy what followed the end of the text where it stood before.

After github.com/apoorvumang/prompt-lookup-decoding, but the longest match is looked for, of any length, in linear time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.noise import Noise
from ..errors import UserError
from .copying import Copying
from .suffix_automaton import SuffixAutomaton


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Settings and drafter in one. Copies from prompt and output; of equal matches, as `Copying` says.

    At most `max_draft` tokens (15: with the last emitted token, 16 rows, which cost a CPU little more than one), and
    `per_match` for each token matched (None: no such cap; cf. MAX_SPEC of arXiv:2411.04975). A match has at least
    `min_ngram` tokens; more than `max_ngram` are not looked at (None or 0: no bound). Ids of EOS play no part: the loop
    cuts the output at one, copied or not.
    """

    max_draft: int = 15
    min_ngram: int = 1
    max_ngram: int | None = None
    per_match: float | None = 2.0

    sources: ClassVar[tuple[str, ...]] = ("prompt_lookup",)
    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise UserError(
                f"drafting.max_draft must be at least 1, got {self.max_draft}; drafting=none drafts nothing"
            )
        if self.min_ngram < 1:
            raise UserError(f"drafting.min_ngram must be at least 1, got {self.min_ngram}")
        if self.max_ngram and self.max_ngram < self.min_ngram:
            least = f"at least min_ngram ({self.min_ngram})"
            raise UserError(f"drafting.max_ngram must be {least} or null for no bound, got {self.max_ngram}")
        if self.per_match is not None and not 0 < self.per_match < inf:
            raise UserError(f"drafting.per_match must be above 0 and finite, or null for no cap, got {self.per_match}")

    @property
    def gives(self) -> Gives:
        return Gives("chain", rows=self.max_draft, depth=self.max_draft)

    def check(self, target: Any) -> list[str]:
        return []

    def build(self, resources: Resources) -> "PromptLookup":
        return self

    def start(self, requests: Sequence[Opened]) -> list[Copying]:
        states = [Copying(SuffixAutomaton(), grows=True, limit=self.max_ngram or None) for _ in requests]
        for state, request in zip(states, requests, strict=True):
            state.read(request.prompt)
        return states

    def propose(self, states: Sequence[Copying], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [
            state.draft(min(self.max_draft, r.chain), least=self.min_ngram, per_match=self.per_match)
            for state, r in zip(states, room, strict=True)
        ]

    def observe(self, states: Sequence[Copying], seen: Sequence[Seen]) -> list[Copying]:
        for state, news in zip(states, seen, strict=True):
            state.observe(news)
        return list(states)

    def finish(self, state: Copying) -> None:
        pass
