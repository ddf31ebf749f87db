"""Token recycling (Luo et al. 2024, arXiv:2408.08696): what was likely behind a token is drafted there next time.

A table holds for each token the `width` likeliest followers that the target named when it last scored that token, kept
or not; the draft is a static tree filled from it, breadth first. The prompt's own pairs of tokens are in the table from
the start (the paper scores all rows of the prompt; here only the last one's logits are computed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Resources, Room, Seen, tree
from ..decoding.noise import Noise
from ..errors import UserError
from .trees import MOST, TreeShape, Wanted, asked, file_of, optimal

Table = dict[int, tuple[int, ...]]  # a token's likeliest followers, likeliest first


@dataclass(frozen=True, slots=True)
class TokenRecycling:
    """Settings. The tree has `nodes` nodes of at most `depth` and `width` followers each, and is the best one if a
    follower of rank r is right with probability `hit` · `fall`^r. `tree`, in place of that: a file of paths, `chain` of
    `depth` nodes, the widths of a cartesian tree, or its paths. `remember`: the table lives on from prompt to prompt,
    as in the paper.
    """

    nodes: int = 15
    depth: int = 5
    width: int = 8
    hit: float = 0.5
    fall: float = 0.4
    tree: Wanted | None = None
    remember: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"drafting.{name} must be at least 1, got {getattr(self, name)}")
        if self.nodes > MOST:
            raise UserError(f"drafting.nodes must be at most {MOST}, got {self.nodes}")
        for name in ("hit", "fall"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"drafting.{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def files(self) -> tuple[Path, ...]:
        return file_of(self.tree)

    @property
    def shape(self) -> TreeShape:
        if self.tree is not None:
            found = asked(self.tree, self.depth)
            if found.width > self.width:
                raise UserError(
                    f"drafting.tree tries {found.width} followers of a token, and {self.width} are remembered: "
                    f"drafting.width={found.width}"
                )
            return found
        return optimal([[self.hit * self.fall**r for r in range(self.width)]] * self.depth, self.nodes)

    @property
    def needs(self) -> Needs:
        return Needs(topk=self.width)

    @property
    def gives(self) -> Gives:
        return _gives(self.shape)

    def check(self, target: Any) -> list[str]:
        _fits(self.width, target.config.vocab_size)
        return []

    def build(self, resources: Resources) -> "Recycler":
        _fits(self.width, resources.target.config.vocab)
        return Recycler(self, self.shape, {} if self.remember else None)


def _fits(width: int, vocab: int) -> None:
    if width > vocab:
        raise UserError(f"drafting.width must be at most {vocab}, the target's vocabulary, got {width}")


def _gives(shape: TreeShape) -> Gives:
    return Gives("tree" if shape.width > 1 else "chain", len(shape), shape.depth)


@dataclass(slots=True)
class State:
    """`drafted`: the tokens whose followers the next top-k are, the last emitted one first."""

    tokens: list[int]
    table: Table
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recycler:
    """`memory`: the table that all requests share, if they are to."""

    settings: TokenRecycling
    shape: TreeShape
    memory: Table | None = None

    sources: ClassVar[tuple[str, ...]] = ("token_recycling",)

    @property
    def needs(self) -> Needs:
        return self.settings.needs

    @property
    def gives(self) -> Gives:
        return _gives(self.shape)

    def forget(self) -> None:
        if self.memory is not None:
            self.memory.clear()

    def start(self, requests: Sequence[Opened]) -> list[State]:
        states = []
        for r in requests:
            table: Table = {} if self.memory is None else self.memory
            for token, follower in zip(r.prompt, r.prompt[1:], strict=False):
                self._put(table, token, (follower,))
            states.append(State(list(r.prompt), table))
        return states

    def _put(self, table: Table, token: int, followers: tuple[int, ...]) -> None:
        """The new ones first, then those known before."""
        table[token] = tuple(dict.fromkeys((*followers, *table.get(token, ()))))[: self.settings.width]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        return [self._propose(s, r) for s, r in zip(states, room, strict=True)]

    def _propose(self, s: State, room: Room) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        at: dict[tuple[int, ...], int] = {}
        for path in self.shape.paths:
            if len(tokens) == room.rows:
                break
            if len(path) > room.depth or (len(path) > 1 and path[:-1] not in at):
                continue
            parent = at.get(path[:-1], -1)
            followers = s.table.get(tokens[parent] if parent >= 0 else s.tokens[-1], ())
            if path[-1] < len(followers):
                at[path] = len(tokens)
                tokens.append(followers[path[-1]])
                parents.append(parent)
        s.drafted = tuple(tokens)
        return tree(tokens, parents) if tokens else EMPTY

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            if news.topk is not None:
                root = s.tokens[-1]
                for token, followers in zip((root, *s.drafted), news.topk, strict=True):
                    s.table[token] = followers
            s.tokens += news.tokens[len(s.tokens) - news.position :]
            s.drafted = ()
        return list(states)

    def finish(self, state: State) -> None:
        pass
