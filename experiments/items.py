"""One row of a task file, read as prompts. Gold is kept apart: no function here puts it into a prompt or a document."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..errors import UserError

GOLD = (
    "reference", "answer", "aliases", "solution", "response", "target", "code", "after", "correct_answers",
    "canonical_solution", "test*", "*_test*", "files_after",
)  # fmt: skip
READINGS = ("prompt", "turns", "messages", "instruction with before or files_before", "question", "text")
FIX = "Fix the bug in this program."


class Message(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, or a conversation of several.

    `opening` is all that is said before the first answer; each of `later` follows the answer before it. `raw`: the
    opening is a text to continue, not a message. `gold` is what the row knows of the right answer; only scorers read it
    (and `repr`, which ends up in logs, leaves it out).
    """

    id: str
    category: str
    opening: tuple[Message, ...]
    later: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    raw: bool = False
    gold: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    @property
    def turns(self) -> int:
        """How many prompts this is: answers are asked for one after another."""
        return 1 + len(self.later)


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one row, and where it stands, for errors. A null field counts as absent."""

    fields: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def text(self, key: str) -> str:
        return self.checked(self.fields[key], key)

    def checked(self, value: object, key: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{self.where}: {key} must be a text that is not empty, not {value!r:.60}")
        return value

    def entries(self, key: str) -> list[Any]:
        """The list under `key`, empty where the row has none."""
        value = self.fields[key] if self.has(key) else []
        if not isinstance(value, list):
            raise UserError(f"{self.where}: {key} must be a list, not {value!r:.60}")
        return value


def read_item(row: Row, name: str, category: str) -> Item:
    """The item of a row; `name` and `category` are used where it has no id, and no category, task or source.

    The first field that fits decides: `prompt`, `turns`, `messages` (assistant messages at its end are dropped),
    `before` or `files_before` (with `instruction`, or "Fix the bug in this program."), `question`, `text`.

    Passages go before the user message that is answered first (the last one of `messages`, the first of `turns`), or
    before the raw prompt, as

        Passage 1: TITLE
        TEXT

        Passage 2: …

        MESSAGE

    without ": TITLE" where there is none. Code is fenced after the instruction, each of `files_before` under its name.
    Documents are `documents`, `passages` and that code.
    """
    opening, later, code = _conversation(row)
    passages = [_passage(row, value, "passages") for value in row.entries("passages")]
    documents = [_passage(row, value, "documents") for value in row.entries("documents")]
    titled = [f"Passage {i}{f': {title}' if title else ''}\n{text}" for i, (title, text) in enumerate(passages, 1)]
    asked = Message(opening[-1].role, "\n\n".join([*titled, opening[-1].content]))
    return Item(
        id=next((str(row.fields[key]) for key in ("id", "task_id", "question_id") if row.has(key)), name),
        category=next((str(row.fields[key]) for key in ("category", "task", "source") if row.has(key)), category),
        opening=(*opening[:-1], asked),
        later=later,
        documents=(*(f"{title}\n{text}" if title else text for title, text in [*documents, *passages]), *code),
        raw=row.has("prompt"),
        gold={key: value for key, value in row.fields.items() if any(fnmatchcase(key, gold) for gold in GOLD)},
    )


def conversation(item: Item, answers: Sequence[str]) -> list[Message]:
    """The messages that answer number `len(answers)` replies to, given the answers so far."""
    assert len(answers) < item.turns, "every turn has its answer"
    messages = list(item.opening)
    for answer, user in zip(answers, item.later, strict=False):
        messages += [Message("assistant", answer), Message("user", user)]
    return messages


def _conversation(row: Row) -> tuple[tuple[Message, ...], tuple[str, ...], tuple[str, ...]]:
    """(opening, later user turns, code in the prompt), by the first field that fits."""
    if row.has("prompt"):
        return (Message("user", row.text("prompt")),), (), ()
    if row.has("turns"):
        turns = [row.checked(turn, "each of turns") for turn in row.entries("turns")]
        if not turns:
            raise UserError(f"{row.where}: turns is empty; at least one user turn is needed")
        return (Message("user", turns[0]),), tuple(turns[1:]), ()
    if row.has("messages"):
        return _messages(row), (), ()
    if row.has("before"):
        code = row.text("before")
        return (Message("user", f"{_instruction(row)}\n\n{_fenced(code, row)}"),), (), (code,)
    if row.has("files_before"):
        files = _files(row)
        blocks = [f"{name}\n{_fenced(code, row)}" for name, code in files.items()]
        return (Message("user", "\n\n".join([_instruction(row), *blocks])),), (), tuple(filter(None, files.values()))
    for key in ("question", "text"):
        if row.has(key):
            return (Message("user", row.text(key)),), (), ()
    keys = ", ".join(key for key in row.fields if row.has(key)) or "none"
    raise UserError(f"{row.where}: nothing to prompt with among its fields ({keys:.200}); known: {', '.join(READINGS)}")


def said(row: Row) -> list[Message]:
    """All `messages` of a row, each a text."""
    messages = []
    for value in row.entries("messages"):
        if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
            raise UserError(f"{row.where}: a message needs role and content, not {value!r:.60}")
        messages.append(Message(row.checked(value["role"], "role"), row.checked(value["content"], "content")))
    return messages


def _messages(row: Row) -> tuple[Message, ...]:
    messages = said(row)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role != "user":
        raise UserError(f"{row.where}: messages must end with a user's (assistant messages at the end are dropped)")
    return tuple(messages)


def _files(row: Row) -> dict[str, str]:
    files = row.fields["files_before"]
    if not isinstance(files, Mapping):
        raise UserError(f"{row.where}: files_before must map names to texts, not {files!r:.60}")
    present = {name: code for name, code in files.items() if code is not None}  # a columnar loader fills gaps with null
    if not present or not all(isinstance(code, str) for code in present.values()):
        raise UserError(f"{row.where}: files_before must map at least one name to a text, not {files!r:.60}")
    return present


def _instruction(row: Row) -> str:
    return row.text("instruction") if row.has("instruction") else FIX


def _fenced(code: str, row: Row) -> str:
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", code)), default=0))
    language = row.text("language") if row.has("language") else ""
    return "\n".join([fence + language, code.removesuffix("\n"), fence])


def _passage(row: Row, value: object, key: str) -> tuple[str | None, str]:
    """(title, text) of a document."""
    if isinstance(value, str):
        return None, value
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return value.get("title") or None, value["text"]
    raise UserError(f"{row.where}: {key} must hold texts or {{title, text}}, not {value!r:.60}")
