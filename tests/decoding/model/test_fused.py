"""The decoder on our kernels, as on a GPU, against itself on torch's operations. They run in Triton's interpreter."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodelab.attention import book
from decodelab.attention.layered import LayeredCache
from decodelab.attention.paged import PagedCache
from decodelab.attention.rows import Rows, chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Gives
from decodelab.decoding.model.decoder import Decoder
from decodelab.kernels.dispatch import Kernels
from decodelab.tests.decoding.model.fused import CASES, FOUR_BITS, Again, decoder, pages
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import Rigged, ask, thicket

pytest.importorskip("triton", reason="kernels are interpreted by triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = Kernels(interpreted=True)


def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by numpy's BLAS, which sums a tile's seventh row in another order than its first, as
    no GPU does: here it multiplies and sums in order."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None].astype(dtype) * b).sum(1))


@torch.inference_mode()
def fed(model: Decoder, name: str) -> list[Tensor]:
    """Logits and hidden states of two prompts, trees behind them, and a row behind what was kept of those."""
    cache = model.open_cache(3, 20, pages(name, model))
    _, a, b = (cache.open() for _ in range(3))  # the first is another's, so that numbers are not places
    first = model(chains([[5, 6, 7, 8, 9, 10, 11], [3]], [b, a], prompt=True), cache, logits_of=torch.tensor([6, 7]))
    cache.commit({b: range(7), a: [7]})
    tree = Rows(
        torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([-1, 0, 0, 2, -1, 4]), torch.tensor([b] * 4 + [a] * 2), False
    )
    second = model(tree, cache, taps=(0, 1, 2, "final"))
    more = model(Rows(torch.tensor([30]), torch.tensor([2]), torch.tensor([b]), False, first=6), cache)
    cache.commit({b: [0, 2, 6], a: [4]})
    third = model(chains([[20], [21]], [a, b]), cache, logits_of=torch.tensor([1]))
    cache.commit({a: [0], b: [1]})
    tree = Rows(
        torch.tensor([9, 8, 7, 6, 5, 4, 3]),
        torch.tensor([-1, -1, 1, 1, -1, 4, -1]),
        torch.tensor([b] * 4 + [a] * 3),
        False,
    )
    fourth = model(tree, cache, taps=(0, 1, 2, "final"))
    of_trees = [states for out in (second, fourth) for states in (out.logits, *out.hidden.values())]
    return [first.logits, more.logits, third.logits, *of_trees]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_torch_s_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where steps are recorded and replayed, those of launching to the bit. Neither needs masks or slots of a part
    for itself, so that staging makes none."""
    unchecked(monkeypatch)
    in_order(monkeypatch)
    recorder, by_torch = Again(), fed(decoder(name), name)
    for owner, made in ((book.Masks, "__getitem__"), (LayeredCache, "_looked"), (PagedCache, "_slots")):
        monkeypatch.setattr(owner, made, None)
    launched = fed(decoder(name, INTERPRETED), name)
    for got, want in zip(launched, by_torch, strict=True):
        assert (got - want).norm() / want.norm() < 1e-5
    if name.startswith("qwen"):  # the others are dense, in pages and in rings, of 16, 8 and 4 bits
        return
    for got, want in zip(fed(decoder(name, INTERPRETED, recorder), name), launched, strict=True):
        assert torch.equal(got, want)
    assert recorder.replayed == [0, 1, 2, 0]


@torch.inference_mode()
def test_a_long_prompt_beside_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one forward: the first attends by itself, and has no mask."""
    unchecked(monkeypatch)
    monkeypatch.setattr(book, "LONG_CHAIN", 4)
    prompts = [[3, 4], [5, 6, 7, 8, 9, 10], [9]]
    found = []
    for kernels in (INTERPRETED, None):
        model = decoder(FOUR_BITS, kernels)
        cache = model.open_cache(3, 20)
        rows = chains(prompts, [cache.open() for _ in prompts], prompt=True)
        found.append(model(rows, cache).logits)
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-5


def test_greedy_speculation_emits_what_plain_decoding_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched, and recorded and replayed."""
    unchecked(monkeypatch)
    asked = [ask(prompt, Greedy(), 6) for prompt in ([7, 30, 12], [5, 9])]
    model = decoder(FOUR_BITS, INTERPRETED)
    plain = [g.tokens for g in reference.generate(model, asked, Greedy().law(), seed=0)]
    assert all(len(set(tokens)) > 3 for tokens in plain)
    answers = {request.prompt: tokens for request, tokens in zip(asked, plain, strict=True)}
    drafter = Rigged(thicket(answers, seed=7), gives=Gives("forest", rows=8, depth=6))
    got = loop.generate(decoder(FOUR_BITS, INTERPRETED, Again()), asked, drafter, Greedy(), seed=0)
    assert [g.tokens for g in got] == plain
    assert sum(step.accepted for g in got for step in g.steps) > 3


@torch.inference_mode()
def test_a_bucket_is_compiled_and_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over growing lengths and different trees; and of one kernel, all buckets want the same variants, by what triton
    tells variants apart: integers of 1 or divisible by 16, pointers aligned to 16 bytes, constants, options."""
    unchecked(monkeypatch)
    variants: list[set[tuple[Any, ...]]] = []
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        unlike = self.kwargs["do_not_specialize"] or ()
        told = dict(zip(self.arg_names, args, strict=False))
        kinds = [native_specialize_impl(BaseBackend, x, False, name not in unlike, True) for name, x in told.items()]
        variants[-1].add((self.__name__, tuple(kinds), tuple(sorted(options.items(), key=str))))
        run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    recorder = Again()
    model = decoder(FOUR_BITS, INTERPRETED, recorder)
    cache = model.open_cache(1, 100)
    sequence = cache.open()
    rng = random.Random(0)
    variants.append(set())
    model(chains([[5, 6, 7]], [sequence], prompt=True), cache)
    cache.commit({sequence: range(3)})
    for rows in (1, 5, 8, 6, 1):
        parents = [rng.randrange(-1, i) for i in range(rows)]
        variants.append(set())
        model(Rows(torch.arange(rows), torch.tensor(parents), torch.full((rows,), sequence), False), cache)
        variants.append(set())
        cache.commit({sequence: [rows - 1]})
    assert recorder.replayed == [0, 1, 1, 1, 0]
    for number in (2, 0):  # in another cache, since what was recorded reads the first; and in that one, once it is free
        model.close_cache(cache)
        another = model.open_cache(1, 90)
        model(Rows(torch.tensor([3]), torch.tensor([-1]), torch.tensor([another.open()]), False), another)
        assert recorder.replayed[-1] == number
        if number:
            cache.free(sequence)
    first, *others = variants[1::2]  # without commits
    assert all(of == first for of in others)


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_a_chain_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    in_order(monkeypatch)
    model = decoder(FOUR_BITS, INTERPRETED)
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
    fast, exact = (
        decoder(name, Kernels(row_invariant=row_invariant, interpreted=True)) for row_invariant in (False, True)
    )
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
