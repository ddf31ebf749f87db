"""Decoding over pages that prompts share is decoding without: who was there before is not seen in what comes out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from decodelab.attention.paged import PagedCache
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling
from decodelab.decoding.draft import Draft, Gives, Resources, Room
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.noise import Noise
from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import OPTIONS, configured
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import Rigged, State, ask, oracle, thicket
from decodelab.tests.tiny import tiny_decoder, tiny_tokenizer
from decodelab.tests.twins import llama_twins

RULES: dict[str, Acceptance] = {"greedy": Greedy(), "sampling": Sampling(temperature=1.5)}
SYSTEM = [7, 30, 12, 7, 30, 44, 3, 19, 22, 8, 60, 33, 5, 9, 41, 5, 9, 41, 17]
# Batches of three: alike from the beginning, alike whole, one a beginning of another, and one that is like none.
BATCHES = (
    [[*SYSTEM, 1, 2], [*SYSTEM, 1, 3, 9, 9], [4, 4, 30, 12]],
    [[*SYSTEM, 1, 2], [*SYSTEM[:16]], [*SYSTEM[:9], 50, 51, 52]],
    [[*SYSTEM, 1, 2], [*SYSTEM, 1, 2], SYSTEM * 2],
)
TOKENS = 10


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are checked in the tests of the parts."""
    unchecked(monkeypatch)


@cache
def target() -> Decoder:
    return tiny_decoder(scale=6.0)


def pool(size: int, blocks: int | None = None, share: bool = True, decoder: Decoder | None = None) -> PagedCache:
    model = decoder or target()
    return PagedCache(
        model.config.layout, size=size, blocks=blocks, share=share, dtype=model.dtype, device=model.device
    )


def requests(prompts: Sequence[Sequence[int]], rule: Acceptance) -> list[Any]:
    return [ask(prompt, rule, TOKENS, documents=[SYSTEM]) for prompt in prompts]


@cache
def plain(rule: Acceptance) -> list[list[list[int]]]:
    return [[g.tokens for g in reference.generate(target(), requests(b, rule), rule.law(), seed=3)] for b in BATCHES]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_drafter_over_a_shared_pool(name: str, rule: str) -> None:
    """vllm#43559: with what others have left, and with drafts whose rows were refused, the output is the same."""
    law = RULES[rule]
    drafter = configured(name).build(Resources(target(), tiny_tokenizer(), law.law()))
    pages = pool(3, share=not drafter.needs.prefill_hidden)
    alone = [loop.generate(target(), requests(b, law), drafter, law, seed=3) for b in BATCHES]
    found = 0
    for batch, want in zip(BATCHES, alone, strict=True):
        got = loop.generate(target(), requests(batch, law), drafter, law, seed=3, pages=pages)
        assert [g.tokens for g in got] == [g.tokens for g in want]
        found += sum(g.prefill.found for g in got)
        pages.pages.check()
        assert pages.pages.used == 0
    assert found == (0 if drafter.needs.prefill_hidden else 18 + 20 + 15 + 9 + 20 + 20 + 18)


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("rule", RULES)
def test_chains_trees_and_plain_decoding(rule: str, size: int) -> None:
    """In a pool that holds hardly one batch, so that blocks are evicted while others are found."""
    law = RULES[rule]
    known = {
        tuple(p): tokens
        for batch, answers in zip(BATCHES, plain(law), strict=True)
        for p, tokens in zip(batch, answers, strict=True)
    }
    pages, seen = pool(size, sum(-(-(38 + TOKENS) // size) for _ in range(2)) + 3), 0
    plans = (oracle(known, (4, 0, 2)), thicket(known, seed=0), thicket(known, seed=1, unjudged=False))
    for batch, want in zip(BATCHES, plain(law), strict=True):
        for plan in plans:
            got = loop.generate(target(), requests(batch, law), Rigged(plan), law, seed=3, pages=pages)
            assert [g.tokens for g in got] == want
            seen += sum(g.prefill.found for g in got)
            pages.pages.check()
        got = reference.generate(target(), requests(batch, law), law.law(), seed=3, pages=pages)
        assert [g.tokens for g in got] == want
        pages.pages.check()
        assert pages.pages.used == 0
    assert seen > 150


@pytest.mark.parametrize("entry", [{"window": 4}, {"window": 3, "sink": 2, "bits": 8}, {"bits": 4}], ids=str)
def test_over_windows_sinks_and_low_bits(entry: dict[str, int]) -> None:
    """Windows and sinks are masks over whole pages, and a row that was found is what it would be if it were computed;
    the plain decoder keeps rings, which hold the same."""
    law, (peer, native) = Greedy(), llama_twins()
    layout = native.config.layout
    layers = tuple(replace(layer, **entry) for layer in layout.layers)
    config = replace(native.config, layout=replace(layout, layers=layers))
    decoder = Decoder(config, peer.state_dict(), dtype=torch.float64)
    pages, found = pool(3, decoder=decoder), 0
    for batch in BATCHES:
        want = [g.tokens for g in reference.generate(decoder, requests(batch, law), law.law())]
        known = dict(zip(map(tuple, batch), want, strict=True))
        for plan in (oracle(known), thicket(known, seed=1)):
            got = loop.generate(decoder, requests(batch, law), Rigged(plan), law, pages=pages)
            assert [g.tokens for g in got] == want
            found += sum(g.prefill.found for g in got)
    assert found > 200
    assert pages.nbytes == pages.formula_bytes


def test_a_prompt_that_is_there_whole() -> None:
    """nano-vllm#211, #233: all of it but its last token is found, and a drafter is told of all of it."""
    law, pages = Greedy(), pool(4)
    prompt = SYSTEM[:16]
    want = reference.generate(target(), requests([prompt], law), law.law())[0].tokens
    for found in (0, 15, 15):
        drafter = Rigged(lambda *_: Draft())
        (got,) = loop.generate(target(), requests([prompt], law), drafter, law, pages=pages)
        assert got.tokens == want
        assert (got.prefill.found, got.prefill.tokens) == (found, 16)
        news = [x[0] for kind, _, *x in drafter.log if kind == "seen" and x[0].prefill]
        assert [t for n in news for t in n.tokens] == [*prompt[1:], want[0]]
        assert [n.position for n in news] == ([1, 16] if found else [1])


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_was_generated_is_found_by_the_next_turn(seed: int | None) -> None:
    """By the tokens of the rows that were kept, wherever those stood in a forest and in a batch."""
    law, pages = Greedy(), pool(4)
    prompts = [SYSTEM[:9], SYSTEM]
    answers = [g.tokens for g in reference.generate(target(), requests(prompts, law), law.law())]
    known = dict(zip(map(tuple, prompts), answers, strict=True))
    drafter = Nothing() if seed is None else Rigged(thicket(known, seed=seed))
    _, first = loop.generate(target(), requests(prompts, law), drafter, law, pages=pages)
    turn = [*SYSTEM, *first.tokens, 3, 4]
    (got,) = loop.generate(target(), requests([turn], law), Nothing(), law, pages=pages)
    assert got.prefill.found == 28  # 19 + 10 less the last token, in whole blocks
    assert got.tokens == reference.generate(target(), requests([turn], law), law.law())[0].tokens


@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_abort_gives_everything_back(after: int) -> None:
    """xllm#828: the generators are closed midway, the loop's and the plain decoder's."""
    law, pages = Greedy(), pool(3)
    drafter = configured("prompt_lookup").build(Resources(target(), tiny_tokenizer(), law.law()))
    for batch, want in zip(BATCHES * 2, plain(law) * 2, strict=True):
        for steps in (
            loop.decode(target(), requests(batch, law), drafter, law, pages=pages),
            reference.decode(target(), requests(batch, law), law.law(), pages=pages),
        ):
            for _ in range(after):
                next(steps)
            steps.close()
            pages.pages.check()
            assert (pages.pages.used, pages.staged) == (0, 0)
        got = loop.generate(target(), requests(batch, law), drafter, law, pages=pages)
        assert [g.tokens for g in got] == want


def test_an_error_of_the_drafter_gives_everything_back() -> None:
    law, pages = Greedy(), pool(3)

    def wrong(state: State, room: Room, noise: Noise) -> Draft:
        raise UserError("no draft")

    for _ in range(2):
        with pytest.raises(UserError, match="no draft"):
            loop.generate(target(), requests(BATCHES[0], law), Rigged(wrong), law, pages=pages)
        pages.pages.check()
        assert (pages.pages.used, pages.staged) == (0, 0)


def test_where_blocks_run_out_drafts_get_shorter_before_an_error_says_so() -> None:
    law = Greedy()
    known = dict(zip(map(tuple, BATCHES[0]), plain(law)[0], strict=True))
    needed = sum(-(-(len(p) + TOKENS - 1) // 4) for p in BATCHES[0])

    def deepest(blocks: int) -> int:
        drafter = Rigged(oracle(known, (6,)), gives=Gives("chain", 6, 6))
        got = loop.generate(target(), requests(BATCHES[0], law), drafter, law, pages=pool(4, blocks, share=False))
        assert [g.tokens for g in got] == plain(law)[0]
        return sum(step.drafted for g in got for step in g.steps)

    assert 0 < deepest(needed) < deepest(needed + 12)
    with pytest.raises(UserError, match=r"out of KV blocks: .* give pages.blocks=\d+, a smaller batch or fewer tokens"):
        deepest(needed // 2)


def test_several_samples_of_one_prompt_share_it() -> None:
    """fork: each sample goes its own way behind a prompt that is there once."""
    from decodelab.attention.rows import chains

    decoder, pages = target(), pool(4, 40, share=False)
    pages.reserve(4, 64)
    first = pages.open()
    decoder(chains([SYSTEM], [first], prompt=True), pages)
    pages.commit({first: range(19)})
    slots = [first, *(pages.fork(first) for _ in range(3))]
    assert pages.pages.used == 5
    texts = [[10 * i + j for j in range(4)] for i in range(4)]
    for j in range(4):
        out = decoder(chains([[text[j]] for text in texts], slots), pages).logits
        pages.commit({slot: [i] for i, slot in enumerate(slots)})
        pages.pages.check()
    assert pages.pages.used == 4 + 4 * 2
    for text, logits in zip(texts, out, strict=True):
        alone = decoder.open_cache(1, 32)
        want = decoder(chains([[*SYSTEM, *text]], [alone.open()]), alone).logits[-1]
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-10)
    for slot in slots:
        pages.free(slot)
    assert pages.pages.used == 0


def test_blocks_in_use_are_in_the_steps() -> None:
    law, pages = Greedy(), pool(4)
    (got,) = loop.generate(target(), requests([SYSTEM], law), Nothing(), law, pages=pages)
    # a step's row goes behind the prompt and what was emitted before it
    assert [step.kv_blocks for step in got.steps] == [-(-(20 + i) // 4) for i in range(TOKENS - 1)]
    assert pages.peak == 7
    assert got.steps[0].kv_bytes == pages.nbytes
    (own,) = loop.generate(target(), requests([SYSTEM], law), Nothing(), law)
    assert own.steps[0].kv_blocks is None
