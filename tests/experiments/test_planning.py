"""The arithmetic on paper, against numbers worked out by hand, published counts, brute force and real tensors."""

from dataclasses import replace
from itertools import combinations, product
from math import prod

import pytest
import torch

from decodelab.attention.cache import DenseCache
from decodelab.attention.layered import LayeredCache
from decodelab.attention.layout import LayerKV, Layout, uniform
from decodelab.attention.options import MQA, Attention, CrossLayer, Hybrid, LowBits, SinkWindow, Table
from decodelab.attention.paged import PagedCache
from decodelab.decoding.cost import break_even_alpha, speedup
from decodelab.decoding.model.config import ModelConfig, content_of, with_layout
from decodelab.decoding.model.source import named
from decodelab.decoding.model.weights import shapes_of
from decodelab.errors import UserError
from decodelab.experiments.architectures import architectures
from decodelab.experiments.compose import groups
from decodelab.experiments.metrics import decode_flops_per_token
from decodelab.experiments.planning import (
    Architecture,
    Cost,
    Hardware,
    Peak,
    PlanJob,
    Setup,
    active_parameters,
    attention_flops,
    contiguous_bytes,
    drafting_cost,
    formula,
    linear_bytes,
    on_each,
    paged_bytes,
    parameters,
    parts,
    per_million,
    prefill_attention_flops,
    profile,
    read_bytes,
    room,
    touched_parameters,
    touched_share,
)
from decodelab.quantization.hqq import HQQ
from decodelab.quantization.rtn import RTN
from decodelab.tests.decoding.model.checkpoints import tiny_model
from decodelab.tests.tiny import tiny_decoder

H100 = Peak(3.35e12, 989e12, 80e9)
TINY = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def known(name: str) -> Architecture:
    return Architecture.of(name, architectures()[name])


def setup(name: str, attention: Attention | None = None, **more) -> Setup:
    a = known(name)
    return Setup(a, a.layout if attention is None else attention.layout(a.layout, a.heads), 2, **more)


@pytest.mark.parametrize("name", architectures())
def test_the_sizes_of_published_models_come_to_their_published_counts(name):
    assert parameters(known(name)) == architectures()[name]["parameters"]


def test_every_model_that_has_a_name_has_sizes():
    runs = groups()["model"]
    assert set(runs) <= set(architectures())
    for name in runs:
        assert named(name).path in (None, architectures()[name]["source"])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {}),
        ("smollm3", {}),
    ],
)
def test_sizes_are_those_that_the_decoder_reads(kind, settings):
    """Layout, windows and every weight, from the same config.json."""
    config = tiny_model(kind, **settings).config
    ours, theirs = Architecture.of("tiny", config.to_dict()), ModelConfig.from_hf(config)
    assert ours.layout == theirs.layout
    assert (ours.dim, ours.heads, ours.vocab, ours.max_positions) == (
        theirs.dim, theirs.heads, theirs.vocab, theirs.max_positions
    )  # fmt: skip
    assert parameters(ours) == sum(prod(shape) for shape in shapes_of(theirs).values())


@pytest.mark.parametrize("attention", [CrossLayer(2), SinkWindow(8, 2), MQA()])
def test_a_layout_that_a_folder_states_is_read(attention):
    config = tiny_model("llama").config
    native = ModelConfig.from_hf(config)
    found = Architecture.of("x", content_of(with_layout(config, attention.layout(native.layout, native.heads))))
    assert found.layout.layers == attention.layout(native.layout, native.heads).layers


def test_weights_are_those_of_a_decoder():
    """Bytes that a forward reads, and weights in its products; with layers that have no keys of their own, too."""
    target = tiny_decoder(dtype=torch.float32)
    config = target.config
    a = replace(
        Architecture.of("tiny", TINY), dim=config.dim, heads=config.heads, mlp_dim=config.mlp_dim, vocab=config.vocab,
        layout=config.layout, tied=config.tied, qkv_bias=config.qkv_bias,
    )  # fmt: skip
    read = [part for part in parts(a, config.layout, 4) if part.product]
    assert sum(part.elements for part in read) == target.product_elements
    assert sum(part.bytes for part in read) == target.weight_bytes
    shared = CrossLayer(2).layout(config.layout, config.heads)
    sizes = shapes_of(replace(config, layout=shared))
    assert sum(part.elements for part in parts(a, shared, 4)) == sum(prod(shape) for shape in sizes.values())


def test_keys_and_values_of_models_that_are_known():
    """Llama-2-13B: 32 sequences of 2,048 tokens take 53.7 GB; Llama-3-8B 128 KiB a token, four times that as MHA."""
    llama2, llama3 = known("llama-2-13b").layout, known("llama-3-8b").layout
    assert 32 * llama2.sequence_bytes(2048, 2) == 53_687_091_200
    assert llama3.bytes_per_token(2) == 128 * 1024
    assert formula(llama3, 2) == "2 × 32 × 8 × 128 × 2 = 131,072 B"
    assert formula(Table("5*(window=1024) 1*full | kv_heads=1 share=2 bits=8").layout(llama3, 32), 2) == (
        "2 × 17 × 1 × (128 × 8 ÷ 8 + 2) = 4,420 B"
    )
    assert formula(Layout((LayerKV(0, 2), LayerKV(1, 4, bits=4)), 8), 4) == (
        "2 × 1 × 2 × 8 × 4 + 2 × 1 × 4 × (8 × 4 ÷ 8 + 2) = 176 B"
    )


def test_a_contiguous_cache_is_a_dense_one():
    a = Architecture.of("tiny", TINY)
    found = room(Setup(a, a.layout, 4), H100, PlanJob(), 10)
    cache = DenseCache(a.layout, sequences=1, capacity=64, dtype=torch.float32, device="cpu")
    assert found.contiguous == cache.nbytes


@pytest.mark.parametrize("attention", [Hybrid(20, "wf"), SinkWindow(8, 2), LowBits(8)])
def test_windows_are_rings_in_a_contiguous_cache_and_masks_in_pages(attention):
    layout, kept = attention.layout(uniform(2, 2, 4), 4), {"dtype": torch.float32, "device": "cpu"}
    assert contiguous_bytes(layout, 100, 4) == LayeredCache(layout, sequences=1, capacity=100, **kept).nbytes
    pages = PagedCache(layout, size=16, **kept)
    pages.reserve(1, 100)
    assert paged_bytes(layout, 100, 4, 16) == pages.nbytes


@pytest.mark.parametrize("quantiser", [RTN(), RTN(8, 32), RTN(3, -1, symmetric=True), HQQ(4, 16)])
@pytest.mark.parametrize("shape", [(8, 96), (4, 100)])
def test_quantised_bytes_are_those_of_codes(quantiser, shape):
    codes = quantiser.layer(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), None).codes
    assert linear_bytes(shape, codes.scheme, 2) == codes.nbytes
    assert linear_bytes(shape, quantiser.scheme(shape), 2) == codes.nbytes


def test_what_is_quantised_is_the_blocks():
    a = Architecture.of("tiny", TINY)
    overrides = {"*.q_proj": "none", "model.layers.1.*": {"bits": 8}}
    by_name = {p.name: p for p in parts(a, a.layout, 2, RTN(4, 8, overrides=overrides))}
    assert by_name["unembedding"].bytes == 2 * 32 * 8
    rows = 4 + 4 + 8  # k, v, o of 8 columns: a row is 4 or 8 bytes of codes, and 3 of its scale and zero
    assert by_name["attention's projections"].bytes == (8 * 8 * 2 + rows * (4 + 3)) + (8 + rows) * (8 + 3)


def test_operations_of_a_decoded_token():
    """Those of `metrics`, where no layer has a window."""
    one = setup("llama-3-8b")
    weights = sum(part.elements for part in one.parts if part.product)
    assert weights == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    cost = one.step(1, 1, 2048)
    assert cost.flops == decode_flops_per_token(weights, 32, 32, 128, 2048.0)
    assert cost.weight_bytes == pytest.approx(2 * (8_030_261_248 - 128256 * 4096))  # all but the embedding table
    assert cost.kv_bytes == 2048 * 131072
    assert one.step(3, 5, 2048).flops == 15 * cost.flops
    assert one.step(3, 5, 2048).kv_bytes == 3 * cost.kv_bytes  # the rows of a sequence read its keys once


LAYOUTS = [
    uniform(2, 2, 4),
    uniform(2, 2, 4, [3, None]),
    SinkWindow(3, 2).layout(uniform(2, 2, 4), 4),
    CrossLayer(2).layout(uniform(4, 2, 4), 4),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_operations_of_attention_are_those_counted_one_by_one(layout, tokens):
    def seen(layer: LayerKV, row: int) -> int:
        """Row `row`, from 0, of a prompt."""
        W, S = layer.window, layer.sink
        return sum(W is None or key > row - W or key < S for key in range(row + 1))

    # a window of W and S sinks: held(T) = min(T, W + S) is what the last row sees
    by_hand = sum(4 * 4 * 4 * seen(layer, row) for layer in layout.layers for row in range(tokens))
    assert prefill_attention_flops(layout, 4, tokens) == by_hand
    assert attention_flops(layout, 4, tokens) == sum(4 * 4 * 4 * seen(layer, tokens - 1) for layer in layout.layers)


def test_a_shared_cache_is_held_once_and_read_by_each_layer():
    native = uniform(4, 2, 8)
    shared = CrossLayer(4).layout(native, 4)
    assert shared.sequence_bytes(10, 2) * 4 == native.sequence_bytes(10, 2)
    assert read_bytes(shared, 10, 2) == read_bytes(native, 10, 2) == native.sequence_bytes(10, 2)
    low = LowBits(8).layout(uniform(1, 2, 8, [4]), 4)
    assert read_bytes(low, 10, 2) == 4 * 2 * 2 * (8 + 2)


def test_experts_touched_are_those_of_every_choice():
    """Of 4 experts, 2 a row: the mean over all pairs of two and three rows."""
    pairs = list(combinations(range(4), 2))
    for rows in (1, 2, 3):
        chosen = list(product(pairs, repeat=rows))
        mean = sum(len(set().union(*rows)) for rows in chosen) / len(chosen)
        assert touched_share(4, 2, rows) * 4 == pytest.approx(mean)
    assert touched_share(1, 1, 1) == 1


def test_parameters_of_experts():
    """Mixtral 8x7B: 46.7 B, of which a token goes through 12.9 B; one row touches those, many rows all."""
    a = known("mixtral-8x7b")
    assert active_parameters(a) == 12_879_925_248
    assert touched_parameters(a, 1) == pytest.approx(active_parameters(a))
    assert touched_parameters(a, 1000) == pytest.approx(parameters(a))
    one = setup("mixtral-8x7b")
    assert one.step(1, 1, 0).flops == 2 * (12_879_925_248 - 32000 * 4096 - 65 * 4096)
    assert one.step(1, 1, 0).weight_bytes == pytest.approx(2 * (12_879_925_248 - 32000 * 4096))


def test_heads_on_several_devices():
    """max(1, KV heads ÷ devices): MQA on 8 devices holds its head 8 times."""
    native = uniform(2, 8, 4)
    assert on_each(native, 4, 32) == uniform(2, 2, 4)
    assert on_each(MQA().layout(native, 32), 8, 32) == uniform(2, 1, 4)
    assert 8 * on_each(MQA().layout(native, 32), 8, 32).bytes_per_token(2) == native.bytes_per_token(2)
    with pytest.raises(UserError, match=r"hardware.devices=3 does not divide the 32 attention heads"):
        on_each(native, 3, 32)
    with pytest.raises(UserError, match=r"hardware.devices=4: layer 0 has 6 KV heads, of which each device would hold"):
        on_each(uniform(2, 6, 4), 4, 12)
    two, one = setup("llama-3-8b", devices=2).step(4, 1, 512), setup("llama-3-8b").step(4, 1, 512)
    assert (two.weight_bytes, two.kv_bytes, two.flops) == (one.weight_bytes / 2, one.kv_bytes / 2, one.flops / 2)


def test_the_roofline():
    cost = Cost(weight_bytes=6e9, kv_bytes=4e9, split={"MLP": 1e12, "attention": 1e12})
    slow, fast = Peak(1e9, 1e12, 1e9), Peak(1e11, 1e12, 1e9)
    assert (cost.seconds(slow), cost.bound(slow)) == (10, "bandwidth")
    assert (cost.seconds(fast), cost.bound(fast)) == (2, "products")
    assert cost.seconds(fast, mfu=0.5) == 4
    assert cost.seconds(slow, mfu=0.5, mbu=0.8) == 12.5


def test_room_on_a_device():
    """Llama-2-13B on 80 GB with a tenth in reserve: 26.03 GB of weights leave 45.97 GB, for 27 sequences of 1.678 GB;
    13 where 4,096 slots are reserved for each."""
    found = room(setup("llama-2-13b"), H100, PlanJob(), 2048)
    assert found.weights == 2 * 13_015_864_320
    assert found.headroom == pytest.approx(80e9 - 8e9 - 26_031_728_640)
    assert (found.sequence, found.contiguous) == (2048 * 819200, 4096 * 819200)
    assert (found.concurrency, found.contiguous_concurrency) == (27, 13)
    assert room(setup("llama-2-13b"), replace(H100, memory=24e9), PlanJob(), 2048).concurrency == 0


def test_drafts_take_room_of_their_own():
    draft = setup("llama-3.2-1b")
    plain = room(setup("llama-3-8b"), H100, PlanJob(), 1000)
    found = room(setup("llama-3-8b"), H100, PlanJob(page=64), 1000, rows=5, drafters=[draft])
    assert plain.draft == plain.drafter == plain.drafter_kv == 0
    assert found.sequence == 1024 * 131072
    assert (found.draft, found.drafter_kv) == (5 * 131072, 1024 * 32768)
    assert found.concurrency == found.headroom // (1024 * 131072 + 5 * 131072 + 1024 * 32768)
    assert found.drafter == 2 * 1_235_814_400
    assert found.concurrency < plain.concurrency


def test_what_is_reserved_holds_the_context():
    with pytest.raises(UserError, match=r"context=5000 is longer than the model's 4,096; plan.max_length=5000 plans"):
        room(setup("llama-2-13b"), H100, PlanJob(), 5000)
    assert room(setup("llama-2-13b"), H100, PlanJob(max_length=8192), 5000).contiguous == 8192 * 819200


def test_drafting_pays_by_the_papers_formula():
    """Where T is flat, speedup = (1 − α^(γ+1)) ÷ ((1 − α)(1 + γc)), c being the draft's share of a step."""
    target, draft = setup("llama-3-70b"), setup("llama-3.2-1b")
    big = replace(H100, memory=1e12)
    times = profile(target, big, 1, 2048, (1, 2, 4, 8))
    cost = drafting_cost([draft], big, 1, 2048)
    assert times.ratio(8) == pytest.approx(1, abs=1e-3)  # the keys and weights of one step, whatever its rows
    c = draft.step(1, 1, 2048).bytes / target.step(1, 1, 2048).bytes
    assert cost.token_s / times.at(1) == pytest.approx(c)
    assert speedup(0.8, 4, times, cost) == pytest.approx((1 - 0.8**5) / (0.2 * (1 + 4 * c)), rel=1e-3)
    least = break_even_alpha(1, times, cost)
    assert least == pytest.approx(c, abs=1e-3)  # 1 + α = 1 + c
    assert drafting_cost([], big, 1, 2048).at(8) == 0


def test_costs():
    assert per_million(3.6, 1000) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "x: the sizes of architecture 'deepseek_v3' are not known here; known: llama,"),
        ({"hidden_size": None}, "x: hidden_size must be a whole number above 0, got None"),
        ({"num_hidden_layers": 0}, "x: num_hidden_layers must be a whole number above 0, got 0"),
        ({"num_key_value_heads": 3}, "x: 4 attention heads are not a multiple of 3 KV heads"),
        ({"num_key_value_heads": -2}, "x: num_key_value_heads must be a whole number of at least 1, or null, got -2"),
        ({"head_dim": "8"}, "x: head_dim must be a whole number of at least 1, or null, got '8'"),
        ({"model_type": "mistral", "sliding_window": 0}, "x: sliding_window must be a whole number of at least 1, or"),
        (
            {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"]},
            r"layer_types must be a list of 2 kinds, one a layer, got \['full_attention'\]",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "x: num_experts_per_tok=4 is more than the 2 of num_local_experts",
        ),
        ({"model_type": "mixtral"}, "x: num_local_experts must be a whole number above 0, got None"),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2,
             "mlp_only_layers": [0]},
            "x: layers without experts among those with them are not known here",
        ),
    ],
)  # fmt: skip
def test_configs_that_are_none(change, message):
    with pytest.raises(UserError, match=message):
        Architecture.of("x", TINY | change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hardware(bandwidth=0.0), "hardware.bandwidth must be above 0, or null for this machine's, got 0.0"),
        (lambda: Hardware(flops=float("inf")), "hardware.flops must be above 0, or null for this machine's, got inf"),
        (lambda: Hardware(price_per_hour=float("nan")), "hardware.price_per_hour must be at least 0, got nan"),
        (lambda: Hardware(devices=0), "hardware.devices must be at least 1, got 0"),
        (lambda: Hardware(price_per_hour=-1.0), "hardware.price_per_hour must be at least 0, got -1.0"),
        (lambda: Hardware(mfu=(0.6, 0.4)), r"hardware.mfu must be two shares, the lower first, got \[0.6, 0.4\]"),
        (lambda: Hardware(mbu=(0.6, 1.4)), "hardware.mbu must be two shares"),
        (lambda: PlanJob(page=0), "plan.page must be at least 1, got 0"),
        (lambda: PlanJob(max_length=0), "plan.max_length must be at least 1, got 0"),
        (lambda: PlanJob(reserve=1.0), "plan.reserve must be at least 0 and below 1, got 1.0"),
    ],
)
def test_values_that_are_none(make, message):
    with pytest.raises(UserError, match=message):
        make()
