"""Every drafter of configs/drafting, also those that need more than their YAML says, beside a tiny target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodelab.decoding import reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Draft, Drafter, Gives, Resources, Room, chain
from decodelab.decoding.noise import Noise
from decodelab.drafting.draft_model import DraftModel, ModelDrafter
from decodelab.drafting.layer_skip import LayerSkip
from decodelab.drafting.medusa import MedusaDrafter, MedusaHeads
from decodelab.drafting.merge import Merged
from decodelab.drafting.retrieval import Retrieval, Retriever
from decodelab.drafting.suffix_array import BORDER, SuffixArray, Texts
from decodelab.drafting.trees import cartesian
from decodelab.experiments.compose import described, groups
from decodelab.experiments.construct import Constructor
from decodelab.tests.drafting.eagles import WithRandomEagle
from decodelab.tests.rigged import Rigged, State, ask
from decodelab.tests.tiny import tiny_decoder

OPTIONS = groups()["drafting"]


@dataclass(frozen=True)
class WithTinyModel:
    """A draft model that is nearly the target: its drafts are kept in part."""

    settings: DraftModel

    def build(self, resources: Resources) -> ModelDrafter:
        config = resources.target.config
        model = tiny_decoder(
            scale=7.0, num_key_value_heads=config.kv_heads, max_position_embeddings=config.max_positions
        )
        return ModelDrafter(self.settings, model, config.vocab, resources.law)


@dataclass(frozen=True)
class WithRandomHeads:
    """Medusa heads that know nothing: what they are for is in test_medusa.py."""

    def build(self, resources: Resources) -> MedusaDrafter:
        target, draws = resources.target, torch.Generator().manual_seed(0)
        dim = target.config.dim
        tensors = {f"{i}.0.linear.weight": torch.randn(dim, dim, generator=draws) for i in range(3)}
        heads = MedusaHeads.read(tensors, target.unembedding, target.dtype, target.device)
        return MedusaDrafter(heads, cartesian([3, 2, 1]))


@dataclass(frozen=True)
class WithWhatTheTargetSays:
    """A datastore of plain decoding's own outputs, with a token in seven changed."""

    def build(self, resources: Resources) -> Retriever:
        asked = [ask(p, Greedy()) for p in ([7, 8, 9], [5, 6, 7] * 3)]
        said = reference.generate(resources.target, asked, Greedy().law())
        texts = [
            [*r.prompt, *(0 if i % 7 == 6 else t for i, t in enumerate(g.tokens))]
            for r, g in zip(asked, said, strict=True)
        ]
        text = [token for tokens in texts for token in (*tokens, BORDER)]
        return Retriever(Retrieval(), Texts((SuffixArray.of(np.array(text, np.uint32)),)))


def beside_a_wrong_one(drafter: Drafter[Any]) -> Merged:
    """A merge whose first member drafts two tokens that seldom are right: the rows of `drafter` are others in it."""

    def wrong(state: State, room: Room, noise: Noise) -> Draft:
        return chain([0, 1][: room.chain])

    return Merged((Rigged(wrong, gives=Gives("chain", 2, 2)), drafter))


# Drafters that need more than their YAML says, by name: an object whose `build` makes the drafter.
BUILDERS: dict[str, Callable[[], object]] = {
    "draft_model": lambda: WithTinyModel(DraftModel()),
    "eagle": WithRandomEagle,
    "layer_skip": lambda: LayerSkip(exit=1),
    "medusa": WithRandomHeads,
    "retrieval": WithWhatTheTargetSays,
}


def configured(name: str) -> object:
    """The settings of an option by its name, or what stands for them here."""
    if name in BUILDERS:
        return BUILDERS[name]()
    return Constructor().build(described("drafting", name, OPTIONS), object, "drafting")
