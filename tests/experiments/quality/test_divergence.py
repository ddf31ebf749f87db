"""KL to a reference run's predictions: its value, what is kept of it, where it degrades, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.signal import lfilter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decodelab.experiments.cli import main
from decodelab.experiments.quality.lm import DecodelabLM
from decodelab.experiments.quality.recorded import RECORDED, Top, read_recorded
from decodelab.experiments.statistics import worst_slice, worst_step
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.experiments.bench import Bench, strict

CHOICES = [
    {"id": f"c{i}", "question": f"{'ab'[i % 2]} and {i}?", "choices": [" ab", "12", f"{i} ab"], "answer": i % 3}
    for i in range(6)
]
MATHS = [
    {"id": f"m{i}", "question": f"what is {i} + 1?", "answer": f"{i + 1}", "solution": f"{i} + 1 = {i + 1}"}
    for i in range(6)
]
TEXTS = [{"id": f"t{i}", "text": ("one two three " * (i + 1)).strip()} for i in range(6)]
PROGRAM = [{"task_id": "h", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    pass\n"}]
KINDS = [
    {"id": f"{kind}{i}", "category": kind, "text": "".join(letters[(i * j) % 10] for j in range(1, 9 + i % 3))}
    for i in range(1, 13)
    for kind, letters in (("digits", "1234567890"), ("letters", "abcdefghij"))
]


def sharp(change: Callable[[PreTrainedModel], None] | None = None) -> PreTrainedModel:
    """A model that is as sure of its tokens as trained ones are."""
    model = tiny_model()
    model.lm_head.weight.data *= 16
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def shaken(model: PreTrainedModel) -> None:
    """All weights a little, as a quantiser does."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


class Exams:
    """`evaluate(output, *words)` is the command, with `quality.kl=true`, on one of two checkpoints and `tasks`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tasks: list[Path] = []

    def write(self, **files: Sequence[Mapping[str, Any]]) -> None:
        for name, rows in files.items():
            self.tasks.append(self.root / f"{name}.jsonl")
            self.tasks[-1].write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def evaluate(self, output: str, model: Path, *words: str) -> int:
        common = ["device=cpu", "threads=1", "quality.max_new_tokens=3", "quality.kl=true", f"model.path={model}"]
        dtype = [] if any(word.startswith("dtype") for word in words) else ["dtype=float32"]
        tasks = f"tasks=[{','.join(map(str, self.tasks))}]"
        return main(["evaluate", *common, *dtype, tasks, f"output={self.root / output}", *words])

    def quality(self, output: str) -> dict[str, Any]:
        return dict(strict((self.root / output / "result.json").read_text())["quality"])

    def rows(self, output: str) -> list[dict[str, Any]]:
        return [strict(line) for line in (self.root / output / "divergence.jsonl").read_text().splitlines()]


@pytest.fixture
def exams(bench: Bench) -> Exams:
    return Exams(bench.root)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "sharp", sharp())


# Numbers


def logits(rows: int, vocab: int, sharpness: float, seed: int = 0) -> torch.Tensor:
    return sharpness * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def full_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of all tokens apart, in float64."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def bounded_kl(p: torch.Tensor, q: torch.Tensor, k: int) -> torch.Tensor:
    """Of the k likeliest by p and of all others as one, in float64."""
    p, q = p.double().softmax(-1), q.double().softmax(-1)
    order = p.argsort(-1, descending=True)
    a, b = (
        torch.cat([x.gather(-1, order[:, :k]), x.gather(-1, order[:, k:]).sum(-1, keepdim=True)], -1) for x in (p, q)
    )
    return (a * (a / b).log()).sum(-1)


def test_kl_is_that_of_the_kept_tokens_and_a_rest_and_close_to_that_of_all():
    p = logits(50, 500, 4.0)
    q = p + logits(50, 500, 0.3, seed=1)
    found, whole = Top.of(p).kl(q), full_kl(p, q)
    torch.testing.assert_close(found, bounded_kl(p, q, 64), rtol=1e-4, atol=1e-6)
    assert (found <= whole + 1e-6).all()  # data processing
    assert found.mean() > 0.98 * whole.mean()


def test_kl_of_a_vocabulary_that_is_kept_whole_has_no_rest():
    p, q = logits(20, 40, 2.0), logits(20, 40, 2.0, seed=1)
    top = Top.of(p)
    assert top.others.isneginf().all()
    torch.testing.assert_close(top.kl(q), full_kl(p, q), rtol=1e-5, atol=1e-6)


def test_kl_to_itself_is_zero_exactly():
    p = logits(50, 500, 3.0)
    assert (Top.of(p).kl(p) == 0).all()
    assert (Top.of(p[:, :40]).kl(p[:, :40]) == 0).all()


def test_a_slice_that_lost_more_is_found_and_one_that_did_not_is_not():
    """Items of very different lengths, whose losses scatter by a factor, and tokens that are like the ones before them:
    hardly more than 5 % of false alarms, whatever is sliced by."""
    rng = np.random.default_rng(0)
    sizes = np.array([1, 2, 3, 30, 100] * 12, dtype=float)
    by_chance = ["ab"[i % 2] for i in range(60)]
    by_length = ["long" if size > 9 else "short" for size in sizes]
    alarms = {"chance": 0, "length": 0, "step": 0}
    items = np.repeat(np.arange(60), sizes.astype(int))
    steps = np.concatenate([np.arange(int(size)) for size in sizes])
    by_step = ["late" if step > 3 else "early" for step in steps]
    for _ in range(100):
        run = lfilter([0.8], [1, -0.6], rng.normal(0, 1, len(items)))
        tokens = np.exp(1.5 * run) * rng.lognormal(0, 0.3, 60)[items]
        totals = np.bincount(items, tokens)
        for name, found in (
            ("chance", worst_slice(totals, sizes, by_chance, draws=199)),
            ("length", worst_slice(totals, sizes, by_length, draws=199)),
            ("step", worst_step(tokens, items, by_step, draws=199)),
        ):
            assert found is not None
            alarms[name] += found.p < 0.05
    assert all(count <= 12 for count in alarms.values()), alarms

    found = worst_slice(totals * np.where(np.array(by_chance) == "b", 4, 1), sizes, by_chance)
    assert found is not None
    assert (found.name, found.p < 0.01) == ("b", True)
    assert found.share > 0.65
    assert found.size == pytest.approx(sizes[1::2].sum() / sizes.sum())
    found = worst_step(tokens * np.where(steps < 4, 3, 1), items, by_step)
    assert found is not None
    assert (found.name, found.p < 0.01) == ("early", True)
    assert found.size == pytest.approx(np.mean(steps < 4))


def test_no_slice_is_worst_where_nothing_was_lost_or_there_is_one_slice():
    ones = np.ones(6)
    assert worst_slice(np.zeros(10), np.ones(10), list("ababababab")) is None
    assert worst_slice(np.ones(10), np.ones(10), list("aaaaaaaaaa")) is None
    assert worst_slice(np.arange(10.0), np.ones(10), list("aaaaabbbbb")) is not None
    assert worst_slice(np.arange(9.0), np.ones(9), list("aaaabbbbb")) is None  # so few tell nothing
    assert worst_step(0 * ones, np.arange(6), list("ababab")) is None
    assert worst_step(ones, np.arange(6), list("aaaaaa")) is None


# Runs


def test_a_run_against_itself_and_in_another_dtype(exams: Exams, model: Path, capsys: pytest.CaptureFixture[str]):
    exams.write(choices=CHOICES, maths=MATHS, texts=TEXTS, program=PROGRAM)
    assert exams.evaluate("full", model) == 0
    recorded = exams.quality("full")["recorded"]
    assert (recorded["items"], recorded["skipped"]) == (19, 0)
    assert exams.quality("full")["divergence"] is None
    made = read_recorded(exams.root / "full")
    assert (exams.root / "full" / RECORDED).stat().st_size < 700 * len(made.top.choice) + 10_000  # llm-compressor#2031

    # what a model is led through, as text
    tokenizer = AutoTokenizer.from_pretrained(model)
    read = {
        gold.about["id"]: [tuple(map(tokenizer.decode, passage)) for passage in gold.passages] for gold in made.golds
    }
    assert read["c1"] == [("Question: b and 1?\nAnswer:", " 12")]
    assert read["m2"] == [("Question: what is 2 + 1?\nAnswer:", " 2 + 1 = 3")]
    assert read["t1"] == [("<|im_start|>", "one two three one two three")]
    assert [gold.about["answer"] for gold in made.golds] == ["gold"] * 18 + ["own"]
    said = [strict(line) for line in (exams.root / "full" / "quality.jsonl").read_text().splitlines()][-1]["response"]
    assert read["h"] == [("def f():\n", said)]

    assert exams.evaluate("again", model, f"against={exams.root / 'full'}") == 0
    found = exams.quality("again")["divergence"]
    assert {key: found[key] for key in ("items", "skipped", "unpaired", "own")} == {
        "items": 19, "skipped": 0, "unpaired": 0, "own": 1,
    }  # fmt: skip
    for one in (found, *found["tasks"].values()):
        assert {one["kl"][key] for key in ("value", "p50", "p99", "max")} == {0}
        assert one["agreement"]["value"] == 1
    assert found["agreement"]["low"] == pytest.approx(0.832, abs=1e-3)  # 19 items that agree prove no more
    assert found["where"] == []
    assert not (exams.root / "again" / RECORDED).exists()

    capsys.readouterr()
    assert exams.evaluate("half", model, f"against={exams.root / 'full'}", "dtype=bfloat16") == 0
    half = exams.quality("half")["divergence"]
    assert 0 < half["kl"]["value"] < 0.01
    # the reference told beforehand what rounding alone would do
    floor = half["floor"]
    assert floor == recorded["floor"]
    assert floor["dtypes"] == ["bfloat16", "float32"]
    assert (floor["kl"], floor["agreement"]) == pytest.approx((half["kl"]["value"], half["agreement"]["value"]))
    printed = capsys.readouterr().out
    assert re.search(r"maths +\S+ \[\S+, \S+\] +\S+ +\S+ +\S+ +\d+(\.\d+)? %", printed)
    assert re.search(r"rounding alone: KL \S+, \S+ % \(bfloat16 against float32 of", printed)
    assert re.search(r"by task +\w+ +\d+ % +\d+ %", printed)


def test_kl_is_of_the_answer_alone_and_little_of_few_tokens(
    exams: Exams, model: Path, capsys: pytest.CaptureFixture[str]
):
    """A gold answer ends where the model would be cut; one that is only the end of a text is none."""
    said = {"a": "12<|im_end|>", "b": "<|im_end|>"}
    exams.write(ended=[{"id": key, "question": "q?", "answer": "12", "solution": text} for key, text in said.items()])
    program = {"id": "p", "task_id": 1, "text": "add", "code": "x = 1", "test_list": ["assert x"]}
    exams.write(programs=[program])
    assert exams.evaluate("full", model) == 0
    made = read_recorded(exams.root / "full")
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = {gold.about["id"]: tokenizer.decode(gold.passages[0][1]) for gold in made.golds}
    assert (answers, made.skipped) == ({"a": " 12", "p": "x = 1"}, 1)
    assert exams.evaluate("again", model, f"against={exams.root / 'full'}") == 0
    told = " ".join(capsys.readouterr().out.split())
    ended, programs = (gold.tokens for gold in made.golds)
    assert f"KL means little of fewer than 32 tokens of gold answers: ended ({ended}), programs ({programs})" in told


def test_kl_of_perturbed_weights_is_that_of_transformers_logits(exams: Exams, model: Path):
    other = save_folder(exams.root / "shaken", sharp(shaken))
    exams.write(choices=CHOICES, maths=MATHS)
    assert exams.evaluate("full", model) == 0
    assert exams.evaluate("less", other, f"against={exams.root / 'full'}") == 0
    first, second = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (model, other))
    want, whole, flips = {}, {}, {}
    for gold in read_recorded(exams.root / "full").golds:
        ((context, answer),) = gold.passages
        with torch.inference_mode():
            tokens = torch.tensor([[*context, *answer[:-1]]])
            p, q = (m(tokens).logits[0, len(context) - 1 :] for m in (first, second))
        want[gold.about["id"]] = bounded_kl(p, q, 64)
        whole[gold.about["id"]] = full_kl(p, q)
        flips[gold.about["id"]] = int((p.argmax(-1) != q.argmax(-1)).sum())
    found, rows = exams.quality("less")["divergence"], exams.rows("less")
    kl = torch.cat(list(want.values()))
    assert found["kl"]["value"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found["kl"]["value"] > 0.95 * float(torch.cat(list(whole.values())).mean())
    assert found["kl"]["low"] < found["kl"]["value"] < found["kl"]["high"]
    assert found["kl"]["max"] == pytest.approx(float(kl.max()), rel=1e-3)
    assert found["kl"]["p99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert found["agreement"]["value"] == 1 - sum(flips.values()) / len(kl)
    assert [row["kl"] for row in rows] == sorted((row["kl"] for row in rows), reverse=True)
    for row in rows:
        one = want[row["id"]]
        assert (row["kl"], row["worst"]["kl"]) == pytest.approx(
            (float(one.mean()), float(one.max())), rel=1e-3, abs=1e-6
        )
        assert (row["flips"], row["worst"]["step"]) == (flips[row["id"]], int(one.argmax()) + 1)
    worst = next(row["worst"] for row in rows if row["id"] == "m3")
    answer = " 3 + 1 = 4"
    assert worst["before"] == f"estion: what is 3 + 1?\nAnswer:{answer[: worst['step'] - 1]}"[-24:]
    assert worst["token"] == answer[worst["step"] - 1]
    assert 0 < worst["here"]["p"] <= 1


def test_a_category_made_worse_is_found_and_an_even_loss_is_not(exams: Exams, model: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))

    def planted(weights: PreTrainedModel) -> None:
        shaken(weights)
        weights.model.embed_tokens.weight[digits] += 0.1 * torch.randn(
            10, 32, generator=torch.Generator().manual_seed(2)
        )

    found = {}
    mixed = [row | {"category": "xyyx"[i % 4]} for i, row in enumerate(KINDS)]  # as many of either kind
    for name, change, rows in (("even", shaken, mixed), ("planted", planted, KINDS)):
        exams.tasks.clear()
        exams.write(kinds=rows)
        assert exams.evaluate(f"full-{name}", model) == 0
        folder = save_folder(exams.root / f"{name}-model", sharp(change))
        assert exams.evaluate(name, folder, f"against={exams.root / f'full-{name}'}") == 0
        found[name] = {row["by"]: row for row in exams.quality(name)["divergence"]["where"]}
    worst = found["planted"]["category"]
    assert worst["name"] == "digits"
    assert worst["p_holm"] < 0.05
    assert worst["share"] > worst["size"] + 0.15
    assert worst["size"] == pytest.approx(0.5)
    assert found["even"]["category"]["p_holm"] > 0.05
    assert "task" not in found["planted"]  # one task has no worst


def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(
    exams: Exams, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    exams.write(maths=MATHS)
    full, against = exams.root / "full", f"against={exams.root / 'full'}"
    assert exams.evaluate("full", model) == 0
    file = full / RECORDED

    def refused() -> str:
        capsys.readouterr()
        assert exams.evaluate("other", model, against) == 2
        assert not (exams.root / "other").exists()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
        return line

    monkeypatch.setattr("decodelab.experiments.lab.load_decoder", None)  # whoever loads a model stumbles
    whole = file.read_bytes()
    file.unlink()
    assert f"{full} holds no {RECORDED}: run it again with quality.kl=true and without against" in refused()
    file.write_bytes(whole[: len(whole) // 2])
    assert re.search(rf"{file} cannot be read \(.*\): run it again with quality.kl=true", refused())
    file.write_bytes(b"{}")
    assert f"{file} cannot be read" in refused()

    tensors = load_file_of(whole, file)
    with safe_open(file, "pt") as stored:
        about = dict(stored.metadata())
    for changes, text in (
        ({"key": "another"}, f"{full} holds the predictions of another run (another, not "),
        ({"tokenizer": "another"}, f"not comparable with {full} token by token: its tokenizer is another one"),
        ({"vocab": "500"}, "(500 tokens there, 262 here)"),
        ({"schema": "0"}, f"{file} cannot be read (schema 0, and this version reads 1): run it again"),
        ({"golds": "[]"}, f"{file} cannot be read"),
    ):
        save_file(tensors, file, about | changes)
        assert text in refused()
    for change, text in (
        ({"choice": tensors["choice"][1:]}, "its answers and its predictions do not fit"),
        ({"logp": tensors["logp"][:, 1:].contiguous()}, "its answers and its predictions do not fit"),
        ({"logp": tensors["logp"] * torch.nan}, "its probabilities do not sum to 1"),
        ({"others": tensors["others"] + 1}, "its probabilities do not sum to 1"),
        ({"logp": tensors["logp"].half()}, "its probabilities are not in float32"),
        ({"ids": tensors["ids"] + 262}, "its tokens are not all among the 262 of its vocabulary"),
        ({"tokens": tensors["tokens"] - 300}, "its tokens are not all among the 262 of its vocabulary"),
        ({"passages": tensors["passages"].float()}, "its passages have no lengths"),
        ({"passages": tensors["passages"][:, :2].contiguous()}, "cannot be read"),
    ):
        save_file(tensors | change, file, about)
        assert text in refused()

    file.write_bytes(whole)
    exams.tasks[0].write_text("".join(f"{json.dumps(row | {'question': 'else?'})}\n" for row in MATHS))
    assert "not comparable with" in (told := refused())
    assert "quality.allow=[task" in told


def load_file_of(content: bytes, file: Path) -> dict[str, torch.Tensor]:
    file.write_bytes(content)
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def test_other_rows_are_left_out_and_no_row_in_common_is_told(
    exams: Exams, model: Path, capsys: pytest.CaptureFixture[str]
):
    exams.write(maths=MATHS)
    assert exams.evaluate("full", model) == 0
    against = [f"against={exams.root / 'full'}", "quality.allow=[task,template]"]
    exams.tasks[0].write_text("".join(f"{json.dumps(row)}\n" for row in [*MATHS[4:], MATHS[0] | {"question": "new?"}]))
    assert exams.evaluate("some", model, *against) == 0
    found = exams.quality("some")["divergence"]
    assert (found["items"], found["unpaired"], found["kl"]["value"]) == (2, 4, 0)
    exams.tasks[0].write_text(json.dumps(MATHS[0] | {"question": "new?"}) + "\n")
    assert exams.evaluate("none", model, *against) == 0
    assert exams.quality("none")["divergence"] is None
    assert "token by token: no answer is in both runs" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_reading_is_done_again_and_nothing_is_asked_twice(
    exams: Exams, model: Path, monkeypatch: pytest.MonkeyPatch
):
    exams.write(maths=MATHS)
    asked: list[Any] = []
    honest, generate = DecodelabLM.foretold, DecodelabLM._generate

    def interrupted(self: DecodelabLM, context: Sequence[int], answer: Sequence[int]) -> Any:
        asked.append(answer)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return honest(self, context, answer)

    monkeypatch.setattr(DecodelabLM, "foretold", interrupted)
    assert exams.evaluate("full", model) == 130
    quality = exams.quality("full")
    assert quality["interrupted"] is True
    assert quality["recorded"] is None
    assert quality["tasks"]["maths"]["n"] == 6
    assert not (exams.root / "full" / RECORDED).exists()

    monkeypatch.setattr(DecodelabLM, "_generate", None)
    assert exams.evaluate("full", model) == 0
    assert exams.quality("full")["recorded"]["items"] == 6

    monkeypatch.setattr(DecodelabLM, "_generate", generate)
    asked.clear()
    shutil.copytree(exams.root / "full", exams.root / "kept")
    against = f"against={exams.root / 'kept'}"
    assert exams.evaluate("less", model, against) == 130
    assert exams.quality("less")["divergence"] is None
    assert not (exams.root / "less" / "divergence.jsonl").exists()
    assert exams.evaluate("less", model, against) == 0
    assert exams.quality("less")["divergence"]["kl"]["value"] == 0


def test_memory_without_room_for_a_second_model_is_told(
    exams: Exams, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    exams.write(maths=MATHS)
    monkeypatch.setattr("decodelab.experiments.hardware.available_memory", lambda device: 1000)
    assert exams.evaluate("full", model) == 0
    assert exams.quality("full")["recorded"]["floor"] is None
    assert "no noise floor of KL: the weights in bfloat16 do not fit beside" in capsys.readouterr().out
