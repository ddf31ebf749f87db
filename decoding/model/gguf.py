"""GGUF files: their header as a transformers config and tokenizer, their tensors dequantised into safetensors.

Both are made once and kept in the cache under the file's sha256. The header is read by our own few lines and not by the
`gguf` package's reader, which makes an array of every string (6 s for 151,936 tokens) and trusts every length it meets.
"""

import json
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...cache_dir import cache_dir
from ...errors import UserError
from .config import ModelConfig
from .storage import Progress, atomic_file, atomic_folder, first_line
from .weights import check_shapes, shapes_of

# general.architecture is transformers' model_type for all of these (Mistral's files say llama).
ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
_PERMUTED = ("llama", "smollm3")  # rows of q and k are in the order of interleaved RoPE
_FORMAT = 1  # of what the cache holds: a new number makes old entries unused

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # factors that Llama 3 scales its frequencies by: read into the config

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL = 3  # token type

# What ends an answer beside the one id that the header names, as generation_config.json lists it for these families.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")

# Pre-tokenisers whose result is the published tokenizer's. A file with another one would be cut into other tokens.
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "tekken")  # begin with BOS where the header does not say
_WHOLE_WORDS = (*_LLAMA3, "smaug-bpe")  # a word that is a token needs no merges
_SPLITS = ("default", "gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", *_WHOLE_WORDS)

_INSTEAD = "give the model's safetensors folder or hub id instead"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as stored: `shape` in torch's order, `kind` a ggml type, `start` from the beginning of the file."""

    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """`types`: of each field, GGUF's number for its type, and for that of its items."""

    path: Path
    fields: dict[str, Any]
    types: dict[str, tuple[int, int | None]]
    tensors: dict[str, Entry]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.key`; without a default, a file that lacks it is refused."""
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise UserError(f"{self.path} lacks {self.architecture}.{key} in its header: convert the model again")
        return value


def read_header(path: Path) -> Header:
    """Metadata and tensor table, every length checked against the file's; no weight is read."""
    import gguf  # here and below: a package of the same name as this module, and half a second

    if (size := path.stat().st_size) < 24:
        raise UserError(f"{path} is no GGUF file: {size} bytes are less than a header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        if reader.take("4s")[0] != b"GGUF":
            raise UserError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
        version, count, pairs = reader.take("IQQ")
        if version not in (2, 3):
            raise UserError(f"{path} is GGUF version {version}, but 2 and 3 (little-endian) are read: convert it again")
        fields, types = {}, {}
        for _ in range(pairs):
            key = reader.string()
            (kind,) = reader.take("I")
            types[key] = kind, reader.peek("I")[0] if kind == _ARRAY else None
            fields[key] = reader.value(kind)
        table = []
        for _ in range(count):
            name = reader.string()
            dims = reader.take(f"{reader.take('I')[0]}Q")
            table.append((name, dims, *reader.take("IQ")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(
            f"{path} is corrupt: its alignment is {alignment!r}, but a number above 0 is needed; fetch it again"
        )
    begin = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, dims, kind, offset in table:
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise UserError(f"{path} has {name} in ggml type {kind}, unknown to the gguf package: update it") from None
        if not dims or dims[0] % block:
            raise UserError(
                f"{path} is corrupt: {name} is {dims[::-1]}, but its type holds rows of {block}; fetch it again"
            )
        entry = Entry(dims[::-1], kind, begin + offset, math.prod(dims) // block * block_bytes)
        if (end := entry.start + entry.nbytes) > size:
            raise UserError(f"{path} is truncated: {name} ends at byte {end:,} of {size:,}; fetch it again")
        tensors[name] = entry
    return Header(path, fields, types, tensors)


class _Reader:
    """Values at a place that moves on; whatever would lie past the end is one error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def _reserve(self, size: int) -> int:
        at = self.at
        if size > len(self.data) - at:
            raise UserError(f"{self.path} is truncated or corrupt: its header goes on past its end; fetch it again")
        self.at = at + size
        return at

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack_from("<" + form, self.data, self._reserve(struct.calcsize("<" + form)))

    def peek(self, form: str) -> tuple[Any, ...]:
        at = self.at
        found = self.take(form)
        self.at = at
        return found

    def string(self) -> str:
        (size,) = self.take("Q")
        at = self._reserve(size)
        return self.data[at : at + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.take("IQ")
            if item in _SCALARS:
                at = self._reserve(count * struct.calcsize(_SCALARS[item]))
                return struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, at)
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise UserError(f"{self.path} is corrupt: its header has a value of unknown type {kind}; fetch it again")
        return self.take(_SCALARS[kind])[0]


def unpack(path: Path, digest: str) -> Path:
    """The cache's folder for this file: config.json, generation_config.json and the tokenizer's files."""
    folder = cache_dir() / "gguf" / f"{digest}-{_FORMAT}"
    if not folder.is_dir():
        header = read_header(path)
        try:
            config, ends = read_config(header), _end_ids(header)
        except UserError:
            raise
        except (
            TypeError,
            ValueError,
            ArithmeticError,
            StrictDataclassError,
        ) as error:  # a number of another type or size
            raise UserError(f"{path}: its header describes no model ({first_line(error)}); fetch it again") from error
        tokenizer = read_tokenizer(header)
        with atomic_folder(folder) as new:
            config.save_pretrained(new)
            tokenizer.save_pretrained(new)
            (new / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder


def read_config(header: Header) -> PretrainedConfig:
    """The transformers config that the header describes; refuses what it cannot express."""
    path, kind = header.path, header.architecture
    if kind not in ARCHITECTURES:
        raise UserError(f"{path}: GGUF architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if (shards := header.fields.get("split.count", 1)) > 1:
        raise UserError(f"{path} is one of {shards} shards: join them with llama.cpp's llama-gguf-split --merge")
    for key in ("expert_count", "attention.sliding_window"):
        if header.get(key, 0):
            raise UserError(f"{path}: {kind}.{key}={header.get(key)} is not supported in a GGUF file: {_INSTEAD}")
    for name in header.tensors:
        if translate(name) is None and name != ROPE_FREQS:
            raise UserError(f"{path} holds {name}, which no dense {kind} has: {_INSTEAD}")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{path} has no tensor token_embd.weight: it holds no whole model")
    heads, dim = header.get("attention.head_count"), header.get("embedding_length")
    head_dim = header.get("attention.key_length", dim // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.get(key, head_dim) != head_dim:
            raise UserError(f"{path}: {kind}.{key}={header.get(key)} is not supported, only {head_dim}: {_INSTEAD}")
    values = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": dim,
        "intermediate_size": header.get("feed_forward_length"),
        "num_hidden_layers": header.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.get("context_length"),
        "rms_norm_eps": _decimal(header.get("attention.layer_norm_rms_epsilon")),
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header),
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    config = AutoConfig.for_model(kind, **values)
    if ROPE_FREQS in header.tensors:
        config = _with_llama3_rope(header, values, config)
    shapes = {translated: header.tensors[name].shape for name, translated in names_of(header).items()}
    model = ModelConfig.from_hf(config)
    check_shapes(model, shapes, str(path))
    if unused := sorted(set(shapes) - set(shapes_of(model))):
        raise UserError(f"{path} holds {unused[0]}, which a {kind} of this header does not have: {_INSTEAD}")
    return config


def _decimal(value: float) -> float:
    """The number that was written before it became a float32: 1e-5 and not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _rope(header: Header) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": _decimal(header.get("rope.freq_base", 10000.0))}
    prefix = f"{header.architecture}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in header.fields.items() if key.startswith(prefix)}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)
    if linear := header.fields.get(f"{header.architecture}.rope.scale_linear"):  # the key of files before 2023-10
        kind, given = "linear", {"factor": linear}
    if kind == "none" or given.get("factor", 1.0) == 1.0:
        return rope
    others = sorted(set(given) - {"factor", "original_context_length"})
    if kind not in ("linear", "yarn") or others:
        scaling = " ".join([f"{kind!r}", *(f"{key}={given[key]}" for key in others)])
        raise UserError(f"{header.path}: RoPE scaling {scaling} is not supported in a GGUF file: {_INSTEAD}")
    rope |= {"rope_type": kind, "factor": given["factor"]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = given.get("original_context_length") or header.get("context_length")
    return rope


def _with_llama3_rope(header: Header, values: dict[str, Any], plain: PretrainedConfig) -> PretrainedConfig:
    """Llama 3's files hold the factors of its RoPE scaling but not what they were computed from: 8192, 1 and 4, in all
    the models published. Accepted if these give the same factors."""
    factors = dequantised(header, ROPE_FREQS)
    if (factors == 1).all():
        return plain
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = header.get("rope.scaling.original_context_length", 8192)
    config = AutoConfig.for_model(header.architecture, **values | {"rope_parameters": _rope(header) | scaling})
    ratio = np.array(ModelConfig.from_hf(plain).inv_freq) / np.array(ModelConfig.from_hf(config).inv_freq)
    if ratio.shape != factors.shape or not np.allclose(ratio, factors, rtol=1e-4):
        raise UserError(f"{header.path}: the factors in {ROPE_FREQS} are not Llama 3's: {_INSTEAD}")
    return config


def _end_ids(header: Header) -> list[int]:
    fields = header.fields
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = zip(fields.get("tokenizer.ggml.tokens", ()), fields.get("tokenizer.ggml.token_type", ()), strict=False)
    ids += [i for i, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in _ENDS]
    return list(dict.fromkeys(i for i in ids if i is not None))


def read_tokenizer(header: Header) -> PreTrainedTokenizerBase:
    """transformers' own conversion, mended where it departs from the published tokenizers."""
    path, fields = header.path, header.fields
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{path} has no tokenizer of kind gpt2 or llama (tokenizer.ggml.model={kind!r}): {_INSTEAD}")
    if kind == "gpt2" and split not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise UserError(f"{path}: pre-tokeniser {split!r} is not supported; supported: {known}; {_INSTEAD}")
    options = {"add_bos_token": True} if split in _LLAMA3 else {}
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, **options
        )
    except Exception as error:  # the tokenizers library raises no narrower one
        raise UserError(f"{path}: its tokenizer is unreadable ({first_line(error)}); fetch it again") from error
    tokenizer.model_max_length = header.get("context_length")
    backend = tokenizer.backend_tokenizer
    if split == "smollm":  # digits one by one, before all else: "  5" is two spaces and a digit, not " " and " 5"
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    return tokenizer


def dequantise(path: Path, folder: Path, progress: Progress | None = None) -> Path:
    """All tensors of `path` as `folder`/model.safetensors, under transformers' names; made once.

    Floats are kept as stored, quantised tensors become float32: they stand for an integer times a float16, mostly plus
    another, which neither half type can hold. One tensor at a time is in memory.
    """
    out = folder / "model.safetensors"
    if out.is_file():
        return out
    import gguf

    header = read_header(path)
    names = names_of(header)
    kinds = {name: gguf.GGMLQuantizationType(header.tensors[name].kind).name for name in names}
    dtypes = {name: kind if kind in ("F16", "BF16") else "F32" for name, kind in kinds.items()}
    table: dict[str, dict[str, Any]] = {}
    total = 0
    for name in names:
        shape = header.tensors[name].shape
        size = math.prod(shape) * (4 if dtypes[name] == "F32" else 2)
        table[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": (total, total + size)}
        total += size
    entries = {names[name]: entry for name, entry in table.items()}
    head = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    head += b" " * (-len(head) % 8)
    with atomic_file(out, 8 + len(head) + total) as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, entry in table.items():
            file.write(np.ascontiguousarray(dequantised(header, name)).view(np.uint8).data)
            if progress is not None:
                progress(f"dequantising {path.name}", entry["data_offsets"][1], total)
    return out


def names_of(header: Header) -> dict[str, str]:
    """transformers' name of each tensor that has one."""
    return {name: translated for name in header.tensors if (translated := translate(name)) is not None}


def dequantised(header: Header, name: str) -> np.ndarray:
    """One tensor, rows of q and k in transformers' order; bfloat16 as its bits."""
    import gguf

    entry, kind = header.tensors[name], gguf.GGMLQuantizationType(header.tensors[name].kind)
    data = stored_bytes(header, name)
    plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(kind.name)
    if plain is not None:
        values = data.view(plain)
    else:
        try:
            values = gguf.dequantize(data.reshape(gguf.quant_shape_to_byte_shape(entry.shape, kind)), kind)
        except NotImplementedError:
            raise UserError(
                f"{header.path} has {name} in type {kind.name}, which is not dequantised: {_INSTEAD}"
            ) from None
    values = values.reshape(entry.shape)
    order = row_order(header, name)
    return values if order is None else values[order]


def stored_bytes(header: Header, name: str) -> np.ndarray:
    """Of one tensor, as they are."""
    entry = header.tensors[name]
    return np.memmap(header.path, np.uint8, "r", entry.start, (entry.nbytes,))


def row_order(header: Header, name: str) -> np.ndarray | None:
    """Which row of a stored tensor is each of transformers' rows; None where they are the same."""
    heads = header.get("attention.head_count")
    kv_heads = header.get("attention.head_count_kv", heads)
    return permutation(header.architecture, name, heads, kv_heads, header.tensors[name].shape[0])


def permutation(architecture: str, name: str, heads: int, kv_heads: int, rows: int) -> np.ndarray | None:
    match = re.search(r"\.attn_([qk])\.", name)
    if match is None or architecture not in _PERMUTED:
        return None
    # [head, half, 2] → [head, 2, half]
    return np.arange(rows).reshape(heads if match[1] == "q" else kv_heads, -1, 2).swapaxes(1, 2).ravel()


def translate(name: str) -> str | None:
    """transformers' name of a tensor; None where there is none."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, suffix = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else None
    stem, _, suffix = name.rpartition(".")
    return f"{_GLOBAL[stem]}.{suffix}" if stem in _GLOBAL else None


def stored_name(name: str) -> str:
    """The name in a file of one of transformers' tensors."""
    stem, _, suffix = name.rpartition(".")
    stems = {theirs: ours for ours, theirs in _GLOBAL.items()}
    if stem in stems:
        return f"{stems[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(ours for ours, theirs in _LAYER.items() if theirs == part)}.{suffix}"
