"""`quantization=gguf` in a run, and `quantize format=gguf`: a file that our loader and gguf's own read alike."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.experiments import identity
from decodelab.experiments.cli import main
from decodelab.experiments.compose import described, groups
from decodelab.experiments.construct import Constructor
from decodelab.quantization.gguf import GGUF
from decodelab.quantization.quantiser import Quantiser
from decodelab.tests.decoding.model.checkpoints import (
    edit_json,
    gguf_name,
    permuted,
    save_folder,
    tiny_model,
    write_gguf,
)
from decodelab.tests.experiments.bench import Bench

Type = gguf.GGMLQuantizationType
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXED = "quantization.overrides={*.v_proj: {type: Q8_0}}"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {}),
}


def test_the_defaults_are_those_of_the_yaml() -> None:
    settings = Constructor().build(described("quantization", "gguf", groups()["quantization"]), Quantiser, "")
    assert settings == GGUF()


def opened(path: Path) -> Source:
    return open_source(ModelSpec(path=str(path)))


def model_of(folder: Path, name: str) -> Path:
    kind, settings = MODELS[name]
    return save_folder(folder / name, tiny_model(kind, **settings))


def quantize(model: Path, output: Path, *words: str) -> int:
    common = [f"model.path={model}", f"output={output}", "dtype=float32", "device=cpu", "threads=1"]
    given = {word.partition("=")[0] for word in words}
    return main(["quantize", *(word for word in common if word.partition("=")[0] not in given), *words])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", ("quantization=gguf", "quantization.type=Q4_0")),
        (
            "llama3",
            ("quantization=gguf", "quantization.type=Q4_1", "quantization.overrides={*.v_proj: {type: Q8_0}}"),
        ),
        ("qwen2", ("quantization=gguf", "quantization.type=Q8_0")),
        ("qwen3", ("quantization=rtn", "quantization.group_size=32", "quantization.overrides={*.0.mlp.*: none}")),
        ("smollm3", ("quantization=rtn", "quantization.group_size=32", "quantization.symmetric=true")),
    ],
)
def test_the_file_is_the_quantised_model(
    name: str, words: tuple[str, ...], private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a header to take, it is written by config and tokenizer."""
    model = model_of(private, name)
    words = (*words, "quantize.least=0.5")
    assert quantize(model, private / "out", "format=gguf", *words) == 0
    assert sorted(path.name for path in (private / "out").iterdir()) == ["out.gguf", "quantization.json"]
    if name == "llama":
        assert quantize(model, private / "out", "format=gguf", *words) == 2
        assert "out holds a finished model already: load it with model.path=" in capsys.readouterr().err
    assert identity._folder(str(private / "out" / "out.gguf")) == private / "out"  # where its record is
    assert quantize(model, private / "native", *words) == 0
    source, native = opened(private / "out"), opened(private / "native")
    assert ModelConfig.from_hf(source.config) == ModelConfig.from_hf(native.config)
    assert source.tokenizer.chat_template == native.tokenizer.chat_template
    assert source.eos_ids[:1] == native.eos_ids  # behind it, the reader's own guess
    text = "<|im_start|>ab  12 é\n"
    assert source.tokenizer(text).input_ids == native.tokenizer(text).input_ids
    ours, want = source.tensors(), native.tensors()
    assert set(ours) == set(want)
    tolerance = 2**-11 if name == "qwen3" else 0.0  # of float16, to which scale · zero is rounded
    for key, tensor in want.items():
        assert torch.allclose(ours[key], tensor, rtol=0, atol=tolerance * float(tensor.abs().max())), key
    reader = gguf.GGUFReader(private / "out" / "out.gguf")
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert set(theirs) - {"rope_freqs.weight"} == {gguf_name(key) for key in ours}
    heads = {"q_proj": native.config.num_attention_heads, "k_proj": native.config.num_key_value_heads}
    for key, tensor in ours.items():
        stored = theirs[gguf_name(key)]
        turn = heads.get(key.split(".")[-2], 0) if source.config.model_type in ("llama", "smollm3") else 0
        values = permuted(tensor.numpy(), turn) if turn else tensor.numpy()
        assert np.array_equal(gguf.dequantize(stored.data, stored.tensor_type).reshape(values.shape), values), key
        if tensor.ndim == 1:
            assert stored.tensor_type == Type.F32


def test_types_are_those_asked_for_and_the_rest_is_as_the_run_has_it(private: Path) -> None:
    words = ("quantization=gguf", "quantization.type=Q4_0", MIXED)
    assert quantize(model_of(private, "qwen2"), private / "out", "format=gguf", "dtype=bfloat16", *words) == 0
    reader = gguf.GGUFReader(private / "out" / "out.gguf")
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == Type.Q4_0
    assert kinds["blk.1.attn_v.weight"] == Type.Q8_0
    assert kinds["token_embd.weight"] == kinds["output.weight"] == Type.BF16
    assert kinds["blk.0.attn_q.bias"] == kinds["output_norm.weight"] == Type.F32
    assert reader.get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert json.loads((private / "out" / "quantization.json").read_text())["kind"] == "gguf"


def test_a_gguf_files_header_is_taken_as_it_is(private: Path) -> None:
    fields = {"general.name": "Tiny", "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model = private / "source.gguf"
    write_gguf(model, tiny_model(), split="smollm", fields=fields)
    assert quantize(model, private / "out", "format=gguf", "quantization=gguf", "quantization.type=Q4_1") == 0
    old, new = gguf.GGUFReader(model), gguf.GGUFReader(private / "out" / "out.gguf")
    for key, field in old.fields.items():
        if not key.startswith("GGUF."):
            assert new.get_field(key).contents() == field.contents(), key
            assert new.get_field(key).types == field.types, key
    assert set(new.fields) - set(old.fields) == {"general.file_type", "general.quantization_version"}
    before, after = opened(model), opened(private / "out")
    assert after.config.to_dict() | {"_name_or_path": ""} == before.config.to_dict() | {"_name_or_path": ""}
    q = before.tensors()["model.layers.0.self_attn.q_proj.weight"].numpy()
    want = gguf.dequantize(gguf.quantize(q, Type.Q4_1), Type.Q4_1)
    assert np.array_equal(after.tensors()["model.layers.0.self_attn.q_proj.weight"].numpy(), want)


def test_what_is_packed_decodes_exactly_and_is_on_record(
    bench: Bench, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"attn_v": Type.Q5_1, "norm": Type.F32, "token_embd": Type.F16}
    file = private / "tiny.gguf"
    write_gguf(
        file,
        tiny_model(),
        kind_of=lambda name: next((kind for part, kind in kinds.items() if part in name), Type.Q4_1),
    )
    words = (f"model.path={file}", "quantization=gguf", "drafting=prompt_lookup")
    assert bench.run(*words) == 0
    packed = bench.result
    assert packed["exactness"]["verdict"] == "exact"
    told = "quantization=gguf: 2 of 15 layers are dequantised (Q5_1 × 2)"
    assert told in packed["warnings"]
    about = packed["provenance"]["quantised"]
    assert (about["kind"], about["settings"]) == ("gguf", "13 layers kept packed (Q4_1 × 13)")
    assert "int4" in packed["implementation"]["linear"]
    answers = [line["strategy"]["tokens"] for line in bench.lines("samples.jsonl")]
    assert bench.run(*words[:1], words[2], f"output={private / 'plain'}") == 0
    plain = [
        json.loads(line)["strategy"]["tokens"]
        for line in (private / "plain" / "samples.jsonl").read_text().splitlines()
    ]
    assert answers == plain
    capsys.readouterr()
    assert main(["check", *words, "device=cpu", "dtype=float32"]) == 0
    shown = capsys.readouterr().out
    assert "13 layers kept packed (Q4_1 × 13)" in shown
    assert f"warning: {told}" in shown


def refused(capsys: pytest.CaptureFixture[str], code: int, message: str) -> None:
    told = capsys.readouterr().err
    assert code == 2
    assert told.count("\n") == 1, told
    assert message in told


def test_what_cannot_be_is_one_line(private: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = model_of(private, "llama"), private / "out"
    capsys.readouterr()
    code = main(["run", f"model.path={model}", "quantization=gguf", "device=cpu"])
    refused(capsys, code, "keeps the layers of a GGUF file packed, and llama is none, or has an adapter: name quantiz")
    code = quantize(model, out, "format=gguf", "quantization=gguf")
    refused(capsys, code, "quantization.type=null keeps what a GGUF file has, for a run: name one of Q4_0, Q4_1, Q8_0")
    code = quantize(model, out, "format=gguf", "quantization=rtn", "quantization.bits=3")
    refused(capsys, code, "format=gguf does not hold these layers (bits=3 is neither 4 nor 8: model.layers.0,1.self")
    code = quantize(model, out, "format=gguf", "quantization=rtn", "quantization.overrides=auto")
    refused(capsys, code, "overrides=auto is not of format=gguf")
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    code = quantize(model, out, "format=gguf", "quantization=gguf", "quantization.type=Q4_0")
    refused(capsys, code, "is not empty (it holds mine): name another output")


def test_a_tokenizer_of_another_kind_is_refused_and_nothing_is_left(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = model_of(private, "llama"), private / "out"
    content = json.loads((model / "tokenizer.json").read_text())
    words = ("format=gguf", "quantization=gguf", "quantization.type=Q4_0")
    edit_json(model / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})
    assert quantize(model, out, *words) == 2
    assert "the tokenizer of" in capsys.readouterr().err
    # the same parts, and a rule before them that the file does not hold
    edit_json(model / "tokenizer.json", pre_tokenizer=content["pre_tokenizer"], normalizer={"type": "Lowercase"})
    assert quantize(model, out, *words) == 2
    assert "would cut texts into other tokens than" in capsys.readouterr().err
    assert not list(out.glob("*.gguf"))
    with pytest.raises(UserError, match="out holds a quantisation that was broken off: the `decodelab quantize` comm"):
        opened(out)
    edit_json(model / "tokenizer.json", normalizer=None)
    assert quantize(model, out, *words) == 0, "what the failure left is not in the way"
