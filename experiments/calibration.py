"""The text that a quantiser runs a model over: rows of a task's file, or plain text, cut into pieces of token ids."""

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..quantization.quantiser import Calibration
from .items import Message, Row, read_item, said
from .tasks import decoded, read_file, read_rows, read_template

_ANSWERS = ("response", "solution", "answer", "canonical_solution", "code", "target")  # what may follow a prompt
_AT = "quantization.calibration"
OWN = "chat"  # as a template: the tokenizer's own
Piece = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """What the model reads of a row, and the row's own texts, as they are in the file."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """`digest`: of the tokens, and so of everything that they come from; `tokens`: how many there are in all; `read`:
    the rows that are among them in part at least."""

    pieces: tuple[Piece, ...]
    digest: str
    read: tuple[Read, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True, slots=True)
class _Stream:
    """Texts one behind the other, kept apart as documents are. `starts`: where each begins."""

    tokens: list[int]
    read: list[Read]
    starts: list[int]

    def pieces(self, length: int) -> dict[int, Piece]:
        """By where they begin; what is left at the end is none."""
        return {at: tuple(self.tokens[at : at + length]) for at in range(0, len(self.tokens) - length + 1, length)}

    def rows_of(self, start: int, stop: int) -> Iterator[Read]:
        ends = [*self.starts[1:], len(self.tokens)]
        for read, first, end in zip(self.read, self.starts, ends, strict=True):
            if first < stop and end > start:
                yield read


def load_calibration(settings: Calibration, kind: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Pieces:
    """Pieces of `length`, of which `tokens` are drawn by `seed`. Refuses a file with less."""
    if settings.path is None:
        raise UserError(f"quantization={kind} reads a text to calibrate on: name it with {_AT}.path=FILE.jsonl")
    return draw(settings, tokenizer, context)


def draw(
    settings: Calibration,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    *,
    without: Collection[Piece] = (),
    key: str = _AT,
) -> Pieces:
    """None of the pieces `without` is drawn. `key`: what the user has named the file and the tokens by."""
    if settings.length > context:
        raise UserError(f"{_AT}.length={settings.length} is more than the model's context of {context}")
    stream = _stream(settings, tokenizer, key)
    pieces = {at: piece for at, piece in stream.pieces(settings.length).items() if piece not in without}
    wanted = settings.tokens // settings.length
    if len(pieces) < wanted:
        beside = f" beside the {len(without)} that are calibrated on" if without else ""
        raise UserError(
            f"{key}.path={settings.path!r} has {len(stream.tokens)} tokens, which are {len(pieces)} pieces of "
            f"{settings.length}{beside}, and {key}.tokens={settings.tokens} are asked for: give more text, or ask for "
            "less"
        )
    places = random.Random(settings.seed).sample(sorted(pieces), wanted)
    drawn = tuple(pieces[at] for at in places)
    if Path(settings.path or "").suffix == ".jsonl":
        read = dict.fromkeys(row for at in places for row in stream.rows_of(at, at + settings.length))
    else:  # one long text, of which the rest was not read
        parts = dict.fromkeys(str(tokenizer.decode(pieces[at])) for at in places)
        read = dict.fromkeys([Read(Path(settings.path or "").name, tuple(parts))])
    return Pieces(drawn, hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16], tuple(read))


def _stream(settings: Calibration, tokenizer: PreTrainedTokenizerBase, key: str) -> _Stream:
    between = [] if settings.template is not None else _separator(tokenizer)  # a template has marks of its own
    stream = _Stream([], [], [])
    for read, text in _texts(settings, tokenizer, key):
        stream.starts.append(len(stream.tokens))
        stream.read.append(read)
        stream.tokens.extend([*between, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
    return stream


def _separator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Before a document, as in pretraining: BOS where the tokenizer has one, else EOS. But those that a chat model
    declares are often of its turns, spelt out by its template (Qwen's <|im_end|>): then, the first other special token.
    """
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    known = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token is not None]
    found = [token for token in [*known, *tokenizer.all_special_tokens] if token not in template] or known[-1:]
    return [int(tokenizer.convert_tokens_to_ids(found[0]))] if found else []


def _texts(settings: Calibration, tokenizer: PreTrainedTokenizerBase, key: str) -> Iterator[tuple[Read, str]]:
    """A row's prompt and what follows it; with a template, as a conversation."""
    path = Path(settings.path or "").expanduser()
    if path.suffix != ".jsonl":
        yield Read(path.name, ()), decoded(read_file(path, f"{key}.path"), f"{key}.path={settings.path!r}")
        return
    template = _template(settings, tokenizer)
    for number, row in enumerate(read_rows(path, f"{key}.path")):
        messages = _messages(row, f"{path.stem}/{number}")
        parts = tuple(message.content for message in messages)
        yield (
            Read(row.where, parts),
            "\n".join(parts) if template is None else _filled(template, messages, row, tokenizer),
        )


def _filled(template: str, messages: Sequence[Message], row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2.exceptions import TemplateError

    conversation = [message._asdict() for message in messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False))
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # a program
        told = " ".join(str(error).split())[:200]
        raise UserError(f"{row.where}: {_AT}.template refuses it ({told}): name another template, or null") from error


def _template(settings: Calibration, tokenizer: PreTrainedTokenizerBase) -> str | None:
    if settings.template != OWN:
        return read_template(settings.template, f"{_AT}.template")
    if not isinstance(tokenizer.chat_template, str):
        raise UserError(f"{_AT}.template={OWN} is the tokenizer's own, and it has none: name a file with one, or null")
    return tokenizer.chat_template


def _messages(row: Row, name: str) -> Sequence[Message]:
    if messages := said(row):
        return messages
    messages = list(read_item(row, name, "").opening)
    answer = next((row.fields[key] for key in _ANSWERS if isinstance(row.fields.get(key), str)), None)
    if answer is not None:
        messages.append(Message("assistant", answer))
    return messages
