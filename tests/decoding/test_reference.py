"""The plain decoder, oracle of exactness, against decoding without a cache and against transformers."""

import pytest
import torch
from torch import Tensor

from decodelab.attention.rows import chains
from decodelab.decoding import reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.model.decoder import Decoder
from decodelab.testing import tiny_decoder
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.twins import llama_twins


def from_scratch(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits after `tokens`, with nothing kept from before."""
    cache = decoder.open_cache(1, len(tokens))
    return decoder(chains([tokens], [cache.open()]), cache).logits[-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [1, 3])
def test_cached_logits_are_those_computed_from_scratch(dtype: torch.dtype, batch: int) -> None:
    """The cache-free oracle, at every one of 20 steps."""
    decoder = tiny_decoder(dtype=dtype)
    rule = Greedy()
    requests = [ask(prompt, rule) for prompt in PROMPTS[:batch]]
    seen: list[tuple[int, int, Tensor]] = []
    out = reference.generate(
        decoder, requests, rule.law(), watch=lambda i, position, _, logits: seen.append((i, position, logits))
    )
    assert len(seen) == 20 * batch
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    for i, position, logits in seen:
        want = from_scratch(decoder, [*PROMPTS[i], *out[i].tokens[:position]])
        torch.testing.assert_close(logits, want, rtol=0, atol=tolerance)
        assert out[i].tokens[position] == int(want.argmax())


def test_greedy_text_is_transformers_own() -> None:
    model, decoder = llama_twins()
    for prompt in PROMPTS:
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        got = reference.generate(decoder, [ask(prompt, Greedy(), 60)], Greedy().law())[0]
        assert got.tokens == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=1.5)])
def test_a_request_decodes_alike_in_any_batch(rule: Greedy | Sampling) -> None:
    """vllm#6038, mlx-vlm#1946: other mates, another place among them, the same tokens and log p."""
    decoder = tiny_decoder()
    requests = [ask(prompt, rule, 15 + i) for i, prompt in enumerate(PROMPTS)]
    alone = [reference.generate(decoder, [r], rule.law(), seed=5, logprobs=True)[0] for r in requests]
    for order in ([0, 1, 2], [2, 0], [1, 1, 1]):
        got = reference.generate(decoder, [requests[i] for i in order], rule.law(), seed=5, logprobs=True)
        assert [g.tokens for g in got] == [alone[i].tokens for i in order]
        for g, i in zip(got, order, strict=True):
            assert g.logprobs == pytest.approx(alone[i].logprobs, abs=1e-6)


def test_seeds_and_samples() -> None:
    """vllm#6038: a seed reproduces; another seed or another sample of the same prompt draws anew."""
    decoder, rule = tiny_decoder(), Sampling(temperature=2.0)

    def text(seed: int, sample: int = 0) -> list[int]:
        return reference.generate(decoder, [ask(PROMPTS[1], rule, sample=sample)], rule.law(), seed=seed)[0].tokens

    assert text(1) == text(1)
    assert len({tuple(text(seed, sample)) for seed in (1, 2) for sample in (0, 1)}) == 4
    keys = [ask(prompt, rule).key for prompt in PROMPTS] + [ask(PROMPTS[0], rule, sample=1).key]
    assert ask(PROMPTS[0], rule, 5, eos_ids=(7,)).key == keys[0]  # the same prompt and sample, whatever else is asked
    assert len(set(keys)) == 4


def test_logprobs_are_the_raw_logits_log_softmax() -> None:
    """Whatever the law: penalties and temperature are not in them."""
    decoder, rule = tiny_decoder(), Sampling(temperature=3.0, repetition_penalty=1.5)
    out = reference.generate(decoder, [ask(PROMPTS[0], rule)], rule.law(), logprobs=True)[0]
    for i, token in enumerate(out.tokens):
        logits = from_scratch(decoder, [*PROMPTS[0], *out.tokens[:i]])
        assert out.logprobs is not None
        assert out.logprobs[i] == pytest.approx(float(torch.log_softmax(logits.float(), -1)[token]), abs=1e-5)


def test_it_streams() -> None:
    """The generations grow step by step; their events say what was delivered when."""
    decoder, rule = tiny_decoder(), Greedy()
    lengths = [
        [len(g.tokens) for g in out]
        for out in reference.decode(decoder, [ask(p, rule, 4) for p in PROMPTS], rule.law())
    ]
    assert lengths == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]]


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rule = tiny_decoder(), Greedy()
    whole = reference.generate(decoder, [ask(PROMPTS[2], rule)], rule.law())[0].tokens
    for chunk in (1, 7, 39, 40):
        monkeypatch.setattr(reference, "PREFILL_CHUNK", chunk)
        assert reference.generate(decoder, [ask(PROMPTS[2], rule)], rule.law())[0].tokens == whole
