"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): what most often followed the end of the text elsewhere.

It is looked for in prompt and output (exactly, in an automaton that counts), and in a second text: earlier outputs, a
corpus, or both. Each is asked for the continuations of the longest end of the text that it holds (the paper and Arctic
score every length of the end and take the best); the draft is of the one that promises more right tokens. SAM decoding
(arXiv:2411.10666) has the same two texts and one place in each.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import ClassVar

from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen
from ..decoding.model.source import Source
from ..decoding.noise import Noise
from ..errors import UserError
from .continuations import Continuations, Followed, Node, check_bounds, continue_from
from .datastore import Datastore
from .suffix_array import Memory, SuffixArray, Texts
from .suffix_automaton import START, Match, SuffixAutomaton

MANY = 64  # followers of a run; where there are more, those that are frequent are kept apart


@dataclass(frozen=True, slots=True)
class Suffix:
    """Settings. A match has `min_match` to `max_match` tokens; of its continuations the `nodes` likeliest are drafted,
    at most `max_depth` tokens deep and `per_match` for each token matched (None: no such cap), none with a chance below
    `min_prob`. `tree=False` drafts a chain.

    `remember`: outputs are looked into by later requests, the last `capacity` tokens of them. `corpus`: a text of the
    user's, which is looked into as well.
    """

    nodes: int = 15
    max_depth: int = 15
    min_match: int = 1
    max_match: int = 32
    per_match: float | None = 2.0
    min_prob: float = 0.1
    tree: bool = True
    remember: bool = False
    capacity: int = 1_000_000
    corpus: str | None = None

    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        check_bounds(self.nodes, self.max_depth, self.min_match, self.max_match, self.min_prob)
        if self.per_match is not None and not 0 < self.per_match < inf:
            raise UserError(f"drafting.per_match must be above 0 and finite, or null for no cap, got {self.per_match}")
        if self.capacity < 3:
            raise UserError(f"drafting.capacity must be at least 3 tokens, got {self.capacity}; or set remember=false")

    @property
    def files(self) -> tuple[Path, ...]:
        return () if self.corpus is None else (Path(self.corpus),)

    @property
    def gives(self) -> Gives:
        depth = min(self.nodes, self.max_depth)
        return Gives("tree", self.nodes, depth) if self.tree else Gives("chain", depth, depth)

    def check(self, target: Source) -> list[str]:
        if self.corpus is not None:
            Datastore(self.corpus).check(target)
        return []

    def build(self, resources: Resources) -> "SuffixDrafter":
        corpus = None if self.corpus is None else Datastore(self.corpus).open(resources)
        return SuffixDrafter(self, Memory(self.capacity) if self.remember else None, corpus)


@dataclass(slots=True)
class Own:
    """A request's prompt and output, where the longest end stands that stood before, and what followed it there.

    A node is a state of the automaton. `frequent`: of a state with many followers those that may have a share of
    `least`, and how often it stood when they were found. They are looked for again once it stands a share `least` / 4
    more often, so that all looking takes time linear in the text.
    """

    text: SuffixAutomaton
    longest: int
    least: float
    match: Match = START
    ends: Collection[int] = ()  # states of the text's ends, which nothing follows yet
    frequent: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.match = self.text.follow(self.match, token, self.longest)  # before it is added: it stood there earlier
            self.text.add(token)

    def look(self) -> int:
        """The match as a node: the state it had before it stood at the end too, so of the places before."""
        self.ends = set(self.text.ends())
        return self.match.state

    def total(self, node: int) -> int:
        return self.text.count(node) - (node in self.ends)

    def followers(self, node: int, least: int) -> list[tuple[int, int, int]]:
        """Of equally frequent ones that comes first which was new last."""
        following, count = self.text.following(node), self.text.count
        tokens = list(following) if len(following) <= MANY else self._frequent(node, following)
        found = [(token, count(following[token]), following[token]) for token in reversed(tokens)]
        return [follower for follower in found if follower[1] >= least]

    def _frequent(self, node: int, following: Mapping[int, int]) -> list[int]:
        count = self.text.count(node)
        then, tokens = self.frequent.get(node, (0, []))
        if count > then * (1 + self.least / 4):
            tokens = [token for token, longer in following.items() if self.text.count(longer) >= self.least * count / 2]
            self.frequent[node] = count, tokens
        return tokens


@dataclass(slots=True)
class State:
    own: Own
    prompt: int  # its length


@dataclass(frozen=True, slots=True)
class SuffixDrafter:
    """`memory`: earlier outputs, if they are to be remembered."""

    settings: Suffix
    memory: Memory | None = None
    corpus: SuffixArray | None = None

    needs: ClassVar[Needs] = Suffix.needs

    @property
    def sources(self) -> tuple[str, ...]:
        """Prompt and output, and the second text by what it is of."""
        second = [n for n, text in (("corpus", self.corpus), ("memory", self.memory)) if text is not None]
        return ("suffix", f"suffix_{'_and_'.join(second)}") if second else ("suffix",)

    @property
    def gives(self) -> Gives:
        return self.settings.gives

    def forget(self) -> None:
        if self.memory is not None:
            self.memory.clear()

    def start(self, requests: Sequence[Opened]) -> list[State]:
        s = self.settings
        states = []
        for r in requests:
            own = Own(SuffixAutomaton(counted=s.max_match + s.max_depth), s.max_match, s.min_prob)
            own.read(r.prompt)
            states.append(State(own, len(r.prompt)))
        return states

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        arrays = () if self.corpus is None else (self.corpus,)
        texts = Texts(arrays if self.memory is None else (*arrays, *self.memory.arrays))
        return [self._propose(s.own, texts, r) for s, r in zip(states, room, strict=True)]

    def _propose(self, own: Own, texts: Texts, room: Room) -> Draft:
        """The choice is made before a draft is cut to its room, so that it follows from the texts alone."""
        here = there = Continuations()
        if own.match.length >= self.settings.min_match:
            here = self._continue(own, own.look(), own.match.length)
        match = texts.longest_end(own.text.tokens, self.settings.min_match, self.settings.max_match)
        if match is not None:
            there = self._continue(texts, match, match.depth)
        return there.draft(room, 1) if there.score > here.score else here.draft(room, 0)

    def _continue(self, text: Followed[Node], run: Node, length: int) -> Continuations:
        s = self.settings
        nodes = self.gives.rows if s.per_match is None else int(min(self.gives.rows, s.per_match * length))
        return continue_from(text, run, nodes=nodes, depth=s.max_depth, least=s.min_prob, branch=s.tree)

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            s.own.read(news.tokens[len(s.own.text) - news.position :])
        return list(states)

    def finish(self, state: State) -> None:
        """An output is remembered from here on."""
        if self.memory is not None:
            self.memory.add(state.own.text.tokens[state.prompt :])
