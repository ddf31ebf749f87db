"""Retrieval (REST, He et al. 2023, arXiv:2311.08252): what follows the longest end of the text in a datastore.

The datastore is made of a text of the user's. Its continuations there, weighted by how often they stand there, are
drafted as a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.model.source import Source
from ..decoding.noise import Noise
from ..errors import UserError
from .continuations import check_bounds, continue_from
from .datastore import Datastore
from .suffix_array import Texts


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Settings. `corpus`: a text to retrieve from, made into a datastore at the first use; `datastore`: its file.

    A match has `min_match` to `max_match` tokens. Of its continuations the `nodes` most frequent are drafted, at most
    `max_depth` tokens deep, and none that fewer than `min_prob` of the places go on with. `tree: false` drafts a chain.
    """

    datastore: str | None = None
    corpus: str | None = None
    nodes: int = 15
    max_depth: int = 10
    min_match: int = 2
    max_match: int = 16
    min_prob: float = 0.02
    tree: bool = True

    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        check_bounds(self.nodes, self.max_depth, self.min_match, self.max_match, self.min_prob)

    @property
    def files(self) -> tuple[Path, ...]:
        """The text, which a datastore is made of, or the datastore alone."""
        named = self.datastore if self.corpus is None else self.corpus
        return () if named is None else (Path(named),)

    @property
    def gives(self) -> Gives:
        depth = min(self.nodes, self.max_depth)
        return Gives("tree", self.nodes, depth) if self.tree else Gives("chain", depth, depth)

    @property
    def _store(self) -> Datastore:
        if self.corpus is None and self.datastore is None:
            raise UserError("drafting=retrieval has nothing to retrieve from: give drafting.corpus=FILE.jsonl or .txt")
        return Datastore(self.corpus, self.datastore)

    def check(self, target: Source) -> list[str]:
        self._store.check(target)
        return []

    def build(self, resources: Resources) -> "Retriever":
        return Retriever(self, Texts((self._store.open(resources),)))


@dataclass(frozen=True, slots=True)
class Retriever:
    """A state is prompt and output."""

    settings: Retrieval
    text: Texts

    sources: ClassVar[tuple[str, ...]] = ("retrieval",)
    needs: ClassVar[Needs] = Retrieval.needs

    @property
    def gives(self) -> Gives:
        return self.settings.gives

    def start(self, requests: Sequence[Opened]) -> list[list[int]]:
        return [list(r.prompt) for r in requests]

    def propose(self, states: Sequence[list[int]], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [self._propose(s, r) for s, r in zip(states, room, strict=True)]

    def _propose(self, tokens: list[int], room: Room) -> Draft:
        s = self.settings
        match = self.text.longest_end(tokens, s.min_match, s.max_match)
        if match is None or not room.chain:
            return EMPTY
        found = continue_from(
            self.text, match, nodes=self.gives.rows, depth=s.max_depth, least=s.min_prob, branch=s.tree
        )
        return found.draft(room)

    def observe(self, states: Sequence[list[int]], seen: Sequence[Seen]) -> list[list[int]]:
        for tokens, news in zip(states, seen, strict=True):
            tokens += news.tokens[len(tokens) - news.position :]
        return list(states)

    def finish(self, state: list[int]) -> None:
        pass
