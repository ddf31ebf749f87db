"""The page for colleagues: what it says of a real pair of runs, its verdict, and what has none."""

import json
import re
from copy import deepcopy
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from decodelab.errors import UserError
from decodelab.experiments.cli import main
from decodelab.experiments.report.certificate import certificate, markdown, page
from decodelab.tests.experiments.bench import Bench, strict

MATHS = [{"id": f"m{i}", "question": f"what is {i} + 1?", "answer": f"{i + 1}"} for i in range(6)]
CHOICES = [
    {"id": f"c{i}", "question": f"<b>{i}</b> and {i}?", "choices": [" ab", "12", f"{i} ab"], "answer": i % 3}
    for i in range(6)
]


def evaluate(bench: Bench, output: str, *words: str) -> int:
    files = []
    for name, rows in {"maths": MATHS, "choices": CHOICES}.items():
        files.append(bench.root / f"{name}.jsonl")
        files[-1].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = [f"model.path={bench.checkpoint}", "device=cpu", "threads=1", "dtype=float32", "quality.max_new_tokens=3"]
    return main(["evaluate", *common, f"tasks=[{','.join(map(str, files))}]", f"output={bench.root / output}", *words])


def changed(folder: Path, into: Path, change: Any) -> Path:
    """A copy of a run's result, changed."""
    result = deepcopy(strict((folder / "result.json").read_text()))
    change(result)
    into.mkdir()
    (into / "result.json").write_text(json.dumps(result))
    return into


def test_the_certificate_of_a_quantised_run(bench: Bench, capsys: pytest.CaptureFixture[str]):
    full, less = bench.root / "full", bench.root / "less"
    assert evaluate(bench, "full", "quality.kl=true") == 0
    made = ["quantization=rtn", "quantization.bits=3", "quantization.group_size=32", "quality.kl=true"]
    assert evaluate(bench, "less", *made, f"against={full}") == 0
    result = strict((less / "result.json").read_text())
    asked = [strict(line) for line in (less / "quality.jsonl").read_text().splitlines()]
    assert [row["choices"] for row in asked if row["id"] in ("c1", "m1")] == [None, ["ab", "12", "1 ab"]]
    lost = {"task": "choices", "id": "c1", "metric": "acc", "category": None, "prompt": "<b>1</b> and 1?", "gold": 1}
    lost["choices"] = ["ab", "12", "1 ab"]
    sides = {"score": 0.0, "responses": [[-1.5, -2.0, -3.0]]}, {"score": 1.0, "responses": [[-2.0, -1.5, -1.501]]}
    rows = [
        lost | {"gain": gain, "id": f"c{gain}", "mine": sides[gain > 0], "reference": sides[gain < 0]}
        for gain in (-1.0, -0.9, 1.0)
    ]
    rows += [
        {
            **lost,
            "task": "maths",
            "id": "m2",
            "metric": "exact_match",
            "choices": None,
            "gain": -1.0,
            "gold": "3",
            "mine": {"score": 0.0, "responses": ["4"]},
            "reference": {"score": 1.0, "responses": ["3"]},
        }
    ]
    (less / "flips.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    told = " ".join(capsys.readouterr().out.split())
    assert "overall undecided. Answers: " in told
    assert main(["report", "certificate", str(less)]) == 0
    printed = capsys.readouterr().out
    text = (less / "certificate.md").read_text()
    assert text in printed
    assert f"written to {less / 'certificate.md'}, {less / 'certificate.html'}" in printed

    assert text.startswith(f"# {bench.checkpoint.name}, rtn 3 bits group 32 against ")
    assert "**undecided**. Answers: " in text
    ratio = exp(result["quality"]["divergence"]["kl"]["value"])
    assert f"the reference's own predictions are at least {ratio:.2f}× as perplexing here" in text
    for name, task in result["quality"]["against"]["tasks"].items():
        effect = task["metrics"][task["main"]]
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}, "))
        assert f"| {effect['n']} | {effect['detectable']:.3f} | {task['verdict']} |" in row
    found = result["quality"]["divergence"]
    assert f"| all | {found['kl']['value']:.2g} " in text
    floor = found["floor"]
    assert f"Rounding alone: KL {floor['kl']:.2g}, " in text
    assert "bfloat16 against float32 of the reference's own weights" in text
    assert [row["by"] for row in found["where"]] == ["task", "length", "step"]
    for row in found["where"]:
        assert re.search(rf"\| {row['by']} \| {row['name']} \| {100 * row['size']:.0f} % \|", text)
    assert "3 items lost, 1 gained; all are in flips.jsonl." in text
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == [
        "### lost: maths m2, exact\\_match 1 → 0",
        "### lost: choices c-1.0, acc 1 → 0",
        "### gained: choices c1.0, acc 0 → 1",
    ]
    item = text[text.index(headings[1]) : text.index(headings[2])]
    assert "B (right):\n\n    12 (log p: reference −1.50, this run −2.00)\n" in item
    assert "reference:\n\n    B is likeliest, C as likely to two digits\n" in item
    assert "this run:\n\n    A is likeliest\n" in item
    assert "| calibration | none |" in text
    assert "| its settings | symmetric=False, clip=False |" in text
    assert "| drafter | prompt\\_lookup |" in text
    digests = [value for value in result["digests"].values() if value]
    for value in [result["key"], result["provenance"]["started_at"], *digests]:
        assert str(value) in text
    assert "| kernels | " in text
    assert "int3" in text  # the product that computed it

    html = (less / "certificate.html").read_text()
    assert "<dd>&lt;b&gt;1&lt;/b&gt; and 1?</dd>" in html
    assert '<p class="verdict undecided">' in html
    assert "<script" not in html
    assert not re.search(r"https?://", html)  # it asks for nothing

    def verdicts(result: dict[str, Any], *given: str, mean: str, kl: float, tokens: int) -> None:
        found = result["quality"]["against"]
        for task, verdict in zip(found["tasks"].values(), given, strict=True):
            task["verdict"] = verdict
        found["combined"]["verdict"] = mean
        result["quality"]["divergence"]["kl"]["low"] = kl
        result["quality"]["divergence"]["tokens"] = tokens

    for i, (given, mean, kl, tokens, want) in enumerate(
        (
            (("better", "worse"), "undecided", 0.0, 32, "worse"),
            (("undecided", "undecided"), "worse", 0.0, 32, "worse"),
            (("equivalent", "equivalent"), "undecided", log(1.02) - 1e-6, 32, "equivalent"),
            (("equivalent", "equivalent"), "undecided", log(1.02) + 1e-6, 32, "worse"),
            (("undecided", "undecided"), "undecided", 1.4, 32, "worse"),
            (("equivalent", "equivalent"), "undecided", 1.4, 31, "equivalent"),  # of too few tokens
            (("undecided", "undecided"), "better", 1.4, 32, "undecided"),
            (("equivalent", "better"), "undecided", 1.4, 32, "undecided"),
            (("undecided", "better"), "better", 1.4, 32, "undecided"),
        )
    ):
        about = {"mean": mean, "kl": kl, "tokens": tokens}
        folder = changed(less, bench.root / f"v{i}", lambda r, a=given, b=about: verdicts(r, *a, **b))
        made = certificate(folder)
        assert made.verdict == want
        assert ("Word by word clearly different" in made.meaning) is (tokens > 31 and kl > log(1.02))
        assert made.meaning.startswith("Word by word") is (i in (3, 4))  # what decided comes first
        assert made.meaning.endswith("One says worse, the other better.") is (i > 5)

    plain = changed(less, bench.root / "plain", lambda r: r["quality"].pop("divergence"))
    assert "Not measured: run both with quality.kl=true." in markdown(certificate(plain))
    other = changed(less, bench.root / "other", lambda r: r["quality"]["divergence"]["reference"].update(key="x"))
    assert "Of another reference than the tasks" in page(certificate(other))
    broken = changed(less, bench.root / "broken", lambda r: r["quality"]["against"]["tasks"]["maths"].pop("metrics"))
    with pytest.raises(UserError, match=r"broken is not as this version writes a run \(KeyError\('metrics'\)\)"):
        certificate(broken)

    capsys.readouterr()
    assert main(["report", "certificate", str(full)]) == 2
    assert (
        f"{full} was compared with no reference: run it with quality.tasks=[…] against=DIR" in capsys.readouterr().err
    )
    assert main(["report", "certificate"]) == 2
    assert "certificate takes the folder of one run, got 0: decodelab report certificate RUN" in capsys.readouterr().err
    assert main(["report", "explain", str(less)]) == 0
    assert f"KL to {full} {found['kl']['value']:.2g} a token over" in capsys.readouterr().out
