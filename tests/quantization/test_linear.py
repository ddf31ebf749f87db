"""Which product multiplies with which codes, and that all of them are the codes' own weight."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.kernels.linear import native as dense
from decodelab.kernels.linear.reference import relative_error
from decodelab.kernels.matmul_w4 import cpu as w4
from decodelab.kernels.matmul_w4 import native
from decodelab.kernels.matmul_w8 import matmul_w8a8_reference, rounded_rows
from decodelab.kernels.native import missing
from decodelab.quantization.codes import Codes
from decodelab.quantization.grid import Grid, round_to_nearest
from decodelab.quantization.linear import Beside, QuantisedLinear, by_triton
from decodelab.quantization.quantiser import Quantiser
from decodelab.quantization.rtn import RTN
from decodelab.quantization.w8a8 import W8A8
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import Rigged, ask, oracle, thicket

BF16, CAN_PACK, CAN_MULTIPLY = torch.bfloat16, native.can_pack, dense.can_multiply
packs = pytest.mark.skipif(
    not w4.can_pack(BF16, torch.device("cpu")), reason="this processor has no packed products of few bits"
)


@pytest.fixture(autouse=True)
def torchs_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products, which stand in where ours in C++ are not."""
    if "native_products" not in request.fixturenames:
        monkeypatch.setattr(native, "can_pack", lambda *_: False)
        monkeypatch.setattr(dense, "can_multiply", lambda *_: False)


@pytest.fixture
def native_products() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)


def rounded(N: int, K: int, bits: int, group: int, symmetric: bool = False, seed: int = 0) -> Codes:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) + 0.1
    return round_to_nearest(weight, Grid(bits, group, symmetric))


def act_order(codes: Codes) -> Codes:
    """The same codes at other columns: group g's are anywhere."""
    order = torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(1))
    return replace(codes, codes=codes.codes[:, order], groups=codes.column_groups[order].int())


def shifted(codes: Codes) -> Codes:
    """The same weight with float shifts in the place of integer zeros."""
    assert codes.zero is not None
    return replace(codes, zero=None, shift=-codes.scale.float() * codes.zero.float())


W8 = replace(rounded(40, 64, 8, -1, True), activation_bits=8)
INT4, INT8 = "(int4pack, prefill dequantised)", "(int8pack, prefill dequantised)"
CASES: dict[str, tuple[Codes, str]] = {
    "4 bits": (rounded(50, 192, 4, 64), f"int4 {INT4}"),
    "4 bits, symmetric": (rounded(64, 256, 4, 128, True), f"int4 {INT4}"),
    "4 bits, a whole row": (rounded(50, 96, 4, -1), f"int4 {INT4}"),
    "4 bits, a shorter last group": (rounded(50, 192, 4, 128), f"int4 {INT4}"),
    "4 bits, float shifts": (shifted(rounded(50, 192, 4, 32)), f"int4 {INT4}"),
    "4 bits, act-order": (act_order(rounded(50, 192, 4, 64)), f"int4 {INT4}"),
    "3 bits": (rounded(50, 192, 3, 32), f"int3 {INT4}"),
    "2 bits, act-order": (act_order(rounded(50, 192, 2, 64)), f"int2 {INT4}"),
    "8 bits": (rounded(50, 192, 8, -1, True), f"int8 {INT8}"),
    "6 bits, zeros anywhere": (rounded(50, 192, 6, -1), f"int6 {INT8}"),
    "w8a8": (W8, "int8 × int8 (onednn)"),
    "4 bits, columns not a multiple": (rounded(50, 100, 4, -1), "int4 dequantised"),
    "4 bits, small groups": (rounded(50, 64, 4, 16), "int4 dequantised"),
    "8 bits, groups": (rounded(50, 64, 8, 32, True), "int8 dequantised"),
    "8 bits, zeros anywhere": (rounded(50, 64, 8, -1), "int8 dequantised"),
    "8 bits, columns not a multiple of 16": (rounded(50, 72, 8, -1, True), "int8 dequantised"),
    "5 bits, groups": (rounded(50, 64, 5, 32), "int5 dequantised"),
    "w8a8, groups": (replace(rounded(50, 64, 8, 32, True), activation_bits=8), "int8 × int8 dequantised"),
}


@packs
@pytest.mark.parametrize("name", CASES)
def test_which_product_it_is(name: str) -> None:
    codes, product = CASES[name]
    found = QuantisedLinear(codes, None, BF16).implementation
    assert found == product if product.endswith(")") else found.startswith(f"{product} (")
    if codes.activation_bits is None:  # float32 rows run in a scalar loop there
        assert "dequantised (" in QuantisedLinear(codes, None, torch.float32).implementation


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_weight_that_the_codes_say(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    codes, _ = CASES[name]
    N, K = codes.shape
    bias = torch.randn(N, generator=rng).to(dtype)
    x = torch.randn(64, K, generator=rng).to(dtype)
    layer = QuantisedLinear(codes, bias, dtype)
    read = x.double()
    if codes.activation_bits is not None:
        values, by = rounded_rows(x)
        read = values.double() * by.double()
    want = read @ codes.dequantise(torch.float64).T + bias.double()
    # bfloat16: the output is rounded twice, weights once, and shifts that are no integers of scales once
    tolerance = {BF16: 2**-7, torch.float32: 2e-6, torch.float64: 1e-6 if codes.activation_bits else 1e-12}[dtype]
    for rows in (1, 2, 3, 8, 16, 64):
        got = layer(x[:rows])
        assert (got.dtype, got.shape) == (dtype, (rows, N))
        assert relative_error(got, want[:rows]) < tolerance
    assert relative_error(layer(x, prefill=True), want) < tolerance
    assert relative_error(layer.dense(), codes.dequantise(torch.float64)) < tolerance / 2
    assert layer.dense().dtype == dtype


@pytest.mark.parametrize("name", CASES)
def test_where_our_kernels_run_they_take_any_codes_as_they_are(name: str, rng: torch.Generator) -> None:
    pytest.importorskip("triton", reason="kernels are interpreted by triton")
    codes, _ = CASES[name]
    N, K = codes.shape
    bias, x = torch.randn(N, generator=rng), torch.randn(3, K, generator=rng)
    layer, weight = by_triton(codes, bias, torch.float32, True), codes.dequantise(torch.float64)
    read = x.double()
    if codes.activation_bits is not None:
        values, by = rounded_rows(x)
        read = values.double() * by.double()
    for prefill in (False, True):
        assert relative_error(layer(x, prefill), read @ weight.T + bias.double()) < 2e-6
    assert relative_error(layer.dense(), weight) < 1e-6
    assert (layer.out_features, layer.in_features) == (N, K)
    groups = 0 if codes.groups is None else codes.groups.nbytes
    shifts = codes.zero if codes.shift is None else codes.shift
    stored = N * K // 2 if codes.bits <= 4 else N * K
    assert layer.nbytes == stored + codes.scale.nbytes + shifts.nbytes + groups + bias.nbytes


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(name: str, rng: torch.Generator) -> None:
    """llama.cpp#25618, vllm#54506, transformers#39421."""
    codes, _ = CASES[name]
    layer = QuantisedLinear(codes, torch.randn(codes.shape[0], generator=rng).to(BF16), BF16)
    if "not row-invariant" in layer.implementation or "torch" in layer.implementation:
        pytest.skip(f"the product of this machine is {layer.implementation!r}, which promises nothing to the bit")
    x = torch.randn(100, codes.shape[1], generator=rng).to(BF16)
    want = layer(x)
    for rows in (*range(1, 17), 33, 80):
        assert torch.equal(layer(x[:rows]), want[:rows]), rows


def in_blocks(x: Tensor) -> Tensor:
    """x as our products in C++ read it: 8 bits and a scale a block of 32 columns."""
    each = x.float().unflatten(1, (-1, native.BLOCK))
    most = each.abs().amax(2, keepdim=True)
    return ((each * torch.where(most > 0, 127 / most, 0)).round() * (most / 127)).flatten(1)


OTHERS = {"w8a8, groups", "4 bits, columns not a multiple", "4 bits, small groups"}
OTHERS |= {"8 bits, columns not a multiple of 16"}


@pytest.mark.usefixtures("native_products")
@pytest.mark.parametrize("name", CASES)
def test_our_own_products_are_of_the_weight_and_of_rounded_rows(name: str, rng: torch.Generator) -> None:
    codes, _ = CASES[name]
    N, K = codes.shape
    bias, x = torch.randn(N, generator=rng).to(BF16), torch.randn(100, K, generator=rng).to(BF16)
    layer = QuantisedLinear(codes, bias, BF16)
    if name in OTHERS:
        assert "inputs in 8 bits" not in layer.implementation
        return
    whole = codes.activation_bits is not None  # a row has one scale
    assert layer.implementation == ("int8 × int8 (native)" if whole else f"int{codes.bits} (native, inputs in 8 bits)")
    weight = codes.dequantise(torch.float64)
    assert relative_error(layer.dense(), weight) < 2**-9
    values, by = rounded_rows(x)
    read = values.double() * by.double() if whole else in_blocks(x).double()
    want, got = read @ weight.T + bias.double(), layer(x)
    if codes.groups is not None:  # blocks are of columns in their groups' order
        order = codes.column_groups.argsort(stable=True)
        want = in_blocks(x[:, order]).double() @ weight[:, order].T + bias.double()
    assert relative_error(got, want) < 2**-8
    assert torch.equal(layer(x, prefill=True), got)
    for rows in (*range(1, 18), 33, 80):
        assert torch.equal(layer(x[:rows]), got[:rows]), rows
    assert all(torch.equal(layer(x[at : at + 1])[0], got[at]) for at in range(20))


@packs
def test_what_one_call_reads() -> None:
    bias = torch.zeros(64, dtype=BF16)
    codes = rounded(64, 128, 4, 64)
    assert QuantisedLinear(codes, bias, BF16).nbytes == 64 * 128 // 2 + 64 * 2 * 4 + 128
    assert QuantisedLinear(rounded(64, 128, 8, -1, True), bias, BF16).nbytes == 64 * 128 + 128 + 128
    assert QuantisedLinear(codes, bias, torch.float32).nbytes == 64 * 128 * 4 + 128


@packs
@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, False), (4, True)])
def test_the_scales_of_our_grid_lose_nothing_in_the_product(bits: int, symmetric: bool) -> None:
    codes = rounded(50, 192, bits, 64, symmetric)
    packed = QuantisedLinear(codes, None, BF16).packed
    assert packed is not None
    assert torch.equal(packed.dense(torch.float32), codes.dequantise())


@packs
def test_what_other_scales_and_shifts_lose_is_little_beside_a_step() -> None:
    codes = rounded(50, 192, 4, 32)
    other = replace(codes, scale=codes.scale * 1.0029)  # as float16 has them
    for given in (codes, other, shifted(other)):
        packed = QuantisedLinear(given, None, BF16).packed
        assert packed is not None
        lost = (packed.dense(torch.float32) - given.dequantise()).abs()
        assert bool((lost <= given.scale.float()[:, given.column_groups] / 16).all())


def test_layers_beside_each_other_are_as_each_alone(rng: torch.Generator) -> None:
    parts = [QuantisedLinear(CASES[name][0], None, BF16) for name in ("4 bits", "8 bits", "4 bits, act-order")]
    both, x = Beside(parts), torch.randn(70, 192, generator=rng).to(BF16)
    for prefill in (False, True):
        assert torch.equal(both(x, prefill), torch.cat([part(x, prefill) for part in parts], 1))
    assert torch.equal(both.dense(), torch.cat([part.dense() for part in parts]))
    assert both.nbytes == sum(part.nbytes for part in parts)


def test_w8a8_rounds_to_nearest_with_a_scale_an_output(rng: torch.Generator) -> None:
    weight = torch.randn(40, 64, generator=rng)
    codes = W8A8().layer(weight, None).codes
    assert (codes.bits, codes.activation_bits, codes.symmetric, codes.scale.shape) == (8, 8, True, (40, 1))
    assert bool(((codes.dequantise() - weight).abs() <= codes.scale.float() * (1 + 1e-3)).all())
    x = torch.randn(3, 64, generator=rng).to(BF16)
    values = codes.codes.int() - 128
    want = matmul_w8a8_reference(x, values.to(torch.int8), codes.scale[:, 0])
    assert relative_error(QuantisedLinear(codes, None, BF16)(x), want) < 2**-8


QUANTISERS: dict[str, Quantiser] = {
    "int4": RTN(bits=4, group_size=32),
    "int8": RTN(bits=8, group_size=-1, symmetric=True),
    "w8a8": W8A8(),
    "dequantised": RTN(bits=5, group_size=32),
}
PROMPTS = ([7, 30, 12, 7, 30], [5, 9, 41, 5, 9, 41, 5, 9], list(range(3, 60)) + list(range(3, 40)))


@cache
def quantised(name: str, products: str) -> Decoder:
    """A tiny model in bfloat16, all linear layers of whose blocks are quantised, on `products`."""
    quantiser = QUANTISERS[name]
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    settings = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(settings)
    tensors = {name: w.detach() * 8 if w.dim() > 1 else w.detach() for name, w in model.state_dict().items()}
    codes = {
        name.removesuffix(".weight"): quantiser.layer(w, None).codes
        for name, w in tensors.items()
        if name.startswith("model.layers.") and w.dim() > 1
    }
    return Decoder(ModelConfig.from_hf(settings), tensors, dtype=BF16, codes=codes)


@packs
@pytest.mark.parametrize("drafter", ["chain", "tree"])
@pytest.mark.parametrize(
    ("name", "products"),
    [*((name, "torch") for name in QUANTISERS), ("int4", "native"), ("dequantised", "native"), ("w8a8", "native")],
)
def test_greedy_speculation_emits_what_plain_decoding_over_the_same_weights_does(
    name: str, products: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token, in a batch, with a prompt that is long enough to be read through another product."""
    unchecked(monkeypatch)
    if products == "native":
        if (why := missing()) is not None:
            pytest.skip(why)
        monkeypatch.setattr(native, "can_pack", CAN_PACK)
        monkeypatch.setattr(dense, "can_multiply", CAN_MULTIPLY)
    target = quantised(name, products)
    used = target.implementation["linear"]
    assert ("native" in used) == (products == "native")
    assert ("dequantised (" in used) == (name == "dequantised" and products == "torch"), used
    asked = [ask(prompt, Greedy(), 24) for prompt in PROMPTS]
    plain = [g.tokens for g in reference.generate(target, asked, Greedy().law(), seed=0)]
    assert all(len(set(tokens)) > 5 for tokens in plain)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)}
    plan = oracle(answers, lengths=(4, 1, 6), stale=(1, 4)) if drafter == "chain" else thicket(answers, seed=0)
    got = loop.generate(target, asked, Rigged(plan), Greedy(), seed=0)
    assert [g.tokens for g in got] == plain
    assert sum(step.accepted for g in got for step in g.steps) > 20
