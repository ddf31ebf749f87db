"""Layers of the target that draft: what they say, what they leave in the target's cache, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.rows import chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling
from decodelab.decoding.draft import Opened, Resources, Room
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import Source
from decodelab.decoding.noise import Noise
from decodelab.drafting.layer_skip import LayerSkip, SkippingDrafter, kept
from decodelab.drafting.merge import Merged
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.errors import UserError
from decodelab.testing import tiny_tokenizer
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import tiny_decoder


def built(settings: LayerSkip, target: Decoder, rule: Acceptance) -> SkippingDrafter:
    return settings.build(Resources(target, tiny_tokenizer(), rule.law()))


def idle(target: Decoder, *layers: int) -> Decoder:
    """These layers add nothing: without them the target says the same."""
    for layer in layers:
        target.blocks[layer].output.weight.zero_()
        target.blocks[layer].down.weight.zero_()
    return target


def opened(target: Decoder, prompt: list[int], rule: Acceptance) -> Opened:
    """A request whose prompt is read, but for its last token, which stands for the last one emitted."""
    cache = target.open_cache(1, 64)
    slot = cache.open()
    target(chains([prompt[:-1]], [slot]), cache)
    cache.commit({slot: range(len(prompt) - 1)})
    return Opened(tuple(prompt), (), 20, ask(prompt, rule).processors, slot, cache)


@torch.inference_mode()
def by_hand(target: Decoder, prompt: list[int], layers: list[int], n: int) -> list[int]:
    """All layers read what is decided, `layers` what is drafted; every token anew, nothing dropped in between."""
    said: list[int] = []
    for _ in range(n):
        cache = target.open_cache(1, 64)
        slot = cache.open()
        target(chains([prompt[:-1]], [slot]), cache)
        cache.commit({slot: range(len(prompt) - 1)})
        said.append(int(target(chains([[prompt[-1], *said]], [slot]), cache, layers=layers).logits[-1].argmax()))
    return said


@pytest.mark.parametrize(
    ("settings", "layers"),
    [(LayerSkip(skip=(1, 2)), [0, 3]), (LayerSkip(exit=2), [0, 1]), (LayerSkip(skip=(0,)), [1, 2, 3])],
)
def test_propose_is_what_the_layers_say_behind_what_all_of_them_read(settings: LayerSkip, layers: list[int]):
    target, rule = tiny_decoder(num_hidden_layers=4), Greedy()
    drafter = built(settings, target, rule)
    assert list(drafter.layers) == layers
    prompt = [5, 9, 41, 3, 17]
    request = opened(target, prompt, rule)
    (state,) = drafter.start([request])
    with torch.inference_mode():
        (draft,) = drafter.propose([state], [Room(3, 9)], [Noise(0, 0, 0)])
    assert list(draft.tokens) == by_hand(target, prompt, layers, 3)
    assert draft.is_chain
    assert draft.q is None
    assert request.cache.staged == 0
    assert request.cache.length(request.sequence) == len(prompt) - 1


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8), Greedy(repetition_penalty=1.3)], ids=str)
def test_layers_that_add_nothing_are_not_missed(rule: Acceptance):
    """All is kept: alone, three at once, and in a merge whose other member fills the forest's first rows."""
    target = idle(tiny_decoder(num_hidden_layers=4), 1, 2)
    drafter = built(LayerSkip(skip=(1, 2), max_draft=3), target, rule)
    requests = [ask(p, rule, 21) for p in PROMPTS]
    want = reference.generate(target, requests, rule.law(), seed=3)
    for together in (drafter, Merged((PromptLookup(max_draft=2), drafter))):
        got = loop.generate(target, requests, together, rule, seed=3)
        assert [g.tokens for g in got] == [w.tokens for w in want]
        assert all(s.accepted == 3 for g in got for s in g.steps)
    (alone,) = loop.generate(target, requests[:1], drafter, rule, seed=3)
    assert [s.accepted for s in alone.steps] == [3] * 5


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=str)
def test_layers_that_are_missed_change_no_token(rule: Acceptance):
    """GQA and MQA; some drafts are right and some are not."""
    for config in ({}, {"num_key_value_heads": 1}):
        target = tiny_decoder(scale=3.0, num_hidden_layers=4, **config)
        requests = [ask(p, rule, 30) for p in PROMPTS]
        got = loop.generate(target, requests, built(LayerSkip(exit=3, max_draft=3), target, rule), rule, seed=3)
        want = reference.generate(target, requests, rule.law(), seed=3)
        assert [g.tokens for g in got] == [w.tokens for w in want]
        steps = [s for g in got for s in g.steps]
        assert 0 < sum(s.accepted for s in steps) < sum(s.drafted for s in steps)


def test_nothing_is_staged_after_an_error(monkeypatch: pytest.MonkeyPatch):
    """transformers' early exit edits the model's config, and an exception leaves it so; here nothing is edited."""
    target, rule = tiny_decoder(num_hidden_layers=3), Greedy()
    drafter = built(LayerSkip(exit=1), target, rule)
    request = opened(target, [5, 9, 41], rule)
    (state,) = drafter.start([request])
    calls = []

    def breaks(x, *rest, whole=target.blocks[0].forward):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(x, *rest)

    monkeypatch.setattr(target.blocks[0], "forward", breaks)
    with pytest.raises(KeyboardInterrupt):
        drafter.propose([state], [Room(3, 9)], [Noise(0, 0, 0)])
    assert request.cache.staged == 0
    monkeypatch.undo()
    assert target.config.layers == len(target.blocks) == 3
    got = target(chains([[41]], [request.sequence]), request.cache).logits
    fresh = opened(target, [5, 9, 41], rule)
    assert torch.equal(got, target(chains([[41]], [fresh.sequence]), fresh.cache).logits)


def test_a_draft_ends_where_the_layers_are_unsure():
    target, rule = tiny_decoder(num_hidden_layers=3), Sampling(temperature=2.0)
    drafter = built(LayerSkip(exit=1, max_draft=6, confidence=0.999999), target, rule)
    got = loop.generate(target, [ask(p, rule, 15) for p in PROMPTS], drafter, rule)
    assert {s.drafted for g in got for s in g.steps[:-1]} == {1}  # the first token is always offered


def test_a_layer_keeps_the_owner_of_its_keys():
    """Layers 1 and 3 read the keys and values of 0 and 2."""
    layout = Layout(tuple(LayerKV(owner, 2) for owner in (0, 0, 2, 2)), 8)
    assert kept(layout, [1, 3]) == (0, 2)
    assert kept(layout, [2, 3]) == (0, 1)
    with pytest.raises(
        UserError,
        match="leaves out layer 2, whose keys and values layer 3 reads: keep it, or leave out 3 too",
    ):
        kept(layout, [2])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "leaves out no layer: give drafting.skip=[5,6,9] or drafting.exit=12, or let decodelab layers look"),
        ({"skip": ()}, "leaves out no layer"),
        ({"skip": (1,), "exit": 1}, "drafting.skip and drafting.exit both say which layers draft: give one of them"),
        ({"skip": (1, 4)}, "drafting.skip names layer 4, but the target's are 0 to 3"),
        ({"skip": (-1,)}, "drafting.skip names layer -1"),
        ({"skip": (0, 1, 2, 3)}, "leaves none of the target's 4 layers: keep at least one"),
        ({"exit": 4}, "drafting.exit must be 1 to 3 of the target's 4 layers, got 4"),
        ({"exit": 0}, "drafting.exit must be 1 to 3 of the target's 4 layers, got 0"),
        ({"exit": 1, "max_draft": 0}, "drafting.max_draft must be at least 1, got 0"),
        ({"exit": 1, "confidence": 1.0}, "drafting.confidence must be at least 0 and below 1, got 1.0"),
    ],
)
def test_what_is_wrong_is_said(settings: dict, text: str):
    with pytest.raises(UserError, match=re.escape(text)):
        LayerSkip(**settings).layers(tiny_decoder(num_hidden_layers=4).config.layout)


def test_a_file_is_read_for_its_own_target(tmp_path: Path, four_layers: Source):
    file = tmp_path / "layers.json"
    settings = LayerSkip(skip=str(file))

    def refused(text: str, why: str) -> None:
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(why)):
            settings.check(four_layers)

    with pytest.raises(UserError, match=re.escape("cannot be read (No such file or directory): decodelab layers")):
        settings.check(four_layers)
    for wrong in ("{", "[]", '{"kind": "tree"}', '{"kind": "layer_skip", "target": "x"}', '"kind"'):
        refused(wrong, "holds no set of layers: decodelab layers writes such files")
    found = {"kind": "layer_skip", "target": "other", "skip": [1]}
    refused(json.dumps(found), "was found for other weights (other) than those of tiny")
    refused(json.dumps(found | {"target": four_layers.digest, "skip": [1, 9]}), "drafting.skip names layer 9")
    file.write_text(json.dumps(found | {"target": four_layers.digest, "skip": [1, 2]}))
    assert settings.check(four_layers) == []
    assert settings.layers(tiny_decoder(num_hidden_layers=4).config.layout) == (0, 3)
    assert (settings.files, replace(settings, skip=(1,)).files) == ((file,), ())
    assert replace(settings, skip=None, exit=2).check(four_layers) == []
    file.write_text(json.dumps(found | {"target": four_layers.digest, "max_draft": 2}))
    assert replace(settings, max_draft=2).check(four_layers) == []
    (told,) = settings.check(four_layers)
    assert told == (
        f"drafting.skip={file} was found with drafts of 2, and these are of 4: drafting.max_draft=2 does what was "
        "predicted"
    )


@pytest.fixture
def four_layers() -> Source:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    return Source("tiny", config, tiny_tokenizer(), (), "digest", 0, lambda progress: {})
