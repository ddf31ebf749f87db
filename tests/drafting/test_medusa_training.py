import pytest
import torch

from decodelab.decoding import loop
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.cost import DraftCost, Profile
from decodelab.decoding.draft import Resources
from decodelab.decoding.training import Schedule, Score, Teacher, Text, train
from decodelab.drafting.medusa import Medusa, guessed
from decodelab.drafting.medusa_training import MedusaObjective, TrainMedusa
from decodelab.errors import UserError
from decodelab.tests.rigged import ask
from decodelab.tests.taught import said, sentences, taught, taught_source, tokens_per_step


def test_a_head_begins_as_the_target_and_learns_what_comes_behind(tmp_path):
    settings = TrainMedusa(heads=2, rows=None, schedule=Schedule(epochs=8, batch=8, every=16, learning_rate=0.02))
    learner = settings.learner(taught_source(), taught(), (), 0, None)
    begun = tokens_per_step(learner.drafter(Greedy().law()))

    def judge() -> Score:
        return Score(tokens_per_step(learner.drafter(Greedy().law())))

    course = train(
        learner.objective,
        said(64),
        settings.schedule,
        seed=0,
        state=tmp_path / "state.safetensors",
        identity={},
        judge=judge,
        keep=lambda: None,
    )
    assert course.rows[-1]["loss"] < course.rows[0]["loss"] / 2
    assert {"loss_1", "loss_2"} <= course.rows[0].keys()
    assert begun < 1.5
    assert tokens_per_step(learner.drafter(Greedy().law())) > begun + 0.5


def test_labels_stand_two_and_more_behind_and_none_is_of_the_prompt():
    """Head 1 has what the target's own unembedding has not: row t learns token t + 2, of the answer alone."""
    target = taught()
    text = said(1)[0]
    (hidden,) = Teacher(target, ("final",))([text])
    want = []
    for head in range(2):
        rows = list(range(text.first - 1, len(text.tokens) - 2 - head))
        logits = torch.nn.functional.linear(hidden["final"][rows], target.unembedding.dense())
        labels = torch.tensor([text.tokens[t + 2 + head] for t in rows])
        want.append(float(torch.nn.functional.cross_entropy(logits, labels)))
    learner = TrainMedusa(heads=2, rows=None, decay=0.5).learner(taught_source(), target, (), 0, None)
    loss = learner.objective.loss([text], 0.0, torch.Generator())
    assert list(loss.parts.values()) == pytest.approx(want, rel=1e-4)
    assert float(loss.value.detach()) == pytest.approx(want[0] + 0.5 * want[1], rel=1e-4)


def test_a_text_learns_the_same_beside_others():
    """Each text sees itself alone: neither padding nor its neighbours."""
    a, b = said(2)
    teacher = Teacher(taught(), ("final", 1))
    both, (alone,) = teacher([a, Text(b.tokens[:9], 6)]), teacher([a])
    for tap in ("final", 1):
        torch.testing.assert_close(both[0][tap], alone[tap])
        assert len(both[1][tap]) == 9


def test_some_rows_are_drawn():
    learner = TrainMedusa(heads=1, rows=5).learner(taught_source(), taught(), (), 0, None)
    texts = said(4)
    a, b, c = (
        float(learner.objective.loss(texts, 0.0, torch.Generator().manual_seed(s)).value.detach()) for s in (0, 0, 1)
    )
    assert a == b != c


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"heads": 0}, "train.heads must be 1 to 8, got 0"),
        ({"blocks": 9}, "train.blocks must be 1 to 8, got 9"),
        ({"decay": 0.0}, "train.decay must be above 0 and at most 1, got 0.0"),
        ({"rows": 0}, "train.rows must be at least 1, or null for all, got 0"),
    ],
)
def test_what_is_wrong_is_said(keys, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        TrainMedusa(**keys)


def test_heads_that_know_some_tokens_draft_these_alone(tmp_path):
    target, source = taught(), taught_source()
    settings = TrainMedusa(heads=2, vocabulary=20, rows=None)
    learner = settings.learner(source, target, said(8), 0, None)
    ids = learner.objective.ids
    learner.save(tmp_path, source, {})
    drafter = Medusa(path=str(tmp_path), tree=(3, 1)).build(Resources(target, source.tokenizer, Greedy().law(), None))
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    every = torch.nn.functional.linear(hidden, target.unembedding.dense())  # the blocks begin as nothing
    torch.testing.assert_close(drafter.heads(hidden), every[:, ids].expand(2, -1, -1))
    assert set(drafter.heads.ids.tolist()) == set(ids.tolist())
    assert tokens_per_step(drafter) >= 1.0  # and exact
    again = TrainMedusa(heads=2, vocabulary=20, start=str(tmp_path))
    assert again.learner(source, target, (), 0, again.check(source)).objective.ids.tolist() == ids.tolist()
    with pytest.raises(UserError, match=r"train\.start=.* knows 20 tokens: take train\.vocabulary=20"):
        TrainMedusa(heads=2, start=str(tmp_path)).check(source)


def test_labels_of_tokens_that_are_not_known_teach_nothing():
    target, text = taught(), said(1)[0]
    (hidden,) = Teacher(target, ("final",))([text])
    lost = text.tokens[text.first + 3]
    ids = torch.tensor([t for t in range(61) if t != lost])
    whole = TrainMedusa(heads=1, rows=None).learner(taught_source(), target, (), 0, None).objective
    some = MedusaObjective(TrainMedusa(heads=1, rows=None), target, whole.parameters, ids)
    rows = [t for t in range(text.first - 1, len(text.tokens) - 2) if text.tokens[t + 2] != lost]
    logits = torch.nn.functional.linear(hidden["final"][rows], target.unembedding.dense()[ids])
    labels = torch.tensor([ids.tolist().index(text.tokens[t + 2]) for t in rows])
    want = torch.nn.functional.cross_entropy(logits, labels)
    loss = some.loss([text], 0.0, torch.Generator()).value
    assert float(loss.detach()) == pytest.approx(float(want), rel=1e-4)


def test_the_heads_are_saved_with_the_tree_that_is_fastest_by_what_was_kept(tmp_path):
    """Where a row costs much, a few candidates; where rows are free, all that were ever kept."""
    target, source = taught(), taught_source()
    learner = TrainMedusa(heads=2, rows=None).learner(source, target, (), 0, None)
    drafter = learner.drafter(Greedy().law())
    requests = [ask(sentence[:6], Greedy(), 20) for sentence in sentences(8, seed=5)]
    steps = [step for g in loop.generate(target, requests, drafter, Greedy()) for step in g.steps]
    free = DraftCost(0.0, 0.0, 0.0)
    sizes = []
    for dear in (1.0, 0.05, 0.0):
        learner.watch(steps, (Profile(32, {k: 1.0 + dear * (k - 1) for k in (1, 2, 4, 8, 16)}), free))
        learner.save(tmp_path, source, {})
        saved = Medusa(path=str(tmp_path))
        sizes.append(0 if learner.tree is None else len(learner.tree))
        assert saved.shape.paths == (learner.tree or guessed(2)).paths
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] <= len(guessed(2))
