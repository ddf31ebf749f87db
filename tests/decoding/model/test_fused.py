"""The decoder on our kernels, as on a GPU, against itself on torch's operations. They run in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from decodelab.attention import book
from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.paged import PagedCache
from decodelab.attention.rows import Rows, chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Gives
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.kernels.dispatch import Kernels
from decodelab.quantization.codes import Codes
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import Rigged, ask, thicket

pytest.importorskip("triton", reason="kernels are interpreted by triton")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def four_bits(weight: Tensor) -> Codes:
    return round_to_nearest(weight, Grid(4, 16, False))


def three_bits_in_any_group(weight: Tensor) -> Codes:
    """With float shifts in the place of zeros."""
    codes = round_to_nearest(weight, Grid(3, 8, False))
    assert codes.zero is not None
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    shift = -codes.scale.float() * codes.zero.float()
    groups = codes.column_groups[order].int()
    return replace(codes, codes=codes.codes[:, order], groups=groups, zero=None, shift=shift)


def eight_bits(weight: Tensor) -> Codes:
    return round_to_nearest(weight, Grid(8, -1, False))


def entries(**of_both: Any) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(layer, 2, **of_both) for layer in range(2))


FOUR_BITS = "llama, 4 bits, one cache of both layers"
# a model, how its weights are stored, what a layer keeps (None: the model's own), the size of a page (None: no pages)
CASES: dict[str, tuple[PretrainedConfig, Callable[[Tensor], Codes] | None, tuple[LayerKV, ...] | None, int | None]] = {
    FOUR_BITS: (LlamaConfig(**SIZES), four_bits, (LayerKV(0, 2), LayerKV(0, 2)), None),
    "qwen2, pages": (Qwen2Config(**SIZES, tie_word_embeddings=True), None, None, 4),
    "qwen3, keys of 4 bits": (Qwen3Config(**SIZES, head_dim=16), None, entries(bits=4), None),
    "smollm3, 8 bits, pages of 8 bits, windows": (
        SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
        eight_bits,
        (LayerKV(0, 2, 4, 1, bits=8), LayerKV(1, 2)),
        16,
    ),
    "mistral, 3 bits, rings": (
        MistralConfig(**SIZES, sliding_window=5),
        three_bits_in_any_group,
        (LayerKV(0, 2, 5), LayerKV(1, 2, 4, 1, bits=4)),
        None,
    ),
}


def decoder(name: str, kernels: Kernels | None = None) -> Decoder:
    """float32; `kernels` None: of the CPU's own."""
    config, quantise, layers, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for part, weight in model.named_parameters():
                weight.mul_(8) if weight.dim() > 1 else weight.normal_(1.0 if "norm" in part else 0.0, 0.3)
    tensors, made = model.state_dict(), ModelConfig.from_hf(config)
    codes = {
        part.removesuffix(".weight"): quantise(weight)
        for part, weight in tensors.items()
        if quantise is not None and part.endswith("proj.weight")
    }
    if layers is not None:
        made = replace(made, layout=Layout(layers, made.head_dim))
    return Decoder(made, tensors, dtype=torch.float32, codes=codes, kernels=kernels)


@torch.inference_mode()
def fed(model: Decoder, name: str) -> list[Tensor]:
    """Logits and hidden states of two prompts, trees behind them, and a row behind what was kept of those."""
    size, pages = CASES[name][3], None
    if size is not None:
        pages = PagedCache(model.config.layout, size=size, dtype=model.dtype, device="cpu")
    cache = model.open_cache(3, 20, pages)
    _, a, b = (cache.open() for _ in range(3))  # the first is another's, so that numbers are not places
    first = model(chains([[5, 6, 7, 8, 9, 10, 11], [3]], [b, a], prompt=True), cache, logits_of=torch.tensor([6, 7]))
    cache.commit({b: range(7), a: [7]})
    tree = Rows(
        torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([-1, 0, 0, 2, -1, 4]), torch.tensor([b] * 4 + [a] * 2), False
    )
    second = model(tree, cache, taps=(0, 1, 2, "final"))
    more = model(Rows(torch.tensor([30]), torch.tensor([2]), torch.tensor([b]), False, first=6), cache)
    cache.commit({b: [0, 2, 6], a: [4]})
    third = model(chains([[20], [21]], [a, b]), cache)
    return [first.logits, second.logits, *second.hidden.values(), more.logits, third.logits]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_torch_s_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    for got, want in zip(fed(decoder(name, Kernels(interpreted=True)), name), fed(decoder(name), name), strict=True):
        assert (got - want).norm() / want.norm() < 1e-5


@torch.inference_mode()
def test_a_long_prompt_beside_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one forward: the first attends by itself, and has no mask."""
    unchecked(monkeypatch)
    monkeypatch.setattr(book, "LONG_CHAIN", 4)
    prompts = [[3, 4], [5, 6, 7, 8, 9, 10], [9]]
    found = []
    for kernels in (Kernels(interpreted=True), None):
        model = decoder(FOUR_BITS, kernels)
        cache = model.open_cache(3, 20)
        rows = chains(prompts, [cache.open() for _ in prompts], prompt=True)
        found.append(model(rows, cache).logits)
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-5


def test_greedy_speculation_emits_what_plain_decoding_does(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    model = decoder(FOUR_BITS, Kernels(interpreted=True))
    asked = [ask(prompt, Greedy(), 6) for prompt in ([7, 30, 12], [5, 9])]
    plain = [g.tokens for g in reference.generate(model, asked, Greedy().law(), seed=0)]
    assert all(len(set(tokens)) > 3 for tokens in plain)
    answers = {request.prompt: tokens for request, tokens in zip(asked, plain, strict=True)}
    drafter = Rigged(thicket(answers, seed=7), gives=Gives("forest", rows=8, depth=6))
    got = loop.generate(model, asked, drafter, Greedy(), seed=0)
    assert [g.tokens for g in got] == plain
    assert sum(step.accepted for g in got for step in g.steps) > 3


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_a_chain_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by numpy's BLAS, which sums a tile's seventh row in another order than its first, as
    no GPU does: here it multiplies and sums in order."""
    unchecked(monkeypatch)
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None].astype(dtype) * b).sum(1))
    model = decoder(FOUR_BITS, Kernels(interpreted=True))
    ids = [5, 9, 41, 3, 17]
    found = []
    for sizes in ([5], [1, 1, 1, 1, 1]):
        cache = model.open_cache(1, 8)
        sequence, at, logits = cache.open(), 0, []
        for size in sizes:
            logits.append(model(chains([ids[at : at + size]], [sequence]), cache).logits)
            cache.commit({sequence: range(size)})
            at += size
        found.append(torch.cat(logits))
    assert torch.equal(found[1], found[0])


@torch.inference_mode()
def test_the_fast_mode_says_that_it_is_not_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    name = FOUR_BITS
    fast, exact = (decoder(name, Kernels(row_invariant, interpreted=True)) for row_invariant in (False, True))
    said = [model.implementation["linear"] for model in (exact, fast)]
    assert said[0] == ", ".join(f"{of} (triton, row-invariant, prefill by torch)" for of in ("dense", "int4"))
    assert said[1].startswith("int4 (triton, not row-invariant, prefill by torch), ")  # and the product of 16 bits
    assert [model.implementation["attention"].split(";")[0] for model in (exact, fast)] == [
        "triton, row-invariant",
        "triton, not row-invariant",
    ]
    rows, logits = list(range(3, 23)), []
    for model in (fast, decoder(name)):
        cache = model.open_cache(1, 32)
        logits.append(model(chains([rows], [cache.open()]), cache).logits)
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-5


def test_where_kernels_are_interpreted_they_are_asked_for() -> None:
    assert decoder(FOUR_BITS).implementation["attention"].startswith("row-wise")
    assert not Kernels().run_on(torch.device("cpu"), torch.float32)
    assert Kernels().run_on(torch.device("cuda"), torch.bfloat16)
    assert not Kernels().run_on(torch.device("cuda"), torch.float64)
