"""The search for layers that may be left out: what it says of a set is what decoding with it does."""

import errno
import itertools
import json
import re

import pytest

from decodelab.attention.layout import LayerKV, Layout, uniform
from decodelab.decoding import loop
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.cost import Profile
from decodelab.decoding.draft import Resources
from decodelab.drafting.layer_skip import LayerSkip, kept
from decodelab.errors import UserError
from decodelab.experiments.cli import main
from decodelab.experiments.config import LayerSearch
from decodelab.experiments.layers import Answers, Costs, Skip, Tried, climb
from decodelab.tests.enumeration import unchecked
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import tiny_decoder, tiny_tokenizer

RULES = [Greedy(), Greedy(repetition_penalty=1.3, no_repeat_ngram=3), Sampling(temperature=0.8)]
FLAT = Costs(Profile(0, {1: 1.0, 8: 1.0}), 0.0, 4)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_is_said_of_a_set_is_what_decoding_with_it_does(rule, monkeypatch):
    """Step by step, at the end of an answer and where it ends early too."""
    unchecked(monkeypatch)
    target = tiny_decoder(scale=3.0, num_hidden_layers=4)
    requests = [ask(p, rule, n) for p, n in zip(PROMPTS, (30, 17, 30), strict=True)]
    ends = loop.generate(target, requests, LayerSkip(exit=3).build(resources(target, rule)), rule, seed=3)
    requests[2] = ask(PROMPTS[2], rule, 30, eos_ids=[ends[2].tokens[19]])
    answers = Answers(target, requests, rule.law(), 4, 3)
    accepted = 0
    for skip in ((3,), (1, 2)):
        right = answers.right(kept(target.config.layout, skip))
        for max_draft in (1, 4):
            drafter = LayerSkip(skip=skip, max_draft=max_draft).build(resources(target, rule))
            got = loop.generate(target, requests, drafter, rule, seed=3)
            want = [step for g in got for step in g.steps]
            told = answers.steps(right, max_draft)
            assert [(s.verified, s.drafted, s.depth, s.accepted, s.emitted) for s in told] == [
                (s.verified, s.drafted, s.depth, s.accepted, s.emitted) for s in want
            ]
            accepted += sum(s.accepted for s in want)
    assert accepted > 20


def resources(target, rule):
    return Resources(target, tiny_tokenizer(), rule.law())


def test_the_best_draft_length_of_a_set():
    """Layers that are not missed: all is kept, and where rows cost nothing the longest draft is best."""
    target, rule = tiny_decoder(num_hidden_layers=4), Greedy()
    for layer in (1, 2):
        target.blocks[layer].output.weight.zero_()
        target.blocks[layer].down.weight.zero_()
    answers = Answers(target, [ask(p, rule, 21) for p in PROMPTS], rule.law(), 4, 0)
    influence = answers.influence()
    assert influence[1] == influence[2] == pytest.approx(0)
    assert min(influence[0], influence[3]) > 0.01
    best = answers.judged(frozenset({1, 2}), target.config.layout, FLAT)
    # the fifth step has no more room than it needs: 1 + 5 · 4 = 21 tokens after 4 · (4 + 1)
    assert (best.max_draft, best.tokens_per_step) == (4, 5.0)
    assert best.acceptance == [1.0] * 4
    # two layers of four, of which the first is free: 4 drafted tokens take 4/3 plain steps
    assert best.speedup == pytest.approx(5 / (1 + 4 / 3))
    poor = answers.judged(frozenset({0, 3}), target.config.layout, FLAT)
    assert poor.max_draft == 1
    assert poor.speedup < 1


def plain(skip: Skip, speedup: float) -> Tried:
    return Tried(skip, [], 1, [], float(speedup))


def test_the_climb_reaches_the_top_of_a_smooth_hill():
    gains = [-3, 2, 1, -1, 2, -2]
    seen: list[Skip] = []

    def judge(skip: Skip) -> Tried:
        seen.append(skip)
        return plain(skip, sum(gains[layer] for layer in skip))

    order = [3, 1, 4, 0, 2, 5]
    told: list[tuple[str, int, int, str]] = []
    found = climb(judge, order, uniform(6, 1, 8), 100, lambda *said: told.append(said))
    assert max(found, key=lambda t: t.speedup).skip == {1, 2, 4}
    assert len(set(seen)) == len(seen) == len(found) < 2**6 - 2  # none twice, and not all of them
    assert told[-1][:3] == ("layers", len(found), 100)
    assert told[-1][3] == "predicted 5.00× at best"
    for tries in (1, 3, 8):
        assert len(climb(judge, order, uniform(6, 1, 8), tries)) == tries


def test_the_climb_leaves_no_layer_without_its_keys():
    layout = Layout(tuple(LayerKV(owner, 2) for owner in (0, 0, 2, 2)), 8)
    asked = [t.skip for t in climb(lambda skip: plain(skip, len(skip)), range(4), layout, 100)]
    assert frozenset({2, 3}) in asked
    for skip in map(sorted, asked):
        kept(layout, skip)
    possible = [
        set(skip)
        for n in (1, 2, 3)
        for skip in itertools.combinations(range(4), n)
        if not ((0 in skip and 1 not in skip) or (2 in skip and 3 not in skip))
    ]
    assert all(skip in possible for skip in asked)


def test_the_command_writes_what_the_drafter_reads(bench, checkpoint, private, capsys, monkeypatch):
    task = private / "task.jsonl"
    task.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("12 ab 12 ab", "one two one two")))
    file = private / "layers.json"
    words = [f"model.path={checkpoint}", f"task.path={task}", "task.max_new_tokens=12", "dtype=float32", "device=cpu"]
    words += ["threads=1", "layers.tries=3", "layers.max_draft=3"]
    monkeypatch.setattr("decodelab.experiments.layers.load_of_others", lambda: 1.5)
    assert main(["layers", *words, f"output={file}"]) == 0
    told = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["kind"], found["layers"], found["prompts"], found["tokens"]) == ("layer_skip", 2, 2, 24)
    assert found["skip"] in ([0], [1])
    assert len(found["acceptance"]) == found["max_draft"] <= 3
    assert f"written to {file}; drafting=layer_skip drafting.skip={file}" in told
    (note,) = found["notes"]
    assert note.startswith("other programs used the cores while T(k) was measured")
    assert f"note: {note}" in told
    assert ("none of them pays on this machine now: " in told) is (found["predicted_speedup"] <= 1)
    monkeypatch.setattr("decodelab.experiments.layers.load_of_others", lambda: 0.0)
    use = ["drafting=layer_skip", f"drafting.skip={file}", f"drafting.max_draft={found['max_draft']}"]
    assert main(["run", *words, *use, f"output={private / 'run'}"]) == 0
    result = json.loads((private / "run" / "result.json").read_text())
    assert result["exactness"]["verdict"] == "exact"
    assert result["strategy"]["tokens_per_step"] == pytest.approx(found["tokens_per_step"])
    assert result["warnings"] == []
    assert main(["check", *words[:-2], *use[:2], "drafting.max_draft=5"]) == 0
    best = found["max_draft"]
    assert f"drafts of {best}, and these are of 5: drafting.max_draft={best} does what" in capsys.readouterr().out
    for wrong, text in (
        ([f"output={file}"], "is there already: name another file, or delete that one"),
        ([f"output={private / 'no' / 'file'}"], "is in a folder that is not there: make"),
        ([], "layers writes a file: name it with output=FILE.json"),
        ([f"output={file}", "-m", "seed=1,2"], "layers is of one configuration: leave out the sweep"),
    ):
        assert main(["layers", *words, *wrong]) == 2
        assert text in capsys.readouterr().err

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("decodelab.experiments.layers.write_atomic", full)
    assert main(["layers", *words, f"output={private / 'other'}"]) == 2
    told = capsys.readouterr().err
    assert re.search(
        r"other cannot be written \(No space left.*\); found was drafting.skip=\[\d\] drafting.max_draft=", told
    )


@pytest.mark.parametrize("name", ["tries", "max_draft"])
def test_settings_out_of_range(name):
    with pytest.raises(UserError, match=re.escape(f"layers.{name} must be at least 1, got 0")):
        LayerSearch(**{name: 0})


def test_nothing_to_draft():
    with pytest.raises(UserError, match="no answer has a second token, so nothing could be drafted"):
        Answers(tiny_decoder(), [ask(PROMPTS[0], Greedy(), 1)], Greedy().law(), 4, 0)
