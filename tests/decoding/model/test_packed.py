"""quantization=gguf: the codes of a GGUF file are the weights that it is dequantised to, and compute the same."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.gguf import read_header
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.packed import layer_types, packed, told
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import LAYERS, save_folder, tiny_model, write_gguf

Type = gguf.GGMLQuantizationType
TOKENS = tuple(range(3, 35))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, kind: Type, architecture: str = "llama", **others: Type) -> Source:
    """Of parts of a name, other types; of norms, biases and the table float32."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if kind.name.endswith("_K") else {}

    def kind_of(name: str) -> Type:
        if "norm" in name or "bias" in name or "token_embd" in name:
            return Type.F32
        return next((other for part, other in others.items() if part in name), kind)

    write_gguf(folder / "tiny.gguf", tiny_model(architecture, **wide), kind_of=kind_of)
    return open_source(ModelSpec(path=str(folder / "tiny.gguf")))


def logits(decoder: Decoder) -> Tensor:
    cache = decoder.open_cache(1, len(TOKENS))
    cache.open()
    with torch.inference_mode():
        return decoder(chains([TOKENS], [0], prompt=True), cache).logits


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0, Type.Q4_K, Type.Q6_K])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_codes_are_the_weights_that_the_file_is_dequantised_to(
    kind: Type, architecture: str, tmp_path: Path, cache: Path
) -> None:
    """The order of q's and k's rows too: llama's are permuted, qwen's are not."""
    plain = write(tmp_path, kind, architecture)
    source = packed(plain)
    assert len(source.codes) == 7 * LAYERS + 1  # the head too
    assert not list(cache.rglob("model.safetensors")), "nothing is dequantised into the cache"
    assert (source.origin, source.digest == plain.digest) == (plain.digest, False)
    with torch.inference_mode():
        got = logits(load_decoder(source, dtype=torch.float32))
    stored = plain.tensors()
    assert set(source.tensors()) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(source.tensors()[name], tensor)
        layer = name.removesuffix(".weight")
        assert layer not in source.codes or torch.equal(source.codes[layer].dequantise(), tensor)
    assert torch.equal(got, logits(load_decoder(plain, dtype=torch.float32)))


def test_bfloat16_multiplies_with_the_codes_where_there_is_a_product(tmp_path: Path) -> None:
    source = packed(write(tmp_path, Type.Q4_1, ffn_down=Type.Q5_0))
    decoder = load_decoder(source, dtype=torch.bfloat16)
    linear = decoder.implementation["linear"]
    if torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512")):
        assert "int4 (native, " in linear or "int4 (int4pack, " in linear
        plain = load_decoder(open_source(ModelSpec(path=str(tmp_path / "tiny.gguf"))), dtype=torch.bfloat16)
        assert decoder.weight_bytes < 0.6 * plain.weight_bytes
    assert "int5 (native, " in linear or "int5 dequantised" in linear, "of PyTorch's own, 5 bits have none"


def test_what_is_not_kept_is_dequantised_counted_and_told(tmp_path: Path) -> None:
    plain = write(tmp_path, Type.Q4_0, attn_v=Type.Q5_1, ffn_down=Type.F16, output=Type.Q5_0)
    source = packed(plain)
    assert told(layer_types(source)) == (
        "11 layers kept packed (Q4_0 × 8, Q5_0 × 3)",
        "quantization=gguf: 4 of 15 layers are dequantised (Q5_1 × 2, F16 × 2)",
    )
    assert "model.layers.0.self_attn.v_proj" not in source.codes
    assert torch.equal(
        logits(load_decoder(source, dtype=torch.float32)), logits(load_decoder(plain, dtype=torch.float32))
    )
    assert told({"a": "Q4_0"}) == ("1 layers kept packed (Q4_0 × 1)", None)


def test_models_without_such_layers_are_refused(tmp_path: Path) -> None:
    floats = write(tmp_path, Type.F16)
    with pytest.raises(UserError, match=r"tiny holds no layer to be kept packed, its types are F16 .*: leave"):
        packed(floats)
    folder = open_source(ModelSpec(path=str(save_folder(tmp_path / "folder", tiny_model()))))
    with pytest.raises(UserError, match=r"keeps the layers of a GGUF file packed, and folder is none.*: name quantiz"):
        packed(folder)


def test_a_scale_that_is_no_number_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, Type.Q4_0)
    file = tmp_path / "tiny.gguf"
    at = read_header(file).tensors["blk.1.ffn_up.weight"].start
    content = bytearray(file.read_bytes())
    content[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    file.write_bytes(content)
    source = packed(open_source(ModelSpec(path=str(file))))
    with pytest.raises(UserError, match=r"'model.layers.1.mlp.up_proj.blocks' of the checkpoint is not finite"):
        load_decoder(source, dtype=torch.float32)


def test_the_only_gguf_file_of_a_folder_is_its_model(tmp_path: Path) -> None:
    file = write(tmp_path, Type.Q4_0)
    folder = open_source(ModelSpec(path=str(tmp_path)))
    assert (folder.digest, folder.file, folder.label) == (file.digest, file.file, tmp_path.name)
    assert ModelConfig.from_hf(folder.config) == ModelConfig.from_hf(file.config)
