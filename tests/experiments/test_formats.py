"""What is exported, loaded by transformers as a user would: its logits are ours, to the precision of the kernel there.
And what the export leaves of the model's files."""

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.experiments.cli import main
from decodelab.tests.decoding.model.checkpoints import edit_json, save_folder, tiny_model
from decodelab.tests.enumeration import unchecked

TOKENS = tuple(range(3, 35))
SYMMETRIC = ("quantization.symmetric=true",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With biases and a head of its own, and without and tied. Weights of one sign have zero points of 0."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for kind, tied in (("qwen2", False), ("llama", True)):
        model = tiny_model(kind, hidden_size=128, intermediate_size=256, head_dim=32, tie_word_embeddings=tied)
        model.model.layers[0].mlp.up_proj.weight.data.abs_()
        found[kind] = save_folder(root / kind, model)
    return found


@pytest.fixture
def quantize(private: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]) -> Any:
    unchecked(monkeypatch)

    def run(kind: str, form: str, *words: str, name: str = "out") -> Path:
        common = ["dtype=float32", "device=cpu", "threads=1", "quantization=rtn", "quantization.group_size=32"]
        common += ["quantize.least=0.1"]
        given = {word.partition("=")[0] for word in words}
        common = [word for word in common if word.partition("=")[0] not in given]
        if "quantization=w8a8" in words:
            common.remove("quantization.group_size=32")
        folder = private / name
        command = ["quantize", f"model.path={models[kind]}", f"format={form}", f"output={folder}", *common, *words]
        assert main(command) == 0
        return folder

    return run


def ours(folder: Path) -> Tensor:
    source = open_source(ModelSpec(path=str(folder)))
    codes = source.codes
    model = Decoder(ModelConfig.from_hf(source.config), source.tensors(), dtype=torch.float32, codes=codes)
    cache = model.open_cache(1, len(TOKENS))
    cache.open()
    with torch.inference_mode():
        return model(chains([TOKENS], [0], prompt=True), cache).logits


def theirs(folder: Path, **settings: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()
    one = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert one is model.config.tie_word_embeddings
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def apart(folder: Path, **settings: Any) -> float:
    """The greatest difference, as a share of the greatest logit."""
    a, b = ours(folder), theirs(folder, **settings)
    return float((a - b).abs().max() / a.abs().max())


needs_compressed_tensors = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="compressed-tensors is not here: pip install 'decodelab[interop]'"
)
needs_gptqmodel = pytest.mark.skipif(
    find_spec("gptqmodel") is None or find_spec("optimum") is None,
    reason="gptqmodel and optimum are not here: pip install 'decodelab[interop]'",
)
MIXED = "quantization.overrides={*.v_proj: {bits: 8}, *.0.mlp.*: {group_size: 64}, *.1.mlp.*: none}"


@needs_compressed_tensors
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("qwen2", SYMMETRIC),
        ("llama", (*SYMMETRIC, "quantization.bits=8", "quantization.group_size=-1")),
        ("llama", (*SYMMETRIC, "quantization.bits=3")),
        ("llama", (*SYMMETRIC, MIXED)),
    ],
)
def test_transformers_reads_compressed_tensors(quantize: Any, kind: str, words: Sequence[str]) -> None:
    assert apart(quantize(kind, "compressed_tensors", *words)) < 1e-5


@needs_compressed_tensors
def test_transformers_reads_asymmetric_codes_if_it_dequantises(quantize: Any) -> None:
    """llm-compressor#1618: it does not load them otherwise. It dequantises in the scale's float16."""
    from transformers import CompressedTensorsConfig

    folder = quantize("qwen2", "compressed_tensors")
    assert apart(folder, quantization_config=CompressedTensorsConfig(dequantize=True)) < 1e-3


@needs_compressed_tensors
def test_transformers_rounds_the_inputs_of_w8a8(quantize: Any) -> None:
    """With a scale that differs from ours by 1 in 255, so that other codes are chosen here and there."""
    folder = quantize("llama", "compressed_tensors", "quantization=w8a8")
    assert apart(folder) < 0.05


@needs_gptqmodel
@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        ("qwen2", "gptq", ()),
        ("qwen2", "gptq_v2", ()),
        ("llama", "gptq", (*SYMMETRIC, "quantization.bits=8")),
        ("llama", "gptq_v2", (*SYMMETRIC, "quantization.bits=3", "quantization.group_size=-1")),
        ("llama", "gptq_v2", ("quantization.bits=2",)),
        ("qwen2", "gptq_v2", ("quantization.overrides={*.0.mlp.*: none}",)),
        ("qwen2", "awq", ()),
        ("llama", "awq", (*SYMMETRIC, "quantization.overrides={*.0.mlp.*: none}")),
    ],
)
def test_transformers_reads_gptq_and_awq(quantize: Any, kind: str, form: str, words: Sequence[str]) -> None:
    """Their kernels compute in half types."""
    assert apart(quantize(kind, form, *words)) < 2e-3


@needs_gptqmodel
def test_transformers_reads_columns_in_any_group(quantize: Any, private: Path) -> None:
    text = private / "text.txt"
    text.write_text("one two three four five " * 200)
    words = (
        f"quantization.calibration.path={text}",
        "quantization.calibration.tokens=256",
        "quantization.calibration.length=64",
    )
    folder = quantize("qwen2", "gptq_v2", "quantization=gptq", "quantization.static_groups=false", *words)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["desc_act"] is True
    assert apart(folder) < 2e-3


@pytest.mark.parametrize("form", ["gptq_v2", "awq", "compressed_tensors"])
@pytest.mark.parametrize("words", [(), SYMMETRIC], ids=["asymmetric", "symmetric"])
def test_every_format_holds_the_same_weights(quantize: Any, form: str, words: Sequence[str]) -> None:
    mixed = () if form == "gptq_v2" else ("quantization.overrides={*.v_proj: none}",)
    native = quantize("qwen2", "native", *words, *mixed, name="native")
    assert torch.equal(ours(quantize("qwen2", form, *words, *mixed)), ours(native))


def test_version_1_of_gptq_tells_what_it_moved(quantize: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantize("qwen2", "gptq", name="one")
    assert "note, of 1 layers: format=gptq has no zero point of 0: 1 in its place" in capsys.readouterr().out
    report = json.loads((folder / "quantization.json").read_text())
    noted = [layer["name"] for layer in report["layers"] if layer["notes"]]
    assert noted == ["model.layers.0.mlp.up_proj"]
    second = quantize("qwen2", "gptq_v2", name="two")
    gap = float((ours(folder) - ours(second)).abs().max())
    assert 0 < gap < 0.5 * float(ours(second).abs().max())


@pytest.mark.parametrize("form", ["native", "gptq_v2", "awq", "compressed_tensors"])
def test_a_tied_head_stays_tied_and_none_is_quantised(quantize: Any, form: str) -> None:
    """llm-compressor#1969: an export that had untied it was larger than the model."""
    folder = quantize("llama", form)
    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += list(opened.keys())
    assert "model.embed_tokens.weight" in names
    assert not any(name.startswith("lm_head") for name in names)
    assert ModelConfig.from_hf(open_source(ModelSpec(path=str(folder))).config).tied


def test_what_a_format_does_not_hold_is_refused_before_the_text_is_read(
    private: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """llm-compressor#1983. The calibration text that is named is not there."""
    words = ["quantization=gptq", "quantization.calibration.path=nowhere.jsonl", "quantization.group_size=128"]
    common = [f"model.path={models['llama']}", "device=cpu", "output=out", "quantization.static_groups=false"]
    assert main(["quantize", "format=awq", *common, *words]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert (
        "format=awq does not hold these layers (columns are not grouped in order: model.layers.0,1.mlp.down_proj)"
        in told
    )
    assert not (private / "out").exists()
    assert main(["quantize", "format=gguf2", *common, *words]) == 2
    assert "format must be one of native, gptq, gptq_v2, awq, compressed_tensors" in capsys.readouterr().err
    assert main(["run", "format=awq", f"model.path={models['llama']}"]) == 2
    assert "format=awq is of the job quantize" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["native", "awq"])
def test_what_is_broken_off_goes_on_and_comes_to_the_same_bytes(
    quantize: Any, monkeypatch: pytest.MonkeyPatch, private: Path, form: str
) -> None:
    """In bfloat16, in which what is not quantised loses digits as it is stored."""
    from decodelab.experiments import quantised_folder as module

    text = private / "text.txt"
    text.write_text("one two three four five " * 200)
    words = (
        "dtype=bfloat16",
        "quantization=awq",
        f"quantization.calibration.path={text}",
        "quantization.calibration.tokens=256",
        "quantization.calibration.length=64",
    )
    whole = quantize("qwen2", form, *words, name="whole")
    honest, blocks = module._write_block, []

    def broken(file: Path, *rest: Any) -> None:
        blocks.append(file)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        honest(file, *rest)

    monkeypatch.setattr(module, "_write_block", broken)
    with pytest.raises(AssertionError):  # the exit code is 130
        quantize("qwen2", form, *words, name="part")
    part = private / "part"
    assert not (part / "model.safetensors.index.json").exists()
    assert main(["check", f"model.path={part}", "device=cpu"]) == 2, "what is not whole is no model"
    monkeypatch.setattr(module, "_write_block", honest)
    assert quantize("qwen2", form, *words, name="part") == part
    files = sorted(path.name for path in whole.iterdir())
    assert files == sorted(path.name for path in part.iterdir())
    for name in files:
        if name.endswith((".safetensors", "config.json", "index.json")):
            assert (part / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, private: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    free = shutil.disk_usage(private)._replace(free=1000)
    monkeypatch.setattr("decodelab.decoding.model.storage.shutil.disk_usage", lambda path: free)
    words = [f"model.path={models['llama']}", "device=cpu", "output=out", "quantization=rtn", "format=awq"]
    assert main(["quantize", *words, "quantization.group_size=32"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "block-00000.safetensors needs" in told
    assert "has 0.00 GB free: free some space, or name a folder on a larger disk" in told


def test_a_checkpoint_that_says_what_it_is_not_is_one_line(quantize: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantize("llama", "gptq_v2")
    config = json.loads((folder / "config.json").read_text())
    for changes, told in (
        ({"checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"bits": 8}, "but must be"),
        ({"bits": "four"}, "quantization_config has bits='four', but must have"),
        ({"quant_method": "exl3"}, "quantised by exl3, which are not read"),
    ):
        edit_json(folder / "config.json", quantization_config=config["quantization_config"] | changes)
        capsys.readouterr()
        assert main(["check", f"model.path={folder}", "device=cpu"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert told in error
