import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import EMPTY, Remembers, Resources, Room
from decodelab.decoding.law import LawSettings
from decodelab.decoding.model.source import Source
from decodelab.decoding.noise import Noise
from decodelab.drafting.datastore import Datastore
from decodelab.drafting.retrieval import Retrieval, Retriever
from decodelab.drafting.suffix import Suffix
from decodelab.drafting.suffix_array import BORDER, SuffixArray, Texts, sort_places
from decodelab.errors import UserError
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer

CYCLE = [*range(1, 16), 0]


def source(tokenizer, vocab=61):
    return Source("tiny", LlamaConfig(vocab_size=vocab), tokenizer, (), "0" * 64, 0, lambda progress: {})


TARGET = source(tiny_tokenizer())
RESOURCES = Resources(tiny_decoder(), tiny_tokenizer(), LawSettings())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datastores"


def ids(text):
    return tiny_tokenizer()(text)["input_ids"]


def retriever(*documents, **keys):
    text = np.array([token for document in documents for token in (*document, BORDER)], np.uint32)
    return Retriever(Retrieval(**keys), Texts((SuffixArray.of(text),)))


def draft(drafter, prompt, depth=99, rows=99):
    return drafter.propose([list(prompt)], [Room(depth, rows)], [Noise(0, 0, 0)])[0]


def test_the_continuations_of_the_longest_end_by_frequency():
    """Behind 1 2: 3 four times (5 three times, 6 once), 4 twice; a document's end counts as a way to go on."""
    told = [[1, 2, 3, 5, 9]] * 3 + [[1, 2, 3, 6], [1, 2, 4], [0, 1, 2, 4], [1, 2]]
    drafter = retriever(*told, max_depth=2)
    found = draft(drafter, [7, 7, 1, 2])
    assert found.tokens == (3, 5, 4, 6)
    assert found.parents == (-1, 0, -1, 0)
    assert draft(retriever(*told, nodes=3), [1, 2]).tokens == (3, 5, 9)
    assert draft(retriever(*told, min_prob=0.5), [1, 2]).tokens == (3,)  # four of seven, then three
    assert draft(retriever(*told, tree=False), [1, 2]).tokens == (3, 5, 9)
    assert draft(retriever(*told, max_depth=2), [0, 1, 2]).tokens == (4,)  # a longer match
    assert draft(retriever(*told, max_depth=2, max_match=2), [0, 1, 2]).tokens == (3, 5, 4, 6)
    assert draft(retriever(*told, min_match=3), [7, 1, 2]) is EMPTY
    assert draft(drafter, [7, 2]) is EMPTY  # one token is no match
    assert draft(drafter, [1, 2, 3, 5, 9]) is EMPTY
    assert draft(drafter, [1, 2], rows=2).tokens == (3, 5)
    assert draft(drafter, [1, 2], depth=1).tokens == (3, 4)
    assert draft(drafter, [1, 2], rows=0) is EMPTY


def test_all_is_kept_where_the_datastore_says_all():
    """Alone, in a merge and three at once."""
    decoder, rule = clockwork(CYCLE), Greedy()
    drafter = retriever([*range(16)] * 3, nodes=5)
    for rigged in (drafter, beside_a_wrong_one(drafter)):
        requests = [ask([t, t + 1], rule, 19) for t in (1, 2, 3)]
        for asked in (requests, requests[:1]):
            for got in loop.generate(decoder, asked, rigged, rule):
                assert [s.accepted for s in got.steps] == [5, 5, 5]
                assert {s for step in got.steps for s in step.sources} - {"rigged"} == {"retrieval"}


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
def test_what_is_emitted_is_plain_decoding(rule, tree):
    decoder = tiny_decoder(scale=4.0)
    requests = [ask(p, rule, 24) for p in PROMPTS]
    want = reference.generate(decoder, requests, rule.law(), seed=2)
    drafter = retriever(*(w.tokens[at : at + 9] for w in want for at in (0, 11)), tree=tree)
    assert not isinstance(drafter, Remembers)
    got = loop.generate(decoder, requests, drafter, rule, seed=2)
    assert [g.tokens for g in got] == [w.tokens for w in want]
    assert sum(s.accepted for g in got for s in g.steps) > 0


def test_a_corpus_becomes_a_datastore_at_the_first_use(tmp_path, cache):
    corpus = tmp_path / "mine.jsonl"
    corpus.write_text('{"text": "abcdefg", "answer": "hij"}\n\n"hello"\n{"text": ""}\n', encoding="utf-8")
    settings = Retrieval(corpus=str(corpus))
    assert settings.check(TARGET) == []
    assert not cache.exists()  # a check makes nothing
    drafter = settings.build(RESOURCES)
    (file,) = cache.iterdir()
    made = load_file(file)
    assert made["text"].tolist() == [*ids("abcdefg"), BORDER, *ids("hello"), BORDER]
    assert {tensor.dtype for tensor in made.values()} == {np.dtype(np.uint32)}
    assert made["order"].tolist() == sort_places(made["text"]).tolist()
    assert list(draft(drafter, ids("ab")).tokens) == ids("cdefg")
    assert file.stat().st_size < 8 * len(made["text"]) + 600

    before = file.stat()
    settings.build(RESOURCES)
    assert settings.check(TARGET) == []
    assert file.stat().st_mtime_ns == before.st_mtime_ns  # made once
    Suffix(corpus=str(corpus)).build(RESOURCES)
    assert list(cache.iterdir()) == [file]  # one datastore for both
    corpus.write_text('"other"\n', encoding="utf-8")
    assert list(draft(settings.build(RESOURCES), ids("ot")).tokens) == ids("her")
    assert len(list(cache.iterdir())) == 2


def test_a_text_file_is_read_whole(tmp_path, monkeypatch):
    """In pieces of whole lines, without the tokens that a tokenizer puts around a text; a replay has no target."""
    tokenizer = tiny_tokenizer()
    around = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = around
    monkeypatch.setattr("decodelab.drafting.datastore.PIECE", 8)
    corpus = tmp_path / "mine.txt"
    corpus.write_text("abcd\nefgh\nijkl\nmnop", encoding="utf-8")
    told = []
    resources = Resources(None, lambda: tokenizer, LawSettings(), lambda *what: told.append(what))
    array = Datastore(str(corpus)).open(resources)
    text = [token for token in array.text.tolist() if token != BORDER]
    assert tokenizer.decode(text).replace("<unk>", "\n") == corpus.read_text(encoding="utf-8")
    assert told[-1] == ("reading mine.txt", 19, 19)


def test_a_datastore_of_ones_own(tmp_path, cache):
    """Made where it is named, and usable without its corpus."""
    corpus, file = tmp_path / "mine.txt", tmp_path / "deep" / "mine.safetensors"
    corpus.write_text("abcdefg", encoding="utf-8")
    Retrieval(corpus=str(corpus), datastore=str(file)).build(RESOURCES)
    assert file.exists()
    assert not cache.exists()
    assert Retrieval(corpus=str(corpus), datastore=str(file)).check(TARGET) == []
    corpus.unlink()
    alone = Retrieval(datastore=str(file))
    assert alone.check(TARGET) == []
    assert list(draft(alone.build(RESOURCES), ids("cd")).tokens) == ids("efg")


def _refused(settings, line, target=TARGET):
    with pytest.raises(UserError, match=line) as caught:
        settings.check(target)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_corpus_is_said(tmp_path):
    _refused(Retrieval(), r"drafting=retrieval has nothing to retrieve from: give drafting.corpus=FILE.jsonl or .txt")
    _refused(Retrieval(corpus=str(tmp_path / "no.txt")), r"drafting.corpus=.*no.txt is no file; it is a .txt or")
    _refused(Suffix(corpus=str(tmp_path / "no.txt")), r"drafting.corpus=.*no.txt is no file; it is a .txt or")
    for name, content, line in (
        ("a.csv", b"a,b", "a.csv is neither .txt nor .jsonl"),
        ("a.txt", b" \n\n", "a.txt holds no text"),
        ("b.jsonl", b"\n", "b.jsonl holds no text"),
        (
            "c.jsonl",
            b'{"prompt": "a"}',
            r"c.jsonl:1: a line of a corpus is a text in quotes, or an object with a `text` or with a `prompt` and",
        ),
        ("d.jsonl", b"\nabc", "d.jsonl:2 is not JSON"),
        ("e.txt", b"\xff\xfe", "e.txt is not UTF-8"),
        ("f.jsonl", b"[" * 100_000, "f.jsonl:1 is not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        _refused(Retrieval(corpus=str(tmp_path / name)), line)


def test_what_is_wrong_with_a_datastore_is_said(tmp_path):
    corpus, file = tmp_path / "mine.txt", tmp_path / "mine.safetensors"
    _refused(Retrieval(datastore=str(file)), r"mine.safetensors is no file; with drafting.corpus=TEXT it is made there")
    corpus.write_text("abcdefgz", encoding="utf-8")
    Retrieval(corpus=str(corpus), datastore=str(file)).build(RESOURCES)

    other = tiny_tokenizer()
    other.add_tokens(["new"])
    _refused(Retrieval(datastore=str(file)), "made with another tokenizer", source(other))
    line = f"holds token id {ids('z')[0]}, but the target's vocabulary is 0 to 19"
    _refused(Retrieval(datastore=str(file)), line, source(TARGET.tokenizer, vocab=20))
    corpus.write_text("another", encoding="utf-8")
    _refused(Retrieval(corpus=str(corpus), datastore=str(file)), "was not made of .*mine.txt")

    save_file({"text": np.zeros(3, np.uint32)}, file, {"decodelab": json.dumps({"kind": "medusa"})})
    _refused(Retrieval(datastore=str(file)), "mine.safetensors is no datastore")
    file.write_bytes(b"\x80\x04K\x01.")  # a pickle
    _refused(Retrieval(datastore=str(file)), "mine.safetensors cannot be read as a datastore")


def test_a_prompt_and_its_response_are_one_text(tmp_path):
    corpus = tmp_path / "mine.jsonl"
    corpus.write_text('{"prompt": "abc", "response": "de"}\n', encoding="utf-8")
    assert Datastore(str(corpus)).open(RESOURCES).text.tolist() == [*ids("abcde"), BORDER]


def test_marks_before_a_text_and_halves_of_characters_are_read(tmp_path):
    corpus = tmp_path / "mine.jsonl"
    corpus.write_bytes(b'\xef\xbb\xbf"abc"\r\n"d\\ud800e"\r\n')
    text = Datastore(str(corpus)).open(RESOURCES).text.tolist()
    unknown = RESOURCES.tokenizer.unk_token_id
    assert text == [*ids("abc"), BORDER, ids("d")[0], unknown, ids("e")[0], BORDER]


@pytest.mark.parametrize("note", [[1], "x", {"vocabulary": 3}, {"largest": "7"}, {"corpus": None}], ids=str)
def test_a_datastore_with_an_odd_note_is_refused(note, tmp_path):
    corpus, file = tmp_path / "mine.txt", tmp_path / "mine.safetensors"
    corpus.write_text("abc", encoding="utf-8")
    Retrieval(corpus=str(corpus), datastore=str(file)).build(RESOURCES)
    arrays = load_file(file)
    with safe_open(file, "np") as stored:
        known = json.loads(stored.metadata()["decodelab"])
    save_file(arrays, file, {"decodelab": json.dumps({**known, **note} if isinstance(note, dict) else note)})
    _refused(Retrieval(datastore=str(file)), "mine.safetensors is no datastore")
    save_file({name: a.reshape(-1, 1) for name, a in arrays.items()}, file, {"decodelab": json.dumps(known)})
    _refused(Retrieval(datastore=str(file)), "mine.safetensors is no datastore")
    arrays["text"][0] = 60
    save_file(arrays, file, {"decodelab": json.dumps(known)})
    with pytest.raises(UserError, match=r"mine.safetensors is damaged: delete it and make it again"):
        Retrieval(datastore=str(file)).build(RESOURCES)


def test_a_damaged_datastore_is_refused(tmp_path):
    corpus, file = tmp_path / "mine.txt", tmp_path / "mine.safetensors"
    corpus.write_text("abcdefg", encoding="utf-8")
    settings = Retrieval(corpus=str(corpus), datastore=str(file))
    settings.build(RESOURCES)
    content = bytearray(file.read_bytes())
    order = content.rindex(np.array([0, 1], np.uint32).tobytes())  # a, b, …
    content[order + 3] = 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"mine.safetensors is damaged: delete it and make it again"):
        settings.build(RESOURCES)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"max_match": 1}, r"max_match must be at least min_match \(2\), got 1"),
        ({"max_depth": 120}, r"max_match \+ max_depth must be at most 128, got 16 \+ 120: lower one of them"),
        ({"min_prob": 1.5}, "min_prob must be between 0.001 and 1, got 1.5"),
    ],
)
def test_what_is_wrong_is_said(keys, line):
    with pytest.raises(UserError, match=f"drafting.{line}"):
        Retrieval(**keys)
