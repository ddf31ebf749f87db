"""The group `attention` in commands: what `check` shows, what runs, and what is refused before any weight is loaded."""

import json
from dataclasses import replace

import pytest
import torch

from decodelab.attention.options import Window
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.experiments.cli import main
from decodelab.experiments.compose import compose
from decodelab.experiments.composition import resolve
from decodelab.experiments.format import CHANGED
from decodelab.experiments.lab import Warm
from decodelab.experiments.quality.settings import QualitySettings
from decodelab.kernels.dispatch import Kernels
from decodelab.tests.experiments.bench import Bench

RECIPE = 'attention.layers="1*(window=8) 1*full | kv_heads=1 bits=8"'


@pytest.fixture
def words(bench: Bench) -> list[str]:
    (bench.root / "task.jsonl").write_text(json.dumps({"prompt": "12 ab 12 ab 12 ab 12"}) + "\n")
    model = [f"model.path={bench.checkpoint}", "device=cpu", "dtype=float32", "threads=1"]
    return [*model, f"task.path={bench.root / 'task.jsonl'}", "task.max_new_tokens=12"]


def test_check_draws_the_layers(words, capsys):
    assert main(["check", *words, "attention=hybrid", "attention.size=8", "attention.pattern=wf"]) == 0
    told = capsys.readouterr().out
    assert "attention   0.2 KiB a token" in told  # 2 layers × 2 × 2 heads × 8 × 4 bytes = 256 B
    assert "layer 0  AB" in told
    assert "A  1 layer: 8 tokens back, 2 KV heads, 16 bits" in told
    assert told.splitlines()[-1] == "runs"


def test_quality_is_asked_for_until_it_is_measured(words, bench):
    config, source = compose([*words, "attention=window"]), open_source(ModelSpec(path=str(bench.checkpoint)))
    assert resolve(config, source).warnings == (CHANGED,)
    assert resolve(replace(config, quality=QualitySettings(tasks=("arc_easy",))), source).warnings == ()
    assert resolve(compose([*words, "attention=mha"]), source).warnings == ()


def test_what_cannot_be_carried_out_is_refused(words, capsys, monkeypatch):
    monkeypatch.setattr(Decoder, "__init__", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    for job in ("check", "run"):
        assert main([job, *words, "attention=gqa", "attention.kv_heads=3"]) == 2
        told = capsys.readouterr()
        assert "layer 0: 4 attention heads cannot share 3 KV heads; 1, 2, 4 can be" in told.out + told.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "compare_hf=true"], "compare_hf=true compares the model's own attention alone"),
        (["run", "replay=answers.jsonl"], "attention needs a model, and replay has answers and none"),
        (["layers", "output=f.json"], "layers is of the model's own attention: leave attention out"),
        (["quantize", "quantization=rtn", "output=d"], "quantize is of the model's own attention"),
        (
            ["train", "train=medusa", "output=d"],
            "train=kv trains a model for another attention; train=eagle, medusa, draft and student want",
        ),
    ],
)
def test_what_knows_no_other_attention_says_so(command, message, words, capsys):
    assert main([*command, *words, "attention=window"]) == 2
    assert message in capsys.readouterr().err


def test_every_layout_is_decoded_and_is_another_run(words, bench):
    """The prompt is longer than the windows: the loop's tokens are the plain decoder's, and bytes are the formula's."""
    layouts = {
        "own": [],
        "window": ["attention=window", "attention.size=4"],
        "sinks": ["attention=sink_window", "attention.size=4", "attention.sinks=1"],
        "hybrid": ["attention=hybrid", "attention.size=4", "attention.pattern=wf"],
        "int8": ["attention=kv_int8"],
        "int4": ["attention=kv_int4"],
        "recipe": ["attention=layout", RECIPE],
    }
    keys, tokens, held = set(), {}, {}
    for name, attention in layouts.items():
        assert main(["run", *words, *attention, f"output={name}"]) == 0
        result = json.loads((bench.root / name / "result.json").read_text())
        assert result["exactness"]["verdict"] in ("exact", "near-tie")
        assert result["memory"]["kv_bytes"] == result["memory"]["kv_bytes_formula"]
        keys.add(result["key"])
        held[name] = result["memory"]["kv_bytes"]
        sample = json.loads((bench.root / name / "samples.jsonl").read_text().splitlines()[0])
        tokens[name] = sample["strategy"]["tokens"]
    assert len(keys) == len(layouts)
    assert tokens["window"] != tokens["own"]
    layer = held["own"] // 2  # 64 slots of 2 × 2 heads × 8 × 4 bytes
    assert layer == 64 * 128
    assert held["window"] == 2 * 4 * 128
    assert held["sinks"] == 2 * 5 * 128
    assert held["hybrid"] == 4 * 128 + layer
    assert held["int8"] == 2 * 64 * 4 * (8 + 2)
    assert held["int4"] == 2 * 64 * 4 * (4 + 2)
    assert held["recipe"] == (8 + 64) * 2 * (8 + 2)


def test_a_warm_target_is_of_one_layout(checkpoint):
    """A cell of a sweep with a window is not decoded with what the cell before it has loaded."""
    source, warm, at = open_source(ModelSpec(path=str(checkpoint))), Warm(), (torch.float32, torch.device("cpu"))
    own = warm.target(source, *at).config.layout
    layout = Window(8).layout(own, 4)
    assert warm.holds(source, *at)
    assert not warm.holds(source, *at, layout)
    assert not warm.holds(source, *at, kernels=Kernels(row_invariant=False))
    target = warm.target(source, *at, layout=layout)
    assert target.config.layout == layout != own
    assert warm.target(source, *at, layout=layout) is target
    assert not warm.holds(source, *at)
