from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.distillation import Distance, Origin
from decodelab.decoding.draft import Resources
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.decoding.training import Schedule, Score, train
from decodelab.drafting.draft_model import DraftModel, DraftSpec
from decodelab.drafting.draft_training import TrainDraft
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.taught import said, taught, taught_source, tokens_per_step

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LAW = Greedy().law()


@pytest.mark.parametrize("divergence", ["forward", "reverse", "tv", "hard"])
@pytest.mark.parametrize("origin", [Origin(config=SMALL), Origin(keep=1)], ids=["scratch", "cut"])
def test_more_of_its_drafts_is_accepted(origin: Origin, divergence: str, tmp_path: Path):
    schedule = Schedule(epochs=6, batch=16, every=1000, learning_rate=0.02 if origin.config else 0.01)
    settings = TrainDraft(origin, Distance(divergence, rows=None), max_draft=3, schedule=schedule)
    learner = settings.learner(taught_source(), taught(), (), 0, settings.check(taught_source()))
    begun = tokens_per_step(learner.drafter(LAW))
    train(
        learner.objective, said(64), schedule, seed=0, state=tmp_path / "state.safetensors", identity={},
        judge=lambda: Score(0.0), keep=lambda: None,
    )  # fmt: skip
    assert begun < (1.5 if origin.config else 2.8)
    assert tokens_per_step(learner.drafter(LAW)) > begun + (1.0 if origin.config else 0.15)
    assert learner.drafter(LAW).gives.depth == 3


def test_the_folder_drafts_as_the_student_did_and_says_whose_it_is(tmp_path: Path):
    """By its path, with a word where it drafts for another target than it was trained for."""
    source = open_source(ModelSpec(path=str(save_folder(tmp_path / "target", tiny_model()))))
    other = open_source(ModelSpec(path=str(save_folder(tmp_path / "other", tiny_model(num_hidden_layers=3)))))
    target = load_decoder(source, dtype=torch.float32)
    learner = TrainDraft(Origin(keep=1)).learner(source, target, (), 0, None)
    learner.save(tmp_path, source, {})
    settings = DraftModel(DraftSpec(path=str(tmp_path)))
    assert settings.check(source) == []
    said = f"{tmp_path.name} was trained to draft for target, not for other: train one for it"
    assert settings.check(other) == [said]
    assert DraftModel(DraftSpec(path=str(tmp_path / "other"))).check(source) == []  # nobody trained that one
    drafter = settings.build(Resources(target, source.tokenizer, LAW))
    want = learner.drafter(LAW)
    assert drafter.model.config == want.model.config
    assert torch.equal(drafter.model.embedding, want.model.embedding)
    assert all(
        torch.equal(a.qkv.dense(), b.qkv.dense()) for a, b in zip(drafter.model.blocks, want.model.blocks, strict=True)
    )
    longer = replace(source, config=tiny_model(max_position_embeddings=256).config)
    assert settings.check(longer) == [f"{tmp_path.name} holds 128 tokens, target 256: nothing is drafted past 128"]


def test_what_is_wrong_is_said():
    with pytest.raises(UserError, match=r"^train\.max_draft must be at least 1, got 0$"):
        TrainDraft(Origin(keep=1), max_draft=0)
