"""The README's "Your own parts", carried out as written: its files in an empty folder, its commands in that folder.

What differs: the commands run on a tiny model and its prompts, and `pip install -e .` is left to its alternative there.
"""

import importlib
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from decodelab.decoding.draft import chain
from decodelab.experiments.cli import main
from decodelab.experiments.compose import groups
from decodelab.tests.checkout import ROOT
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Your own parts\n")[2].partition("\n## ")[0]
FILES = dict(re.findall(r"^`([\w./]+)`[^`\n]*(?:`[^`\n]*`[^`\n]*)*:\n\n```\w+\n(.*?)^```$", SECTION, re.DOTALL | re.M))
BLOCKS = [block.replace("\\\n", " ") for block in re.findall(r"^```bash\n(.*?)^```$", SECTION, re.DOTALL | re.M)]
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
PROMPTS = ("12 ab 12 ab 12 ab 12", "xyz xyz xyz")


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the README's files, named in PYTHONPATH, as the working directory."""
    folder = tmp_path / "mylab"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(folder)
    unchecked(monkeypatch)  # as the user runs it
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]


def test_the_files_are_a_package(mylab: Path):
    assert list(FILES) == [
        "pyproject.toml", "mylab/again.py", "conf/drafting/again.yaml",
        "mylab/rules.py", "conf/acceptance/top_two.yaml", "questions.jsonl", "mylab/score.py",
    ]  # fmt: skip
    assert len(FILES["mylab/again.py"].splitlines()) <= 40
    project = tomllib.loads(FILES["pyproject.toml"])
    assert project["tool"]["setuptools"]["packages"] == [project["project"]["name"]] == ["mylab"]
    assert project["project"]["dependencies"] == ["decodelab"]
    assert yaml.safe_load(FILES["conf/drafting/again.yaml"])["_target_"] == "mylab.again.Again"
    assert "again" in groups([mylab / "conf"])["drafting"]


def test_the_commands_do_what_the_readme_says(mylab: Path, capsys: pytest.CaptureFixture[str]):
    """The suite is silent, the drafter chosen by name and swept beside ours, the rule is lossy, the scorer scores."""
    prompts = mylab.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    model = save_folder(mylab.parent / "tiny", tiny_model())
    tiny = [f"model.path={model}", "dtype=float32", "device=cpu", "threads=1", "task.max_new_tokens=12"]

    def carry_out(words: list[str]) -> str:
        if words[0] == "python":
            exec(compile(words[2], "README.md", "exec"), {})  # noqa: S102
        else:
            own = [] if "task.path=questions.jsonl" in words else [f"task.path={prompts}"]
            assert main([*words[1:], *tiny, *own, *([] if words[1] == "check" else ["timing=untimed"])]) == 0
        return capsys.readouterr().out

    install, suite, check, run, sweep, all_four = COMMANDS
    assert install == ["pip", "install", "-e", "."]
    assert "export PYTHONPATH=$PWD" in BLOCKS[0]
    assert carry_out(suite).endswith("\nok: Again keeps all of them\n")
    assert re.search(r"Again: a chain of at most 4 one-hot candidates, 4 deep.*\nruns$", carry_out(check), re.DOTALL)

    assert "output: exact" in carry_out(run)
    (found,) = results(mylab / "outputs")
    assert found["config"]["drafting"] == {"_target_": "mylab.again.Again", "length": 8}
    assert found["strategy"]["accepted_by_source"].keys() <= {"again"}
    assert found["strategy"]["drafted_per_step"] > 4

    told = carry_out(sweep)
    for name in ("again", "prompt_lookup"):
        assert re.search(rf"^{name} +done .* exact ", told, re.MULTILINE)
    swept = [found for found in results(mylab / "outputs") if found["config"]["drafting"].get("length") != 8]
    assert {found["config"]["drafting"]["_target_"].rpartition(".")[2] for found in swept} == {"Again", "PromptLookup"}

    assert "output: lossy" in carry_out(all_four)
    (found,) = [found for found in results(mylab / "outputs") if found["quality"] is not None]
    assert found["config"]["acceptance"] == {"_target_": "mylab.rules.TopTwo"}
    task = found["quality"]["tasks"]["questions"]
    assert (task["main"], task["n"], task["settings"]["scorer"]) == ("short", 2, "mylab.score.short")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.rglob("result.json"))]


def test_the_rule_keeps_the_second_choice_too(mylab: Path):
    """What the sentence in the README promises, with the target's scores given."""

    class Target:
        def scores(self, row: int) -> torch.Tensor:
            return torch.tensor([0.0, 3.0, 2.0, 1.0])

        def choose(self, row: int, noise: Any, offset: int) -> int:
            return 1

    rule = importlib.import_module("mylab.rules").TopTwo()
    kept = [rule.judge(chain(tokens), Target(), None) for tokens in ([2, 1, 3, 1], [0, 1], [])]
    assert [(verdict.path, verdict.next) for verdict in kept] == [((0, 1), 1), ((), 1), ((), 1)]


def test_the_scorer_counts_words(mylab: Path):
    short, row = importlib.import_module("mylab.score").short, {"answer": "Paris"}
    assert [short(text, row) for text in ("It is PARIS.", "Rome", "Paris " * 11)] == [True, False, False]
