"""What the README and the docstrings say can be typed, is typed here: on the real default model, in order."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

import decodelab
from decodelab.experiments import hardware
from decodelab.experiments.cli import main
from decodelab.experiments.hardware import Peaks
from decodelab.tests.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(real_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a run has been made already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "_measure", lambda device, dtype, threads: Peaks(1e10, 1e11))
    assert main(["run", "task.limit=2", "task.max_new_tokens=4", "timing=untimed"]) == 0
    return tmp_path


def test_python_blocks_run_in_order(workplace: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)  # noqa: S102
    told = capsys.readouterr().out
    assert namespace["out"].tokens_per_step > 1.2  # something was drafted
    assert namespace["out"].reason in ("length", "eos")
    assert namespace["report"]["exactness"]["verdict"] == "exact"
    assert "exact " in told
    assert list(namespace["runs"]["exactness.verdict"]) == ["exact"]


def test_examples_in_docstrings_run_in_order(workplace: Path):
    namespace = {"decodelab": decodelab}
    for name in ("load", "generate", "compare", "evaluate", "load_runs"):
        (test,) = doctest.DocTestFinder(recurse=False).find(getattr(decodelab, name), name, globs=namespace)
        assert test.examples
        said: list[str] = []
        found = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
            test, out=said.append, clear_globs=False
        )
        assert found.failed == 0, "".join(said)
        namespace = test.globs


COMMANDS = [
    line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if "decodelab" in line
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("decodelab ") and "report" not in c])
def test_commands_compose(command: str, capsys: pytest.CaptureFixture[str]):
    """Every group, option and key that the README types exists; heads that a folder stands for do not."""
    code = main([*shlex.split(command)[1:], "--cfg", "job"])
    told = capsys.readouterr()
    assert (code == 0 and told.out) or (code == 2 and "drafting.path=DIR does not exist" in told.err)


def test_reports_are_typed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    """Each of its words is known; what they name is not there."""
    monkeypatch.chdir(tmp_path)
    reports = [shlex.split(c)[1:] for c in COMMANDS if c.startswith("decodelab report")]
    assert len(reports) >= 4
    for words in reports:
        assert main(words) == 2
        assert re.search("holds no result|there is no folder", capsys.readouterr().err), words


def test_it_types_what_there_is():
    assert len(blocks("python")) >= 2
    assert len(COMMANDS) >= 8
