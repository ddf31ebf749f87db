"""Two tokenizers: the text in both, what is offered, that nothing of it changes the output, and the law of what is
drawn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decodelab import testing
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Acceptance, Block, Greedy, Sampling
from decodelab.decoding.draft import Opened, Resources, Room
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.noise import Noise
from decodelab.decoding.request import Request, request
from decodelab.drafting import across
from decodelab.drafting.across import WINDOW, Bridge, Shared, spelled
from decodelab.drafting.draft_model import DraftModel
from decodelab.drafting.merge import Merged
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.second_model import Reader, Reading
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import tiny_byte_tokenizer
from decodelab.tests.drafting.spellings import reciting, spelling
from decodelab.tests.enumeration import outcomes, total_variation, unchecked
from decodelab.tests.tiny import tiny_decoder

CYCLE = "abcdefgh"
PAIRS = tuple(a + b for a, b in zip(CYCLE, CYCLE[1:] + "a", strict=True))
LETTERS, TWOS = spelling(CYCLE), spelling(CYCLE[::-1], PAIRS)  # no letter has the same id in both
BY_ONE = dict(zip(CYCLE, CYCLE[1:] + "a", strict=True))
BY_TWO = {a: BY_ONE[a] + BY_ONE[BY_ONE[a]] for a in CYCLE}


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def drafter(settings: DraftModel, model: Decoder, tokenizer, target: Decoder, theirs, rule: Acceptance = Greedy()):  # noqa: B008
    return settings.around(model, tokenizer, Resources(target, theirs, rule.law()))


def ask(tokenizer, target: Decoder, text: str, n: int, rule: Acceptance) -> Request:
    c = target.config
    return request(ids(tokenizer, text), law=rule.law(), max_new_tokens=n, vocab=c.vocab, context=c.max_positions)


# --- the text in both tokenizers ---


@pytest.mark.parametrize("seed", range(3))
def test_the_draft_model_reads_what_its_tokenizer_makes_of_the_whole_text(seed: int, monkeypatch: pytest.MonkeyPatch):
    """However the text came: prompts of any length, and 1 to 9 tokens a step; merges that compete with each other."""
    unchecked(monkeypatch)
    rng = random.Random(seed)
    merges = rng.sample([a + b for a in CYCLE for b in CYCLE], 24)
    target, draft = spelling(CYCLE, rng.sample(merges, 6)), spelling(CYCLE[::-1], merges)
    bridge = Bridge.between(target, draft)
    text = "".join(rng.choice(CYCLE) for _ in range(600))
    tokens = ids(target, text)
    at = rng.choice([1, 3, 200])
    window, ours = bridge.open(tokens[:at])
    moved = set()
    while True:
        assert ours == ids(draft, target.decode(tokens[:at]))
        assert len(window.target) - window.begin <= 2 * WINDOW + 9
        moved.add(window.begin)
        if at == len(tokens):
            break
        step = tokens[at : at + rng.randint(1, 9)]
        at += len(step)
        start, ours[start:] = bridge.follow(window, step)
    assert len(moved) > 3


def test_following_is_linear(monkeypatch: pytest.MonkeyPatch):
    """What is encoded in all is a few times the text, twice as much for twice the text."""
    unchecked(monkeypatch)
    counted: list[int] = []

    def counting(tokenizer, text, inner=across._ids):
        counted.append(len(text))
        return inner(tokenizer, text)

    monkeypatch.setattr(across, "_ids", counting)
    spent = []
    for length in (1000, 2000):
        counted.clear()
        bridge = Bridge.between(LETTERS, TWOS)
        tokens = ids(LETTERS, (CYCLE * length)[:length])
        window, _ = bridge.open(tokens[:4])
        for at in range(4, length, 4):
            bridge.follow(window, tokens[at : at + 4])
        spent.append(sum(counted))
    assert spent[1] < 2.1 * spent[0]
    assert spent[1] < 40 * 2000


def test_a_text_begins_once():
    """transformers#46936: no BOS within the text; and not a second one where the target's prompt has it."""
    begins = spelling(CYCLE, PAIRS, begins=True)
    bridge = Bridge.between(LETTERS, begins)
    window, tokens = bridge.open(ids(LETTERS, "abc"))
    assert begins.convert_ids_to_tokens(tokens) == ["<s>", "ab", "c"]
    start, tokens[start:] = bridge.follow(window, ids(LETTERS, "de"))
    assert begins.convert_ids_to_tokens(tokens) == ["<s>", "ab", "cd", "e"]
    _, tokens = bridge.open([0, *ids(LETTERS, "abc")])
    assert begins.convert_ids_to_tokens(tokens) == ["<s>", "ab", "c"]


def test_special_tokens_are_translated_by_name_or_left_out():
    theirs, ours = spelling(CYCLE, special=("<user>", "</s>")), spelling(CYCLE, PAIRS, special=("</s>", "<s>"))
    bridge = Bridge.between(theirs, ours)
    _, tokens = bridge.open([0, *ids(theirs, "ab"), 1, *ids(theirs, "cd"), 0])
    assert ours.convert_ids_to_tokens(tokens) == ["ab", "</s>", "cd"]
    assert (bridge.dropped, bridge.ends) == ({0}, {0: True, 1: False})


def test_half_a_character_is_waited_for():
    """é is two bytes, and the target has decided one."""
    target = tiny_byte_tokenizer()
    bridge = Bridge.between(target, spelling("aé"))
    tokens = ids(target, "aéa")
    assert len(tokens) == 4
    window, ours = bridge.open(tokens[:2])
    assert (window.text, window.whole, bridge.back(window, [3])) == ("a", False, [])
    start, ours[start:] = bridge.follow(window, tokens[2:3])
    assert (window.text, window.whole) == ("aé", True)
    assert ours == [2, 3]
    assert bridge.back(window, [2, 3]) == [tokens[0], tokens[1], tokens[2]]


@pytest.mark.parametrize(
    ("text", "said", "offered"),
    [
        ("ab", "cd", ["cd"]),
        ("ab", "cde", ["cd", "e"]),
        ("abc", "d", ["d"]),  # the target stopped within what its tokenizer takes for a pair
        ("abc", "def", ["de", "f"]),
    ],
)
def test_what_the_draft_model_says_in_the_targets_tokens(text: str, said: str, offered: list[str]):
    bridge = Bridge.between(TWOS, LETTERS)
    window, _ = bridge.open([*ids(TWOS, text[: len(text) // 2 * 2]), *ids(TWOS, text[len(text) // 2 * 2 :])])
    assert TWOS.convert_ids_to_tokens(bridge.back(window, ids(LETTERS, said))) == offered


# --- what the second model has read ---


def read(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    reader = Reader(model)
    (reading,) = reader.open([list(tokens)], len(tokens), len(tokens))
    return reader.feed([reading], [list(tokens)])[0]


@torch.inference_mode()
def test_a_text_that_changes_far_back_is_read_again():
    model = tiny_decoder()
    reader = Reader(model)
    one, two = reader.open([[5, 6, 7, 8, 9], [10, 11, 12]], 1, 64)
    assert (one.cached, two.cached) == (4, 2)
    one.rewrite(3, [8, 9, 4], 1)  # nothing that was committed
    assert (one.changed, one.settled) == (False, 5)
    reader.feed([one, two], [[9, 4], [12]])
    two.rewrite(2, [12, 13], 2)
    reader.keep([one, two])
    assert (one.cached, two.cached) == (5, 2)
    one.rewrite(3, [20, 21], 1)
    assert (one.changed, one.settled) == (True, 4)
    reader.keep([one, two])
    assert (one.cached, one.changed) == (4, False)
    assert torch.allclose(reader.feed([one, two], [[21], [12, 13]])[0], read(model, [5, 6, 7, 20, 21]))
    shorter = Reading([5, 6, 7], 3, one.cache, one.slot)
    shorter.rewrite(1, [6], 1)
    assert shorter.changed


@torch.inference_mode()
def test_a_text_that_outgrows_its_cache_moves_to_a_larger_one():
    model = tiny_decoder()
    reader = Reader(model)
    tokens = [3 + i % 50 for i in range(200)]
    (reading,) = reader.open([tokens[:10]], 1, 16)
    small = reading.cache
    reading.rewrite(10, tokens[10:], 50)
    assert reader.depth(reading, 5) == 5
    assert reading.cache is not small
    assert small.open() == 0
    assert (reading.cached, reading.cache.room(reading.slot) >= 54) == (150, True)
    assert torch.allclose(reader.feed([reading], [tokens[150:]])[0], read(model, tokens))
    reader.keep([reading])
    assert reader.depth(reading, 400) == 512 - 200 + 1


# --- what is offered ---


def test_propose_is_the_text_that_the_model_would_say():
    target = reciting(LETTERS, BY_ONE)
    d = drafter(DraftModel(vocabulary="text"), reciting(TWOS, BY_TWO), TWOS, target, LETTERS)
    cache = target.open_cache(1, 64)
    prompt = tuple(ids(LETTERS, "abc"))
    r = ask(LETTERS, target, "abc", 20, Greedy())
    (state,) = d.start([Opened(prompt, (), 20, r.processors, cache.open(), cache)])
    for room, text in ((4, "defg"), (3, "def"), (1, "d"), (0, "")):
        (draft,) = d.propose([state], [Room(room, 9)], [Noise(0, 0, 0)])
        assert LETTERS.decode(list(draft.tokens)) == text
        assert (draft.q, draft.is_chain) == (None, True)
        d.reader.keep([state.reading])
    d.finish(state)
    assert state.reading.cache.staged == 0


def test_a_draft_ends_with_the_draft_models_text():
    """Behind its own end there is nothing to say; where the target knows that token, it is offered."""
    target = reciting(LETTERS, BY_ONE)
    for special, said in ((("<s>", "</s>"), "de</s>"), (("<s>", "<end>"), "de")):
        ends = spelling(CYCLE, special=special)
        model = reciting(ends, BY_ONE | {"e": special[1]})
        d = drafter(DraftModel(vocabulary="text", max_draft=6), model, ends, target, LETTERS)
        cache = target.open_cache(1, 64)
        r = ask(LETTERS, target, "abc", 20, Greedy())
        (state,) = d.start([Opened(r.prompt, (), 20, r.processors, cache.open(), cache)])
        (draft,) = d.propose([state], [Room(9, 9)], [Noise(0, 0, 0)])
        assert LETTERS.decode(list(draft.tokens)) == said


RULES = [Greedy(), Sampling(temperature=0.9)]
KINDS = {
    "pairs draft letters": (LETTERS, BY_ONE, TWOS, BY_TWO, "text"),
    "letters draft pairs": (TWOS, BY_TWO, LETTERS, BY_ONE, "text"),
    "letters of other ids": (LETTERS, BY_ONE, TWOS, BY_ONE, "intersection"),
}


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_kept_where_both_say_the_same(kind: str, rule: Acceptance, monkeypatch: pytest.MonkeyPatch):
    """Three at once, alone, and in a merge; prompts of odd and even length."""
    unchecked(monkeypatch)
    theirs, how, ours, ours_how, vocabulary = KINDS[kind]
    target = reciting(theirs, how)
    settings = DraftModel(vocabulary=vocabulary, max_draft=4)
    d = drafter(settings, reciting(ours, ours_how), ours, target, theirs, rule)
    requests = [ask(theirs, target, text, 48, rule) for text in ("ab", "bcdef", CYCLE * 12)]
    want = reference.generate(target, requests, rule.law(), seed=1)
    merge = Merged((PromptLookup(max_draft=1), d))
    for made, group in ((d, requests), (d, requests[1:2]), (merge, requests)):
        got = loop.generate(target, group, made, rule, seed=1)
        if group is requests:
            assert [g.tokens for g in got] == [w.tokens for w in want]
        steps = [s for g in got for s in g.steps[:-1]]
        kept = 2 if kind == "letters draft pairs" else 4  # four letters are two pairs
        assert all(s.accepted == kept for s in steps)


def test_a_sampled_draft_that_equals_the_target_is_kept():
    """q over the tokens that both have is p there: all of it, other ids notwithstanding."""
    rule = Sampling(temperature=0.9)
    target = reciting(LETTERS, BY_ONE)
    settings = DraftModel(vocabulary="intersection", proposal="sampled")
    d = drafter(settings, reciting(TWOS, BY_ONE), TWOS, target, LETTERS, rule)
    assert d.gives.q == "sampled"
    got = loop.generate(target, [ask(LETTERS, target, "ab", 41, rule)], d, rule)
    assert [s.accepted for g in got for s in g.steps] == [4] * 8


def test_a_model_that_wants_to_say_what_the_target_lacks_says_nothing():
    target = reciting(LETTERS, BY_ONE)
    d = drafter(DraftModel(vocabulary="intersection"), reciting(TWOS, BY_TWO), TWOS, target, LETTERS)
    (got,) = loop.generate(target, [ask(LETTERS, target, "ab", 12, Greedy())], d, Greedy())
    assert [s.drafted for s in got.steps] == [0] * 11


def test_where_nothing_shared_is_allowed_nothing_is_drafted():
    rule = Greedy(bad_words=tuple((i,) for i in ids(LETTERS, CYCLE)))
    target = reciting(LETTERS, BY_ONE)
    ours = spelling(CYCLE, special=())
    d = drafter(DraftModel(vocabulary="intersection"), reciting(ours, BY_ONE), ours, target, LETTERS, rule)
    (got,) = loop.generate(target, [ask(LETTERS, target, "ab", 5, rule)], d, rule)
    assert [s.drafted for s in got.steps] == [0] * 4


# --- nothing of it changes the output ---

_ALPHABET = "".join(testing._CHARACTERS)
_PAIRED = random.Random(0).sample([a + b for a in _ALPHABET for b in _ALPHABET], 200)


@dataclass(frozen=True)
class WithOtherTokens:
    """A small random model with a tokenizer of its own, of letters and pairs of them."""

    settings: DraftModel

    def build(self, resources: Resources):
        ours = spelling(_ALPHABET[::-1], _PAIRED, special=("<s>", "</s>", "<other>"))
        config = resources.target.config
        model = tiny_decoder(
            scale=7.0, vocab_size=-(-len(ours) // 8) * 8, max_position_embeddings=2 * config.max_positions
        )
        return self.settings.around(model, ours, resources)


SETTINGS = {
    "text": DraftModel(vocabulary="text", max_draft=3),
    "intersection": DraftModel(vocabulary="intersection", max_draft=3),
    "sampled intersection": DraftModel(vocabulary="intersection", proposal="sampled", max_draft=3),
}
CHECKS = {
    "text": testing.DRAFTER_CHECKS,
    "intersection": (testing.drafts_of_3_0_3_0, testing.another_member_wins),
    "sampled intersection": (testing.sampling_is_plain_decoding,),
}


@pytest.mark.parametrize(
    ("name", "check"),
    [pytest.param(name, check, id=f"{name}-{check.__name__}") for name, checks in CHECKS.items() for check in checks],
)
def test_a_random_model_changes_no_token(name: str, check, monkeypatch: pytest.MonkeyPatch):
    unchecked(monkeypatch)
    check(lambda: WithOtherTokens(SETTINGS[name]))


@pytest.mark.parametrize("rule", [Sampling(), Block()], ids=["sampling", "block"])
@pytest.mark.parametrize("temperature", [None, 1.7])
def test_the_law_of_what_both_vocabularies_have(rule, temperature, monkeypatch: pytest.MonkeyPatch):
    """Every draw of three tokens, p ≠ q. The target has a letter that the draft model lacks, the draft model a pair and
    a letter that the target lacks; the pair changes how the text is read."""
    theirs, ours = spelling("abc", special=()), spelling("dba", ("ab",), special=())
    target = tiny_decoder(0, scale=6.0, vocab_size=3, num_hidden_layers=1, hidden_size=16)
    model = tiny_decoder(1, scale=6.0, vocab_size=4, num_hidden_layers=1, hidden_size=16)
    monkeypatch.setattr("decodelab.drafting.draft_model.LEAST", 0.2)
    settings = DraftModel(vocabulary="intersection", proposal="sampled", max_draft=2, temperature=temperature)
    d = drafter(settings, model, ours, target, theirs, rule)
    r = request([0, 1], law=rule.law(), max_new_tokens=3, vocab=3, context=64)
    drafted = outcomes(monkeypatch, lambda: tuple(loop.generate(target, [r], d, rule)[0].tokens))
    plain = outcomes(monkeypatch, lambda: tuple(reference.generate(target, [r], rule.law())[0].tokens))
    assert len(plain) == 27
    assert sum(drafted.values()) == pytest.approx(1)
    assert total_variation(drafted, plain) < 1e-5
    offered = [s.drafted for g in loop.generate(target, [r], d, rule) for s in g.steps]
    assert offered[0] > 0


# --- vocabularies ---


def test_vocabularies_are_compared_by_what_their_tokens_say():
    """GPT-2's bytes, SentencePiece's blanks and bytes, and plain text."""
    byte = tiny_byte_tokenizer()
    plain = spelling(" ab", ("ab",), special=("<|im_end|>",))
    pieces = spelling("\u2581ab", ("\u2581a", "ab"), special=("</s>",))
    pieces.add_tokens(["<0x0A>"])
    said = {name: spelled(t) for name, t in (("byte", byte), ("plain", plain), ("pieces", pieces))}
    for text in (b" ", b"a", b"b", b"ab"):
        assert all((False, text) in found for found in said.values())
    assert (False, b" a") in said["pieces"]
    assert (False, b"\n") in said["pieces"]
    assert (False, b"\n") in said["byte"]
    assert (True, b"<|im_end|>") in said["byte"]
    assert (True, b"<|im_end|>") in said["plain"]
    assert (True, b"</s>") in said["pieces"]
    shared = Shared.between(byte, plain)
    assert {byte.decode([t]): plain.decode([d]) for t, d in shared.own.items()} == {
        text: text for text in (" ", "a", "b", "ab", "<|im_end|>")
    }
    logits = torch.arange(float(len(plain)))
    over = shared.over(logits, len(byte))
    assert int(torch.isfinite(over).sum()) == 5
    for theirs, own in shared.own.items():
        assert over[theirs] == logits[own]


def test_vocabularies_without_a_token_in_common():
    with pytest.raises(UserError, match="the two vocabularies have no token in common; take vocabulary=text"):
        Shared.between(spelling("ab", special=()), spelling("cd", special=()))


def test_what_is_wrong_is_said():
    with pytest.raises(UserError, match=r"drafting.vocabulary=text offers a text, which has no q: take proposal=coup"):
        DraftModel(vocabulary="text", proposal="sampled")
