"""`decodelab quantize quantization=gptq` on a tiny model, and decoding its copy."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodelab.experiments.cli import main
from decodelab.experiments.compose import described, groups
from decodelab.experiments.construct import Constructor
from decodelab.quantization.gptq import GPTQ
from decodelab.quantization.quantiser import Quantiser
from decodelab.tests.experiments.bench import Bench

CALIBRATION = [{"prompt": f"{i} ab {i} ab one two three", "response": f"hello there {i * 7} x y z"} for i in range(60)]


def quantised(bench: Bench, name: str, *words: str) -> Path:
    folder = bench.root / name
    model = (f"model.path={bench.checkpoint}", "dtype=float32", "device=cpu", f"output={folder}")
    assert main(["quantize", *model, f"quantization={name}", "quantization.group_size=16", *words]) == 0
    return folder


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantization.json").read_text())


@pytest.fixture
def text(private: Path) -> str:
    file = private / "calibration.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in CALIBRATION))
    return f"quantization.calibration.path={file}"


def test_the_defaults_are_those_of_the_yaml():
    assert Constructor().build(described("quantization", "gptq", groups()["quantization"]), Quantiser, "") == GPTQ()


@pytest.mark.parametrize("static_groups", ["true", "false"])
def test_a_quantised_copy_decodes_and_is_drafted_exactly(bench, text, static_groups, capsys):
    size = ("quantization.calibration.tokens=1024", "quantization.calibration.length=64")
    folder = quantised(bench, "gptq", text, *size, f"quantization.static_groups={static_groups}")
    assert "14 layers quantised, 0 left as they are" in capsys.readouterr().out
    made = read(folder)
    assert (made["kind"], made["calibration"]["tokens"], len(made["layers"])) == ("gptq", 1024, 14)
    assert {tuple(layer["notes"]) for layer in made["layers"]} == {()}
    assert bench.run(f"model.path={folder}") == 0
    found = bench.result
    assert (found["exactness"]["verdict"], found["exactness"]["identical"]) == ("exact", 6)
    assert found["strategy"]["acceptance_rate"] > 0


def test_too_little_text_is_said(bench, text, capsys):
    quantised(bench, "gptq", text, "quantization.calibration.tokens=48", "quantization.calibration.length=48")
    assert (
        "warning: quantization.calibration.tokens=48 are fewer than the inputs of 2 layers (of model.layers.0.mlp."
        "down_proj: 64)" in capsys.readouterr().out
    )


def test_a_text_is_asked_for(bench, capsys):
    assert (
        main(["quantize", f"model.path={bench.checkpoint}", "quantization=gptq", f"output={bench.root / 'out'}"]) == 2
    )
    assert "quantization=gptq reads a text to calibrate on: name it with" in capsys.readouterr().err
