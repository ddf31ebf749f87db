"""`decodelab run`, whole, on a tiny model: exit codes, folders, what is said, and every part in one command."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.decoding import cost
from decodelab.experiments import identity, measure, run
from decodelab.experiments.cli import main
from decodelab.experiments.compose import compose
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.lab import Lab, Warm
from decodelab.kernels.dispatch import Kernels
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_byte_tokenizer, tiny_model
from decodelab.tests.experiments.bench import strict


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.hardware, "peaks", lambda *_: Peaks(1e10, 1e11))


def test_a_busy_machine_is_said_to_be_one(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.load, "load_of_others", lambda: 3.5)
    assert bench.run("timing=paired") == 0
    assert bench.result["warnings"] == [
        "other programs use the cores: speeds are noisy and MBU is off; run it again when quiet"
    ]


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("decodelab")]


def test_a_run(bench: Any, capsys: Any):
    """Table on standard output, progress on standard error; three files; every prompt, turns included, in order."""
    assert bench.run() == 0
    told = capsys.readouterr()
    assert told.out.startswith("tiny: prompt_lookup, greedy, task\n")
    assert "output: exact" in told.out
    assert told.out.endswith(f"written to {bench.folder}\n")
    assert max(map(len, told.out.splitlines()[:-1])) <= 80
    assert "decoding 0/6, warming up" in told.err
    assert "decoding 6/6, speedup" in told.err
    assert sorted(f.name for f in bench.folder.iterdir()) == ["events.jsonl", "result.json", "samples.jsonl"]
    samples = bench.lines("samples.jsonl")
    assert [s["id"] for s in samples] == ["copy", "count", "talk/turn1", "talk/turn2", "ask", "three"]
    assert all(s["strategy"]["tokens"] == s["baseline"]["tokens"] for s in samples)
    assert list(bench.result["by_category"]) == ["copy", "chat", "documents"]
    assert torch.get_num_threads() == 1


def test_gold_is_in_no_file_of_a_run(bench: Any):
    """Nothing that the strategy saw, and nothing it could have copied."""
    assert bench.run("drafting=reference", "drafting.in_prompt=true") == 0
    for name in ("events.jsonl", "samples.jsonl", "result.json"):
        assert "GOLD" not in (bench.folder / name).read_text()


@pytest.mark.parametrize("drafting", ["none", "prompt_lookup", "reference", "draft_model"])
@pytest.mark.parametrize("acceptance", ["greedy", "sampling"])
def test_every_drafter_with_every_rule_in_a_batch(drafting: str, acceptance: str, bench: Any):
    """The model as its own draft is accepted in whole, greedily and coupled (vllm#9730)."""
    words = [f"drafting={drafting}", f"acceptance={acceptance}", "batch=3", "dtype=float64"]
    draft = [f"drafting.model.path={bench.checkpoint}"] if drafting == "draft_model" else []
    assert bench.run(*words, *draft) == 0
    found = bench.result
    assert found["exactness"]["verdict"] == "exact"
    assert found["exactness"]["identical"] == 6
    if draft:
        assert found["strategy"]["acceptance_rate"] == 1.0
        assert found["digests"]["draft"] == found["digests"]["model"]
    if drafting == "none":
        assert found["strategy"]["tokens_per_step"] == 1.0


def test_drawn_drafts_have_the_same_law(bench: Any, capsys: Any):
    words = ["drafting=draft_model", "drafting.proposal=sampled", f"drafting.model.path={bench.checkpoint}"]
    assert bench.run(*words, "acceptance=sampling", "timing=untimed") == 0
    assert bench.result["exactness"]["verdict"] == "same law"
    assert "output: same law – the same distribution as plain sampling" in capsys.readouterr().out


def test_profile_and_transformers_beside_it(bench: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    honest = cost.measure_target
    monkeypatch.setattr(cost, "measure_target", lambda target, **given: honest(target, **given, repeats=1))
    draft = ["drafting=draft_model", f"drafting.model.path={bench.checkpoint}"]
    assert bench.run("profile=true", "compare_hf=true", *draft) == 0
    found, out = bench.result, capsys.readouterr().out
    assert found["predicted_speedup"] == found["profile"]["predicted_speedup"] > 0
    assert list(found["profile"]["seconds"]) == ["1", "2", "4", "8", "16", "32"]
    assert found["profile"]["alpha"] == 1.0
    assert f"k rows in one forward, {found['profile']['context']} tokens" in out
    assert "predicted speedup" in out
    assert "of a plain step" in out
    assert list(found["compare_hf"]) == ["plain", "prompt_lookup", "assisted"]
    for mode, row in found["compare_hf"].items():
        assert row["identical"] == row["prompts"] == 6, mode
    assert "transformers generate" in out


def test_no_speedup_is_predicted_for_a_batch(bench: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cost, "ROWS", (1, 2))
    assert bench.run("profile=true", "batch=2") == 0
    assert bench.result["predicted_speedup"] is None
    assert run.BATCHED[:60] in capsys.readouterr().out.replace("\n", " ")


def test_transformers_is_not_compared_under_penalties(bench: Any, capsys: Any):
    assert bench.run("compare_hf=true", "acceptance.repetition_penalty=1.2") == 2
    (line,) = errors(capsys)
    assert line.startswith("decodelab: error: compare_hf=true compares greedy decoding alone")
    assert not bench.folder.exists()


def test_an_interrupt_keeps_the_finished_prompts(bench: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C in the fourth prompt: exit code 130, and a whole folder that says so."""
    honest, runs = Lab.strategy, []

    def interrupted(self: Lab, *args: Any, **options: Any) -> Any:
        runs.append(args)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return honest(self, *args, **options)

    monkeypatch.setattr(Lab, "strategy", interrupted)
    assert bench.run("timing=untimed", "profile=true") == 130
    told = capsys.readouterr()
    line = f"decodelab: interrupted after 3 prompts; they are in {bench.folder}"
    assert [text for text in told.err.splitlines() if text.startswith("decodelab")] == [line]
    found = bench.result
    assert (found["status"], found["prompts"], found["exactness"]["prompts"]) == ("interrupted", 3, 3)
    assert found["profile"] is None
    assert [s["id"] for s in bench.lines("samples.jsonl")] == ["copy", "count", "talk/turn1"]
    assert sorted(f.name for f in bench.folder.iterdir()) == ["events.jsonl", "result.json", "samples.jsonl"]


def test_an_interrupt_during_the_profile_keeps_all_prompts(bench: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cost, "draft_cost", interrupted)
    assert bench.run("timing=untimed", "profile=true") == 130
    assert (bench.result["status"], bench.result["prompts"], bench.result["profile"]) == ("interrupted", 6, None)


def test_an_interrupt_before_any_prompt_leaves_nothing(bench: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "plain", interrupted)
    assert bench.run() == 130
    assert errors(capsys) == ["decodelab: error: interrupted; what was finished before is kept"]
    assert not bench.folder.exists()


def test_a_prompt_that_is_too_long_is_named(bench: Any, capsys: Any):
    rows = [{"id": "short", "prompt": "ab"}, {"id": "long", "prompt": "a c" * 99}]
    assert bench.run(rows=rows) == 2
    assert errors(capsys) == [
        "decodelab: error: long: the prompt has 297 tokens, but the context holds 128 and one must be free; shorten it"
    ]
    assert not bench.folder.exists()


def test_a_prompt_that_fills_the_context_ends_there(bench: Any):
    """tokens are cut at the context's end on both sides; the draft is cut with them."""
    assert bench.run("task.max_new_tokens=64", "timing=untimed", rows=[{"id": "a", "prompt": "ab ab " * 20}]) == 0
    (sample,) = bench.lines("samples.jsonl")
    assert sample["strategy"]["reason"] in ("context", "eos")
    assert sample["prompt_tokens"] + len(sample["strategy"]["tokens"]) <= 128


def test_without_documents_reference_warns(bench: Any, capsys: Any):
    assert bench.run("drafting=reference", "timing=untimed", rows=[{"id": "a", "prompt": "ab"}]) == 0
    note = "no prompt of the task task has documents, from which this drafter copies"
    assert bench.result["warnings"] == [note]
    assert f"note: {note}" in capsys.readouterr().out


def test_what_a_part_warns_of_is_in_the_result_once(bench: Any, private: Path):
    """A draft past its own context proposes nothing and says so (vllm#5342)."""
    draft = save_folder(private / "draft", tiny_model(max_position_embeddings=24))
    words = ["drafting=draft_model", f"drafting.model.path={draft}", "timing=untimed"]
    assert bench.run(*words) == 0
    full = "the draft model's context of 24 tokens is full: no drafts past it"
    assert bench.result["warnings"].count(full) == 1
    assert bench.result["exactness"]["verdict"] == "exact"


def test_another_vocabulary_is_refused_before_any_weight(bench: Any, private: Path, capsys: Any):
    draft = save_folder(private / "draft", tiny_model())
    other = tiny_byte_tokenizer()
    other.add_tokens(["<|other|>"])
    other.save_pretrained(draft)
    assert bench.run("drafting=draft_model", f"drafting.model.path={draft}") == 2
    (line,) = errors(capsys)
    assert "their tokenizers differ (token '<|other|>' has id 262 and None)" in line
    assert not bench.folder.exists()


def test_a_folder_is_named_after_what_it_holds(bench: Any, private: Path):
    assert bench.run("output=null", "timing=untimed") == 0
    (folder,) = (private / "outputs").iterdir()
    key = strict((folder / "result.json").read_text())["key"]
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-prompt_lookup-tiny-{key}", folder.name)


def test_two_runs_of_one_second_have_a_folder_each(bench: Any, private: Path, monkeypatch: pytest.MonkeyPatch):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Frozen":
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(run, "datetime", Frozen)
    assert [bench.run("output=null", "timing=untimed") for _ in range(2)] == [0, 0]
    first, second = sorted((private / "outputs").iterdir())
    assert second.name == f"{first.name}-2"
    assert (first / "result.json").is_file()
    assert (second / "result.json").is_file()


def test_an_empty_output_is_refused(bench: Any, capsys: Any):
    assert bench.run("output=' '", "timing=untimed") == 2
    assert "output is empty; name a folder" in errors(capsys)[0]


def test_a_result_is_not_written_over(bench: Any, capsys: Any):
    assert bench.run("timing=untimed") == 0
    before = (bench.folder / "result.json").read_text()
    capsys.readouterr()
    assert bench.run("timing=untimed") == 2
    assert errors(capsys) == [
        f"decodelab: error: output={bench.folder} already holds a result; name another folder or delete that one"
    ]
    assert (bench.folder / "result.json").read_text() == before


def test_a_single_run_leaves_the_folder_of_a_sweep_alone(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.folder.mkdir()
    (bench.folder / "sweep.json").write_text("{}")
    assert bench.run() == 2
    assert f"output={bench.folder} holds a sweep; name another folder for a single run" in capsys.readouterr().err
    assert [file.name for file in bench.folder.iterdir()] == ["sweep.json"]


def test_a_folder_that_cannot_be_written_fails_before_the_work(
    bench: Any, private: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    (private / "file").touch()
    monkeypatch.setattr(run, "measure", None)
    assert bench.run(f"output={private / 'file' / 'out'}") == 2
    (line,) = errors(capsys)
    assert line == (
        f"decodelab: error: output folder {private / 'file' / 'out'} cannot be written (Not a directory); "
        "name another with output=DIR"
    )


def test_an_unused_gpu_is_told(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "unused_gpu", lambda: "this machine has an NVIDIA GPU")
    assert bench.run("timing=untimed") == 0
    assert bench.result["warnings"] == ["this machine has an NVIDIA GPU"]


def test_kernels_that_do_not_run_are_told_and_make_another_run(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "missing", lambda: None)
    assert bench.run("timing=untimed", "dtype=bfloat16") == 0
    with_ours = bench.result
    monkeypatch.setattr(identity, "missing", lambda: "there is no compiler")
    assert bench.run("timing=untimed", "dtype=bfloat16", f"output={bench.folder}-2") == 0
    without = json.loads((bench.folder.with_name(f"{bench.folder.name}-2") / "result.json").read_text())
    told = "PyTorch's operations stand in for our own kernels of the CPU: there is no compiler"
    assert told in without["warnings"]
    assert told not in with_ours["warnings"]
    assert without["key"] != with_ours["key"]


def test_threads_are_for_this_run_alone(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """The next cell of a sweep, with threads=null, has as many as torch chose."""
    seen: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return measure.measure(*args, **options)

    monkeypatch.setattr(run, "measure", counted)
    torch.set_num_threads(2)
    try:
        assert bench.run("timing=untimed", "threads=1") == 0
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


def test_the_demo_is_the_default_task(bench: Any, capsys: Any):
    """Its prompts are longer than the tiny context: the first that is too long is named."""
    words = [f"model.path={bench.checkpoint}", "dtype=float32", "threads=1", "device=cpu"]
    assert main(["run", *words]) == 2
    (line,) = errors(capsys)
    assert line.startswith("decodelab: error: demo/")


def test_cells_of_one_worker_share_a_baseline(bench: Any):
    """timing=anchored: the first cell times it, the second times anchors, and both rows say so. Keys of kernels reach
    the target, and are told where there are none."""
    assert bench.run("--cfg", "job") == 0  # writes the task
    words = ["device=cpu", "threads=1", "dtype=float32", f"model.path={bench.checkpoint}", "timing=anchored"]
    words += ["kernels.row_invariant=false"]
    words += [f"task.path={bench.root / 'task.jsonl'}", "task.max_new_tokens=12"]
    warm, found = Warm(), []
    for name in ("prompt_lookup", "none"):
        cell = compose([*words, f"drafting={name}", f"output={bench.root / name}"])
        found.append(run.execute(cell, warm=warm).result)
    first, second = (result["timing"] for result in found)
    assert first == {"mode": "anchored", "baseline": "here", "anchors": None, "drift": None}
    assert (second["mode"], second["anchors"]) == ("anchored", 3)
    assert second["baseline"] in ("stored", "anew")  # a busy machine drifts
    assert second["drift"] > 0
    assert all(result["exactness"]["verdict"] == "exact" for result in found)
    assert second["baseline"] == "anew" or found[0]["baseline"] == found[1]["baseline"]
    assert warm.loaded is not None
    assert warm.loaded[1].kernels == Kernels(row_invariant=False)
    assert all(result["warnings"][0].startswith("kernels.row_invariant=false changes nothing") for result in found)
