"""A folder of quantised weights is a model: it decodes as one with the dequantised weights does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.experiments.quantised_folder import write
from decodelab.experiments.quantising import plan
from decodelab.quantization.formats import NATIVE
from decodelab.quantization.linear import Beside, QuantisedLinear
from decodelab.quantization.rtn import RTN
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.enumeration import unchecked

TEXT = [5, 9, 33, 7, 20, 41, 8, 2, 200, 11, 3]
MIXED = {"*.v_proj": {"bits": 8}, "*.0.mlp.gate_proj": "none", "*.o_proj": {"group_size": -1}}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    unchecked(monkeypatch)


def made(folder: Path, settings: RTN, **config: object) -> Source:
    base = open_source(ModelSpec(path=str(save_folder(folder / "base", tiny_model(**config)))))
    write(plan(settings, base, torch.float32, NATIVE), folder / "copy")
    return open_source(ModelSpec(path=str(folder / "copy")))


def logits(decoder: Decoder) -> Tensor:
    cache = decoder.open_cache(1, 32)
    cache.open()
    return decoder(chains([TEXT], [0], prompt=True), cache).logits


@pytest.mark.parametrize(
    ("settings", "kind", "tied"),
    [
        (RTN(4, 16), "llama", False),
        (RTN(3, 32, symmetric=True), "llama", True),
        (RTN(4, 16, overrides=MIXED), "qwen2", False),
        (RTN(4, 16, overrides=MIXED), "qwen2", True),
    ],
)
def test_its_logits_are_those_of_the_dequantised_weights(tmp_path, settings, kind, tied) -> None:
    source = made(tmp_path, settings, kind=kind, tie_word_embeddings=tied)
    assert len(source.codes) == (13 if settings.overrides else 14)
    decoder = load_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(decoder.blocks[1].qkv, Beside if settings.overrides else QuantisedLinear)
    tensors = dict(source.tensors())
    want = logits(Decoder(ModelConfig.from_hf(source.config), tensors, dtype=torch.float32))
    got = logits(decoder)
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    assert ("lm_head.weight" in tensors) != tied
    base = open_source(ModelSpec(path=str(tmp_path / "base")))
    assert source.origin == base.digest != source.digest
    assert float((logits(Decoder(decoder.config, base.tensors(), dtype=torch.float32)) - want).abs().max()) > 1e-3


@pytest.mark.parametrize("part", ["codes", "scale", "zero"])
def test_a_tensor_that_is_missing_is_said_in_a_line(tmp_path, part) -> None:
    made(tmp_path, RTN(4, 16))
    file, name = tmp_path / "copy" / "block-00001.safetensors", f"model.layers.1.mlp.up_proj.{part}"
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, {"format": "pt"})
    index = tmp_path / "copy" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"^[^\n]*{name} is None, but must be[^\n]*$"):
        open_source(ModelSpec(path=str(tmp_path / "copy")))


def test_scales_that_are_not_finite_are_said_in_a_line(tmp_path) -> None:
    made(tmp_path, RTN(4, 16))
    file = tmp_path / "copy" / "block-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scale"][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    source = open_source(ModelSpec(path=str(tmp_path / "copy")))
    with pytest.raises(UserError, match=r"^'model.layers.1.mlp.up_proj.scale' of the checkpoint is not finite"):
        load_decoder(source, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "bitsandbytes"}, "holds weights quantised by bitsandbytes, which are not read; read are"),
        ({"quant_method": "decodelab", "version": 1}, "its quantization_config is not one of decodelab"),
        ({"quant_method": "decodelab", "version": 2}, "quantization_config is of version 2, and 1 is read"),
    ],
)
def test_another_quantization_config_is_said_in_a_line(tmp_path, config, told) -> None:
    made(tmp_path, RTN(4, 16))
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(UserError, match=rf"^[^\n]*{told}[^\n]*$"):
        open_source(ModelSpec(path=str(tmp_path / "copy")))


def test_a_quantised_model_is_not_quantised_again(tmp_path) -> None:
    with pytest.raises(UserError, match=r"^copy is quantised already: quantise the model that it was made from$"):
        plan(RTN(), made(tmp_path, RTN(4, 16)), torch.float32, NATIVE)
