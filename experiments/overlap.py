"""Whether a model is judged by what it was calibrated on: texts held against texts, by hashes of what is in them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal

from ..errors import UserError
from .calibration import Pieces
from .items import Item

WORDS = 13  # in a row that two texts must share to be held for the same
SHORT = 6  # words of a text that is compared as a whole; a shorter one says nothing
COMMON, OFTEN = 3, 0.1  # rows at least, and of all rows, that share some words: an instruction that all have
Overlap = Literal["refuse", "warn"]
Named = tuple[str, Sequence[str]]  # where a row stands, and its texts


@dataclass(frozen=True, slots=True)
class Marks:
    """Of rows: which of them has a text, by the hash of 13 words in a row, or of all of a shorter one. Case and
    whatever is no letter or digit do not count."""

    rows: Mapping[str, str]

    @staticmethod
    def of(rows: Iterable[Named]) -> "Marks":
        found: dict[str, str] = {}
        shared: Counter[str] = Counter()
        count = 0
        for name, texts in rows:
            count += 1
            mine = {mark for text in texts for mark in _marks(text)}
            shared.update(mine)
            found |= {mark: name for mark in mine if mark not in found}
        most = max(COMMON, OFTEN * count)
        return Marks({mark: name for mark, name in found.items() if shared[mark] < most})

    @staticmethod
    def of_pieces(pieces: Pieces) -> "Marks":
        return Marks.of((read.name, read.parts) for read in pieces.read)

    def shared(self, other: "Marks") -> Iterator[tuple[str, str]]:
        """Pairs of rows, the other's second."""
        seen = ((name, other.rows[mark]) for mark, name in self.rows.items() if mark in other.rows)
        return iter(dict.fromkeys(seen))


def _marks(text: str) -> Iterator[str]:
    words = re.findall(r"\w+", text.lower())
    if len(words) < SHORT:
        return
    for at in range(max(1, len(words) - WORDS + 1)):
        yield blake2b(" ".join(words[at : at + WORDS]).encode(), digest_size=8).hexdigest()


def texts_in(value: Any) -> Iterator[str]:
    """Of a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(inner)


def judging(items: Iterable[Item], tasks: Mapping[str, Any]) -> Marks:
    """Of the rows that a run decodes, and of those that lm-eval's tasks ask."""
    prompts = ((item.id, [m.content for m in item.opening] + [*item.later, *texts_in(item.gold)]) for item in items)
    asked = (
        (f"{name} {i}", list(texts_in(_fields(task, doc))))
        for name, task in tasks.items()
        for i, doc in enumerate(task.eval_docs)
    )
    return Marks.of(chain(prompts, asked))


def _fields(task: Any, doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document's own; a file's row goes through lm-eval as one text, within which no short one is a whole."""
    own = getattr(task, "own", None)
    return doc if own is None else own.question(doc).row.fields


def check_overlap(calibrated: Marks, judged: Marks, how: Overlap) -> list[str]:
    """Refuses, or warns of, rows that are in both."""
    pairs = list(calibrated.shared(judged))
    if not pairs:
        return []
    read, asked = pairs[0]
    more = f", and so have {len(pairs) - 1} other pairs of rows" if len(pairs) > 1 else ""
    told = f"{asked} has a text that the model was calibrated on, {read}{more}: its results say too much"
    if how == "refuse":
        raise UserError(f"{told}; calibrate on other text, or quantise with quantization.calibration.overlap=warn")
    return [told]
