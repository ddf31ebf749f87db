"""The forward pass that is trained through is the decoder's."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.rows import chains
from decodelab.decoding.model.differentiable import forward
from decodelab.tests.enumeration import unchecked
from decodelab.tests.twins import SIZES, twins

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases, wide heads": LlamaConfig(**SIZES, head_dim=24, attention_bias=True, mlp_bias=True),
    "mistral, windows": MistralConfig(**SIZES, sliding_window=3),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "smollm3, layers without RoPE": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 1]),
}
TEXTS = [[5, 9, 33, 7, 20, 41, 8, 2, 11], [60, 3, 17, 4]]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_computes_what_the_decoder_does(name: str):
    """States behind each layer, and logits; padding behind the shorter text is seen by none of it."""
    model, decoder = twins(CONFIGS[name], torch.float64)
    cache = decoder.open_cache(2, 16)
    rows = chains(TEXTS, [cache.open(), cache.open()], prompt=True)
    with torch.no_grad():
        want = decoder(rows, cache, taps=(1, 2, 3, 4, "final"))
    padded = torch.tensor([TEXTS[0], TEXTS[1] + [0] * 5])
    found = forward(decoder.config, model.state_dict(), padded)
    for i, text in enumerate(TEXTS):
        for layer, states in enumerate(found.states, 1):
            close(states[i, : len(text)], want.hidden[layer].split([9, 4])[i])
        close(found.final[i, : len(text)], want.hidden["final"].split([9, 4])[i])


def test_sinks_are_seen_from_beyond_the_window():
    """What a row sees is by hand: the gradient of its state by the embeddings."""
    model, decoder = twins(LlamaConfig(**SIZES | {"num_hidden_layers": 1}), torch.float64)
    config = replace(decoder.config, layout=Layout((LayerKV(0, 2, window=3, sink=2),), decoder.config.head_dim))
    tensors = dict(model.state_dict())
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone().requires_grad_()
    forward(config, tensors, torch.tensor([TEXTS[0]])).final[0, 7].sum().backward()
    seen = tensors["model.embed_tokens.weight"].grad[TEXTS[0]].abs().sum(-1) > 0
    assert seen.tolist() == [True, True, False, False, False, True, True, True, False]


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
