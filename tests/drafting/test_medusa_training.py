import pytest
import torch

from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.training import Schedule, Score, Teacher, Text, train
from decodelab.drafting.medusa_training import TrainMedusa
from decodelab.errors import UserError
from decodelab.tests.taught import said, taught, taught_source, tokens_per_step


def test_a_head_begins_as_the_target_and_learns_what_comes_behind(tmp_path):
    settings = TrainMedusa(heads=2, rows=None, schedule=Schedule(epochs=8, batch=8, every=16, learning_rate=0.02))
    learner = settings.learner(taught_source(), taught(), 0, None)
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
    learner = TrainMedusa(heads=2, rows=None, decay=0.5).learner(taught_source(), target, 0, None)
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
    learner = TrainMedusa(heads=1, rows=5).learner(taught_source(), taught(), 0, None)
    texts = said(4)
    a, b, c = (
        float(learner.objective.loss(texts, 0.0, torch.Generator().manual_seed(s)).value.detach()) for s in (0, 0, 1)
    )
    assert a == b != c


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"heads": 0}, "train.heads must be at least 1, got 0"),
        ({"decay": 0.0}, "train.decay must be above 0 and at most 1, got 0.0"),
        ({"rows": 0}, "train.rows must be at least 1, or null for all, got 0"),
    ],
)
def test_what_is_wrong_is_said(keys, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        TrainMedusa(**keys)
