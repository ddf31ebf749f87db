"""When a text ends: the rule by itself, against transformers' generate, and inside accepted runs."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.request import request
from decodelab.decoding.stopping import StopRule
from decodelab.errors import UserError
from decodelab.testing import tiny_decoder
from decodelab.tests.rigged import PROMPTS, Rigged, ask, oracle
from decodelab.tests.twins import llama_twins

STOP = 2


def spelled(tokens: list[int]) -> str:
    """Token 0 is "a", 1 is "b", … ; 26 is "<stop>" in whole."""
    return "".join("<stop>" if t == 26 else chr(97 + t) for t in tokens)


@pytest.mark.parametrize(
    ("rule", "emitted", "run", "want"),
    [
        # sglang#31599: a length cap must not hide an earlier stop: finish at 3 because of the stop
        (StopRule(5, eos_ids=(STOP,)), [], [10, 11, STOP, 20, 21, 22], (3, "eos")),
        (StopRule(3, eos_ids=(STOP,)), [], [10, 11, STOP, 20], (3, "eos")),
        (StopRule(3, eos_ids=(STOP,)), [], [10, 11, 12, STOP], (3, "length")),
        # the first of several ids in the run, not the first id of the list
        (StopRule(9, eos_ids=(7, STOP)), [], [10, STOP, 7], (2, "eos")),
        # transformers#46993: 2 means 2
        (StopRule(2), [], [1, 2, 3], (2, "length")),
        (StopRule(2), [1], [1, 2, 3], (1, "length")),
        (StopRule(9), [], [1, 2, 3], (3, None)),
        (StopRule(9, context_room=2), [], [1, 2, 3], (2, "context")),
        (StopRule(2, context_room=2), [], [1, 2, 3], (2, "length")),
        (StopRule(2, context_room=9), [], [1, 2, 3], (2, "length")),
        # sglang#23802: a stop string early in a long run
        (StopRule(99, stop=("cd",), text=spelled), [], list(range(16)), (4, "stop")),
        # across the border of what was emitted, inside one token, the first that is complete
        (StopRule(99, stop=("cd",), text=spelled), [0, 2], [3, 4], (1, "stop")),
        (StopRule(99, stop=("to",), text=spelled), [], [1, 26, 2], (2, "stop")),
        (StopRule(99, stop=("bcde", "cd"), text=spelled), [0], [1, 2, 3, 4], (3, "stop")),
        (StopRule(99, stop=("xyz",), text=spelled), [0], [1, 2, 3, 4], (4, None)),
    ],
)
def test_where_a_run_is_cut(rule: StopRule, emitted: list[int], run: list[int], want: tuple[int, str | None]) -> None:
    assert rule.cut(emitted, run) == want


def test_what_a_rule_refuses() -> None:
    with pytest.raises(UserError, match="max_new_tokens must be at least 1, got 0"):
        StopRule(0)
    with pytest.raises(UserError, match="a stop string is empty; it would end every text at once; leave it out"):
        StopRule(5, stop=("a", ""), text=spelled)
    with pytest.raises(UserError, match="stop strings need a tokenizer to read the text with"):
        StopRule(5, stop=("a",))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE, trained on a few lines: words and pieces, spaces inside tokens, letters of several bytes."""
    lines = [
        "def add(left, right):\n    return left + right\n",
        "naïve café, façade; Ωmega → 水 and 火",
        "the end. The end?",
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        lines * 3, trainers.BpeTrainer(vocab_size=330, special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


def read(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_stop_strings_and_eos_end_where_generate_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Strings cut out of the plain text at every place: inside tokens, across several, of many bytes; EOS ids too."""
    model, decoder = llama_twins(len(tokenizer), scale=3.0)
    prompt = tokenizer("the end", add_special_tokens=False)["input_ids"]

    def ours(stop: tuple[str, ...], eos: tuple[int, ...]) -> tuple[list[int], str | None]:
        asked = request(
            prompt,
            law=Greedy().law(),
            max_new_tokens=40,
            vocab=decoder.config.vocab,
            context=512,
            eos_ids=eos,
            stop=stop,
            tokenizer=tokenizer,
        )
        plain = reference.generate(decoder, [asked], Greedy().law())[0]
        drafter = Rigged(oracle({tuple(prompt): text_tokens}, (6, 0, 3)))
        drafted = loop.generate(decoder, [asked], drafter, Greedy())[0]
        assert (drafted.tokens, drafted.reason) == (plain.tokens, plain.reason)
        return plain.tokens, plain.reason

    text_tokens: list[int] = []
    text_tokens = ours((), ())[0]
    whole = read(tokenizer, text_tokens)
    assert len(text_tokens) == 40
    pieces = {whole[at : at + size] for at in range(0, len(whole) - 6, 3) for size in (1, 2, 5)}
    stops = sorted(p for p in pieces if "�" not in p)[::3]
    assert len(stops) > 12
    for i, piece in enumerate(stops):
        eos = (text_tokens[25], text_tokens[30]) if i % 2 else ()
        stop = (piece, stops[(i + 5) % len(stops)]) if i % 3 else (piece,)
        want = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            stop_strings=list(stop),
            tokenizer=tokenizer,
            eos_token_id=list(eos) or -1,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert ours(stop, eos)[0] == want, stop


Ask = Callable[[list[int]], dict[str, object]]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=1.5)])
@pytest.mark.parametrize("lengths", [(1,), (4,), (6, 0, 2)])
def test_an_end_inside_an_accepted_run(rule: Greedy | Sampling, lengths: tuple[int, ...]) -> None:
    """transformers#47912, #31301: EOS mid-run ends the text there; tokens, log p, counts and events agree."""
    decoder = tiny_decoder()
    prompt = PROMPTS[1]
    whole = reference.generate(decoder, [ask(prompt, rule, 24)], rule.law(), seed=1)[0].tokens
    for at in range(2, 20, 3):
        eos = (60 if 60 not in whole else 59, whole[at], whole[at + 3])
        asked = ask(prompt, rule, 24, eos_ids=eos)
        plain = reference.generate(decoder, [asked], rule.law(), seed=1, logprobs=True)[0]
        drafter = Rigged(oracle({tuple(prompt): whole}, lengths))
        got = loop.generate(decoder, [asked], drafter, rule, seed=1, logprobs=True)[0]
        first = next(i for i, t in enumerate(whole) if t in eos)
        assert got.tokens == plain.tokens == whole[: first + 1]
        assert got.reason == plain.reason == "eos"
        assert got.logprobs == pytest.approx(plain.logprobs, abs=1e-6)
        assert len(got.logprobs or []) == len(got.tokens) == 1 + sum(s.emitted for s in got.steps)
        assert sum(n for _, n in got.delivered) == len(got.tokens)
        for step in got.steps:  # accepted are tokens of the output: the last step may emit no token of the target's own
            assert step.emitted - 1 <= step.accepted <= step.emitted


def test_an_eos_in_the_prompt_ends_nothing() -> None:
    """transformers#31301, #27775: a copied span holds an EOS; the text goes on until one is emitted."""
    decoder = tiny_decoder()
    plain = reference.generate(decoder, [ask(PROMPTS[1], Greedy(), 20)], Greedy().law())[0].tokens
    eos = next(t for t in PROMPTS[1] if t not in plain)
    got = reference.generate(decoder, [ask(PROMPTS[1], Greedy(), 20, eos_ids=(eos,))], Greedy().law())[0]
    assert (got.tokens, got.reason) == (plain, "length")


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_max_new_tokens_is_never_overshot(n: int) -> None:
    """transformers#46993, #47195: drafts of 3 with 2 tokens to go. Eos None (transformers#46790)."""
    decoder = tiny_decoder()
    whole = reference.generate(decoder, [ask(PROMPTS[0], Greedy(), 12)], Greedy().law())[0].tokens
    for lengths in ((3,), (6,), (1, 0)):
        drafter = Rigged(oracle({tuple(PROMPTS[0]): whole}, lengths))
        got = loop.generate(decoder, [ask(PROMPTS[0], Greedy(), n)], drafter, Greedy())[0]
        assert (got.tokens, got.reason) == (whole[:n], "length")
        assert all(step.verified <= n for step in got.steps)  # room: no row is verified that could not be emitted


def test_the_context_ends_a_text() -> None:
    decoder = tiny_decoder()
    whole = reference.generate(decoder, [ask(PROMPTS[1], Greedy(), 12)], Greedy().law())[0].tokens
    for context in (10, 12, 17):
        asked = ask(PROMPTS[1], Greedy(), 50, context=context)
        drafter = Rigged(oracle({tuple(PROMPTS[1]): whole}, (6,)))
        for got in (
            reference.generate(decoder, [asked], Greedy().law())[0],
            loop.generate(decoder, [asked], drafter, Greedy())[0],
        ):
            assert (got.tokens, got.reason) == (whole[: context - 9], "context")


def test_min_new_tokens_counts_tokens_not_steps() -> None:
    """An EOS may come from the 7th token on, however many steps it took to get there."""
    decoder = tiny_decoder()
    whole = reference.generate(decoder, [ask(PROMPTS[0], Greedy(), 20)], Greedy().law())[0].tokens
    rule = Greedy(min_new_tokens=6)
    asked = ask(PROMPTS[0], rule, 20, eos_ids=tuple(range(40)))  # most of the vocabulary
    plain = reference.generate(decoder, [asked], rule.law())[0]
    assert len(plain.tokens) >= 7
    assert all(t >= 40 for t in plain.tokens[:6])
    assert plain.tokens[:6] != whole[:6]
    for lengths in ((4,), (6, 0)):
        drafter = Rigged(oracle({tuple(PROMPTS[0]): plain.tokens}, lengths))
        assert loop.generate(decoder, [asked], drafter, rule)[0].tokens == plain.tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, r"the prompt is empty \(0 tokens\); give at least one token"),
        (
            {"prompt": [3] * 512},
            "the prompt has 512 tokens, but the context holds 512 and one must be free; shorten it",
        ),
        ({"prompt": [3, 61]}, "the prompt holds token id 61, but the model's vocabulary is 0 to 60"),
        ({"prompt": [3, -1]}, "the prompt holds token id -1"),
        ({"eos_ids": (2, 61)}, "EOS id 61 is outside the vocabulary of 61; correct eos_ids"),
    ],
)
def test_requests_that_cannot_run(change: dict[str, object], message: str) -> None:
    asked = {"prompt": [3, 4]} | change
    with pytest.raises(UserError, match=message):
        ask(rule=Greedy(), **asked)  # type: ignore[arg-type]
