"""`replay=FILE`: what a drafter would do on known answers is what it does in a run, and no model is loaded."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding import cost
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.experiments import hardware, lab, run
from decodelab.experiments.cli import main
from decodelab.experiments.compose import Composer
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.sweep.grid import composed, expand
from decodelab.experiments.sweep.search import search
from decodelab.experiments.sweep.sweep import sweep
from decodelab.experiments.sweep.version import package_digest
from decodelab.experiments.sweep.worker import serve
from decodelab.tests.experiments.bench import ROWS, Bench, strict
from decodelab.tests.experiments.schema import ADDED, REPLAY, SCHEMA, at

FACTS = ("drafted", "verified", "depth", "accepted", "emitted", "sources", "also_proposed", "ranks", "offered")
PLAIN_ROWS = (
    {"id": "copy", "category": "copy", "prompt": "12 ab 12 ab", "answer": " 12 ab 12 ab 12 ab"},
    {
        "id": "talk",
        "prompt": None,
        "turns": ["hello", "and then?"],
        "answer": ["hello hello hello", "and then and then"],
    },
    {"id": "ask", "question": "what?", "documents": ["it is a b c"], "answer": "it is a b c"},
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "peaks", lambda *_: Peaks(1e10, 1e11))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads weights or opens a model's files fails."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a model was opened")

    for where, name in ((lab, "load_decoder"), (lab, "open_source"), (run, "open_source")):
        monkeypatch.setattr(where, name, never)


def replayed(source: Path, *words: str, output: str = "replayed") -> dict[str, Any]:
    assert main(["run", f"replay={source}", "threads=1", f"output={output}", *words]) == 0
    return strict((Path(output) / "result.json").read_text())


def steps(folder: Path) -> list[tuple[Any, ...]]:
    rows = [strict(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(r["id"], *(r[name] for name in FACTS)) for r in rows if (r["side"], r["event"]) == ("strategy", "step")]


@pytest.mark.parametrize(
    ("drafting", "acceptance", "batch"),
    [
        (["prompt_lookup", "drafting.per_match=null"], "greedy", 1),
        (["reference", "drafting.in_prompt=true"], "sampling acceptance.temperature=0.1", 1),
        (["merge"], "greedy", 3),
        (["merge", "drafting.order=first", "drafting.budget=4"], "sampling acceptance.temperature=0.1", 1),
    ],
    ids=["prompt_lookup", "reference, sampled", "merge, in a batch", "merge in order, sampled"],
)
def test_it_is_what_the_run_did(drafting: list[str], acceptance: str, batch: int, bench: Bench, request: Any):
    """Tokens a step, acceptance, by position and category, and each step; turns, documents, sampled answers."""
    words = [f"drafting={drafting[0]}", *drafting[1:]]
    law = f"acceptance={acceptance}".split()
    assert bench.run(*words, *law, f"batch={batch}", "timing=untimed") == 0
    real = bench.result
    assert real["strategy"]["accepted_by_source"]
    request.getfixturevalue("no_model")
    found = replayed(bench.folder, *words)
    names = [name for name in real["strategy"] if name != "time_share"]
    assert {name: found["strategy"][name] for name in names} == {name: real["strategy"][name] for name in names}
    assert found["by_category"] == real["by_category"]
    assert steps(Path("replayed")) == steps(bench.folder)


def test_documents_are_recorded_with_the_answers(bench: Bench):
    """The answer stands in the document, so that it is copied from there."""
    assert bench.run("drafting=none", "timing=untimed", rows=ROWS[:1]) == 0
    text = bench.lines("samples.jsonl")[0]["baseline"]["text"]
    shutil.rmtree(bench.folder)
    words = ["drafting=reference", "drafting.per_match=null"]
    assert bench.run(*words, "timing=untimed", rows=[{**ROWS[0], "documents": [text]}]) == 0
    assert bench.result["strategy"]["accepted_by_source"]["reference"] > 0
    replayed(bench.folder, *words)
    assert steps(Path("replayed")) == steps(bench.folder)


def test_what_it_says_of_itself(bench: Bench, capsys: Any):
    """The schema of a run, with what no replay knows null; who gave the answers is what was recorded."""
    warm = ["acceptance=sampling", "acceptance.temperature=0.1"]
    assert bench.run(*warm, "seed=3", "batch=2", "timing=untimed") == 0
    real = bench.result
    capsys.readouterr()
    found = replayed(bench.folder, "drafting.max_draft=3")
    for path, keys in SCHEMA.items():
        if at(found, path) is not None:
            assert set(at(found, path)) == keys | ADDED.get(path, set()), path
    assert (found["status"], found["prompts"], found["timing"]["mode"]) == ("done", 6, "replay")
    for name in ("exactness", "quality", "compare_hf", "predicted_speedup", "profile", "implementation"):
        assert found[name] is None, name
    for path in ("speedup", "end_to_end_speedup", "memory", "decode", "prefill", "strategy.time_share"):
        assert set(at(found, path).values()) == {None}, path
    assert set(found["replay"]) == REPLAY
    about = {name: found["replay"][name] for name in ("source", "run", "prompts", "answers")}
    source = str(bench.folder / "samples.jsonl")
    assert about == {"source": source, "run": real["key"], "prompts": 6, "answers": "plain decoding's"}
    assert (found["replay"]["device"], found["provenance"]["dtype"]) == (real["provenance"]["device"], "float32")
    for name in ("model", "acceptance", "task", "seed", "dtype"):
        assert found["config"][name] == real["config"][name], name
    assert (found["config"]["drafting"]["max_draft"], found["config"]["batch"]) == (3, 1)
    assert {name: found["digests"][name] for name in ("weights", "task")} == {
        name: real["digests"][name] for name in ("weights", "task")
    }
    assert sorted(f.name for f in Path("replayed").iterdir()) == ["events.jsonl", "result.json"]
    out = capsys.readouterr().out
    assert out.startswith(f"prompt_lookup on the answers of {bench.folder.name}\nreplayed from ")
    assert "6 prompts · untimed" in out.replace("\n", " ")
    assert "no model ran" in out
    assert "kept at position 1: " in out
    assert "output:" not in out
    assert "memory:" not in out


def test_a_speedup_is_predicted_from_the_recorded_costs(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    honest = cost.measure_target
    monkeypatch.setattr(cost, "measure_target", lambda target, **given: honest(target, **given, repeats=1))
    assert bench.run("profile=true", "timing=untimed", "drafting=none") == 0
    real = bench.result
    capsys.readouterr()
    found = replayed(bench.folder)
    assert found["profile"]["seconds"] == real["profile"]["seconds"]
    assert found["profile"]["draft"]["host_s"] == real["profile"]["draft"]["host_s"]
    assert found["profile"]["draft"]["step_s"] + found["profile"]["draft"]["token_s"] > 0
    assert found["predicted_speedup"] == found["profile"]["predicted_speedup"] > 0
    assert found["speedup"]["value"] is None
    assert "the speedup is predicted, not measured" in capsys.readouterr().out
    real["profile"]["seconds"] = {"1": 1.0, "2": 0.9}
    real["provenance"]["load_before"] = 1.2
    (bench.folder / "result.json").write_text(json.dumps(real))
    (noise,) = replayed(bench.folder, output="noisy")["warnings"]
    busy = "other programs used the cores while T(k) was measured"
    assert noise.startswith(f"{busy} and T(2) is only 0.90 of T(1): what is predicted")
    assert noise in " ".join(capsys.readouterr().out.split())


def test_texts_are_read_by_the_model_s_tokenizer(bench: Bench, private: Path, capsys: Any, monkeypatch: Any):
    """Answers are cut as a run's are; every turn is a prompt; gold that is the answer is not what is copied from."""
    monkeypatch.setattr(lab, "load_decoder", None)
    file = private / "known.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in PLAIN_ROWS))
    model = f"model.path={bench.checkpoint}"
    found = replayed(file, model, "drafting=reference", "task.chat=false", "task.max_new_tokens=10")
    assert (found["prompts"], found["strategy"]["tokens"]) == (4, 40)
    assert list(found["by_category"]) == ["copy", "known"]
    assert found["replay"]["run"] is None
    task = {name: found["config"]["task"][name] for name in ("name", "path", "max_new_tokens")}
    assert task == {"name": None, "path": str(file), "max_new_tokens": 10}  # whose prompts they are
    assert found["warnings"] == []
    assert found["strategy"]["accepted_by_source"]["reference"] > 5  # of "it is a b c", once "i" is there
    assert {line[0] for line in steps(Path("replayed"))} == {"copy", "talk/turn1", "talk/turn2", "ask"}
    some = replayed(file, model, "task.chat=false", "task.limit=1", output="some")
    tokenizer = open_source(ModelSpec(path=str(bench.checkpoint))).tokenizer
    answer = tokenizer(PLAIN_ROWS[0]["answer"], add_special_tokens=False)["input_ids"]
    assert (some["prompts"], some["strategy"]["tokens"]) == (1, len(answer))
    capsys.readouterr()
    assert main(["check", f"replay={file}", model, "drafting=reference"]) == 0
    out = capsys.readouterr().out
    assert "known: 4 prompts, at most 64 new tokens each, with their answers" in out
    assert out.endswith("\nruns\n")


def test_a_file_of_ids_needs_nothing_beside_it(bench: Bench, private: Path, no_model: None, capsys: Any):
    """Without result.json it is unknown whose answers they are."""
    rows = [
        {
            "id": i,
            "category": "c",
            "prompt_ids": [1, 2, 3, 1, 2],
            "max_new_tokens": 6,
            "baseline": {"tokens": [3, 1, 2]},
        }
        for i in range(2)
    ]
    (private / "ids.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = replayed(private / "ids.jsonl")
    assert (found["strategy"]["tokens"], found["strategy"]["steps"]) == (6, 2)  # one step keeps what is left
    assert (found["digests"]["weights"], found["replay"]["run"], found["provenance"]["dtype"]) == (None, None, None)
    (short,) = found["warnings"]
    assert short == f"half of the answers of {private.name} have 3 tokens or fewer: too short to draft much of them"
    assert main(["check", f"replay={private / 'ids.jsonl'}", "drafting=prompt_lookup"]) == 0
    assert "2 recorded answers of " in capsys.readouterr().out


def test_a_drafter_that_copies_warns_where_there_is_nothing_to_copy(bench: Bench, capsys: Any):
    assert bench.run("timing=untimed", rows=ROWS[:1]) == 0
    found = replayed(bench.folder, "drafting=reference")
    assert found["warnings"] == ["no prompt of out has documents, from which this drafter copies"]


@dataclass
class Here:
    """A worker that is no process of its own."""

    group: str
    pid: int = 0

    def run(self, folder: Path, timeout: float | None, tick: Any) -> None:
        serve(folder, lab.Warm(), package_digest())

    def stop(self) -> None: ...


def test_cells_of_a_sweep_and_trials_of_a_search(bench: Bench, private: Path, no_model: None, capsys: Any):
    """One that needs a model is refused, and the others run; the best length of a draft is found."""
    known = {"id": "a", "category": "c", "prompt_ids": [1, 2, 3, 4, 5, 6, 1], "max_new_tokens": 99}
    answer = [2, 3, 4, 5, 6, 1, 2, 3, 9, 9]
    (private / "ids.jsonl").write_text(json.dumps(known | {"baseline": {"tokens": answer}}))
    composer = Composer()
    words = ["replay=ids.jsonl", "threads=1", "output=cells", "drafting=prompt_lookup,lookahead,reference"]
    cells = expand(words, composer)
    start: Any = lambda group, *_: Here(group)  # noqa: E731
    assert sweep("run", cells, composed(cells, composer), words, start_worker=start) == 1
    out = capsys.readouterr().out
    assert out.count(" replayed ") == 2
    assert "refused: drafting=lookahead – refused, because replay has answers and no model" in out
    asked = "{space: {drafting.max_draft: {choices: [1, 3]}}, objective: strategy.tokens_per_step, trials: 2}"
    words = ["replay=ids.jsonl", "threads=1", "output=trials", "drafting.per_match=null", f"search={asked}"]
    assert search("run", composer.compose(words), words, composer, start_worker=start) == 0
    out = capsys.readouterr().out
    assert "best: strategy.tokens_per_step 3.000 with drafting.max_draft=3" in out
    assert out.count(" replayed ") == 2


def test_in_a_report_a_replayed_row_is_not_a_measured_one(bench: Bench, private: Path, capsys: Any):
    assert bench.run(f"output={private / 'all' / 'run'}", "timing=untimed") == 0
    replayed(private / "all" / "run", "drafting.max_draft=2", output=str(private / "all" / "replay"))
    capsys.readouterr()
    assert main(["report", "all"]) == 0
    out = capsys.readouterr().out
    assert out.count("strategy ") == 1  # one table
    text = (private / "all" / "report.md").read_text()
    assert "prompt_lookup max\\_draft=2 (replayed)" in text or "prompt\\_lookup max\\_draft=2 (replayed)" in text
    assert "replayed: the drafter on recorded answers; no model ran" in text
    assert main(["report", "explain", "all/replay"]) == 0
    assert "no model ran, so nothing was timed" in capsys.readouterr().out
    assert main(["report", "claims", "all"]) == 0
    claims = (private / "all" / "claims.md").read_text()
    shutil.rmtree(private / "all" / "replay")
    assert main(["report", "claims", "all"]) == 0
    assert claims == (private / "all" / "claims.md").read_text()


@pytest.mark.parametrize(
    ("rows", "words", "line"),
    [
        (None, [], "replay='{file}' does not exist"),
        ([], [], "replay={file} is empty; it holds a row a prompt, with its answer"),
        (["{"], [], "known.jsonl:1 is not JSON"),
        ([{"baseline": {"tokens": [1]}}], [], "known.jsonl:1 has no prompt_ids, as runs of an earlier version"),
        (
            [{"prompt_ids": [1, -1], "max_new_tokens": 3, "baseline": {"tokens": [1]}}], [],
            "known.jsonl:1: prompt_ids must be a list of token ids that is not empty, not [1, -1]",
        ),
        (
            [{"prompt_ids": [1], "max_new_tokens": 3, "baseline": {"tokens": []}}], [],
            "known.jsonl:1: baseline.tokens must be a list of token ids that is not empty, not []",
        ),
        (
            [{"prompt_ids": [1], "max_new_tokens": 3, "baseline": {"tokens": [1, 2**32 - 1]}}], [],
            "known.jsonl:1: baseline.tokens must be a list of token ids that is not empty, not [1, 4294967295]; ids",
        ),
        (
            [{"prompt_ids": [1], "max_new_tokens": True, "baseline": {"tokens": [1]}}], [],
            "known.jsonl:1: max_new_tokens=True is below the 1 tokens of its answer",
        ),
        (
            [{"prompt_ids": [1], "max_new_tokens": 1, "baseline": {"tokens": [1, 2]}}], [],
            "known.jsonl:1: max_new_tokens=1 is below the 2 tokens of its answer",
        ),
        (
            [{"prompt_ids": [1], "max_new_tokens": 3, "baseline": {"tokens": [1]}}], ["task.limit=3"],
            "task.limit is of a task, and replay takes a recorded run whole: leave it out",
        ),
        ([{"prompt": "a"}], [], "known/0: replay reads the key answer, a text, not None"),
        (
            [{"prompt": "a", "after": "b", "solution": "c", "tests": "d", "reference": []}], [],
            "known/0: replay reads the key answer, a text, not None; rename one of its after, solution, if that is it",
        ),
        ([{"prompt": "a", "answer": ["b", "c"]}], [], "known/0: replay reads the key answer, a text, not ['b', 'c']"),
        ([{"prompt": "a", "answer": ""}], [], "known/0: the answer must be a text that is not empty, not ''"),
        (
            [{"turns": ["a", "b"], "answer": ["x", 3]}], ["task.chat=false"],
            "known/0: the answer must be a text, or one for each of 2 turns that is not empty, not 3",
        ),
        (
            [{"prompt": "a", "answer": "b"}], ["drafting=lookahead"],
            "refused, because replay has answers and no model, and lookahead needs one: choose a drafter that looks at "
            "tokens alone, or leave replay out",
        ),
        (
            [{"prompt": "a", "answer": "b"}], ["drafting=merge", "drafting.budget=auto"],
            "refused, because replay has answers and no model, on which merge would measure what rows cost, as ",
        ),
        ([{"prompt": "a", "answer": "b"}], ["drafting=retrieval"], "refused, because drafting=retrieval has nothing"),
        ([{"prompt": "a", "answer": "b"}], ["compare_hf=true"], "compare_hf needs a model, and replay has answers and"),
        ([{"prompt": "a", "answer": "b"}], ["batch=2"], "batch=2 needs a model, and replay has answers and none"),
        ([{"prompt": "a", "answer": "b"}], ["profile=true"], "profile needs a model, and replay has answers and none"),
        ([{"prompt": "a", "answer": "b"}], ["tasks=[arc_easy]"], "quality.tasks needs a model, and replay has"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(rows: Any, words: list[str], line: str, bench: Bench, private: Path, capsys: Any):
    file = private / "known.jsonl"
    if rows is not None:
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    given = ["run", f"replay={file}", f"model.path={bench.checkpoint}", "output=new", "threads=1", *words]
    assert main(given) == 2
    (told,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("decodelab")]
    assert told.startswith(f"decodelab: error: {line.format(file=file)}")
    assert not (private / "new").exists()


def test_a_folder_without_samples_and_a_job_without_replay(bench: Bench, private: Path, capsys: Any):
    assert main(["run", f"replay={private}"]) == 2
    assert f"replay={private} holds no samples.jsonl: name the folder of one run" in capsys.readouterr().err
    assert main(["evaluate", f"replay={private}"]) == 2
    assert "evaluate needs a model, and replay has answers and none" in capsys.readouterr().err
    assert main(["run", "replay=' '"]) == 2
    assert "replay is empty; name the folder of a run or a file of answers" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(bench: Bench, private: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert bench.run("timing=untimed") == 0
    monkeypatch.chdir(private)
    from decodelab.experiments import replay as module

    honest, done = module.replay, []

    def interrupted(*args: Any) -> Any:
        done.append(args)
        if len(done) == 3:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(module, "replay", interrupted)
    assert main(["run", f"replay={bench.folder}", "threads=1", "output=cut"]) == 130
    found = strict((private / "cut" / "result.json").read_text())
    assert (found["status"], found["prompts"]) == ("interrupted", 2)
    assert "decodelab: interrupted after 2 prompts; they are in cut" in capsys.readouterr().err
