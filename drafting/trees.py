"""Static trees: which candidates of which rank follow which. Medusa and token recycling fill them with tokens.

A tree is a set of paths; a path (0, 2) is the third-likeliest token behind the likeliest one. It holds the beginnings
of its paths, so that the node (0,) is there. Nodes are numbered breadth first, likelier ranks first.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..decoding.cost import DraftCost, Profile, gain
from ..decoding.events import Step
from ..errors import UserError

Ranks = tuple[int, ...]
Wanted = str | tuple[int, ...] | tuple[tuple[int, ...], ...]  # of a setting: a file or chain, widths, or paths
MOST = 4096  # nodes that widths may come to
_PRIOR = 4.0  # trials that the rate of a rank over all depths weighs at each of them


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`paths`: each node by the ranks from the root to it, parents first. `parents`, `ranks`, `depths`: by node."""

    paths: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        known: set[Ranks] = {()}
        for path in self.paths:
            if path[:-1] not in known or path in known or min(path, default=-1) < 0:
                raise ValueError(f"node {path} stands before its parent, twice, or has no rank")
            known.add(path)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def width(self) -> int:
        """How many ranks are used at most."""
        return max((path[-1] + 1 for path in self.paths), default=0)

    @property
    def parents(self) -> tuple[int, ...]:
        number = {path: i for i, path in enumerate(self.paths)}
        return tuple(number.get(path[:-1], -1) for path in self.paths)

    @property
    def dense(self) -> bool:
        """Whether every node's followers are the likeliest ones, without a gap, so that a place among siblings is a
        rank."""
        known = set(self.paths)
        return all(not path[-1] or (*path[:-1], path[-1] - 1) in known for path in self.paths)

    def cut(self, rows: int, depth: int) -> "TreeShape":
        """What fits into a room: nodes no deeper than `depth`, the first `rows` of them."""
        return TreeShape(tuple(path for path in self.paths if len(path) <= depth)[: max(0, rows)])


def shape(paths: Sequence[Sequence[int]]) -> TreeShape:
    """Of paths in any order, their beginnings filled in."""
    found = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    return TreeShape(tuple(sorted(found, key=lambda path: (len(path), path))))


def cartesian(widths: Sequence[int]) -> TreeShape:
    """Every combination of the `widths[d]` likeliest tokens at each depth; [1, 1, 1] is a chain. Refuses to make more
    than `MOST` nodes."""
    if (nodes := sum(accumulate(widths, mul))) > MOST:
        raise UserError(
            f"drafting.tree has {nodes} nodes, but widths may come to {MOST}: smaller ones, or a file of paths"
        )
    return shape(list(product(*(range(width) for width in widths))) if widths else [])


@runtime_checkable
class HasTree(Protocol):
    """Settings of a drafter that fills a static tree; None: not with these."""

    @property
    def shape(self) -> TreeShape | None: ...


def asked(wanted: Wanted, depth: int) -> TreeShape:
    """What a setting `tree` says; `chain` is one of `depth` nodes."""
    if isinstance(wanted, str):
        found = cartesian([1] * depth) if wanted == "chain" else read_tree(wanted)
    else:
        widths, paths = [w for w in wanted if isinstance(w, int)], [path for path in wanted if isinstance(path, tuple)]
        found = (
            shape([])
            if widths and paths
            else cartesian(widths)
            if widths
            else listed([list(p) for p in paths], f"drafting.tree={wanted}")
        )
    if not len(found) or any(min(path) < 0 for path in found.paths):
        raise UserError(f"drafting.tree={wanted} is no tree: widths of at least 1, or paths of ranks from 0 on")
    return found


def file_of(wanted: Wanted | None) -> tuple[Path, ...]:
    """The file that a setting `tree` names, if it names one."""
    return (Path(wanted),) if isinstance(wanted, str) and wanted != "chain" else ()


def measured(steps: Sequence[Step], tree: TreeShape | None = None) -> list[list[float]]:
    """`accept[d][r]` as a run's steps have it: of those in which a path of d tokens was kept and a candidate of rank r
    stood behind it, how many kept that one; steps without a draft say nothing. It tells ranks by places among siblings:
    of dense trees alone. With the `tree` that was to be filled, a candidate that it has and a draft had not is one that
    was not kept: so it is with a drafter that knows no follower of some tokens. The last step of a request is left out
    of that: it had less room.

    Where a depth was seldom reached, the rank's rate over all depths speaks for it, and a likelier rank is never taken
    for a worse one: rates are made non-increasing by isotonic regression, weighted by trials.
    """
    from scipy.optimize import isotonic_regression  # a second, so not with the module

    kept, tried = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    below = None if tree is None else Counter(path[:-1] for path in tree.paths)
    for step, last in zip(steps, _last(steps), strict=True):
        row: Sequence[int] = step.offered
        if below is not None and step.offered and not last:
            row = [below[tuple(step.ranks[:d])] for d in range(step.emitted)]
        for d, offered in enumerate(row):
            tried.update((d, r) for r in range(offered))
        kept.update(enumerate(step.ranks))
    depths = range(1 + max((d for d, _ in tried), default=-1))
    pooled = {
        rank: sum(kept[d, rank] for d in depths) / sum(tried[d, rank] for d in depths) for rank in {r for _, r in tried}
    }
    table = []
    for d in depths:
        ranks = sorted(r for depth, r in tried if depth == d)
        trials = np.array([tried[d, r] for r in ranks], float)
        rates = np.array([(kept[d, r] + _PRIOR * pooled[r]) / (tried[d, r] + _PRIOR) for r in ranks])
        table.append(isotonic_regression(rates, weights=trials, increasing=False).x.tolist())
    return table


def _last(steps: Sequence[Step]) -> list[bool]:
    """Of each step, whether it is its request's last. Requests are numbered anew in each batch."""
    after: dict[int, int] = {}
    found = []
    for step in reversed(steps):
        found.append(after.get(step.request, 0) <= step.step)
        after[step.request] = step.step
    return found[::-1]


def optimal(accept: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The tree of `nodes` nodes that keeps most tokens on average, where the candidate of rank r at depth d is right
    with probability `accept[d][r]` if the path to it was.

    Sequoia (arXiv:2402.12374) finds it by dynamic programming over sizes. With these probabilities the value of a tree
    is the sum over its nodes of the product along their path, which never grows with depth: taking the likeliest node
    that is left, again and again, gives the same optimum.
    """
    queue: list[tuple[float, Ranks]] = []

    def offer(path: Ranks, alive: float) -> None:
        if len(path) < len(accept):
            for rank, chance in enumerate(accept[len(path)]):
                if alive * chance > 0:
                    heappush(queue, (-alive * chance, (*path, rank)))

    offer((), 1.0)
    taken: list[Ranks] = []
    while queue and len(taken) < nodes:
        weight, path = heappop(queue)
        taken.append(path)
        offer(path, -weight)
    return shape(taken)


def expected(accept: Sequence[Sequence[float]], tree: TreeShape) -> float:
    """Tokens of a step that fills the tree: those kept on average, and the target's own."""
    alive: dict[Ranks, float] = {(): 1.0}
    for path in tree.paths:
        d, rank = len(path) - 1, path[-1]
        chance = accept[d][rank] if d < len(accept) and rank < len(accept[d]) else 0.0
        alive[path] = alive[path[:-1]] * chance
    return sum(alive.values())


def fastest(
    accept: Sequence[Sequence[float]], profile: Profile, cost: DraftCost, most: int = 64, share: float = 1.0
) -> TreeShape:
    """The optimal tree of the size that gains most, where k rows take T(k) and `share` of the steps draft."""
    trees = [optimal(accept, nodes) for nodes in range(most + 1)]
    return max(trees, key=lambda t: gain(expected(accept, t), len(t), profile, cost, share))


def read_tree(path: str | Path) -> TreeShape:
    """A file that `write_tree` made, or a JSON list of paths as Medusa's choices are written."""
    file = Path(path).expanduser()
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"drafting.tree={str(path)!r} cannot be read ({error.strerror}); give a file of paths"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"drafting.tree={str(path)!r} is not JSON ({error}); it holds a list of paths") from None
    return listed(content.get("paths") if isinstance(content, Mapping) else content, f"drafting.tree={str(path)!r}")


def listed(paths: Any, where: str) -> TreeShape:
    """Of what JSON holds. Refuses what are no paths; `where` they stand."""
    if not isinstance(paths, list) or not all(
        isinstance(p, list) and p and all(type(r) is int and r >= 0 for r in p) for p in paths
    ):
        raise UserError(f"{where} must hold paths, lists of ranks from 0 on, such as [[0], [0, 1]]")
    return shape(paths)


def write_tree(path: Path, tree: TreeShape, about: Mapping[str, Any]) -> None:
    """A key a line; `about`: what it was measured on."""
    content = {**about, "paths": tree.paths}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
