"""A decoder's layers in one call of the CPU's own kernels, against PyTorch's operations, and a row's bits."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

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

from decodelab.attention.cache import Cache, DenseCache
from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.paged import PagedCache
from decodelab.attention.rows import Rows, chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Gives
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.native import missing
from decodelab.quantization.codes import Codes
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.tests.decoding.model.fused import SIZES as NARROW
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import Rigged, ask, thicket

SIZES = NARROW | {"hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 1024}


def mixed(name: str, weight: Tensor) -> Codes | None:
    """Other bits and groups for queries than for keys, values dense; columns of the last product in an order."""
    if "v_proj" in name:
        return None
    codes = round_to_nearest(weight, Grid(8, -1, True) if "q_proj" in name else Grid(4, 32, False))
    if "down_proj" not in name:
        return codes
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return replace(codes, codes=codes.codes[:, order], groups=codes.column_groups[order].int())


def four_bits(name: str, weight: Tensor) -> Codes | None:
    return round_to_nearest(weight, Grid(4, 32, False))


def eight_bits(name: str, weight: Tensor) -> Codes | None:
    codes = round_to_nearest(weight, Grid(8, 32, False))
    assert codes.zero is not None
    return replace(codes, zero=None, shift=-codes.scale.float() * codes.zero.float())


Quantise = Callable[[str, Tensor], Codes | None]
# a model, how its weights are stored, what a layer keeps (None: the model's own)
CASES: dict[str, tuple[PretrainedConfig, Quantise | None, tuple[LayerKV, ...] | None]] = {
    "llama": (LlamaConfig(**SIZES), None, None),
    "llama, 4 bits, one cache of both layers": (LlamaConfig(**SIZES), four_bits, (LayerKV(0, 2), LayerKV(0, 2))),
    "qwen2, tied": (
        Qwen2Config(**SIZES | {"num_attention_heads": 2}, tie_word_embeddings=True),
        mixed,
        None,
    ),
    "qwen3, wide heads": (
        Qwen3Config(**SIZES | {"num_key_value_heads": 1}, head_dim=96),
        eight_bits,
        None,
    ),
    "smollm3": (SmolLM3Config(**SIZES | {"intermediate_size": 4064}, no_rope_layers=[1, 0]), None, None),
    "mistral, windows as masks": (MistralConfig(**SIZES), None, (LayerKV(0, 2, 300, 3), LayerKV(1, 2, 4, 1))),
    "mistral, rings": (MistralConfig(**SIZES), None, (LayerKV(0, 2, 300, 3), LayerKV(1, 2, 4, 1))),
    "llama, 8 and 4 bits": (LlamaConfig(**SIZES), None, (LayerKV(0, 2, bits=8), LayerKV(1, 2, 270, 5, bits=4))),
    "qwen3, pages": (Qwen3Config(**SIZES, head_dim=128), None, None),
    "llama, pages of 4 and 8 bits": (
        LlamaConfig(**SIZES, head_dim=256),
        None,
        (LayerKV(0, 2, bits=4), LayerKV(1, 2, 9, bits=8)),
    ),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    unchecked(monkeypatch)


@cache
def decoder(name: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config, quantise, layers = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for part, weight in model.named_parameters():
                weight.mul_(4) if weight.dim() > 1 else weight.normal_(1.0 if "norm" in part else 0.0, 0.3)
    tensors, made = {n: w.bfloat16() for n, w in model.state_dict().items()}, ModelConfig.from_hf(config)
    codes = {
        part.removesuffix(".weight"): found
        for part, weight in tensors.items()
        if quantise is not None
        and part.endswith("proj.weight")
        and (found := quantise(part, weight.float())) is not None
    }
    if layers is not None:
        made = replace(made, layout=Layout(layers, made.head_dim))
    return Decoder(made, tensors, dtype=dtype, codes=codes)


def opened(name: str, model: Decoder, sequences: int) -> Cache:
    """A cache of 900 slots, the decoder's own but where the case says masks or pages."""
    layout, dtype, device = model.config.layout, model.dtype, model.device
    if "masks" in name:
        return DenseCache(layout, sequences=sequences, capacity=900, dtype=dtype, device=device)
    pages = PagedCache(layout, size=16, dtype=dtype, device=device) if "pages" in name else None
    return model.open_cache(sequences, 900, pages)


PREFIXES = (514, 40, 3)  # a short window looks over a border of the kernel's splits; and short ones


@torch.inference_mode()
def fed(name: str, model: Decoder, layers: list[int] | None = None) -> list[Tensor]:
    """Logits and hidden states of forests behind prompts, of a row behind a staged one, and of rows behind what was
    kept."""
    cache = opened(name, model, 4)
    _d, a, b, c = (cache.open() for _ in range(4))
    for sequence, size in zip((a, b, c), PREFIXES, strict=True):
        model(chains([[(7 * i + size) % 58 + 3 for i in range(size)]], [sequence], prompt=True), cache)
        cache.commit({sequence: range(size)})
    parents = torch.tensor([-1, 0, 0, 2, -1, 4, 3, -1, 7, 7, -1])
    tree = Rows(torch.arange(20, 31), parents, torch.tensor([a] * 7 + [c] * 3 + [b]), False)
    first = model(tree, cache, taps=(1, 2, "final"), layers=layers)
    more = model(Rows(torch.tensor([40]), torch.tensor([3]), torch.tensor([a]), False, first=11), cache, layers=layers)
    cache.commit({a: [0, 2, 3, 11], b: [10], c: [7, 9]})
    second = model(chains([[5, 6, 7], [8]], [a, c]), cache, layers=layers)
    return [first.logits, *first.hidden.values(), more.logits, second.logits]


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_torch_s_operations_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = decoder(name), decoder(name, torch.float64)
    assert model.implementation["attention"].startswith("native")
    got = fed(name, model)
    monkeypatch.setattr(model, "_native", None)
    theirs = fed(name, model)
    for ours, other, want in zip(got, theirs, fed(name, exact), strict=True):
        assert relative_error(ours, want) < max(1.5 * relative_error(other, want), 2**-7)


@torch.inference_mode()
def prompted(name: str, model: Decoder) -> list[Tensor]:
    """Logits of prompts side by side, long ones alone and a short one beside them, of a prompt behind what is kept, and
    of a row behind all that."""
    got = []
    for sizes in ((300, 260), (20, 90, 450)):
        cache = opened(name, model, 4)
        sequences = [cache.open() for _ in sizes]
        for size in (None, 70):
            lengths = sizes if size is None else (size,) * len(sizes)
            rows = chains([[(7 * i + n) % 58 + 3 for i in range(n)] for n in lengths], sequences, prompt=True)
            got.append(model(rows, cache, taps=(1,)).logits)
            starts = [sum(lengths[:i]) for i in range(len(sizes))]
            cache.commit({s: range(a, a + n) for s, a, n in zip(sequences, starts, lengths, strict=True)})
        got.append(model(chains([[5]] * len(sizes), sequences), cache).logits)
    return got


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_prompts_are_computed_as_torch_s_operations_do(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exact = decoder(name), decoder(name, torch.float64)
    torch.set_num_threads(threads)
    try:
        got = prompted(name, model)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(model, "_native", None)
    theirs = prompted(name, model)
    for ours, other, want in zip(got, theirs, prompted(name, exact), strict=True):
        assert relative_error(ours, want) < max(1.5 * relative_error(other, want), 2**-7)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_prompt_s_rows_have_the_same_bits_however_it_is_cut(name: str) -> None:
    """So that a prompt behind shared pages, or beside others, decodes as it would alone."""
    model, size = decoder(name), 600
    prompt, other = [(7 * i) % 58 + 3 for i in range(size)], [9] * 30
    got = []
    for threads, cuts in ((1, []), (2, [300]), (1, [513, 599]), (2, [64, 536])):
        torch.set_num_threads(threads)
        try:
            cache = opened(name, model, 2)
            a, b = cache.open(), cache.open()
            pieces = []
            for first, stop in pairwise([0, *cuts, size]):
                rows = chains([prompt[first:stop], other][: 1 + bool(first)], [a, b][: 1 + bool(first)], prompt=True)
                pieces.append(model(rows, cache).logits[: stop - first])
                cache.commit({a: range(stop - first)})
        finally:
            torch.set_num_threads(1)
        got.append(torch.cat(pieces))
    for other_cut in got[1:]:
        assert torch.equal(other_cut, got[0])


@pytest.mark.parametrize("name", ["llama", "mistral, rings", "qwen3, pages"])
@torch.inference_mode()
def test_a_large_forest_may_come_at_once_or_in_two_forwards(name: str) -> None:
    model, size = decoder(name), 620
    random = torch.Generator().manual_seed(3)
    parents = torch.tensor([int(torch.randint(max(-1, i - 9), i, (), generator=random)) for i in range(size)])
    tokens = torch.randint(3, 61, (size,), generator=random)
    got = []
    for cuts in ([], [260]):
        cache = opened(name, model, 2)
        sequence = cache.open()
        model(chains([[7, 8, 9] * 30], [sequence], prompt=True), cache)
        cache.commit({sequence: range(90)})
        pieces = [
            Rows(tokens[a:b], parents[a:b], torch.full((b - a,), sequence), False, first=a)
            for a, b in pairwise([0, *cuts, size])
        ]
        got.append(torch.cat([model(rows, cache).logits for rows in pieces]))
    assert torch.equal(*got)


@torch.inference_mode()
def test_what_is_not_a_number_reaches_those_that_see_it_and_no_other_sequence() -> None:
    model = decoder("llama")
    kept = model.embedding[9].clone()
    model.embedding[9] = float("nan")
    try:
        cache = opened("llama", model, 2)
        a, b = cache.open(), cache.open()
        rows = torch.tensor([5, 9, 7, 6, 5, 7])
        forest = Rows(rows, torch.tensor([-1, 0, 1, 0, -1, 4]), torch.tensor([a, a, a, a, b, b]), False)
        bad = model(forest, cache).logits.isnan().any(1)
    finally:
        model.embedding[9] = kept
    assert bad[1:3].tolist() == [True, True]
    assert not bad[4:].any()


def test_layers_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    got = fed("llama", model, [1])
    assert (got[0] - fed("llama", model)[0]).norm() > 0.1 * got[0].norm()
    monkeypatch.setattr(model, "_native", None)
    assert relative_error(got[0], fed("llama", model, [1])[0]) < 0.03


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_a_tree_and_alone(name: str, threads: int) -> None:
    """Wherever its ancestors are staged, whatever rows and sequences stand beside it, over a border of splits too."""
    model, prefix, depth = decoder(name), 250, 12
    ids = [(5 * i) % 58 + 3 for i in range(depth)]
    torch.set_num_threads(threads)
    try:
        cache = opened(name, model, 2)
        a, b = cache.open(), cache.open()
        prompt = [(3 * i) % 58 + 3 for i in range(prefix)]
        for sequence in (a, b):
            model(chains([prompt], [sequence], prompt=True), cache)
            cache.commit({sequence: range(prefix)})
        # each token of the chain with a wrong sibling before it, and another sequence's rows behind
        tokens, parents, own = [], [], []
        for i, token in enumerate(ids):
            tokens += [(token + 1) % 58 + 3, token]
            parents += [own[-1] if own else -1] * 2
            own.append(2 * i + 1)
        rows = Rows(
            torch.tensor([*tokens, 9, 9]),
            torch.tensor([*parents, -1, len(tokens)]),
            torch.tensor([a] * len(tokens) + [b] * 2),
            False,
        )
        tree = model(rows, cache).logits[torch.tensor(own)]
        cache.drop()
        alone = []
        for token in ids:
            alone.append(model(chains([[token]], [a]), cache).logits)
            cache.commit({a: [0]})
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat(alone), tree)


@pytest.mark.parametrize(
    "name", ["llama", "llama, 4 bits, one cache of both layers", "mistral, rings", "llama, 8 and 4 bits"]
)
def test_greedy_speculation_emits_what_plain_decoding_does(name: str) -> None:
    model = decoder(name)
    asked = [ask(prompt, Greedy(), 24) for prompt in ([7, 30, 12], [5, 9], list(range(3, 60)) * 2)]
    plain = [g.tokens for g in reference.generate(model, asked, Greedy().law(), seed=0)]
    assert all(len(set(tokens)) > 5 for tokens in plain)
    answers = {request.prompt: tokens for request, tokens in zip(asked, plain, strict=True)}
    drafter = Rigged(thicket(answers, seed=7), gives=Gives("forest", rows=8, depth=6))
    got = loop.generate(model, asked, drafter, Greedy(), seed=0)
    assert [g.tokens for g in got] == plain
    assert sum(step.accepted for g in got for step in g.steps) > 20


def test_inputs_that_are_rounded_for_a_weight_that_is_dequantised_are_none_of_its() -> None:
    config = LlamaConfig(**SIZES)
    tensors = {n: w.bfloat16() for n, w in AutoModelForCausalLM.from_config(config).state_dict().items()}
    name = "model.layers.1.mlp.down_proj"
    codes = replace(round_to_nearest(tensors[f"{name}.weight"].float(), Grid(8, 32, True)), activation_bits=8)
    rounds = Decoder(ModelConfig.from_hf(config), tensors, dtype=torch.bfloat16, codes={name: codes})
    assert "dequantised" in rounds.implementation["linear"]
    assert rounds.implementation["attention"].startswith("row-wise")


def test_what_it_does_not_take_is_computed_as_ever() -> None:
    narrow = Decoder(
        ModelConfig.from_hf(config := LlamaConfig(**SIZES | {"num_attention_heads": 8})),
        {n: w.bfloat16() for n, w in AutoModelForCausalLM.from_config(config).state_dict().items()},
        dtype=torch.bfloat16,
    )
    assert narrow.implementation["attention"].startswith("row-wise")
    assert decoder("llama", torch.float64).implementation == {
        "linear": "torch",
        "attention": narrow.implementation["attention"],
    }
    assert narrow.open_cache(1, 8).nbytes
