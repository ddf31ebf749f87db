"""The group `attention` in commands: what `check` shows, what runs, and what is refused before any weight is loaded."""

import json

import pytest
import torch

from decodelab.attention.options import Window
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.experiments.cli import main
from decodelab.experiments.lab import Warm
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


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (["attention=kv_int8"], "layer 0 would keep 8 bits, and there is no such cache yet"),
        (["attention=sink_window"], "layer 0 would keep 4 sinks, and there is no such cache yet"),
        (["attention=layout", RECIPE], "layer 0 would keep 8 bits, and there is no such cache yet"),
        (
            ["attention=gqa", "attention.kv_heads=3"],
            "layer 0: 4 attention heads cannot share 3 KV heads; 1, 2, 4 can be",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused(attention, message, words, capsys, monkeypatch):
    monkeypatch.setattr(Decoder, "__init__", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    for job in ("check", "run"):
        assert main([job, *words, *attention]) == 2
        told = capsys.readouterr()
        assert message in told.out + told.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "compare_hf=true"], "compare_hf=true compares the model's own attention alone"),
        (["run", "replay=answers.jsonl"], "attention needs a model, and replay has answers and none"),
        (["layers", "output=f.json"], "layers is of the model's own attention: leave attention out"),
        (["quantize", "quantization=rtn", "output=d"], "quantize is of the model's own attention"),
        (["train", "train=medusa", "output=d"], "train is of the model's own attention"),
    ],
)
def test_what_knows_no_other_attention_says_so(command, message, words, capsys):
    assert main([*command, *words, "attention=window"]) == 2
    assert message in capsys.readouterr().err


def test_windows_are_decoded_and_are_another_run(words, bench):
    """The prompt is longer than the window: other tokens than without it, by the loop and by the plain decoder."""
    found = []
    for name, attention in (("own", []), ("windows", ["attention=window", "attention.size=4"])):
        assert main(["run", *words, *attention, f"output={name}"]) == 0
        result = json.loads((bench.root / name / "result.json").read_text())
        assert result["exactness"]["verdict"] in ("exact", "near-tie")
        assert result["memory"]["kv_bytes"] == result["memory"]["kv_bytes_formula"]
        sample = json.loads((bench.root / name / "samples.jsonl").read_text().splitlines()[0])
        found.append((result["key"], tuple(sample["strategy"]["tokens"])))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_a_warm_target_is_of_one_layout(checkpoint):
    """A cell of a sweep with a window is not decoded with what the cell before it has loaded."""
    source, warm, at = open_source(ModelSpec(path=str(checkpoint))), Warm(), (torch.float32, torch.device("cpu"))
    own = warm.target(source, *at).config.layout
    layout = Window(8).layout(own, 4)
    assert warm.holds(source, *at)
    assert not warm.holds(source, *at, layout)
    target = warm.target(source, *at, layout=layout)
    assert target.config.layout == layout != own
    assert warm.target(source, *at, layout=layout) is target
    assert not warm.holds(source, *at)
