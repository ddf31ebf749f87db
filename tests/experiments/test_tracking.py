"""tracking=wandb: real offline runs read back from their files, and what happens where wandb fails."""

import importlib.machinery
import json
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from decodelab.decoding.training import Schedule
from decodelab.errors import UserError
from decodelab.experiments import weights_and_biases
from decodelab.experiments.cli import main
from decodelab.experiments.lab import Lab
from decodelab.experiments.measure import measure
from decodelab.experiments.result import by_category, speedup
from decodelab.experiments.tracking import RunInfo, Running, Tracker, Tracking, Untracked
from decodelab.experiments.weights_and_biases import COLUMNS, Mirror, WeightsAndBiases, flat
from decodelab.tests.experiments.tiny_lab import PROMPTS, texts, tiny_lab

OFFLINE = ("tracking=wandb", "tracking.mode=offline")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a login, to see that nothing is written there."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(name)
    found = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(found))
    return found


@dataclass
class Written:
    """What a `.wandb` file holds."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)  # name: {path in it: the file}
    exit_code: int | None = None


def read(folder: Path) -> Written:
    """Of a run that is finished: wandb's process writes its end a moment after finish() has returned."""
    (file,) = folder.glob("*.wandb")
    for _ in range(600):
        found = _parsed(file.read_bytes())
        if found.exit_code is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file} has no end")


def _parsed(data: bytes) -> Written:
    """A LevelDB log behind a header of 7 bytes: blocks of 32 KiB of (crc u32, length u16, kind u8, bytes)."""
    at, body, out = 7, b"", Written()
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left  # padding
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        body, at = body + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            _add(out, Record.FromString(body))
            body = b""
    return out


def _add(out: Written, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        out.run = record.run
    for item in [*record.run.config.update, *record.config.update]:
        out.config[item.key] = json.loads(item.value_json)
    for item in record.summary.update:
        out.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    if kind == "history":
        row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        out.history.append(row)
    if kind == "artifact":
        out.artifacts[record.artifact.name] = {c.path: c.local_path for c in record.artifact.manifest.contents}
    if kind == "exit":
        out.exit_code = record.exit.exit_code


def runs(root: Path) -> list[Path]:
    return sorted(root.glob("wandb/offline-run-*"), key=lambda folder: folder.name.split("-", 3)[3])


def test_a_run_is_mirrored(bench: Any, home: Path, capsys: pytest.CaptureFixture[str]):
    """Config, summary, history, table and artifact; no word of wandb's, no file elsewhere, no other environment."""
    before = dict(os.environ)
    assert bench.run(*OFFLINE, "tracking.tags=[a,b]", "seed=3") == 0
    assert {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"} == before  # that one wandb sets itself
    assert list(home.iterdir()) == []
    told = capsys.readouterr()
    assert "wandb" not in told.err
    assert "wandb" not in told.out.replace(str(bench.folder), "")
    assert sorted(f.name for f in bench.folder.iterdir()) == [
        "events.jsonl", "result.json", "samples.jsonl", "wandb"
    ]  # fmt: skip

    (folder,) = runs(bench.folder)
    found, result = read(folder), bench.result
    assert re.fullmatch(rf"{result['key']}-[0-9a-f]{{8}}", found.run.run_id)
    assert found.run.project == "decodelab"
    assert (found.run.run_group, found.run.job_type) == ("", "speed")
    assert found.run.display_name == "tiny: prompt_lookup, greedy, task"
    assert list(found.run.tags) == ["a", "b"]
    assert found.exit_code == 0

    made = found.config.pop("provenance")
    assert {name: result["provenance"][name] for name in made} == made
    assert made.keys() >= {"commit", "device", "torch", "transformers", "version"}
    assert found.config.pop("digests") == result["digests"]
    assert (found.config.pop("key"), found.config.pop("sweep_id"), found.config.pop("_wandb")) == (
        result["key"],
        None,
        {},
    )
    assert found.config == result["config"]

    expected = flat(result)
    assert {name: found.summary[name] for name in expected} == expected
    assert expected["speedup/value"] == result["speedup"]["value"]
    assert expected["accept/tokens_per_step"] == result["strategy"]["tokens_per_step"]
    assert expected["category/copy/acceptance_rate"] == result["by_category"]["copy"]["acceptance_rate"]
    assert expected["accept/position/2"] == result["strategy"]["acceptance_by_position"][1]["rate"]
    assert "speedup/predicted" not in expected  # null in the result
    assert found.summary["status"] == "done"

    *rows, last = found.history
    assert [row["prompt"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["running/speedup"] == pytest.approx(result["speedup"]["value"])
    assert rows[-1]["running/tokens_per_step"] == pytest.approx(result["strategy"]["tokens_per_step"])
    assert rows[-1]["running/acceptance_rate"] == pytest.approx(result["strategy"]["acceptance_rate"])
    assert rows[-1]["running/identical"] == 1

    table = json.loads((folder / "files" / last["prompts.path"]).read_text())
    samples = bench.lines("samples.jsonl")
    assert table["columns"] == list(COLUMNS)
    assert [row[0] for row in table["data"]] == [s["id"] for s in samples]
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    steps = [e for e in bench.lines("events.jsonl") if (e["id"], e["side"], e["event"]) == ("copy", "strategy", "step")]
    assert first == {
        "id": "copy",
        "category": "copy",
        "speedup": pytest.approx(samples[0]["baseline"]["tpot_s"] / samples[0]["strategy"]["tpot_s"]),
        "tokens_per_step": pytest.approx(11 / len(steps)),
        "accepted": sum(e["accepted"] for e in steps),
        "baseline": samples[0]["baseline"]["text"],
        "strategy": samples[0]["strategy"]["text"],
        "divergence": None,
    }
    files = found.artifacts[f"{found.run.run_id}-files"]
    assert files == {name: str(bench.folder / name) for name in ("events.jsonl", "samples.jsonl")}


TRAIN = (
    "train", "train=medusa", "train.heads=2", "train.schedule.held_back=2", "train.schedule.batch=2", "device=cpu",
    "train.schedule.every=4", "train.schedule.epochs=4", "task.max_new_tokens=12", "dtype=float32", "threads=1",
)  # fmt: skip


def training(bench: Any, *words: str) -> int:
    task = bench.root / "prompts.jsonl"
    task.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"{n} ab {n} ab {n}"}) + "\n" for n in range(8)))
    return main([*TRAIN, f"task.path={task}", f"model.path={bench.checkpoint}", f"output={bench.folder}", *words])


def test_a_training_is_mirrored(bench: Any):
    """A row a validation, the loss and the learning rate between them, the best row in the summary, and what it wrote;
    one that goes on tells the rows of before again."""
    assert training(bench, *OFFLINE) == 0
    (folder,) = runs(bench.folder)
    found = read(folder)
    course = json.loads((bench.folder / "course.json").read_text())
    assert (found.run.job_type, found.run.display_name, found.exit_code) == ("train", "medusa for tiny, prompts", 0)
    assert found.config["train"]["heads"] == 2
    assert found.config["dtype"] == "float32"
    assert found.config["digests"] == course["digests"]

    steps = [row for row in found.history if "step/loss" in row]
    assert [row["step"] for row in steps] == [10]
    assert steps[0]["step/learning_rate"] == Schedule().rate(9, 12)
    rows = [row for row in found.history if "value" in row]
    assert [row["step"] for row in rows] == [4, 8, 12]
    best = course["rows"][course["best"]]
    for row, known in zip(rows, course["rows"], strict=True):
        for name in ("step", "seconds", "tokens", "loss", "value", "tokens_per_step", "predicted_speedup"):
            assert row[name] == known[name]
        assert [row.get(f"acceptance/{n}") for n in (1, 2)] == known["acceptance"]
    parts = best.keys() - {"acceptance"}
    assert {name: found.summary[f"best/{name}"] for name in parts} == {name: best[name] for name in parts}
    assert found.summary["status"] == "done"
    assert found.summary["peak_memory_bytes"] == course["peak_memory_bytes"]
    files = found.artifacts[f"{found.run.run_id}-files"]
    assert files == {name: str(bench.folder / name) for name in ("course.json", "medusa.safetensors")}


def test_a_training_goes_on_where_wandb_fails(fake: "Fake", bench: Any, capsys: pytest.CaptureFixture[str]):
    fake.fails = {"log": RuntimeError()}
    assert training(bench, *OFFLINE) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warned == [
        "decodelab: warning: wandb could not log a row (RuntimeError); the run goes on, its files hold everything"
    ]
    assert fake.calls.count("log") == 1
    fake.fails = {}
    assert training(bench, *OFFLINE) == 0
    assert [row["step"] for row in fake.logged] == [4, 8, 12]
    assert (fake.summary["status"], fake.finished) == ("done", [0, 0])


def test_a_training_that_is_wrong_is_refused_before_it_begins(bench: Any, capsys: pytest.CaptureFixture[str]):
    assert training(bench, "tracking=wandb", "tracking.mode=online") == 2
    assert "tracking.mode=online needs a login" in capsys.readouterr().err
    assert not bench.folder.exists()


def info(folder: Path, **changes: Any) -> RunInfo:
    made = RunInfo("c0ffee", "tiny: none", "speed", folder, {"seed": 1}, {"weights": "w"}, {"commit": None})
    return replace(made, **changes)


def result(status: str = "done", **changes: Any) -> dict[str, Any]:
    names = {path.partition(".")[0] for path in weights_and_biases.SUMMARY.values()} | {"compare_hf", "quality"}
    return dict.fromkeys(names) | {"by_category": {}, "status": status} | changes


def test_two_sweeps_of_one_config_are_two_runs(tmp_path: Path):
    """Open side by side in one process, each keeps its own config, history and summary (wandb#7227, wandb#1314); one
    that ends in an exception says so."""
    settings = WeightsAndBiases(mode="offline", dir=str(tmp_path / "here"), project="mine")
    broken = settings.open(info(tmp_path, sweep="night 2", config={"seed": 2}))
    with settings.open(info(tmp_path, sweep="night-1")) as one:

        def side_by_side() -> None:
            with broken:
                for i in range(3):
                    one.row({"prompt": i, "running/speedup": 1.0})
                    broken.row({"prompt": i, "running/speedup": None})
                raise ValueError("a bug\nof two lines")

        with pytest.raises(ValueError, match="a bug"):
            side_by_side()
        one.done(result("broken"))
    assert (*one.warnings, *broken.warnings) == ()
    first, second = map(read, runs(tmp_path / "here"))
    assert (first.run.run_id, first.run.run_group) == ("c0ffee-night-1", "night-1")
    assert (second.run.run_id, second.run.run_group) == ("c0ffee-night-2", "night 2")
    assert [(f.config["key"], f.config["seed"], f.run.project) for f in (first, second)] == [
        ("c0ffee", 1, "mine"), ("c0ffee", 2, "mine")
    ]  # fmt: skip
    assert [row["running/speedup"] for row in first.history[:3]] == [1.0, 1.0, 1.0]
    assert [row["prompt"] for row in second.history] == [0, 1, 2]
    assert "running/speedup" not in second.summary
    assert (first.summary["status"], first.exit_code) == ("broken", 1)
    assert (second.summary["status"], second.exit_code) == ("failed", 1)
    assert second.summary["error"] == "a bug of two lines"


@dataclass
class Fake:
    """A stand-in for wandb.init and the run that it returns. `fails`: names of calls, and what each raises."""

    fails: Mapping[str, BaseException] = field(default_factory=dict)
    inits: list[tuple[str, str]] = field(default_factory=list)  # id, mode
    logged: list[Mapping[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    taken: tuple[str, ...] = ()  # ids that the server knows
    id: str = ""

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def init(self, *, id: str, mode: str, **more: Any) -> "Fake":
        assert (more["resume"], more["reinit"]) == ("never", "create_new")
        self.inits.append((id, mode))
        self._call(mode)
        if id in self.taken:
            raise wandb.errors.UsageError(f"Run ({id}) already exists, but your `resume` setting …")
        self.id = id
        return self

    def define_metric(self, *args: Any, **options: Any) -> None: ...
    def log_artifact(self, artifact: wandb.Artifact) -> None: ...
    def log(self, row: Mapping[str, Any]) -> None:
        self._call("log")
        self.logged.append(row)

    def finish(self, exit_code: int) -> None:
        self._call("finish")
        self.finished.append(exit_code)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(wandb, "init", made.init)
    return made


def test_an_id_is_used_once(fake: Fake, tmp_path: Path):
    """Not that of an offline run here or in a folder beside it, and not one that the server knows."""
    for folder in ("b/wandb/offline-run-20260102_030405-c0ffee-s", "a/wandb/run-20260102_030405-c0ffee-s-2"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a/wandb/run-20260102_030405-x-c0ffee-s-3").mkdir()  # another id
    cell = info(tmp_path / "b", sweep="s")
    with WeightsAndBiases(mode="offline").open(cell):
        pass
    fake.taken = ("c0ffee-s", "c0ffee-s-2", "c0ffee-s-3", "c0ffee-s-4")
    with WeightsAndBiases(mode="online", dir=str(tmp_path / "c")).open(cell) as tracker:
        pass
    assert fake.inits[0] == ("c0ffee-s-3", "offline")
    assert fake.inits[1:] == [(f"c0ffee-s{suffix}", "online") for suffix in ("", "-2", "-3", "-4", "-5")]
    assert list(tracker.warnings) == []


def test_runs_by_themselves_never_share_an_id(fake: Fake, tmp_path: Path):
    """Neither folder knows of the other, and both are uploaded to one project later."""
    for folder in ("a/run", "b/run"):
        with WeightsAndBiases(mode="offline").open(info(tmp_path / folder)):
            pass
    first, second = (run_id for run_id, _ in fake.inits)
    assert first != second
    assert all(re.fullmatch(r"c0ffee-[0-9a-f]{8}", run_id) for run_id in (first, second))


def test_a_server_that_is_out_of_reach_leaves_an_offline_run(fake: Fake, tmp_path: Path, capsys: Any):
    fake.fails = {"online": wandb.errors.CommError("no such\n host")}
    with WeightsAndBiases(mode="online").open(info(tmp_path)) as tracker:
        tracker.row({"prompt": 1, "running/speedup": None})
        tracker.done(result())
    line = "wandb did not start online (no such host): the run is recorded offline"
    assert list(tracker.warnings) == [line]
    assert capsys.readouterr().err == f"decodelab: warning: {line}\n"
    (online, first), (offline, second) = fake.inits
    assert (first, second) == ("online", "offline")
    assert offline == f"{online}-2"  # the start that failed still holds its id
    assert fake.logged[0] == {"prompt": 1}
    assert fake.finished == [0]


@pytest.mark.parametrize(
    ("fails", "warnings"),
    [
        ({"offline": OSError("No space left")}, ["start a run (No space left)"]),
        ({"log": RuntimeError()}, ["log a row (RuntimeError)", "log the table of prompts (RuntimeError)"]),
        ({"finish": TimeoutError("too\nslow")}, ["finish the run (too slow)"]),
    ],
)
def test_what_fails_in_wandb_ends_no_run(
    fails: Mapping[str, BaseException], warnings: Sequence[str], fake: Fake, bench: Any
):
    """Its line stands in result.json, whenever it came; prompts are tried once."""
    fake.fails = fails
    assert bench.run(*OFFLINE, "timing=untimed") == 0
    assert bench.result["warnings"] == [
        f"wandb could not {w}; the run goes on, its files hold everything" for w in warnings
    ]
    assert bench.result["status"] == "done"
    assert fake.calls.count("log") == (0 if "offline" in fails else 2 if "log" in fails else 7)
    assert fake.finished == ([0] if "log" in fails else [])


def test_an_interrupted_run_is_finished_as_one(fake: Fake, bench: Any, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C keeps what there is; before the first prompt, and in a part that fails, the run ends all the same."""
    honest, seen = Lab.strategy, []

    def strategy(self: Lab, *args: Any, **options: Any) -> Any:
        seen.append(args)
        if len(seen) in (3, 4):
            raise KeyboardInterrupt
        return honest(self, *args, **options)

    monkeypatch.setattr(Lab, "strategy", strategy)
    assert bench.run(*OFFLINE, "timing=untimed") == 130
    assert (fake.summary["status"], fake.summary["exactness/prompts"], fake.finished) == ("interrupted", 2, [1])
    assert "error" not in fake.summary
    assert [row["prompt"] for row in fake.logged[:-1]] == [1, 2]
    assert bench.run(*OFFLINE, "timing=untimed", "output=other") == 130
    assert (fake.summary["status"], fake.summary["error"]) == ("interrupted", "KeyboardInterrupt")
    assert bench.run(*OFFLINE, "timing=untimed", "output=third", rows=[{"prompt": "a" * 200}]) == 2
    assert fake.summary["status"] == "failed"
    assert "the prompt has 200 tokens" in fake.summary["error"]
    assert fake.finished == [1, 1, 1]


def test_a_table_has_so_many_rows(fake: Fake, bench: Any):
    assert bench.run(*OFFLINE, "timing=untimed", "tracking.rows=2") == 0
    table = fake.logged[-1]["prompts"]
    assert [row[0] for row in table.data] == ["copy", "count"]
    assert [row[2] for row in table.data] == [None, None]  # nothing was timed


def test_quality_has_a_name_a_task_and_metric():
    score = {"value": 0.5, "low": 0.25, "high": None, "n": 8}
    found = flat(result(quality={"tasks": {"arc": {"metrics": {"acc": score}}}, "against": None}))
    assert found == {"status": "done", "quality/arc/acc": 0.5, "quality/arc/acc/low": 0.25}


@pytest.mark.parametrize("batch", [1, 2])
def test_the_last_row_says_what_the_result_says(batch: int):
    task, settings = texts(*PROMPTS)
    running, rows = Running(), []

    def after(samples: Any) -> None:
        sides = [s.baseline for s in samples], [s.strategy for s in samples]
        rows.append(running.add(*sides, sum(s.divergence is None for s in samples), True))

    found = measure(tiny_lab(), task, settings, seed=0, batch=batch, timing="paired", after=after)
    numbers = [row["prompt"] for unit in rows for row in unit]
    assert (numbers, [len(unit) for unit in rows]) == ([1, 2, 3], [1, 1, 1] if batch == 1 else [2, 1])
    (whole,) = by_category(found.samples, timed=False).values()
    assert rows[-1][-1] == {
        "prompt": 3,
        "running/speedup": pytest.approx(speedup(found.samples, "decode").value),
        "running/tokens_per_step": pytest.approx(whole["tokens_per_step"]),
        "running/acceptance_rate": pytest.approx(whole["acceptance_rate"]),
        "running/identical": 1.0,
    }


def test_an_untimed_row_has_no_speedup():
    task, settings = texts("ab ab ab")
    (sample,) = measure(tiny_lab(), task, settings, seed=0, batch=1, timing="untimed").samples
    (row,) = Running().add([sample.baseline], [sample.strategy], 0, False)
    assert (row["running/speedup"], row["running/identical"]) == (None, 0.0)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["check", "tracking=wandb", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("decodelab: error: ")


def test_what_cannot_work_is_one_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    login = "tracking.mode=online needs a login to https://"
    assert refusal(capsys).startswith(login)
    assert refusal(capsys, "tracking.mode=online").endswith(
        "and there is none: run `wandb login`, or set WANDB_API_KEY, or take tracking.mode=offline"
    )
    named = "tracking.project=a/b is refused: Invalid project name 'a/b'"
    assert refusal(capsys, "tracking.mode=offline", "tracking.project=a/b").startswith(named)
    assert refusal(capsys, "tracking.rows=10001") == (
        "tracking.rows=10001: between 0 and 10000; samples.jsonl has every prompt"
    )
    assert refusal(capsys, "tracking.tags=['']") == "tracking.tags: '' has 0 characters; a tag has 1 to 64"
    assert refusal(capsys, "tracking.dir=' '") == "tracking.dir is empty; name a folder, or null for the run's own"
    assert refusal(capsys, "tracking.mode=dryrun") == (
        "tracking.mode must be online, offline, disabled or null, got 'dryrun'"
    )
    monkeypatch.setenv("WANDB_MODE", "shared")
    assert refusal(capsys) == (
        "WANDB_MODE=shared is unknown here: online, offline, disabled; tracking.mode=… overrules it"
    )
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert refusal(capsys).startswith("tracking.mode=online finds a login that is none: WANDB_API_KEY invalid")
    left_by_a_run = importlib.machinery.ModuleSpec("wandb", None, is_package=True)  # a folder `wandb` in sys.path
    for found in (None, left_by_a_run):
        monkeypatch.setattr(weights_and_biases.importlib.util, "find_spec", lambda name, found=found: found)
        for mode in ("online", "offline"):
            assert refusal(capsys, f"tracking.mode={mode}") == (
                "tracking=wandb needs wandb: pip install 'decodelab[tracking]', or tracking=none"
            )


def test_a_login_is_found_where_wandb_keeps_it(home: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="needs a login"):
        WeightsAndBiases().check()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    WeightsAndBiases().check()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY")
    WeightsAndBiases().check()
    assert list(home.iterdir()) == []


def test_disabled_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(weights_and_biases.importlib.util, "find_spec", lambda name: None)
    settings = WeightsAndBiases(mode="disabled")
    settings.check()
    assert settings.open(info(tmp_path)) == Untracked()
    assert list(tmp_path.iterdir()) == []


def test_the_seam_is_kept(tmp_path: Path):
    for settings in (Untracked(), WeightsAndBiases(mode="offline")):
        assert isinstance(settings, Tracking)
        assert isinstance(settings.open(info(tmp_path)), Tracker)
    assert isinstance(WeightsAndBiases(mode="offline").open(info(tmp_path)), Mirror)
