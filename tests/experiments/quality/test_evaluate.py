"""Quality from the command line to the files: scores, intervals, resumption, refusals."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from decodelab.experiments.cli import main
from decodelab.experiments.quality.answers import Answer
from decodelab.experiments.quality.lm import DecodelabLM
from decodelab.experiments.quality.settings import QualitySettings, TaskSpec
from decodelab.experiments.quality.tasks import build_tasks
from decodelab.experiments.statistics import mean_interval, ratio_interval
from decodelab.tests.experiments.bench import Bench, strict

CHOICES = [
    {
        "id": f"c{i}",
        "question": f"{i} and {i}?",
        "choices": [" ab", "12", f"{i} ab"],
        "answer": i % 3,
        "category": "xy"[i % 2],
    }
    for i in range(6)
]
ASKED = [{"id": f"q{i}", "question": f"what is {i} ab {i}?", "answer": str(i)} for i in range(6)]
TEXTS = [{"id": f"t{i}", "text": ("one two three " * (i + 1)).strip()} for i in range(6)]
TASK_KEYS = {
    "kind", "measures", "metrics", "main", "higher_is_better", "n", "repeats", "truncated", "digest", "settings"
}  # fmt: skip
ROW_KEYS = {
    "task", "id", "repeat", "category", "doc_hash", "prompt_hash", "prompt", "gold", "choices", "response",
    "scored", "scores", "truncated", "tokens", "weights",
}  # fmt: skip


@dataclass(frozen=True)
class Exams:
    """Three files of tasks; `evaluate(*words)` is the command on the tiny model."""

    bench: Bench
    files: Mapping[str, Path]

    def evaluate(self, *words: str, job: str = "evaluate", output: str = "out") -> int:
        common = [f"model.path={self.bench.checkpoint}", "device=cpu", "threads=1", "dtype=float32"]
        given = {word.partition("=")[0] for word in words}
        tokens = ["quality.max_new_tokens=12"] if "quality.max_new_tokens" not in given else []
        folder = output if output == "null" else self.bench.root / output
        return main([job, *common, f"output={folder}", *tokens, *words])

    def tasks(self, *names: str) -> str:
        return f"tasks=[{','.join(str(self.files[name]) for name in names)}]"

    def result(self, output: str = "out") -> dict[str, Any]:
        return dict(strict((self.bench.root / output / "result.json").read_text()))

    def rows(self, output: str = "out") -> list[dict[str, Any]]:
        return [strict(line) for line in (self.bench.root / output / "quality.jsonl").read_text().splitlines()]


@pytest.fixture
def exams(bench: Bench) -> Exams:
    files = {}
    for name, rows in {"choices": CHOICES, "asked": ASKED, "texts": TEXTS}.items():
        files[name] = bench.root / f"{name}.jsonl"
        files[name].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Exams(bench, files)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that are generated from."""
    asked: list[str] = []
    generate = DecodelabLM._generate

    def counting(self: DecodelabLM, jobs: Sequence[Any]) -> Any:
        asked.extend(job[0] for job in jobs)
        return generate(self, jobs)

    monkeypatch.setattr(DecodelabLM, "_generate", counting)
    return asked


def test_evaluate_fills_quality_with_the_scores_of_lm_evals_own_model(exams: Exams, capsys: pytest.CaptureFixture[str]):
    """The model of transformers on the same checkpoint, the tasks through lm-eval alone."""
    assert exams.evaluate(exams.tasks("choices", "asked", "texts")) == 0
    result, rows = exams.result(), exams.rows()
    assert result["status"] == "done"
    assert result["strategy"] is None
    quality = result["quality"]
    assert quality["against"] is None
    assert quality["interrupted"] is False
    assert quality["backend"].startswith("decodelab, lm-eval 0.")

    tokenizer = AutoTokenizer.from_pretrained(exams.bench.checkpoint)
    tokenizer.pad_token = tokenizer.eos_token
    peer = AutoModelForCausalLM.from_pretrained(exams.bench.checkpoint, dtype=torch.float32).eval()
    theirs = HFLM(pretrained=peer, tokenizer=tokenizer, batch_size=1, softmax_dtype=torch.float32)
    settings = QualitySettings(tasks=tuple(TaskSpec(str(f)) for f in exams.files.values()), max_new_tokens=12)
    want = evaluate(theirs, {"tasks": build_tasks(settings, tokenizer, ())}, bootstrap_iters=0)
    for name, kind in (("choices", "multiple_choice"), ("asked", "generate"), ("texts", "perplexity")):
        found = quality["tasks"][name]
        assert set(found) == TASK_KEYS
        assert found["kind"] == kind
        assert found["measures"] == ("decoding" if kind == "generate" else "model only")
        assert found["n"] == 6
        for metric, score in found["metrics"].items():
            assert score["value"] == pytest.approx(want["results"][name][f"{metric},none"], rel=1e-4)
        mine = [row for row in rows if row["task"] == name]
        assert all(set(row) == ROW_KEYS and found["main"] in row["scores"] for row in mine)
        if kind == "generate":
            theirs_said = [sample["resps"][0][0] for sample in want["samples"][name]]
            assert [row["scored"] for row in mine] == theirs_said
            assert found["truncated"] == np.mean([row["truncated"] for row in mine])
    assert [row["category"] for row in rows[:3]] == ["x", "y", "x"]
    assert not (exams.bench.root / "out" / "quality-responses.jsonl").exists()

    printed = capsys.readouterr().out
    assert re.search(r"choices +acc +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] +6 +–", printed)
    assert re.search(r"asked +exact_match \(\w+\) +\d\.\d{3} \[.*\] +6 +\d+ %", printed)
    assert "model only, since likelihoods decode nothing: choices, texts" in printed


@pytest.mark.parametrize(("kept", "warned"), [(3, True), (4, False)])
def test_answers_that_are_mostly_empty_are_told_with_a_remedy(
    exams: Exams, kept: int, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    generate, asked = DecodelabLM._generate, count()

    def silent(self: DecodelabLM, jobs: Sequence[Any]) -> list[Answer]:
        return [replace(a, value="so" if next(asked) < kept else "\n") for a in generate(self, jobs)]

    monkeypatch.setattr(DecodelabLM, "_generate", silent)
    assert exams.evaluate(exams.tasks("asked"), "quality.max_new_tokens=1") == 0
    told = (
        "asked: 3 of 6 answers are empty, so that the score says little of the model: an instruct model wants "
        "quality.chat=true, any other solved examples (quality.shots=2)"
    )
    assert (told in exams.result()["warnings"]) is warned
    assert (f"note: {told}" in " ".join(capsys.readouterr().out.split())) is warned


def test_speed_and_quality_stand_in_one_row(exams: Exams):
    words = [f"task.path={exams.files['asked']}", "task.limit=1", "task.max_new_tokens=4", exams.tasks("asked")]
    assert exams.evaluate(*words, "timing=untimed", "quality.limit=2", job="run") == 0
    result = exams.result()
    assert result["exactness"]["verdict"] == "exact"
    assert result["quality"]["tasks"]["asked"]["n"] == 2
    assert result["digests"]["task"] != result["digests"]["quality"]
    assert (exams.bench.root / "out" / "samples.jsonl").read_text().count("\n") == 1


def test_intervals_are_over_items_and_perplexities_weigh_their_texts(exams: Exams):
    assert exams.evaluate(exams.tasks("choices", "texts")) == 0
    tasks, rows = exams.result()["quality"]["tasks"], exams.rows()
    texts = [row for row in rows if row["task"] == "texts"]
    lls = np.array([row["response"] for row in texts])
    words = np.array([row["weights"]["word_perplexity"] for row in texts], dtype=float)
    assert list(words) == [3, 6, 9, 12, 15, 18]
    ratio = ratio_interval(lls, words)
    found = tasks["texts"]["metrics"]["word_perplexity"]
    assert found["value"] == pytest.approx(exp(-lls.sum() / words.sum()))
    assert ratio.low is not None
    assert ratio.high is not None
    assert (found["low"], found["high"]) == pytest.approx((exp(-ratio.high), exp(-ratio.low)))
    assert texts[0]["scores"]["word_perplexity"] == pytest.approx(exp(-lls[0] / 3))
    scores = [row["scores"]["acc"] for row in rows if row["task"] == "choices"]
    acc = tasks["choices"]["metrics"]["acc"]
    assert acc["value"] == np.mean(scores)
    assert acc["low"] < acc["value"] < acc["high"] or set(scores) in ({0.0}, {1.0})


def test_a_text_that_is_one_word_has_no_perplexity_of_words_and_its_bytes_count(exams: Exams):
    """Chinese, minified code: e to the log-likelihood of it all is no float."""
    exams.files["texts"].write_text(json.dumps({"text": "x=()=>{" * 18}) + "\n" + json.dumps({"text": "a b"}) + "\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DecodelabLM, "_roll", lambda self, text: Answer(-8.0 * len(text), len(text)))
        assert exams.evaluate(exams.tasks("texts")) == 0
        task, rows = exams.result()["quality"]["tasks"]["texts"], exams.rows()
        assert task["main"] == "byte_perplexity"
        assert task["metrics"]["byte_perplexity"]["value"] == pytest.approx(exp(8))
        assert [row["scores"]["word_perplexity"] for row in rows] == [None, pytest.approx(exp(12))]
        against = f"against={exams.bench.root / 'out'}"
        assert exams.evaluate(exams.tasks("texts"), against, output="again") == 0
    found = exams.result("again")["quality"]["against"]["tasks"]["texts"]
    assert list(found["metrics"]) == ["byte_perplexity", "bits_per_byte"]


def test_a_corpus_of_one_word_has_no_perplexity_of_words(exams: Exams):
    exams.files["texts"].write_text(json.dumps({"text": "x=()=>{" * 18}) + "\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DecodelabLM, "_roll", lambda self, text: Answer(-8.0 * len(text), len(text)))
        assert exams.evaluate(exams.tasks("texts")) == 0
    task = exams.result()["quality"]["tasks"]["texts"]
    assert task["metrics"]["word_perplexity"] == {"value": None, "low": None, "high": None, "n": 1}
    assert (task["main"], task["higher_is_better"]) == ("byte_perplexity", False)


def test_repeats_are_drawn_anew_and_clustered_by_item(exams: Exams):
    """Three answers to an item are not three items."""
    words = [f"tasks=[{{path: {exams.files['asked']}, scorer: contains}}]", "acceptance=sampling", "quality.repeats=3"]
    assert exams.evaluate(*words, "acceptance.temperature=1.5") == 0
    task, rows = exams.result()["quality"]["tasks"]["asked"], exams.rows()
    assert (task["n"], task["repeats"], task["settings"]["repeats"], len(rows)) == (6, 3, 3, 18)
    by_item: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_item.setdefault(row["id"], []).append(row)
    assert all(len({row["response"] for row in same}) == 3 for same in by_item.values())
    means = np.array([np.mean([row["scores"][task["main"]] for row in same]) for same in by_item.values()])
    found = task["metrics"][task["main"]]
    assert found["value"] == pytest.approx(means.mean())
    if not np.isin(means, (0, 1)).all():
        assert found["low"] == mean_interval(means).low


def interrupting(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    generate, asked = DecodelabLM._generate, []

    def broken_off(self: DecodelabLM, jobs: Sequence[Any]) -> Any:
        asked.append(jobs)
        if len(asked) > after:
            raise KeyboardInterrupt
        return generate(self, jobs)

    monkeypatch.setattr(DecodelabLM, "_generate", broken_off)


def test_an_interrupt_keeps_what_was_answered_and_the_same_command_goes_on(
    exams: Exams, capsys: pytest.CaptureFixture[str], counted: list[str]
):
    assert exams.evaluate(exams.tasks("asked", "choices"), output="whole") == 0
    counted.clear()
    with pytest.MonkeyPatch.context() as patched:
        interrupting(patched, after=2)
        assert exams.evaluate(exams.tasks("asked", "choices")) == 130
    result = exams.result()
    assert result["status"] == "interrupted"
    assert result["quality"]["interrupted"] is True
    assert list(result["quality"]["tasks"]) == ["asked"]
    assert [row["id"] for row in exams.rows()] == ["q0", "q1"]
    assert result["quality"]["tasks"]["asked"]["n"] == 2
    again = f"the same command with output={exams.bench.root / 'out'} asks for the answers that are missing"
    assert again in capsys.readouterr().err

    assert exams.evaluate(exams.tasks("asked", "choices"), "seed=7") == 2
    assert "already holds a result" in capsys.readouterr().err
    kept = (exams.bench.root / "out" / "quality-responses.jsonl").read_text()
    assert exams.evaluate(exams.tasks("choices")) == 2
    assert "quality-responses.jsonl has answers to asked, and would go: ask that as well" in capsys.readouterr().err
    assert (exams.bench.root / "out" / "quality-responses.jsonl").read_text() == kept
    counted.clear()
    assert exams.evaluate(exams.tasks("asked", "choices")) == 0
    assert len(counted) == 4
    assert exams.rows() == exams.rows("whole")
    assert exams.result()["quality"] == exams.result("whole")["quality"]
    assert exams.evaluate(exams.tasks("asked", "choices")) == 2  # it is whole now


def test_a_killed_run_asks_for_the_rest(exams: Exams, counted: list[str], monkeypatch: pytest.MonkeyPatch):
    """Killed: no result was written, and the last line of the answers is torn."""
    with monkeypatch.context() as patched:
        patched.setattr("decodelab.experiments.quality.evaluate.task_scores", _raise(MemoryError()))
        with pytest.raises(MemoryError):
            exams.evaluate(exams.tasks("asked"))
    answers = exams.bench.root / "out" / "quality-responses.jsonl"
    answers.write_bytes(answers.read_bytes()[:-10])
    (exams.bench.root / "out" / "result.json").unlink()
    counted.clear()
    assert exams.evaluate(exams.tasks("asked")) == 0
    assert len(counted) == 1
    assert len(exams.rows()) == 6


SCORER = "def of(response, row):\n    if row['id'] == 'q3':\n        raise KeyError('nothing')\n    return 1\n"


def test_a_scorer_that_fails_costs_neither_the_speed_nor_the_other_tasks_nor_the_answers(
    exams: Exams, capsys: pytest.CaptureFixture[str], counted: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(exams.bench.root)
    scorer = exams.bench.root / "brittle.py"
    scorer.write_text(SCORER)
    speed = [f"task.path={exams.files['asked']}", "task.limit=1", "task.max_new_tokens=4", "timing=untimed"]
    asked = f"{{path: {exams.files['asked']}, scorer: brittle.of}}"
    words = [*speed, "trusted=[brittle]", f"tasks=[{asked},{exams.files['choices']}]"]
    assert exams.evaluate(*words, job="run") == 1
    why = f"asked.jsonl:4: brittle.of raised KeyError: 'nothing' ({scorer}:3)"
    said, result = capsys.readouterr(), exams.result()
    assert said.err.endswith(
        f"decodelab: quality of asked failed: {why}; the same command with output={exams.bench.root / 'out'} asks for "
        "the answers that are missing\n"
    )
    assert f"note: quality of asked failed: {why}"[:60] in said.out
    assert (result["status"], result["exactness"]["verdict"]) == ("failed", "exact")
    assert result["quality"]["failed"] == {"asked": why}
    assert [text for text in result["warnings"] if "failed" in text] == [f"quality of asked failed: {why}"]
    assert list(result["quality"]["tasks"]) == ["choices"]
    assert {row["task"] for row in exams.rows()} == {"choices"}
    assert (exams.bench.root / "out" / "samples.jsonl").read_text().count("\n") == 1
    assert len(counted) == 6

    scorer.write_text(SCORER.replace("raise KeyError('nothing')", "return 0.5"))
    monkeypatch.delitem(sys.modules, "brittle")
    importlib.invalidate_caches()
    for other in ("seed=7", "timing=paired"):  # other answers, or another speed
        assert exams.evaluate(*words, other, job="run") == 2
        assert "already holds a result" in capsys.readouterr().err
    counted.clear()
    assert exams.evaluate(*words, job="run") == 0
    assert not counted
    assert [row["scores"]["of"] for row in exams.rows() if row["task"] == "asked"] == [1, 1, 1, 0.5, 1, 1]
    assert not (exams.bench.root / "out" / "quality-responses.jsonl").exists()


def test_an_interrupt_of_scoring_scores_nothing_again_and_keeps_the_answers(
    exams: Exams, capsys: pytest.CaptureFixture[str], counted: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(exams.bench.root)
    scorer, calls = exams.bench.root / "slow.py", exams.bench.root / "calls"
    scorer.write_text(
        f"def of(response, row):\n    open({str(calls)!r}, 'a').write('.')\n    raise KeyboardInterrupt\n"
    )
    words = ["trusted=[slow]", f"tasks=[{{path: {exams.files['asked']}, scorer: slow.of}},{exams.files['choices']}]"]
    assert exams.evaluate(*words) == 130
    assert calls.read_text() == "."
    result = exams.result()
    assert (result["status"], result["quality"]["interrupted"], result["quality"]["tasks"]) == ("interrupted", True, {})
    scorer.write_text("def of(response, row):\n    return 1\n")
    monkeypatch.delitem(sys.modules, "slow")
    importlib.invalidate_caches()
    counted.clear()
    assert exams.evaluate(*words) == 0
    assert not counted
    assert [exams.result()["quality"]["tasks"][name]["n"] for name in ("asked", "choices")] == [6, 6]


def test_a_second_interrupt_while_what_was_answered_is_scored_ends_it(exams: Exams, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(exams.bench.root)
    (exams.bench.root / "broken.py").write_text("def of(response, row):\n    raise KeyboardInterrupt\n")
    interrupting(monkeypatch, after=2)
    words = ["trusted=[broken]", f"tasks=[{{path: {exams.files['asked']}, scorer: broken.of}}]"]
    assert exams.evaluate(*words) == 130
    assert exams.result()["status"] == "interrupted"
    assert (exams.bench.root / "out" / "quality-responses.jsonl").read_text().count("\n") == 2


def test_how_to_go_on_is_said_with_the_folder_that_was_made(exams: Exams, capsys: pytest.CaptureFixture[str]):
    with pytest.MonkeyPatch.context() as patched:
        interrupting(patched, after=2)
        assert exams.evaluate(exams.tasks("asked"), output="null") == 130
    (again,) = re.findall(r"the same command with output=(\S+) asks", capsys.readouterr().err)
    assert exams.evaluate(exams.tasks("asked"), output=again) == 0
    assert len(exams.rows(again)) == 6


def test_a_bug_under_quality_does_not_take_the_speed_with_it(exams: Exams, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DecodelabLM, "_generate", _raise(ZeroDivisionError("a bug")))
    words = [f"task.path={exams.files['asked']}", "task.limit=1", "task.max_new_tokens=4", exams.tasks("asked")]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        exams.evaluate(*words, "timing=untimed", job="run")
    result = exams.result()
    assert (result["status"], result["exactness"]["verdict"]) == ("failed", "exact")
    assert result["quality"]["failed"] == {"asked": "ZeroDivisionError: a bug"}


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_the_key_knows_the_tasks_files_and_templates(exams: Exams):
    def key(*words: str) -> str:
        from decodelab.experiments.compose import compose
        from decodelab.experiments.identity import identify

        common = [f"model.path={exams.bench.checkpoint}", "device=cpu", "dtype=float32"]
        return identify(compose([*common, *words]), speed=False).key

    asked, template = exams.tasks("asked"), exams.bench.root / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    words = [asked, "quality.chat=true", f"quality.template={template}"]
    keys = [key(asked), key(asked), key(*words)]
    template.write_text("{{ messages[0].content }}!")
    keys.append(key(*words))
    exams.files["asked"].write_text(exams.files["asked"].read_text().replace("what", "which"))
    keys.append(key(asked))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_against_a_reference_run(exams: Exams, capsys: pytest.CaptureFixture[str]):
    assert exams.evaluate(exams.tasks("choices", "asked"), output="ref") == 0
    against = f"against={exams.bench.root / 'ref'}"
    assert exams.evaluate(exams.tasks("choices", "asked"), against, "drafting=none") == 0
    found = exams.result()["quality"]["against"]
    assert {name: task["n"] for name, task in found["tasks"].items()} == {"choices": 6, "asked": 6}
    assert all(task["metrics"][task["main"]]["value"] == 0 for task in found["tasks"].values())
    assert (exams.bench.root / "out" / "flips.jsonl").read_text() == ""
    assert "against " in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patched:  # refused before any weight is loaded
        patched.setattr("decodelab.experiments.run.build_lab", _raise(AssertionError()))
        assert exams.evaluate(exams.tasks("asked"), against, "quality.batch=4", output="other") == 2
    assert "batch is 4 here, 1 there" in capsys.readouterr().err


def test_a_chat_with_few_shots_and_a_system_prompt_is_asked_as_the_template_says(exams: Exams):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    words = ["quality.chat=true", f"quality.template='{template}'", "quality.system=Be brief.", "quality.shots=1"]
    assert exams.evaluate(exams.tasks("asked"), *words, "quality.limit=2", "quality.thinking=['<t>','</t>']") == 0
    first, second = exams.rows()
    assert first["prompt"].startswith("[system]Be brief.[user]")
    assert first["prompt"].endswith("[assistant]")
    assert "what is 1 ab 1?" in first["prompt"]  # an example, and not the item itself
    assert first["prompt"].count("what is 0 ab 0?") == 1
    assert first["prompt"] != second["prompt"]
    settings = exams.result()["quality"]["tasks"]["asked"]["settings"]
    assert (settings["chat"], settings["system"], settings["shots"]) == (True, "Be brief.", 1)
    assert settings["thinking"] == ["<t>", "</t>"]
    assert len(settings["template"]) == 64


YAML = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def yaml_task(exams: Exams, more: str) -> str:
    folder = exams.bench.root / "yaml"
    folder.mkdir()
    (folder / "own.yaml").write_text(YAML.format(path=exams.files["asked"]) + more)
    return f"quality.include=[{folder}]"


def test_a_folder_of_lm_evals_yaml_with_two_filters(exams: Exams):
    more = """
repeats: 2
generation_kwargs: {until: ["zz"], do_sample: true, temperature: 0.5}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(.)"}, {function: take_first}]}
  - {name: all, filter: [{function: take_first}]}
"""
    assert exams.evaluate("tasks=[own]", yaml_task(exams, more), "quality.limit=5") == 0
    result, rows = exams.result(), exams.rows()
    task = result["quality"]["tasks"]["own"]
    assert list(task["metrics"]) == ["exact_match,first", "exact_match,all"]
    assert task["main"] == "exact_match,first"
    assert task["settings"]["stop"] == ["zz"]
    assert task["settings"]["max_new_tokens"] == 12
    assert len(rows) == 5
    assert rows[0]["response"][0] == rows[0]["response"][1]  # greedy, and so asked once
    assert rows[0]["scored"] == rows[0]["response"][0][0]
    assert any("own asks for do_sample=True, temperature=0.5" in w for w in result["warnings"])


def test_examples_that_lm_eval_draws_are_the_same_in_every_repeat(exams: Exams):
    """Else a run that goes on would ask other prompts."""
    include = yaml_task(
        exams, "num_fewshot: 2\nfewshot_split: test\ngeneration_kwargs: {until: [zz], max_gen_toks: 3}\n"
    )
    words = ["tasks=[own]", include, "quality.limit=5", "acceptance=sampling", "quality.repeats=2"]
    assert exams.evaluate(*words) == 0
    prompts = [row["prompt"] for row in exams.rows()]
    assert prompts[0].count("what is") == 3
    assert prompts[:5] == prompts[5:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quality.repeats=3"], "quality.repeats=3 would draw one answer 3 times; acceptance=sampling"),
        (["quality.max_new_tokens=128"], "asked: an answer of 128 tokens and its prompt do not fit the context of 128"),
        (["quality.max_length=129"], "quality.max_length=129: the context of tiny is 128"),
        (["quality.template=nowhere.jinja", "quality.chat=true"], "quality.template='nowhere.jinja' does not exist"),
        (["against=nowhere"], "nowhere holds no result.json"),
        (["tasks=[nowhere.jsonl]"], "nowhere.jsonl' does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    words: list[str], message: str, exams: Exams, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("decodelab.experiments.run.build_lab", _raise(AssertionError()))
    tasks = [] if words[0].startswith("tasks=") else [exams.tasks("asked")]
    assert exams.evaluate(*tasks, *words) == 2
    assert message in capsys.readouterr().err
    assert not (exams.bench.root / "out").exists()


def test_against_without_tasks_is_refused(exams: Exams, capsys: pytest.CaptureFixture[str]):
    assert exams.evaluate(f"task.path={exams.files['asked']}", "against=ref", job="run") == 2
    assert "against=ref compares quality: name quality.tasks" in capsys.readouterr().err


def test_without_lm_eval_the_extra_is_named(
    exams: Exams, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from importlib.metadata import PackageNotFoundError

    monkeypatch.setattr("decodelab.experiments.quality.tasks.version", _raise(PackageNotFoundError("lm_eval")))
    assert exams.evaluate(exams.tasks("asked")) == 2
    assert "quality.tasks needs lm-eval: pip install 'decodelab[quality]'" in capsys.readouterr().err


def test_the_speed_is_written_before_quality_begins(exams: Exams, monkeypatch: pytest.MonkeyPatch):
    """What kills the process while it asks, such as kill -9, does not take it away."""
    generate, written = DecodelabLM._generate, []

    def asked(self: DecodelabLM, jobs: Sequence[Any]) -> Any:
        written.append(exams.result())
        return generate(self, jobs)

    monkeypatch.setattr(DecodelabLM, "_generate", asked)
    words = [f"task.path={exams.files['asked']}", "task.limit=1", "task.max_new_tokens=4", exams.tasks("asked")]
    assert exams.evaluate(*words, "timing=untimed", job="run") == 0
    first, whole = written[0], exams.result()
    assert (first["status"], first["prompts"], first["quality"]["interrupted"]) == ("interrupted", 1, True)
    assert first["strategy"]["tokens_per_step"] == whole["strategy"]["tokens_per_step"]
    assert (whole["status"], whole["quality"]["interrupted"]) == ("done", False)


def test_a_lossy_run_without_quality_says_so(exams: Exams):
    words = [f"task.path={exams.files['asked']}", "task.limit=1", "task.max_new_tokens=4", "acceptance=typical"]
    assert exams.evaluate(*words, "timing=untimed", job="run", output="bare") == 0
    assert [text for text in exams.result("bare")["warnings"] if "lossy by design" in text]
    assert exams.evaluate(*words, exams.tasks("asked"), "timing=untimed", job="run") == 0
    result = exams.result()
    assert not [text for text in result["warnings"] if "lossy by design" in text]
    assert (result["exactness"]["verdict"], list(result["quality"]["tasks"])) == ("lossy", ["asked"])
    assert result["quality"]["tasks"]["asked"]["measures"] == "decoding"
