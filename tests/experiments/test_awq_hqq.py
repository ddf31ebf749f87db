"""`decodelab quantize quantization=awq` and `=hqq` on a tiny model, and decoding their copies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.experiments.cli import main
from decodelab.experiments.compose import described, groups
from decodelab.experiments.construct import Constructor
from decodelab.quantization.awq import AWQ
from decodelab.quantization.hqq import HQQ
from decodelab.quantization.quantiser import Quantiser
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.experiments.bench import Bench

ROWS = [{"prompt": f"{i} ab {i} ab one two three", "response": f"hello there {i * 7} x y z"} for i in range(60)]


@pytest.fixture
def calibration(private: Path) -> list[str]:
    file = private / "calibration.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    at = "quantization.calibration"
    return [f"{at}.path={file}", f"{at}.tokens=1024", f"{at}.length=64"]


def quantised(bench: Bench, name: str, *words: str, model: Path | None = None) -> Path:
    folder = bench.root / name
    common = (f"model.path={model or bench.checkpoint}", "dtype=float32", "device=cpu", f"output={folder}")
    assert main(["quantize", *common, f"quantization={name}", "quantization.group_size=16", *words]) == 0
    return folder


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantization.json").read_text())


def logits(folder: Path) -> Tensor:
    source = open_source(ModelSpec(path=str(folder)))
    decoder = Decoder(ModelConfig.from_hf(source.config), source.tensors(), dtype=torch.float32, codes=source.codes)
    cache = decoder.open_cache(1, 32)
    return decoder(chains([list(range(100, 132))], [cache.open()], prompt=True), cache).logits


@pytest.mark.parametrize("settings", [AWQ(), HQQ()])
def test_the_defaults_are_those_of_the_yaml(settings: Quantiser) -> None:
    kind = settings.kind
    assert Constructor().build(described("quantization", kind, groups()["quantization"]), Quantiser, "") == settings


@pytest.mark.parametrize("kind", ["awq", "hqq"])
def test_a_quantised_copy_decodes_and_is_drafted_exactly(bench: Bench, calibration: list[str], kind: str) -> None:
    folder = quantised(bench, kind, *(calibration if kind == "awq" else []))
    made = read(folder)
    assert (made["kind"], len(made["layers"])) == (kind, 14)
    assert {tuple(layer["notes"]) for layer in made["layers"]} == {()}
    assert bench.run(f"model.path={folder}") == 0
    found = bench.result
    assert (found["exactness"]["verdict"], found["exactness"]["identical"]) == ("exact", 6)
    assert found["strategy"]["acceptance_rate"] > 0


def test_scales_go_where_the_copy_is_read_from(bench: Bench, calibration: list[str]) -> None:
    """Norms and biases of the copy are divided as its weights are multiplied: in 8 bits it computes as the original
    does, biases of q, k and v among it."""
    model = save_folder(bench.root / "qwen2", tiny_model("qwen2"))
    folder = quantised(bench, "awq", *calibration, "quantization.bits=8", model=model)
    before, after = (open_source(ModelSpec(path=str(each))).tensors() for each in (model, folder))
    moved = ("input_layernorm.weight", "self_attn.v_proj.bias", "post_attention_layernorm.weight")
    assert all(not torch.allclose(after[f"model.layers.0.{n}"], before[f"model.layers.0.{n}"]) for n in moved)
    want = logits(model)
    assert (logits(folder) - want).norm() / want.norm() < 0.02


def test_an_override_leaves_queries_and_keys_uncut(bench: Bench, calibration: list[str]) -> None:
    """What is given on the command line is added to those of the YAML."""
    folder = quantised(bench, "awq", *calibration, "quantization.overrides={*.v_proj: {bits: 8}}")
    made = read(folder)
    assert made["settings"]["overrides"] == {
        "*.q_proj": {"clip": False},
        "*.k_proj": {"clip": False},
        "*.v_proj": {"bits": 8},
    }
    assert {layer["bits"] for layer in made["layers"] if layer["name"].endswith("v_proj")} == {8}
