"""What a run's key knows of its drafter."""

import os

import pytest

from decodelab.drafting.layer_skip import LayerSkip
from decodelab.drafting.medusa import Medusa
from decodelab.drafting.merge import Merge
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.retrieval import Retrieval
from decodelab.drafting.suffix import Suffix
from decodelab.errors import UserError
from decodelab.experiments.lab import draft_digest, files_of
from decodelab.tests.drafting.heads import random_heads, saved


def test_a_drafter_is_what_its_files_hold(tmp_path, monkeypatch):
    """Heads that were trained again, another corpus, another tree: another key, in a merge too."""
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    heads, corpus, tree = tmp_path / "medusa.safetensors", tmp_path / "corpus.txt", tmp_path / "tree.json"
    saved(heads, random_heads(2, seed=0))
    corpus.write_text("a b c")
    tree.write_text("[[0]]")
    settings = (Medusa(str(heads), str(tree)), Suffix(corpus=str(corpus)), Retrieval(corpus=str(corpus)))
    before = [draft_digest(s) for s in (*settings, Merge((PromptLookup(), settings[0])))]
    assert None not in before
    saved(heads, random_heads(2, seed=1))
    corpus.write_text("a b d")
    os.utime(corpus, (1, 1))
    after = [draft_digest(s) for s in (*settings, Merge((PromptLookup(), settings[0])))]
    assert all(a != b for a, b in zip(before, after, strict=True))
    heads_alone = draft_digest(settings[0])
    tree.write_text("[[0], [1]]")
    assert draft_digest(settings[0]) != heads_alone


def test_without_files_there_is_nothing_to_digest():
    assert draft_digest(PromptLookup()) is None
    assert files_of(LayerSkip(exit=3)) == []
    assert [file.name for file in files_of(Medusa())] == ["medusa.safetensors"]  # the shipped one


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none.txt, which the drafter names, cannot be read \(No such file"):
        draft_digest(Suffix(corpus=str(tmp_path / "none.txt")))
