"""`decodelab train train=kv`: a model for another attention, from plain texts or its own answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from decodelab.decoding import training
from decodelab.experiments.cli import main
from decodelab.experiments.format import CHANGED, TRAINED, UNTRAINED
from decodelab.tests.experiments.trainings import words as usual

TEXTS = [
    *({"text": f"{n} ab {n} ab {n} ab {n} ab {n}"} for n in range(20)),
    *({"prompt": f"say {n}", "response": f"{n} ab {n}"} for n in range(4)),
]


def words(bench: Any, output: str, *more: str, texts: bool = True) -> list[str]:
    file = bench.root / "texts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in TEXTS))
    read = [f"train.texts=[{file}]"] if texts else []
    return [*usual(bench, "kv", output), "train.schedule.longest=24", "train.schedule.learning_rate=0.01", *read, *more]


def course(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "course.json").read_text())["rows"])


def test_plain_texts_are_learnt_from(bench: Any, capsys: pytest.CaptureFixture[str]):
    """Judged before the first step, and nearer behind the last; what is written runs as any model."""
    assert main(words(bench, "out", "attention=cross_layer")) == 0
    (said, went), folder = capsys.readouterr(), bench.root / "out"
    assert "judged on 2 others" in said
    assert "judging 0/2, texts kept back; not of train.schedule.minutes" in went
    assert f"use it:\ndecodelab run model.path={folder}\n" in said
    rows = course(folder)
    assert rows[0]["step"] == 0
    assert "loss" not in rows[0]
    assert rows[-1]["kl"] < rows[0]["kl"]
    assert {"loss_output", "loss_hidden"} <= rows[1].keys()
    assert not (folder / "answers.jsonl").read_text()
    assert bench.run(f"model.path={folder}", "timing=untimed", "drafting=prompt_lookup") == 0
    assert bench.result["exactness"]["verdict"] == "exact"
    assert [w for w in bench.result["warnings"] if "train=kv" in w] == [TRAINED]
    assert main(["check", f"model.path={folder}", "attention=cross_layer", "attention.share=1"]) == 2
    assert "layer 1 would have keys of its own, but its weights have none" in capsys.readouterr().out
    assert main(["check", f"model.path={folder}", "compare_hf=true"]) == 2
    assert "transformers has no words for the layout of out: leave compare_hf out" in capsys.readouterr().out


def test_answers_are_learnt_from(bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "out", "attention=mqa", "train.schedule.epochs=1", texts=False)) == 0
    assert "6 texts, judged on 2 others" in capsys.readouterr().out
    assert json.loads((bench.root / "out" / "config.json").read_text())["num_key_value_heads"] == 1


def test_what_was_broken_off_goes_on_to_the_same(bench: Any, monkeypatch: pytest.MonkeyPatch, ctrl_c: None):
    """In the first validation, and in a later step."""
    assert main(words(bench, "whole", "attention=mqa")) == 0
    step, score = training._step, training.Score
    calls = {"step": 0, "score": 0}

    def pressed(name: str, at: int, real: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            calls[name] += 1
            if calls[name] == at:
                raise KeyboardInterrupt
            return real(*args, **keys)

        return call

    monkeypatch.setattr("decodelab.decoding.distillation.Score", pressed("score", 1, score))
    monkeypatch.setattr(training, "_step", pressed("step", 5, step))
    codes = [main(words(bench, "broken", "attention=mqa")) for _ in range(3)]
    assert codes == [130, 130, 0]
    a, b = (load_file(bench.root / name / "model.safetensors") for name in ("whole", "broken"))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)
    kls = [[row["kl"] for row in course(bench.root / name)] for name in ("whole", "broken")]
    assert kls[0] == kls[1]


def test_another_layout_is_another_training(bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "out", "attention=mqa", "train.schedule.epochs=1")) == 0
    assert main(words(bench, "out", "attention=cross_layer", "train.schedule.epochs=1")) == 2
    assert "is of another training: settings differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["attention=mqa", "quantization=rtn"], "train=kv trains weights, and quantization makes a copy of them"),
        (["attention=native"], "train=kv trains a model for another attention than its own"),
        (["attention=mqa", "train.texts=[nowhere.jsonl]"], "train.texts='nowhere.jsonl' does not exist"),
        (["attention=mqa", "train.schedule.held_back=24"], "train.schedule.held_back=24 of 24 prompts leaves none"),
        (["attention=mqa", "attention.pool=last"], "attention.pool must be mean or first, got 'last'"),
    ],
)
def test_what_is_wrong_is_said(more: list[str], line: str, bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(words(bench, "out", *more)) == 2
    assert line in capsys.readouterr().err
    assert not (bench.root / "out").exists()


def test_a_row_without_text_is_named(bench: Any, capsys: pytest.CaptureFixture[str]):
    file = bench.root / "bare.jsonl"
    file.write_text(json.dumps({"prompt": "only asked"}) + "\n")
    assert main(words(bench, "out", "attention=mqa", f"train.texts=[{file}]")) == 2
    assert (
        "bare.jsonl:1 has no text to learn from: `text`, or one of prompt, question and of" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("attention", "told"), [("mqa", UNTRAINED), ("mha", None), ("kv_int4", CHANGED)])
def test_a_target_that_is_another_one_runs_with_a_warning(
    attention: str, told: str | None, bench: Any, capsys: pytest.CaptureFixture[str]
):
    assert bench.run(f"attention={attention}", "timing=untimed", "task.limit=2") == 0
    assert {one for one in bench.result["warnings"] if one in (UNTRAINED, CHANGED)} == ({told} if told else set())
    assert f": prompt_lookup, greedy, {attention}, task\n" in capsys.readouterr().out


def test_shared_caches_are_not_calibrated_block_by_block(bench: Any, capsys: pytest.CaptureFixture[str]):
    """A block whose keys stand in another block's cache would read an empty one; nor does GGUF know of them."""
    assert main(words(bench, "out", "attention=cross_layer", "train.schedule.epochs=1")) == 0
    quantize = ["quantize", f"model.path={bench.root / 'out'}", "quantization.group_size=8", "device=cpu", "threads=1"]
    read = [
        f"quantization.calibration.path={bench.root / 'texts.jsonl'}",
        "quantization.calibration.length=16",
        "quantization.calibration.tokens=64",
    ]
    assert main([*quantize, "quantization=gptq", *read, f"output={bench.root / 'q'}"]) == 2
    assert "layer 1 reads the keys and values of layer 0, and blocks are calibrated one by" in capsys.readouterr().err
    assert main([*quantize, "quantization=rtn", f"output={bench.root / 'rtn'}"]) == 0
    assert bench.run(f"model.path={bench.root / 'rtn'}", "timing=untimed", "task.limit=2") == 0
    made = [f"model.path={bench.root / 'out'}", "quantization=gguf", "quantization.type=Q8_0", "format=gguf"]
    assert main(["quantize", *made, "device=cpu", f"output={bench.root / 'g'}"]) == 2
    assert "format=gguf has no words for the decodelab_layout of out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["train=kv", "attention=kv_int8"], "train=kv computes keys and values in 16 bits or more, not in 8"),
        (["train=medusa", "attention=mqa"], "train=kv trains a model for another attention; train=eagle, medusa"),
        (["train=kv"], "train=kv trains a model for another attention than its own"),
    ],
)
def test_check_refuses_what_train_refuses(more: list[str], told: str, bench: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["check", f"model.path={bench.checkpoint}", "device=cpu", *more]) == 2
    assert f"refused, because {told}" in capsys.readouterr().out
