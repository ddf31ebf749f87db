"""Tasks: the prompts a run decodes, from a JSONL file, a dataset or the demo, and their token ids."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import UserError
from .items import Item, Row, conversation, read_item

TASKS = {"demo": Path(__file__).with_name("demo.jsonl")}
FORMATS = ("arrow", "csv", "json", "parquet", "text")  # names that `datasets` gives to its readers of files


@runtime_checkable
class Tokenizer(Protocol):
    """What is used of a transformers tokenizer (importing its class would cost every command a second)."""

    chat_template: Any
    bos_token_id: Any

    def __call__(self, text: str, /, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], /, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Which prompts. `dataset` wins over `path`, `path` over `name`; with a dataset, `path` is its `data_files`.

    `limit`: the first so many rows, null for all. `chat`: true wraps every prompt in the chat template, false none,
    null all but the raw ones. `template`: a chat template in place of the tokenizer's, as Jinja text or a file's path.
    """

    name: str | None = "demo"
    path: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    limit: int | None = None
    max_new_tokens: int = 64
    chat: bool | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        for name in ("path", "dataset", "subset", "split"):
            if (text := getattr(self, name)) is not None and (not str(text).strip() or "\0" in str(text)):
                raise UserError(f"task.{name}={text!r} names nothing: write task.{name}=null for none")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"task.limit={self.limit}: at least 1, or null for every prompt")
        if self.max_new_tokens < 1:
            raise UserError(f"task.max_new_tokens={self.max_new_tokens}: at least 1")


@dataclass(frozen=True, slots=True)
class Task:
    """`digest` is the sha256 of the rows and the chat template used, whatever file they came from."""

    items: tuple[Item, ...]
    label: str
    digest: str


def load_task(settings: TaskSettings) -> Task:
    """The items of a task, in the file's order; an id seen before gets the suffix `#2`, `#3`, …"""
    label, rows = _dataset(settings) if settings.dataset else _file(settings)
    template = read_template(settings.template, "task.template")
    digest = hashlib.sha256(b"" if template is None else template.encode())
    items = []
    for number, row in enumerate(islice(rows, settings.limit)):
        digest.update(json.dumps(dict(row.fields), sort_keys=True, default=str).encode() + b"\n")
        items.append(read_item(row, f"{label}/{number}", label))
    if not items:
        raise UserError(f"the task {settings.dataset or settings.path or label!r} is empty; give it at least one row")
    return Task(tuple(_distinct(items)), label, digest.hexdigest())


def encode(item: Item, answers: Sequence[str], tokenizer: Tokenizer, settings: TaskSettings) -> list[int]:
    """The prompt's ids for turn number `len(answers)`. The answers are the baseline's: all methods see the same prompt.

    A conversation goes through the chat template with a generation prompt, which then holds all special tokens. A raw
    prompt is `tokenizer(text)`: with the special tokens that the tokenizer adds by itself, and never a second BOS where
    the text begins with one. `task.chat=false` reads a conversation as its messages' texts with blank lines between.
    """
    messages = conversation(item, answers)
    if settings.chat or (settings.chat is None and not item.raw):
        ids = _chat(item, [message._asdict() for message in messages], tokenizer, settings)
    else:
        ids = tokenizer("\n\n".join(message.content for message in messages), verbose=False)["input_ids"]
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
    if not ids:
        raise UserError(f"{item.id}: the prompt has no tokens; its text must not be empty")
    return list(ids)


def encode_documents(item: Item, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each document, without special tokens: text to copy from, as it would stand within an answer."""
    return [list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in item.documents]


def _chat(item: Item, messages: list[dict[str, str]], tokenizer: Tokenizer, settings: TaskSettings) -> list[int]:
    from jinja2.exceptions import TemplateError

    template = read_template(settings.template, "task.template")
    if template is None and not tokenizer.chat_template:
        raise UserError(
            f"{item.id} is a conversation and the tokenizer has no chat template: "
            "give one with task.template=FILE, or task.chat=false for plain text"
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # it is a program of its own
        raise UserError(f"{item.id}: the chat template refuses it ({_line(error)}); task.template=FILE") from error
    return ids


def read_template(given: str | None, key: str) -> str | None:
    """A chat template given as Jinja text or as a file's path. `key`: what a message calls it."""
    if given is None or "{{" in given or "{%" in given:
        return given
    return decoded(read_file(Path(given), key), f"{key}={given!r}")


def _file(settings: TaskSettings) -> tuple[str, Iterator[Row]]:
    if settings.path is not None:
        path = Path(os.path.expanduser(settings.path))
        return path.stem, read_rows(path)
    if settings.name is None:
        raise UserError("no task is named: task.path=FILE.jsonl, task.dataset=NAME or task=demo")
    if settings.name not in TASKS:
        raise UserError(f"task.name={settings.name!r} is unknown: {', '.join(TASKS)}; a file is task.path=FILE.jsonl")
    return settings.name, read_rows(TASKS[settings.name])


def read_rows(path: Path, key: str = "task.path") -> Iterator[Row]:
    """The rows of a JSONL file; blank lines are none. `key`: which setting names the file, for errors."""
    for number, line in enumerate(read_file(path, key).split(b"\n"), 1):
        where = f"{path.name}:{number}"
        text = decoded(line, where)
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where} is not JSON ({error.msg}, column {error.colno}); write an object a line"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise UserError(
                f"{where} is more than is read ({_line(error)}); write an object of texts a line"
            ) from error
        if not isinstance(fields, dict):
            raise UserError(f"{where} is a JSON {type(fields).__name__}, not an object; write an object a line")
        if "\\u" in text and not _is_text(fields):
            raise UserError(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff); write the whole character")
        yield Row(fields, where)


def _is_text(fields: dict[str, Any]) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte order mark at the beginning is allowed
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error


def read_file(path: Path, key: str) -> bytes:
    """Its content; `key`: which setting names it, for errors."""
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{key}={str(path)!r} does not exist{_nearest(path)}") from error
    except OSError as error:
        raise UserError(f"{key}={str(path)!r} cannot be read: {error.strerror}") from error


def _nearest(path: Path) -> str:
    """What the user may have meant: a name in the same folder, or the first folder that is missing."""
    missing = next(part for part in [*reversed(path.parents), path] if not part.exists())
    if missing != path:
        return f"; there is no folder {str(missing)!r}"
    near = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], 1)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _dataset(settings: TaskSettings) -> tuple[str, Iterator[Row]]:
    name = f"task.dataset={settings.dataset!r}"
    if settings.dataset in FORMATS and settings.path is None:
        raise UserError(f"{name} is a format of files: name the file with task.path")
    import datasets

    try:
        found = datasets.load_dataset(settings.dataset, settings.subset, split=settings.split, data_files=settings.path)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        told = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise UserError(f"{name} cannot be loaded: {_line(told)}; see its name, task.subset and task.split") from error
    if isinstance(found, dict):
        if len(found) > 1:
            raise UserError(f"{name} has the splits {', '.join(found)}: choose one with task.split")
        (found,) = found.values()
    label = Path(settings.path or settings.dataset or "").stem
    return label, (Row(row, f"{name} row {number}") for number, row in enumerate(found))


def _distinct(items: Iterable[Item]) -> Iterator[Item]:
    seen: set[str] = set()
    for item in items:
        name, count = item.id, 1
        while name in seen:
            count += 1
            name = f"{item.id}#{count}"
        seen.add(name)
        yield replace(item, id=name)


def _line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
