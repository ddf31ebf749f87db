"""A merged LoRA adapter is what PEFT's merge_and_unload gives; what is not merged is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import edit_json, save_folder, tiny_model, write_gguf

Q, V = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))


def save_adapter(folder: Path, base: PreTrainedModel, **settings: Any) -> dict[str, torch.Tensor]:
    """A random adapter as PEFT writes it, and the weights of PEFT's own merge."""
    values = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    model = get_peft_model(base, LoraConfig(**values))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder)
    return model.merge_and_unload().state_dict()


def opened(base: Path, adapter: Path | str) -> Source:
    return open_source(ModelSpec(path=str(base), adapter=str(adapter)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3, "layers.1.*down_proj": 5}},
        {"target_modules": "all-linear", "r": 1},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "gaussian", "layers_to_transform": [1]},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_the_merge_is_pefts(settings: dict[str, Any], tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    base = open_source(ModelSpec(path=str(tmp_path / "base"))).tensors()
    merged = save_adapter(tmp_path / "lora", tiny_model(), **settings)
    tensors = opened(tmp_path / "base", tmp_path / "lora").tensors()
    assert set(tensors) == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7)
    assert not torch.equal(tensors[V], base[V])


def test_a_half_precision_base_is_merged_in_float32(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model().to(torch.bfloat16))
    merged = save_adapter(tmp_path / "lora", tiny_model().to(torch.bfloat16).float())
    tensors = opened(tmp_path / "base", tmp_path / "lora").tensors()
    assert tensors[Q].dtype == torch.float32
    torch.testing.assert_close(tensors[Q], merged[Q], rtol=1e-6, atol=1e-7)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16


def test_a_half_precision_adapter_is_merged_in_float32(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model())
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    merged = PeftModel.from_pretrained(tiny_model(), tmp_path / "lora").merge_and_unload().state_dict()
    tensors = opened(tmp_path / "base", tmp_path / "lora").tensors()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_gguf_file_takes_an_adapter(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf", tiny_model())
    merged = save_adapter(tmp_path / "lora", tiny_model())
    tensors = opened(tmp_path / "base.gguf", tmp_path / "lora").tensors()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7)


def test_label_digest_and_size_tell_the_adapter(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model())
    plain = open_source(ModelSpec(path=str(tmp_path / "base")))
    first, again = (opened(tmp_path / "base", tmp_path / "lora") for _ in range(2))
    assert (first.label, first.digest) == ("base+lora", again.digest)
    assert first.bytes == plain.bytes + (tmp_path / "lora" / "adapter_model.safetensors").stat().st_size
    edit_json(tmp_path / "lora" / "adapter_config.json", lora_alpha=7)
    assert len({plain.digest, first.digest, opened(tmp_path / "base", tmp_path / "lora").digest}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"is of type 'IA3', and only LORA is merged: merge it with PEFT and give"),
        ({"use_dora": True}, r"use_dora=True is not handled: merge it with PEFT and give the merged model's folder"),
        ({"fan_in_fan_out": True}, r"fan_in_fan_out=True is not handled"),
        ({"bias": "lora_only"}, r"bias='lora_only' is not handled"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa' changed the base's weights too: save it with"),
        ({"some_new_trick": {"on": 1}}, r"some_new_trick=\{'on': 1\} is not handled"),
        (
            {"r": 5},
            r"does not fit: model.layers.0.\S+ is \(\d+, \d+\), but A is \(4, \d+\) and B is \(\d+, 4\) at rank 5",
        ),
        ({"lora_alpha": None}, r"adapter_config.json: lora_alpha=None, but a number above 0 is needed"),
    ],
)
def test_settings_that_are_not_handled_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model())
    edit_json(tmp_path / "lora" / "adapter_config.json", **changes)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "base", tmp_path / "lora")


PREFIX = "base_model.model."


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (
            None,
            {"model.layers.0.mlp.down_proj.lora_magnitude_vector": [32]},
            r"holds \S+lora_magnitude_vector, which is not",
        ),
        (
            None,
            {"model.layers.7.mlp.up_proj.lora_A.weight": [4, 32]},
            r"it adapts model.layers.7.mlp.up_proj, which the base",
        ),
        (None, {"model.norm.weight": [31]}, r"it holds model.norm.weight as \(31,\), the base as \(32,\)"),
        (
            "model.layers.0.self_attn.q_proj.lora_B.weight",
            {},
            r"holds model.layers.0.self_attn.q_proj.lora_A without its",
        ),
        (
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            {},
            r"q_proj.lora_B.weight without its lora_A: its file is incom",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    drop: str | None, add: dict[str, list[int]], message: str, tmp_path: Path
) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model())
    file = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != f"{PREFIX}{drop}"}
    save_file(tensors | {f"{PREFIX}{name}": torch.zeros(shape) for name, shape in add.items()}, file)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "base", tmp_path / "lora")


def test_an_adapter_of_another_model_does_not_fit(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model(hidden_size=64, head_dim=16))
    with pytest.raises(
        UserError, match=r"lora does not fit: model.layers.0.mlp.down_proj is \(32, 64\), but A is \(4, 64\)"
    ):
        opened(tmp_path / "base", tmp_path / "lora")


def test_ends_that_are_tied_are_not_parted(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model(tie_word_embeddings=True))
    save_adapter(tmp_path / "lora", tiny_model(), modules_to_save=["embed_tokens"])
    with pytest.raises(UserError, match=r"changes model.embed_tokens.weight, but the base ties its two ends: merge it"):
        opened(tmp_path / "base", tmp_path / "lora")


def test_folders_that_hold_no_adapter_are_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", tiny_model())
    save_adapter(tmp_path / "lora", tiny_model())
    file, config = tmp_path / "lora" / "adapter_model.safetensors", tmp_path / "lora" / "adapter_config.json"
    with pytest.raises(UserError, match=r"there is no .*/lroa \(nearest: lora\); give a folder"):
        opened(tmp_path / "base", tmp_path / "lroa")
    with pytest.raises(UserError, match=r"'lab/lora' is not on this machine"):
        opened(tmp_path / "base", "lab/lora")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"adapter_model.safetensors is truncated or no safetensors file"):
        opened(tmp_path / "base", tmp_path / "lora")
    save_file({}, file)
    with pytest.raises(UserError, match=r"lora holds no tensor"):
        opened(tmp_path / "base", tmp_path / "lora")
    file.unlink()
    with pytest.raises(
        UserError, match=r"has no adapter_model.safetensors: give the folder that PEFT's save_pretrained"
    ):
        opened(tmp_path / "base", tmp_path / "lora")
    config.write_text(json.dumps([]))
    config.unlink()
    with pytest.raises(UserError, match=r"has no adapter_config.json: give the folder that PEFT's save_pretrained"):
        opened(tmp_path / "base", tmp_path / "lora")
