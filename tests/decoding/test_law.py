"""The law against transformers' generate: processors, their order, what they count; and the laws at drafted rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling, Verdict
from decodelab.decoding.draft import Draft
from decodelab.decoding.law import Law, LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.testing import tiny_decoder
from decodelab.tests.rigged import PROMPTS, Rigged, ask, oracle, thicket
from decodelab.tests.tiny import tiny_tokenizer
from decodelab.tests.twins import llama_twins

GREEDY: dict[str, tuple[Greedy, dict[str, Any]]] = {
    "plain": (Greedy(), {}),
    "repetition": (Greedy(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
    "no_repeat_ngram": (Greedy(no_repeat_ngram=2), {"no_repeat_ngram_size": 2}),
    "bad_words": (Greedy(bad_words=((32, 60), (28,), (36, 22))), {"bad_words_ids": [[32, 60], [28], [36, 22]]}),
    "min_new_tokens": (Greedy(min_new_tokens=12), {"min_new_tokens": 12}),
    "all": (
        Greedy(repetition_penalty=1.2, no_repeat_ngram=3, bad_words=((32, 60), (28,)), min_new_tokens=12),
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[32, 60], [28]], "min_new_tokens": 12},
    ),
}
MODELS = llama_twins(scale=2.0)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """30 tokens, two EOS ids that come in the way of the least length; every processor changes the text somewhere."""
    model, decoder = MODELS
    rule, options = GREEDY[name]
    differs = False
    for prompt in PROMPTS:
        plain = reference.generate(decoder, [ask(prompt, Greedy(), 30)], Greedy().law())[0].tokens
        eos = (plain[5], plain[9]) if rule.min_new_tokens else (59, 3)
        want = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=list(eos),
            pad_token_id=0,
            **options,
        )[0, len(prompt) :].tolist()
        got = reference.generate(decoder, [ask(prompt, rule, 30, eos_ids=eos)], rule.law())[0]
        assert got.tokens == want
        differs |= got.tokens != plain
    assert differs == (name != "plain")


SAMPLED: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "plain": (Sampling(), {}),
    "temperature": (Sampling(temperature=0.7), {"temperature": 0.7}),
    "top_k": (Sampling(top_k=5), {"top_k": 5}),
    "top_p": (Sampling(top_p=0.6), {"top_p": 0.6}),
    "min_p": (Sampling(min_p=0.1), {"min_p": 0.1}),
    "warpers": (
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ),
    "all": (
        Sampling(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.2, no_repeat_ngram=2, min_new_tokens=4),
        {
            "temperature": 0.8,
            "top_k": 30,
            "top_p": 0.95,
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "min_new_tokens": 4,
        },
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_the_processed_law_is_the_one_that_generate_draws_from(name: str) -> None:
    """vllm#9834: temperature, top-k, top-p, min-p and penalties, in transformers' order, after each of 12 tokens."""
    model, _ = MODELS
    rule, options = SAMPLED[name]
    prompt = PROMPTS[1]
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=12,
        do_sample=True,
        eos_token_id=[20, 21],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{"top_k": 0} | options,
    )
    processors = Processors.build(rule.law(), len(prompt), (20, 21))
    assert len(out.scores) >= 4
    for i, (logits, want) in enumerate(zip(out.logits, out.scores, strict=True)):
        got = processors.scores(logits[0].float(), out.sequences[0, : len(prompt) + i].tolist())
        torch.testing.assert_close(torch.softmax(got, -1), torch.softmax(want[0].float(), -1), rtol=1e-6, atol=1e-9)


def test_presence_and_frequency_are_the_published_formula() -> None:
    """logit − presence · [count > 0] − frequency · count, over generated tokens alone (the prompt has a 4)."""
    rule = Greedy(presence_penalty=0.5, frequency_penalty=0.25)
    processors = Processors.build(rule.law(), 2, ())
    got = processors.scores(torch.zeros(6), [4, 5, 1, 1, 1, 3, 5])
    assert got.tolist() == [0, -1.25, 0, -0.75, 0, -0.75]
    both = Processors.build(Greedy(presence_penalty=0.5, repetition_penalty=2.0).law(), 2, ())
    logits = torch.tensor([0.0, 2.0, -2.0, 2.0, 2.0, 2.0])
    assert both.scores(logits, [4, 5, 2, 3]).tolist() == [0, 2.0, -4.5, 0.5, 1.0, 1.0]  # repetition counts the prompt


class Recording:
    """A rule, with the processed logits at every row of the paths that it walked."""

    def __init__(self, rule: Acceptance) -> None:
        self.rule = rule
        self.scores: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        verdict = self.rule.judge(draft, law, noise)
        for row in (0, *(1 + kept for kept in verdict.path)):
            self.scores[(*law._context, *law.path(row))] = law.scores(row)
        return verdict


@pytest.mark.parametrize(
    "rule",
    [
        Greedy(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4, no_repeat_ngram=2),
        Greedy(bad_words=((33,), (9, 21)), min_new_tokens=15, frequency_penalty=0.5),
        Sampling(temperature=1.3, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4),
    ],
)
def test_the_law_at_a_drafted_row_is_the_plain_decoders(rule: Greedy | Sampling) -> None:
    """vllm#33251: a token counted twice from the second draft position on. Every row of a path is compared."""
    decoder = tiny_decoder(scale=8.0)
    requests = [ask(prompt, rule, 24, eos_ids=(20, 40)) for prompt in PROMPTS]
    plain = reference.generate(decoder, requests, rule.law(), seed=3)
    want: dict[tuple[int, ...], Tensor] = {}

    def watch(i: int, position: int, keyed: Tensor, logits: Tensor) -> None:
        context = (*PROMPTS[i], *plain[i].tokens[:position])
        want[context] = requests[i].processors.scores(logits, context)

    reference.generate(decoder, requests, rule.law(), seed=3, watch=watch)
    answers = {tuple(prompt): g.tokens for prompt, g in zip(PROMPTS, plain, strict=True)}
    for plan in (oracle(answers, (4, 0, 2)), thicket(answers, seed=1)):
        recording = Recording(rule)
        got = loop.generate(decoder, requests, Rigged(plan), recording, seed=3)
        assert [g.tokens for g in got] == [g.tokens for g in plain]
        assert recording.scores.keys() >= want.keys()
        for context, scores in want.items():
            torch.testing.assert_close(recording.scores[context], scores, rtol=0, atol=1e-9)


def test_a_row_is_processed_when_asked_for_and_once() -> None:
    calls = []

    def counting(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(ids)
        return scores

    processors = Processors(LawSettings(sample=True), 1, LogitsProcessorList([counting]), LogitsProcessorList())
    law = Law(processors, torch.randn(4, 5), [0], [1, 2, 3], [-1, 0, 0])
    assert law.path(3) == [1, 3]
    law.at(2)
    law.choose(2, Noise(0, 0, 0), 1)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("V", [61, 49_152])
def test_of_equal_logits_the_first_wins_alone_and_among_rows(V: int, dtype: torch.dtype) -> None:
    """vllm#7627: two logits exactly equal. The loop takes all rows' argmax at once, the plain decoder one row's."""
    logits = torch.zeros(9, V).to(dtype)
    for row in range(9):
        logits[row, [V - 1 - row, V // 2 + row, V // 3 + row]] = 5
    assert logits.argmax(-1).tolist() == [V // 3 + row for row in range(9)]
    assert [int(row.argmax()) for row in logits] == [V // 3 + row for row in range(9)]
    processors = Processors.build(LawSettings(), 1, ())
    assert [int(processors.scores(row, ()).argmax()) for row in logits] == [V // 3 + row for row in range(9)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"temperature": 0.0},
            "temperature must be at least 1e-6 and finite; use acceptance=greedy for argmax, got 0.0",
        ),
        ({"top_k": -1}, r"top_k must be at least 0 \(0: off\), got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be above 0 and finite \(1: off\), got 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty must be between -2 and 2, got 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be between -2 and 2, got -3.0"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram must be at least 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0, got -1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**settings)
    if settings.keys() <= set(Greedy.__dataclass_fields__):
        with pytest.raises(UserError, match=message):
            Greedy(**settings)


def ids(text: str) -> Sequence[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_bad_words_as_text() -> None:
    """Forbidden at the start of the text and behind a space, since many tokenizers write those differently."""
    (a,), (b,), (space,) = ids("a"), ids("b"), ids(" ")
    processors = Processors.build(Greedy(bad_words=("ab",)).law(), 1, (), tiny_tokenizer())
    assert torch.isneginf(processors.scores(torch.zeros(61), [a])).nonzero()[:, 0].tolist() == [b]
    assert torch.isneginf(processors.scores(torch.zeros(61), [space, a])).nonzero()[:, 0].tolist() == [b]
    assert not torch.isneginf(processors.scores(torch.zeros(61), [b])).any()
    with pytest.raises(UserError, match="bad_words has the text 'ab', but there is no tokenizer; give token ids"):
        Processors.build(Greedy(bad_words=("ab",)).law(), 1, ())
    for empty in ((), ""):
        with pytest.raises(UserError, match="bad_words has an empty word, which would forbid the space; leave it out"):
            Processors.build(Greedy(bad_words=(empty,)).law(), 1, (), tiny_tokenizer())


def test_min_new_tokens_without_an_eos_asks_for_nothing() -> None:
    """transformers#46790: eos None must work."""
    processors = Processors.build(Greedy(min_new_tokens=5).law(), 1, ())
    assert torch.equal(processors.scores(torch.ones(5), [0]), torch.ones(5))


def test_a_law_that_forbids_every_token_is_refused() -> None:
    """It has no argmax and no draw; token 0 would look like one."""
    decoder = tiny_decoder()
    everything = tuple((token,) for token in range(61))
    for rule in (Greedy(bad_words=everything), Sampling(bad_words=everything)):
        with pytest.raises(UserError, match="acceptance forbids every token of the vocabulary here"):
            reference.generate(decoder, [ask([5, 6], rule, 3)], rule.law())
        with pytest.raises(UserError, match="acceptance forbids every token of the vocabulary here"):
            loop.generate(decoder, [ask([5, 6], rule, 3)], Nothing(), rule)
