"""Medusa (Cai et al. 2024, arXiv:2401.10774): heads on the target's last hidden state, and a static tree of candidates.

Head i reads the hidden state from which the target chose the last token and says what comes i + 2 tokens behind that
row: x + SiLU(W x + b), a residual block or several, then an unembedding: the head's own, the target's, or its rows
of the tokens which heads of ours may know alone. The candidates of depth d are the likeliest tokens of head
d, whatever precedes them: a tree says which combinations are tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Resources, Room, Seen, tree
from ..decoding.model.reading import Product
from ..decoding.model.source import Source
from ..decoding.model.whose import note_of
from ..decoding.noise import Noise
from ..errors import UserError
from ..kernels.linear import Linear
from .trained import Trained, open_trained
from .trees import TreeShape, Wanted, asked, file_of, listed, optimal
from .vocabulary import narrowed

FILES = ("medusa.safetensors", "medusa_lm_head.safetensors")
IDS = "ids"  # int64 [V]: the tokens that the heads know, of ours that do not know all
NODES = 15  # with the root, 16 rows, which cost a CPU little more than one
# Where nothing was measured: the chance that a head's candidate of rank r is right, falling with rank and depth.
_GUESS = [[0.6 * 0.85**d * 0.35**r for r in range(10)] for d in range(8)]


@dataclass(frozen=True, slots=True)
class Medusa:
    """Settings. `path`: a folder or file of heads, ours or in the published layout; None: those that are shipped.

    `tree`: a file of paths, `chain`, the widths of a cartesian tree ([4, 2, 1]), or its paths ([[0], [0, 1], [1]]);
    null: the one that the heads bring, else a guess of 15 nodes.
    """

    path: str | None = None
    tree: Wanted | None = None

    needs: ClassVar[Needs] = Needs(taps=("final",))

    @property
    def heads(self) -> Trained:
        return open_trained(self.path, "medusa", FILES)

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.heads.files, *file_of(self.tree))

    @property
    def shape(self) -> TreeShape:
        """Refuses a tree deeper than there are heads (Medusa#63)."""
        trained = self.heads
        heads = count_heads(trained)
        if self.tree is not None:
            found = asked(self.tree, heads)
        elif paths := trained.about.get("tree"):
            found = listed(paths, f"{trained.file}: its tree")
        else:
            found = guessed(heads)
        if found.depth > heads:
            raise UserError(
                f"drafting.tree is {found.depth} deep, and there are {heads} heads: a tree of at most {heads}"
            )
        return found

    @property
    def gives(self) -> Gives:
        found = self.shape
        return Gives("tree" if found.width > 1 else "chain", len(found), found.depth)

    def check(self, target: Source) -> list[str]:
        trained = self.heads
        told = trained.check_target(target)  # before sizes: it says what to do
        dim, vocab = target.config.hidden_size, target.config.vocab_size
        check_shapes(trained, target.label, dim, vocab)
        known = trained.shapes.get(IDS, (vocab,))[0]
        if (width := self.shape.width) > known:
            raise UserError(f"drafting.tree tries {width} tokens of a head, but the heads know {known} in all")
        return told

    def build(self, resources: Resources) -> "MedusaDrafter":
        target = resources.target
        trained = self.heads
        check_shapes(trained, "the target", target.config.dim, target.config.vocab)
        tensors = trained.tensors()
        trained.check_finite({name: t.to(target.dtype) for name, t in tensors.items() if name != IDS})
        if IDS in tensors:
            check_ids(trained.file, tensors[IDS], target.config.vocab)
        heads = MedusaHeads.read(tensors, target.unembedding, target.dtype, target.device)
        return MedusaDrafter(heads, self.shape)


def guessed(heads: int) -> TreeShape:
    """The tree where nothing was measured."""
    return optimal(_GUESS[:heads], NODES)


def count_heads(trained: Trained) -> int:
    """Refuses a file without heads."""
    numbers = {int(name.split(".")[0]) for name in map(bare, trained.shapes) if name.split(".")[0].isdigit()}
    if numbers != set(range(len(numbers))) or not numbers:
        raise UserError(
            f"{trained.file} holds no Medusa heads: its tensors are {', '.join(list(trained.shapes)[:4])} …"
        )
    return len(numbers)


def check_shapes(trained: Trained, label: str, dim: int, vocab: int) -> None:
    """Refuses heads that are incomplete, hold what no head has, or are of another target than `label`."""
    file = trained.file
    sizes = {bare(name): size for name, size in trained.shapes.items()}
    known: dict[str, tuple[int, ...]] = {}
    own = 0
    for i in range(count_heads(trained)):
        blocks = 0
        while f"{i}.{blocks}.linear.weight" in sizes:
            known |= {f"{i}.{blocks}.linear.weight": (dim, dim), f"{i}.{blocks}.linear.bias": (dim,)}
            blocks += 1
        known[f"{i}.{blocks}.weight"] = (vocab, dim)
        own += f"{i}.{blocks}.weight" in sizes
    if unknown := [name for name in sizes if name not in known and not (name == IDS and not own)]:
        raise UserError(
            f"{file} holds {unknown[0]}, which has no place in Medusa's heads: one before it may be missing"
        )
    for name, size in sizes.items():
        if size != known.get(name, size):
            raise UserError(
                f"{file}: {name} is {list(size)}, but must be {list(known[name])} with {label}'s hidden size of {dim} "
                f"and its vocabulary of {vocab}: these heads belong to another model"
            )
    if own not in (0, count_heads(trained)):
        raise UserError(
            f"{own} of {count_heads(trained)} Medusa heads have an unembedding of their own: all or none may"
        )


def check_ids(file: Path, ids: Tensor, vocab: int) -> None:
    """Refuses a list of tokens that names one twice or none of the target's."""
    if ids.dim() != 1 or len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(f"{file}: {IDS} must name different tokens from 0 to {vocab - 1}: train the heads again")


def bare(name: str) -> str:
    """Of a tensor, without what a project puts before it."""
    return name.removeprefix("medusa_head.").removeprefix("heads.")


@dataclass(frozen=True)
class MedusaHeads:
    """`blocks[i][j]`: residual block j of head i; `unembeddings`: one a head, or one that all share; `ids`: of the
    target's tokens, those that the logits are of (None: all)."""

    blocks: tuple[tuple[Linear, ...], ...]
    unembeddings: tuple[Product, ...]
    ids: Int[Tensor, " V"] | None = None

    @staticmethod
    def read(
        tensors: Mapping[str, Tensor], unembedding: Product, dtype: torch.dtype, device: torch.device
    ) -> "MedusaHeads":
        """The published layout: `i.j.linear.weight` and `.bias` of residual block j of head i, and `i.J.weight` behind
        the last of them, the head's own unembedding; without it the target's is shared. Ours may have `ids`."""
        ids = None if IDS not in tensors else tensors[IDS].to(device)
        tensors = {name: tensor for name, tensor in tensors.items() if name != IDS}
        named = {bare(name): tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
        heads = 1 + max(int(name.split(".")[0]) for name in named)
        blocks, own = [], []
        for i in range(heads):
            layers: list[Linear] = []
            while (weight := named.get(f"{i}.{len(layers)}.linear.weight")) is not None:
                layers.append(Linear(weight, named.get(f"{i}.{len(layers)}.linear.bias")))
            blocks.append(tuple(layers))
            if (weight := named.get(f"{i}.{len(layers)}.weight")) is not None:
                own.append(Linear(weight))
        assert len(own) in (0, heads)
        return MedusaHeads(tuple(blocks), tuple(own) or (narrowed(unembedding, ids),), ids)

    def __call__(self, hidden: Float[Tensor, "B dim"]) -> Float[Tensor, "H B V"]:
        states = []
        for blocks in self.blocks:
            x = hidden
            for block in blocks:
                x = x + F.silu(block(x))
            states.append(x)
        if len(self.unembeddings) == len(self.blocks) > 1:
            return torch.stack([out(x) for out, x in zip(self.unembeddings, states, strict=True)])
        H, B = len(states), hidden.shape[0]
        return self.unembeddings[0](torch.cat(states)).view(H, B, -1)


@dataclass(slots=True)
class State:
    """`hidden` [dim]: of the row that the last token was chosen from."""

    length: int
    hidden: Tensor | None = None


@dataclass(frozen=True)
class MedusaDrafter:
    """The heads and the tree that their tokens fill."""

    heads: MedusaHeads
    shape: TreeShape

    sources: ClassVar[tuple[str, ...]] = ("medusa",)
    needs: ClassVar[Needs] = Medusa.needs

    @property
    def gives(self) -> Gives:
        return Gives("tree" if self.shape.width > 1 else "chain", len(self.shape), self.shape.depth)

    def start(self, requests: Sequence[Opened]) -> list[State]:
        return [State(len(r.prompt)) for r in requests]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = [EMPTY] * len(states)
        asked = [i for i, (s, r) in enumerate(zip(states, room, strict=True)) if s.hidden is not None and r.chain]
        if not asked:
            return drafts
        logits = self.heads(torch.stack([h for i in asked if (h := states[i].hidden) is not None]))
        ranked = logits.topk(self.shape.width, -1).indices
        best = (ranked if self.heads.ids is None else self.heads.ids[ranked]).tolist()
        for b, i in enumerate(asked):
            part = self.shape.cut(room[i].rows, room[i].depth)
            drafts[i] = tree([best[len(path) - 1][b][path[-1]] for path in part.paths], part.parents)
        return drafts

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for s, news in zip(states, seen, strict=True):
            s.length = news.position + len(news.tokens)
            if news.prefill:
                s.hidden = news.hidden["final"][-1] if news.hidden else None
            elif news.committed:
                s.hidden = news.committed["final"][-1]
        return list(states)

    def finish(self, state: State) -> None:
        pass


def note(target: Source, **about: Any) -> dict[str, str]:
    """The metadata of a file of heads."""
    return note_of("medusa", target, about)
