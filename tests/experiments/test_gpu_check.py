"""What can be known of the GPU's check without one: its arithmetic, its JSON, and that every section runs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.decoding.model.fetch import NotHere
from decodelab.experiments.gpu_check import __main__ as gpu_check
from decodelab.experiments.gpu_check import models
from decodelab.experiments.gpu_check.bars import BARS, Bar, judged
from decodelab.experiments.gpu_check.lab import Call, Lab

pytest.importorskip("triton", reason="kernels are interpreted by triton")


def lab() -> Lab:
    def seconds(calls: Sequence[Call]) -> float:
        for call in calls:
            call()
        return 1e-3

    return Lab(torch.device("cpu"), torch.float32, seconds, 1e9, 2**10, 2**30, tiny=True)


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_every_section_has_bars_and_fits() -> None:
    assert {bar.section for bar in BARS} == set(gpu_check.SECTIONS)
    assert gpu_check.LIMIT_S < 480


def bar(name: str) -> Bar:
    (found,) = (bar for bar in BARS if bar.name.startswith(name))
    return found


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "rope is",
            [{"op": "rope", "error": 1e-3, "bound": 1e-3}],
            [{"op": "rope", "error": float("nan"), "bound": 1.0}],
        ),
        ("matmul_w4 at", [{"bits": 4, "seconds": 1.15, "floor_s": 1.0}], [{"bits": 4, "seconds": 1.2, "floor_s": 1.0}]),
        (
            "verify_attention at one",
            [{"rows": 1, "seconds": 1.0, "alternatives": {"flash": 1.0, "masked": 3.0}}],
            [{"rows": 1, "seconds": 1.0, "alternatives": {"flash": 0.9, "masked": 3.0}}],
        ),
        (
            "verify_attention at trees",
            [{"rows": 8, "seconds": 1.0, "alternatives": {"flash": 1.1}}],
            [{"rows": 8, "seconds": 1.0, "alternatives": {"flash": 1.0}}],
        ),
        (
            "prefill",
            [{"seconds": 1.0, "alternatives": {"sdpa": 0.95}}],
            [{"seconds": 1.0, "alternatives": {"sdpa": 0.94}}],
        ),
        ("plain decoding", [{"model": "random", "of_bandwidth": 0.85}], [{"model": "random", "of_bandwidth": 0.84}]),
        (
            "a replayed",
            [{"mode": "exact", "replayed": 1.0}, {"mode": "fast", "replayed": 0.0}],
            [{"mode": "exact", "replayed": 0.8}],
        ),
        ("T(8)", [{"model": "random", "t8": 1.1}], [{"model": "random", "t8": 1.2}]),
        (
            "greedy",
            [{"mode": "exact", "exact": 1.0}, {"mode": "fast", "exact": 0.0}],
            [{"mode": "exact", "exact": 0.5}],
        ),
        (
            "a row-invariant",
            [{"model": "random", "mode": m, "step_s": s} for m, s in (("exact", 1.1), ("fast", 1.0))],
            [{"model": "random", "mode": m, "step_s": s} for m, s in (("exact", 1.2), ("fast", 1.0))],
        ),
        ("a real model", [{"mode": "exact", "exact": 1.0}], [{"mode": "exact", "exact": 0.6}]),
    ],
)
def test_bars(name: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]) -> None:
    """The worst row counts; a section that broke off fails whatever it had measured; so does silence."""
    assert judged(bar(name), good, None).passed
    worse = judged(bar(name), [*good, *bad], None)
    assert worse.passed == (name in ("plain decoding", "a row-invariant"))  # of two modes the faster
    assert not judged(bar(name), bad, None).passed
    broken = judged(bar(name), good, "took longer than 9 s")
    assert not broken.passed
    assert broken.line.startswith("FAIL")
    assert "took longer than 9 s" in broken.line
    assert judged(bar(name), [], None).reason in ("nothing was measured", "no model in the cache")


@pytest.mark.parametrize("name", ["matmul", "attention", "prefill", "model"])
def test_sections_run_in_tiny_shapes(name: str, tmp_path: Path) -> None:
    """Their rows are JSON, and say what their bars ask for. (Correctness: tests/kernels/test_checks.py.)"""
    gpu_check.section(name, tmp_path / "rows", lab())
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    for one in BARS:
        if one.section == name:
            assert judged(one, rows, None).value is not None, one.name
    if name == "model":
        assert [row["exact"] for row in rows] == [1.0, 1.0]
        assert all(row["tokens_per_step"] > 1.5 for row in rows)


def test_a_cache_without_models_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(spec: object, *, fetch: bool) -> None:
        assert not fetch
        raise NotHere("a model")

    monkeypatch.setattr(models, "open_source", not_here)
    assert list(models.real_model(lab())) == []
    assert judged(bar("a real model"), [], None).line.startswith("skip")
    assert judged(bar("a real model"), [], "broke").line.startswith("FAIL")


@pytest.mark.parametrize(
    ("code", "limit", "reason"),
    [
        ("raise RuntimeError('out of luck')", 60.0, "RuntimeError: out of luck"),
        ("import time; time.sleep(60)", 2.0, "took longer than 2 s"),
    ],
)
def test_what_a_section_measured_before_it_broke_is_kept(
    code: str, limit: float, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        wrote = f"open({command[-1]!r}, 'w').write('{{\"a\": 1}}\\n{{\"b')"
        return right([sys.executable, "-c", f"f = {wrote}; {code}"], **options)

    right = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    found = gpu_check.in_a_process("matmul", limit)
    assert found.rows == [{"a": 1}]
    assert found.failed == reason


def test_the_whole_is_one_json_and_a_line_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda of: "a GPU")
    monkeypatch.setattr(gpu_check, "in_a_process", lambda name, limit: gpu_check.Measured([], 1.0, "broke"))
    assert gpu_check.main([str(tmp_path / "out.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(BARS) + 1
    assert all(line.startswith("FAIL") for line in lines[:-1])
    said = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in said["bars"]] == [one.name for one in BARS]
    assert set(said["sections"]) == set(gpu_check.SECTIONS)
    assert said["device"] == "a GPU"
