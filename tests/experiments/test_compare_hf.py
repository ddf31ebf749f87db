"""transformers beside us: the same weights, the same tokens, fair counts; nothing of a call is left behind."""

from logging import Handler
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from decodelab.attention.rows import chains
from decodelab.decoding import reference
from decodelab.decoding.law import LawSettings
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import Source
from decodelab.decoding.request import request
from decodelab.errors import UserError
from decodelab.experiments.compare_hf import Assist, HfPeer, Turn, compare, summarise, why_not
from decodelab.tests.tiny import tiny_tokenizer

PROMPT = [5, 6, 7, 8, 9, 10, 11, 7, 8]  # its end occurs before: prompt lookup drafts


def source(seed: int = 0, *, lacking: str | None = None, **config: Any) -> Source:
    """A random Llama as a source; `lacking` names a tensor that it has lost."""
    settings = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **config,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    weights = {name: w * 16 if w.dim() > 1 else w for name, w in model.state_dict().items()}
    if settings.tie_word_embeddings:
        del weights["lm_head.weight"]
    weights.pop(lacking, None)
    return Source("tiny", settings, tiny_tokenizer(), (), "digest", 0, lambda progress: weights)


def plain(of: Source, prompt: list[int], tokens: int, eos_ids: tuple[int, ...] = ()) -> list[int]:
    decoder = load_decoder(of, dtype=torch.float32)
    one = request(prompt, law=LawSettings(), max_new_tokens=tokens, vocab=61, context=512, eos_ids=eos_ids)
    return reference.generate(decoder, [one], LawSettings())[0].tokens


@pytest.fixture(scope="module")
def peer() -> HfPeer:
    """With a draft that agrees now and then."""
    return HfPeer.build(source(), torch.float32, "cpu", source(seed=1), {"assisted": Assist(3, 0.0)})


@pytest.mark.parametrize("tied", [False, True])
def test_its_logits_are_ours(tied: bool):
    of = source(tie_word_embeddings=tied)
    model = HfPeer.build(of, torch.float32, "cpu").model
    decoder = load_decoder(of, dtype=torch.float32)
    cache = decoder.open_cache(1, 64)
    ours = decoder(chains([PROMPT], [cache.open()]), cache).logits
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied


@pytest.mark.parametrize("mode", ["plain", "prompt_lookup", "assisted"])
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_every_mode_emits_our_plain_tokens(peer: HfPeer, mode: str, tokens: int):
    """No mode goes past `max_new_tokens` (transformers#46993), and none needs an EOS (transformers#46790)."""
    run = peer.generate(mode, PROMPT, tokens)
    assert run.tokens == plain(source(), PROMPT, tokens)
    assert 1 <= run.first <= tokens
    assert run.ttft_s > 0
    assert run.decode_s > 0 or run.first == tokens
    assert run.steps <= tokens - run.first
    assert mode != "plain" or run.steps == tokens - 1


@pytest.mark.parametrize("mode", ["plain", "prompt_lookup", "assisted"])
def test_it_ends_with_the_first_eos(peer: HfPeer, mode: str):
    """transformers#47912: with the first of several ids, and with nothing behind it."""
    free = plain(source(), PROMPT, 24)
    eos = (free[9], free[5])
    want = plain(source(), PROMPT, 24, eos)
    assert len(want) < len(plain(source(), PROMPT, 24, eos[:1]))
    assert peer.generate(mode, PROMPT, 24, eos).tokens == want


def test_the_eos_of_the_models_config_is_not_ours():
    free = plain(source(), PROMPT, 24)
    peer = HfPeer.build(source(eos_token_id=free[2]), torch.float32, "cpu")
    assert peer.generate("plain", PROMPT, 24).tokens == free


def test_a_call_leaves_no_trace(peer: HfPeer):
    """The same run before and after others, in any order; transformers' adaptive schedules would remember."""
    before = [peer.generate(mode, PROMPT, 20).tokens for mode in peer.modes]
    configs = [model.generation_config.to_dict() for model in (peer.model, peer.draft)]
    for mode in reversed(peer.modes):
        peer.generate(mode, [1, 2, 3], 7, [4])
    assert [peer.generate(mode, PROMPT, 20).tokens for mode in peer.modes] == before
    assert [model.generation_config.to_dict() for model in (peer.model, peer.draft)] == configs


def test_the_draft_proposes_as_many_as_the_row_says(peer: HfPeer):
    fed: list[int] = []

    def watch(module, args, kwargs):
        fed.append(kwargs["input_ids"].shape[1])

    hook = peer.model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        peer.generate("assisted", PROMPT, 20)
    finally:
        hook.remove()
    assert fed[0] == len(PROMPT) + 3
    assert max(fed[1:]) == 4
    assert peer.modes["assisted"] == "num_assistant_tokens=3, constant, no confidence threshold"


def test_modes_without_a_draft():
    alone = HfPeer.build(source(), torch.float32, "cpu")
    assert list(alone.modes) == ["plain", "prompt_lookup"]
    with pytest.raises(UserError, match="knows no mode 'assisted' here; known are plain, prompt_lookup"):
        alone.generate("assisted", PROMPT, 4)


def test_building_is_silent_and_leaves_settings_as_they_were(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    of = source()
    config, level = of.config.to_dict(), logging.get_verbosity()
    heard: list[str] = []
    handler = Handler()
    monkeypatch.setattr(handler, "emit", lambda record: heard.append(record.getMessage()))
    logging.warning_once.cache_clear()  # an earlier test may have used up what is said once
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    logging.add_handler(handler)
    try:
        HfPeer.build(of, torch.bfloat16, "cpu", of)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.remove_handler(handler)
        logging.set_verbosity(level)
    assert of.config.to_dict() == config
    assert heard == []
    assert capfd.readouterr().err == ""


def test_a_missing_tensor_is_one_line():
    with pytest.raises(UserError, match=r"finds no model\.norm\.weight in tiny; run without compare_hf=true"):
        HfPeer.build(source(lacking="model.norm.weight"), torch.float32, "cpu")


def test_the_modes_take_turns(peer: HfPeer, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    done = Turn([1, 2], 1, 0.5, 0.25, 1)
    monkeypatch.setattr(HfPeer, "generate", lambda self, mode, *rest: order.append(mode) or done)
    found = compare(peer, [[1], [2], [3]], 2, (), [[1, 2], [1, 3], [1, 2]])
    assert order[0::3] == ["plain", "prompt_lookup", "assisted"]
    assert {mode: row["identical"] for mode, row in found.items()} == dict.fromkeys(order[:3], 2)


def test_what_came_with_the_first_delivery_is_no_part_of_the_time_per_token(peer: HfPeer):
    """An assisted prefill emits several tokens at once; counting them would make transformers look faster."""
    runs = {"assisted": [Turn(list(range(10)), 4, 1.0, 3.0, 3), Turn([0, 1, 2], 1, 2.0, 1.0, 2)]}
    row = summarise(peer, runs, [list(range(10)), [0, 1, 3]])["assisted"]
    assert row == {
        "settings": peer.modes["assisted"],
        "interleaved": True,
        "tokens_per_second": 2.0,  # 6 + 2 tokens in 4 s
        "tpot_s": 0.5,
        "ttft_s": 1.5,
        "tokens_per_step": 8 / 5,
        "identical": 1,
        "prompts": 2,
    }


def test_one_token_has_no_time_per_token(peer: HfPeer):
    row = summarise(peer, {"plain": [Turn([1], 1, 1.0, 0.0, 0)]}, [[1]])["plain"]
    assert row["tpot_s"] is None
    assert row["tokens_per_second"] is None
    assert row["tokens_per_step"] is None


def test_other_laws_are_not_compared():
    assert why_not(LawSettings()) is None
    for law in (LawSettings(sample=True), LawSettings(repetition_penalty=1.1)):
        assert "compares greedy decoding alone" in str(why_not(law))


def test_smollm2_logits():
    """Where the real model is in the cache: logits agree in float32, and in bfloat16 as far as its rounding goes."""
    from decodelab.cache_dir import cache_dir
    from decodelab.decoding.model.source import ModelSpec, open_source

    if not (cache_dir() / "models" / "smollm2-135m" / "smollm2-135m.gguf").is_file():
        pytest.skip("smollm2-135m is not in the cache")
    of = open_source(ModelSpec(name="smollm2-135m"))
    ids = of.tokenizer("def add(a, b):\n    return a + b\n").input_ids
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        model = HfPeer.build(of, dtype, "cpu").model
        decoder = load_decoder(of, dtype=dtype)
        cache = decoder.open_cache(1, 64)
        ours = decoder(chains([ids], [cache.open()]), cache).logits.float()
        with torch.inference_mode():
            theirs = model(torch.tensor([ids])).logits[0].float()
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
        assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > (0.99 if dtype == torch.float32 else 0.8)
