"""What a sweep says of its cells."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decodelab.experiments.format import NOISY, duration
from decodelab.experiments.seeds import spread
from decodelab.experiments.sweep.cells import CellOutcome
from decodelab.experiments.sweep.show import line, reasons, table
from decodelab.tests.experiments.sweep.stage import result


def outcome(label: str, status: Any = "done", detail: str = "", found: Any = None, **more: Any) -> CellOutcome:
    return CellOutcome(
        status, "key", Path("out") / label, found, None if found is None else 75.0, detail, label, **more
    )


def shown(outcomes: list[CellOutcome], width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        for part in table(outcomes, width):
            console.print(part)
    lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
    assert max(map(len, lines)) <= width
    return lines


def calibrated(seed: int, score: float, kl: float | None, bits: int = 4) -> dict[str, Any]:
    settings = {"bits": bits, "group_size": 64, "calibration": {"path": "text", "seed": seed}}
    tasks = {"arc": {"main": "acc", "metrics": {"acc": {"value": score}}}}
    quality = {"tasks": tasks, "divergence": None if kl is None else {"kl": {"value": kl}}}
    made = {"kind": "gptq", "settings": settings, "source": {"digest": "d"}}
    config = {"output": f"out{seed}", "quantization": settings, "seed": 0}
    return {**result("key"), "config": config, "provenance": {"quantised": made}, "quality": quality}


def test_seeds_of_the_calibration_text_are_summed_up_a_quantiser():
    some = [
        calibrated(0, 0.25, 0.1),
        calibrated(1, 0.5, 0.2),
        calibrated(2, 0.3, 0.15),
        calibrated(0, 0.9, 0.9, bits=3),
    ]
    broken_off, other_rows = calibrated(3, 1.0, 1.0), calibrated(4, 1.0, 1.0)
    broken_off["quality"]["interrupted"] = True
    other_rows["digests"] = {"quality": "of another file"}
    some += [broken_off, other_rows]
    told = " ".join(shown([outcome(f"seed={i}", found=found) for i, found in enumerate(some)], 120))
    line = "gptq 4 bits group 64, 3 seeds of its calibration text, mean (least to most): arc acc 0.35 (0.25 to 0.5); "
    assert f"{line}KL 0.15 (0.1 to 0.2)" in told
    assert told.count("seeds of its calibration text") == 1
    (alone,) = spread([calibrated(0, 0.25, 0.1), calibrated(1, 0.5, None)])
    assert alone.endswith("arc acc 0.375 (0.25 to 0.5)")  # KL is not of both


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


def test_kl_and_bytes_stand_in_the_row_where_they_are_known_and_differ():
    lost = {"tasks": {}, "divergence": {"kl": {"value": 0.3125}}}
    small, whole = ({**result("key"), "memory": {"weights_bytes": n * 2**20}} for n in (165, 310))
    cells = [outcome("bits=4", found={**small, "quality": lost}), outcome("bits=8", found=whole)]
    head, _, *rows = shown(cells, 120)
    assert head.split()[-4:] == ["output", "KL", "weights", "time"]
    assert [row.split()[-6:-2] for row in rows] == [["exact", "0.31", "165.0", "MiB"], ["exact", "–", "310.0", "MiB"]]
    assert "weights" not in shown(cells[:1], 120)[0]


def test_a_narrow_terminal_has_one_column_for_all_keys_and_loses_nothing_unsaid():
    labels = ("jacobi window=3 ngrams=2", "prompt_lookup max_draft=8 per_match=0.5", "none")
    cells = [outcome(f"drafting={label} drafting.seed=1", found=result("key")) for label in labels]
    assert shown(cells, 130)[0].split()[:4] == ["drafting", "window", "ngrams", "drafting.seed"]
    head, _, *rows = shown(cells, 90)
    assert head.split() == ["cell", "status", "speedup", "[95", "%]", "τ", "accepted", "output", "time"]
    assert rows[0].split()[:5] == ["jacobi", "window=3", "ngrams=2", "seed=1", "done"]
    assert "max_draft=8" in rows[1] + rows[2]
    head, _, *rows, left = shown(cells, 60)
    assert head.split() == ["cell", "status", "speedup", "[95", "%]", "output"]
    assert left == "left out, for a terminal of 60 columns: τ, accepted, time"


def test_cells_of_a_busy_machine_are_marked():
    load = {"provenance": {"load_before": 1.5}}
    warned = {"warnings": ["a note", NOISY]}
    replayed = {"replay": {"source": "x"}, **load}
    found = [load, warned, replayed, {"provenance": {"load_before": 0.5}, "warnings": []}]
    cells = [outcome(f"seed={i}", found={**result("key"), **more}) for i, more in enumerate(found)]
    *rows, note = shown([*cells, outcome("seed=9", "failed")])[2:]
    assert [row.split()[1] for row in rows] == ["done‡", "done‡", "done", "done", "failed"]
    assert note == "‡ 2 of 4 cells ran on a busy machine: their speeds are noisy"


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
