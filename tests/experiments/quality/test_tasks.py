"""Rows of files as questions, and what lm-eval is given of them: exact prompts of each kind."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from decodelab.errors import UserError
from decodelab.experiments.quality import harness
from decodelab.experiments.quality.harness import FileTask
from decodelab.experiments.quality.programs import program_of
from decodelab.experiments.quality.programs import tests_of as joined_tests
from decodelab.experiments.quality.sandbox import run_tests
from decodelab.experiments.quality.settings import QualitySettings, TaskSpec
from decodelab.experiments.quality.tasks import OwnTask, build_tasks, read_task, spec_digest, tasks_digest
from decodelab.tests.enumeration import unchecked

CHOICES = {"question": "Capital of France? ", "choices": ["Rome", "Paris "], "answer": 1}
NUMBERS = {"question": "2 + 2?", "answer": "4"}


def write(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def read(tmp_path):
    """A task of rows written on the spot, as `t.jsonl`."""

    def read(*rows, settings: QualitySettings | None = None, trusted=(), **spec) -> OwnTask:
        path = write(tmp_path / "t.jsonl", *rows)
        return read_task(TaskSpec(path, **spec), settings or QualitySettings(), trusted)

    return read


def chat(messages, add_generation_prompt=True) -> str:
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * add_generation_prompt


def asked(own: OwnTask, number: int = 0, **context) -> list[tuple]:
    """What lm-eval is to ask the model of an item."""
    task = FileTask(own)
    doc = task.eval_docs[number]
    made = task.fewshot_context(doc, own.shots, **context)
    return [i.args for i in task.construct_requests(doc, made, metadata=(own.name, number, 1))]


def asked_in_chat(own: OwnTask, number: int = 0, system: str | None = None) -> list[tuple]:
    return asked(own, number, system_instruction=system, apply_chat_template=True, chat_template=chat)


def score(own: OwnTask, *results, number: int = 0) -> dict:
    task = FileTask(own)
    return task.process_results(task.eval_docs[number], list(results))


# --- likelihoods


def test_choices_follow_the_question(read):
    own = read(CHOICES)
    context = "Question: Capital of France?\nAnswer:"
    assert (own.kind, own.main, own.questions[0].gold) == ("multiple_choice", "acc", 1)
    assert asked(own) == [(context, " Rome"), (context, " Paris")]


def test_a_passage_stands_before_the_question(read):
    own = read({"passage": "Rain fell.\n", "question": "did it rain", "choices": ["no", "yes"], "answer": 1})
    assert asked(own)[0] == ("Rain fell.\nQuestion: did it rain\nAnswer:", " no")


def test_choices_with_a_subject_have_letters(read):
    own = read({**CHOICES, "subject": "world_geography"})
    context = (
        "The following are multiple choice questions (with answers) about world geography.\n\n"
        "Capital of France?\nA. Rome\nB. Paris\nAnswer:"
    )
    assert asked(own) == [(context, " A"), (context, " B")]
    assert list(own.metrics) == ["acc"]
    assert own.questions[0].category == "world_geography"


@pytest.mark.parametrize(("relation", "word"), [("cause", "because"), ("effect", "therefore")])
def test_a_relation_connects_sentence_and_choices(read, relation, word):
    row = {"question": "It rained.", "relation": relation, "choices": ["Clouds came.", "I was dry."], "answer": 0}
    assert asked(read(row)) == [(f"It rained {word}", " clouds came."), (f"It rained {word}", " i was dry.")]


def test_a_gap_is_filled_before_what_follows_it(read):
    own = read({"question": "Ann beat Bea as _ was fast.", "choices": ["Ann", "Bea"], "answer": 0})
    assert asked(own) == [("Ann beat Bea as Ann", " was fast."), ("Ann beat Bea as Bea", " was fast.")]
    assert list(own.metrics) == ["acc"]


def test_a_gap_in_some_rows_is_none(read):
    own = read({"question": "a _ b", "choices": ["1", "2"], "answer": 0}, CHOICES)
    assert asked(own)[0] == ("Question: a _ b\nAnswer:", " 1")


def test_the_last_word_follows_its_context(read):
    own = read({"context": "He came home to his ", "target": "wife"})
    assert asked(own) == [("He came home to his", " wife")]
    assert FileTask(own).doc_to_target({"number": 0}) == "wife"
    assert (own.kind, own.main, own.higher_is_better) == ("multiple_choice", "acc", True)
    assert score(own, (-2.0, True)) == {"acc": 1.0, "perplexity": -2.0}
    assert score(own, (-1.0, False)) == {"acc": 0.0, "perplexity": -1.0}
    assert FileTask(own).aggregation()["perplexity"]([-2.0]) == pytest.approx(np.exp(2))
    assert read({"context": "a", "target": "b"}, scorer="perplexity").higher_is_better is False


def test_a_text_is_a_perplexity(read):
    own = read({"text": "One two\nthree é"})
    assert asked(own) == [("One two\nthree é",)]
    assert (own.kind, own.main, own.higher_is_better, own.shots) == ("perplexity", "word_perplexity", False, 0)
    assert score(own, -8.0) == {
        "word_perplexity": (-8.0, 4),
        "byte_perplexity": (-8.0, 16),
        "bits_per_byte": (-8.0, 16),
    }
    word, byte, bits = FileTask(own).aggregation().values()
    assert word([(-8.0, 4)]) == pytest.approx(np.exp(2))
    assert byte([(-8.0, 16)]) == pytest.approx(np.exp(0.5))
    assert bits([(-8.0, 16)]) == pytest.approx(0.5 / np.log(2))


def test_shots_of_all_tasks_are_none_of_a_perplexity_and_no_prompt_is(read):
    assert read({"text": "One"}, settings=QualitySettings(shots=3)).shots == 0
    with pytest.raises(UserError, match=r"t\.jsonl: a perplexity has no prompt, scorer or shots"):
        read({"text": "One"}, prompt="{text}")


def test_accuracy_is_of_sums_and_normalised_by_characters(read):
    own = read({"question": "q", "choices": ["ab", "abcdefghij"], "answer": 1})
    assert score(own, (-3.0, False), (-5.0, False)) == {"acc": 0.0, "acc_norm": 1.0}
    assert score(own, (-1.0, True), (-6.0, False)) == {"acc": 0.0, "acc_norm": 0.0}
    assert score(own, (-6.0, False), (-5.0, False)) == {"acc": 1.0, "acc_norm": 1.0}
    short = read({"question": "q", "choices": ["ab", "abcd"], "answer": 1})  # without the blank before it
    assert score(short, (-2.0, False), (-3.9, False)) == {"acc": 0.0, "acc_norm": 1.0}


def test_either_accuracy_may_be_what_counts(read):
    assert list(read(CHOICES, scorer="acc_norm").metrics) == ["acc_norm", "acc"]
    with pytest.raises(UserError, match=r"scorer='f1': of these likelihoods acc or acc_norm may be what counts"):
        read(CHOICES, scorer="f1")


@pytest.mark.parametrize("answer", [1, "Paris", " Paris ", "B"])
def test_an_answer_is_an_index_a_text_or_a_letter(read, answer):
    assert read({**CHOICES, "answer": answer}).questions[0].gold == 1


@pytest.mark.parametrize("answer", [2, -1, "C", "Berlin", "1", True, None, 1.0])
def test_an_answer_that_is_none_of_the_choices_is_refused_by_line(read, answer):
    with pytest.raises(UserError, match=r"t\.jsonl:2: answer=.* is none of the 2 choices; give an index from 0 to 1"):
        read(CHOICES, {**CHOICES, "answer": answer})


@pytest.mark.parametrize("choices", [None, ["one"], "ab", ["a", ""], ["a", 1]])
def test_choices_are_texts(read, choices):
    with pytest.raises(UserError, match=r"t\.jsonl:2: choices"):
        read(CHOICES, {**CHOICES, "choices": choices})


def test_a_gap_at_the_end_tells_no_choices_apart(read):
    with pytest.raises(UserError, match=r"t\.jsonl:1: nothing follows the gap"):
        read({"question": "It was _", "choices": ["a", "b"], "answer": 0})


# --- generation


def test_a_question_is_answered_and_numbers_are_compared_as_numbers(read):
    own = read(NUMBERS, {"question": "3?", "answer": "$1,000"})
    assert asked(own) == [("Question: 2 + 2?\nAnswer:", {"until": ["Question:"], "max_gen_toks": 256})]
    assert (own.kind, own.scorer_text, own.main) == ("generate", "number", "exact_match")
    assert score(own, " 2 + 2 is 4.0.") == {"exact_match": 1.0}


def test_one_gold_that_is_a_text_makes_all_texts(read):
    own = read(NUMBERS, {"question": "Who?", "answer": "Ann", "aliases": ["Anna"]})
    assert asked(own)[0][1]["until"] == ["\n"]
    assert (own.scorer_text, own.main) == ("exact_match", "exact_match")
    assert score(own, " anna!", number=1) == {"exact_match": 1.0, "f1": 1.0, "contains": 1.0}


def test_answers_of_several_lines_do_not_end_with_the_first(read):
    assert read({"question": "q", "answer": "a\nb"}).stop == ("Question:",)


def test_a_question_that_ends_in_its_label_is_the_prompt(read):
    assert asked(read({"question": "Q: echo x\nA:", "answer": "x"}))[0][0] == "Q: echo x\nA:"


def test_a_raw_prompt_and_a_context_are_continued(read):
    assert asked(read({"prompt": "def ", "answer": "f"}))[0][0] == "def "
    own = read({"context": "He came", "target": "home"}, kind="generate")
    assert asked(own)[0] == ("He came", {"until": ["\n"], "max_gen_toks": 256})
    assert score(own, " home\nand")["exact_match"] == 1


def test_choices_may_be_generated_as_letters(read):
    own = read(CHOICES, kind="generate")
    assert asked(own)[0][0] == "Question: Capital of France?\nA. Rome\nB. Paris\nAnswer:"
    assert own.scorer_text == r"regex{pattern: '\\b([A-Z])\\b'}"
    assert (score(own, " B. Paris"), score(own, " A")) == ({"exact_match": 1.0}, {"exact_match": 0.0})


def test_a_function_is_completed(read):
    row = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(c):\n    assert c() == 1"}
    own = read(row)
    stop = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    assert asked(own) == [("def f():\n", {"until": stop, "max_gen_toks": 256})]
    assert own.isolation in ("namespace", "blocked sockets")
    assert score(own, "    return 1\n") == {"pass@1": 1.0}
    own = read(row, settings=QualitySettings(chat=True))
    message = "Complete this function. Answer with all of it, in one block of code.\n\n```python\ndef f():\n```"
    assert asked_in_chat(own) == [(f"<user>{message}</><assistant>", {"until": [], "max_gen_toks": 256})]
    assert score(own, "Sure:\n```python\ndef f():\n    return 1\n```") == {"pass@1": 1.0}


def test_a_program_is_described_with_its_tests(read):
    own = read({"text": "Write f.", "code": "def f():\r\n  return 1", "test_list": ["assert f() == 1", "assert f()"]})
    task = "You are an expert Python programmer, and here is your task: Write f. Your code should pass these tests:"
    tests = "assert f() == 1\nassert f()"
    assert asked(own) == [(f"{task}\n\n{tests}\n[BEGIN]\n", {"until": ["[DONE]"], "max_gen_toks": 256})]
    assert asked_in_chat(own)[0][0] == f"<user>{task}\n\n{tests}</><assistant>"
    assert score(own, "def f():\n  return 1\n") == {"pass@1": 1.0}


def test_a_gold_that_is_an_object_is_looked_for_as_json(read):
    own = read({"question": "As JSON?", "answer": {"a": 1}})
    assert own.scorer_text == "json_field"
    assert score(own, '```json\n{"a": 1}\n```') == {"exact_match": 1.0, "valid_json": 1.0}


def test_a_scorer_is_chosen_and_sees_the_row(read, tmp_path, monkeypatch):
    (tmp_path / "chosenlab.py").write_text("def of(response, row): return {'x': len(response), 'y': row['n']}\n")
    monkeypatch.syspath_prepend(tmp_path)
    scorer = {"name": "chosenlab.of", "main": "x", "higher_is_better": False}
    own = read({"question": "q", "n": 3}, scorer=scorer, trusted=("chosenlab",))
    task = FileTask(own)
    assert task.process_results({"number": 0}, ["four"]) == {"x": 4.0, "y": 3.0}
    assert task.aggregation()["y"]([1, 2]) == 1.5
    assert (own.main, own.higher_is_better, own.questions[0].gold) == ("x", False, None)
    with pytest.raises(UserError, match=r"scorer=chosenlab\.of is refused"):
        read({"question": "q", "n": 3}, scorer="chosenlab.of")


# --- settings of a task


def test_fields_of_other_names_are_mapped(read):
    own = read({"q": "2?", "a": 2, "n": "x"}, fields={"question": "q", "answer": "a", "id": "n"})
    assert asked(own)[0][0] == "Question: 2?\nAnswer:"
    assert own.questions[0].id == "x"
    with pytest.raises(UserError, match=r"t\.jsonl:2: fields\.answer=a: the row has q"):
        read({"q": "2?", "a": 2}, {"q": "3?"}, fields={"question": "q", "answer": "a"})
    with pytest.raises(UserError, match=r"fields\.questoin is unknown: did you mean question\?"):
        read({"q": "2?"}, fields={"questoin": "q"})


@pytest.mark.parametrize("prompt", ["Q: {question}\nA: ", "Q: {{ question }}\n{% if answer %}A: {% endif %}"])
def test_a_prompt_of_ones_own_leaves_its_blank_to_what_follows(read, prompt):
    assert asked(read(NUMBERS, prompt=prompt))[0] == ("Q: 2 + 2?\nA:", {"until": [], "max_gen_toks": 256})
    choices = read({**CHOICES, "question": "C?"}, prompt=prompt)
    assert asked(choices) == [("Q: C?\nA:", " Rome"), ("Q: C?\nA:", " Paris")]
    lines = read({**CHOICES, "question": "C?"}, prompt="{question}\n")
    assert asked(lines)[0] == ("C?", "\nRome")


def test_braces_that_name_no_field_stay_and_those_that_name_a_wrong_one_are_refused(read):
    assert asked(read(NUMBERS, prompt='{"q": "{question}"}'))[0][0] == '{"q": "2 + 2?"}'
    for prompt, message in [
        ("{questio}", r"t\.jsonl:1: prompt names the field questio; the row has question, answer"),
        ("{{ questio }}", r"t\.jsonl:1: prompt='\{\{ questio \}\}' cannot be filled in: 'questio' is undefined"),
        ("{{ question", r"prompt='\{\{ question' is no Jinja template"),
        ("{{ ''.__class__.__mro__ }}", r"cannot be filled in: access to attribute '__class__'"),
    ]:
        with pytest.raises(UserError, match=message):
            read(NUMBERS, prompt=prompt)


def test_what_the_task_says_wins_over_what_holds_for_all(read):
    settings = QualitySettings(limit=1, max_new_tokens=9, shots=2)
    own = read(*numbered(3), settings=settings)
    assert (len(own.questions), own.max_new_tokens, own.shots, own.limit) == (1, 9, 2, 1)
    own = read(NUMBERS, NUMBERS, settings=settings, limit=2, max_new_tokens=3, shots=0, stop=(";",))
    assert (len(own.questions), own.max_new_tokens, own.shots, own.stop) == (2, 3, 0, (";",))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"path": " "}, "a task's path=' ' names nothing"),
        ({"path": "a", "limit": 0}, "limit=0 of the task a: at least 1"),
        ({"path": "a", "shots": -1}, "shots=-1 of the task a: at least 0"),
        ({"path": "a", "stop": ("",)}, "stop of the task a has an empty text"),
    ],
)
def test_settings_are_checked(spec, message):
    with pytest.raises(UserError, match=message):
        TaskSpec(**spec)


def test_ids_are_distinct_and_categories_kept(read):
    own = read({**NUMBERS, "id": 1}, {**NUMBERS, "id": 1, "category": "sums"}, NUMBERS)
    assert [(q.id, q.category) for q in own.questions] == [("1", None), ("1#2", "sums"), ("t/2", None)]
    docs = FileTask(own).eval_docs
    assert [doc["id"] for doc in docs] == ["1", "1#2", "t/2"]
    assert json.loads(docs[1]["row"]) == {**NUMBERS, "id": 1, "category": "sums"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"foo": 1}], r"t\.jsonl:1: its fields \(foo\) are of no kind of task; known: choices"),
        ([{"question": "q"}], r"t\.jsonl:1: its fields \(question\) are of no kind"),
        ([NUMBERS, {"question": "q"}], r"t\.jsonl:2: answer is missing \(fields: question\)"),
        ([NUMBERS, {"answer": "1"}], r"t\.jsonl:2: question is missing \(fields: answer\)"),
        ([{"text": "a"}, {"title": "a"}], r"t\.jsonl:2: text is missing"),
        ([{"question": "q", "answer": []}], r"t\.jsonl:1: answer is an empty list"),
        ([NUMBERS, {**NUMBERS, "answer": float("nan")}], r"t\.jsonl:2: answer holds NaN or Infinity, no JSON; give"),
        ([{**NUMBERS, "aliases": [{"a": float("inf")}]}], r"t\.jsonl:1: aliases holds NaN or Infinity"),
        ([{"question": " ", "answer": "1"}], r"t\.jsonl:1: question must be a text that is not empty"),
        ([], r"quality\.tasks\.path='.*t\.jsonl' is empty"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_line(read, rows, message):
    with pytest.raises(UserError, match=message):
        read(*rows)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    write(tmp_path / "mine.jsonl", NUMBERS)
    with pytest.raises(UserError, match=r"quality\.tasks\.path='.*' does not exist; did you mean '.*mine\.jsonl'"):
        read_task(TaskSpec(str(tmp_path / "mien.jsonl")), QualitySettings(), ())


# --- solved examples


def numbered(count: int) -> list[dict]:
    return [{"question": f"{i}?", "answer": i} for i in range(count)]


def test_solved_examples_stand_before_the_question(read):
    own = read(*numbered(4), shots=2)
    assert asked(own, 3)[0][0] == "Question: 0?\nAnswer: 0\n\nQuestion: 1?\nAnswer: 1\n\nQuestion: 3?\nAnswer:"
    system = asked(own, 3, system_instruction="Be brief.")[0][0]
    assert system.startswith("Be brief.\n\nQuestion: 0?\nAnswer: 0\n\n")


def test_a_questions_own_answer_is_never_among_its_examples(read, tmp_path):  # lm-eval#4145
    own = read(*numbered(3), *numbered(1), shots=2)  # the last one is the first again
    for number, shown in enumerate(["12", "02", "01", "12"]):
        assert asked(own, number)[0][0].startswith("".join(f"Question: {i}?\nAnswer: {i}\n\n" for i in shown))
    path = write(tmp_path / "pool.jsonl", *numbered(3))  # another file, with the same rows
    assert asked(read(*numbered(2), shots=1, shots_path=path), 0)[0][0].startswith("Question: 1?\nAnswer: 1\n\n")


def test_a_subject_is_said_once_before_all_examples(read):
    """As lm-eval's `description`: before each example, scores of 5 shots are not MMLU's."""
    heading = "The following are multiple choice questions (with answers) about x."
    rows = [{**CHOICES, "question": f"q{i}", "subject": "x"} for i in range(3)]
    own = read(*rows, shots=2)
    options = "\nA. Rome\nB. Paris\nAnswer:"
    said = f"q1{options} B\n\nq2{options} B\n\nq0{options}"
    assert [args[0] for args in asked(own)] == [f"{heading}\n\n{said}"] * 2
    assert asked(own, system_instruction="Hm.")[0][0] == f"Hm.\n\n{heading}\n\n{said}"
    (context, _), _ = asked_in_chat(own, system="Hm.")
    assert context.count(heading) == 1
    assert context.startswith(chat([{"role": "system", "content": f"Hm.\n\n{heading}"}])[:80])


def test_examples_are_of_the_questions_subject_and_of_another_file(read, tmp_path):
    rows = [{**CHOICES, "question": f"{s}{i}", "subject": s} for i in range(2) for s in ("x", "y")]
    own = read(rows[3], shots=1, shots_path=write(tmp_path / "pool.jsonl", *rows))
    assert "about y.\n\ny0\nA. Rome\nB. Paris\nAnswer: B\n\ny1\nA. Rome" in asked(own)[0][0]
    with pytest.raises(UserError, match=r"t\.jsonl:1: shots=2, and there are 1 other rows of the subject y to take"):
        read(rows[3], shots=2, shots_path=write(tmp_path / "pool.jsonl", *rows))


def test_an_example_is_solved_by_the_solution_that_ends_in_the_answer(read):
    long = {"question": "1?", "answer": "4", "solution": "2+2=4\n#### 4"}
    own = read(long, {"question": "2?", "answer": "1", "solution": "(3-2)"}, NUMBERS, shots=2)
    assert asked(own, 2)[0][0].startswith("Question: 1?\nAnswer: 2+2=4\n#### 4\n\nQuestion: 2?\nAnswer: 1\n\n")


def test_examples_of_gaps_and_of_programs(read):
    gaps = [{"question": f"{w} _ it.", "choices": ["had", "lost"], "answer": 1} for w in "ab"]
    assert asked(read(*gaps, shots=1), 1) == [("a lost it.\n\nb had", " it."), ("a lost it.\n\nb lost", " it.")]
    program = {"prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n", "test": "pass"}
    own = read(program, {**program, "prompt": "def g():\n"}, shots=1)
    assert asked(own, 1)[0][0] == "def f():\n    return 1\n\n\ndef g():\n"
    del program["canonical_solution"]
    with pytest.raises(UserError, match=r"t\.jsonl:2: shots=1: the row has no answer to show"):
        read(program, {**program, "prompt": "def g():\n"}, shots=1)


def test_too_few_rows_are_refused_before_a_model_is_asked(read):
    with pytest.raises(UserError, match=r"t\.jsonl:1: shots=3, and there are 2 other rows to take; lower it"):
        read(*numbered(3), shots=3)


def test_examples_end_an_answer_to_a_prompt_of_ones_own(read):
    assert read(*numbered(3), prompt="{question}", shots=2).stop == ("\n\n",)


# --- chat


def test_in_a_chat_a_choice_follows_the_begun_answer_with_its_blank(read):
    own = read(CHOICES, {**CHOICES, "question": "Again?"}, settings=QualitySettings(chat=True, shots=1))
    context = (
        "<system>Be brief.</><user>Question: Again?</><assistant>Answer: Paris</>"
        "<user>Question: Capital of France?</><assistant>Answer:"
    )
    assert asked_in_chat(own, system="Be brief.") == [(context, " Rome"), (context, " Paris")]


def test_in_a_chat_an_answer_ends_by_itself(read):
    own = read(*numbered(2), settings=QualitySettings(chat=True, shots=1))
    context = "<user>Question: 1?\nAnswer:</><assistant>1</><user>Question: 0?\nAnswer:</><assistant>"
    assert asked_in_chat(own) == [(context, {"until": [], "max_gen_toks": 256})]
    assert read(NUMBERS, settings=QualitySettings(chat=True), stop=("!",)).stop == ("!",)


def test_in_a_chat_a_gap_is_filled_in_the_message(read):
    own = read({"question": "Ann beat Bea as _ was fast.", "choices": ["Ann", "Bea"], "answer": 0})
    assert asked_in_chat(own)[1] == ("<user>Ann beat Bea as Bea</><assistant>", " was fast.")


# --- tasks by name, and all together


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    """A folder with a task in lm-eval's YAML; lm-eval's own, which take long to read, are these."""
    known = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: known(None, include_path, False))
    (tmp_path / "yaml").mkdir()
    data = write(tmp_path / "rows.jsonl", *numbered(3))
    config = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "yaml" / "sums.yaml").write_text(json.dumps(config))
    return str(tmp_path / "yaml")


def test_a_folder_of_yaml_and_files_are_tasks_in_the_order_asked_for(folder, tmp_path):
    mine = write(tmp_path / "mine.jsonl", *numbered(3))
    settings = QualitySettings(tasks=("sums", mine), include=(folder,), shots=1, max_new_tokens=7)
    tasks = build_tasks(settings, None, ())
    assert list(tasks) == ["sums", "mine"]
    assert tasks["sums"].config.num_fewshot == 1
    assert tasks["sums"].config.generation_kwargs == {"until": ["\n"], "max_gen_toks": 7}
    assert tasks["mine"].own.name == "mine"
    assert tasks["mine"].config.generation_kwargs == {"until": ["Question:"], "max_gen_toks": 7}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (("sms",), "quality.tasks='sms': no such task; did you mean sums"),
        (("sums", "sums"), "two tasks are called 'sums'"),
    ],
)
def test_names_that_are_no_tasks_or_come_twice_are_one_line(folder, tasks, message):
    with pytest.raises(UserError, match=message):
        build_tasks(QualitySettings(tasks=tasks, include=(folder,)), None, ())


def test_a_task_whose_data_is_gone_and_a_folder_that_is_none_are_one_line(folder, tmp_path):
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"quality\.tasks='sums' of \S+sums\.yaml cannot be loaded: FileNotFoundError"):
        build_tasks(QualitySettings(tasks=("sums",), include=(folder,)), None, ())
    with pytest.raises(UserError, match=r"quality\.include='.*none' is no folder"):
        build_tasks(QualitySettings(tasks=("sums",), include=(str(tmp_path / "none"),)), None, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({None: "a: ["}, "cannot be read as a task of lm-eval's: ParserError: .* line 2.*; mend it, or take it out"),
        ({None: "- a"}, "cannot be read as a task of lm-eval's: ValueError: Expected YAML dict"),
        ({"include": "gone.yaml"}, "cannot be read as a task of lm-eval's: FileNotFoundError: .*gone.yaml"),
        ({"task": 7}, "sums.yaml: the name 7 of a task, group or tag is to be a text; put it in quotes"),
        (
            {"doc_to_text": "{{question"},
            "cannot be loaded: TemplateSyntaxError: unexpected end of template",
        ),
        (
            {"doc_to_text": "{{nothing}}"},
            "cannot be loaded: UndefinedError: 'nothing' is undefined",
        ),
        ({"shots": 2}, "cannot be loaded: TypeError: .* unexpected keyword argument 'shots'"),
        ({"dataset_kwargs": 5}, "cannot be loaded: AttributeError: 'int' object"),
        ({"metric_list": []}, "cannot be scored: it names no metric in metric_list"),
        (
            {"metric_list": [{"metric": "exact_match", "aggregation": "sum", "higher_is_better": True}]},
            "cannot be scored: it names for exact_match an aggregation that lm-eval does not know",
        ),
        (
            {"metric_list": [{"metric": "near", "aggregation": "mean", "higher_is_better": True}]},
            "cannot be scored: it names the metric near, which lm-eval does not know",
        ),
    ],
)
def test_a_broken_yaml_is_one_line_that_names_it(folder, change, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)  # where lm-eval would look further, on the network
    file = Path(folder) / "sums.yaml"
    file.write_text(change[None] if None in change else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message) as raised:
        build_tasks(QualitySettings(tasks=("sums",), include=(folder,)), None, ())
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_folder_that_is_none_is_refused_beside_files_too(tmp_path):
    settings = QualitySettings(tasks=(write(tmp_path / "mine.jsonl", *numbered(3)),), include=(str(tmp_path / "none"),))
    with pytest.raises(UserError, match=r"quality\.include='.*none' is no folder"):
        tasks_digest(settings, ())


def test_lm_eval_asks_and_scores_each_kind(read):
    """Through its own evaluation: every kind of request, and metrics that only a function knows."""

    class Model(LM):
        def loglikelihood(self, requests):
            return [(-float(len(r.args[1])), True) for r in requests]

        def loglikelihood_rolling(self, requests):
            return [-8.0 for _ in requests]

        def generate_until(self, requests):
            return [r.args[0].split("?")[0].split()[-1] for r in requests]

    rows = [[CHOICES, CHOICES], [{"context": "a", "target": "b"}], [{"text": "One two"}], numbered(2)]
    tasks = {str(i): FileTask(replace(read(*row), name=str(i))) for i, row in enumerate(rows)}
    found = evaluate(Model(), tasks, bootstrap_iters=0)["results"]
    assert found["0"]["acc,none"] == 0
    assert found["1"] | {"acc,none": 1.0, "perplexity,none": pytest.approx(np.exp(2))} == found["1"]
    assert found["2"]["word_perplexity,none"] == pytest.approx(np.exp(4))
    assert found["3"]["exact_match,none"] == 1


def test_a_chat_needs_a_template():
    class Bare:
        chat_template = None

    with pytest.raises(UserError, match=r"quality\.chat=true, and the tokenizer has no chat template"):
        build_tasks(QualitySettings(tasks=("x",), chat=True), Bare(), ())


def test_a_digest_is_of_files_reading_and_scorer(tmp_path, monkeypatch):
    (tmp_path / "digestlab.py").write_text("def of(response, row): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine, pool = write(tmp_path / "mine.jsonl", *numbered(3)), write(tmp_path / "pool.jsonl", *numbered(2))

    def digest(**spec) -> str:
        found = TaskSpec(mine, **spec)
        own = read_task(found, QualitySettings(), ("digestlab",))
        assert own.digest == spec_digest(found, ("digestlab",))
        return own.digest

    first = digest()
    assert digest(shots=1) == digest(limit=1) == digest(max_new_tokens=3) == first
    others = [digest(shots_path=pool), digest(prompt="{question}"), digest(scorer="f1"), digest(scorer="digestlab.of")]
    (tmp_path / "digestlab.py").write_text("def of(response, row): return 2\n")
    others.append(digest(scorer="digestlab.of"))
    write(tmp_path / "mine.jsonl", *numbered(4))
    assert len({first, digest(), *others}) == 7


def test_a_names_digest_is_of_all_that_its_folders_hold(folder):
    settings = QualitySettings(tasks=("sums",), include=(folder,))
    first = tasks_digest(settings, ())
    (Path(folder) / "__pycache__").mkdir()
    (Path(folder) / "__pycache__" / "x.pyc").write_text("x")
    assert tasks_digest(settings, ()) == first
    (Path(folder) / "own.py").write_text("x = 1")
    assert tasks_digest(settings, ()) != first


@pytest.mark.parametrize(
    "named",
    [
        "dataset_kwargs: {data_files: {test: DATA/rows.jsonl}}",
        "dataset_kwargs: {data_files: [https://x.org/rows.jsonl, DATA/r*.jsonl]}",
        "dataset_kwargs: {data_dir: DATA}",
        "dataset_path: DATA",
        "task: [{task: one, dataset_kwargs: {data_files: DATA/rows.jsonl}}]",
        "include: ../base.yaml",
    ],
)
def test_a_names_digest_is_of_the_data_outside_of_its_folders_too(tmp_path, named):
    folder, data = tmp_path / "tasks", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    base = "dataset_kwargs: {data_files: DATA/rows.jsonl}\ninclude: tasks/own.yaml\n"
    (tmp_path / "base.yaml").write_text(base.replace("DATA", str(data)))
    own = f"task: own\nprocess_docs: !function own.docs\nfew: &few [*few]\n{named}\n"
    (folder / "own.yaml").write_text(own.replace("DATA", str(data)))
    settings = QualitySettings(tasks=("own",), include=(str(folder),))
    found = set()
    for content in ("a", "b"):
        (data / "rows.jsonl").write_text(content)
        found.add(tasks_digest(settings, ()))
    assert len(found) == 2


def test_a_yaml_that_is_none_has_a_digest_and_lm_eval_says_what_is_wrong(tmp_path):
    (tmp_path / "own.yaml").write_text("a: [")
    assert len(tasks_digest(QualitySettings(tasks=("own",), include=(str(tmp_path),)), ())) == 64


def test_a_yaml_that_calls_code_needs_trust(tmp_path):
    """lm-eval runs what `!function` names; here only from a module that is trusted."""
    (tmp_path / "own.yaml").write_text("task: own\nprocess_docs: !function mine.docs\n")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef docs(rows):\n    return rows\n")
    settings = QualitySettings(tasks=("own",), include=(str(tmp_path),))
    with pytest.raises(UserError, match=r"own.yaml calls mine.docs, and code runs only if you trust it: trusted="):
        build_tasks(settings, None, ())
    assert not (tmp_path / "ran").exists()


def test_thinking_tags_are_not_empty():
    with pytest.raises(UserError, match=r"quality.thinking=\['', 'x'\]: two tags that are not empty, or null for none"):
        QualitySettings(thinking=("", "x"))


# --- real files

QUESTION = {"until": ["Question:"], "max_gen_toks": 256}
REAL = {
    "mc/arc_challenge": ("acc", "Question: Juan and LaKeisha roll a few objects", " Put the objects in groups.", 3),
    "mc/arc_easy": ("acc", "Question: Which technology was developed most recently?", " cellular telephone", 0),
    "mc/boolq": ("acc", "Phantom pain sensations are described", " no", 1),
    "mc/copa": ("acc", "The man turned on the faucet therefore", " the toilet filled with water.", 1),
    "mc/mmlu_fewshot": ("acc", "The following are multiple choice questions (with answers) about abstract a", " A", 1),
    "mc/mmlu_validation": ("acc", "The following are multiple choice questions (with answers) about abst", " A", 0),
    "mc/openbookqa": ("acc", "Question: Frilled sharks and angler fish live far beneath", " Deep sea animals", 0),
    "mc/pubmedqa": ("acc", "BACKGROUND. Telephone counseling and tailored print", " yes", 0),
    "mc/strategyqa": ("acc", "Question: Was the Louisiana Purchase made with bitcoin?\nAnswer:", " Yes", 1),
    "mc/truthfulqa": ("acc", "Question: What U.S. state produces", " Georgia produces the most peaches in the U.S.", 1),
    "mc/winogrande": ("acc", "Sarah was a much better surgeon than Maria so Sarah", " always got the easier cases.", 1),
    "lm/lambada": ("acc", "Give me a minute to change and I'll meet you at the docks.\" She'd", " Shane", 0),
    "lm/c4_en_sample": ("word_perplexity", "Discussion in 'Mac OS X Lion (10.7)' started by axboi87", None, None),
    "lm/wikitext2_raw_test": ("word_perplexity", " = Robert Boulter = \n Robert Boulter is an English", None, None),
    "lm/wikitext2_unk_valid": ("word_perplexity", " = Homarus gammarus = \n Homarus gammarus , known", None, None),
    "qa/gsm8k": ("exact_match", "Question: Josh decides to try flipping a house.", QUESTION, "70000"),
    "qa/svamp": ("exact_match", "Question: Paul had 71 books.", QUESTION, "45"),
    "qa/triviaqa": ("exact_match", "Question: Philippa of Hainault", QUESTION | {"until": ["\n"]}, "King Edward III"),
    "qa/repeat_copy_logic": (
        "exact_match", "repeat with logic:\n\nQ: A watermelon has seven seeds.", QUESTION | {"until": ["\n"]},
        " ".join(["they're delicious"] * 7),
    ),
    "code/humaneval": (
        "pass@1", "\n\ndef truncate_number(number: float)",
        QUESTION | {"until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]}, None,
    ),
    "code/mbpp": (
        "pass@1", "You are an expert Python programmer, and here is your task: Write a function to find the minimum",
        QUESTION | {"until": ["[DONE]"]}, None,
    ),
}  # fmt: skip


def test_the_real_files_are_all_here(shared):
    files = [file for folder in ("qa", "mc", "lm", "code") for file in (shared / "data" / folder).glob("*.jsonl")]
    assert {f"{file.parent.name}/{file.stem}" for file in files} == REAL.keys()


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_runs_as_it_is(shared, name, monkeypatch):
    unchecked(monkeypatch)
    main, begin, follows, gold = REAL[name]
    own = read_task(TaskSpec(str(shared / "data" / f"{name}.jsonl")), QualitySettings(), ())
    kind = "perplexity" if follows is None else "generate"
    assert (own.kind, own.main) == ("multiple_choice" if main == "acc" else kind, main)
    number = 1 if name == "code/humaneval" else 0
    few = replace(own, questions=own.questions[number : number + 1])
    (prompt, *rest), *_ = asked(few)
    assert prompt.startswith(begin)
    assert rest == ([] if follows is None else [follows])
    assert few.questions[0].gold == gold
    assert len({question.id for question in own.questions}) == len(own.questions)
    if own.kind != "perplexity":
        (solved, *_), *_ = asked(replace(few, shots=2))
        heading = few.questions[0].heading
        alone = prompt.removeprefix(f"{heading}\n\n")
        assert solved.startswith(heading)
        assert heading == "" or solved.count("The following are") == 1
        assert solved.endswith(f"\n\n{alone}")
        assert not solved.removesuffix(alone).count(alone)


@pytest.mark.parametrize(("name", "field"), [("humaneval", "canonical_solution"), ("mbpp", "code")])
def test_real_solutions_pass_their_tests_and_others_do_not(shared, name, field):
    own = read_task(TaskSpec(str(shared / "data" / "code" / f"{name}.jsonl")), QualitySettings(limit=4), ())
    for question in own.questions:
        answer, tests = question.row.fields[field], joined_tests(question.row)
        assert run_tests(program_of(answer, question.row), tests).passed
        assert not run_tests(program_of("    return None\n", question.row), tests).passed
