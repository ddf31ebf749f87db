"""A sweep's cells: each run once, what became of it in its folder, limits, and what is said."""

import json
import re
from pathlib import Path

import pytest

from decodelab.decoding.model import source
from decodelab.errors import UserError
from decodelab.experiments import hardware
from decodelab.experiments.compose import Composer
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.quality.evaluate import ANSWERS
from decodelab.experiments.sweep import sweep as sweeps
from decodelab.experiments.sweep.cells import Runner, State, Status, scan, write
from decodelab.experiments.sweep.grid import Cell
from decodelab.experiments.sweep.settings import SweepSettings
from decodelab.experiments.sweep.sweep import Sweep, folder_of, settings_of
from decodelab.tests.experiments.sweep.stage import Stage, result


def stamps(stage: Stage) -> dict[str, tuple[int, int]]:
    return {f.parent.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in stage.folder.glob("*/result.json")}


def test_each_cell_has_its_status_and_the_others_run(stage: Stage, capsys: pytest.CaptureFixture[str]):
    stage.does = {
        "seed=1": "failed",
        "seed=2": ("failed", "the process ended with SIGSEGV (exit 139)"),
        "seed=3": ("timeout", "stopped after 5 s (cell.timeout)"),
        "seed=4": "out_of_memory",
        "seed=5": "broken",
        "seed=6": "refused",
    }
    assert stage.sweep("seed=range(0,8)") == 1
    assert stage.ran == [f"seed={seed}" for seed in range(8)]
    assert stage.states() == {
        "seed=0": "done", "seed=1": "failed", "seed=2": "failed the process ended with SIGSEGV (exit 139)",
        "seed=3": "timeout stopped after 5 s (cell.timeout)", "seed=4": "out_of_memory", "seed=5": "broken",
        "seed=6": "refused", "seed=7": "done",
    }  # fmt: skip
    assert len(stage.started) == 5  # a new worker after each failure, but not after broken and refused
    told = capsys.readouterr()
    assert "8 cells in" in told.err
    assert "0 done, 8 to run; perhaps 1 s left or several times that, a guess from the bytes of the weights" in told.err
    assert "[1/8] done 1.50× [1.25, 1.75] in 2.0 s: seed=0 (about 14 s left)" in told.err
    assert "[3/8] failed in 0.0 s: seed=2 – the process ended with SIGSEGV (exit 139) (about 10 s left)" in told.err
    rows = [line.split() for line in told.out.splitlines() if re.match(r" *\d ", line)]
    assert rows[0] == ["0", "done", "1.50×", "[1.25,", "1.75]", "2.12", "50", "%", "exact", "2.0", "s"]
    assert rows[3][:2] == ["3", "timeout"]
    assert f"timeout: seed=3 – stopped after 5 s (cell.timeout) ({stage.cell('seed=3')}" in told.out
    assert f"2 of 8 cells are done, in {stage.folder}; the same command with output={stage.folder} runs" in told.out


def test_the_same_command_runs_what_is_not_done(stage: Stage, capsys: pytest.CaptureFixture[str]):
    stage.does = {"seed=1": "failed", "seed=2": ("out_of_memory", "killed")}
    assert stage.sweep("seed=0,1,2") == 1
    before, stage.does, stage.ran = stamps(stage), {}, []
    assert stage.sweep("seed=0,1,2") == 0
    assert stage.ran == ["seed=1", "seed=2"]
    assert before.items() < stamps(stage).items()
    stage.ran = []
    assert stage.sweep("seed=0,1,2") == 0
    assert stage.ran == []
    assert "3 cells in" in (told := capsys.readouterr().err)
    assert told.splitlines()[-1].endswith("3 done, 0 to run")


def test_a_name_that_no_disk_takes_is_one_line(stage: Stage):
    with pytest.raises(
        UserError, match=r"^output folder n{300} cannot be written \(File name too long\); name another"
    ):
        stage.sweep("seed=0", f"output={'n' * 300}")


class Killed(BaseException):
    """Ends the sweep at once, as kill -9 does: nothing is written after it."""


def test_a_killed_sweep_is_started_again(stage: Stage):
    stage.does = {"seed=1": Killed}
    with pytest.raises(Killed):
        stage.sweep("seed=0,1,2")
    assert stage.states() == {"seed=0": "done", "seed=1": "running"}
    before = stamps(stage)
    assert [found.state.status for found in scan(stage.folder, live=True)].count("running") == 1
    stage.does, stage.ran = {"seed=0": Killed, "seed=1": "failed"}, []
    assert stage.sweep("seed=0,1,2") == 1
    assert stage.ran == ["seed=1", "seed=2"]
    assert before.items() < stamps(stage).items()
    assert stage.states() == {"seed=0": "done", "seed=1": "failed", "seed=2": "done"}


def test_a_cell_that_was_running_is_lost(stage: Stage):
    stage.does = {"seed=0": Killed}
    with pytest.raises(Killed):
        stage.sweep("seed=0,1")
    assert stage.sweep("seed=1,2") == 0  # another command over the same folder
    assert stage.states()["seed=0"] == "lost its process was gone when the sweep was started again"


def test_a_result_that_is_whole_is_kept_whatever_came_after(stage: Stage):
    """The sweep was killed between the result and the status."""
    stage.does = {"seed=0": Killed}
    with pytest.raises(Killed):
        stage.sweep("seed=0,1")
    cell = stage.cell("seed=0")
    (cell / "result.json").write_text(json.dumps(result(json.loads((cell / "job.json").read_text())["key"])))
    before = stamps(stage)
    stage.ran = []
    assert stage.sweep("seed=0,1") == 0
    assert stage.ran == ["seed=1"]
    assert before.items() < stamps(stage).items()
    assert stage.states() == {"seed=0": "done", "seed=1": "done"}


def test_a_result_is_kept_if_the_worker_was_stopped_right_after_it(stage: Stage):
    def late() -> tuple[Status, str]:
        cell = stage.cell("seed=0")
        (cell / "result.json").write_text(json.dumps(result(json.loads((cell / "job.json").read_text())["key"])))
        return "timeout", "stopped after 5 s (cell.timeout)"

    stage.does = {"seed=0": late}
    assert stage.sweep("seed=0,1") == 0
    assert stage.states() == {"seed=0": "done", "seed=1": "done"}


def test_a_result_of_before_is_not_taken_for_that_of_a_crash(stage: Stage):
    stage.does = {"seed=0": "broken"}
    assert stage.sweep("seed=0,1") == 1
    stage.does = {"seed=0": ("failed", "the process ended with SIGSEGV (exit 139)")}
    assert stage.sweep("seed=0,1") == 1
    assert stage.states()["seed=0"].startswith("failed")


def test_a_done_cell_without_its_result_runs_again(stage: Stage):
    assert stage.sweep("seed=0,1") == 0
    (stage.cell("seed=1") / "result.json").unlink()
    stage.ran = []
    assert stage.sweep("seed=0,1") == 0
    assert stage.ran == ["seed=1"]


def test_ctrl_c_keeps_what_is_finished(stage: Stage, capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        cell = stage.cell("seed=1")
        key = json.loads((cell / "job.json").read_text())["key"]
        (cell / "result.json").write_text(json.dumps(result(key, "interrupted")))
        write(cell, State("interrupted", "what was finished is in its folder", seconds=1.0, code="code"))
        raise KeyboardInterrupt

    stage.does = {"seed=1": interrupted}
    assert stage.sweep("seed=0,1,2,3") == 130
    assert stage.ran == ["seed=0", "seed=1"]
    told = capsys.readouterr().out
    assert "interrupted: seed=1 – what was finished is in its folder" in told
    assert "not started: seed=3 – interrupted" in told
    assert "1 of 4 cells are done" in told
    stage.does, stage.ran = {}, []
    assert stage.sweep("seed=0,1,2,3") == 0
    assert stage.ran == ["seed=1", "seed=2", "seed=3"]


def test_ctrl_c_leaves_what_was_done_before_done(stage: Stage, capsys: pytest.CaptureFixture[str]):
    assert stage.sweep("seed=2,3") == 0
    stage.does = {"seed=0": KeyboardInterrupt}
    assert stage.sweep("seed=0,1,2,3") == 130
    told = capsys.readouterr().out
    assert "not started: seed=1 – interrupted" in told
    assert "2 of 4 cells are done" in told


def test_no_file_of_another_cell_is_read_while_a_cell_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """It would disturb what is timed."""
    assert stage.sweep("seed=0,1,2") == 0
    looked: list[Path] = []
    honest, work = sweeps.read, Sweep._work

    def working(self: Sweep, planned: sweeps.Planned, began: float) -> tuple[Status, str] | None:
        with pytest.MonkeyPatch.context() as watched:
            watched.setattr(sweeps, "read", lambda folder: looked.append(folder) or honest(folder))
            return work(self, planned, began)

    monkeypatch.setattr(Sweep, "_work", working)
    assert stage.sweep("seed=range(0,6)") == 0
    assert stage.ran[3:] == ["seed=3", "seed=4", "seed=5"]
    assert looked == []


def test_ctrl_c_in_the_middle_of_nothing(stage: Stage):
    stage.does = {"seed=1": KeyboardInterrupt}
    assert stage.sweep("seed=0,1,2") == 130
    assert stage.states() == {"seed=0": "done", "seed=1": "interrupted nothing of it was finished"}


def test_another_task_makes_its_cells_stale(stage: Stage, capsys: pytest.CaptureFixture[str]):
    assert stage.sweep("seed=0,1") == 0
    before = stamps(stage)
    (stage.bench.root / "task.jsonl").write_text('{"prompt": "other"}\n')
    capsys.readouterr()
    assert stage.sweep("seed=0") == 0
    assert stage.ran == ["seed=0", "seed=1", "the only cell"]
    assert "2 cells in the folder are of other commands" in capsys.readouterr().out
    assert stage.sweep("seed=0,1") == 0
    told = capsys.readouterr().out
    assert len(re.findall(r"stale: \S+: seed=\d, of files or settings that have changed since", told)) == 2
    assert before.items() < stamps(stage).items()  # nothing is deleted
    assert stage.sweep("seed=0,1") == 0
    assert len(stage.ran) == 4


def test_another_version_of_the_code_is_stale(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert stage.sweep("seed=0,1") == 0
    write(stage.cell("seed=1"), State("done", seconds=2.0, code="older"))
    stage.ran = []
    assert stage.sweep("seed=0,1") == 0
    assert stage.ran == []
    told = capsys.readouterr().out
    assert re.search(r"^ *1 +done\*", told, re.MULTILINE)
    assert "* done by another version of the code; rerun=stale runs it again" in told
    assert stage.sweep("seed=0,1", "rerun=stale") == 0
    assert stage.ran == ["seed=1"]
    assert stage.sweep("seed=0,1", "rerun=all") == 0
    assert stage.ran == ["seed=1", "seed=0", "seed=1"]


def test_answers_of_a_broken_off_cell_are_kept_for_the_same_code_alone(stage: Stage):
    """measure_quality asks no item again that the journal has."""
    stage.does = {"seed=0": "failed", "seed=1": "failed"}
    stage.sweep("seed=0,1,2")
    journals = {label: stage.cell(label) / ANSWERS for label in ("seed=0", "seed=1", "seed=2")}
    for journal in journals.values():
        journal.touch()
    write(stage.cell("seed=1"), State("failed", code="older"))
    stage.does = {}
    assert stage.sweep("seed=0,1,2") == 0
    assert [journal.exists() for journal in journals.values()] == [True, False, True]
    assert stage.sweep("seed=0,1,2", "rerun=all") == 0
    assert not any(journal.exists() for journal in journals.values())


@pytest.mark.parametrize("rerun", ["all", "stale"])
def test_a_run_of_wandb_outlives_the_cell_it_mirrors(stage: Stage, rerun: str):
    """It may not have been uploaded, and its id is not to be given twice."""
    stage.sweep("seed=0,1")
    offline = stage.cell("seed=0") / "wandb" / "offline-run-20260102_030405-c0ffee" / "run-c0ffee.wandb"
    other = stage.cell("seed=0") / "old" / "file"
    for file in (offline, other):
        file.parent.mkdir(parents=True)
        file.touch()
    write(stage.cell("seed=0"), State("done", seconds=2.0, code="older"))
    assert stage.sweep("seed=0,1", f"rerun={rerun}") == 0
    assert stage.ran[2] == "seed=0"
    assert offline.exists()
    assert not other.parent.exists()


def test_cells_that_share_a_target_run_one_after_the_other(stage: Stage):
    assert stage.sweep("seed=0,1", "dtype=float32,float64") == 0
    assert stage.ran == [f"seed={seed} dtype={dtype}" for dtype in ("float32", "float64") for seed in (0, 1)]
    assert len(stage.started) == 2
    assert stage.stopped == 2


def test_the_same_cell_runs_once(stage: Stage, capsys: pytest.CaptureFixture[str]):
    assert stage.sweep("dtype=float32", "threads=1,null", "seed=0") == 0
    assert stage.ran == ["threads=1"]
    assert "threads=null is the same cell as threads=1: run once" in capsys.readouterr().err


def test_what_cannot_run_is_refused_alone(stage: Stage, capsys: pytest.CaptureFixture[str]):
    """Without a worker; and it is looked at anew when the sweep is started again."""
    other = stage.bench.root / "other.jsonl"
    assert stage.sweep(f"task.path={other},{stage.bench.root / 'task.jsonl'}") == 1
    assert stage.ran == [f"task.path={stage.bench.root / 'task.jsonl'}"]
    told = capsys.readouterr()
    assert "1 to run, 1 refused" in told.err
    assert re.search(rf"refused: task.path={other} – .*other.jsonl", told.out)
    assert stage.states()[f"task.path={other}"].startswith("refused")
    other.write_text('{"prompt": "now it is here"}\n')
    assert stage.sweep(f"task.path={other},{stage.bench.root / 'task.jsonl'}") == 0
    assert stage.states() == {f"task.path={other}": "done", f"task.path={stage.bench.root / 'task.jsonl'}": "done"}
    assert len(scan(stage.folder)) == 2


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("no\nway"), "failed ValueError: no way"), (SystemExit(3), "failed the cell called")],
)
def test_a_user_s_part_that_fails_while_it_is_planned(
    error: BaseException,
    state: str,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    honest = sweeps.Sweep._identified

    def identified(self: Sweep, cell: Cell) -> sweeps.Planned:
        if cell.label == "seed=0":
            raise error
        return honest(self, cell)

    monkeypatch.setattr(sweeps.Sweep, "_identified", identified)
    assert stage.sweep("seed=0,1") == 1
    assert stage.ran == ["seed=1"]
    assert stage.states()["seed=0"].startswith(state)
    log = stage.cell("seed=0") / "log.txt"
    assert log.read_text().startswith("Traceback")
    assert "test_sweep.py" in log.read_text()
    assert str(log) in capsys.readouterr().out


def test_stop_after_failures(stage: Stage, capsys: pytest.CaptureFixture[str]):
    stage.does = {"seed=0": "refused", "seed=1": "failed", "seed=3": "broken"}
    assert stage.sweep("seed=range(0,6)", "stop_after_failures=2") == 1
    assert stage.ran == ["seed=0", "seed=1", "seed=2", "seed=3"]
    assert "not started: seed=5 – 2 cells have failed (stop_after_failures=2)" in capsys.readouterr().out
    assert "seed=4" not in stage.states()


def test_no_cell_starts_that_would_not_be_done_in_time(stage: Stage, capsys: pytest.CaptureFixture[str]):
    """The first says how long the others take; those of another group may still fit."""
    stage.seconds = {f"seed={seed} dtype=float64": 3000.0 for seed in range(3)}
    assert stage.sweep("seed=0,1,2", "dtype=float64,float32", "budget_hours=0.5") == 1
    assert stage.ran == ["seed=0 dtype=float64"]
    told = capsys.readouterr().out
    why = "it takes about 50 min, and of budget_hours=0.5 30 min are left"
    assert f"not started: seed=1 dtype=float64 – {why}" in told
    stage.ran = []
    (stage.cell("seed=0 dtype=float64") / "result.json").unlink()
    assert stage.sweep("seed=0", "dtype=float32") == 0
    assert stage.sweep("seed=0,1,2", "dtype=float64,float32", "budget_hours=0.5") == 1
    assert stage.ran[1:] == ["seed=0 dtype=float64", "seed=1 dtype=float32", "seed=2 dtype=float32"]


def test_before_any_cell_is_done_the_time_is_guessed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """2 sides of 2 prompts and at most 10 tokens, each a reading of the weights; also for a first cell, which the
    budget keeps from starting."""
    (stage.bench.root / "task.jsonl").write_text('{"prompt": "ab ab"}\n{"prompt": "12 12"}\n')
    weights = sum(file.stat().st_size for file in stage.bench.checkpoint.glob("*.safetensors"))
    monkeypatch.setattr(hardware, "_measure", lambda *_: Peaks(2 * 2 * 10 * weights / 1000, 1.0))
    assert stage.sweep("seed=0,1,2", "task.max_new_tokens=10", "budget_hours=0.2") == 1
    told = capsys.readouterr()
    left = re.search(
        r"3 to run; perhaps (\d+) min left or several times that, a guess from the bytes of the weights", told.err
    )
    assert left is not None
    assert 45 <= int(left[1]) <= 50  # the file has a header, too
    assert stage.ran == []
    why = r"it takes perhaps 1\d min, and of budget_hours=0\.2 12 min are left"
    assert re.search(f"not started: seed=0 – {why}", told.out)
    stage.seconds = {f"seed={seed}": 100.0 for seed in range(3)}
    assert stage.sweep("seed=0,1,2", "task.max_new_tokens=10") == 0
    assert "in 2 min: seed=0 (about 3 min left)" in capsys.readouterr().err


def test_how_long_quality_takes_is_unknown(stage: Stage, capsys: pytest.CaptureFixture[str]):
    task = stage.bench.root / "asked.jsonl"
    task.write_text('{"question": "what?", "answer": "it"}\n')
    assert stage.sweep("seed=0,1", f"tasks=[{task}]") == 0
    assert (
        "2 to run; how long is unknown until the first is done; log.txt in its folder says how far it is"
        in capsys.readouterr().err
    )


def test_the_time_left_comes_from_cells_that_are_done(stage: Stage, capsys: pytest.CaptureFixture[str]):
    stage.seconds = {"seed=0": 600.0}
    stage.sweep("seed=0,1,2", "stop_after_failures=1")
    capsys.readouterr()
    (stage.cell("seed=1") / "result.json").unlink()
    stage.sweep("seed=0,1,2")
    assert "2 done, 1 to run; about 5 min left" in capsys.readouterr().err


def test_a_model_is_opened_once_for_all_cells(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    honest, opened = source.open_source, []
    monkeypatch.setattr(source, "open_source", lambda spec, *more: opened.append(spec) or honest(spec, *more))
    assert stage.sweep("seed=0,1,2", "task.max_new_tokens=2,4") == 0
    assert len(opened) == 1


def test_evaluate_needs_tasks(stage: Stage, capsys: pytest.CaptureFixture[str]):
    assert stage.sweep("seed=0,1", job="evaluate") == 1
    assert "refused: seed=0 – evaluate has nothing to do: name tasks" in capsys.readouterr().out


def test_a_search_runs_one_cell_after_another(stage: Stage):
    stage.sweep("seed=0,1")
    words = json.loads((stage.cell("seed=1") / "job.json").read_text())["overrides"]
    stage.ran, stage.does = [], {"new": "failed", "stop": KeyboardInterrupt}
    with Sweep(stage.folder, "run", start_worker=stage.start) as at:
        assert isinstance(at, Runner)
        kept = at.run_cell(Cell(words, "known"))
        assert (kept.status, kept.result["speedup"]["value"], kept.seconds) == ("done", 1.5, 2.0)
        words = [word for word in words if not word.startswith("seed=")]
        failed = at.run_cell(Cell([*words, "seed=9"], "new"))
        assert (failed.status, failed.result, failed.folder) == ("failed", None, stage.cell("new"))
        assert at.run_cell(Cell([*words, "seed=9"], "again")) is failed
        with pytest.raises(KeyboardInterrupt):
            at.run_cell(Cell([*words, "seed=10"], "stop"))
    assert stage.ran == ["new", "stop"]


def test_the_sweep_s_id_stays_and_is_told_to_its_cells(stage: Stage):
    stage.sweep("seed=0,1")
    made = json.loads((stage.folder / "sweep.json").read_text())["id"]
    stage.sweep("seed=0,1,2")
    assert {json.loads(f.read_text())["sweep"] for f in stage.folder.glob("*/job.json")} == {made}


def test_one_sweep_a_folder(stage: Stage):
    with Sweep(stage.folder, "run"), pytest.raises(UserError, match=r"process \d+ runs a sweep in .*output=DIR"):
        stage.sweep("seed=0,1")
    assert stage.sweep("seed=0,1") == 0


def test_a_folder_that_is_no_sweep_s(stage: Stage):
    stage.folder.mkdir()
    (stage.folder / "result.json").touch()
    with pytest.raises(UserError, match="holds a single run; name another folder for a sweep"):
        stage.sweep("seed=0,1")
    blocked = stage.bench.root / "file"
    blocked.touch()
    with pytest.raises(UserError, match=r"file/sub cannot be written .*; name another with output=DIR"):
        stage.sweep("seed=0,1", f"output={blocked}/sub")


def test_the_same_command_finds_its_folder():
    words = ["seed=1,2", "drafting=none"]
    here = folder_of(None, "run", words)
    assert re.fullmatch(r"outputs/sweep-[0-9a-f]{8}", str(here))
    assert folder_of(None, "run", [*words, "rerun=all", "budget_hours=1", "cell.timeout=3", "tracking=wandb"]) == here
    others = [("evaluate", words, []), ("run", [*words, "batch=2"], []), ("run", words, [Path("conf")])]
    assert len({folder_of(None, *other) for other in others} | {here}) == 4
    assert folder_of("here", "run", words) == Path("here")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stop_after_failures=0"], "stop_after_failures=0: at least 1, or null for any number"),
        (["rerun=failed"], "rerun must be stale, all or null, got 'failed'"),
        (["budget_hours=0"], "budget_hours=0.0: hours above 0, or null for no limit"),
        (['output=" "'], "output is empty; name a folder, or null for one under outputs/"),
    ],
)
def test_settings_out_of_bounds(words: list[str], line: str):
    with pytest.raises(UserError, match=re.escape(line)):
        settings_of([Composer().compose(words)])


def test_settings_are_the_same_for_all_cells():
    configs = [Composer().compose(words) for words in (["rerun=all"], ["rerun=all", "budget_hours=2"])]
    assert settings_of(configs[:1]) == SweepSettings(rerun="all")
    with pytest.raises(UserError, match=r"budget_hours is of the sweep as a whole: one value, not None and 2\.0"):
        settings_of(configs)
