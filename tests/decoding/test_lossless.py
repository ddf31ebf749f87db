"""Whatever is drafted, the output is plain decoding's: token for token for one-hot drafts, greedy and sampled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, SmolLM3Config

from decodelab.attention.book import LONG_CHAIN
from decodelab.attention.options import Attention, Hybrid, LowBits, SinkWindow, Table
from decodelab.attention.rows import chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import Draft, Gives, Room, chain
from decodelab.decoding.events import Generation
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.noise import Noise
from decodelab.drafting.none import Nothing
from decodelab.kernels.verify_attention import row_invariant
from decodelab.testing import tiny_decoder
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import PROMPTS, Answers, Plan, Rigged, State, ask, drawn, oracle, thicket
from decodelab.tests.twins import SIZES, twins

LAYOUTS: dict[str, PretrainedConfig] = {
    "MHA": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "GQA": LlamaConfig(**SIZES),
    "MQA": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "windows": MistralConfig(**SIZES, sliding_window=4),
    "some windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "windows and no rotation": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=6
    ),
}
KEPT: dict[str, Attention] = {
    "sinks": SinkWindow(5, 2),
    "hybrid": Hybrid(4, "wwf"),
    "8 bits": LowBits(8),
    "4 bits": LowBits(4),
    "recipe": Table("3*(window=5 sinks=1) 1*full | share=2 bits=8"),
}
RULES: dict[str, Greedy | Sampling] = {
    "greedy": Greedy(),
    "greedy with penalties": Greedy(repetition_penalty=1.3, frequency_penalty=0.5, no_repeat_ngram=2),
    "sampling": Sampling(temperature=1.5),
    "sampling with penalties": Sampling(temperature=2.0, top_k=12, top_p=0.95, presence_penalty=0.5),
}


def plainly(decoder: Decoder, rule: Greedy | Sampling, n: int, seed: int = 1) -> list[Generation]:
    return reference.generate(decoder, [ask(p, rule, n) for p in PROMPTS], rule.law(), seed=seed, logprobs=True)


def answers(generations: Sequence[Generation]) -> Answers:
    return {tuple(p): g.tokens for p, g in zip(PROMPTS, generations, strict=True)}


def drafted(
    decoder: Decoder, rule: Greedy | Sampling, n: int, plan: Plan, seed: int = 1, **options: Any
) -> list[Generation]:
    requests = [ask(p, rule, n) for p in PROMPTS]
    return loop.generate(decoder, requests, Rigged(plan), rule, seed=seed, logprobs=True, **options)


def same(got: Sequence[Generation], want: Sequence[Generation]) -> None:
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert [g.reason for g in got] == [w.reason for w in want]
    for g, w in zip(got, want, strict=True):
        assert g.logprobs == pytest.approx(w.logprobs, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_in_float64_over_every_layout(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tokens, prompts of 3, 9 and 40 tokens side by side; chains and forests, rows that are no candidates in them.

    sglang#15360: tree = chain = plain. transformers#42655: a batch with an acceptance for each row.
    """
    if layout != "GQA":
        unchecked(monkeypatch)
    _, decoder = twins(LAYOUTS[layout], torch.float64)
    rule = RULES[name]
    want = plainly(decoder, rule, 20)
    known = answers(want)
    accepted = 0
    for plan in (oracle(known, (4, 0, 2)), thicket(known, seed=0), thicket(known, seed=1, unjudged=False)):
        got = drafted(decoder, rule, 20, plan)
        same(got, want)
        accepted += sum(step.accepted for g in got for step in g.steps)
    assert accepted > 40
    requests = [ask(p, rule, 20) for p in PROMPTS]
    same(loop.generate(decoder, requests, Nothing(), rule, seed=1, logprobs=True), want)


@pytest.mark.parametrize("layout", KEPT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedily_over_every_way_to_keep_rows(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of three, with chains and forests, against plain decoding on the same layout; 30 tokens are many windows.

    transformers refuses drafts over a quantised cache (is_croppable), and keeps all rows of a window while it drafts.
    """
    unchecked(monkeypatch)
    config = LlamaConfig(**SIZES)
    own = ModelConfig.from_hf(config)
    kept = replace(own, layout=KEPT[layout].layout(own.layout, own.heads))
    decoder = Decoder(kept, twins(config, dtype)[0].state_dict(), dtype=dtype)
    want = plainly(decoder, RULES["greedy"], 30)
    known, accepted = answers(want), 0
    for plan in (oracle(known, (4, 0, 2), stale=(1,)), thicket(known, seed=0), thicket(known, seed=1, unjudged=False)):
        got = drafted(decoder, RULES["greedy"], 30, plan)
        same(got, want)
        accepted += sum(step.accepted for g in got for step in g.steps)
    assert accepted > 60


@pytest.mark.parametrize("name", RULES)
def test_in_float32(name: str) -> None:
    """vllm#8783, EAGLE#79: in float32 too, since the tiny model's best tokens are far apart."""
    decoder, rule = tiny_decoder(dtype=torch.float32), RULES[name]
    want = plainly(decoder, rule, 40)
    gaps = []
    reference.generate(
        decoder,
        [ask(p, rule, 40) for p in PROMPTS],
        rule.law(),
        seed=1,
        watch=lambda i, position, keyed, logits: gaps.append(float(keyed.topk(2).values.diff().abs())),
    )
    assert min(gaps) > 5e-4  # rounding moves a score by about 1e-5
    for plan in (oracle(answers(want), (6, 0, 1)), thicket(answers(want), seed=2)):
        same(drafted(decoder, rule, 40, plan), want)


@pytest.mark.skipif(not row_invariant(), reason="the products of this machine promise nothing to the bit")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_along_chains_to_the_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#41758, llama.cpp#25618: many rows round as one does, so log p are equal too; up to 210 keys."""
    unchecked(monkeypatch)
    decoder, rule = tiny_decoder(dtype=dtype, scale=4.0), RULES[name]
    want = plainly(decoder, rule, 170)
    got = drafted(decoder, rule, 170, oracle(answers(want), (6, 0, 3), stale=(2, 5)))
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert [g.logprobs for g in got] == [w.logprobs for w in want]


def test_none_and_all_accepted_in_the_same_step() -> None:
    """Batch of three: 0, 4 and some accepted in one forward; each sequence's output is its output alone."""
    decoder, rule = tiny_decoder(), Greedy()
    want = plainly(decoder, rule, 20)
    known = answers(want)

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        kind = state.prompt % 3  # prompts of 3, 9 and 40 tokens
        right = oracle(known, (4,))(state, room, noise)
        if state.prompt == 9:
            return chain([(t + 1) % 61 for t in right.tokens])
        return right if kind == 0 else chain([*right.tokens[:1], *((t + 1) % 61 for t in right.tokens[1:])])

    got = drafted(decoder, rule, 20, plan)
    same(got, want)
    first = [g.steps[0] for g in got]
    assert [step.accepted for step in first] == [4, 0, 1]
    assert [step.step for step in first] == [0, 0, 0]
    assert [step.batch for step in first] == [3, 3, 3]


@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_under_any_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#39421, vllm#6038: with one-hot drafts the same request draws the same under 0 … 12 rows a step."""
    unchecked(monkeypatch)
    decoder, rule = tiny_decoder(), RULES[name]
    want = plainly(decoder, rule, 20)
    for budget in (0, 1, 3, 12, None):
        for plan in (oracle(answers(want), (6,)), thicket(answers(want), seed=4)):
            got = drafted(decoder, rule, 20, plan, budget=budget)
            same(got, want)
            assert max(step.verified for g in got for step in g.steps) <= 1 + (12 if budget is None else budget)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_a_sequence_beside_any_others(name: str, dtype: torch.dtype) -> None:
    """vllm#6038, vllm#13608: the same seed with other batch mates, whose drafts are right, wrong or absent."""
    decoder, rule = tiny_decoder(dtype=dtype), RULES[name]
    want = [reference.generate(decoder, [ask(p, rule)], rule.law(), seed=1, logprobs=True)[0] for p in PROMPTS]
    plan = thicket(answers(want), seed=5)
    for order in ([0], [1, 2], [2, 1, 0], [1, 1]):
        requests = [ask(PROMPTS[i], rule, 20) for i in order]
        got = loop.generate(decoder, requests, Rigged(plan), rule, seed=1, logprobs=True)
        same(got, [want[i] for i in order])


def test_sequences_that_end_at_different_times() -> None:
    """The others go on when one is done: lengths 1, 7 and 20, in the loop and in the plain decoder."""
    decoder, rule = tiny_decoder(), Greedy()
    whole = answers(plainly(decoder, rule, 20))
    requests = [ask(p, rule, n) for p, n in zip(PROMPTS, (1, 7, 20), strict=True)]
    want = reference.generate(decoder, requests, rule.law(), logprobs=True)
    drafter = Rigged(oracle(whole, (4, 0)))
    same(loop.generate(decoder, requests, drafter, rule, logprobs=True), want)
    assert [len(w.tokens) for w in want] == [1, 7, 20]


def test_drafts_that_alternate() -> None:
    """vllm#39273, #52942: 3, 0, 3, 0 drafted; a step without a draft leaves everything as it should be."""
    decoder, rule = tiny_decoder(), Greedy()
    want = plainly(decoder, rule, 20)
    got = drafted(decoder, rule, 20, oracle(answers(want), (3, 0)))
    same(got, want)
    assert [s.drafted for s in got[0].steps][:4] == [3, 0, 3, 0]
    assert [s.emitted for s in got[0].steps][:4] == [4, 1, 4, 1]


def test_the_same_prompt_twice() -> None:
    """sglang#8726, TensorRT-LLM#2263: nothing is left over from one generation to the next."""
    decoder, rule = tiny_decoder(), Sampling(temperature=1.5)
    drafter = Rigged(thicket(answers(plainly(decoder, rule, 20)), seed=6))
    requests = [ask(p, rule, 20) for p in PROMPTS]
    first, second = (loop.generate(decoder, requests, drafter, rule, seed=1) for _ in range(2))
    assert [g.tokens for g in first] == [g.tokens for g in second]
    assert [[s.drafted for s in g.steps] for g in first] == [[s.drafted for s in g.steps] for g in second]


def test_a_token_0_is_a_token_like_any_other() -> None:
    """Medusa and REST pad short paths with id 0 and accept the padding where the target says 0; here it always does."""
    decoder, rule = tiny_decoder(), Greedy(bad_words=tuple((t,) for t in range(1, 61)))
    want = plainly(decoder, rule, 12)
    assert want[0].tokens == [0] * 12
    got = drafted(decoder, rule, 12, thicket(answers(want), seed=7))
    same(got, want)


@pytest.mark.parametrize("replace", [False, True])
def test_drawn_candidates_in_the_loop(replace: bool) -> None:
    """transformers#48281: sampling with a q. A draft equal to the target is accepted in whole; seeds; any batch."""
    decoder, rule = tiny_decoder(scale=4.0), Sampling(temperature=0.9, top_k=8)
    processors = ask(PROMPTS[0], rule).processors

    def target_law(tokens: tuple[int, ...]) -> torch.Tensor:
        cache = decoder.open_cache(1, len(tokens))
        logits = decoder(chains([list(tokens)], [cache.open()]), cache).logits[-1]
        return torch.softmax(processors.scores(logits, ()), -1).float()

    gives = Gives("tree", rows=9, depth=2, q="sampled")
    requests = [ask(p, rule, 7) for p in PROMPTS]
    drafter = Rigged(drawn(target_law, (1, 1), replace=replace), gives=gives)
    got = loop.generate(decoder, requests, drafter, rule, seed=1)
    assert all(step.accepted == 2 for g in got for step in g.steps)
    other = loop.generate(decoder, requests, drafter, rule, seed=2)
    assert [g.tokens for g in got] != [g.tokens for g in other]

    def flat(tokens: tuple[int, ...]) -> torch.Tensor:
        return torch.full((61,), 1 / 61)

    drafter = Rigged(drawn(flat, (2, 1), replace=replace, fixed=(5,)), gives=gives)
    batch = loop.generate(decoder, requests, drafter, rule, seed=1)
    alone = [loop.generate(decoder, [r], drafter, rule, seed=1)[0] for r in requests]
    assert [g.tokens for g in batch] == [g.tokens for g in alone]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_longer_than_a_long_chain_decides_as_single_rows_do(dtype: torch.dtype) -> None:
    """Verification never takes the prompt's path: log-probabilities are equal to the bit, of 90 rows at once."""
    if not row_invariant():
        pytest.skip("this processor's products do not keep a row's bits")
    decoder, rule = tiny_decoder(dtype=dtype), Greedy()
    want = plainly(decoder, rule, 100)
    drafter = Rigged(oracle(answers(want), lengths=(90,)), gives=Gives("chain", rows=90, depth=90))
    got = loop.generate(decoder, [ask(p, rule, 100) for p in PROMPTS], drafter, rule, seed=1, logprobs=True)
    same(got, want)
    assert max(s.accepted for g in got for s in g.steps) > LONG_CHAIN
    assert [g.logprobs for g in got] == [w.logprobs for w in want]
