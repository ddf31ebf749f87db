"""What a target says to the prompts of a task, turn by turn, and what of it is learnt from.

Answers are made side by side and appended to a file, so that none is asked for twice, whatever ends the process.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..decoding.events import finish
from ..decoding.request import Request
from ..decoding.training import Schedule, Text
from ..errors import UserError
from .files import misfit, read_lines
from .format import counted
from .items import Item
from .lab import Lab
from .tasks import Task, TaskSettings, encode, encode_documents

_ROW: Mapping[str, Any] = {
    "id": str, "turn": int, "made": str, "prompt": [int], "tokens": [int], "seconds": float,
}  # fmt: skip
_BEFORE_TURNS: Mapping[str, Any] = {"turn": 1, "seconds": 0.0}  # what rows of an earlier version mean

_LEAST = 3  # tokens of an answer that is learnt from

Key = tuple[str, int]  # an item's id and a turn


@dataclass(frozen=True, slots=True)
class Answer:
    """To one turn of an item, numbered from 1. `seconds`: its share of what its batch took."""

    id: str
    turn: int
    request: Request
    tokens: tuple[int, ...]
    seconds: float

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt


@dataclass(frozen=True, slots=True)
class Answers:
    """In the task's order, the turns of an item one after another. `left_out`: turns whose prompts leave no room."""

    all: tuple[Answer, ...]
    left_out: int
    digest: str


def answered(
    lab: Lab,
    task: Task,
    settings: TaskSettings,
    file: Path,
    *,
    seed: int,
    batch: int,
    progress: Callable[[str, int, int, str], None],
) -> Answers:
    """The target's answers to all turns, each prompt with its own answers to the turns before: those of the file, and
    the rest. A turn whose prompt leaves no room for `task.max_new_tokens` is left out, with those behind it."""
    mark = digest(
        {
            "target": lab.source.identity,
            "law": asdict(lab.acceptance.law()),
            "dtype": str(lab.target.dtype),
            "seed": seed,
            "max_new_tokens": settings.max_new_tokens,
        }
    )
    keys = {(item.id, turn): None for item in task.items for turn in range(1, item.turns + 1)}  # in order
    kept = {key: row for key, row in _kept(file, mark) if key in keys}
    found: dict[Key, Answer] = {}
    made = left_out = 0
    tokens, began = 0, time.monotonic()

    def tell() -> None:
        total = len(keys) - left_out
        pace = f"{tokens / (time.monotonic() - began):.0f} tokens/s" if tokens else ""
        progress("answers", min(total, len(kept) + made), total, pace)

    live, turn = list(task.items), 1
    while live:
        missing: list[tuple[Key, Request]] = []
        going = []
        for item in live:
            said = [lab.text(found[item.id, before].tokens) for before in range(1, turn)]
            r = _request(lab, item, said, settings)
            if r is None:
                left_out += item.turns - turn + 1
                continue
            going.append(item)
            key = (item.id, turn)
            row = kept.get(key)
            if row is not None and row["prompt"] == list(r.prompt) and _sound(row, lab.target.config.vocab):
                found[key] = Answer(*key, r, tuple(row["tokens"]), row["seconds"])
            else:
                missing.append((key, r))
        tell()
        # the longest first, beside others of like length: little is padded, and what does not fit shows at once
        missing.sort(key=lambda asked: -len(asked[1].prompt))
        for at in range(0, len(missing), batch):
            answers = _asked(lab, missing[at : at + batch], seed)
            _append(file, answers, mark)
            found |= {(answer.id, answer.turn): answer for answer in answers}
            made += len(answers)
            tokens += sum(len(answer.tokens) for answer in answers)
            tell()
        live, turn = [item for item in going if turn < item.turns], turn + 1
    if not found:
        raise UserError(
            f"no prompt leaves room for task.max_new_tokens={settings.max_new_tokens} in the context of "
            f"{lab.context} tokens: lower it, or give shorter prompts"
        )
    ordered = tuple(found[key] for key in keys if key in found)
    rows = [{"id": a.id, "made": mark, "prompt": a.prompt, "tokens": a.tokens} for a in ordered]
    return Answers(ordered, left_out, digest(rows))


@dataclass(frozen=True, slots=True)
class Lessons:
    """`texts` are learnt from, `held` are the answers to prompts kept back, `judged` their texts, and the counts are of
    what was left out: by the context, by `longest`, by an answer that says too little, by a prompt that is kept back
    under another id."""

    texts: Sequence[Text]
    held: Sequence[Answer]
    no_room: int
    long: int
    short: int
    twins: int = 0
    judged: Sequence[Text] = ()

    @staticmethod
    def of(answers: Answers, held_back: int, longest: int) -> "Lessons":
        """The items kept back, with all of their turns, are chosen by a hash."""
        ids = dict.fromkeys(a.id for a in answers.all)
        enough(len(ids), held_back)
        back = set(sorted(ids, key=digest)[:held_back])
        held = [a for a in answers.all if a.id in back]
        known = {tuple(a.prompt) for a in held}
        rest = [a for a in answers.all if a.id not in back]
        others = [a for a in rest if tuple(a.prompt) not in known]
        said = [a for a in others if len(a.tokens) >= _LEAST]
        fitting = [a for a in said if len(a.prompt) + len(a.tokens) <= longest]
        if not fitting:
            raise UserError(
                f"no text to learn from: it takes answers of {_LEAST} tokens (task.max_new_tokens) to prompts that are "
                f"not kept back, in texts of at most train.schedule.longest={longest}"
            )
        long, short, twins = len(said) - len(fitting), len(others) - len(said), len(rest) - len(others)
        judged = [text(a) for a in held if len(a.tokens) > 1]
        return Lessons([text(a) for a in fitting], held, answers.left_out, long, short, twins, judged)

    def left_out(self, settings: TaskSettings, schedule: Schedule, context: int) -> str | None:
        """In words."""
        room = f"task.max_new_tokens={settings.max_new_tokens}"
        told = [
            (self.no_room, "prompt", f" that left no room for {room} in the context of {context}"),
            (self.long, "text", f" of more than train.schedule.longest={schedule.longest} tokens"),
            (self.short, "answer", f" of fewer than {_LEAST} tokens"),
            (self.twins, "prompt", " that is kept back as well"),
        ]
        listed = [counted(n, what) + why for n, what, why in told if n]
        return f"left out: {', '.join(listed)}" if listed else None


def enough(prompts: int, held_back: int) -> None:
    if prompts <= held_back:
        raise UserError(
            f"train.schedule.held_back={held_back} of {counted(prompts, 'prompt')} leaves none to learn from: give more"
        )


def text(answer: Answer) -> Text:
    return Text((*answer.prompt, *answer.tokens), len(answer.prompt))


def digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _request(lab: Lab, item: Item, said: Sequence[str], settings: TaskSettings) -> Request | None:
    """None where the prompt leaves no room for a whole answer."""
    prompt = encode(item, said, lab.tokenizer, settings)
    if len(prompt) + settings.max_new_tokens > lab.context:
        return None
    return lab.request(prompt, settings.max_new_tokens, documents=encode_documents(item, lab.tokenizer))


def _asked(lab: Lab, batch: Sequence[tuple[Key, Request]], seed: int) -> list[Answer]:
    began = time.monotonic()
    done = finish(lab.strategy([r for _, r in batch], seed))
    seconds = (time.monotonic() - began) / len(batch)
    return [Answer(*key, r, tuple(g.tokens), seconds) for (key, r), g in zip(batch, done, strict=True)]


def _kept(file: Path, mark: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The rows of the file that are whole and were made like this; a later one of a turn stands for an earlier."""
    for found in read_lines(file):
        row = {**_BEFORE_TURNS, **found}
        if misfit(row, _ROW) is None and row["made"] == mark:
            yield (row["id"], row["turn"]), row


def _sound(row: Mapping[str, Any], vocab: int) -> bool:
    """Whether its numbers can be of an answer: what is damaged is asked for anew."""
    return all(0 <= token < vocab for token in row["tokens"]) and 0 <= row["seconds"] < math.inf


def _append(file: Path, batch: Sequence[Answer], mark: str) -> None:
    rows = [
        {"id": a.id, "turn": a.turn, "made": mark, "prompt": a.prompt, "tokens": a.tokens, "seconds": a.seconds}
        for a in batch
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with file.open("ab+") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":  # whoever wrote last was killed within a line
                text = f"\n{text}"
        out.write(text.encode())
