"""result.json, schema 1: which keys, that they follow from the log, and that files are whole or absent."""

import errno
import math
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab import __version__, load_runs
from decodelab.attention.layout import uniform
from decodelab.experiments import files
from decodelab.experiments import result as module
from decodelab.experiments.compose import compose
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.measure import measure
from decodelab.experiments.result import build_result, provenance, run_key, speedup, write_atomic
from decodelab.tests.checkout import ROOT
from decodelab.tests.decoding.model.checkpoints import edit_json, save_folder, tiny_model
from decodelab.tests.experiments.schema import ADDED, ANSWER, DIVERGENCE, SAMPLE, SCHEMA, SIDE, at
from decodelab.tests.experiments.tiny_lab import PROMPTS, texts, tiny_lab


@pytest.mark.parametrize("timing", ["paired", "untimed"])
def test_the_schema(timing: str, bench: Any):
    """Every command writes the same keys; what it does not know is null."""
    assert bench.run(f"timing={timing}") == 0
    result = bench.result
    for path, keys in SCHEMA.items():
        assert set(at(result, path)) == keys | ADDED.get(path, set()), path
    assert (result["schema"], result["status"], result["prompts"]) == (1, "done", 6)
    assert result["implementation"]["linear"]
    names = ("quality", "compare_hf", "predicted_speedup", "profile", "replay")
    assert [result[name] for name in names] == [None] * len(names)
    for sample in bench.lines("samples.jsonl"):
        assert (set(sample), set(sample["baseline"]), set(sample["strategy"])) == (SAMPLE, ANSWER, ANSWER)
        assert len(sample["prompt_ids"]) == sample["prompt_tokens"]
        assert sample["max_new_tokens"] == 12
        assert bool(sample["documents"]) == (sample["id"] == "ask")
    if timing == "untimed":
        names = (SIDE | {"burst"}) - {"tokens"}
        unknown = [result[side][name] for side in ("baseline", "strategy") for name in names]
        unknown += [v for path in ("speedup", "end_to_end_speedup", "decode", "prefill") for v in result[path].values()]
        unknown += [*result["strategy"]["time_share"].values(), *result["by_category"]["copy"]["speedup"].values()]
        assert unknown == [None] * len(unknown)
        assert result["baseline"]["kind"] == "plain decoder"
    else:
        assert result["speedup"]["n"] == 6
        assert result["by_category"]["copy"]["speedup"]["low"] is None  # of 3 prompts there is no interval
        assert 0 < result["speedup"]["low"] <= result["speedup"]["value"] <= result["speedup"]["high"]


def test_a_divergence_in_it(bench: Any, sabotage: Any):
    sabotage()
    assert bench.run("timing=untimed") == 1
    divergences = bench.result["exactness"]["divergences"]
    assert divergences
    for d in divergences:
        assert set(d) == DIVERGENCE
    assert divergences == [row["divergence"] for row in bench.lines("samples.jsonl") if row["divergence"]]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_numbers_follow_from_the_log(batch: int, bench: Any):
    """events.jsonl and samples.jsonl alone give every headline number again."""
    assert bench.run(f"batch={batch}") == 0
    result, samples = bench.result, bench.lines("samples.jsonl")
    events = bench.lines("events.jsonl")
    steps = [e for e in events if e["side"] == "strategy" and e["event"] == "step"]
    drafted = [s for s in steps if s["depth"]]
    ours = result["strategy"]
    assert ours["tokens"] == sum(len(s["strategy"]["tokens"]) for s in samples)
    assert ours["tokens"] == sum(s["emitted"] for s in steps) + len(samples)
    assert ours["tokens_per_step"] == sum(s["emitted"] for s in steps) / len(steps)
    assert ours["acceptance_rate"] == sum(s["accepted"] for s in drafted) / sum(s["depth"] for s in drafted)
    assert ours["rows_verified_per_step"] == sum(s["verified"] for s in steps) / len(steps)
    assert ours["accepted_by_source"] == {"prompt_lookup": sum(s["accepted"] for s in steps)}
    assert ours["accepted_by_source"]["prompt_lookup"] == sum(len(s["sources"]) for s in steps) > 0
    phases = ("draft", "verify", "accept", "commit", "other")
    seconds = {phase: sum(s[f"{phase}_s"] / s["batch"] for s in steps) for phase in phases}
    for phase in phases:
        assert ours["time_share"][phase] == pytest.approx(seconds[phase] / sum(seconds.values()))

    units: dict[int, list[dict[str, Any]]] = {}
    for s in samples:
        units.setdefault(s["batch"], []).append(s)
        own = [e for e in steps if e["id"] == s["id"]]
        assert [[e["at_s"], e["emitted"]] for e in own] == s["strategy"]["delivered"][1:]
    assert {len(unit) for unit in units.values()} <= {1, batch}
    rate, whole = {}, {}
    for side in ("baseline", "strategy"):
        rows = [s[side] for s in samples]
        n = [len(row["tokens"]) for row in rows]
        assert result[side]["ttft_s"] == pytest.approx(sum(row["ttft_s"] for row in rows) / len(rows))
        assert result[side]["latency_s"] == pytest.approx(sum(row["latency_s"] for row in rows) / len(rows))
        decode = sum(row["latency_s"] - row["ttft_s"] for row in rows)
        assert result[side]["tpot_s"] == pytest.approx(decode / (sum(n) - len(n)))
        gaps = [b[0] - a[0] for row in rows for a, b in zip(row["delivered"], row["delivered"][1:], strict=False)]
        assert result[side]["itl_p50_s"] == pytest.approx(torch.tensor(gaps).double().quantile(0.5).item())
        ends = [(max(s[side]["latency_s"] for s in u), max(s[side]["ttft_s"] for s in u)) for u in units.values()]
        rate[side] = sum(last - first for last, first in ends) / (sum(n) - len(n))
        whole[side] = sum(last for last, _ in ends) / sum(n)
    assert result["speedup"]["value"] == pytest.approx(rate["baseline"] / rate["strategy"])
    assert result["end_to_end_speedup"]["value"] == pytest.approx(whole["baseline"] / whole["strategy"])
    assert result["speedup"]["n"] == len(units)


def test_a_prompt_of_one_token_is_in_end_to_end_alone(bench: Any):
    """Nothing was decoded after its prefill, so it has no speed."""
    assert bench.run("task.max_new_tokens=1") == 0
    result = bench.result
    assert result["speedup"] == {"value": None, "low": None, "high": None, "n": 0}
    assert result["end_to_end_speedup"]["n"] == 6
    assert (result["strategy"]["tpot_s"], result["strategy"]["tokens_per_step"]) == (None, None)
    assert (result["decode"]["mbu"], result["decode"]["mbu_textbook"]) == (None, None)
    assert result["memory"]["kv_bytes"] is None
    assert all(row["strategy"]["tpot_s"] is None for row in bench.lines("samples.jsonl"))


def test_the_key_names_what_is_measured(checkpoint: Path, tmp_path: Path):
    digests = {"weights": "w", "draft": None, "task": "t"}
    resolved = compose([f"model.path={checkpoint}"]).resolved
    key = run_key(resolved, digests)
    assert key == run_key(compose([f"model.path={checkpoint}", f"output={tmp_path}"]).resolved, digests)
    others = [
        run_key(compose([f"model.path={checkpoint}", word]).resolved, digests)
        for word in ("seed=1", "batch=2", "dtype=float64", "drafting=none", "acceptance=sampling", "task.limit=3")
    ]
    others += [run_key(resolved, digests | {name: "other"}) for name in digests]
    assert len({key, *others}) == 1 + len(others)


def test_other_weights_and_other_prompts_change_the_key(bench: Any, private: Path):
    def key(*words: str, **options: Any) -> str:
        shutil.rmtree(bench.folder, ignore_errors=True)
        assert bench.run("timing=untimed", *words, **options) == 0
        return bench.result["key"]

    copy = shutil.copytree(bench.checkpoint, private / "model")
    keys = [key(f"model.path={copy}"), key(f"model.path={copy}", rows=[{"id": "x", "prompt": "ab ab"}])]
    save_folder(copy, tiny_model(hidden_size=64))
    keys.append(key(f"model.path={copy}"))
    assert len(set(keys)) == 3


def test_provenance():
    import platform

    import transformers

    found = provenance(torch.bfloat16, 3, device="a device", load_before=0.5)
    assert found["version"] == __version__
    assert (found["python"], found["torch"]) == (platform.python_version(), torch.__version__)
    assert found["transformers"] == transformers.__version__
    assert (found["device"], found["threads"], found["dtype"], found["seed"]) == ("a device", 1, "bfloat16", 3)
    assert found["load_before"] == 0.5
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert found["commit"] == head.strip()
        assert found["dirty"] in (True, False)


def test_an_installed_package_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Least of all that of a repository whose .venv it lies in."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    (tmp_path / "decodelab" / "experiments").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "decodelab" / "experiments" / "result.py"))
    found = provenance(torch.float32, 0, device="a device")
    assert (found["commit"], found["dirty"]) == (None, None)


def test_a_run_s_provenance(bench: Any):
    assert bench.run("seed=4", "dtype=float64", "timing=untimed") == 0
    found = bench.result["provenance"]
    assert (found["dtype"], found["dtype_reason"], found["seed"]) == ("float64", "as asked", 4)
    assert found["threads"] == 1
    assert "1 thread," in found["device"]
    assert found["started_at"].endswith("+00:00")
    assert found["load_before"] is None or found["load_before"] >= 0


def test_the_cache_s_bytes_are_the_formula_s(bench: Any):
    assert bench.run("batch=2") == 0
    memory = bench.result["memory"]
    per_token = uniform(2, kv_heads=2, head_dim=8).bytes_per_token(itemsize=4)
    assert memory["kv_bytes_per_token"] == per_token == 2 * 2 * 2 * 8 * 4
    assert memory["kv_bytes"] == memory["kv_bytes_formula"] > 0
    assert memory["kv_bytes"] % (2 * per_token) == 0  # two sequences side by side
    stored = tiny_model().state_dict()
    assert memory["weights_bytes"] == sum(w.numel() * 4 for name, w in stored.items() if w.dim() > 1)
    assert memory["peak_bytes"] > memory["weights_bytes"]


def test_a_tied_embedding_counts_as_often_as_it_is_held(bench: Any, private: Path):
    tied = save_folder(private / "tied", tiny_model(tie_word_embeddings=True))
    assert bench.run(f"model.path={tied}", "dtype=float64") == 0  # no packed products in float64: held once
    stored = tiny_model(tie_word_embeddings=True).state_dict()
    once = {w.data_ptr(): w.numel() * 8 for w in stored.values() if w.dim() > 1}
    assert bench.result["memory"]["weights_bytes"] == sum(once.values())


@pytest.mark.parametrize("batch", [1, 3])
def test_bandwidth_and_operations(batch: int, private: Path):
    """MBU of each side, from the bytes that its steps read: the weights once a step, each sequence's committed KV."""
    lab, peaks = tiny_lab(), Peaks(1e9, 1e9)
    task = texts(*PROMPTS, tokens=9)
    measured = measure(lab, *task, seed=0, batch=batch, timing="paired")
    for unit, sample in enumerate(measured.samples):
        for side, plain in (("baseline", 1.0), ("strategy", 2.0)):
            g = getattr(sample, side)
            steps = 8 if side == "baseline" else 4  # 8 tokens after the first, one or two a step
            tokens = 8 // steps
            first = 10.0 * (unit + 1) if batch == 1 else 30.0
            g.delivered = [(first, 1), *((first + plain * i, tokens) for i in range(1, steps + 1))]
            g.prefill = g.prefill and type(g.prefill)(0, g.prefill.tokens, 0.5, 0.0)
    result = build_result(
        {}, lab, measured, digests={}, provenance={}, peaks=peaks, peak_bytes=None, warnings=[]
    )  # fmt: skip
    weights, kv = lab.target.weight_bytes, lab.target.config.layout.bytes_per_token(4)
    lengths = [len(s.prompt) for s in measured.samples]
    passes = 3 if batch == 1 else 1  # each batch reads the weights for itself
    for name, steps, tokens, plain in (("mbu_baseline", 8, 1, 1.0), ("mbu", 4, 2, 2.0)):
        read = passes * steps * weights + kv * sum(n + tokens * i for n in lengths for i in range(steps))
        assert result["decode"][name] == pytest.approx(read / (passes * steps * plain * 1e9))
    assert result["decode"]["mbu_textbook"] == pytest.approx(weights * (8 / 8.0) / 1e9)
    assert result["decode"]["peak"] == "measured"
    dim, inner, heads, V = 32, 48, 4, 61
    products = 2 * (dim * (32 + 16 + 16) + 32 * dim + 3 * dim * inner)  # of two layers
    flops = sum(n * (2 * products + 4 * 2 * heads * 8 * n / 2) + 2 * dim * V for n in lengths)
    assert result["prefill"]["mfu_useful"] == pytest.approx(flops / (3 * 0.5 * 1e9))
    assert result["prefill"]["mfu_hardware"] == result["prefill"]["mfu_useful"]


def test_a_batch_s_speed_is_that_of_its_slowest(private: Path):
    """Two sequences of 5 and 3 tokens end after 9 s and 5 s; their prefills ended at 1 s and 2 s."""
    measured = measure(tiny_lab(), *texts("ab", "cd"), seed=0, batch=2, timing="paired")
    for sample, (first, last, n) in zip(measured.samples, [(1.0, 9.0, 5), (2.0, 5.0, 3)], strict=True):
        sample.baseline.tokens = sample.strategy.tokens = [7] * n
        sample.baseline.delivered = [(2 * first, 1), (2 * last, n - 1)]
        sample.strategy.delivered = [(first, 1), (last, n - 1)]
    assert speedup(measured.samples, "decode").value == (18 - 4) / (9 - 2)
    assert speedup(measured.samples, "latency").value == 18 / 9
    assert speedup(measured.samples, "decode").n == 1


def test_write_atomic_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "result.json"
    write_atomic(file, "old")
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~os.umask(os.umask(0o022))  # not private to the writer

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(file, "new and longer")
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["result.json"]
    write_atomic(file, "new")
    assert file.read_text() == "new"


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_full_disk_is_one_line_and_no_result(which: int, bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    written: list[Path] = []
    honest = module.write_atomic

    def full(path: Path, text: str) -> None:
        written.append(path)
        if len(written) == which:
            monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        honest(path, text)

    for where in (module, files):
        monkeypatch.setattr(where, "write_atomic", full)
    assert bench.run("timing=untimed") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("decodelab")]
    assert errors == [
        "decodelab: error: the disk is full: a file of the run was not written whole; "
        "free some space, or name another disk with output=DIR"
    ]
    assert [path.name for path in written] == ["events.jsonl", "samples.jsonl", "result.json"][:which]
    assert sorted(f.name for f in bench.folder.iterdir()) == sorted(path.name for path in written[:-1])


def test_load_runs_reads_it_back(bench: Any):
    assert bench.run() == 0
    frame, result = load_runs(bench.folder), bench.result
    (row,) = frame.to_dict("records")
    assert row["folder"] == str(bench.folder)
    assert (row["key"], row["exactness.verdict"]) == (result["key"], "exact")
    for name in ("strategy.tokens_per_step", "speedup.value", "baseline.kind", "by_category.copy.speedup.value"):
        assert row[name] == at(result, name)
    assert row["strategy.acceptance_by_position"] == result["strategy"]["acceptance_by_position"]


def test_timed_and_untimed_runs_are_one_frame(bench: Any, private: Path):
    assert bench.run("output=runs/a") == 0
    assert bench.run("output=runs/b", "timing=untimed", "drafting=none") == 0
    frame = load_runs(private / "runs")
    assert list(frame["exactness.verdict"]) == ["exact", "exact"]
    first, second = frame["speedup.value"]
    assert first > 0
    assert math.isnan(second)


def test_another_configuration_of_the_model_is_another_run(bench: Any, private: Path):
    """Its weights are the same; tokens remembered for the other one are not its own."""
    copy = shutil.copytree(bench.checkpoint, private / "model")
    assert bench.run("timing=untimed", f"model.path={copy}") == 0
    shutil.rmtree(bench.folder)
    edit_json(copy / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert bench.run("timing=untimed", f"model.path={copy}") == 0
    assert bench.result["exactness"]["verdict"] == "exact"
