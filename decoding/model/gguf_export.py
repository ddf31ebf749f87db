"""GGUF files written, for llama.cpp and whatever else reads them: header, tokenizer and tensors of a model whose layers
are codes that ggml's blocks hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...quantization.formats.gguf import blocks_of, kind_of
from .config import LAYOUT, ModelConfig
from .gguf import (
    ARCHITECTURES,
    ROPE_FREQS,
    Header,
    dequantised,
    names_of,
    permutation,
    read_config,
    read_header,
    read_tokenizer,
    stored_name,
)
from .quantised import weight_shapes
from .source import Source
from .storage import Progress, atomic_file

_NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
# How a text is parted before it is cut into tokens: a tokenizer's own pattern, and llama.cpp's name of it
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
_PROBE = (
    "Hello, world's  best: 3.14159 é e\u0301 \u4f60\u597d\n\n\tdef f(x):\n    return x**2  # 12 DON'T \U0001f600\r\n"
)
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # types of tokens


def check_gguf(source: Source) -> None:
    """Refuses a model whose architecture or tokenizer is not written."""
    if source.config.model_type not in ARCHITECTURES:
        raise UserError(
            f"format=gguf holds the architectures {', '.join(ARCHITECTURES)}, and {source.label} is "
            f"{source.config.model_type}: write it with another format"
        )
    if getattr(source.config, LAYOUT, None) is not None:
        raise UserError(f"format=gguf has no words for the {LAYOUT} of {source.label}: write it with another format")
    if source.file is None:
        _tokens(source, source.config.vocab_size)


def write_gguf(source: Source, made: Source, out: Path, progress: Progress | None = None) -> None:
    """Whole or not at all. `made`: of `source`, by quantisation. The header is that of the source's GGUF file; if it is
    none, it is written by config and tokenizer. What is written is read back, and must be the same model."""
    import gguf

    header = None if source.file is None else read_header(source.file)
    config = ModelConfig.from_hf(source.config)
    tensors = made.tensors(progress)
    kinds = {f"{layer}.weight": kind_of(codes.scheme) for layer, codes in made.codes.items()}
    shapes = weight_shapes(made.codes)
    for name in tensors:
        if name not in kinds:
            shapes[name], kinds[name] = tuple(tensors[name].shape), _plain(tensors[name])
    extra = _rope_freqs(source, header)
    sizes = {name: _nbytes(shape, kinds[name]) for name, shape in shapes.items()}
    total = sum(sizes.values())
    with atomic_file(out, total) as file:
        writer = gguf.GGUFWriter(file.name, config.architecture)
        fields = _described(source, config) if header is None else _copied(header)
        for key, (value, kind, item) in fields.items():
            item_type = None if item is None else gguf.GGUFValueType(item)
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), item_type)
        most = max(set(kinds.values()) - {"F32"}, key=[*kinds.values()].count, default="F32")
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{most}" if most != "F32" else "ALL_F32"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if extra is not None:
            writer.add_tensor_info(ROPE_FREQS, extra.shape, extra.dtype, extra.nbytes)
        for name, shape in shapes.items():
            kind = gguf.GGMLQuantizationType[kinds[name]]
            writer.add_tensor_info(stored_name(name), shape, np.dtype(np.float32), sizes[name], kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if extra is not None:
            writer.write_tensor_data(extra)
        done = 0
        for name in shapes:
            writer.write_tensor_data(_stored(made, config, name, tensors))
            done += sizes[name]
            if progress is not None:
                progress(f"writing {out.name}", done, total)
        writer.close()
        _verify(Path(file.name), out, source, config)


def _plain(tensor: Tensor) -> str:
    """The type of what is not quantised. Norms and biases are added to float32 there, and so stored."""
    if tensor.ndim == 1:
        return "F32"
    return {torch.float16: "F16", torch.bfloat16: "BF16"}.get(tensor.dtype, "F32")


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    import gguf

    columns, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(np.prod(shape)) // columns * nbytes


def _stored(made: Source, config: ModelConfig, name: str, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """A tensor as it lies in the file, rows of q and k in llama.cpp's order."""
    layer = name.removesuffix(".weight")
    if layer in made.codes:
        values = blocks_of(layer, made.codes[layer])
    else:
        values = tensors[name]
        values = values.float() if _plain(values) == "F32" else values.view(torch.int16)
    order = permutation(config.architecture, stored_name(name), config.heads, config.kv_heads, len(values))
    if order is not None:
        values = values[torch.from_numpy(order).argsort()]
    return values.contiguous().numpy()


Fields = dict[str, tuple[Any, int, int | None]]  # (value, type, type of its items)


def _copied(header: Header) -> Fields:
    """An array of nothing is not written."""
    return {
        key: (value, *header.types[key])
        for key, value in header.fields.items()
        if key not in _NOT_COPIED and not key.startswith(("split.", "quantize.")) and value not in ([], ())
    }


def _rope_freqs(source: Source, header: Header | None) -> np.ndarray | None:
    """Llama 3's factors."""
    if header is not None:
        return np.array(dequantised(header, ROPE_FREQS)) if ROPE_FREQS in header.tensors else None
    rope = source.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    plain = type(source.config).from_dict(
        source.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    )
    ratio = np.array(ModelConfig.from_hf(plain).inv_freq) / np.array(ModelConfig.from_hf(source.config).inv_freq)
    return ratio.astype(np.float32)


def _described(source: Source, config: ModelConfig) -> Fields:
    import gguf

    kinds, kind = gguf.GGUFValueType, config.architecture
    rope = source.config.rope_parameters
    sizes = {
        "context_length": config.max_positions,
        "embedding_length": config.dim,
        "block_count": config.layers,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab,
    }
    numbers = {"attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": float(rope["rope_theta"])}
    found: Fields = {"general.name": (source.label, kinds.STRING, None)}
    found |= {f"{kind}.{key}": (value, kinds.UINT32, None) for key, value in sizes.items()}
    if rope["rope_type"] in ("linear", "yarn"):
        numbers["rope.scaling.factor"] = float(rope["factor"])
        found[f"{kind}.rope.scaling.type"] = rope["rope_type"], kinds.STRING, None
    if rope["rope_type"] == "yarn":
        length = rope.get("original_max_position_embeddings") or config.max_positions
        found[f"{kind}.rope.scaling.original_context_length"] = length, kinds.UINT32, None
    found |= {f"{kind}.{key}": (value, kinds.FLOAT32, None) for key, value in numbers.items()}
    return found | _tokens(source, config.vocab)


def _tokens(source: Source, vocab: int) -> Fields:
    """Byte-level BPE alone."""
    import gguf

    kinds, tokenizer = gguf.GGUFValueType, source.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {} if backend is None else json.loads(backend.to_str())
    split = _split_of(content)
    if split is None:
        raise UserError(
            f"the tokenizer of {source.label} is none that is written to a GGUF file (byte-level BPE of GPT-2, SmolLM, "
            "Qwen 2 and Llama 3 are): quantise the model's own GGUF file, or choose another format"
        )
    by_id = {i: token for token, i in content["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    by_id |= {i: entry["content"] for i, entry in added.items()}
    types = [
        (_CONTROL if added[i]["special"] else _USER) if i in added else _NORMAL if i in by_id else _UNUSED
        for i in range(vocab)
    ]
    merges = _merges(source, content["model"].get("merges"))
    found: Fields = {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING, None),
        "tokenizer.ggml.pre": (split, kinds.STRING, None),
        "tokenizer.ggml.tokens": ([by_id.get(i, f"[PAD{i}]") for i in range(vocab)], kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.token_type": (types, kinds.ARRAY, kinds.INT32),
        "tokenizer.ggml.merges": (merges, kinds.ARRAY, kinds.STRING),
    }
    ends = dict.fromkeys([tokenizer.eos_token_id, *source.eos_ids])
    ids = dict(zip(("eos", "eot", "eom"), [i for i in ends if i in source.eos_ids], strict=False))
    ids |= {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id}
    found |= {f"tokenizer.ggml.{name}_token_id": (i, kinds.UINT32, None) for name, i in ids.items() if i is not None}
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    found["tokenizer.ggml.add_bos_token"] = begins, kinds.BOOL, None
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template, kinds.STRING, None
    return found


def _merges(source: Source, found: Any) -> list[str]:
    """As a GGUF file has them: two tokens, between them a space, and so none within."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in found or ()]
    wrong = [pair for pair in pairs if len(pair) != 2 or any(" " in token for token in pair)]
    if not pairs or wrong:
        told = f"the merge {wrong[0]}" if wrong else "no merges"
        raise UserError(
            f"the tokenizer of {source.label} has {told}, and a GGUF file needs merges of two tokens without a space: "
            "choose another format"
        )
    return [" ".join(pair) for pair in pairs]


def _split_of(content: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer parts a text."""
    if content.get("model", {}).get("type") != "BPE" or content.get("pre_tokenizer") is None:
        return None
    parts = content["pre_tokenizer"].get("pretokenizers") or [content["pre_tokenizer"]]
    match [part["type"] for part in parts]:
        case ["ByteLevel"]:
            return "gpt-2"
        case ["Digits", "ByteLevel"]:
            return "smollm" if parts[0]["individual_digits"] else None
        case ["Split", "ByteLevel"]:
            return _SPLITS.get(parts[0]["pattern"].get("Regex"))
    return None


def _verify(written: Path, out: Path, source: Source, config: ModelConfig) -> None:
    """Our own reader finds the same sizes, and cuts a text alike."""
    header = read_header(written)
    found = ModelConfig.from_hf(read_config(header))
    if found != config:
        told = next(name for name in ModelConfig.__slots__ if getattr(found, name) != getattr(config, name))
        raise UserError(f"{out} would not hold the model's {told}: write it with another format")
    assert len(names_of(header)) == len(header.tensors) - (ROPE_FREQS in header.tensors)
    if read_tokenizer(header)(_PROBE).input_ids != source.tokenizer(_PROBE).input_ids:
        raise UserError(f"{out} would cut texts into other tokens than {source.label}: write it with another format")
