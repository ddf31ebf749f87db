"""quantization.overrides=auto: what is chosen, what it takes, and what is refused before anything is measured."""

import json
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.experiments import overrides
from decodelab.experiments.config import QuantizeJob
from decodelab.experiments.overrides import Unit, best
from decodelab.experiments.quantised_folder import write
from decodelab.experiments.quantising import plan
from decodelab.quantization.awq import AWQ
from decodelab.quantization.formats import WRITTEN
from decodelab.quantization.gptq import GPTQ
from decodelab.quantization.hqq import HQQ
from decodelab.quantization.quantiser import Calibration, settings_of
from decodelab.quantization.rtn import RTN
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.quantised import quantize, sentence, told


@pytest.fixture
def texts(private: Path) -> tuple[Path, Path]:
    """To calibrate on, and other rows."""
    files = private / "read.jsonl", private / "other.jsonl"
    for file, first in zip(files, (0, 100), strict=True):
        file.write_text("".join(json.dumps({"prompt": sentence(first + i, 24)}) + "\n" for i in range(40)))
    return files


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Inputs of 32 and of 48 columns."""
    folder = save_folder(tmp_path_factory.mktemp("ragged") / "tiny", tiny_model(intermediate_size=48))
    return open_source(ModelSpec(path=str(folder)))


def calibration(text: Path, tokens: int = 128) -> list[str]:
    at = "quantization.calibration."
    return [f"{at}path={text}", f"{at}length=32", f"{at}tokens={tokens}"]


def unit(more: int, recovered: float) -> Unit:
    return Unit(f"{more} {recovered}", (), 0.0, recovered, more)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed: int):
    g = torch.Generator().manual_seed(seed)
    units = [unit(int(torch.randint(1, 9, (), generator=g)), float(torch.randn((), generator=g))) for _ in range(9)]
    subsets = chain.from_iterable(combinations(units, n) for n in range(10))
    fitting = [some for some in subsets if sum(u.more for u in some) <= 17]
    want = max(sum(u.recovered for u in some) for some in fitting)
    taken = best(units, 17)
    assert sum(u.more for u in taken) <= 17
    assert sum(u.recovered for u in taken) == pytest.approx(want)


def test_the_best_per_byte_first_is_not_the_best():
    assert best([unit(1, 2.0), unit(10, 9.0)], 10) == (unit(10, 9.0),)


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        (RTN(3, 16), "native"),
        (HQQ(3, 64), "native"),
        (AWQ(4, 32), "native"),
        (GPTQ(3, 16, static_groups=False), "native"),
        (GPTQ(3, 64, static_groups=False), "native"),  # all columns in one group: in order
        (RTN(4, 16, symmetric=True), "compressed_tensors"),
        (GPTQ(4, 16, static_groups=False), "gptq_v2"),
    ],
)
def test_the_price_is_what_is_written(private: Path, ragged: Source, texts, settings: Any, form: str):
    if settings.calibration is not None:
        settings = replace(settings, calibration=Calibration(str(texts[0]), tokens=128, length=32))
    made = plan(settings, ragged, torch.float32, WRITTEN[form])
    write(made, private / "made")
    stored = {name: n for file in (private / "made").glob("block-*.safetensors") for name, n in sizes(file).items()}
    found = {layer: sum(n for name, n in stored.items() if name.rpartition(".")[0] == layer) for layer in made.layers}
    none = dict.fromkeys(found, 0)
    assert overrides._prices(made.schemes, made.schemes, made.form) == (sum(found.values()), none)
    assert {layer: overrides._stored(made.form, overrides._blank(s)) for layer, s in made.schemes.items()} == found


def sizes(file: Path) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("words", [("quantization=hqq",), ("quantization=awq", "quantization.grid=1")])
def test_what_is_found_can_be_given_back(bench: Bench, texts, words, capsys):
    """The same assignment, layer by layer, and the prices of the units are those of the files."""
    text, other = texts
    if "quantization=awq" in words:
        words = (*words, *calibration(text))
    auto = ["quantization.overrides=auto", "quantize.tokens=64", f"quantize.path={other}", "quantize.budget=6.5"]
    more = [*words, "quantization.bits=3", "quantization.group_size=64", "quantize.parts=2"]
    assert quantize(bench, *more, *auto) == 0
    folder = bench.root / "copy"
    assert quantize(bench, *more, f"quantization.overrides={folder / 'overrides.yaml'}", output="again") == 0
    again = bench.root / "again"
    blocks = [f"block-{i:05d}.safetensors" for i in range(2)]
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in blocks)
    found = json.loads((folder / "overrides.json").read_text())
    assert 0 < len(found["taken"]) < len(found["units"])
    uniform, _, chosen = found["trials"]
    assert chosen["nbytes"] == uniform["nbytes"] + sum(unit["more"] for unit in found["taken"])


def test_what_is_found_is_kept_before_the_weights_are_made(bench: Bench, texts, monkeypatch, capsys):
    """Killed behind them, before the whole was measured, it is not lost; and what is broken off goes on."""
    words = ["quantization=rtn", "quantization.bits=3", "quantization.group_size=64", "quantize.parts=1"]
    words += ["quantization.overrides=auto", "quantize.tokens=64", f"quantize.path={texts[1]}"]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(overrides, "search", killed)
        assert quantize(bench, *words) == 130
    assert told(capsys) == "decodelab: error: interrupted; of what was tried nothing is kept"
    with monkeypatch.context() as patched:
        patched.setattr(overrides.Chosen, "verified", killed)
        assert quantize(bench, *words) == 130
    folder = bench.root / "copy"
    assert "bits: 8" in (folder / "overrides.yaml").read_text()
    (folder / "model.safetensors.index.json").unlink()
    for name in list(folder.iterdir()):
        if name.name not in ("overrides.yaml", "overrides.json"):
            name.unlink()
    assert quantize(bench, *words) == 0
    assert "chosen" in (folder / "overrides.json").read_text()


def test_a_bound_that_is_told_can_be_given():
    weights, least, most = 442368, 256080, 470000
    for budget, where in ((1.0, "less"), (31.0, "more")):
        with pytest.raises(UserError, match=where) as told:
            overrides._budget(QuantizeJob(budget=budget), weights, least, most, 4, 10**7)
        assert "beside 10.0 MB of the folder that are not of the budget" in str(told.value)
        bound = float(str(told.value).split("than the ")[1].split()[0])
        assert least <= overrides._budget(QuantizeJob(budget=bound), weights, least, most, 4, 10**7) <= most


def test_layers_are_named_whole():
    """A key of layer 1 is none of layers 10 and up; what AWQ says of q stays, and goes with its layers."""
    names = [f"model.layers.{i}.self_attn.{kind}_proj" for i in (1, 10, 11) for kind in "qv"]
    found = replace(AWQ(3), overrides=overrides._with(AWQ(3), names[:2]))
    got = {name: (settings_of(found, name).bits, settings_of(found, name).clip) for name in names}
    assert got == dict(zip(names, [(8, False), (8, True), (3, False), (3, True), (3, False), (3, True)], strict=True))


def test_a_whole_kind_is_one_pattern():
    """Of the same settings for every layer; not where another layer has that name, or keys of its own."""
    layers = [f"model.layers.{i}.self_attn.{kind}_proj" for i in range(3) for kind in "qkv"]
    own = replace(
        AWQ(3), overrides={"*.v_proj": {"clip": False}, "*.0.*.k_proj": {"clip": True}, "*.2.*.q_proj": "none"}
    )
    given = [name for name in layers if name != layers[6]]  # of which no q can be one
    short = replace(own, overrides=overrides._with(own, given, layers))
    assert list(short.overrides)[-1] == "*.v_proj"
    assert {name for name in layers if name in short.overrides} == {*layers[0:2], layers[3], layers[4], layers[7]}
    long = replace(own, overrides=overrides._with(own, given))
    assert [settings_of(short, name) for name in layers] == [settings_of(long, name) for name in layers]


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        ("nan", "quantize.budget must be above 0 and finite, got nan"),
        ("inf", "quantize.budget must be above 0 and finite, got inf"),
        ("0", "quantize.budget must be above 0 and finite, got 0"),
        ("-3", "quantize.budget must be above 0 and finite, got -3"),
        ("4", "quantize.budget=4.0 is less than the 4.500 bits a weight, "),
        ("9.7", "quantize.budget=9.7 is more than the 9.500 bits a weight, "),
        ("90MB", "quantize.budget must be bytes, or bits a weight up to 32, got '90MB'"),
        ("40", "quantize.budget=40.0 is less than the 4.500 bits a weight, "),  # bytes
    ],
)
def test_a_budget_that_cannot_be_is_told_before_the_measuring(bench, texts, monkeypatch, budget, line, capsys):
    monkeypatch.setattr(overrides, "HeldOut", None)
    words = ["quantization=rtn", "quantization.bits=3", "quantization.group_size=16", f"quantize.path={texts[1]}"]
    assert quantize(bench, *words, "quantization.overrides=auto", f"quantize.budget={budget}") == 2
    assert line in told(capsys)


def test_text_that_was_calibrated_on_is_refused(bench, texts, capsys):
    text, other = texts
    mixed = bench.root / "mixed.jsonl"
    mixed.write_text("".join([*other.open(), *text.open()]))
    words = ["quantization=awq", "quantization.grid=1", *calibration(text, tokens=960), "quantization.bits=3"]
    auto = ["quantization.overrides=auto", "quantize.tokens=1280", "quantize.parts=1"]
    for file in (text, mixed):
        assert quantize(bench, *words, *auto, f"quantize.path={file}") == 2
        assert "has a text that the model was calibrated on, read.jsonl:" in told(capsys)
    warn = "quantization.calibration.overlap=warn"
    assert quantize(bench, *words, *auto, f"quantize.path={mixed}", warn) == 0
    assert "has a text that the model was calibrated on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("{1: {bits: 8}}", "quantization.overrides: 1 is no text: give a pattern of layers' names"),
        ("{null: {bits: 8}}", "quantization.overrides: None is no text"),
        ("{'*.v_proj': {bits: '8'}}", "quantization.overrides of *.v_proj: bits must be a whole number, got '8'"),
        ("{'*.v_proj': {clip: 1}}", "quantization.overrides of *.v_proj: clip must be true or false, got 1"),
        ("{'*.v_proj': 8}", "is 8: give none, or a mapping of bits, group_size"),
        ("{'*.v_proj': {1: 2}}", "has 1: give none, or a mapping of bits, group_size"),
        ("{'*.v_proj': {grid: 2}}", "has grid: give none, or a mapping of bits, group_size"),
    ],
)
def test_overrides_of_another_type_are_a_line(bench, given, line, capsys):
    file = bench.root / "overrides.yaml"
    file.write_text(given)
    assert quantize(bench, "quantization=rtn", f"quantization.overrides={file}") == 2
    assert line in told(capsys)
