"""A cell in its worker: what it runs, what it makes of whatever the cell raises, what it keeps warm."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.errors import UserError
from decodelab.experiments import lab
from decodelab.experiments.compose import compose
from decodelab.experiments.identity import identify
from decodelab.experiments.lab import Warm
from decodelab.experiments.sweep import worker
from decodelab.experiments.sweep.cells import Job, State, read, write
from decodelab.experiments.sweep.version import code_digest
from decodelab.experiments.sweep.worker import serve, verdict
from decodelab.tests.experiments.bench import Bench


@pytest.fixture
def asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lays down a job: its folder."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def lay(*words: str, threads: int = 1, **changes: Any) -> Path:
        task = bench.root / "task.jsonl"
        task.write_text('{"prompt": "ab ab ab"}\n{"prompt": "12 12"}\n')
        common = [f"model.path={bench.checkpoint}", f"task.path={task}", "device=cpu", "dtype=float32"]
        overrides = [*common, "task.max_new_tokens=4", "timing=untimed", *words]
        key = identify(replace(compose(overrides), threads=threads)).key
        folder = bench.root / f"cell-{key}"
        folder.mkdir()
        write(folder, replace(Job(key, "label", "run", tuple(overrides), (), threads, "group", "sweep"), **changes))
        return folder

    return lay


def test_a_cell_is_a_run_in_its_folder(asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Loaded once for both; threads are the sweep's, wherever the cell leaves them open."""
    loads = []
    honest = lab.load_decoder
    monkeypatch.setattr(lab, "load_decoder", lambda *args, **kwargs: loads.append(args) or honest(*args, **kwargs))
    warm, threads = Warm(), min(2, os.cpu_count() or 1)
    for words in (["threads=null"], ["threads=null", "drafting=none"]):
        folder = asked(*words, threads=threads)
        state = serve(folder, warm, "package")
        found = read(folder)
        assert (state.status, state.detail, state.pid) == ("done", "", None)
        assert state.code == code_digest("package")
        assert found.state == state
        assert found.result["key"] == found.job.key
        assert found.result["config"]["output"] == str(folder)
        assert found.result["provenance"]["threads"] == threads
        assert {"events.jsonl", "samples.jsonl"} < {file.name for file in folder.iterdir()}
        assert "output: exact" in capsys.readouterr().out
    assert len(loads) == 1


def test_a_broken_cell(asked: Any, sabotage: Any):
    folder = asked()
    sabotage()
    state = serve(folder, Warm(), "package")
    assert (state.status, state.detail) == ("broken", "its output is not the target's")
    assert read(folder).result["status"] == "broken"


def test_a_cell_that_was_planned_over_other_files(asked: Any, bench: Bench):
    folder = asked()
    (bench.root / "task.jsonl").write_text('{"prompt": "edited meanwhile"}\n')
    state = serve(folder, Warm(), "package")
    assert state.status == "refused"
    assert "has changed since it was planned: start it again" in state.detail
    assert not (folder / "result.json").exists()


def test_an_interrupt_keeps_the_prompts_that_are_finished(asked: Any, monkeypatch: pytest.MonkeyPatch):
    from decodelab.experiments import measure

    honest, calls = measure._divergence, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(*args)

    monkeypatch.setattr(measure, "_divergence", interrupted)
    folder = asked()
    state = serve(folder, Warm(), "package")
    assert (state.status, state.detail) == ("interrupted", "what was finished is in its folder")
    assert read(folder).result["prompts"] == 1


@pytest.mark.parametrize(
    ("error", "status", "detail", "traced"),
    [
        (ValueError("of no\nvalue"), "failed", "ValueError: of no value", True),
        (SystemExit(3), "failed", "the cell called sys.exit(3)", True),
        (MemoryError(), "out_of_memory", "MemoryError", True),
        (UserError("no such model"), "refused", "no such model", False),
        (KeyboardInterrupt(), "interrupted", "nothing of it was finished", False),
    ],
)
def test_what_a_cell_raises_is_its_status(
    error: BaseException,
    status: str,
    detail: str,
    traced: bool,
    asked: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def execute(*args: Any, **kwargs: Any) -> None:
        running = read(folder, live=True).state
        assert (running.status, running.pid, running.code) == ("running", os.getpid(), code_digest("package"))
        raise error

    folder = asked()
    monkeypatch.setattr(worker, "execute", execute)
    state = serve(folder, Warm(), "package")
    assert (state.status, state.detail) == (status, detail)
    assert read(folder).state == state
    assert ("Traceback" in capsys.readouterr().err) == traced


def test_a_cell_whose_yaml_is_gone_is_refused(asked: Any):
    folder = asked(config_dirs=("/nowhere",))
    assert serve(folder, Warm(), "package").detail.startswith("--config-dir /nowhere is no folder")
    assert isinstance(read(folder).state, State)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("shapes do not agree"), "failed"),
        (ValueError("the task is out of memory questions"), "failed"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed"),
    ],
)  # fmt: skip
def test_memory_that_runs_out(error: BaseException, status: str):
    assert verdict(error)[0] == status


def test_memory_that_really_runs_out():
    with pytest.raises(RuntimeError) as raised:
        torch.Tensor(2**62 // 4)
    assert verdict(raised.value)[0] == "out_of_memory"


def test_a_job_is_json_alone(asked: Any):
    """A cluster's scheduler hands it over as a file."""
    job = json.loads((asked() / "job.json").read_text())
    assert set(job) == {
        "key", "label", "job", "overrides", "config_dirs", "threads", "group", "sweep",
    }  # fmt: skip
