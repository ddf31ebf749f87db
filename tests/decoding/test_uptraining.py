"""A converted model learns to be what it was, and is saved as what it is."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from decodelab.attention.options import GQA, MHA, MQA, Attention, CrossLayer, LowBits, Native, Window
from decodelab.decoding.distillation import Distance, Origin, StudentLearner
from decodelab.decoding.model.config import LAYOUT, ModelConfig, with_layout
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.decoding.training import Schedule, Score, train
from decodelab.decoding.uptraining import TrainKV
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked
from decodelab.tests.taught import said, taught, taught_source


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)


def learner(attention: Attention, **keys: Any) -> StudentLearner:
    settings = TrainKV(attention, loss=Distance(rows=None), schedule=Schedule(longest=64), **keys)
    settings.check(taught_source())
    return settings.learner(taught_source(), taught(), (), 0, None)


def learn(made: StudentLearner, folder: Path) -> None:
    train(
        made.objective,
        said(32),
        Schedule(epochs=5, batch=16, every=1000, learning_rate=0.005),
        seed=0,
        state=folder / "state.safetensors",
        identity={},
        judge=lambda: Score(0.0),
        keep=lambda: None,
    )


@pytest.mark.parametrize(
    ("attention", "hidden"),
    [(MQA(), 0.0), (CrossLayer(2), 1.0), (Window(3), 1.0)],
    ids=["mqa", "cross_layer", "window"],
)
def test_it_comes_nearer_to_what_it_was(attention: Attention, hidden: float, tmp_path: Path):
    made = learner(attention, hidden=hidden)
    before = made.score(said(8, seed=3))
    learn(made, tmp_path)
    assert made.score(said(8, seed=3)).facts["kl"] < 0.7 * before.facts["kl"]


def test_what_is_converted_without_loss_is_what_it_was():
    made = learner(MHA())
    loss = made.objective.loss(said(4), 0.0, torch.Generator())
    assert dict(loss.parts) == pytest.approx({"loss_output": 0, "loss_hidden": 0}, abs=1e-6)
    assert made.score(said(4)).facts["kl"] == pytest.approx(0, abs=1e-6)


def test_states_are_compared_as_shares_of_the_longer_one():
    made = learner(MQA(), hidden=0.5)
    loss = made.objective.loss(said(2), 0.0, torch.Generator())
    theirs = made.objective._teacher_of_layers(said(2))
    ours = made.objective.student(made.objective._padded(said(2)))
    each = [
        ((a - b).norm(dim=-1) / torch.maximum(a.norm(dim=-1), b.norm(dim=-1))).square()
        for layer in (1, 2)
        for i in range(2)
        for a, b in [(theirs[i][layer], ours.states[layer - 1][i])]
    ]
    assert loss.parts["loss_hidden"] == pytest.approx(float(torch.cat(each).mean()), rel=1e-5)
    assert float(loss.value.detach()) == pytest.approx(
        loss.parts["loss_output"] + loss.parts["loss_hidden"] / 2, rel=1e-5
    )


@pytest.mark.parametrize(
    ("parts", "some"),
    [("kv", {"k_proj", "v_proj"}), ("attention", {"k_proj", "v_proj", "q_proj", "o_proj", "input_layernorm"})],
)
def test_parts_learn_and_the_rest_stays(parts: Any, some: set[str], tmp_path: Path):
    made = learner(CrossLayer(2), parts=parts)
    assert {name.split(".")[-2] for name in made.objective.parameters} == some
    before = {name: tensor.clone() for name, tensor in made.objective.tensors.items()}
    learn(made, tmp_path)
    moved = {name for name, tensor in made.objective.tensors.items() if not torch.equal(tensor, before[name])}
    assert moved == made.objective.parameters.keys()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_folder_is_what_was_trained(kind: str, tmp_path: Path):
    """transformers reads it too where it has words for its layout, and gets the same logits."""
    save_folder(tmp_path / "base", tiny_model(kind))
    source = open_source(ModelSpec(path=str(tmp_path / "base")))
    target = load_decoder(source, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 70, 33]])
    for attention in (GQA(1), CrossLayer(2)):
        made = TrainKV(attention, hidden=0.0).learner(source, target, (), 0, None)
        loss = made.objective.loss(said(1), 0.0, torch.Generator())
        loss.value.backward()
        assert all(parameter.grad is not None for parameter in made.objective.parameters.values())
        folder = tmp_path / type(attention).__name__
        folder.mkdir()
        made.save(folder, source, {"texts": "t"})
        saved = open_source(ModelSpec(path=str(folder)))
        decoder = load_decoder(saved, dtype=torch.float32)
        assert decoder.config.layout.layers == attention.layout(target.config.layout, 4).layers
        assert decoder.config == made.objective.decoder().config
        for name, tensor in made.objective.tensors.items():
            assert torch.equal(saved.tensors()[name], tensor)
        with safe_open(folder / "model.safetensors", framework="pt") as stored:
            note = json.loads(stored.metadata()["decodelab"])
        assert (note["kind"], note["target"], note["texts"]) == ("kv", source.digest, "t")
        said_by_config = json.loads((folder / "config.json").read_text())
        assert (LAYOUT in said_by_config) == isinstance(attention, CrossLayer)
        if isinstance(attention, GQA):
            with torch.no_grad():
                theirs = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0]
                passed = made.objective.student(ids).final[0]
                torch.testing.assert_close(made.objective.student.logits(passed), theirs, rtol=1e-4, atol=1e-5)
        else:  # not silently with noise for the keys that are not there
            with pytest.raises(ValueError, match=f"model type `decodelab_{kind}` but Transformers does not recognize"):
                AutoModelForCausalLM.from_pretrained(folder)
            with pytest.raises(UserError, match="no words for the decodelab_layout of CrossLayer: give"):
                Origin(keep=1).check(saved, 8)
            assert Origin(config={"num_hidden_layers": 1}).check(saved, 8) is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("all", "it needs a list of 2 entries"),
        ([{"owner": 0}, {"owner": 0}], "each entry has owner, kv_heads, window, sink, bits, not {'owner': 0}"),
        ([{"kv_heads": "1"}, {}], "kv_heads is '1', but must be an integer"),
        ([{}, {"owner": 2}], "layer 1: owner 2 is not one of layers 0 to 1"),
        ([{"kv_heads": 3}, {}], "4 attention heads are not a multiple of 3 KV heads"),
    ],
)
def test_a_damaged_table_is_one_line(table: Any, message: str):
    if isinstance(table, list) and table[0] != {"owner": 0}:
        usual = {"owner": 0, "kv_heads": 2, "window": None, "sink": 0, "bits": 16}
        table = [usual | table[0], usual | {"owner": 1} | table[1]]
    config = type(taught_source().config).from_dict(taught_source().config.to_dict() | {LAYOUT: table})
    told = f"{LAYOUT} in config.json is no table of this model's layers ({message}): correct it"
    with pytest.raises(UserError, match=re.escape(told)):
        ModelConfig.from_hf(config)


def test_a_config_says_what_transformers_has_words_for():
    native = ModelConfig.from_hf(taught_source().config)
    shared = with_layout(taught_source().config, CrossLayer(2).layout(native.layout, 4))
    assert len(getattr(shared, LAYOUT)) == 2
    plain = with_layout(shared, native.layout)
    assert not hasattr(plain, LAYOUT)
    assert ModelConfig.from_hf(plain) == native


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention": Native()}, "train=kv trains a model for another attention than its own: give one, such as"),
        ({"attention": LowBits(8)}, "train=kv computes keys and values in 16 bits or more, not in 8: leave bits out"),
        ({"schedule": Schedule(longest=600)}, "taught holds 512 tokens: lower train.schedule.longest=600 to that"),
        ({"parts": "mlp"}, "train.parts must be one of kv, attention, all, got 'mlp'"),
        ({"hidden": -1.0}, "train.hidden must be 0 or more, got -1.0"),
    ],
)
def test_what_cannot_be_trained_is_one_line(keys: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        TrainKV(**{"attention": MQA()} | keys).check(taught_source())


def test_quantised_weights_are_neither_converted_nor_trained():
    source = replace(taught_source(), codes={"model.layers.0.self_attn.k_proj": None})
    layout = MQA().layout(taught().config.layout, 4)
    with pytest.raises(UserError, match=r"^taught is quantised, and quantised keys and values are not converted"):
        load_decoder(source, dtype=torch.float32, layout=layout)
    with pytest.raises(UserError, match=r"^taught is quantised, and train=kv trains weights"):
        TrainKV(MQA()).check(source)
