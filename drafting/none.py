"""No drafts: plain decoding through the loop, the baseline that shares every cost but speculation's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.noise import Noise


@dataclass(frozen=True, slots=True)
class Nothing:
    """Settings and drafter in one."""

    sources: ClassVar[tuple[str, ...]] = ("none",)
    needs: ClassVar[Needs] = Needs()
    gives: ClassVar[Gives] = Gives("chain", rows=0, depth=0)

    def check(self, target: Any) -> list[str]:
        return []

    def build(self, resources: Resources) -> "Nothing":
        return self

    def start(self, requests: Sequence[Opened]) -> list[bool]:
        return [True] * len(requests)

    def propose(self, states: Sequence[bool], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [EMPTY] * len(states)

    def observe(self, states: Sequence[bool], seen: Sequence[Seen]) -> list[bool]:
        return list(states)

    def finish(self, state: bool) -> None:
        pass
