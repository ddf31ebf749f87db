"""Every drafter of configs/drafting keeps the promises of the seam."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from decodelab import testing
from decodelab.decoding.draft import Resources
from decodelab.drafting.draft_model import DraftModel, ModelDrafter
from decodelab.experiments.compose import described, groups
from decodelab.experiments.construct import Constructor
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


# What a drafter needs beside its YAML, by its name: from the settings, an object whose `build` makes the drafter.
BUILDERS: dict[str, Callable[..., object]] = {"draft_model": WithTinyModel}


def _configured(name: str) -> object:
    settings = Constructor().build(described("drafting", name, OPTIONS), object, "drafting")
    return BUILDERS[name](settings) if name in BUILDERS else settings


@pytest.mark.parametrize("check", testing.DRAFTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_drafter(name, check):
    check(lambda: _configured(name))


def test_a_draft_model_that_samples_from_q():
    testing.sampling_is_plain_decoding(lambda: WithTinyModel(DraftModel(proposal="sampled")))
