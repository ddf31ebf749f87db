"""Words become a typed configuration, or one line that says what is wrong."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.model.source import ModelSpec
from decodelab.drafting.draft_model import DraftModel, DraftSpec
from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.experiments.compose import CONFIGS, Composer, compose, defaults, groups
from decodelab.experiments.construct import Constructor
from decodelab.experiments.tasks import TaskSettings

SHIPPED = Composer()  # reads each YAML once
OPTIONS = [(group, option) for group, options in groups().items() if group != "experiment" for option in options]
TOP = (
    "model, drafting, acceptance, task, quality, tracking, attention, quantization, format, target, dtype, device, "
    "kernels, threads, seed, batch, timing, profile, compare_hf, replay, tasks, against, output, cell, "
    "stop_after_failures, budget_hours, rerun, sweep, search, layers, quantize, context, hardware, plan, peers, pages, "
    "train, trusted"
)
GREEDY = "repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram, bad_words, min_new_tokens"
MODELS = ", ".join(groups()["model"])
DRAFTERS = ", ".join(groups()["drafting"])
EXPERIMENTS = ", ".join(groups()["experiment"])
RULES = ", ".join(groups()["acceptance"])
WARM = ", ".join(option for option, file in groups()["acceptance"].items() if "\ntemperature:" in file.read_text())

LAB = '''
from dataclasses import dataclass, field
from typing import Any, Literal

from decodelab.drafting.none import Nothing

def a_function(): raise AssertionError("only classes are built")

@dataclass(frozen=True)
class Mine:
    """A drafter that is not decodelab's."""

    members: tuple[Any, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    table: dict[str, float] = field(default_factory=dict)
    mode: Literal["a", 1] = "a"
    path: Any = None
    def check(self, target): return []
    def build(self, resources): return Nothing()
    needs = Nothing.needs
    gives = Nothing.gives

@dataclass(frozen=True)
class Nested:
    at: Mine | None
    def check(self, target): return []
    def build(self, resources): return Nothing()
    needs = Nothing.needs
    gives = Nothing.gives
'''


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `mylab` of the user's and a folder of YAML beside it; its path is returned."""
    (tmp_path / "mylab.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mylab", raising=False)
    folder = tmp_path / "my configs"
    (folder / "drafting").mkdir(parents=True)
    (folder / "experiment").mkdir()
    (folder / "drafting" / "mine.yaml").write_text("_target_: mylab.Mine\nmode: a\n")
    return folder


def the_line(*overrides: str, config_dirs=()) -> str:
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        (Composer(config_dirs) if config_dirs else SHIPPED).compose(overrides)
    return str(caught.value)


def test_the_default():
    config = compose([])
    assert config.model == ModelSpec("smollm2-135m")
    assert config.acceptance == Greedy()
    assert config.task == TaskSettings()
    assert (config.dtype, config.device, config.threads, config.seed, config.batch) == ("auto", "auto", None, 0, 1)
    assert (config.timing, config.profile, config.compare_hf, config.output) == ("paired", False, False, None)
    assert set(config.resolved) == set(TOP.split(", ")) - {"train"}
    assert config.resolved["drafting"]["_target_"].startswith("decodelab.drafting.")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_is_built_and_lists_every_key(group, option):
    config = SHIPPED.compose([f"{group}={option}"])
    keys = set(config.resolved[group]) - {"_target_"}
    assert keys == set(inspect.signature(type(getattr(config, group))).parameters)


def test_every_group_has_a_folder_and_a_default():
    assert {folder.name for folder in CONFIGS.iterdir() if list(folder.glob("*.yaml"))} == set(defaults())
    assert all(option in groups()[group] for group, option in defaults().items() if option is not None)


def test_words_reach_the_constructors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "model=qwen2.5-coder-0.5b",
        "drafting=draft_model",
        "drafting.confidence=0",
        "drafting.model.dtype=float32",
    ]
    words += ["drafting.model.path='/m (1)/a=b'", "acceptance=sampling", "acceptance.bad_words=[no, [1, 2]]"]
    config = compose([*words, "task.path=x.jsonl", "task.chat=false", "+seed=3", "++batch=2", "threads=1"])
    assert config.model.path == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert config.drafting == DraftModel(DraftSpec(path="/m (1)/a=b", dtype="float32"), confidence=0.0)
    assert isinstance(config.drafting.confidence, float)
    assert config.acceptance == Sampling(bad_words=("no", (1, 2)))
    assert (config.task.path, config.task.chat, config.seed, config.batch) == ("x.jsonl", False, 3, 2)
    assert config.resolved["drafting"]["model"]["path"] == "/m (1)/a=b"


def test_interpolations_are_resolved():
    assert compose(["drafting=none", "task.max_new_tokens=${batch}", "batch=7"]).resolved["task"]["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # unknown keys, groups and options
        (["sede=3"], f"sede is unknown: did you mean seed? a run has {TOP}"),
        (["attentions=gqa"], f"attentions is unknown: did you mean attention? a run has {TOP}"),
        (["hydra.sweep.dir=x"], f"hydra is unknown: a run has {TOP}"),
        (["resolved={}"], f"resolved is unknown: a run has {TOP}"),
        (
            ["drafting=draft_model", "drafting.max_drft=3"],
            "drafting.max_drft is unknown: did you mean max_draft? "
            "drafting has model, max_draft, proposal, temperature, confidence, vocabulary",
        ),
        (
            ["drafting=draft_model", "drafting.model.nam=x"],
            "drafting.model.nam is unknown: did you mean name? drafting.model has name, path, revision, adapter, dtype",
        ),
        (
            ["drafting=none", "drafting.proposal=sampled"],
            "drafting.proposal is unknown: drafting has no keys; it is a key of drafting=draft_model",
        ),
        (  # Hydra itself would hand the key to the other drafter: hydra#2888
            ["drafting=none", "++drafting.proposal=sampled"],
            "drafting.proposal is unknown: drafting has no keys; it is a key of drafting=draft_model",
        ),
        (
            ["acceptance.temperature=0.5"],
            f"acceptance.temperature is unknown: acceptance has {GREEDY}; it is a key of acceptance={WARM}",
        ),
        (
            ["acceptance.guarantee=lossy"],
            f"acceptance.guarantee is unknown: acceptance has {GREEDY}",
        ),
        (["drafting=draft_mdel"], f"drafting=draft_mdel is unknown: did you mean draft_model? options are {DRAFTERS}"),
        (["drafting=null"], f"drafting=null is unknown: options are {DRAFTERS}"),
        (
            ["model=/x/y.gguf"],
            f"model=/x/y.gguf is unknown: options are {MODELS}; "
            "a hub id, a folder or a GGUF file goes in model.path=/x/y.gguf",
        ),
        (["task=a.jsonl"], "task=a.jsonl is unknown: options are demo, file; a file goes in task.path=a.jsonl"),
        (
            ["experiment=e"],
            f"experiment=e is unknown: options are {EXPERIMENTS}; --config-dir DIR adds DIR/experiment/*.yaml",
        ),
        (
            ["task/path=x"],
            "there is no group task/path; groups are model, drafting, acceptance, task, quality, tracking, "
            "attention, quantization, train, hardware, experiment; a key has dots: task.path",
        ),
        (
            ["acceptance={}"],
            f"acceptance={{}}: acceptance takes the name of an option, {RULES}; keys are acceptance.KEY=VALUE",
        ),
        # words that are no overrides
        (["drafting"], "'drafting' is no KEY=VALUE: write drafting=VALUE"),
        (["seed="], "'seed=' lacks a value: write KEY=VALUE, and null for nothing"),
        (["=3"], "'=3' lacks a key: write KEY=VALUE, and null for nothing"),
        (["~seed"], "'~seed' would delete a key; one that is off is written KEY=null"),
        (
            ["task.path=/a=b"],
            "'task.path=/a=b' is not understood (mismatched input '=' expecting <EOF>); "
            """quote the value: 'task.path="/a=b"'""",
        ),
        (  # what the shell makes of tasks=[{path: x.jsonl}]
            ["tasks=[{path:", "x.jsonl}]"],
            "'tasks=[{path:' is not understood (no viable alternative at input '[{path:'); "
            "its brackets do not match: put single quotes around the whole argument, 'tasks=[…]'",
        ),
        (["x.jsonl}]"], "'x.jsonl}]' is the end of something: put single quotes around the whole argument, 'KEY=[…]'"),
        (
            ["tasks=[{path: <x>}]"],
            "'tasks=[{path: <x>}]' is not understood (token recognition error at: '<'); quote the texts in it, and put "
            """single quotes around the whole argument: 'tasks=[{path: "…"}]'""",
        ),
        (
            ["task.path=a,b"],
            """task.path=a,b lists several values: -m runs each; for one value quote it, 'task.path="a,b"'""",
        ),
        (["task.limit=${foo}"], "task.limit: Interpolation key 'foo' not found"),
        (["task.path=???"], "task.path is missing: give task.path=…"),
        # types
        (["seed=x"], "seed must be an integer, got 'x'"),
        (["seed=1.5"], "seed must be an integer, got 1.5"),
        (["seed=true"], "seed must be an integer, got true"),
        (["seed=null"], "seed must be an integer, got null"),
        (["seed=[1, 2]"], "seed must be an integer, got [1, 2]"),
        (["seed.x=3"], "seed must be an integer, got {x: 3}"),
        (["acceptance.repetition_penalty=[1]"], "acceptance.repetition_penalty must be a number, got [1]"),
        (["acceptance.repetition_penalty=true"], "acceptance.repetition_penalty must be a number, got true"),
        (["acceptance.bad_words=[.5]"], "acceptance.bad_words must be a list of texts or lists of integers, got [0.5]"),
        (["task.limit=few"], "task.limit must be an integer or null, got 'few'"),
        (["task.chat=3"], "task.chat must be true, false or null, got 3"),
        (["compare_hf=1"], "compare_hf must be true or false, got 1"),
        (["task.subset=2024"], "task.subset must be a text or null, got 2024; a text is quoted: 'task.subset=\"…\"'"),
        (["timing=never"], "timing must be paired, anchored or untimed, got 'never'"),
        (["drafting=draft_model", "drafting.model=x"],
         "drafting.model must be a mapping with name, path, revision, adapter, dtype, got 'x'"),
        (["search=5"],
         "search must be a mapping with space, trials, objective, maximise, bound, seed or null, got 5"),
        (['against=""'], "against is empty; name the folder of a run, or null for none"),
        (
            ["trusted=mylab"],
            """trusted must be a list of texts, got 'mylab'; a list is written 'trusted=["mylab"]'""",
        ),
        (
            ['quality.thinking="[<a>, </a>]"'],
            "quality.thinking must be a list of texts or null, got '[<a>, </a>]'; "
            """a list is written 'quality.thinking=["<a>","</a>"]'""",
        ),
        (
            ["quality.thinking=[<a>,</a>]"],
            "'quality.thinking=[<a>,</a>]' is not understood (token recognition error at: '<'); "
            """quote its entries: 'quality.thinking=["<a>","</a>"]'""",
        ),
        # values out of range are the constructors' own errors
        (["batch=0"], "batch must be at least 1, got 0"),
        (["task.limit=0"], "task.limit=0: at least 1, or null for every prompt"),
        (
            ["acceptance=sampling", "acceptance.temperature=0"],
            "acceptance.temperature must be at least 1e-6 and finite; use acceptance=greedy for argmax, got 0.0",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(overrides, line):
    assert the_line(*overrides) == line


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("drafting", "drafting._target_=os.system"),
        ("drafting", "drafting._target_=subprocess.run"),
        ("drafting", "drafting._target_=eval"),
        ("drafting", "drafting._target_=mylab.Mine"),
        ("drafting", "drafting._target_=decodelabel.Nothing"),
        ("model", "model._target_=os.system"),
        ("output", "output={_target_: os.system, command: ls}"),
        ("task.limit", "task.limit={_target_: os.system, command: ls}"),
        ("acceptance.bad_words[0]", "acceptance.bad_words=[{_target_: os.system, command: ls}]"),
        ("trusted[0]", "trusted=[{_target_: os.system, command: ls}]"),
    ],
)  # fmt: skip
def test_what_is_not_trusted_is_neither_imported_nor_run(key, word, mylab, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("it was run")

    monkeypatch.setattr("os.system", never)
    monkeypatch.setattr("subprocess.run", never)
    target = re.search(r"_target_[=:] ?([\w.]+)", word)[1]
    own = "a _target_ is a class of decodelab; trusted=[PACKAGE] adds a package of yours"
    assert the_line("drafting=none", word) == f"{key}._target_={target} is refused: {own}"
    assert "mylab" not in sys.modules


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("decodelab.drafting.nothing.Nothing", "there is no module decodelab.drafting.nothing"),
        ("decodelab.drafting.none.Nihil", "decodelab.drafting.none has no class Nihil of its own"),
        # what a module merely imported does not become ours by that
        ("decodelab.experiments.tasks.Path", "decodelab.experiments.tasks has no class Path of its own"),
        ("decodelab.experiments.tasks.json", "decodelab.experiments.tasks has no class json of its own"),
        ("decodelab.experiments.tasks.encode", "decodelab.experiments.tasks has no class encode of its own"),
        ("mylab.a_function", "mylab has no class a_function of its own"),
        ("absent.Mine", "there is no module absent; install its package, or name its folder in PYTHONPATH"),
    ],
)  # fmt: skip
def test_a_target_is_a_class_of_its_module(target, line, mylab):
    words = ["drafting=none", f"drafting._target_={target}", "trusted=[mylab, absent]"]
    assert the_line(*words) == f"drafting._target_={target}: {line}"


def test_a_part_has_the_shape_of_its_seam():
    assert the_line("drafting=none", "drafting._target_=decodelab.decoding.acceptance.Greedy") == (
        "drafting._target_=decodelab.decoding.acceptance.Greedy is no DrafterSettings"
    )
    assert the_line("drafting=none", "drafting._target_=null").startswith("drafting._target_=None is refused: ")


def test_a_module_that_does_not_import_keeps_its_traceback(mylab):
    (mylab.parent / "mylab.py").write_text("import a_package_that_is_absent")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        compose(["drafting=none", "drafting._target_=mylab.Mine", "trusted=[mylab]"])


def test_parts_of_ones_own(mylab):
    config = compose(
        ["drafting=mine", "trusted=[mylab]", "drafting.members=[{_target_: mylab.Mine, mode: 1}]"], [mylab]
    )
    assert type(config.drafting).__module__ == "mylab"
    assert (config.drafting.members[0].mode, config.drafting.pair) == (1, (1, 1.0))
    assert config.resolved["trusted"] == ["mylab"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("drafting.pair=[1]", "drafting.pair must be a list of integers, got [1]"),
        ("drafting.pair=[1, x]", "drafting.pair must be a list of integers, got [1, 'x']"),
        ("drafting.table={a: x}", "drafting.table.a must be a number, got 'x'"),
        ("drafting.mode=true", "drafting.mode must be a or 1, got true"),
        ("drafting.members=[{_target_: mylab.Mine, mod: 1}]", "drafting.members[0].mod is unknown: did you mean mode? "
         "drafting.members[0] has members, pair, table, mode, path"),
        ("drafting._target_=mylab.Nested", "drafting.mode is unknown: drafting has at; it is a key of drafting=mine"),
    ],
)  # fmt: skip
def test_types_within_a_part(word, line, mylab):
    assert the_line("drafting=mine", "trusted=[mylab]", word, config_dirs=[mylab]) == line


def test_values_within_a_part(mylab):
    built = Constructor(("mylab",)).build(
        {"_target_": "mylab.Mine", "pair": [2, 3], "table": {"a": 1}, "path": [{"_target_": "mylab.Mine"}, {"b": 1}]},
        object, "x",
    )  # fmt: skip
    assert built.pair == (2, 3.0)
    assert isinstance(built.pair[1], float)
    assert built.table == {"a": 1.0}
    assert type(built.path[0]).__name__ == "Mine"
    assert built.path[1] == {"b": 1}


def test_a_required_key_and_an_optional_part(mylab):
    nested = ["drafting=none", "drafting._target_=mylab.Nested", "trusted=[mylab]"]
    assert the_line(*nested) == "drafting.at is missing: give drafting.at=…"
    assert compose([*nested, "drafting.at=null"]).drafting.at is None
    assert compose([*nested, "drafting.at={mode: 1}"]).drafting.at.mode == 1
    assert compose([*nested, "drafting.at={_target_: mylab.Mine}"]).drafting.at.mode == "a"
    assert the_line(*nested, "drafting.at={_target_: decodelab.drafting.none.Nothing}") == (
        "drafting.at._target_=decodelab.drafting.none.Nothing is no Mine or NoneType"
    )


def test_an_experiment_chooses_options_and_keys(mylab):
    experiment = mylab / "experiment" / "e.yaml"
    experiment.write_text("# @package _global_\ndefaults:\n  - override /drafting: none\nseed: 7\ntask:\n  limit: 2\n")
    config = compose(["experiment=e", "task.limit=3"], [mylab])
    assert (config.drafting, config.seed, config.task.limit) == (Nothing(), 7, 3)
    experiment.write_text("seed: 7\n")
    assert the_line("experiment=e", config_dirs=[mylab]) == (
        "a file of the group experiment has the keys of a run: begin it with '# @package _global_'"
    )
    experiment.write_text("# @package _global_\nsede: 7\n")
    assert the_line("experiment=e", config_dirs=[mylab]) == f"sede is unknown: did you mean seed? a run has {TOP}"
    experiment.write_text("# @package _global_\ndefaults:\n  - override /drafting: nothing\n")
    assert "Could not find 'drafting/nothing'" in the_line("experiment=e", config_dirs=[mylab])
    experiment.write_text("# @package _global_\nseed: [7\n")
    assert "expected ',' or ']'" in the_line("experiment=e", config_dirs=[mylab])


def test_a_folder_of_yaml_adds_and_never_replaces(mylab, tmp_path):
    assert the_line(config_dirs=[tmp_path / "no"]) == (
        f"--config-dir {tmp_path / 'no'} is no folder; it holds YAML such as drafting/mine.yaml"
    )
    (mylab / "drafting" / "none.yaml").write_text("_target_: mylab.Mine\n")
    assert the_line(config_dirs=[mylab]) == (
        f"{mylab / 'drafting/none.yaml'} has the name of another option, {CONFIGS / 'drafting/none.yaml'}; rename it"
    )


def test_a_hydra_application_around_it_keeps_its_state(tmp_path):
    from hydra import initialize_config_dir

    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose(["drafting=none"])
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize("word", ["drafting=[none,reference]", "model=[]", "acceptance=[greedy]"])
def test_a_group_takes_one_option(word: str) -> None:
    with pytest.raises(UserError, match="takes the name of an option"):
        compose([word])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff", "is not UTF-8: save it in that encoding"),
        (b"a: &a [*a]", "contains itself by an anchor, or is nested too deep"),
        (b"a: " + b"[" * 20_000, "contains itself by an anchor, or is nested too deep"),
        (b"a: [1", "while parsing a flow sequence"),
        (b"5", "must hold keys, a line KEY: VALUE each; it is 5"),
        (b"[1, 2]", "must hold keys, a line KEY: VALUE each; it is [1, 2]"),
    ],
)
def test_yaml_that_cannot_be_read_is_one_line_and_harms_only_itself(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "drafting").mkdir()
    (tmp_path / "drafting" / "mine.yaml").write_bytes(content)
    (tmp_path / "drafting" / "folder.yaml").mkdir()
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        compose(["drafting=mine"], [tmp_path])
    assert str(tmp_path / "drafting" / "mine.yaml") in str(caught.value)
    with pytest.raises(UserError, match=re.escape(message)):
        compose(["drafting=merge", "drafting.members=[mine, none]"], [tmp_path])
    with pytest.raises(UserError, match=r"drafting.copy is unknown: .* it is a key of drafting=reference"):
        compose(["drafting.copy=3"], [tmp_path])
    assert "folder" not in groups([tmp_path])["drafting"]
