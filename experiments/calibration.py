"""The text that a quantiser runs a model over: rows of a task's file, or plain text, cut into pieces of token ids."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..quantization.quantiser import Calibration
from .items import Row, read_item
from .tasks import read_file, read_rows, read_template

_ANSWERS = ("response", "solution", "answer", "canonical_solution", "code", "target")  # what may follow a prompt


@dataclass(frozen=True, slots=True)
class Pieces:
    """`digest`: of the tokens, and so of everything that they come from; `tokens`: how many there are in all."""

    pieces: tuple[tuple[int, ...], ...]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))


def load_calibration(settings: Calibration, kind: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Pieces:
    """Texts one behind the other with an end of text between them, cut into pieces of `length`, of which `tokens` are
    drawn by `seed`. Refuses a file with less."""
    at = "quantization.calibration"
    if settings.path is None:
        raise UserError(f"quantization={kind} reads a text to calibrate on: name it with {at}.path=FILE.jsonl")
    if settings.length > context:
        raise UserError(f"{at}.length={settings.length} is more than the model's context of {context}")
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    stream: list[int] = []
    for text in texts(settings, tokenizer):
        stream += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]
    pieces = [tuple(stream[i : i + settings.length]) for i in range(0, len(stream), settings.length)]
    pieces = [piece for piece in pieces if len(piece) == settings.length]
    wanted = settings.tokens // settings.length
    if len(pieces) < wanted:
        raise UserError(
            f"{at}.path={settings.path!r} has {len(stream)} tokens, which are {len(pieces)} pieces of {at}.length="
            f"{settings.length}, and {at}.tokens={settings.tokens} are asked for: give more text, or ask for less"
        )
    drawn = tuple(random.Random(settings.seed).sample(pieces, wanted))
    return Pieces(drawn, hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16])


def texts(settings: Calibration, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A row's prompt and what follows it; with a template, as a conversation."""
    path = Path(settings.path or "").expanduser()
    if path.suffix != ".jsonl":
        yield read_file(path, "quantization.calibration.path").decode("utf-8", "replace")
        return
    template = read_template(settings.template, "quantization.calibration.template")
    for number, row in enumerate(read_rows(path, "quantization.calibration.path")):
        yield _text(row, f"{path.stem}/{number}", template, tokenizer)


def _text(row: Row, name: str, template: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    messages: list[dict[str, Any]]
    if row.has("messages"):
        messages = [dict(message) for message in row.entries("messages")]
    else:
        item = read_item(row, name, "")
        messages = [message._asdict() for message in item.opening]
        answer = next((row.fields[key] for key in _ANSWERS if isinstance(row.fields.get(key), str)), None)
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    if template is not None:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    return _joined([str(message["content"]) for message in messages])


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(parts)
