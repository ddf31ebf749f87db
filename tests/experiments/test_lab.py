"""What a run's key knows of its drafter."""

import os
import shutil
from dataclasses import replace

import pytest
import torch

from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.drafting.draft_model import DraftModel, DraftSpec
from decodelab.drafting.layer_skip import LayerSkip
from decodelab.drafting.medusa import Medusa
from decodelab.drafting.merge import Merge
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.drafting.retrieval import Retrieval
from decodelab.drafting.suffix import Suffix
from decodelab.errors import UserError
from decodelab.experiments.compose import compose
from decodelab.experiments.identity import identify
from decodelab.experiments.lab import Warm, draft_digest, files_of
from decodelab.experiments.measure import _circumstances
from decodelab.experiments.quality.answers import answers_key
from decodelab.experiments.quantising import plan
from decodelab.quantization.formats import NATIVE
from decodelab.quantization.rtn import RTN
from decodelab.tests.decoding.model.checkpoints import edit_json
from decodelab.tests.drafting.heads import random_heads, saved
from decodelab.tests.experiments.tiny_lab import tiny_lab


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


def test_the_same_weights_under_another_config_are_another_model(private, checkpoint):
    """For a run's key, its answers, its baseline, a target in memory, a draft and a quantised copy."""
    folder, lab = shutil.copytree(checkpoint, private / "model"), tiny_lab()
    config = compose([f"model.path={folder}", "task.limit=1", "device=cpu", "dtype=float32"])
    draft, cpu, found = DraftModel(DraftSpec(path=str(folder))), torch.device("cpu"), []
    for eps in (1e-6, 1e-3):
        edit_json(folder / "config.json", rms_norm_eps=eps)
        run, source = identify(config), open_source(ModelSpec(path=str(folder)))
        warm = Warm(((source.identity, torch.float32, cpu, None, lab.target.kernels), lab.target))
        if found:
            assert not found[0][-1].holds(source, torch.float32, cpu)
        assert warm.holds(source, torch.float32, cpu)
        asked = [run.key, answers_key(run.resolved, run.digests), draft_digest(draft)]
        asked += [plan(RTN(), source, torch.float32, NATIVE).key, _circumstances(replace(lab, source=source), 0, 1)[0]]
        found.append([run.digests["weights"], *asked, warm])
    assert [a == b for a, b in zip(*found, strict=True)] == [True, False, False, False, False, False, False]
