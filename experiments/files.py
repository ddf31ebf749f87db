"""The files of a run: written whole or not at all, and read back. What cannot be read is one line."""

import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError

SCHEMA = 1  # of result.json
MIRRORED = "wandb"  # the folder of a run in which wandb keeps what it has of it
# What does not change what is measured, so that it does not change a run's key.
NOT_IN_KEY = (
    "output", "tracking", "hydra", "rerun", "cell", "stop_after_failures", "budget_hours", "search", "against",
    "layers", "train", "context", "hardware", "plan", "peers",
)  # fmt: skip
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a file could not grow, whatever it is named

_MOST = 1e300
_NUMBER = (float, None)
_INTERVAL = {"value": _NUMBER, "low": _NUMBER, "high": _NUMBER, "n": (int, None)}
_TASK = {
    "main": str, "metrics": {"*": {"value": _NUMBER, "low?": _NUMBER, "high?": _NUMBER, "n?": (int, None)}},
    "n?": (int, None), "repeats?": (int, None), "truncated?": _NUMBER,
}  # fmt: skip
_CATEGORY = {"speedup": _INTERVAL, "tokens_per_step": _NUMBER, "acceptance_rate": _NUMBER}
# Of result.json, what its readers take for granted (`misfit`).
_RESULT: Mapping[str, Any] = {
    "key": str, "status": str, "config": dict, "digests": dict, "speedup": _INTERVAL,
    "provenance?": dict,
    "baseline?": (dict, None),
    "strategy?": ({
        "tokens_per_step?": _NUMBER, "acceptance_rate?": _NUMBER,
        "acceptance_by_position?": ([{"rate": _NUMBER}], None),
    }, None),
    "by_category?": {"*": _CATEGORY},
    "exactness?": ({"verdict": (str, None), "divergences?": [{"gap": _NUMBER}]}, None),
    "quality?": ({"tasks": {"*": _TASK}}, None),
    "profile?": ({
        "context": int, "seconds": {"1": float, "*": float},
        "draft": {"step_s": float, "token_s": float, "host_s": float},
    }, None),
    "replay?": (dict, None),
    "warnings?": [str],
}  # fmt: skip
_CALLED: Mapping[type, str] = {
    float: "a number", int: "a whole number", str: "a text", list: "a list", dict: "an object",
}  # fmt: skip


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


def make_folder(folder: Path, exist_ok: bool = True) -> None:
    """One that can be written, found out before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"output folder {folder} cannot be written ({error.strerror}); name another with output=DIR")


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
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, a number of 5000 digits
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(f"{file} cannot be read ({reason}); delete it and run again") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{file} has schema {schema}, and this version reads schema {SCHEMA}; run again with it")
    if (wrong := misfit(found, _RESULT)) is not None:
        raise UserError(f"{file} is damaged: {wrong}; delete it and run again")
    return dict(found)


def misfit(found: Any, shape: Any, at: str = "it") -> str | None:
    """What in plain data is not as `shape` says; None where all is. A shape is a type (float is any number), a mapping
    of keys to shapes (`key?` may be missing, `*` is every key), a list with the shape of its entries, or (shape, None),
    which may be null."""
    if isinstance(shape, tuple):
        return None if found is None else misfit(found, shape[0], at)
    kind = shape if isinstance(shape, type) else type(shape)
    if not _is_of(found, kind):
        return f"{at} is not {_CALLED[kind]}"
    if isinstance(shape, list):
        parts = ((f"{at}[{place}]", value, shape[0]) for place, value in enumerate(found))
        return next(filter(None, (misfit(value, inner, where) for where, value, inner in parts)), None)
    for name, inner in shape.items() if isinstance(shape, dict) else ():
        key = name.removesuffix("?")
        if key == name != "*" and key not in found:
            return f"{at} has no {key}"
        for one in found if key == "*" else [key] if key in found else []:
            if (wrong := misfit(found[one], inner, one if at == "it" else f"{at}.{one}")) is not None:
                return wrong
    return None


def _is_of(found: Any, kind: type) -> bool:
    if isinstance(found, bool) or (isinstance(found, int) and abs(found) > _MOST):  # too large for a float
        return False
    return isinstance(found, (int, float) if kind is float else kind)


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
