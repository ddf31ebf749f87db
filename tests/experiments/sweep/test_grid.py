"""Which cells a command line and the experiments it names amount to."""

import re
from pathlib import Path

import pytest
import yaml

from decodelab.errors import UserError
from decodelab.experiments.compose import Composer, compose
from decodelab.experiments.composition import resolve
from decodelab.experiments.sweep import grid
from decodelab.experiments.sweep.grid import Cell, composed, expand
from decodelab.experiments.sweep.search import check_space

PAIR = "{drafting: none}, {drafting: prompt_lookup, drafting.max_draft: [4, 8]}"


def labels(*words: str, composer: Composer, multirun: bool = True) -> list[str]:
    return [cell.label for cell in expand(words, composer, multirun=multirun)]


def test_the_product_of_what_is_listed(composer: Composer):
    cells = expand(["drafting=none,draft_model", "seed=range(1,4,2)", "batch=2", "task.path='a,b'"], composer)
    assert [cell.label for cell in cells] == [
        "drafting=none seed=1", "drafting=none seed=3", "drafting=draft_model seed=1", "drafting=draft_model seed=3",
    ]  # fmt: skip
    assert cells[3].overrides == ["drafting=draft_model", "seed=3", "batch=2", "task.path='a,b'"]
    assert compose(cells[1].overrides).task.path == "a,b"
    assert labels("acceptance=glob(greed*)", "seed=1,2", composer=composer) == ["seed=1", "seed=2"]
    assert [cell.overrides for cell in expand(["task.path='a b',\"c,d\""], composer)] == [
        ["task.path='a b'"],
        ['task.path="c,d"'],
    ]


def test_without_a_sweep_there_is_one_cell_and_no_label(composer: Composer):
    assert expand(["+seed=1"], composer, multirun=False) == [Cell(["seed=1"], "")]
    with pytest.raises(UserError, match=r"^seed=1,2 lists several values: -m runs each"):
        expand(["seed=1,2"], composer, multirun=False)


@pytest.mark.parametrize("multirun", [True, False])
def test_an_option_comes_with_keys_of_its_own(composer: Composer, multirun: bool):
    """hydra#2888: Hydra hands a key to every option of a sweep, or to none."""
    cells = expand([f"sweep=[{PAIR}]", "task.limit=3"], composer, multirun=multirun)
    assert [cell.label for cell in cells] == [
        "drafting=none",
        "drafting=prompt_lookup max_draft=4",
        "drafting=prompt_lookup max_draft=8",
    ]
    configs = composed(cells, composer)
    assert [getattr(config.drafting, "max_draft", None) for config in configs] == [None, 4, 8]
    assert {config.task.limit for config in configs} == {3}
    assert compose(cells[1].overrides).resolved == configs[1].resolved  # a command line of its own
    assert len({str(config.resolved) for config in configs}) == 3


def test_axes_multiply(composer: Composer):
    """`a,b` with alternatives, and axes by name; a value stands for the key that its axis is named after."""
    assert len(expand([f"sweep=[{PAIR}]", "seed=1,2"], composer)) == 6
    sweep = (
        "{drafting: [none, {drafting: reference, drafting.copy: [5, 9]}], seed: [0, 1], rule: [{acceptance: [greedy]}]}"
    )
    assert labels(f"sweep={sweep}", composer=composer) == [
        "drafting=none seed=0", "drafting=none seed=1",
        "drafting=reference copy=5 seed=0", "drafting=reference copy=5 seed=1",
        "drafting=reference copy=9 seed=0", "drafting=reference copy=9 seed=1",
    ]  # fmt: skip


def test_a_label_is_short_and_says_which(composer: Composer):
    """A key keeps its group unless its option stands before it and no other group has the key."""
    assert labels("drafting.max_draft=4,8", composer=composer) == ["drafting.max_draft=4", "drafting.max_draft=8"]
    both = "{drafting: draft_model, drafting.temperature: 0.5}, {drafting: none, acceptance.temperature: 2}"
    assert labels(f"sweep=[{both}]", "acceptance=sampling", composer=composer) == [
        "drafting=draft_model drafting.temperature=0.5",
        "drafting=none acceptance.temperature=2",
    ]
    assert labels("sweep=[{}, {seed: 3}, {seed: [3]}]", composer=composer) == ["default", "seed=3"]


VALUES = [True, None, 3, 1e-05, "a b", "it's", 'say "x"', "true", "C:\\d", "a/b.gguf", [1, "x"], {"k": [None, "y z"]}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_of_a_file_arrives_as_it_is(value: object, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    content = {"sweep": [{"output": [value]}]}
    (tmp_path / "experiment" / "e.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    composer = Composer([tmp_path])
    (cell,) = expand(["experiment=e"], composer)
    from omegaconf import OmegaConf

    assert OmegaConf.to_container(composer._composed(cell.overrides))["output"] == value


def test_an_experiment_is_a_sweep(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "one.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /acceptance: sampling\nseed: 7\ntask:\n  limit: ???\n"
        f"sweep: {{drafting: [{PAIR}]}}\n"
    )
    (tmp_path / "experiment" / "two.yaml").write_text(
        "# @package _global_\nsweep: {batch: [1, 2], seed: ['${batch}']}\n"
    )
    composer = Composer([tmp_path])
    cells = expand(["experiment=one", "task.limit=2"], composer, multirun=False)
    configs = composed(cells, composer)
    assert [cell.label for cell in cells] == [
        f"drafting={name}" for name in ("none", "prompt_lookup max_draft=4", "prompt_lookup max_draft=8")
    ]
    assert {(type(config.acceptance).__name__, config.seed, config.task.limit) for config in configs} == {
        ("Sampling", 7, 2)
    }
    # of several, named axes multiply, and nothing of one is lost
    assert len(expand(["experiment=[one,two]", "task.limit=2"], composer)) == 6
    assert len(expand(["experiment=one,two", "task.limit=2"], composer)) == 3 + 2
    assert expand(["experiment=one", "sweep=null", "drafting=none"], composer)[0].label == ""
    assert len(expand(["experiment=one", "sweep=[{seed: [1, 2]}]"], composer)) == 2
    with pytest.raises(UserError, match=r"^sweep lists several runs, and here is one"):
        compose(["experiment=one", "task.limit=1"], [tmp_path])


@pytest.mark.parametrize(
    "words",
    [
        ["seed=range(0,1000000000)"],
        ["seed=range(0,11)", "batch=range(0,10)"],
        ["seed=range(0,90)", "sweep=[{batch: 1}, {batch: 2}]"],
        [f"sweep={{seed: {list(range(11))}, batch: {list(range(10))}}}"],
        [f"sweep=[{{seed: {list(range(11))}, batch: {list(range(10))}}}]"],
    ],
)
def test_more_cells_than_anyone_waits_for_are_refused(
    words: list[str], composer: Composer, monkeypatch: pytest.MonkeyPatch
):
    assert grid.MOST == 10_000
    monkeypatch.setattr(grid, "MOST", 100)
    with pytest.raises(UserError, match=r"^these are more cells than the 100 of a sweep, at least 1[01]\d:"):
        expand(words, composer)


def test_all_cells_are_composed_before_one_runs(composer: Composer):
    cells = expand(["drafting=none,prompt_lookup,draft_model", "drafting.min_ngram=1,x"], composer)
    with pytest.raises(UserError, match="so none is") as caught:
        composed(cells, composer)
    reasons = []
    for cell in (cells[0], cells[3], cells[4]):
        with pytest.raises(UserError, match=r"drafting\.min_ngram") as alone:
            compose(cell.overrides)
        reasons.append(str(alone.value))
    assert "drafting has no keys; it is a key of drafting=prompt_lookup" in reasons[0]
    assert str(caught.value) == (
        f"5 of 6 cells cannot be run, so none is: drafting=none min_ngram=1 (and 1 more): {reasons[0]}; "
        f"drafting=prompt_lookup min_ngram=x: {reasons[1]}; "
        f"drafting=draft_model min_ngram=1 (and 1 more): {reasons[2]}; "
        "a key goes with its option in 'sweep=[{GROUP: OPTION, GROUP.KEY: VALUE}, …]'"
    )
    cells = expand(["seed=1.1,1.2,1.3,1.4,5"], composer)
    with pytest.raises(UserError, match=r"^4 of 5 cells cannot be run.*1\.3; and 1 more mistakes$"):
        composed(cells, composer)


FORM = "sweep is a list of mappings of overrides, [{drafting: none}, {seed: [0, 1]}], or a mapping of names to lists"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["seed=range(3,1)"], "seed=range(3,1) names nothing to run"),
        (["seed=range(1,3,0)"], "seed=range(1,3,0): range() arg 3 must not be zero"),
        (["acceptance=glob(x*)"], "acceptance=glob(x*) names nothing to run"),
        (["seed=interval(0,1)"], "seed=interval(0,1) has no end of values: a sweep takes a,b or range(1,4)"),
        (["seed"], "'seed' is no KEY=VALUE: write seed=VALUE"),
        (["sweep=3"], FORM),
        (["sweep=[]"], FORM),
        (["sweep={}"], FORM),
        (["sweep={seed: 3}"], FORM),
        (["sweep=[none]"], f"{FORM}; got 'none'"),
        (["sweep=[{seed: []}]"], "sweep: seed has no values"),
        (["sweep=[{sweep: [1]}]"], f"a sweep stands in no other sweep; {FORM}"),
        (
            ["sweep={a: [{seed: 1}], b: [{seed: 2}]}"],
            "sweep: seed has two values in one cell; a key belongs to one axis",
        ),
        (
            ["sweep=[{seed: [1, 2]}]", "seed=3"],
            "seed=3 is given, and the sweep has values of seed: leave one out, sweep=null for the other",
        ),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_one_line(words: list[str], line: str, composer: Composer):
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        expand(words, composer)


def test_hundreds_of_cells_are_composed_from_few_choices(composer: Composer, monkeypatch: pytest.MonkeyPatch):
    """Hydra takes some 50 ms for each; a choice of options is composed once."""
    fresh = Composer()
    chosen: list[tuple[str, ...]] = []
    honest = fresh._choose
    monkeypatch.setattr(fresh, "_choose", lambda words: chosen.append(words) or honest(words))
    cells = expand([f"sweep=[{PAIR}]", "seed=range(0,40)"], fresh)
    composed(cells, fresh)
    assert len(cells) == 120
    assert len(fresh._chosen) == len(set(chosen)) == 3


@pytest.mark.parametrize("name", Composer().options["experiment"])
def test_every_experiment_composes_and_none_of_its_cells_is_refused(name: str, composer: Composer):
    cells = expand([f"experiment={name}"], composer, multirun=False)
    configs = composed(cells, composer)
    assert len({cell.label for cell in cells}) == len({str(config.resolved) for config in configs}) == len(cells)
    for cell, config in zip(cells, configs, strict=True):
        assert resolve(config).verdict != "refused", cell.label
        if config.search is not None:
            check_space("run", config, cell.overrides, composer)
    second = composer.options["experiment"][name].read_text().splitlines()[1]
    assert re.fullmatch("# .+[.!?]", second)  # `--help` shows it


def test_every_drafter_is_in_an_experiment(composer: Composer):
    """One that needs the target alone belongs in drafters.yaml, one that drafts with a model in pair.yaml; trained
    parts have a path, and are of one target; a datastore is made of a text of the user's."""
    cells = [cell for name in ("drafters", "pair", "larger") for cell in expand([f"experiment={name}"], composer)]
    swept = {config.resolved["drafting"]["_target_"] for config in composed(cells, composer)}
    files = composer.options["drafting"].values()
    contents = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    needy = {"path", "datastore"}
    untrained = {name: content["_target_"] for name, content in contents.items() if not needy & content.keys()}
    assert {name for name, target in untrained.items() if target not in swept} == set()
