"""The command: words in, text and an exit code out."""

import errno
import os
import shlex
import subprocess
import sys
from types import ModuleType

import pytest
import yaml

from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.experiments.cli import EXAMPLES, JOBS, USAGE, main
from decodelab.experiments.compose import compose, groups

NAMES = "run, evaluate, check, plan, peers, quantize, train, layers, report, tree"


class Runs:
    """Stands in for the job `run`: keeps what it was given, and does what each call is told to."""

    def __init__(self) -> None:
        self.configs: list = []
        self.does: list = []

    def __call__(self, config) -> int:
        self.configs.append(config)
        outcome = self.does.pop(0) if self.does else 0
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    job = ModuleType("decodelab.experiments.run")
    job.run = Runs()
    monkeypatch.setitem(sys.modules, job.__name__, job)
    return job.run


@pytest.fixture
def fails(capsys):
    """Runs a command line that must fail: its exit code, and the one line on standard error."""

    def call(*argv: str) -> tuple[int, str]:
        code = main(argv)
        told = capsys.readouterr()
        assert told.err.startswith("decodelab: error: ")
        assert told.err.count("\n") == 1
        return code, told.err.removeprefix("decodelab: error: ").rstrip("\n")

    return call


def test_a_run_gets_the_configuration(runs):
    assert main(["run", "drafting=none", "seed=5"]) == 0
    assert (runs.configs[0].drafting, runs.configs[0].seed) == (Nothing(), 5)


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_the_job_s(code, runs):
    runs.does = [code]
    assert main(["run", "drafting=none"]) == code


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("the prompt\nis empty"), 2, "the prompt is empty"),
        (KeyboardInterrupt(), 130, "interrupted; what was finished before is kept"),
        (KeyboardInterrupt("interrupted; 3 of 30 blocks are kept"), 130, "interrupted; 3 of 30 blocks are kept"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/out/events.jsonl"), 1,
            "the disk is full: /out/events.jsonl was not written whole; "
            "free some space, or name another disk with output=DIR",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"), 1,
            "the disk is full: a file of the run was not written whole; "
            "free some space, or name another disk with output=DIR",
        ),
        (
            OSError(errno.EFBIG, "File too large", "/out/events.jsonl"), 1,
            "a file would be larger than is allowed here: /out/events.jsonl was not written whole; "
            "raise the limit (ulimit -f)",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "/out/nnn"), 2,
            "the name of a file or folder is too long for this disk: /out/nnn",
        ),
    ],
)  # fmt: skip
def test_what_a_job_raises_is_one_line(raised, code, line, runs, fails):
    runs.does = [raised]
    assert fails("run", "drafting=none") == (code, line)


@pytest.mark.parametrize("bug", [ValueError("a bug"), OSError(errno.EIO, "input/output error")])
def test_a_bug_keeps_its_traceback(bug, runs):
    runs.does = [bug]
    with pytest.raises(type(bug)):
        main(["run", "drafting=none"])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["chek"], f"'chek' is no job: did you mean check? jobs are {NAMES}"),
        (["drafting=none"], f"name a job, one of {NAMES}: {USAGE}"),
        (["run", "--sweep"], "--sweep is unknown: options are --config-dir DIR, --cfg job, -m, --help, --version"),
        (["run", "--config-dir"], "--config-dir needs a value: --config-dir DIR"),
        (["run", "--cfg"], "--cfg needs a value: --cfg job"),
        (["run", "--cfg", "hydra"], "--cfg hydra is unknown: --cfg job prints the configuration"),
        (["run", "--config-dir=/no"], "--config-dir /no is no folder; it holds YAML such as drafting/mine.yaml"),
        (["run", "task"], "'task' is no KEY=VALUE: write task=VALUE"),
        (["run", "limit=5"], "limit is unknown: did you mean task.limit or quality.limit?"),
        (["run", "seed=x"], "seed must be an integer, got 'x'"),
        (["check", "device=gpu"], "device=gpu is unknown; there are auto, cpu, cuda, and cuda:1 for the second GPU"),
        (["run", "seed=1,2"], """seed=1,2 lists several values: -m runs each; for one value quote it, 'seed="1,2"'"""),
        (["run", "-m", "seed=range(3,1)"], "seed=range(3,1) names nothing to run"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(argv, line, runs, fails):
    assert fails(*argv) == (2, line)
    assert runs.configs == []


def test_cfg_prints_what_would_be_run(runs, capsys):
    assert main(["run", "--cfg", "job", "drafting=none", "task.limit=3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == compose(["drafting=none", "task.limit=3"]).resolved
    assert runs.configs == []


def test_config_dir_adds_options(runs, tmp_path):
    (tmp_path / "drafting").mkdir()
    (tmp_path / "drafting" / "mine.yaml").write_text("# Mine.\n_target_: decodelab.drafting.none.Nothing\n")
    assert main(["run", "--config-dir", str(tmp_path), "drafting=mine"]) == 0
    assert runs.configs[0].drafting == Nothing()


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What each sweep was asked; none is run."""
    asked: list[tuple] = []
    monkeypatch.setattr("decodelab.experiments.sweep.sweep.sweep", lambda *words: asked.append(words) or 1)
    return asked


def test_a_sweep_gets_its_cells(runs, swept, tmp_path):
    words = ("-m", "drafting=none", "seed=1,2", "--config-dir", str(tmp_path))
    assert main(["run", *words]) == 1
    (job, cells, configs, overrides, folders) = swept[0]
    assert (job, [cell.label for cell in cells], [config.seed for config in configs]) == (
        "run",
        ["seed=1", "seed=2"],
        [1, 2],
    )
    assert (overrides, folders) == (("drafting=none", "seed=1,2"), (tmp_path,))
    assert main(["evaluate", "-m", "drafting=none"]) == 1  # a sweep of one cell
    assert (swept[1][0], len(swept[1][1])) == ("evaluate", 1)
    assert main(["run", "sweep=[{seed: [1, 2, 3]}]"]) == 1  # it needs no -m
    assert len(swept[2][1]) == 3
    assert main(["run", "sweep=[{seed: 4}]"]) == 0
    assert [config.seed for config in runs.configs] == [4]


def test_a_sweep_with_a_wrong_cell_does_not_start(runs, swept, fails):
    """hydra#2888: a key of one option, given to another, is refused by name and with what has it."""
    code, line = fails("run", "-m", "drafting=none,draft_model", "drafting.proposal=sampled")
    assert (code, swept) == (2, [])
    assert line == (
        "1 of 2 cells cannot be run, so none is: drafting=none: drafting.proposal is unknown: drafting has no keys; "
        "it is a key of drafting=draft_model; a key goes with its option in "
        "'sweep=[{GROUP: OPTION, GROUP.KEY: VALUE}, …]'"
    )


def test_cfg_of_a_sweep_prints_what_cells_share_and_each_cell_s_own(swept, capsys):
    assert (
        main(["run", "--cfg", "job", "sweep=[{drafting: none}, {drafting: prompt_lookup, drafting.max_draft: 4}]"]) == 0
    )
    shown = yaml.safe_load(capsys.readouterr().out)
    assert swept == []
    assert shown["model"] == compose([]).resolved["model"]
    assert list(shown["cells"]) == ["drafting=none", "drafting=prompt_lookup max_draft=4"]
    assert shown["cells"]["drafting=none"] == {"drafting": compose(["drafting=none"]).resolved["drafting"]}
    assert shown["cells"]["drafting=prompt_lookup max_draft=4"]["drafting"]["max_draft"] == 4
    assert "drafting" not in shown


def test_what_is_of_a_sweep_is_refused_for_a_single_run(bench, capsys):
    assert bench.run("cell.timeout=0.5", "budget_hours=2") == 2
    assert capsys.readouterr().err == (
        "decodelab: error: cell.timeout=0.5 budget_hours=2.0 is of a sweep, and this is a single run: with -m it is a "
        "sweep of one cell\n"
    )
    assert not bench.folder.exists()


@pytest.mark.parametrize("argv", [[], ["--help"], ["run", "--help"], ["-h", "check"]])
def test_help_names_jobs_options_keys_and_examples(argv, capsys):
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    for job in [argv[0]] if argv and argv[0] in JOBS else [argv[1]] if len(argv) > 1 else JOBS:
        assert f"  {job}  " in text
    for group, options in groups().items():
        assert f"  {group}  " in text
        for option in options:
            assert option in text
    for key in (
        "seed: 0",
        "max_new_tokens: 64",
        "repetition_penalty: 1.0",
        "path: null",
        "compressed_tensors, gguf",
        "smollm2-135m*",
        "--config-dir DIR",
    ):
        assert key in text
    assert "_target_:" not in text
    assert text.rstrip().endswith(EXAMPLES[-1])


def test_help_lists_the_experiments(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\n  smoke       Seconds: does everything work here? Two demo prompts, three drafters.\n" in text
    assert main(["run", "experiment=smoke", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\nEXPERIMENT: experiment=smoke\n" in text
    assert "\n    drafting: [none, prompt_lookup, reference]\n" in text
    assert "@package" not in text


def test_help_is_of_the_chosen_options_alone(capsys):
    assert main(["run", "drafting=draft_model", "acceptance=sampling", "--help"]) == 0
    text = capsys.readouterr().out
    assert "DRAFTING: drafting.KEY=VALUE, with drafting=draft_model" in text
    assert "proposal: coupled" in text
    assert "  temperature: 1.0" in text
    assert not any(other in text for other in ("max_new_tokens", "EXAMPLES", "smollm2-135m"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_compose(example, runs, swept, monkeypatch):
    monkeypatch.setattr("decodelab.experiments.check.check", runs)
    words = shlex.split(example.split("   ")[0].split("  ")[0])[1:]
    main(words)
    assert runs.configs or swept


def test_version(capsys):
    from decodelab import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"decodelab {__version__}\n"


def test_help_waits_for_neither_torch_nor_hydra():
    code = (
        "import sys; from decodelab.experiments.cli import main; main(['run', '--help']); main(['--version']);"
        "sys.exit(str({'torch', 'transformers', 'hydra', 'omegaconf', 'rich', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


def test_a_reader_that_goes_away_is_one_line():
    code = "import sys; from decodelab.experiments.cli import main; sys.stdin.read(); sys.exit(main(['--help']))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=buffered, stdin=-1, stdout=-1, stderr=-1, text=True
    )  # -1: a pipe
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "decodelab: error: whoever read the output has closed it\n"
    assert process.wait() == 1


def test_a_terminal_without_the_characters_ends_no_run() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", "from decodelab.experiments.cli import main; raise SystemExit(main(['--help']))"],
        capture_output=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"JOB [KEY=VALUE ?]" in done.stdout


def test_a_closed_output_ends_no_run() -> None:
    line = "from decodelab.experiments.cli import main; raise SystemExit(main(['--version']))"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, line], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
