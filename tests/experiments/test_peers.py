"""`decodelab peers`: who races in which order, what gates a speed, what is printed and kept."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from decodelab.cache_dir import cache_dir
from decodelab.experiments import hardware
from decodelab.experiments.cli import main
from decodelab.experiments.compare_hf import HfPeer, Turn
from decodelab.experiments.exactness import Divergence
from decodelab.experiments.peers import llama, resident
from decodelab.experiments.peers.bars import Facts, bars
from decodelab.experiments.peers.findings import Race, findings
from decodelab.experiments.peers.ours import Ours
from decodelab.experiments.peers.race import Contender, Forward, Measured, Prompt, race
from decodelab.experiments.statistics import Interval
from decodelab.kernels import native
from decodelab.tests.experiments.bench import ROWS, Bench, strict
from decodelab.tests.experiments.tiny_lab import tiny_lab

SWEEP = "sweep=[{drafting: none, quantization: [none, w8a8]}, {drafting: prompt_lookup}, %s]"


@pytest.fixture
def peers(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The command on the tiny model; `found()` is what it wrote."""
    monkeypatch.setattr(hardware, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    draft = f"{{drafting: draft_model, drafting.model.path: '{bench.checkpoint}'}}"

    def run(*words: str) -> int:
        task = bench.root / "task.jsonl"
        task.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        fixed = [f"model.path={bench.checkpoint}", f"task.path={task}", f"output={bench.folder}", "device=cpu"]
        fixed += ["dtype=float32", "threads=1", "task.max_new_tokens=8", "task.limit=3", "peers.resident=false"]
        fixed += ["peers.assisted=[2]", "peers.lookup=[3]", "peers.rounds=1", SWEEP % draft]
        given = {word.partition("=")[0] for word in words}
        return main(["peers", *[w for w in fixed if w.partition("=")[0] not in given], *words])

    run.found = lambda: strict((bench.folder / "peers.json").read_text())  # type: ignore[attr-defined]
    run.folder = bench.folder  # type: ignore[attr-defined]
    return run


OURS = ["plain", "plain w8a8-8", "prompt_lookup", "draft_model"]
THEIRS = ["transformers", "transformers lookup 3", "transformers assisted 2", "transformers assisted"]


def test_cells_race_beside_transformers(peers, capsys: pytest.CaptureFixture[str]):
    assert peers("peers.rounds=2") == 0
    told = capsys.readouterr().out
    (done,) = peers.found()["races"]
    rows = done["contenders"]
    assert list(rows) == OURS + THEIRS
    assert [rows[name]["output"]["verdict"] for name in OURS] == ["exact"] * 4
    assert [rows[name]["output"]["identical"] for name in THEIRS] == [3] * 4
    assert rows["draft_model"]["tokens_per_step"] > 2  # the target drafts for itself
    assert rows["plain"]["tokens_per_step"] == rows["transformers"]["tokens_per_step"] == 1
    assert set(done["ratios"]) == set(OURS)
    assert set(done["ratios"]["plain"]) == set(THEIRS)
    assert list(done["forwards"]) == ["ours float32", "ours w8a8-8", "transformers"]
    assert all(len(one["samples"]["8"]) == 6 for one in done["forwards"].values())
    assert 0 < done["outside"]["plain"]["share"]["value"] < 1
    turns = [json.loads(line) for line in (peers.folder / "turns.jsonl").read_text().splitlines()]
    assert len(turns) == 2 * 3 * 8
    assert [t["contender"] for t in turns[:8]] == OURS + THEIRS
    assert [t["contender"] for t in turns[8:16]] == [*OURS[1:], *THEIRS, OURS[0]]  # another one first
    assert "llama.cpp was not measured: llama-cpp-python is not installed: pip install 'decodelab[peers]'" in (
        " ".join(told.split())
    )
    assert "so this is no race: unset it" in " ".join(told.split())  # tests' threads sleep
    assert max(len(line) for line in told.splitlines() if not line.startswith("written to")) <= 80
    for line in (
        "plain w8a8-8",
        "draft_model ÷ transformers assisted",
        "T(8) ÷ T(1)",
        "read bandwidth 10.0 GB/s",
        "must be",
        " missed",
    ):
        assert line in told


def test_a_broken_output_has_no_speed(peers, sabotage, capsys: pytest.CaptureFixture[str]):
    sabotage()
    assert peers("sweep=[{drafting: none}, {drafting: prompt_lookup}]") == 1
    (done,) = peers.found()["races"]
    broken = done["contenders"]["prompt_lookup"]
    assert broken["output"]["verdict"] == "broken"
    assert broken["tokens_per_second"] is broken["ttft_s"] is broken["tpot_s"] is None
    assert list(done["ratios"]) == ["plain"]
    told = capsys.readouterr().out
    assert re.search(r"prompt_lookup +– +– +– +– +– +broken", told)
    assert "prompt_lookup has no speed: its output is NOT the plain decoder's" in told


def test_an_interrupt_keeps_what_was_measured(peers, monkeypatch, capsys: pytest.CaptureFixture[str]):
    honest, calls = HfPeer.generate, []

    def generate(self: HfPeer, mode: str, *rest: Any) -> Turn:
        calls.append(mode)
        if len(calls) == 2 * 2 + 2 + 1:  # warmed up twice, once itself; the second prompt
            raise KeyboardInterrupt
        return honest(self, mode, *rest)

    monkeypatch.setattr(HfPeer, "generate", generate)
    assert peers("sweep=[{drafting: none, seed: [0, 1]}]", "peers.lookup=[3]", "-m", "task.max_new_tokens=8,6") == 130
    (done,) = peers.found()["races"]
    assert done["interrupted"]
    assert done["prompts"] == 1
    assert list(done["contenders"])[:2] == ["plain", "plain #2"]
    assert "interrupted after 1 prompt, 1 race not begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["batch=2"], r"peers times single prompts on the model's own attention, alone: leave batch=2 out"),
        (["replay=x"], "leave replay out"),
        (["acceptance=sampling"], "peers compares greedy decoding alone: take acceptance=greedy"),
        (["peers.llama=true"], r"peers\.llama=true, but llama-cpp-python is not installed"),
        (["peers.llama=maybe"], r"peers\.llama"),
        (["peers.rows=[8]"], r"peers\.rows needs 1, the plain step"),
        (["peers.assisted=[2,2]"], r"peers\.assisted lists different numbers of at least 1"),
        (["task.max_new_tokens=120"], r"the prompt has \d+ tokens, task.max_new_tokens=120, and the context holds 128"),
        (["peers.rows=[1,900]"], r"peers.rows=900 behind \d+ tokens, and the context holds 128: take fewer rows"),
        (["-m", "threads=1,2"], "threads is one for all cells of peers"),
    ],
)
def test_what_is_refused_in_one_line(peers, words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert peers(*words) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(err) == 1
    assert re.search(said, err[0])


def test_models_that_do_not_fit_together_are_refused(peers, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(hardware, "available_memory", lambda device: 1000)
    assert peers() == 2
    assert re.search(r"peers holds all models at once, .* are more than the 1000 B", capsys.readouterr().err)
    assert not peers.folder.exists()


def one(name: str, whose: Any = "ours", kind: Any = "plain", low_bit: bool = False, **more: Any) -> Contender:
    """Of ours, broken wherever its output leaves the plain decoder's."""
    if whose == "ours":
        more["verdict"] = lambda left, prompts: "broken" if left else "exact"
    run = more.pop("run", lambda prompt: Turn([1, 2, 3], 1, 1.0, 1.0, 2))
    return Contender(name, whose, kind, low_bit, name, "", run, **more)


def test_a_turn_each_and_another_one_first():
    order: list[str] = []
    names = ("a", "b", "c")

    def runs(name: str) -> Contender:
        return one(name, run=lambda prompt: order.append(name + prompt.id) or Turn([1], 1, 1.0, 0.0, 0))

    prompts = [Prompt("0", (1,)), Prompt("1", (1,))]
    timed: list[int] = []
    forward = Forward("f", "ours", False, lambda k: timed.append(k) or float(len(timed)))
    out = race(
        [runs(name) for name in names],
        [forward],
        prompts,
        rounds=2,
        rows=(1, 8),
        bandwidth=lambda: float(len(order)),
        progress=lambda *said: None,
        after=lambda *said: None,
    )
    assert order == ["a0", "b0", "c0", "b1", "c1", "a1", "b0", "c0", "a0", "c1", "a1", "b1"]
    assert out.bandwidth == [0.0, 6.0, 12.0]
    assert timed[:7] == [1, 1, 8, 1, 8, 1, 8]
    assert out.forwards["f"][8] == [5.0, 12.0, 19.0, 26.0]  # each the middle one of three


def finding(contenders: list[Contender], turns: dict[str, dict[str, list[Turn]]], **left: Any) -> dict[str, Any]:
    forwards = [Forward(c.name, c.whose, c.low_bit, lambda k: 1.0) for c in contenders]
    seconds = {c.name: {1: [0.5], 8: [1.0]} for c in contenders}
    read = dict.fromkeys(turns, 100.0)
    held = Race(contenders, forwards, 10, {"p": 20, "q": 30}, read, large=True)
    return findings(
        held, Measured(turns, seconds, [100.0, 200.0, 900.0], {c.name: left.get(c.name, {}) for c in contenders})
    )


def test_the_arithmetic():
    mine, theirs = one("mine"), one("theirs", "transformers", same_as="mine")
    turns = {
        "mine": {
            "p": [Turn([1] * 5, 1, 2.0, 2.0, 4, 1.5), Turn([1] * 5, 1, 4.0, 2.0, 4, 1.5)],
            "q": [Turn([1], 1, 1.0, 0.0, 0)],
        },
        "theirs": {"p": [Turn([1] * 5, 1, 6.0, 12.0, 4)], "q": [Turn([2], 1, 4.0, 0.0, 0)]},
    }
    found = finding([mine, theirs], turns)
    row = found["contenders"]["mine"]
    assert row["tpot_s"] == 0.5  # 4 s for 8 tokens
    assert row["ttft_s"] == 2.0
    assert row["prefill_tokens_per_second"] == 50 / 4
    assert found["contenders"]["theirs"]["output"]["identical"] == 1
    ratio = found["ratios"]["mine"]["theirs"]
    assert ratio["decode"]["value"] == 6.0  # 3 s a token; q has none
    assert ratio["prefill"]["value"] == 10 / 4
    assert found["bandwidth"]["median"] == 200.0
    assert found["bandwidth"]["share"]["mine"]["value"] == 1.0  # 100 bytes in 0.5 s
    assert found["outside"]["mine"] == {"share": {"value": 0.25, "low": None, "high": None, "n": 2}, "bare": 1.0}


def test_a_broken_targets_forwards_meet_no_bar():
    turns = {name: {"p": [Turn([1, 2], 1, 1.0, 1.0, 1)]} for name in ("mine", "theirs")}
    pair = [one("mine"), one("theirs", "transformers")]
    assert any("8 rows" in bar["what"] for bar in finding(pair, turns)["bars"])
    found = finding(pair, turns, mine={"p": Divergence("p", 0, 1, 2)})
    assert found["bars"] == []
    assert found["ratios"] == {}


def test_bars_take_the_fastest_of_each_kind():
    """And the best of the peers."""
    tpot = {"plain": 1.0, "low": 0.5, "draft": 0.4, "lookup": 0.2, "hf": 3.0, "hf 3": 2.0, "hf 5": 1.0, "hf l": 0.3}
    tpot |= {"llama": 0.4, "llama l": 0.8}
    entries = [
        one("plain"),
        one("low", low_bit=True),
        one("draft", kind="draft"),
        one("lookup", kind="lookup", low_bit=True),
    ]
    entries += [one("hf", "transformers"), one("hf 3", "transformers", "draft"), one("hf 5", "transformers", "draft")]
    entries += [one("hf l", "transformers", "lookup"), one("llama", "llama.cpp"), one("llama l", "llama.cpp", "lookup")]

    def ratio(a: Contender, b: Contender) -> Interval:
        return Interval(tpot[b.name] / tpot[a.name], None, None, 1)

    whole = Interval(0.8, None, None, 1)
    seconds = {"plain": {1: [1.0], 8: [1.0]}, "low": {1: [0.5], 8: [0.9]}, "hf": {8: [2.0]}, "llama": {8: [1.8]}}
    forwards = [
        Forward(name, who, name == "low", lambda k: 1.0)
        for name, who in (("plain", "ours"), ("low", "ours"), ("hf", "transformers"), ("llama", "llama.cpp"))
    ]
    for large in (True, False):
        facts = Facts(entries, tpot, ratio, ratio, forwards, seconds, {"plain": whole}, {"plain": whole}, large)
        found = {(bar.what, bar.ours, bar.theirs): (bar.value.value, bar.met) for bar in bars(facts)}
        expected = {
            ("a draft model", "draft", "hf 5"): (2.5, True),
            ("prompt lookup", "lookup", "hf l"): (pytest.approx(1.5), True),
            ("prompt lookup", "lookup", "llama"): (2.0, True),
            ("prefill", "plain", "llama"): (0.4, False),
            ("prefill", "low", "llama"): (0.8, False),
            ("plain decoding", "low", "llama"): (0.8, False),
            ("8 rows in one forward", "plain", "hf"): (2.0, True),
            ("8 rows in one forward", "low", "llama"): (2.0, False),
            ("T(8) ÷ T(1)", "low", None): (1.8, False),
            ("outside the arithmetic", "plain", None): (0.8, False),
        }
        expected[("of the read bandwidth", "plain", None) if large else ("plain decoding", "plain", "hf")] = (
            (0.8, True) if large else (3.0, True)
        )
        assert found == expected


class Fake:
    """llama_cpp.Llama, as far as it is used: it counts up from the prompt's last token, whatever is drafted."""

    def __init__(self, path: str, **options: Any) -> None:
        self.options, self.draft_model, self.n_tokens, self.resets = options, None, 0, 0
        self.scores = np.zeros((64, 100))
        self.fed: list[int] = []

    def n_vocab(self) -> int:
        return 100

    def reset(self) -> None:
        self.n_tokens, self.resets = 0, self.resets + 1

    def eval(self, tokens: list[int]) -> None:
        self.fed.append(len(tokens))
        self.n_tokens += len(tokens)

    def generate(self, tokens: list[int], **options: Any):
        assert self.n_tokens == 0
        self.n_tokens, last = len(tokens), tokens[-1]
        while True:
            yield (last := last + 1)
            if self.draft_model is not None:
                self.draft_model(np.array(tokens))
                yield (last := last + 1)


def test_llama_cpp_is_driven_so(monkeypatch: pytest.MonkeyPatch):
    lookup = SimpleNamespace(LlamaPromptLookupDecoding=lambda num_pred_tokens: lambda ids: ids)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Fake))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)
    peer = llama.LlamaPeer.build(Path("m.gguf"), 2, 30, {"llama.cpp lookup 3": 3})
    assert list(peer.modes) == ["plain", "llama.cpp lookup 3"]
    assert peer.plain.options["n_threads"] == peer.verifying.options["n_threads_batch"] == 2
    assert not peer.plain.options["logits_all"]
    assert peer.verifying.options["n_ctx"] >= 33
    assert peer.generate("plain", [5, 6], 4).tokens == [7, 8, 9, 10]
    run = peer.generate("llama.cpp lookup 3", [5, 6], 9, eos_ids=(9,))
    assert (run.tokens, run.first, run.steps) == ([7, 8, 9], 1, 1)
    forward = peer.forward(10, 8)
    assert forward(8) > 0
    assert forward(1) > 0
    assert peer.verifying.fed == [10, 8, 1]
    assert peer.verifying.n_tokens == 10
    peer.generate("llama.cpp lookup 3", [5, 6], 4)
    forward(1)
    assert peer.verifying.fed[3:] == [10, 1]  # what stood behind it is gone


def test_when_llama_cpp_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama, "find_spec", lambda name: None)
    assert "not installed" in str(llama.absent(Path("m.gguf")))
    monkeypatch.setattr(llama, "find_spec", lambda name: "there")
    assert "reads GGUF files" in str(llama.absent(None))
    assert llama.absent(Path("m.gguf")) is None
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "spin against each other" in str(llama.absent(Path("m.gguf")))


def test_llama_cpp_itself():
    """Where it is installed and the model is in the cache: prompt lookup gives its greedy tokens in fewer steps."""
    pytest.importorskip("llama_cpp")
    file = cache_dir() / "models" / "smollm2-135m" / "smollm2-135m.gguf"
    if not file.is_file():
        pytest.skip("smollm2-135m is not in the cache")
    peer = llama.LlamaPeer.build(file, 1, 96, {"llama.cpp lookup 3": 3})
    prompt = [28, 216, 33, 216, 34, 216] * 6
    plain, lookup = (peer.generate(mode, prompt, 16) for mode in peer.modes)
    assert len(plain.tokens) == 16
    assert lookup.tokens == plain.tokens
    assert lookup.steps < plain.steps == 15
    assert peer.forward(40, 8)(8) > 0


def test_arithmetic_is_what_our_kernels_took_behind_the_first_token(monkeypatch: pytest.MonkeyPatch):
    lab = tiny_lab()
    clock = iter([3.0, 3.25])
    monkeypatch.setattr(native, "seconds", lambda: next(clock))
    monkeypatch.setattr(type(lab.target), "implementation", {"attention": "native"})
    assert Ours(lab, 4, 0, {}).run(Prompt("a", (5, 9, 7), ())).arithmetic_s == 0.25


def test_resident_memory_is_what_the_model_added(peers, monkeypatch: pytest.MonkeyPatch):
    told = iter([resident.Resident(before=100, peak=350, weights=150, kv=50), "no memory left"])
    monkeypatch.setattr(resident, "measured", lambda *_: next(told))
    assert peers("peers.resident=true", "peers.rounds=1", "sweep=[{drafting: none, quantization: [none, w8a8]}]") == 0
    (done,) = peers.found()["races"]
    (bar,) = [bar for bar in done["bars"] if bar["what"] == "resident ÷ weights and KV"]
    assert (bar["value"]["value"], bar["met"]) == (1.25, True)
    (left,) = [note for note in done["notes"] if "resident" in note]
    assert left.endswith(": no memory left")
    assert "resident ÷ weights and KV" in (peers.folder / "peers.txt").read_text(encoding="utf-8")


def test_a_process_that_fails_says_why():
    assert "/nowhere" in str(resident.measured(["model.path=/nowhere"], [], 1))


def test_resident_memory_is_of_a_model_that_decodes(bench: Bench, capsys: pytest.CaptureFixture[str]):
    task = bench.root / "task.jsonl"
    task.write_text(json.dumps(ROWS[0]))
    words = [
        f"model.path={bench.checkpoint}",
        "dtype=float32",
        "device=cpu",
        "task.max_new_tokens=4",
        f"task.path={task}",
    ]
    assert resident.main(json.dumps([words, [], 1])) == 0
    found = json.loads(capsys.readouterr().out)
    assert min(found["peak"], found["before"]) > 10_000_000
    assert found["kv"] > 0
    (file,) = bench.checkpoint.glob("*.safetensors")
    parameters = sum(tensor.numel() for tensor in load_file(file).values())
    assert found["weights"] == 4 * parameters
