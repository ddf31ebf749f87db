"""The lean decoder against transformers, and one forward against many: chunks, trees, batches."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from decodelab.attention.rows import Rows, chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.errors import UserError
from decodelab.kernels.verify_attention import row_invariant
from decodelab.testing import tiny_decoder
from decodelab.tests.enumeration import unchecked
from decodelab.tests.twins import SIZES, twins

V = 61


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type=kind, rope_theta=1e4, **parameters)}


# Sequences are longer than the original 64 positions, so that scaling matters, and than the windows.
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, MHA, tied": LlamaConfig(**SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, MQA, wide heads": LlamaConfig(**SIZES | {"num_key_value_heads": 1, "head_dim": 24}),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, linear": LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama, llama3": LlamaConfig(
        **SIZES,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama, yarn": LlamaConfig(**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, sliding layers": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2, sliding switched off": Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=8),
    "qwen2, yarn": Qwen2Config(**SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3, biases, sliding layers": Qwen3Config(
        **SIZES, head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "smollm3, sliding layers": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=6
    ),
}


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(decoder: Decoder, ids: list[int], chunks: list[int] | None = None, prompt: bool = False) -> Tensor:
    """Logits of all rows, fed in chunks of these sizes, in turn; `prompt`: as prefill feeds them."""
    cache = decoder.open_cache(1, len(ids))
    sequence = cache.open()
    logits, at = [], 0
    while at < len(ids):
        size = len(ids) if chunks is None else chunks[len(logits) % len(chunks)]
        piece = ids[at : at + size]
        logits.append(decoder(chains([piece], [sequence], prompt=prompt), cache).logits)
        cache.commit({sequence: range(len(piece))})
        at += len(piece)
    return torch.cat(logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers_own(name: str) -> None:
    """Relative error ≤ 1e-5 in float32, the same argmax everywhere: fed whole, in chunks, token by token."""
    model, decoder = twins(CONFIGS[name])
    for n in (7, 130):
        ids = tokens(n)
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0]
        for chunks, prompt in ((None, True), (None, False), ([1], False), ([1, 3, 70], True)):
            got = forward(decoder, ids, chunks, prompt)
            assert (got - want).norm() / want.norm() < 1e-5, chunks
            assert torch.equal(got.argmax(-1), want.argmax(-1)), chunks


def test_every_family_is_covered() -> None:
    from decodelab.decoding.model.config import SUPPORTED

    assert {config.model_type for config in CONFIGS.values()} == set(SUPPORTED)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "smollm3, sliding layers"])
def test_how_rows_are_grouped_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, up to its rounding: prefill, token by token, chunks, and chunks behind a long one."""
    unchecked(monkeypatch)
    _, decoder = twins(CONFIGS[name], torch.float64)
    ids = tokens(150)
    want = forward(decoder, ids)
    torch.testing.assert_close(forward(decoder, ids, prompt=True), want, rtol=0, atol=1e-11)
    for chunks in ([1], [2, 5], [70, 1, 9], [64], [65]):
        torch.testing.assert_close(forward(decoder, ids, chunks), want, rtol=0, atol=1e-11)
        torch.testing.assert_close(forward(decoder, ids, chunks, prompt=True), want, rtol=0, atol=1e-11)


@pytest.mark.skipif(not row_invariant(), reason="the products of this machine promise nothing to the bit")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}],
)
def test_a_chain_of_rows_has_the_bits_of_single_rows(
    dtype: torch.dtype, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why greedy speculation along a chain is exact in any dtype (vllm#41758, llama.cpp#25618), on 1 to 440 keys."""
    unchecked(monkeypatch)
    decoder = tiny_decoder(0, dtype, **sizes)
    ids = tokens(440)
    single = forward(decoder, ids, [1])
    for chunks in ([2], [5], [1, 3, 7], [16], [33], [90]):
        assert torch.equal(forward(decoder, ids, chunks), single), chunks


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2, sliding layers", "smollm3, sliding layers"])
def test_each_path_of_a_forest_is_a_chain(name: str) -> None:
    """sglang#15360, TensorRT-LLM#12962: a row's logits are those of its own path behind the prefix, of nothing else."""
    _, decoder = twins(CONFIGS[name], torch.float64)
    rng, prefix = random.Random(0), tokens(12)
    for K in (1, 8, 24):
        parents = [rng.randrange(-1, i) for i in range(K)]
        ids = [rng.randrange(V) for _ in range(K)]
        cache = decoder.open_cache(1, 64)
        sequence = cache.open()
        decoder(chains([prefix], [sequence]), cache)
        cache.commit({sequence: range(len(prefix))})
        forest = Rows(torch.tensor(ids), torch.tensor(parents), torch.full((K,), sequence), chain=False)
        logits = decoder(forest, cache).logits
        for i in range(K):
            path, at = [], i
            while at >= 0:
                path.append(ids[at])
                at = parents[at]
            torch.testing.assert_close(logits[i], forward(decoder, prefix + path[::-1])[-1], rtol=0, atol=1e-11)


def test_a_forest_staged_in_several_forwards() -> None:
    """A tree that grows level by level, siblings side by side, then keeps one path, which the next row continues."""
    _, decoder = twins(CONFIGS["mistral"], torch.float64)
    prefix = tokens(9)
    cache = decoder.open_cache(1, 64)
    sequence = cache.open()
    decoder(chains([prefix], [sequence]), cache)
    cache.commit({sequence: range(len(prefix))})
    levels = [([7, 8], [-1, -1]), ([9, 10, 11], [0, 0, 1]), ([12, 13], [4, 2])]
    first, outs = 0, []
    for ids, parents in levels:
        rows = Rows(
            torch.tensor(ids), torch.tensor(parents), torch.full((len(ids),), sequence), chain=False, first=first
        )
        outs.append(decoder(rows, cache).logits)
        first += len(ids)
    torch.testing.assert_close(outs[1][2], forward(decoder, [*prefix, 8, 11])[-1], rtol=0, atol=1e-11)
    torch.testing.assert_close(outs[2][0], forward(decoder, [*prefix, 8, 11, 12])[-1], rtol=0, atol=1e-11)
    torch.testing.assert_close(outs[2][1], forward(decoder, [*prefix, 7, 9, 13])[-1], rtol=0, atol=1e-11)
    cache.commit({sequence: [1, 4, 5]})
    after = decoder(chains([[20]], [sequence]), cache).logits[0]
    torch.testing.assert_close(after, forward(decoder, [*prefix, 8, 11, 12, 20])[-1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["llama", "mistral", "smollm3"])
def test_a_batch_of_different_lengths_is_each_alone(name: str) -> None:
    """mlx-vlm#1946, transformers#42655: lengths 3, 9, 90 and 1 together, then a tree beside a row beside a chain."""
    _, decoder = twins(CONFIGS[name], torch.float64)
    prompts = [tokens(n, seed=n) for n in (3, 9, 90, 1)]
    cache = decoder.open_cache(4, 128)
    sequences = [cache.open() for _ in prompts]
    logits = decoder(chains(prompts, sequences), cache).logits
    want = torch.cat([forward(decoder, prompt) for prompt in prompts])
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-11)
    starts = [0, 3, 12, 102]
    cache.commit({s: range(at, at + len(p)) for s, at, p in zip(sequences, starts, prompts, strict=True)})
    rows = Rows(
        torch.tensor([5, 6, 7, 8, 9, 10]),
        torch.tensor([-1, 0, 0, -1, -1, 4]),
        torch.tensor([sequences[1]] * 3 + [sequences[0]] + [sequences[2]] * 2),
        chain=False,
    )
    got = decoder(rows, cache).logits
    for i, path in enumerate([(1, [5]), (1, [5, 6]), (1, [5, 7]), (0, [8]), (2, [9]), (2, [9, 10])]):
        torch.testing.assert_close(got[i], forward(decoder, prompts[path[0]] + path[1])[-1], rtol=0, atol=1e-11)


def test_logits_of_the_rows_asked_for() -> None:
    _, decoder = twins(CONFIGS["llama"], torch.float64)
    ids = tokens(20)
    whole = forward(decoder, ids)
    for taps in ((), ("final",)):
        cache = decoder.open_cache(1, 20)
        out = decoder(chains([ids], [cache.open()]), cache, logits_of=torch.tensor([19, 3, 3]), taps=taps)
        torch.testing.assert_close(out.logits, whole[[19, 3, 3]], rtol=0, atol=1e-12)


def test_taps_are_the_hidden_states() -> None:
    """Tap i enters layer i; tap L leaves the last; "final" is what the unembedding reads."""
    model, decoder = twins(CONFIGS["llama"], torch.float64)
    ids = tokens(20)
    with torch.no_grad():
        want = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    cache = decoder.open_cache(1, 20)
    out = decoder(chains([ids], [cache.open()]), cache, taps=(0, 1, 3, 4, "final"))
    assert set(out.hidden) == {0, 1, 3, 4, "final"}
    for tap in (0, 1, 3):  # transformers turns positions in float32
        torch.testing.assert_close(out.hidden[tap], want[tap][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.hidden["final"], want[4][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.model.norm(out.hidden[4]), out.hidden["final"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(decoder.unembedding(out.hidden["final"]), out.logits)


def test_layers_that_are_skipped_are_as_if_not_there() -> None:
    config = CONFIGS["qwen2, sliding layers"]
    model, decoder = twins(config, torch.float64)
    kept = [0, 2, 3]
    state = {name: w for name, w in model.state_dict().items() if ".layers." not in name}
    for new, old in enumerate(kept):
        for name, w in model.state_dict().items():
            if f".layers.{old}." in name:
                state[name.replace(f".layers.{old}.", f".layers.{new}.")] = w
    short = Qwen2Config(
        **SIZES | {"num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=8,
        layer_types=[config.layer_types[i] for i in kept],
    )
    want = forward(Decoder(ModelConfig.from_hf(short), state, dtype=torch.float64), tokens(30))
    cache = decoder.open_cache(1, 30)
    got = decoder(chains([tokens(30)], [cache.open()]), cache, layers=kept).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "architecture 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3, smollm3"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "activation 'gelu' of llama is not supported; supported: silu"),
        (
            LlamaConfig(**SIZES, **rope("dynamic", factor=2.0)),
            "RoPE type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        (
            LlamaConfig(**SIZES, **rope("default", partial_rotary_factor=0.5)),
            "partial_rotary_factor 0.5 is not supported",
        ),
        (
            LlamaConfig(**SIZES, **rope("linear", factor=2.0, partial_rotary_factor=0.5)),
            "partial_rotary_factor 0.5 is not supported",
        ),
        (
            LlamaConfig(**SIZES | {"num_attention_heads": 4, "num_key_value_heads": 3}),
            "llama: 4 attention heads are not a multiple of 3 KV heads",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(config)


def test_weights_that_do_not_fit_are_refused() -> None:
    config = CONFIGS["llama"]
    model, decoder = twins(config)
    state = dict(model.state_dict())
    lacking = {k: w for k, w in state.items() if k != "model.layers.2.mlp.up_proj.weight"}
    with pytest.raises(UserError, match=r"the checkpoint has no .*'model\.layers\.2\.mlp\.up_proj\.weight'"):
        Decoder(decoder.config, lacking, dtype=torch.float32)
    short = state | {"model.embed_tokens.weight": torch.zeros(7, 64)}
    with pytest.raises(UserError, match=r"embedding is \(7, 64\), but the config says \(61, 64\)"):
        Decoder(decoder.config, short, dtype=torch.float32)


def test_progress_and_bytes() -> None:
    told: list[tuple[int, int]] = []
    model, decoder = twins(CONFIGS["llama"])
    Decoder(decoder.config, model.state_dict(), dtype=torch.float32, progress=lambda *now: told.append(now))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    matrices = sum(w.numel() for name, w in model.named_parameters() if w.dim() > 1 and "embed" not in name)
    assert decoder.weight_bytes == 4 * matrices


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    """Their argmax is a token like any other, on both sides: only loading can tell."""
    config = LlamaConfig(**SIZES)
    weights = twins(config)[0].state_dict()
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = bad
    with pytest.raises(UserError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' of the checkpoint is not finite"):
        Decoder(ModelConfig.from_hf(config), weights, dtype=torch.float32)
