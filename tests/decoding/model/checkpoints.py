"""Tiny checkpoints on disk: folders of safetensors and GGUF files, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ENDOFTEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (ENDOFTEXT, START, END)
MERGES = ("Ġ Ġ", "1 2", "a b")
# é, as one character and as e with a combining accent, needs its bytes; the rest is ASCII
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(kind: str = "llama", **settings: Any) -> PreTrainedModel:
    """Random weights; those of norms and biases too, so that a lost or mistaken one shows."""
    values = {
        "vocab_size": len(TOKENS),
        "hidden_size": DIM,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM // HEADS,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": TOKENS.index(START),
        "eos_token_id": TOKENS.index(END),
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values | settings)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.tie_weights()
    return model


def tiny_byte_tokenizer() -> PreTrainedTokenizerFast:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, chat_template=TEMPLATE)


def save_folder(folder: Path, model: PreTrainedModel, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_byte_tokenizer().save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: pairs of interleaved RoPE side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def quantised(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """By the gguf package; in types that it does not quantise to, blocks of whatever bits, their scales moderate."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        columns, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = values.shape[0], values.shape[1] // columns
        raw = np.random.default_rng(0).integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
        at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}[kind.name]
        for half in at:
            raw[..., half : half + 2] = np.array([1e-4], np.float16).view(np.uint8)
        return raw.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    split: str = "gpt-2",
    kind_of: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> dict[str, np.ndarray]:
    """`kind_of` a tensor is its ggml type; `fields` and `tensors` are set over those of the model, None leaves one out.

    Returns what the file stands for: transformers' names and float32 values.
    """
    config = model.config
    arch = config.model_type
    head = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in TOKENS],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": TOKENS.index(START),
        "tokenizer.ggml.eos_token_id": TOKENS.index(END),
        "tokenizer.chat_template": TEMPLATE,
    } | dict(fields or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in head.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    stored: dict[str, np.ndarray | None] = {}
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            stored[gguf_name(name)] = tensor.numpy()
    meant = {}
    for name, values in (stored | dict(tensors or {})).items():
        if values is None:
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
        kind = kind_of(name)
        raw = quantised(values, kind)  # rows are quantised one by one
        turned = permuted(raw, heads) if heads and arch in ("llama", "smollm3") else raw
        writer.add_tensor(name, turned, raw_dtype=kind)
        meant[name] = gguf.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: meant[gguf_name(name)] for name in model.state_dict() if gguf_name(name) in meant}


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    if stem in outer:
        return f"{outer[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"
