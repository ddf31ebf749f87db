"""What the model answered, kept as it comes: a run that was broken off asks nothing twice."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ...errors import UserError
from ..result import run_key


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` is what lm-eval is given: a text without thoughts and stop strings; (log-likelihood, is greedy); or a
    log-likelihood. `tokens`: emitted, or scored. `text`: a generation, whole. `truncated`: it ended by length. `cut`:
    tokens of the prompt that the context had no room for.
    """

    value: Any
    tokens: int
    text: str | None = None
    truncated: bool | None = None
    cut: int = 0


# Of a configuration: what answers no request otherwise, or stands in the request itself.
_NOT_ASKED = ("task", "tasks", "timing", "profile", "compare_hf", "replay", "threads", "trusted", "quality")
_IN_REQUESTS = (
    "tasks", "include", "limit", "shots", "chat", "template", "system", "repeats", "epsilon", "allow", "kl",
)  # fmt: skip


def answers_key(config: Mapping[str, Any], digests: Mapping[str, Any]) -> str:
    """Of what answers depend on beside their requests: model, drafter, law, seed, dtype, device, batch; not of the
    scorer, so that one that was mended scores what is there."""
    quality = {key: value for key, value in (config.get("quality") or {}).items() if key not in _IN_REQUESTS}
    made = {key: value for key, value in config.items() if key not in _NOT_ASKED}
    return run_key(made | {"quality": quality}, {name: digests.get(name) for name in ("model", "draft")})


class Answers:
    """Answers by request, for one `key`, which is `answers_key`'s and so holds the model's identity: an answer of
    another model is never served (lm-eval#4063). With a `path` each is appended to a file, and those there are known.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self._key = key
        self._known: dict[str, Answer] = {}
        self._path = path
        self._file: TextIO | None = None
        if path is not None and path.exists():
            self._recall(path)

    def _recall(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the writer was killed within a line
            with path.open("r+b") as file:
                file.truncate(whole)
        for key, request, _, answer in _lines(path):
            if key == self._key:
                self._known[request] = answer

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, request: str) -> Answer | None:
        return self._known.get(request)

    def add(self, request: str, answer: Answer, task: str) -> None:
        """Known from now on, also to a run that begins after this one was killed."""
        self._known[request] = answer
        if self._path is not None:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            row = {"key": self._key, "task": task, "request": request, "answer": asdict(answer)}
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def refuse_others(path: Path, tasks: Collection[str]) -> None:
    """UserError where the file has answers to a task that is not among these: a run that ends well deletes it."""
    if path.exists() and (others := {task for _, _, task, _ in _lines(path) if task not in tasks}):
        named = ", ".join(sorted(others))
        raise UserError(f"{path} has answers to {named}, and would go: ask that as well, or name another output")


def request_digest(kind: str, arguments: Any, sample: int) -> str:
    """`sample` tells repeated draws apart."""
    return hashlib.sha256(json.dumps([kind, arguments, sample], sort_keys=True).encode()).hexdigest()


def _lines(path: Path) -> Iterator[tuple[str, str, str, Answer]]:
    """Of each whole line: key, request, task and answer."""
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), 1):
        try:
            row = json.loads(line)
            yield row["key"], row["request"], row["task"], _read(row["answer"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number} is no answer of a run; delete the file to ask everything anew") from None


def _read(row: dict[str, Any]) -> Answer:
    value = row["value"]
    return Answer(**row | {"value": tuple(value) if isinstance(value, list) else value})
