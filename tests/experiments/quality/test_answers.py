"""Answers outlive the run that was killed, and serve no other."""

from pathlib import Path

import pytest

from decodelab.errors import UserError
from decodelab.experiments.quality.answers import Answer, Answers, answers_key, refuse_others, request_digest

TEXT = Answer("12", 3, "12\n", truncated=False)
LIKELIHOOD = Answer((-1.5, True), 2, cut=4)


def test_answers_are_read_back_as_they_were(tmp_path: Path):
    with Answers(tmp_path / "answers.jsonl", "key") as first:
        first.add("a", TEXT, "sums")
        first.add("b", LIKELIHOOD, "sums")
    with Answers(tmp_path / "answers.jsonl", "key") as second:
        assert second.get("a") == TEXT
        assert second.get("b") == LIKELIHOOD
        assert second.get("c") is None


def test_a_run_of_other_weights_is_served_nothing(tmp_path: Path):
    """lm-eval's own cache knows no model: it serves another one's answers (lm-eval#4063)."""
    with Answers(tmp_path / "answers.jsonl", "key") as first:
        first.add("a", TEXT, "sums")
    with Answers(tmp_path / "answers.jsonl", "another") as second:
        assert second.get("a") is None


CONFIG = {
    "seed": 0, "dtype": "float32", "batch": 1, "drafting": {"max_draft": 4}, "task": {"limit": 3}, "against": None,
    "quality": {"tasks": [{"path": "a", "scorer": "f1"}], "epsilon": 0.1, "batch": None, "thinking": None},
}  # fmt: skip
DIGESTS = {"weights": "w", "model": "m", "draft": None, "task": "t", "quality": "q"}


@pytest.mark.parametrize(
    ("same", "config", "digests"),
    [
        (True, {"quality": {**CONFIG["quality"], "tasks": [{"path": "a", "scorer": "number"}]}}, {"quality": "r"}),
        (True, {"quality": {**CONFIG["quality"], "epsilon": 0.2, "allow": ["batch"]}, "against": "ref"}, {}),
        (True, {"task": {"limit": 4}, "timing": "untimed", "threads": 2}, {"task": "u"}),
        (False, {"quality": {**CONFIG["quality"], "thinking": ["<t>", "</t>"]}}, {}),
        (False, {"quality": {**CONFIG["quality"], "batch": 2}}, {}),
        (False, {"seed": 1}, {}),
        (False, {"dtype": "bfloat16"}, {}),
        (False, {"drafting": {"max_draft": 5}}, {}),
        (False, {"unheard": "of"}, {}),
        (False, {}, {"model": "v"}),
        (False, {}, {"draft": "d"}),
    ],
)
def test_answers_belong_to_what_they_depend_on(same, config, digests):
    assert (answers_key({**CONFIG, **config}, {**DIGESTS, **digests}) == answers_key(CONFIG, DIGESTS)) == same


def test_a_line_that_a_kill_tore_is_asked_again(tmp_path: Path):
    """And what is appended behind it stands in a line of its own."""
    file = tmp_path / "answers.jsonl"
    with Answers(file, "key") as first:
        first.add("a", TEXT, "sums")
        first.add("b", LIKELIHOOD, "sums")
    file.write_bytes(file.read_bytes()[:-20])
    with Answers(file, "key") as second:
        assert second.get("a") == TEXT
        assert second.get("b") is None
        second.add("b", LIKELIHOOD, "sums")
    with Answers(file, "key") as third:
        assert third.get("b") == LIKELIHOOD


def test_answers_to_another_task_are_not_to_go(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    refuse_others(file, ())
    with Answers(file, "key") as first:
        first.add("a", TEXT, "sums")
        first.add("b", LIKELIHOOD, "choices")
    refuse_others(file, ("choices", "sums", "more"))
    with pytest.raises(UserError, match=r"answers\.jsonl has answers to sums, and would go: ask that as well, or name"):
        refuse_others(file, ("choices",))


def test_a_file_of_something_else_is_told(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": 1}\n')
    with pytest.raises(UserError, match=r"answers.jsonl:1 is no answer of a run; delete the file"):
        Answers(file, "key")


def test_without_answers_there_is_no_file(tmp_path: Path):
    with Answers(tmp_path / "answers.jsonl", "key"):
        assert not (tmp_path / "answers.jsonl").exists()


def test_a_request_is_what_is_asked_and_which_draw_of_it():
    digests = {
        request_digest("generate_until", ("ab", {"until": ["x"]}), 0),
        request_digest("generate_until", ("ab", {"until": ["y"]}), 0),
        request_digest("generate_until", ("ab", {"until": ["x"]}), 1),
        request_digest("loglikelihood", ("ab", {"until": ["x"]}), 0),
        request_digest("generate_until", ["ab", {"until": ["x"]}], 0),  # as JSON has it: the same as the first
    }
    assert len(digests) == 4
