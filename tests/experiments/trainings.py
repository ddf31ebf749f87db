"""A training of each kind on the tiny model, as a command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {
    "medusa": ["train.heads=2"],
    "eagle": ["train.mlp_dim=16"],
    "draft": ["train.student.keep=1"],
    "student": ["train.student.keep=1"],
}
ROWS: Sequence[Mapping[str, Any]] = [{"id": f"p{n}", "prompt": f"{n} ab {n} ab {n}"} for n in range(8)]


def words(bench: Any, kind: str, output: str, *more: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> list[str]:
    task = bench.root / "prompts.jsonl"
    task.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        "train", f"train={kind}", f"model.path={bench.checkpoint}", "device=cpu", "threads=1", "dtype=float32",
        f"task.path={task}", "task.max_new_tokens=12", "batch=3", "train.schedule.held_back=2",
        "train.schedule.batch=2", "train.schedule.every=3", "train.schedule.epochs=4", *KINDS.get(kind, ()),
        f"output={bench.root / output}", *more,
    ]  # fmt: skip
