"""What a student learns from, how far it is, where it comes from, and the folder that it leaves."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from decodelab.decoding.distillation import Distance, Distillation, Origin, TrainStudent
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.decoding.training import Schedule, Score, Text, train
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked
from decodelab.tests.taught import said, taught, taught_source

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SCRATCH = Origin(config=SMALL)
CUT = Origin(keep=1)
ALL_ROWS = Distance(rows=None)


def distilled(origin: Origin = CUT, distance: Distance = ALL_ROWS, **keys: Any) -> Distillation:
    settings = TrainStudent(origin, distance)
    source = keys.get("source", taught_source())
    start = settings.check(source)
    return settings.learner(source, keys.get("target", taught()), (), 0, start).objective


def learn(objective: Distillation, folder: Path, texts: int = 64, epochs: int = 6, **keys: Any) -> None:
    train(
        objective,
        said(texts),
        Schedule(epochs=epochs, batch=16, every=1000, learning_rate=keys.get("rate", 0.02)),
        seed=0,
        state=folder / "state.safetensors",
        identity={},
        judge=keys.get("judge", lambda: Score(0.0)),
        keep=lambda: None,
    )


def by_hand(divergence: str, p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
    p, q = ((logits / temperature).exp() for logits in (p, q))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    each = {"forward": p * (p / q).log(), "reverse": q * (q / p).log(), "tv": (p - q).abs() / 2}
    return each[divergence].sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "tv"])
def test_distances_are_those_of_their_formulas(divergence: str, temperature: float, rng: torch.Generator):
    p, q = torch.randn(2, 3, 5, generator=rng, dtype=torch.float64)
    distance = Distance(divergence, temperature)
    torch.testing.assert_close(distance(p, q), by_hand(divergence, p, q, temperature))
    assert torch.autograd.gradcheck(lambda q: distance(p, q), q.requires_grad_())
    torch.testing.assert_close(distance(p, p), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("divergence", ["forward", "reverse", "tv"])
def test_a_token_of_no_chance_leaves_everything_finite(divergence: str):
    """In p, in q, and in both; in float32 their softmax is 0."""
    p = torch.tensor([[0.0, 1.0, -1e4, -1e4]])
    q = torch.tensor([[0.0, -1e4, 1.0, -1e4]], requires_grad=True)
    value = Distance(divergence)(p, q)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(q.grad).all()
    assert divergence != "tv" or value.item() == pytest.approx(0.7311, abs=1e-4)  # all but the chance of token 0


@pytest.mark.parametrize("divergence", ["forward", "hard"])
def test_rows_are_those_that_tokens_of_the_answer_were_chosen_from(divergence: str):
    """Each text by itself through transformers' own models: no prompt, no padding, no neighbour."""
    texts = [said(2)[0], Text(said(2)[1].tokens[:9], 6)]
    objective = distilled(distance=Distance(divergence, rows=None))
    teacher = AutoModelForCausalLM.from_config(taught_source().config)
    teacher.load_state_dict(dict(taught_source().tensors()))
    each = []
    for text in texts:
        ids, rows = torch.tensor([text.tokens]), slice(text.first - 1, len(text.tokens) - 1)
        p, q = (model(ids).logits[0, rows] for model in (teacher, objective.student.model))
        if divergence == "hard":
            each.append(-q.log_softmax(-1)[range(len(q)), list(text.tokens[text.first :])])
        else:
            each.append(by_hand(divergence, p, q))
    assert [len(e) for e in each] == [20, 3]
    loss = objective.loss(texts, 0.0, torch.Generator())
    torch.testing.assert_close(loss.value, torch.cat(each).mean(), rtol=1e-4, atol=1e-5)
    loss.value.backward()
    assert all(tensor.grad is not None for tensor in objective.parameters.values())


def test_some_rows_are_drawn():
    objective = distilled(distance=Distance(rows=5))
    a, b, c = (float(objective.loss(said(4), 0.0, torch.Generator().manual_seed(s)).value.detach()) for s in (0, 0, 1))
    assert a == b != c


def test_a_target_in_bfloat16_is_learnt_from():
    source = taught_source()
    target = Decoder(ModelConfig.from_hf(source.config), source.tensors(), dtype=torch.bfloat16)
    losses = [
        float(distilled(target=t).loss(said(4), 0.0, torch.Generator()).value.detach()) for t in (target, taught())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert {t.dtype for t in distilled(target=target).parameters.values()} == {torch.float32}
    assert distilled(target=target).decoder().dtype == torch.bfloat16


@pytest.mark.parametrize("divergence", ["forward", "reverse", "tv", "hard"])
@pytest.mark.parametrize("origin", [SCRATCH, CUT], ids=["scratch", "cut"])
def test_a_student_comes_nearer(origin: Origin, divergence: str, tmp_path: Path):
    objective = distilled(origin, Distance(divergence, rows=None))
    before = objective.score(said(8, seed=3))
    learn(objective, tmp_path, rate=0.02 if origin is SCRATCH else 0.005)
    after = objective.score(said(8, seed=3))
    assert after.facts["agreement"] > before.facts["agreement"]
    if divergence != "hard":  # which learns the likeliest token, and nothing of the others
        assert after.value > before.value + 0.05


def test_a_score_is_of_the_answers_alone():
    """All layers kept: the target itself."""
    found = distilled(Origin(keep=2)).score(said(4))
    assert found.value == -found.facts["kl"] == pytest.approx(0, abs=1e-5)
    assert found.facts["agreement"] == 1
    assert found.facts["perplexity"] == pytest.approx(found.facts["teacher_perplexity"], rel=1e-4)
    texts, objective = said(4), distilled(CUT)
    ids = torch.tensor([text.tokens for text in texts])
    q = objective.student.model(ids).logits[:, 5:-1].log_softmax(-1)
    nll = -q.gather(-1, ids[:, 6:, None]).mean()
    found = objective.score(texts)
    assert found.facts["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-4)
    assert found.facts["kl_p99"] > found.facts["kl"] > 0


def test_layers_are_spread_over_the_target_and_bring_their_weights():
    config = tiny_model("smollm3", num_hidden_layers=8, no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0]).config
    source = replace(taught_source(), config=config)
    kept = {n: Origin(keep=n).layers(source) for n in (1, 2, 3, 4, 8)}
    assert kept == {1: (0,), 2: (0, 7), 3: (0, 4, 7), 4: (0, 2, 5, 7), 8: tuple(range(8))}
    assert Origin(keep=(1, 3, 7)).shape(source).no_rope_layers == [1, 0, 0]
    assert Origin(config={"num_hidden_layers": 3}).shape(source).no_rope_layers == [1, 1, 0]
    tensors = taught_source().tensors()
    student = distilled(Origin(keep=(1,))).student.model.state_dict()
    assert student.keys() == {name.replace("layers.1.", "layers.0.") for name in tensors if "layers.0." not in name}
    for name, tensor in student.items():
        assert torch.equal(tensor, tensors[name.replace("layers.0.", "layers.1.")])


def test_a_frozen_embedding_stays_and_is_not_in_the_state(tmp_path: Path):
    objective = distilled(Origin(keep=1, freeze_embedding=True))
    before = {name: tensor.clone() for name, tensor in objective.tensors.items()}
    learn(objective, tmp_path, texts=16, epochs=1)
    changed = {name for name, tensor in objective.tensors.items() if not torch.equal(tensor, before[name])}
    assert (
        before.keys() - changed
        == {"model.embed_tokens.weight", "lm_head.weight"}
        == before.keys() - {*objective.parameters}
    )
    with safe_open(tmp_path / "state.safetensors", framework="pt") as stored:
        assert not [name for name in stored.keys() if "embed" in name or "lm_head" in name]  # noqa: SIM118


@pytest.mark.parametrize("origin", [SCRATCH, CUT], ids=["scratch", "cut"])
def test_a_training_that_was_broken_off_goes_on_exactly(origin: Origin, tmp_path: Path, monkeypatch: Any):
    """Rows are drawn, and what is random at the beginning comes from the seed."""
    monkeypatch.setattr("decodelab.decoding.training._SAVE_EVERY_S", -1.0)  # after each step
    (tmp_path / "whole").mkdir()
    whole = distilled(origin, Distance(rows=40))
    learn(whole, tmp_path / "whole", texts=32, epochs=3)
    begun = distilled(origin, Distance(rows=40))
    loss, seen = begun.loss, []

    def breaks(*args: Any) -> Any:
        seen.append(args)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return loss(*args)

    monkeypatch.setattr(begun, "loss", breaks)
    with pytest.raises(KeyboardInterrupt):
        learn(begun, tmp_path, texts=32, epochs=3)
    again = distilled(origin, Distance(rows=40))
    learn(again, tmp_path, texts=32, epochs=3)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
    assert any(not torch.equal(tensor, begun.tensors[name]) for name, tensor in whole.tensors.items())


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """Targets on disk, with untied embeddings and tied ones."""
    folder = tmp_path_factory.mktemp("targets")
    models = {"llama": tiny_model(), "qwen3": tiny_model("qwen3", tie_word_embeddings=True)}
    return {kind: open_source(ModelSpec(path=str(save_folder(folder / kind, m)))) for kind, m in models.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_folder_is_a_checkpoint_like_any_other(kind: str, kinds: dict[str, Source], tmp_path: Path):
    source = kinds[kind]
    target = load_decoder(source, dtype=torch.float32)
    objective = distilled(source=source, target=target)
    objective.save(tmp_path, source, "student", {"prompts": 3})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        note = json.loads(stored.metadata()["decodelab"])
        assert ("lm_head.weight" in stored.keys()) == (kind == "llama")  # noqa: SIM118  # what is tied stands there once
    assert note == {"kind": "student", "target": source.digest, "target_label": kind, "prompts": 3}
    saved = open_source(ModelSpec(path=str(tmp_path)))
    assert saved.tokenizer.get_vocab() == source.tokenizer.get_vocab()
    assert saved.tokenizer.encode("ab 12 é<|im_end|>") == source.tokenizer.encode("ab 12 é<|im_end|>")
    assert saved.tokenizer.chat_template == source.tokenizer.chat_template
    assert saved.eos_ids == source.eos_ids
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]
    ids = torch.tensor([[5, 9, 70, 33]])
    with torch.no_grad():
        want = objective.student.model(ids).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(theirs(ids).logits[0], want)
    assert theirs.generation_config.eos_token_id == list(source.eos_ids)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == source.tokenizer.get_vocab()
    ours = load_decoder(saved, dtype=torch.float32)
    for name, tensor in objective.tensors.items():
        assert torch.equal(saved.tensors()[name], tensor)
    assert ours.config == objective.decoder().config


def test_it_goes_on_from_an_earlier_one(tmp_path: Path, kinds: dict[str, Source]):
    source = kinds["llama"]
    target = load_decoder(source, dtype=torch.float32)
    first = distilled(Origin(config=SMALL), source=source, target=target)
    first.save(tmp_path, source, "draft", {})
    again = distilled(Origin(start=str(tmp_path)), source=source, target=target)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in first.tensors.items())
    with pytest.raises(
        UserError, match=r"^train\.student\.start=.* has another tokenizer than taught: name a model with"
    ):
        Origin(start=str(tmp_path)).check(taught_source(), 100)


def test_logits_of_padding_do_not_count(kinds: dict[str, Source]):
    """A model may have more rows in its embedding than the target has tokens, or fewer."""
    small, large = kinds["llama"], replace(kinds["llama"], config=tiny_model(vocab_size=272).config)
    target = load_decoder(small, dtype=torch.float32)
    student = Origin(config=SMALL).build(large, target, 0, None)
    objective = Distillation(Distance(), target, student)
    assert objective.loss([Text((5, 9, 70, 33, 3), 2)], 0.0, torch.Generator()).value.isfinite()
    assert student.config.vocab_size > target.config.vocab


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {},
            "a student comes from one of train.student.keep, train.student.config and train.student.start, got none of",
        ),
        ({"keep": 2, "start": "x"}, "got train.student.keep and train.student.start: the others are null"),
        ({"keep": 0}, "train.student.keep must be a number of layers from 1 on, or a rising list of them, got 0"),
        ({"keep": ()}, "or a rising list of them, got []"),
        ({"keep": (1, 0)}, "or a rising list of them, got [1, 0]"),
        ({"keep": (-1, 0)}, "or a rising list of them, got [-1, 0]"),
        ({"config": {"hidden": 3}}, "train.student.config.hidden is unknown: it has hidden_size, intermediate_size"),
        ({"config": {"vocab_size": 3}}, "train.student.config.vocab_size is unknown"),
        ({"config": {"hidden_size": 0}}, "train.student.config.hidden_size must be an integer from 1 on, got 0"),
        ({"config": {"head_dim": 8.0}}, "train.student.config.head_dim must be an integer from 1 on, got 8.0"),
        ({"config": {"tie_word_embeddings": 1}}, "tie_word_embeddings must be true or false, got 1"),
        ({"config": {}, "freeze_embedding": True}, "train.student.freeze_embedding would freeze random numbers"),
    ],
)
def test_an_origin_that_is_none_is_said(keys: dict[str, Any], line: str):
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        Origin(**keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"keep": 3}, "train.student.keep=3, but taught has 2 layers, from 0 on"),
        ({"keep": (0, 2)}, "train.student.keep=[0, 2], but taught has 2 layers, from 0 on"),
        (
            {"config": {"hidden_size": 30}},
            "hidden_size=30 is no multiple of num_attention_heads=4; give one that is, or",
        ),
        ({"config": {"hidden_size": 12}}, "train.student.config: a head_dim of 3 is odd, and RoPE turns pairs"),
        (
            {"config": {"num_key_value_heads": 3}},
            "train.student.config: llama: 4 attention heads are not a multiple of 3",
        ),
        ({"config": {"max_position_embeddings": 64}}, "holds 64 tokens: lower train.schedule.longest=100 to that"),
        ({"start": "nothing"}, "no model is named 'nothing'"),
        ({"start": "/nowhere/at.all"}, "there is no /nowhere/at.all"),
    ],
)
def test_what_cannot_be_built_is_said_before_weights_are_loaded(keys: dict[str, Any], line: str):
    def unread(progress: Any) -> Any:
        raise AssertionError

    source = replace(taught_source(), _read=unread)
    with pytest.raises(UserError, match=re.escape(line)):
        TrainStudent(Origin(**keys), schedule=Schedule(longest=100)).check(source)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"divergence": "kl"}, "train.loss.divergence must be forward, reverse, tv or hard, got 'kl'"),
        ({"temperature": 0.0}, "train.loss.temperature must be above 0 and finite, got 0.0"),
        (
            {"divergence": "hard", "temperature": 2.0},
            "train.loss.temperature=2.0 is of distributions: it must be 1 with",
        ),
        ({"rows": 0}, "train.loss.rows must be at least 1, or null for all, got 0"),
    ],
)
def test_a_distance_that_is_none_is_said(keys: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch):
    unchecked(monkeypatch)
    with pytest.raises(UserError, match=re.escape(line)):
        Distance(**keys)
