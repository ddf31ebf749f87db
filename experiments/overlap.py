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

# Text is measured in quarters of an English word, for scripts without spaces between words are compared by characters,
# and a word of theirs has several: about 2 in Chinese and Japanese, 4 and more in Thai, Lao, Burmese and Khmer.
WORD, HALF, QUARTER = 4, 2, 1
RUN = 13 * WORD  # in a row that two texts must share to be held for the same
MARK = 6 * WORD  # what is hashed; a text of less says nothing
COMMON, OFTEN = 3, 0.1  # rows at least, and of all rows, that share some words: an instruction that all have
_HALVES = "々-〇ぁ-ヺー-ヿㇰ-ㇿ㐀-䶿一-鿿豈-\ufaffｦ-ﾟ\U00020000-\U0003ffff"
_QUARTERS = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u1000-\u103f\u1050-\u108f\u1780-\u17d3"
_WORDS = re.compile(f"([{_HALVES}])|([{_QUARTERS}])|([^\\W{_HALVES}{_QUARTERS}]+)")
Overlap = Literal["refuse", "warn"]
Named = tuple[str, Sequence[str]]  # where a row stands, and its texts


@dataclass(frozen=True, slots=True)
class Marks:
    """Of rows: which of them has 6 words in a row, by their hash; none ("") of words that many rows share. Case and
    whatever is no letter or digit do not count. `texts`: the rows' own, which only what is judged needs."""

    rows: Mapping[str, str]
    texts: Sequence[Named] = ()

    @staticmethod
    def of(rows: Iterable[Named]) -> "Marks":
        distinct: dict[tuple[str, ...], str] = {}  # the same row again is no sign of an instruction
        for name, texts in rows:
            distinct.setdefault(tuple(texts), name)
        found: dict[str, str] = {}
        shared: Counter[str] = Counter()
        for texts, name in distinct.items():
            mine = {_mark(part) for text in texts for part in _parts(_units(text), MARK)}
            shared.update(mine)
            found |= {mark: name for mark in mine if mark not in found}
        most = max(COMMON, OFTEN * len(distinct))
        marks = {mark: name if shared[mark] < most else "" for mark, name in found.items()}
        return Marks(marks, [(name, texts) for texts, name in distinct.items()])

    @staticmethod
    def of_pieces(pieces: Pieces) -> "Marks":
        return Marks.of((read.name, read.parts) for read in pieces.read)

    def shared(self, other: "Marks") -> Iterator[tuple[str, str]]:
        """Pairs of rows, the other's second: 13 words in a row of the other's, or all of a shorter text of its, are in
        the first."""
        runs = ((name, run) for name, texts in other.texts for text in texts for run in _parts(_units(text), RUN))
        pairs = ((self._has(run, other), name) for name, run in runs)
        return iter(dict.fromkeys((mine, name) for mine, name in pairs if mine))

    def _has(self, run: Sequence[str], other: "Marks") -> str:
        """All of it in pieces that overlap, one of which at least is in few rows of either; or, of folders that were
        quantised by earlier versions, as a whole."""
        whole = self.rows.get(_mark(run), "")
        if not whole and not all(_mark(part) in self.rows for part in _parts(run, MARK)):
            return ""
        few = (mark for mark in map(_mark, _parts(run, MARK)) if other.rows[mark])
        return next(filter(None, (whole or self.rows[mark] for mark in few)), "")


def _units(text: str) -> list[str]:
    """A word, or a character, and then nothing for as long as it counts."""
    units: list[str] = []
    for half, quarter, word in _WORDS.findall(text.lower()):
        units += [half or quarter or word, *[""] * ((HALF if half else QUARTER if quarter else WORD) - 1)]
    return units


def _parts(units: Sequence[str], length: int) -> Iterator[Sequence[str]]:
    """All that are so long; of a shorter text, which says something still, the whole."""
    if len(units) >= MARK:
        starts = range(max(1, len(units) - length + 1))
        yield from (units[at : at + length] for at in starts if units[at])


def _mark(part: Sequence[str]) -> str:
    return blake2b(" ".join(filter(None, part)).encode(), digest_size=8).hexdigest()


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
