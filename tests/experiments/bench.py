"""Whole commands on a tiny model, and their files read back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodelab.experiments.cli import main

ROWS: tuple[Mapping[str, Any], ...] = (
    {"id": "copy", "category": "copy", "prompt": "12 ab 12 ab 12 ab 12"},
    {"id": "count", "category": "copy", "prompt": "one two three one two three one"},
    {"id": "talk", "category": "chat", "turns": ["hello there", "and then?"]},
    {"id": "ask", "category": "documents", "question": "what?", "documents": ["it is a b c"], "answer": "GOLD"},
    {"id": "three", "category": "copy", "prompt": "xyz xyz xyz"},
)


@dataclass(frozen=True)
class Bench:
    """`run(*words)` is `decodelab run` on the tiny model and ROWS; the files it writes are read back from `folder`."""

    root: Path
    checkpoint: Path
    folder: Path

    def run(self, *words: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> int:
        task = self.root / "task.jsonl"
        task.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        model, output = f"model.path={self.checkpoint}", f"output={self.folder}"
        common = ["device=cpu", "threads=1", f"task.path={task}", "task.max_new_tokens=12", model]
        given = {word.partition("=")[0] for word in words}
        defaults = [w for w in (*common, "dtype=float32", output) if w.partition("=")[0] not in given]
        return main(["run", *defaults, *words])

    @property
    def result(self) -> dict[str, Any]:
        return strict((self.folder / "result.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [strict(line) for line in (self.folder / name).read_text().splitlines()]


def strict(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are not in it."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)
