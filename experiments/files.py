"""The files of a run: written whole or not at all, and read back. What cannot be read is one line."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..decoding.errors import UserError

SCHEMA = 1  # of result.json
MIRRORED = "wandb"  # the folder of a run in which wandb keeps what it has of it
# What does not change what is measured, so that it does not change a run's key.
NOT_IN_KEY = (
    "output", "tracking", "hydra", "rerun", "cell", "stop_after_failures", "budget_hours", "search", "against",
    "layers",
)  # fmt: skip


def write_atomic(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    write_atomic(folder / "result.json", json.dumps(result, indent=1, default=str) + "\n")


def result_files(root: Path) -> list[Path]:
    """Every result.json at or below a folder, or the one that is named itself."""
    return [root] if root.name == "result.json" else sorted(root.rglob("result.json"))


def read_result(file: Path) -> dict[str, Any]:
    """What a run found. Only of the schema that this version knows."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not a whole result ({error.msg}); delete it and run again") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(f"{file} cannot be read ({reason}); delete it and run again") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{file} has schema {schema}, and this version reads schema {SCHEMA}; run again with it")
    return dict(found)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; none where there is no file. A line that is none, such as a torn last one, is left
    out."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return
