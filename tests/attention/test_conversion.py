"""Weights that were made for one layout, in another one: what is exact is exact."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from decodelab.attention.conversion import ConvertedTensors, converts, impossible, lossless, pooled
from decodelab.attention.layout import Layout, uniform
from decodelab.attention.options import GQA, MHA, MQA, CrossLayer, Native, Table, Window
from decodelab.attention.rows import chains
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.differentiable import forward
from decodelab.tests.enumeration import unchecked
from decodelab.tests.twins import SIZES, twins

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True),
    "qwen2, whose q, k and v have biases": Qwen2Config(**SIZES),
    "qwen3, whose queries and keys are normed": Qwen3Config(**SIZES, head_dim=16),
}
IDS = [5, 9, 33, 7, 20, 41, 8, 2, 11, 60, 3, 17]
AT = "model.layers.{}.self_attn.{}.{}"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor]]:
    model, decoder = twins(FAMILIES[request.param], torch.float64)
    return decoder.config, dict(model.state_dict())


def decoded(config: ModelConfig, tensors: Any, layout: Layout | None = None) -> Decoder:
    if layout is None:
        return Decoder(config, tensors, dtype=torch.float64)
    converted = ConvertedTensors(tensors, config.layout, layout)
    return Decoder(replace(config, layout=layout), converted, dtype=torch.float64)


@torch.no_grad()
def logits(decoder: Decoder, step: int = len(IDS)) -> Tensor:
    """So many rows at a time, behind those before."""
    cache = decoder.open_cache(1, len(IDS))
    slot = cache.open()
    found = []
    for at in range(0, len(IDS), step):
        rows = chains([IDS[at : at + step]], [slot], prompt=at == 0)
        found.append(decoder(rows, cache).logits)
        cache.commit({slot: range(len(rows))})
    return torch.cat(found)


def heads(*values: float) -> Tensor:
    """Heads of two rows each."""
    return torch.tensor(values).repeat_interleave(2)[:, None] * torch.ones(1, 3)


def test_heads_are_pooled_by_the_attention_heads_that_read_them():
    four = heads(1, 3, 10, 20)
    assert torch.equal(pooled(four, 4, 2, "mean"), heads(2, 15))
    assert torch.equal(pooled(four, 4, 2, "first"), heads(1, 10))
    assert torch.equal(pooled(four, 4, 1, "mean"), heads(8.5))
    assert torch.equal(pooled(four, 4, 8, "mean"), heads(1, 1, 3, 3, 10, 10, 20, 20))
    # of six attention heads three read the first and three the second; then two read each of three
    assert torch.equal(pooled(heads(1, 3), 2, 3, "mean"), heads(1, 2, 3))
    assert torch.equal(pooled(four[:, 0], 4, 2, "mean"), heads(2, 15)[:, 0])  # a bias
    assert pooled(four.to(torch.bfloat16), 4, 1, "mean").dtype == torch.float32


def test_more_heads_change_nothing_and_equal_ones_are_their_mean(family: Any):
    """GQA to MHA by repetition; that MHA's groups, which are equal, back to GQA."""
    config, tensors = family
    more = MHA().layout(config.layout, config.heads)
    want = logits(decoded(config, tensors))
    torch.testing.assert_close(logits(decoded(config, tensors, more)), want, rtol=1e-12, atol=1e-12)
    wide = dict(ConvertedTensors(tensors, config.layout, more))
    again = ConvertedTensors(wide, more, GQA(2).layout(more, config.heads))
    assert dict(again).keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_one_head_is_the_mean_or_the_first(family: Any, pool: Any):
    config, tensors = family
    found = ConvertedTensors(tensors, config.layout, MQA(pool).layout(config.layout, config.heads))
    for part in ("k_proj", "v_proj"):
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            one, two = tensors[AT.format(3, part, kind)].unflatten(0, (2, 16))
            want = one if pool == "first" else (one + two) / 2
            torch.testing.assert_close(found[AT.format(3, part, kind)], want, rtol=1e-12, atol=1e-12)
    assert {name for name in tensors if not torch.equal(found[name], tensors[name])} == {
        name for name in tensors if ".k_proj." in name or ".v_proj." in name
    }


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_layers_that_compute_the_same_keys_may_share_them(family: Any, pool: Any):
    """The owner's block adds nothing, and the next one has its norms and its weights of keys and values."""
    config, tensors = family
    tensors = dict(tensors)
    for owner in (0, 2):
        for name in tensors:
            if not name.startswith(f"model.layers.{owner}."):
                continue
            if "o_proj" in name or "down_proj" in name:
                tensors[name] = torch.zeros_like(tensors[name])
            if any(part in name for part in ("input_layernorm", "k_proj", "v_proj", "k_norm")):
                tensors[name.replace(f".{owner}.", f".{owner + 1}.")] = tensors[name]
    layout = CrossLayer(2, pool).layout(config.layout, config.heads)
    shared = decoded(config, tensors, layout)
    torch.testing.assert_close(logits(shared), logits(decoded(config, tensors)), rtol=1e-12, atol=1e-12)
    assert shared.open_cache(1, 64).nbytes * 2 == decoded(config, tensors).open_cache(1, 64).nbytes


def test_a_shared_cache_is_filled_by_the_mean_or_by_the_owner(family: Any):
    config, tensors = family
    for pool in ("mean", "first"):
        found = ConvertedTensors(tensors, config.layout, CrossLayer(4, pool).layout(config.layout, config.heads))
        each = [tensors[AT.format(layer, "v_proj", "weight")] for layer in range(4)]
        want = each[0] if pool == "first" else torch.stack(each).mean(0)
        torch.testing.assert_close(found[AT.format(0, "v_proj", "weight")], want, rtol=1e-12, atol=1e-12)
        assert AT.format(1, "v_proj", "weight") not in found
        assert len(found) == len(list(found)) < len(tensors)
        pairs = CrossLayer(2, pool).layout(
            config.layout, config.heads
        )  # which have two sets of weights for four layers
        halfway = dict(ConvertedTensors(tensors, config.layout, pairs))
        again = ConvertedTensors(halfway, pairs, CrossLayer(4, pool).layout(pairs, config.heads))
        torch.testing.assert_close(again[AT.format(0, "v_proj", "weight")], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "table", ["full | kv_heads=1 share=2", "1*(window=4) 1*full | kv_heads=4 share=2", "2*full 2*(owner=0)"]
)
def test_one_pass_is_many_steps(family: Any, table: str):
    """Without a cache, from a prompt, and token by token (mlx-lm#1674: shared keys were only there with a cache)."""
    config, tensors = family
    decoder = decoded(config, tensors, Table(table).layout(config.layout, config.heads))
    want = logits(decoder, 1)
    torch.testing.assert_close(logits(decoder), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits(decoder, 5), want, rtol=1e-9, atol=1e-9)
    converted = dict(ConvertedTensors(tensors, config.layout, decoder.config.layout))
    final = forward(decoder.config, converted, torch.tensor([IDS])).final[0]
    torch.testing.assert_close(decoder.unembedding(final), want, rtol=1e-9, atol=1e-9)


def test_what_is_converted_and_what_is_lossless():
    native = uniform(4, 2, 8)
    for settings, converted, exact in (
        (Native(), False, True),
        (Window(8), False, True),
        (MHA(), True, True),
        (MQA(), True, False),
        (CrossLayer(2), True, False),
    ):
        layout = settings.layout(native, 4)
        assert (converts(layout, native), lossless(layout, native)) == (converted, exact), settings


def test_what_was_shared_is_not_taken_apart():
    shared = CrossLayer(2).layout(uniform(4, 2, 8), 4)
    told = "layer 1 would have keys of its own, but its weights have none: they go with layer 0"
    assert impossible(CrossLayer(1).layout(shared, 4), shared) == told
    for settings in (MQA(), CrossLayer(4), MHA()):
        assert impossible(settings.layout(shared, 4), shared) is None
