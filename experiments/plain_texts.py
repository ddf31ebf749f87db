"""Files of texts that are learnt from as they are, without a target's answers."""

import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ..decoding.model.source import Source
from ..decoding.training import Text
from ..errors import UserError
from .items import Row
from .target_answers import Lessons, enough
from .target_answers import digest as digest_of
from .tasks import Task, read_rows

_ASKS, _SAYS = ("prompt", "question"), ("response", "solution", "answer")


def read_texts(files: Sequence[str]) -> tuple[Task, list[str]]:
    """(a task without prompts, which names the files; the text of each row: `text`, or what is asked and said)."""
    texts = [_text(row) for file in files for row in read_rows(Path(file), "train.texts")]
    label = "+".join(Path(file).stem for file in files)
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Task((), label, digest), texts


def lessons_of(texts: Sequence[str], source: Source, held_back: int, longest: int) -> Lessons:
    """Texts of `longest` tokens, one row behind another with an end of text between; of the rows that
    are kept back, chosen by a hash, as many tokens of each at most."""
    order = sorted(dict.fromkeys(texts), key=digest_of)
    enough(len(order), held_back)
    ids = [list(source.tokenizer(text, verbose=False)["input_ids"]) for text in order]
    back, rest = ids[:held_back], ids[held_back:]
    stream = list(chain.from_iterable([*one, *source.eos_ids[:1]] for one in rest))
    pieces = [stream[at : at + longest] for at in range(0, len(stream), longest)]
    learnt = [Text(tuple(piece), 1) for piece in pieces if len(piece) > 1]
    judged = [Text(tuple(one[:longest]), 1) for one in back if len(one) > 1]
    if not learnt or not judged:
        raise UserError(
            "train.texts has too little text: rows that are kept back need two tokens, and so do the others"
        )
    return Lessons(learnt, (), 0, 0, 0, judged=judged)


def _text(row: Row) -> str:
    if row.has("text"):
        return row.text("text")
    parts = [next((row.text(key) for key in keys if row.has(key)), None) for keys in (_ASKS, _SAYS)]
    if None in parts:
        raise UserError(
            f"{row.where} has no text to learn from: `text`, or one of {', '.join(_ASKS)} and of {', '.join(_SAYS)}"
        )
    return "\n".join(part for part in parts if part is not None)
