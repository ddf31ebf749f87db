from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Opened, Resources, Room, Seen
from decodelab.decoding.noise import Noise
from decodelab.decoding.training import Schedule, Score, Teacher, train
from decodelab.drafting.eagle import Eagle, EagleDrafter
from decodelab.drafting.eagle_head import EagleHead
from decodelab.drafting.eagle_training import EagleObjective, TrainEagle, first
from decodelab.errors import UserError
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import ask
from decodelab.tests.taught import said, taught, taught_source, tokens_per_step


@pytest.mark.parametrize("keys", [{"version": 1}, {"version": 1, "unrolled": 2}, {"version": 3}], ids=str)
def test_a_head_learns_what_comes_behind(keys, tmp_path):
    schedule = Schedule(epochs=6, batch=8, every=16, learning_rate=0.01)
    settings = TrainEagle(rows=None, schedule=schedule, **keys)
    learner = settings.learner(taught_source(), taught(), (), 0, None)
    begun = tokens_per_step(learner.drafter(Greedy().law()))
    course = train(
        learner.objective,
        said(64),
        schedule,
        seed=0,
        state=tmp_path / "state.safetensors",
        identity={},
        judge=lambda: Score(tokens_per_step(learner.drafter(Greedy().law()))),
        keep=lambda: None,
    )
    assert course.rows[-1]["loss_1"] < course.rows[0]["loss_1"]
    assert begun < 2.0
    assert tokens_per_step(learner.drafter(Greedy().law())) > begun + 0.8


@pytest.mark.parametrize("version", [1, 3])
def test_unrolled_it_computes_what_it_will_when_it_drafts(version, monkeypatch):
    """The drafter's chain of three tokens, its own features and keys behind it, against turns 1 to 3 of the training on
    a text that goes on with these tokens."""
    target = taught()
    settings = TrainEagle(version=version, unrolled=3)
    config = settings.config(target.config)
    draws = torch.Generator().manual_seed(1)
    weights = {n: t + 0.3 * torch.randn(t.shape, generator=draws) for n, t in first(config, 0).items()}
    objective = EagleObjective(settings, config, target, weights)
    head = EagleHead(config, weights, target.embedding, target.unembedding)
    drafter = EagleDrafter(Eagle(tree="chain", depth=3), head, Eagle(tree="chain", depth=3).shape)
    feed, foretold = EagleDrafter._feed, []

    def kept(self, *args):
        foretold.append(feed(self, *args))
        return foretold[-1]

    monkeypatch.setattr(EagleDrafter, "_feed", kept)
    for text in said(6):
        foretold.clear()
        hidden = Teacher(target, config.taps)([text])[0]
        n = len(text.tokens) - 1
        request = ask(list(text.tokens[:n]), Greedy(), 9)
        opened = Opened(request.prompt, (), 9, request.processors, 0, target.open_cache(1, 64))
        (state,) = drafter.start([opened])
        committed = {tap: h[:n] for tap, h in hidden.items()}
        drafter.observe([state], [Seen(text.tokens[1:], 1, prefill=True, committed=committed, hidden=committed)])
        (draft,) = drafter.propose([state], [Room(9, 9)], [Noise(0, 0, 0)])
        assert len(draft.tokens) == 3
        tokens = torch.tensor([[*text.tokens[1:], *draft.tokens]])
        features = head.fuse(
            [torch.cat([h[:n], torch.zeros(3, h.shape[1])])[None] for h in map(hidden.get, config.taps)]
        )
        turns = [out[0, n - 1 + j] for j, out in enumerate(objective.foretold(features, tokens))]
        for ours, drafted in zip(turns, foretold, strict=True):  # the text's last row, and one row a token
            torch.testing.assert_close(ours, drafted[-1], rtol=1e-4, atol=1e-4)
        assert [int(head.logits(out[None]).argmax()) for out in turns] == list(draft.tokens)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"version": 2}, "train.version must be 1 or 3, got 2"),
        ({"unrolled": 0}, "train.unrolled must be at least 1, or null, got 0"),
        ({"noise": -1.0}, "train.noise must be 0 or more, got -1.0"),
        ({"states": 1.0}, "train.states is a share, from 0 to below 1, got 1.0"),
        ({"mlp_dim": 0}, "train.mlp_dim must be at least 1, or null, got 0"),
    ],
)
def test_what_is_wrong_is_said(keys, line, monkeypatch):
    unchecked(monkeypatch)
    with pytest.raises(UserError, match=f"^{line}$"):
        TrainEagle(**keys)


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_that_knows_some_tokens_drafts_these_alone(version, tmp_path):
    target, source = taught(), taught_source()
    settings = TrainEagle(version=version, vocabulary=20, rows=None, mlp_dim=16)
    learner = settings.learner(source, target, said(8), 0, None)
    ids = learner.objective.ids
    assert ids is not None
    assert ids.tolist() == sorted(ids.tolist())
    count = Counter(token for text in said(8) for token in text.tokens[text.first :])
    assert min(count[t] for t in ids.tolist()) >= max(n for t, n in count.items() if t not in ids.tolist())
    learner.save(tmp_path, source, {})
    drafter = Eagle(path=str(tmp_path), nodes=8).build(Resources(target, source.tokenizer, Greedy().law(), None))
    assert drafter.head.ids.tolist() == ids.tolist()
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    every = F.linear(drafter.head._norm("norm", hidden), target.unembedding.dense())
    torch.testing.assert_close(drafter.head.logits(hidden), every[:, ids])
    assert tokens_per_step(drafter) >= 1.0  # and exact
    again = TrainEagle(version=version, vocabulary=20, mlp_dim=16, start=str(tmp_path))
    assert again.learner(source, target, (), 0, again.check(source)).objective.ids.tolist() == ids.tolist()
    with pytest.raises(UserError, match=r"train\.start=.* knows 20 tokens: take train\.vocabulary=20"):
        TrainEagle(version=version, mlp_dim=16, start=str(tmp_path)).check(source)


def test_rows_of_tokens_that_are_not_known_teach_nothing():
    target, text = taught(), said(1)[0]
    lost = text.tokens[text.first + 3]
    settings = TrainEagle(version=3, unrolled=1, vocabulary=60, rows=None)
    start = settings.learner(taught_source(), target, (), 0, None).objective
    ids = torch.tensor([t for t in range(61) if t != lost])
    some = EagleObjective(settings, start.config, target, start.parameters, ids)
    rows = [t for t in range(text.first - 2, len(text.tokens) - 2) if text.tokens[t + 2] != lost]
    assert len(rows) < len(text.tokens) - text.first
    (hidden,) = Teacher(target, (*start.config.taps, "final"))([text])
    wanted = F.linear(hidden["final"][1:], target.unembedding.dense()[ids])
    features = some._head.fuse([hidden[tap][None, :-1] for tap in start.config.taps])
    (out,) = some.foretold(features, torch.tensor(text.tokens[1:])[None])
    each = F.cross_entropy(some._head.logits(out[0]), wanted.softmax(-1), reduction="none")
    loss = some.loss([text], 0.0, torch.Generator())
    assert float(loss.value.detach()) == pytest.approx(float(each[rows].mean().detach()), rel=1e-4)


def test_a_step_without_a_row_to_learn_from_changes_nothing():
    """A batch that says none of the tokens that the head knows."""
    target, texts = taught(), said(2)
    (lost, *_) = {*range(61)} - {token for text in texts for token in text.tokens}
    settings = TrainEagle(version=1, vocabulary=1, rows=None)
    begun = settings.learner(taught_source(), target, said(8), 0, None).objective
    objective = EagleObjective(settings, begun.config, target, begun.parameters, torch.tensor([lost]))
    loss = objective.loss(texts, 0.0, torch.Generator())
    loss.value.backward()
    assert float(loss.value.detach()) == 0
    assert all(not tensor.grad.any() for tensor in objective.parameters.values())


def test_it_goes_on_from_a_head_of_the_same_make_alone(tmp_path):
    """Also where every tensor has the same shape: its norms' eps is not seen in it."""
    target, source = taught(), taught_source()
    settings = TrainEagle(mlp_dim=16)
    learner = settings.learner(source, target, (), 0, None)
    learner.save(tmp_path, source, {})
    again = replace(settings, start=str(tmp_path))
    assert again.check(source).keys() == learner.objective.parameters.keys()
    made = learner.objective.config
    learner.objective.config = replace(made, layer=replace(made.layer, norm_eps=1e-3))
    learner.save(tmp_path, source, {})
    with pytest.raises(
        UserError, match=r"^train\.start=.* of other sizes, heads, RoPE or eps, .* set these as they were"
    ):
        again.check(source)
    with pytest.raises(UserError, match=r"^train\.start=nowhere does not exist; it is a folder or a safetensors file$"):
        replace(settings, start="nowhere").check(source)


def test_the_loss_of_eagle_1_is_of_tokens_and_of_states():
    """Turn by turn, at the rows that foretell the answer."""
    target, (text,) = taught(), said(1)
    settings = TrainEagle(version=1, unrolled=2, decay=0.5, noise=0.0, states=0.75, rows=None)
    objective = settings.learner(taught_source(), target, (), 0, None).objective
    (hidden,) = Teacher(target, ("final",))([text])
    rows = slice(text.first - 2, len(text.tokens) - 2)
    final, unembedding = hidden["final"][1:][rows], target.unembedding.dense()
    wanted = F.linear(final, unembedding).softmax(-1)
    want = 0.0
    turns = objective.foretold(hidden["final"][None, :-1], torch.tensor(text.tokens[1:])[None])
    for turn, out in enumerate(turns):
        ours = out[0, rows]
        each = 0.25 * F.cross_entropy(F.linear(ours, unembedding), wanted) + 0.75 * F.smooth_l1_loss(ours, final)
        want += 0.5**turn * float(each.detach())
    loss = objective.loss([text], 0.0, torch.Generator())
    assert float(loss.value.detach()) == pytest.approx(want, rel=1e-4)


def test_noise_grows_until_halfway():
    def loss(noise: float, done: float, version: int = 1) -> float:
        settings = TrainEagle(version=version, noise=noise, rows=None)
        objective = settings.learner(taught_source(), taught(), (), 0, None).objective
        return float(objective.loss(said(2), done, torch.Generator().manual_seed(0)).value.detach())

    assert loss(0.3, 0.0) == loss(0.0, 1.0)
    assert loss(0.3, 0.25) == loss(0.15, 0.5) != loss(0.3, 0.0)
    assert loss(0.3, 0.5) == loss(0.3, 1.0) != loss(0.3, 0.25)
    assert loss(0.3, 1.0, version=3) == loss(0.0, 1.0, version=3)


def test_a_head_is_unrolled_more_often_than_a_text_is_long():
    (text,) = said(1)
    settings = TrainEagle(version=3, unrolled=len(text.tokens) + 2, mlp_dim=16)
    loss = settings.learner(taught_source(), taught(), (), 0, None).objective.loss([text], 0.0, torch.Generator())
    loss.value.backward()
    assert torch.isfinite(loss.value)
