"""Inference with reference (LLMA, Yang et al. 2023, arXiv:2304.04487): copy from documents that the output quotes.

Departs from its program in that a match may be longer than 5 tokens and may begin in the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.noise import Noise
from ..errors import UserError
from .copying import Copying
from .suffix_automaton import BORDER, SuffixAutomaton


@dataclass(frozen=True, slots=True)
class Reference:
    """Settings and drafter in one. Copies from the request's documents; of equal matches, as `Copying` says.

    Once the last `trigger` tokens stand in a document, the next `copy` tokens behind the longest match are proposed, at
    most `per_match` for each token matched (None: always `copy`, as in the paper). `in_prompt`: prompt and output are
    documents too. A request without documents, `in_prompt` off, gets no drafts.
    """

    trigger: int = 1
    copy: int = 15
    in_prompt: bool = False
    per_match: float | None = 2.0

    sources: ClassVar[tuple[str, ...]] = ("reference",)
    needs: ClassVar[Needs] = Needs(documents=True)

    def __post_init__(self) -> None:
        if self.trigger < 1:
            raise UserError(f"drafting.trigger must be at least 1, got {self.trigger}")
        if self.copy < 1:
            raise UserError(f"drafting.copy must be at least 1, got {self.copy}; drafting=none drafts nothing")
        if self.per_match is not None and not 0 < self.per_match < inf:
            raise UserError(f"drafting.per_match must be above 0 and finite, or null for no cap, got {self.per_match}")

    @property
    def gives(self) -> Gives:
        return Gives("chain", rows=self.copy, depth=self.copy)

    def check(self, target: Any) -> list[str]:
        return []

    def build(self, resources: Resources) -> "Reference":
        return self

    def start(self, requests: Sequence[Opened]) -> list[Copying]:
        return [self._open(request) for request in requests]

    def _open(self, request: Opened) -> Copying:
        text = SuffixAutomaton(token for document in request.documents for token in (*document, BORDER))
        state = Copying(text, grows=self.in_prompt, limit=None)
        state.read(request.prompt)
        return state

    def propose(self, states: Sequence[Copying], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [
            state.draft(min(self.copy, r.chain), least=self.trigger, per_match=self.per_match)
            for state, r in zip(states, room, strict=True)
        ]

    def observe(self, states: Sequence[Copying], seen: Sequence[Seen]) -> list[Copying]:
        for state, news in zip(states, seen, strict=True):
            state.observe(news)
        return list(states)

    def finish(self, state: Copying) -> None:
        pass
