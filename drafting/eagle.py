"""EAGLE: one decoder layer continues the target's hidden states, and its likeliest continuations are drafted as a tree.

Li et al. 2024, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858; EAGLE-3, arXiv:2503.01840. Row i of the head reads the
feature of position i and the embedding of token i + 1, and says what feature position i + 1 will have, which foretells
token i + 2; a drafted row reads the feature that the row before it said. The rows of tokens that were accepted are
computed anew from the target's own features (vllm#14464).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.book import Placement
from ..attention.cache import Cache, DenseCache
from ..attention.layout import FULL
from ..attention.rows import Rows, chains
from ..decoding.draft import EMPTY, Draft, Drafter, Gives, Needs, Opened, Resources, Room, Seen, tree
from ..decoding.model.source import Source
from ..decoding.noise import Noise
from ..errors import UserError
from ..kernels.verify_attention import causal_attention, verify_attention
from .eagle_head import EagleHead, read_config, read_tensors, unembedding_of
from .trained import open_trained
from .trees import TreeShape, Wanted, asked, file_of

FILES = ("eagle.safetensors", "model.safetensors")


@dataclass(frozen=True, slots=True)
class Eagle:
    """Settings. `path`: a folder or file of a head, ours or in the published layout, of EAGLE-1, -2 or -3; None: the
    one that is shipped.

    The tree is chosen anew each step (EAGLE-2): behind each of the `topk` likeliest nodes of a level stand its `topk`
    likeliest followers, `depth` levels of them, and of all these the `nodes` likeliest are drafted, by the product of
    the probabilities on their path. `tree`, in place of that: `chain` of `depth` tokens, a file of paths, the widths of
    a cartesian tree ([4, 2, 1]), or its paths ([[0], [0, 1]]).
    """

    path: str | None = None
    nodes: int = 15  # with the root, 16 rows, which cost a CPU little more than one
    depth: int = 5
    topk: int = 4
    tree: Wanted | None = None

    # of which layers depends on the head, and with EAGLE-3 on the target's depth: the built drafter says
    needs: ClassVar[Needs] = Needs(prefill_hidden=True)

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "topk"):
            if getattr(self, name) < 1:
                raise UserError(f"drafting.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def files(self) -> tuple[Path, ...]:
        return (*open_trained(self.path, "eagle", FILES).files, *file_of(self.tree))

    @property
    def shape(self) -> TreeShape | None:
        """The fixed tree, if there is one."""
        return None if self.tree is None else asked(self.tree, self.depth)

    @property
    def gives(self) -> Gives:
        return _gives(self, self.shape)

    def check(self, target: Source) -> list[str]:
        """Refuses a head of another target; warns of a context shorter than the target's."""
        trained = open_trained(self.path, "eagle", FILES)
        told = trained.check_target(target)  # before sizes: it says what to do
        theirs = target.config
        config = read_config(trained, target.label, theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers)
        key, width = ("topk", self.topk) if (fixed := self.shape) is None else ("tree", fixed.width)
        if width > (known := config.layer.vocab):
            raise UserError(f"drafting.{key} tries {width} tokens behind each node, but the head knows {known} in all")
        if (ours := config.layer.max_positions) < (all_of := theirs.max_position_embeddings):
            told.append(f"{trained.file} holds {ours} tokens, {target.label} {all_of}: nothing is drafted past {ours}")
        return told

    def build(self, resources: Resources) -> "EagleDrafter":
        target, trained = resources.target, open_trained(self.path, "eagle", FILES)
        config = read_config(trained, "the target", target.config.dim, target.config.vocab, target.config.layers)
        tensors = read_tensors(trained, config, target.dtype, target.device)
        unembedding = unembedding_of(target.unembedding, tensors)
        return EagleDrafter(self, EagleHead(config, tensors, target.embedding, unembedding), self.shape)


def _gives(settings: Eagle, fixed: TreeShape | None) -> Gives:
    if fixed is not None:
        return Gives("tree" if fixed.width > 1 else "chain", len(fixed), fixed.depth)
    rows = min(settings.nodes, settings.topk + (settings.depth - 1) * settings.topk**2)
    return Gives("tree" if min(settings.topk, rows) > 1 else "chain", rows, min(settings.depth, rows))


@dataclass(slots=True)
class Likeliest:
    """A tree that grows level by level, of which the `nodes` likeliest nodes are drafted (EAGLE-2).

    A node is at most as likely as its parent. So one that is not among the `nodes` likeliest so far will not be, nor
    will anything behind it: the `width` best nodes of a level are expanded, less those.
    """

    nodes: int
    width: int
    depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)  # of the path to it

    def grow(self, behind: Sequence[int], tokens: Sequence[list[int]], log_p: Sequence[list[float]]) -> list[int]:
        """Add the followers of the nodes `behind` (−1: of the text), likeliest first; which of them to expand next."""
        first = len(self.tokens)
        for parent, followers, chances in zip(behind, tokens, log_p, strict=True):
            above = self.log_p[parent] if parent >= 0 else 0.0
            self.tokens += followers
            self.parents += [parent] * len(followers)
            self.log_p += [above + chance for chance in chances]
        self.depth -= 1
        return [node for node in self._best() if node >= first][: self.width] if self.depth else []

    def _best(self) -> list[int]:
        """Likeliest first; of equals the one that was there first, so that parents come before their children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.log_p[node])[: self.nodes]

    def draft(self) -> Draft:
        kept = sorted(self._best())
        number = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return tree([self.tokens[node] for node in kept], [number[self.parents[node]] for node in kept])


@dataclass(slots=True)
class Fixed:
    """A tree whose shape is given; the tokens are the followers of those ranks."""

    shape: TreeShape
    parents: tuple[int, ...]
    tokens: list[int]

    @staticmethod
    def of(shape: TreeShape) -> "Fixed":
        return Fixed(shape, shape.parents, [0] * len(shape))

    def grow(self, behind: Sequence[int], tokens: Sequence[list[int]], log_p: Sequence[list[float]]) -> list[int]:
        new = []
        for parent, followers in zip(behind, tokens, strict=True):
            for node in (i for i, p in enumerate(self.parents) if p == parent):
                self.tokens[node] = followers[self.shape.paths[node][-1]]
                new.append(node)
        return [node for node in new if node in self.parents]

    def draft(self) -> Draft:
        return tree(self.tokens, self.parents)


@dataclass(slots=True)
class State:
    """`hidden` [d]: the feature that the head foretells behind the text. `full`: its context ends before the text."""

    cache: Cache
    slot: int
    hidden: Tensor | None = None
    full: bool = False
    told: bool = False


@dataclass(frozen=True, slots=True)
class EagleDrafter:
    """The drafter with its weights; `shape`: of a fixed tree. Row i of a state's cache: (feature i, token i + 1)."""

    settings: Eagle
    head: EagleHead
    shape: TreeShape | None = None

    sources: ClassVar[tuple[str, ...]] = ("eagle",)

    @property
    def needs(self) -> Needs:
        return Needs(taps=tuple(dict.fromkeys(self.head.config.taps)), prefill_hidden=True)

    @property
    def gives(self) -> Gives:
        return _gives(self.settings, self.shape)

    @property
    def max_positions(self) -> int:
        return self.head.config.layer.max_positions

    def start(self, requests: Sequence[Opened]) -> list[State]:
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        staged = len(self.shape) if self.shape is not None else self.settings.depth * self.settings.topk
        cache = DenseCache(
            self.head.config.layer.layout,
            sequences=len(requests),
            capacity=min(longest, self.max_positions) + staged,
            dtype=self.head.embedding.dtype,
            device=self.head.embedding.device,
        )
        return [State(cache, cache.open()) for _ in requests]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = [EMPTY] * len(states)
        fits = [self._fits(s, r) for s, r in zip(states, room, strict=True)]
        for cache, mine in _by_cache(states, [bool(r.chain) for r in fits]):
            grown = self._grow(cache, [states[i] for i in mine], [fits[i] for i in mine])
            for i, draft in zip(mine, grown, strict=True):
                drafts[i] = draft
        return drafts

    def _fits(self, s: State, room: Room) -> Room:
        """The room, or none past the head's own context (vllm#5342): a path of n tokens takes n − 1 rows of it."""
        if s.full and room.chain and not s.told:
            s.told = True
            text = f"the EAGLE head's context of {self.max_positions} tokens is full: no drafts past it"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if s.hidden is None:
            return Room(0, 0)
        return Room(min(room.depth, self.max_positions - s.cache.length(s.slot) + 1), room.rows)

    def _begin(self, room: Room) -> Likeliest | Fixed:
        if self.shape is not None:
            return Fixed.of(self.shape.cut(room.rows, room.depth))
        nodes, depth = self.settings.nodes, self.settings.depth
        return Likeliest(min(nodes, room.rows), self.settings.topk, min(depth, room.depth))

    def _grow(self, cache: Cache, states: list[State], room: list[Room]) -> list[Draft]:
        """One tree for each, side by side: one forward a level."""
        trees = [self._begin(r) for r in room]
        width = self.settings.topk if self.shape is None else self.shape.width
        behind = [[-1] for _ in states]  # the nodes behind which the features are foretold
        staged = [{-1: -1} for _ in states]  # a node's row in the cache
        features = torch.stack([s.hidden for s in states if s.hidden is not None])
        while True:
            best = torch.log_softmax(self.head.logits(features).float(), -1).topk(width)
            tokens, log_p = self.head.ids[best.indices].tolist(), best.values.tolist()
            fed: list[int] = []
            parents: list[int] = []
            owner: list[int] = []
            before: list[int] = []  # the row of `features` that each new row continues
            at = 0
            for b, (s, grown) in enumerate(zip(states, trees, strict=True)):
                nodes, stop = behind[b], at + len(behind[b])
                behind[b] = grown.grow(nodes, tokens[at:stop], log_p[at:stop]) if nodes else []
                for node in behind[b]:
                    parent = grown.parents[node]
                    staged[b][node] = cache.staged + len(fed)
                    fed.append(grown.tokens[node])
                    parents.append(staged[b][parent])
                    owner.append(s.slot)
                    before.append(at + nodes.index(parent))
                at = stop
            if not fed:
                break
            rows = Rows(torch.tensor(fed), torch.tensor(parents), torch.tensor(owner), False, cache.staged)
            features = self._feed(cache, rows, features[torch.tensor(before, device=features.device)])
        if cache.staged:
            cache.drop()
        return [grown.draft() for grown in trees]

    def _feed(self, cache: Cache, rows: Rows, features: Float[Tensor, "T d"]) -> Float[Tensor, "T d"]:
        """Stage rows; what they foretell."""
        place = cache.stage(rows)
        tokens = rows.tokens.to(features.device, non_blocking=True)
        return self.head(features, tokens, place.positions, partial(_attend, cache, place))

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            s.full = s.full or news.position - 1 + len(news.tokens) > self.max_positions
            if s.full:
                s.hidden = None
        for cache, mine in _by_cache(states, [not s.full for s in states]):
            for i in mine:
                assert cache.length(states[i].slot) == seen[i].position - 1, "the head has not read all tokens before"
            pieces, slots = [seen[i].tokens for i in mine], [states[i].slot for i in mine]
            hidden = [[(seen[i].committed or {})[tap] for i in mine] for tap in self.head.config.taps]
            features = self.head.fuse([torch.cat(each) for each in hidden])
            out = self._feed(cache, chains(pieces, slots, prompt=all(seen[i].prefill for i in mine)), features)
            keep, stop = {}, 0
            for i, piece in zip(mine, pieces, strict=True):
                first, stop = stop, stop + len(piece)
                keep[states[i].slot] = range(first, stop)
                states[i].hidden = out[stop - 1]
            cache.commit(keep)
        return list(states)

    def finish(self, state: State) -> None:
        if state.cache.staged:  # aborted within a call
            state.cache.drop()
        state.cache.free(state.slot)


def _by_cache(states: Sequence[State], which: Sequence[bool]) -> list[tuple[Cache, list[int]]]:
    """The numbers of the states to look at, by the cache that they share."""
    found: dict[int, tuple[Cache, list[int]]] = {}
    for i, (s, wanted) in enumerate(zip(states, which, strict=True)):
        if wanted:
            found.setdefault(id(s.cache), (s.cache, []))[1].append(i)
    return list(found.values())


def _attend(cache: Cache, place: Placement, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of staged rows over the head's own cache."""
    scale, parts = q.shape[-1] ** -0.5, []
    for part in place.parts:
        mine = slice(part.first, part.stop)
        cache.write(0, part, k[mine], v[mine])
        keys, values = cache.view(0, part)
        if part.causal:
            parts.append(causal_attention(q[mine], keys, values, scale))
        else:
            parts.append(verify_attention(q[mine].contiguous(), keys, values, part.blocked.get(FULL), scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_drafter(drafter: EagleDrafter) -> Drafter[State]:
    return drafter  # for the type checker
