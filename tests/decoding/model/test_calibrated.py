"""A block with a text on its way through it, against transformers' modules; scales moved through it, against itself."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.rows import chains
from decodelab.decoding.model import calibrated
from decodelab.decoding.model.calibrated import CalibratedBlock, LayerStage, Passage, passages
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.quantization.rtn import RTN
from decodelab.tests.enumeration import unchecked
from decodelab.tests.twins import SIZES, twins

CONFIGS: dict[str, PretrainedConfig] = {
    "llama, 4 heads over 2": LlamaConfig(**SIZES | {"num_hidden_layers": 2}),
    "llama, MQA, wide heads, biases": LlamaConfig(
        **SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 24}, attention_bias=True, mlp_bias=True
    ),
    "mistral": MistralConfig(**SIZES | {"num_hidden_layers": 2}, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES | {"num_hidden_layers": 2}),
    "qwen3": Qwen3Config(**SIZES | {"num_hidden_layers": 2}, head_dim=32),
}
PIECES = [[5, 9, 33, 7, 20, 41, 8, 2, 11, 60, 3, 17], [4, 4, 58, 21, 6, 30, 12], [50, 1, 2, 3]]
READERS = {"qkv": "self_attn.q_proj", "output": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Decoder]:
    return twins(CONFIGS[request.param])


def text_for(model: PreTrainedModel, pieces: Sequence[Sequence[int]] = PIECES) -> list[Passage]:
    return passages(pieces, model.state_dict()["model.embed_tokens.weight"])


def block_of(pair: tuple[PreTrainedModel, Decoder], layer: int, text: Sequence[Passage]) -> CalibratedBlock:
    model, decoder = pair
    return CalibratedBlock(decoder.config, layer, model.state_dict(), text)


def after(block: CalibratedBlock) -> Tensor:
    """The hidden states behind the block; the text itself does not move on."""
    before = [passage.hidden for passage in block.text]
    block.advance()
    found = torch.cat([passage.hidden for passage in block.text])
    for passage, hidden in zip(block.text, before, strict=True):
        passage.hidden = hidden
    return found


def stage_of(block: CalibratedBlock, product: str) -> LayerStage:
    return next(stage for stage in block.stages if stage.product == product)


def close(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm() < bound


def test_what_the_layers_read_is_what_transformers_feeds_them(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """Each piece for itself, in every stage of every block; its first row weighs what is asked for, for its keys."""
    model, _ = pair
    seen: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.setdefault(name, []).append(given[0][0]))
    with torch.no_grad():
        for piece in PIECES:
            model(torch.tensor([piece]))
    for module in model.modules():
        module._forward_pre_hooks.clear()
    text = text_for(model)
    for layer in range(2):
        block = block_of(pair, layer, text)
        for stage in block.stages:
            for name in stage.names:
                close(torch.cat(list(stage.inputs(32.0))), weighed(stage.product, seen[name]))
        block.advance()


def weighed(product: str, pieces: list[Tensor]) -> Tensor:
    rows = torch.cat(pieces)
    if product == "qkv":
        rows[[sum(map(len, pieces[:i])) for i in range(len(pieces))]] *= 32**0.5
    return rows


def test_what_leaves_a_block_is_what_leaves_the_decoders(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, decoder = pair
    text = text_for(model)
    cache = decoder.open_cache(3, 64)
    for _ in PIECES:
        cache.open()
    taps = decoder(chains(PIECES, range(3), prompt=True), cache, taps=(0, 1, 2)).hidden
    for layer in range(2):
        assert torch.equal(text[0].hidden, taps[0]) or layer > 0
        block_of(pair, layer, text).advance()
        close(text[0].hidden, taps[layer + 1], 1e-6)


def test_pieces_side_by_side_are_as_alone(
    pair: tuple[PreTrainedModel, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece sees another, and none is padded (Model-Optimizer#1261)."""
    model, _ = pair
    together, alone = text_for(model), [text_for(model, [piece])[0] for piece in PIECES]
    assert len(together) == 1
    assert [len(passage.hidden) for passage in alone] == [12, 7, 4]
    monkeypatch.setattr(calibrated, "_SIDE_BY_SIDE", 11)  # tokens: the last two fit
    few = text_for(model)
    assert [len(passage.hidden) for passage in few] == [12, 11]
    for text in (alone, few):
        close(after(block_of(pair, 0, text)), after(block_of(pair, 0, together)), 1e-6)
        for product in READERS:
            got, want = (stage_of(block_of(pair, 0, t), product).inputs() for t in (text, together))
            close(torch.cat(list(got)), torch.cat(list(want)), 1e-6)


@pytest.mark.parametrize("product", READERS)
def test_a_scale_that_is_moved_changes_nothing(pair: tuple[PreTrainedModel, Decoder], product: str) -> None:
    """Into norms, v under its groups of heads (llm-compressor#2808) and up, their biases too (llm-awq#27): the inputs
    are divided, the columns multiplied, and what leaves the block is the same."""
    model, _ = pair
    block = block_of(pair, 0, text_for(model))
    want, fed = after(block), torch.cat(list(stage_of(block, product).inputs()))
    stage = stage_of(block, product)
    weights = {name: stage.weight(name) for name in stage.names}
    draw = torch.rand(fed.shape[1], generator=torch.Generator().manual_seed(0)) * 4 + 0.25
    by = stage.feasible(draw)
    assert by is not None
    stage.scale(by)
    close(torch.cat(list(stage.inputs())), fed / by)
    for name, weight in weights.items():
        assert torch.equal(stage.weight(name), weight * by)
    close(after(block), want)


def test_scales_of_all_stages_together_change_nothing(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, _ = pair
    block = block_of(pair, 1, text_for(model))
    want = after(block)
    for stage in block.stages:
        K = stage.weight(stage.names[0]).shape[1]
        by = stage.feasible(torch.rand(K, generator=torch.Generator().manual_seed(1)) * 4 + 0.25)
        assert by is not None
        stage.scale(by)
    close(after(block), want)


def test_heads_that_read_one_value_share_its_scale() -> None:
    """The mean over the heads of a group, for each dimension of the value."""
    model, decoder = twins(CONFIGS["llama, 4 heads over 2"])
    stage = stage_of(CalibratedBlock(decoder.config, 0, model.state_dict(), text_for(model)), "output")
    by = torch.arange(1.0, 65)
    heads = by.view(2, 2, 16)  # KV heads, heads of each, dimensions
    got = stage.feasible(by)
    assert got is not None
    assert torch.equal(got.view(2, 2, 16), heads.mean(1, keepdim=True).expand(2, 2, 16))


def test_values_that_other_layers_read_are_not_divided() -> None:
    """Layer 1 attends to what layer 0 wrote: neither's scale can be moved into v. Layer 2 keeps its own."""
    model, decoder = twins(LlamaConfig(**SIZES | {"num_hidden_layers": 3}))
    layout = Layout((LayerKV(0, 2), LayerKV(0, 2), LayerKV(2, 2)), decoder.config.head_dim)
    config: ModelConfig = replace(decoder.config, layout=layout)
    for layer, shared in enumerate((True, True, False)):
        block = CalibratedBlock(config, layer, model.state_dict(), text_for(model))
        assert (stage_of(block, "output").feasible(torch.ones(64)) is None) == shared
        assert stage_of(block, "down").feasible(torch.ones(96)) is not None
    assert [len(CalibratedBlock(config, n, model.state_dict(), []).stages[0].names) for n in range(3)] == [3, 1, 3]


def test_what_is_quantised_is_computed_with_at_once() -> None:
    """Later stages read what has come through it, and the block hands it on; a scale cannot be moved into it."""
    model, decoder = twins(CONFIGS["llama, 4 heads over 2"])
    block = CalibratedBlock(decoder.config, 0, model.state_dict(), text_for(model))
    exact = {product: torch.cat(list(stage_of(block, product).inputs())) for product in READERS}
    value = "model.layers.0.self_attn.v_proj"
    stage_of(block, "qkv").put(value, RTN(bits=2).layer(block.stages[0].weight(value), None).codes)
    found = {product: torch.cat(list(stage_of(block, product).inputs())) for product in READERS}
    assert torch.equal(found["qkv"], exact["qkv"])
    assert all(not torch.allclose(found[product], exact[product]) for product in ("output", "gate_up", "down"))
    assert stage_of(block, "output").feasible(torch.ones(64)) is None
    model.state_dict()[f"{value}.weight"].copy_(block.codes[value].dequantise())
    rounded = CalibratedBlock(decoder.config, 0, model.state_dict(), text_for(model))
    close(after(block), after(rounded), 1e-6)
