"""What a sweep says of its cells."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decodelab.experiments.sweep.cells import CellOutcome
from decodelab.experiments.sweep.show import duration, line, reasons, table
from decodelab.tests.experiments.sweep.stage import result


def outcome(label: str, status: Any = "done", detail: str = "", found: Any = None, **more: Any) -> CellOutcome:
    return CellOutcome(
        status, "key", Path("out") / label, found, None if found is None else 75.0, detail, label, **more
    )


def shown(outcomes: list[CellOutcome], width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(outcomes))
    return [line.strip() for line in captured.get().splitlines() if line.strip()]


def test_a_row_a_cell_and_a_column_an_axis():
    quality = {"tasks": {"arc": {"main": "acc", "metrics": {"acc": {"value": 0.25}}}}}
    head, _, *rows = shown(
        [
            outcome("drafting=prompt_lookup max_draft=8", found={**result("key"), "quality": quality}),
            outcome("drafting=none", found=result("key"), stale=True),
            outcome("drafting=draft_model seed=1", "out_of_memory"),
        ],
        120,
    )
    names = [
        "drafting",
        "max_draft",
        "seed",
        "status",
        "speedup",
        "[95",
        "%]",
        "τ",
        "accepted",
        "output",
        "quality",
        "time",
    ]
    assert head.split() == names
    assert rows[0].split() == [
        "prompt_lookup", "8", "done", "1.50×", "[1.25,", "1.75]", "2.12", "50", "%", "exact", "arc", "0.250", "75", "s",
    ]  # fmt: skip
    assert rows[1].split()[:2] == ["none", "done*"]
    assert rows[2].split() == ["draft_model", "1", "out_of_memory", *"––––––"]


def test_a_table_of_80_columns_keeps_the_values():
    cells = [outcome(f"drafting=prompt_lookup seed={seed}", found=result("key")) for seed in (1, 2)]
    assert [row.split()[:2] for row in shown(cells)[2:]] == [["prompt_lookup", "1"], ["prompt_lookup", "2"]]


def test_labels_of_another_form_and_quality_alone():
    alone = {
        **result("key"),
        "speedup": dict.fromkeys(("value", "low", "high", "n")),
        "strategy": None,
        "exactness": None,
    }
    head, _, row = shown([outcome("default", found=alone)])
    assert head.split() == ["cell", "status", "time"]
    assert row.split() == ["default", "done", "75", "s"]


def test_lines():
    assert line(outcome("seed=1", found=result("key"))) == "done 1.50× [1.25, 1.75] in 75 s: seed=1"
    assert line(outcome("seed=1", "failed", "ValueError: no")) == "failed: seed=1 – ValueError: no"
    assert len(line(outcome("seed=1", "failed", "x" * 9999))) < 600


def test_reasons_name_the_log(tmp_path: Path):
    cells = [outcome("seed=1"), outcome("seed=2", "failed", "no"), outcome("seed=3", "not started", "interrupted")]
    (tmp_path / "log.txt").touch()
    cells[1] = CellOutcome("failed", "key", tmp_path, None, None, "no", "seed=2")
    assert list(reasons(cells)) == [f"failed: seed=2 – no ({tmp_path}/log.txt)", "not started: seed=3 – interrupted"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.0, "59 s"),
        (119.0, "2 min"),
        (7199.0, "2 h 00 min"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_durations(seconds: float | None, text: str):
    assert duration(seconds) == text
