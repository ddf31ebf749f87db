"""Jacobi decoding (Santilli et al. 2023, arXiv:2305.10427): guess n tokens, replace each by what the target says there.

The fixed point is plain decoding's output, and each step fixes one token at least. Under sampling each position keeps
its noise, so that the iteration has a fixed point too and it is plain sampling's output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen, chain
from ..decoding.noise import Noise
from ..errors import UserError


@dataclass(slots=True)
class State:
    """`tokens`: prompt and output; `guess`: what may follow them; `drafted`: how much of it was offered."""

    tokens: list[int]
    guess: list[int] = field(default_factory=list)
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Jacobi:
    """Settings and drafter in one. `window`: n, the tokens guessed at once; at first they are the prompt's last."""

    window: int = 7

    sources: ClassVar[tuple[str, ...]] = ("jacobi",)
    needs: ClassVar[Needs] = Needs(choices=True)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"drafting.window must be at least 1, got {self.window}; drafting=none drafts nothing")

    @property
    def gives(self) -> Gives:
        return Gives("chain", self.window, self.window)

    def check(self, target: Any) -> list[str]:
        return []

    def build(self, resources: Resources) -> "Jacobi":
        return self

    def start(self, requests: Sequence[Opened]) -> list[State]:
        return [State(list(r.prompt)) for r in requests]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = []
        for s, r in zip(states, room, strict=True):
            s.drafted = min(self.window, r.chain)
            for at in range(len(s.guess), s.drafted):  # the text so far, once more
                s.guess.append(s.tokens[(at - self.window) % len(s.tokens)])
            drafts.append(chain(s.guess[: s.drafted]))
        return drafts

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            new = news.tokens[len(s.tokens) - news.position :]
            if not news.prefill and s.drafted and news.choices is not None:
                # what the target said behind guess i is the next guess at position i + 1, in place of what stood there
                s.guess = [*news.choices[1 : 1 + s.drafted], *s.guess[s.drafted + 1 :]]
                s.guess = s.guess[len(new) - 1 :]
            elif not news.prefill:
                s.guess = s.guess[len(new) :]
            s.tokens += new
            s.drafted = 0
        return list(states)

    def finish(self, state: State) -> None:
        pass
