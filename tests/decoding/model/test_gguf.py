"""GGUF files become the model they were made from: config, tokenizer and tensors."""

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decodelab.decoding.model import gguf as gguf_files
from decodelab.decoding.model.gguf_export import check_gguf
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import (
    END,
    ENDOFTEXT,
    LAYERS,
    START,
    TEMPLATE,
    TOKENS,
    edit_json,
    save_folder,
    tiny_model,
    write_gguf,
)

KINDS = ("llama", "qwen2", "qwen3", "smollm3")
Type = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path) -> Source:
    return open_source(ModelSpec(path=str(path)))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(1, 40)[None]).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_model_it_was_made_from(kind: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    written = write_gguf(tmp_path / "tiny.gguf", model)
    source = opened(tmp_path / "tiny.gguf")
    tensors = source.tensors()
    assert set(tensors) == set(written)
    assert all(np.array_equal(tensors[name].numpy(), values) for name, values in written.items())
    again = AutoModelForCausalLM.from_config(source.config).eval()
    again.load_state_dict(dict(tensors), strict=not tied)
    again.tie_weights()
    assert torch.equal(logits(again), logits(model))
    assert source.config.rms_norm_eps == 1e-5  # and not the float32 next to it
    assert source.config.tie_word_embeddings is tied


def test_a_head_may_be_wider_than_its_share(tmp_path: Path) -> None:
    """Qwen3-0.6B: 16 heads of 128 over 1024."""
    written = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3", head_dim=16))
    source = opened(tmp_path / "tiny.gguf")
    assert source.config.head_dim == 16
    assert source.tensors()["model.layers.0.self_attn.q_proj.weight"].shape == (64, 32)
    assert set(source.tensors()) == set(written)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tensors_are_those_transformers_reads(kind: str, tmp_path: Path) -> None:
    """The order of q's and k's rows above all: llama's are permuted, qwen's are not."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model(kind), fields={"general.name": "tiny"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    ours = opened(tmp_path / "tiny.gguf").tensors()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0])
def test_quantised_tensors_become_the_float32_they_stand_for(kind: Type, tmp_path: Path) -> None:
    written = write_gguf(
        tmp_path / "tiny.gguf", tiny_model(), kind_of=lambda name: Type.F32 if "norm" in name else kind
    )
    tensors = opened(tmp_path / "tiny.gguf").tensors()
    for name, values in written.items():
        assert tensors[name].dtype == torch.float32
        assert np.array_equal(tensors[name].numpy(), values)


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16)])
def test_half_floats_are_kept_as_stored(kind: Type, dtype: torch.dtype, tmp_path: Path) -> None:
    written = write_gguf(
        tmp_path / "tiny.gguf", tiny_model(), kind_of=lambda name: Type.F32 if "norm" in name else kind
    )
    tensors = opened(tmp_path / "tiny.gguf").tensors()
    for name, values in written.items():
        assert tensors[name].dtype == (torch.float32 if "norm" in name else dtype)
        assert np.array_equal(tensors[name].float().numpy(), values)


def test_the_second_call_reads_the_cache_and_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), split="qwen2")
    first, seen = opened(tmp_path / "tiny.gguf"), []
    tensors = first.tensors(lambda what, done, total: seen.append((what, done, total)))
    sizes = [tensor.nbytes for tensor in tensors.values()]
    assert {what for what, _, _ in seen} == {"dequantising tiny.gguf"}
    assert len(seen) == len(tensors)
    assert seen[-1][1:] == (sum(sizes), sum(sizes))
    monkeypatch.setattr(gguf_files, "read_header", lambda path: pytest.fail("read again"))
    again = opened(tmp_path / "tiny.gguf")
    assert (again.label, again.eos_ids, again.digest, again.bytes) == (
        first.label,
        first.eos_ids,
        first.digest,
        first.bytes,
    )
    assert again.config.to_dict() == first.config.to_dict()
    text = "<|im_start|>ab  12 é\n"
    assert again.tokenizer(text).input_ids == first.tokenizer(text).input_ids
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in tensors.items())


def test_the_tokenizer_keeps_specials_template_and_every_end(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    source = opened(tmp_path / "tiny.gguf")
    tokenizer = source.tokenizer
    assert source.eos_ids == (TOKENS.index(END), TOKENS.index(ENDOFTEXT))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (START, END)
    assert tokenizer.chat_template == TEMPLATE
    chat = [{"role": "user", "content": "ab"}]
    ids = [TOKENS.index(START), TOKENS.index("ab"), TOKENS.index(END)]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == ids
    assert tokenizer.decode(ids) == f"{START}ab{END}"


@pytest.mark.parametrize(
    ("split", "text", "tokens"),
    [
        # Published SmolLM tokenizers part digits from all else first; transformers' conversion leaves that out.
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ", "12"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # NFC, as in Qwen's own tokenizer.json
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("llama-bpe", "ab", [START, "ab"]),  # llama.cpp begins with BOS although the header does not say so
        ("smaug-bpe", "ab", ["ab"]),
    ],
)
def test_text_is_cut_as_the_published_tokenizer_cuts_it(
    split: str, text: str, tokens: list[str], tmp_path: Path
) -> None:
    write_gguf(
        tmp_path / "tiny.gguf", tiny_model("qwen2"), split=split
    )  # of which transformers has a class with a rule
    for _ in range(2):
        tokenizer = opened(tmp_path / "tiny.gguf").tokenizer
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens


def test_a_header_that_says_no_bos_is_obeyed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model(), split="llama-bpe", fields={"tokenizer.ggml.add_bos_token": False})
    assert opened(tmp_path / "tiny.gguf").tokenizer("ab").input_ids == [TOKENS.index("ab")]


def test_a_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    """As in Llama 3's own tokenizer.json (ignore_merges)."""
    tokens = [*TOKENS[:-1], "xyz"]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["Ġ Ġ", "1 2"]}
    write_gguf(tmp_path / "tiny.gguf", tiny_model(), split="smaug-bpe", fields=fields)
    assert opened(tmp_path / "tiny.gguf").tokenizer("xyz").input_ids == [tokens.index("xyz")]


@pytest.mark.parametrize("merges", [[], [["a b", "c"]], None, 5, [["a"]]])
def test_a_tokenizer_whose_merges_a_file_cannot_hold_is_refused(merges: Any, tmp_path: Path) -> None:
    file = save_folder(tmp_path, tiny_model()) / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    more = {"a b": len(TOKENS), "a bc": len(TOKENS) + 1}
    edit_json(file, model=model | {"merges": merges, "vocab": model["vocab"] | more})
    with pytest.raises(UserError, match=r"^[^\n]*(has no merges|has the merge|the tokenizer is unreadable)[^\n]*$"):
        check_gguf(opened(tmp_path))


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2}),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_read(fields: dict, rope: dict, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model(), fields=fields)
    assert opened(tmp_path / "tiny.gguf").config.rope_parameters.items() >= rope.items()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3() -> tuple[torch.nn.Module, np.ndarray]:
    """A model of Llama 3's RoPE scaling, and the factors that llama.cpp's converter writes for it."""
    model = tiny_model(rope_parameters=LLAMA3, max_position_embeddings=131072)
    head_dim = model.config.head_dim
    plain = 500000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return model, (plain / ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))[0]).numpy()


def test_llama3_rope_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    model, factors = llama3()
    assert factors.max() == 8
    write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": factors})
    source = opened(tmp_path / "tiny.gguf")
    assert source.config.rope_parameters == LLAMA3
    assert "rope_freqs.weight" not in source.tensors()


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    model, factors = llama3()
    factors[1] += 0.1
    write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": factors})
    with pytest.raises(
        UserError, match=r"factors in rope_freqs.weight are not Llama 3's: give the model's safetensors"
    ):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"general.architecture": "gemma2"}, {}, r"architecture 'gemma2' is not supported; supported: llama, qwen2, "),
        ({"split.count": 3}, {}, r"is one of 3 shards: join them with llama.cpp's llama-gguf-split --merge"),
        ({"llama.expert_count": 8}, {}, r"llama.expert_count=8 is not supported in a GGUF file: give the model's"),
        ({"llama.attention.sliding_window": 4096}, {}, r"llama.attention.sliding_window=4096 is not supported"),
        ({"llama.rope.dimension_count": 4}, {}, r"llama.rope.dimension_count=4 is not supported, only 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, {}, r"RoPE scaling 'longrope' is "),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            {},
            r"RoPE scaling 'yarn' attn_factor=0.5 is not supported",
        ),
        ({"llama.block_count": None}, {}, r"lacks llama.block_count in its header: convert the model again"),
        ({"llama.embedding_length": "32"}, {}, r"its header describes no model \(unsupported operand.*fetch it again"),
        ({"llama.attention.head_count": 0}, {}, r"its header describes no model \(.*zero\); fetch it again"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, r"its header describes no model \(.*num_key_value_heads"),
        ({"tokenizer.ggml.model": None}, {}, r"no tokenizer of kind gpt2 or llama \(tokenizer.ggml.model=None\)"),
        ({"tokenizer.ggml.pre": "bloom"}, {}, r"pre-tokeniser 'bloom' is not supported; supported: default, gpt-2, "),
        ({"tokenizer.ggml.merges": ["no such"]}, {}, r"its tokenizer is unreadable \(.*\); fetch it again"),
        ({}, {"token_embd.weight": None}, r"has no tensor token_embd.weight: it holds no whole model"),
        ({}, {"blk.1.ffn_up.weight": None}, r"lacks model.layers.1.mlp.up_proj.weight of the 21 that its config"),
        ({"llama.block_count": 1}, {}, r"holds model.layers.1.*, which a llama of this header does not have"),
        (
            {"llama.feed_forward_length": 32},
            {},
            r"mlp.gate_proj.weight as \(64, 32\), but its config calls for \(32, 32\)",
        ),
        (
            {},
            {"blk.0.attn_sinks.weight": np.zeros(4, "f4")},
            r"holds blk.0.attn_sinks.weight, which no dense llama has",
        ),
        ({}, {"blk.0.attn_q.bias": np.zeros(32, "f4")}, r"lacks model.layers.0.self_attn.k_proj.bias and 6 more"),
    ],
)
def test_what_the_file_cannot_say_is_refused_by_name(fields: dict, tensors: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model(), fields=fields, tensors=tensors)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path / "tiny.gguf")
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_anywhere_is_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", tiny_model())
    content = (tmp_path / "whole.gguf").read_bytes()
    for length in [*range(0, 4000, 37), *range(4000, len(content), 4999), len(content) - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"truncated|is no GGUF file") as caught:
            opened(tmp_path / "cut.gguf")
        assert "\n" not in str(caught.value)


def test_a_number_gone_wrong_in_the_header_is_one_line(tmp_path: Path) -> None:
    """Never a hang, a traceback or an enormous allocation, wherever it is."""
    write_gguf(tmp_path / "whole.gguf", tiny_model())
    content = (tmp_path / "whole.gguf").read_bytes()
    for at in [8, 9, 15, 16, 23, *range(24, 1500, 13)]:
        broken = bytearray(content)
        broken[at] ^= 0xFF
        (tmp_path / "broken.gguf").write_bytes(broken)
        try:
            opened(tmp_path / "broken.gguf")
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017 (a changed letter of a token is no error)


def test_other_files_and_unknown_types_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", tiny_model())
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "text.gguf").write_text("GGUF" + "x" * 100)
    (tmp_path / "old.gguf").write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    (tmp_path / "new.gguf").write_bytes(content[:at] + (4000).to_bytes(4, "little") + content[at + 4 :])
    for name, message in [
        ("text", r"is GGUF version \d+, but 2 and 3 \(little-endian\) are read: convert it again"),
        ("old", r"is GGUF version 1, but 2 and 3 \(little-endian\) are read: convert it again"),
        ("new", r"has blk.0.attn_q.weight in ggml type 4000, unknown to the gguf package: update it"),
    ]:
        with pytest.raises(UserError, match=message):
            opened(tmp_path / f"{name}.gguf")


def test_a_write_that_fails_leaves_nothing_to_be_taken_for_whole(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    source = opened(tmp_path / "tiny.gguf")
    (folder,) = (cache / "gguf").iterdir()
    before = sorted(folder.iterdir())

    def interrupted(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.tensors(interrupted)
    assert sorted(folder.iterdir()) == before
    (folder / ".model.safetensors.0.partial").write_bytes(b"the rest of a killed process")
    assert len(source.tensors()) == 3 + 9 * LAYERS
    assert sorted(path.name for path in folder.iterdir() if "safetensors" in path.name) == [
        ".model.safetensors.0.partial",
        "model.safetensors",
    ]


def test_two_at_once_agree(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    found, together = [], threading.Barrier(3)

    def load() -> None:
        together.wait()
        source = opened(tmp_path / "tiny.gguf")
        found.append((source.digest, {name: tensor.clone() for name, tensor in source.tensors().items()}))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for digest, tensors in found[1:]:
        assert digest == found[0][0]
        assert all(torch.equal(tensors[name], tensor) for name, tensor in found[0][1].items())
