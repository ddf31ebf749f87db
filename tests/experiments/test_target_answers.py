"""What a target says to a task's prompts: each turn behind its own answers, asked once, the same in any batch."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding.events import finish
from decodelab.decoding.training import Schedule
from decodelab.errors import UserError
from decodelab.experiments.lab import Lab
from decodelab.experiments.target_answers import Answer, Answers, Lessons, answered, digest
from decodelab.experiments.tasks import encode
from decodelab.tests.experiments.tiny_lab import talk, texts, tiny_lab

TURNS = (("ab cd ab", "and then?", "why"), ("the cat and the dog",), ("xyz", "more of it"))


def ask(
    file: Path, task: Any, lab: Lab | None = None, batch: int = 2, told: list[Any] | None = None
) -> tuple[Lab, Answers]:
    lab = tiny_lab() if lab is None else lab
    told = [] if told is None else told
    found = answered(lab, *task, file, seed=0, batch=batch, progress=lambda *step: told.append(step))
    return lab, found


def counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the prompts of each batch that is asked."""
    asked, honest = [], Lab.strategy

    def strategy(self: Lab, requests: Sequence[Any], *args: Any, **options: Any) -> Any:
        asked.append([len(r.prompt) for r in requests])
        return honest(self, requests, *args, **options)

    monkeypatch.setattr(Lab, "strategy", strategy)
    return asked


def test_a_turn_stands_behind_the_answers_to_those_before(tmp_path: Path):
    task = talk(*TURNS)
    told: list[Any] = []
    lab, found = ask(tmp_path / "a", task, told=told)
    assert [(a.id, a.turn) for a in found.all] == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1), ("c", 2)]
    said: dict[str, list[str]] = {}
    for answer in found.all:
        item = next(item for item in task[0].items if item.id == answer.id)
        before = said.setdefault(answer.id, [])
        prompt = encode(item, before, lab.tokenizer, task[1])
        assert answer.prompt == tuple(prompt)
        (plain,) = finish(lab.plain([lab.request(prompt, 12)]))
        assert answer.tokens == tuple(plain.tokens)
        before.append(lab.text(plain.tokens))
    assert [step[1:3] for step in told] == [(0, 6), (2, 6), (3, 6), (3, 6), (5, 6), (5, 6), (6, 6)]
    assert told[0][3] == ""
    assert all(step[3].endswith(" tokens/s") for step in told[1:])


def test_like_lengths_are_asked_together_and_nothing_depends_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = texts(*("ab" * n for n in (1, 9, 2, 8, 3)))
    lab = tiny_lab()
    asked = counted(lab, monkeypatch)
    _, two = ask(tmp_path / "two", task, lab)
    assert asked == [[18, 16], [6, 4], [2]]
    _, three = ask(tmp_path / "three", task, lab, batch=3)
    assert [a.tokens for a in two.all] == [a.tokens for a in three.all]
    assert two.digest == three.digest
    assert [a.id for a in two.all] == list("01234")


def test_only_what_is_missing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By item and turn; rows that are damaged, torn or of other settings count for nothing. A row of an earlier version
    has no turn and no seconds, and is of the first."""
    task, lab, file = talk(*TURNS), tiny_lab(), tmp_path / "answers.jsonl"
    _, whole = ask(file, task, lab)
    assert sum(a.seconds for a in whole.all) > 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    asked = counted(lab, monkeypatch)
    known = ask(file, task, lab)[1]
    assert (known.digest, [a.seconds for a in known.all]) == (whole.digest, [a.seconds for a in whole.all])
    assert asked == []

    first, *rest = [row for row in rows if row["turn"] == 1]
    before_turns = {key: first[key] for key in ("id", "made", "prompt", "tokens")}
    others = [row for row in rows if row["turn"] > 1 and row != rows[-1]]
    damaged = [rows[-1] | {"tokens": "none"}, rows[-1] | {"made": "else"}, {}, []]
    kept = [before_turns, *rest, *others, *damaged]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept) + json.dumps(rows[-1])[:30])
    told: list[Any] = []
    _, again = ask(file, task, lab, told=told)
    assert len(asked) == 1
    assert asked[0] == [len(rows[-1]["prompt"])]
    assert again.digest == whole.digest
    assert told[0][1:3] == (5, 6)
    asked.clear()
    assert ask(file, task, lab)[1].digest == again.digest  # what was appended stands on a line of its own
    assert asked == []
    ask(file, task, replace(lab, source=replace(lab.source, beside="another config")))
    assert sum(map(len, asked)) == 6


def test_what_leaves_no_room_is_left_out_with_what_follows_it(tmp_path: Path):
    context = tiny_lab().context
    task = talk(("a" * (context - 11), "why"), ("b" * (context - 12), "and?", "so?"), ("c",))
    told: list[Any] = []
    _, found = ask(tmp_path / "a", task, told=told)
    assert [(a.id, a.turn) for a in found.all] == [("b", 1), ("c", 1)]
    assert found.left_out == 4
    assert told[-1][1:3] == (2, 2)
    nothing = rf"no prompt leaves room for task.max_new_tokens={context} in the context of {context} tokens: lower it"
    with pytest.raises(UserError, match=nothing):
        ask(tmp_path / "b", talk(*TURNS, tokens=context))


def of(id: str, turn: int, prompt: int, tokens: int) -> Answer:
    """Items have prompts of their own."""
    return Answer(id, turn, tiny_lab().request([ord(id) - 90] * prompt, 4), (2,) * tokens, 0.0)


def test_an_item_is_kept_back_with_all_of_its_turns():
    given = [of(name, turn, 4, 4) for name in "abcd" for turn in (1, 2)]
    lessons = Lessons.of(Answers(tuple(given), 0, ""), 2, 100)
    back = set(sorted("abcd", key=digest)[:2])
    assert [(a.id, a.turn) for a in lessons.held] == [(a.id, a.turn) for a in given if a.id in back]
    assert len(lessons.texts) == len(lessons.held) == 4
    first = next(a for a in given if a.id not in back)
    assert lessons.texts[0].tokens == (*first.prompt, 2, 2, 2, 2)
    assert lessons.texts[0].first == 4
    assert lessons.left_out(texts("a")[1], Schedule(), 64) is None


def test_a_prompt_that_is_kept_back_is_not_learnt_from_under_another_id():
    back = min("abc", key=digest)
    given = [of(name, 1, 4, 4) for name in "abc"]
    twin = replace(next(a for a in given if a.id == back), id="twin")
    if digest("twin") < digest(back):
        back, given = "twin", [twin, *given]
    lessons = Lessons.of(Answers((*given, twin) if back != "twin" else tuple(given), 0, ""), 1, 100)
    assert [a.id for a in lessons.held] == [back]
    assert len(lessons.texts) == 2
    assert lessons.left_out(texts("a")[1], Schedule(), 64) == "left out: 1 prompt that is kept back as well"


def test_what_is_not_learnt_from_is_counted():
    back, *others = sorted("abcdef", key=digest)
    sizes = [(4, 4), (7, 3), (7, 4), (9, 2), (4, 2)]  # the last two say too little, the third is too long
    given = [of(name, 1, *size) for name, size in zip(others, sizes, strict=True)] + [of(back, 1, 9, 9)]
    lessons = Lessons.of(Answers(tuple(given), 2, ""), 1, 10)
    assert [len(text.tokens) for text in lessons.texts] == [8, 10]
    assert lessons.left_out(texts("a")[1], Schedule(longest=10), 64) == (
        "left out: 2 prompts that left no room for task.max_new_tokens=12 in the context of 64, "
        "1 text of more than train.schedule.longest=10 tokens, 2 answers of fewer than 3 tokens"
    )
    with pytest.raises(UserError, match=r"^train.schedule.held_back=6 of 6 prompts leaves none to learn from"):
        Lessons.of(Answers(tuple(given), 0, ""), 6, 10)
    with pytest.raises(UserError, match=r"^no text to learn from: it takes answers of 3 tokens .*longest=7$"):
        Lessons.of(Answers(tuple(given), 0, ""), 1, 7)
