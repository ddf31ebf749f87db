"""The model that lm-eval asks: its answers are lm-eval's own model's, and what only it can do."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from decodelab.attention.rows import chains
from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling
from decodelab.decoding.events import finish
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.errors import UserError
from decodelab.experiments.lab import Lab
from decodelab.experiments.quality import lm as module
from decodelab.experiments.quality.lm import DecodelabLM, before, without_thoughts
from decodelab.experiments.quality.settings import QualitySettings, TaskSpec
from decodelab.experiments.quality.tasks import build_tasks
from decodelab.tests.decoding.model.checkpoints import END, START, tiny_byte_tokenizer, tiny_model
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.tiny_lab import tiny_lab

TEXTS = ("12 ab 12 ab 12 ab 12", "one two three one two", "x", "abc abc abc abc abc abc abc abc abc abc abc")


def asks(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", i, 1)) for i, args in enumerate(arguments)]


def twins(context: int = 128, rule: Acceptance | None = None, dtype: torch.dtype = torch.float64) -> tuple[HFLM, Lab]:
    """lm-eval's model around transformers', and a lab with the same weights."""
    model, tokenizer = tiny_model(max_position_embeddings=context).to(dtype), tiny_byte_tokenizer()
    decoder = Decoder(ModelConfig.from_hf(model.config), model.state_dict(), dtype=dtype)
    eos = tokenizer.convert_tokens_to_ids(END)
    source = Source("tiny", model.config, tokenizer, (eos,), "weights", 0, lambda progress: {})
    lab = Lab(source, decoder, PromptLookup(), Greedy() if rule is None else rule)
    model.generation_config.eos_token_id = eos
    tokenizer.pad_token = END
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype=dtype), lab


def test_likelihoods_are_those_of_lm_evals_own_model():
    """Contexts shared, empty, with a blank at the end, with a special token; choices of one token and of many."""
    theirs, lab = twins()
    pairs = [
        *(("which one?", choice) for choice in (" ab", " a", " 12 12 12", " one two three", " ab")),
        ("", "from nothing"),
        (START, "behind BOS"),
        ("a blank ", "moves"),
        ("again: which one?", " ab"),
    ]
    want = theirs.loglikelihood(asks("loglikelihood", *pairs), disable_tqdm=True)
    found = DecodelabLM(lab).loglikelihood(asks("loglikelihood", *pairs))
    for (ll, greedy), (expected, argmax) in zip(found, want, strict=True):
        assert ll == pytest.approx(expected, abs=1e-5)
        assert greedy == argmax


def test_what_argmax_would_say_is_greedy():
    theirs, lab = twins()
    said = lab.text(finish(lab.plain([lab.request(lab.tokenizer("ab 12")["input_ids"], 4)]))[0].tokens)
    pairs = asks("loglikelihood", ("ab 12", said), ("ab 12", "not this"))
    assert [greedy for _, greedy in theirs.loglikelihood(pairs, disable_tqdm=True)] == [True, False]
    assert [greedy for _, greedy in DecodelabLM(lab).loglikelihood(pairs)] == [True, False]


@pytest.mark.parametrize("chunk", [2, 5, 512])
def test_however_context_and_choices_are_read(chunk: int, monkeypatch: pytest.MonkeyPatch):
    """In chunks, as one forest, as several, or a long choice by itself: the sum over a plain forward."""
    monkeypatch.setattr(module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(module, "FOREST", chunk)
    monkeypatch.setattr(module, "LOGITS", 2)
    lab = tiny_lab()
    context, choices = [5, 6, 7, 8, 9, 10], [[11], [12, 13], [12, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26], []]
    found = DecodelabLM(lab).loglikelihoods(context, choices)
    for (ll, _), choice in zip(found, choices, strict=True):
        cache = lab.target.open_cache(1, 32)
        logits = lab.target(chains([[*context, *choice]], [cache.open()]), cache).logits.double()
        rows = F.log_softmax(logits, -1)[len(context) - 1 : -1]
        assert ll == pytest.approx(float(rows[range(len(choice)), choice].sum()), abs=1e-4)
    assert found[-1] == (0.0, True)  # nothing is certain to follow


def test_choices_do_not_tie_in_bfloat16():
    """Logits that were rounded to bfloat16 tie exactly; those of a float32 unembedding do not."""
    _, lab = twins(dtype=torch.bfloat16)
    context = lab.tokenizer("which one is it now?")["input_ids"]
    choices = [[token] for token in range(10, 200)]
    found = [ll for ll, _ in DecodelabLM(lab).loglikelihoods(context, choices)]
    cache = lab.target.open_cache(1, 32)
    rounded = lab.target(chains([context], [cache.open()]), cache).logits[-1].float().log_softmax(-1)
    assert len({float(rounded[token]) for (token,) in choices}) < len(choices)
    assert len(set(found)) == len(choices)


def test_rolling_windows_are_lm_evals():
    """Four windows of a context of 16; a text that fits; one that is empty."""
    theirs, lab = twins(context=16)
    texts = asks("loglikelihood_rolling", *((text,) for text in TEXTS), ("",))
    want = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert DecodelabLM(lab).loglikelihood_rolling(texts) == pytest.approx(want, abs=1e-5)


def test_long_contexts_lose_their_beginning_as_in_lm_eval():
    theirs, lab = twins(context=16)
    pairs = asks("loglikelihood", (TEXTS[0] * 3, " ab 12"), (TEXTS[1] * 3, " a"), ("short", " ab 12"))
    want = theirs.loglikelihood(pairs, disable_tqdm=True)
    with pytest.warns(RuntimeWarning, match="task: 2 of 3 prompts were longer than the context"):
        found = DecodelabLM(lab).loglikelihood(pairs)
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in want], abs=1e-5)
    with pytest.raises(UserError, match="continuation has 30 tokens, the context holds 16"):
        DecodelabLM(lab).loglikelihood(asks("loglikelihood", ("x", "y" * 30)))
    with pytest.raises(UserError, match=r"continuation has 5 tokens, quality\.max_length=4 holds fewer; raise it"):
        DecodelabLM(lab, max_length=4).loglikelihood(asks("loglikelihood", ("x", "y" * 5)))


def test_a_continuation_that_melts_into_the_context_is_scored_apart():
    """`…a` + `b` is one token `ab`, which left nothing to score (lm-eval#1297, lm-eval#3336)."""
    _, lab = twins()
    ids = partial(lab.tokenizer.convert_tokens_to_ids)
    lm = DecodelabLM(lab)
    assert lab.tokenizer("xab")["input_ids"] == ids(["x", "ab"])
    (melted,) = lm.loglikelihood(asks("loglikelihood", ("xa", "b")))
    assert melted == lm.loglikelihoods(ids(["x", "a"]), [ids(["b"])])[0]
    assert melted[0] < 0
    empty = lm.loglikelihood(asks("loglikelihood", ("xa", ""), ("", "")))
    assert empty == [(0.0, True)] * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_generations_are_those_of_lm_evals_own_model(batch: int, monkeypatch: pytest.MonkeyPatch):
    """Through a drafter; cut at stop strings, EOS and length; a long prompt cut so that the answer fits."""
    unchecked(monkeypatch)
    theirs, lab = twins(context=64)
    prompts = (*TEXTS, TEXTS[0] * 6)

    def questions(until: list[str], tokens: int) -> list[Instance]:
        options = {"until": until, "max_gen_toks": tokens, "do_sample": False}
        return asks("generate_until", *((text, dict(options)) for text in prompts))

    whole = theirs.generate_until(questions([], 20), disable_tqdm=True)
    lab = replace(lab, source=replace(lab.source, eos_ids=(lab.tokenizer(whole[1][7])["input_ids"][0],)))
    theirs.model.generation_config.eos_token_id = list(lab.eos_ids)
    lm, ended = DecodelabLM(lab, batch=batch), set()
    for until, tokens in (([], 20), ([whole[0][3:5], whole[2][5]], 20), ([whole[0][6]], 5)):
        asked = questions(until, tokens)
        want = theirs.generate_until(asked, disable_tqdm=True)
        lm.begin()
        with pytest.warns(RuntimeWarning, match="1 of 5 prompts were longer than the context"):
            assert lm.generate_until(asked) == want
        told = [answer for answers in lm.asked.values() for answer in answers if answer is not None]
        assert [a.truncated for a in told] == [a.tokens == tokens for a in told]
        ended |= {a.truncated for a in told}
    assert ended == {True, False}


def test_repeats_draw_anew_and_each_again_the_same(monkeypatch: pytest.MonkeyPatch):
    """In any batch; equal prompts of one pass are drawn apart, too."""
    unchecked(monkeypatch)
    lab = tiny_lab(rule=Sampling(temperature=2.0))
    asked = asks("generate_until", *((text, {"until": [], "max_gen_toks": 12}) for text in ("ab", "cd", "ab")))

    def drawn(repeat: int, batch: int = 1) -> list[str]:
        lm = DecodelabLM(lab, seed=3, batch=batch)
        lm.begin("t", repeat, 2)
        return lm.generate_until(asked)

    assert drawn(0) == drawn(0, batch=3)
    assert len({*drawn(0), *drawn(1)}) == 6


def test_equal_requests_are_asked_once_and_a_replay_asks_nothing():
    lm = DecodelabLM(tiny_lab())
    seen: list[int] = []
    lm.progress = lambda what, done, total: seen.append(total)
    first, second = (asks("generate_until", (text, {"max_gen_toks": 4})) for text in ("ab", "cd"))
    lm.generate_until(first * 2)
    assert seen == [1]
    lm.begin(replay=True)
    assert lm.generate_until([*first, *second])[1] == ""
    assert seen == [1]
    assert [a is None for a in (*lm.asked[0],)] == [False, True]


def test_progress_counts_items_not_their_choices():
    lm = DecodelabLM(tiny_lab())
    seen: list[tuple[int, int]] = []
    lm.progress = lambda what, done, total: seen.append((done, total))
    pairs = [("ab", " c"), ("ab", " d"), ("cd", " c"), ("cd", " d"), ("cd", " d")]
    requests = [Instance("loglikelihood", {}, pair, i, ("task", i // 2, 1)) for i, pair in enumerate(pairs)]
    lm.loglikelihood(requests[:1])
    lm.loglikelihood(requests)  # the last item has but a choice of the second's, and is done with it
    assert seen == [(1, 1), (1, 3), (3, 3)]


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        (Greedy(), {"do_sample": True, "temperature": 0.8}, "do_sample=True, temperature=0.8: acceptance=greedy"),
        (Greedy(), {"temperature": 0.8}, "do_sample=True, temperature=0.8: acceptance=greedy"),
        (Sampling(), {"do_sample": False, "top_p": 0.5}, "do_sample=False: acceptance=sampling"),
        (Sampling(temperature=0.5), {"do_sample": True, "temperature": 0.7}, "temperature=0.7: acceptance=sampling"),
        (Greedy(), {"do_sample": False, "temperature": 0.0, "top_p": 0.9}, None),
        (Sampling(temperature=0.7), {"do_sample": True, "temperature": 0.7}, None),
        (Sampling(), {}, None),
    ],
)
def test_a_task_that_wants_another_law_is_told(rule: Acceptance, options: dict[str, Any], said: str | None):
    lm = DecodelabLM(tiny_lab(rule=rule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.generate_until(asks("generate_until", ("ab", options | {"max_gen_toks": 2, "until": []})))
    told = [str(w.message) for w in caught]
    assert told == ([] if said is None else [f"task asks for {said} decides, as configured"])


@pytest.mark.parametrize(
    ("prompt", "text", "kept"),
    [
        ("Q:", "<t>12 or 13?</t> 12", "12"),
        ("Q:", "so <t>12?</t>it is <t>sure?</t>12", "so it is 12"),
        ("Q:<t>\n", "12 or 13?</t> 12", "12"),  # the template has opened it
        ("Q:<t>\n", "12 or 13, or perhaps", ""),
        ("Q:", "12 or 13?</t> 12", "12"),
        ("Q:", "12 <t>or perhaps", "12 "),
        ("Q:", "12", "12"),
    ],
)
def test_thoughts_are_not_scored(prompt: str, text: str, kept: str):
    assert without_thoughts(prompt, text, ("<t>", "</t>")) == kept


def test_a_stop_string_within_thoughts_ends_nothing():
    """Thoughts hold blank lines, where lm-eval's tasks stop by default; behind them a stop string counts."""
    lab = tiny_lab()
    (plain,) = DecodelabLM(lab).generate_until(asks("generate_until", ("ab", {"until": [], "max_gen_toks": 12})))
    opening, closing, stop = plain[1], plain[4], plain[8]
    assert len({opening, closing, stop, *plain[5:8]}) >= 4, "another prompt: these must differ"
    lm = DecodelabLM(lab, thinking=(opening, closing))
    asked = asks("generate_until", ("ab", {"until": [plain[2], stop], "max_gen_toks": 12}))
    (found,) = lm.generate_until(asked)
    assert found == before(without_thoughts("ab", plain, (opening, closing)), [plain[2], stop])
    (answer,) = lm.asked[0]
    assert answer is not None
    assert answer.text == plain
    assert answer.tokens == 12


def test_tags_that_are_special_tokens_are_seen():
    _, lab = twins()
    lm = DecodelabLM(lab, thinking=(START, END))
    ids = lab.tokenizer(f"{START}12{END}ab{START}")["input_ids"]
    assert lm._spoken("Q:", ids) == "ab"
    assert DecodelabLM(lab)._spoken("Q:", ids) == "12ab"


def test_no_second_bos_and_the_chat_template_of_the_tokenizer_or_of_the_user():
    """lm-eval joins a template's text and tokenises it: a BOS in it is not doubled."""
    _, lab = twins()
    tokenizer = lab.tokenizer
    tokenizer.add_bos_token = True
    talk = [{"role": "user", "content": "hi"}]
    lm = DecodelabLM(lab)
    assert lm.apply_chat_template(talk) == f"{START}hi{END}"
    assert lm.tok_encode(lm.apply_chat_template(talk))[:2] == tokenizer.convert_tokens_to_ids([START, "h"])
    assert DecodelabLM(lab, template="{{ messages[0].content }}!").apply_chat_template(talk) == "hi!"
    refusing = DecodelabLM(lab, template="{{ raise_exception('no user') }}")
    with pytest.raises(UserError, match=r"the chat template refuses a conversation \(no user\); quality.template=FILE"):
        refusing.apply_chat_template(talk)


def test_an_answer_as_long_as_the_context_is_refused():
    _, lab = twins(context=16)
    with pytest.raises(UserError, match="an answer of 16 tokens does not fit the context of 16"):
        DecodelabLM(lab).generate_until(asks("generate_until", ("ab", {"max_gen_toks": 16})))


def test_scores_of_a_real_model_are_those_of_lm_evals_own(shared: Path, real_cache: Path):
    """SmolLM2 in float32, 8 items of a choice and of a generation task: each likelihood, each text, each score."""
    settings = QualitySettings(
        tasks=(
            TaskSpec(str(shared / "data" / "mc" / "openbookqa.jsonl")),
            TaskSpec(str(shared / "data" / "qa" / "svamp.jsonl"), max_new_tokens=16),
        ),
        limit=8,
    )
    source = open_source(ModelSpec("smollm2-135m"))
    lab = Lab(source, load_decoder(source, dtype=torch.float32), PromptLookup(), Greedy())
    (folder,) = (real_cache / "gguf").glob(f"{source.digest}-*")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = HFLM(pretrained=peer, tokenizer=source.tokenizer, batch_size=1, softmax_dtype=torch.float32)
    tasks = build_tasks(settings, source.tokenizer, ())
    found, want = (evaluate(lm, {"tasks": tasks}, limit=8, bootstrap_iters=0) for lm in (DecodelabLM(lab), theirs))
    assert found["results"] == want["results"]
    for name in tasks:
        for ours, expected in zip(found["samples"][name], want["samples"][name], strict=True):
            if name == "openbookqa":
                for ((ll, greedy),), ((expected_ll, argmax),) in zip(ours["resps"], expected["resps"], strict=True):
                    assert ll == pytest.approx(expected_ll, abs=1e-3)
                    assert greedy == argmax
            else:
                assert ours["resps"] == expected["resps"]
    assert any(want["results"]["openbookqa"][f"{metric},none"] for metric in ("acc", "acc_norm"))
