"""What followed a run of tokens elsewhere, as candidates: the likeliest continuations by how often they stood there.

The chance of a continuation is the product, along its path, of the share of places that went on like that. Candidates
are taken by it, greatest first (SuffixDecoding, arXiv:2411.04975), so a draft cut short is the best of its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import Protocol, TypeVar, runtime_checkable

from ..decoding.draft import EMPTY, Draft, Room, tree
from ..errors import UserError
from .suffix_array import DEPTH

Node = TypeVar("Node")


def check_bounds(nodes: int, max_depth: int, min_match: int, max_match: int, min_prob: float) -> None:
    """Refuses settings without sense."""
    for name, value in (("nodes", nodes), ("max_depth", max_depth), ("min_match", min_match)):
        if value < 1:
            raise UserError(f"drafting.{name} must be at least 1, got {value}")
    if max_match < min_match:
        raise UserError(f"drafting.max_match must be at least min_match ({min_match}), got {max_match}")
    if max_match + max_depth > DEPTH:
        raise UserError(
            f"drafting.max_match + max_depth must be at most {DEPTH}, got {max_match} + {max_depth}: lower one of them"
        )
    if not 0.001 <= min_prob <= 1:
        raise UserError(f"drafting.min_prob must be between 0.001 and 1, got {min_prob}")


@runtime_checkable
class Followed(Protocol[Node]):
    """A text. A node is a run of tokens that stands in it."""

    def total(self, node: Node) -> int:
        """In how many places it stands, less those of which is not known how they go on."""
        ...

    def followers(self, node: Node, least: int) -> Sequence[tuple[int, int, Node]]:
        """(token, count, the run with it) of all that follow it in `least` places or more."""
        ...


@dataclass(frozen=True, slots=True)
class Continuations:
    """`score`: how many of the candidates are right on average, if their chances are."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    score: float = 0.0

    def draft(self, room: Room, source: int = 0) -> Draft:
        """What fits: the likeliest ones that are not too deep."""
        row: dict[int, int] = {-1: -1}
        for i, depth in enumerate(self.depths):
            if depth <= room.depth and len(row) <= room.rows:
                row[i] = len(row) - 1
        kept = [i for i in row if i >= 0]
        return tree([self.tokens[i] for i in kept], [row[self.parents[i]] for i in kept], source) if kept else EMPTY


def continue_from(
    text: Followed[Node], run: Node, *, nodes: int, depth: int, least: float, branch: bool
) -> Continuations:
    """At most `nodes` candidates, `depth` one behind the other, none with a chance below `least`. Without `branch` each
    is followed by the likeliest alone. Of equally likely ones that which is found first comes first."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    queue: list[tuple[float, int, int, int, int, Node]] = []  # (−chance, number, token, parent, depth, run)
    number, score = 0, 0.0
    parent, at, chance = -1, 0, 1.0
    while len(tokens) < nodes:
        if at < depth and (total := text.total(run)):
            enough = max(1, ceil(least / chance * total - 1e-9))
            found = sorted(text.followers(run, enough), key=lambda follower: -follower[1])
            for token, count, longer in found if branch else found[:1]:
                heappush(queue, (-chance * count / total, number, token, parent, at + 1, longer))
                number += 1
        if not queue:
            break
        negative, _, token, parent, at, run = heappop(queue)
        chance = -negative
        tokens.append(token)
        depths.append(at)
        parents.append(parent)
        parent = len(tokens) - 1
        score += chance
    return Continuations(tuple(tokens), tuple(parents), tuple(depths), score)
