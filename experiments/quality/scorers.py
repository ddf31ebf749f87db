"""Scorers: what an answer is worth, beside what its row knows of the right one. Each sees the answer and the row."""

import inspect
import json
import re
import traceback
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ...errors import UserError
from ..construct import Constructor, did_you_mean, shown
from ..items import Row
from .deadline import LateError, within
from .programs import program_of, tests_of
from .sandbox import Limits, network_isolation, run_tests

Scores = dict[str, float]

# Not the digits of a name or of another number; a minus only where it subtracts from nothing.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-−])?[$€£]?(?<![A-Za-z_\d.])"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?|\.\d+)"
)


@runtime_checkable
class Scorer(Protocol):
    """`metrics`: names of its numbers, the main one first; a mean over items is taken of each."""

    @property
    def metrics(self) -> tuple[str, ...]: ...
    @property
    def higher_is_better(self) -> bool: ...

    def check(self, row: Row) -> None:
        """Refuses a row that lacks what the answer is compared with, before a model is asked."""

    def __call__(self, response: str, row: Row) -> Scores: ...


@dataclass(frozen=True, slots=True)
class Text:
    """Compares with each gold and takes the best. All three are computed; `main` is the one that counts.

    `exact_match`: the answer's first line that is not empty (all of it where the gold has several lines) is the gold;
    `f1`: SQuAD's, of their words as bags; `contains`: the gold's words stand in the answer, one after another.
    Lower case, without punctuation and the articles a, an, the; `normalise=false` compares as they are, less the blanks
    around.
    """

    main: Literal["exact_match", "f1", "contains"]
    normalise: bool = True
    higher_is_better = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.main, *(name for name in ("exact_match", "f1", "contains") if name != self.main))

    def check(self, row: Row) -> None:
        golds(row)

    def __call__(self, response: str, row: Row) -> Scores:
        found = [self._scores(response, gold) for gold in golds(row)]
        return {name: max(scores[name] for scores in found) for name in self.metrics}

    def _scores(self, response: str, gold: str) -> Scores:
        plain = normalised if self.normalise else str.strip
        line = response.strip() if "\n" in gold.strip() else response.strip().partition("\n")[0]
        answer, wanted = plain(response), plain(gold)
        return {
            "exact_match": float(plain(line) == wanted),
            "f1": _f1(answer.split(), wanted.split()),
            "contains": float(f" {' '.join(wanted.split())} " in f" {' '.join(answer.split())} "),
        }


@dataclass(frozen=True, slots=True)
class Regex:
    """The `group` of the first (or last) match of `pattern` is a gold, less the blanks around; without a gold in the
    row, that there is a match. `group` null: the first group, or all of a pattern without groups. `timeout`: seconds
    an answer may take; a pattern that needs more, or for ever, is a UserError."""

    pattern: str
    group: int | str | None = None
    which: Literal["first", "last"] = "first"
    ignore_case: bool = False
    timeout: float = 10.0
    metrics = ("exact_match",)
    higher_is_better = True

    def __post_init__(self) -> None:
        _check_timeout(self.timeout)
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"scorer.pattern={self.pattern!r} is no regular expression: {error}") from error
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            has = f"its groups are {', '.join(compiled.groupindex) or 'without names'}"
            raise UserError(f"scorer.group={self.group!r} is not in scorer.pattern: {has}")
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise UserError(f"scorer.group={self.group}: the pattern has {compiled.groups} groups, and 0 is all of it")

    def check(self, row: Row) -> None:
        if row.has("answer"):
            golds(row)

    def __call__(self, response: str, row: Row) -> Scores:
        pattern = re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)
        try:
            matches = within(self.timeout, lambda: list(pattern.finditer(response)))
        except LateError:
            took = f"took over {self.timeout:g} s on an answer of {len(response)} characters"
            remedy = "a repeat within a repeat, such as (a+)+, may take for ever; simplify it, or raise scorer.timeout"
            raise UserError(f"{row.where}: scorer.pattern={self.pattern!r:.60} {took}: {remedy}") from None
        if not matches or not row.has("answer"):
            return {"exact_match": float(bool(matches))}
        match = matches[0 if self.which == "first" else -1]
        found = match[(1 if pattern.groups else 0) if self.group is None else self.group]
        texts = [(found or "").strip(), *golds(row)]
        answer, *wanted = [text.casefold() for text in texts] if self.ignore_case else texts
        return {"exact_match": float(answer in wanted)}


@dataclass(frozen=True, slots=True)
class Number:
    """The last number of the answer, or the one behind the first `####`, is the gold within `tolerance`. As numbers:
    1,000 = $1000.00 = 1e3."""

    tolerance: float = 0.0
    metrics = ("exact_match",)
    higher_is_better = True

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise UserError(f"scorer.tolerance={self.tolerance}: a difference of at least 0")

    def check(self, row: Row) -> None:
        for gold in golds(row):
            if as_number(gold) is None:
                raise UserError(f"{row.where}: answer={gold!r:.60} is no number, which the scorer `number` compares")

    def __call__(self, response: str, row: Row) -> Scores:
        found = last_number(response)
        wanted = [number for gold in golds(row) if (number := as_number(gold)) is not None]
        near = found is not None and any(abs(found - number) <= Decimal(repr(self.tolerance)) for number in wanted)
        return {"exact_match": float(near)}


@dataclass(frozen=True, slots=True)
class JsonField:
    """The answer's first JSON (all of it, fenced, or within text) holds the row's `answer` under `field`, a path such
    as `person.names.0`; null compares the whole. Numbers are compared as numbers, texts less the blanks around.
    `valid_json`: how often there is any."""

    field: str | None = None
    metrics = ("exact_match", "valid_json")
    higher_is_better = True

    def check(self, row: Row) -> None:
        if not row.has("answer"):
            raise UserError(f"{row.where}: answer is missing, which the scorer `json_field` compares with")

    def __call__(self, response: str, row: Row) -> Scores:
        found = next(_jsons(response), None)
        if found is None:
            return {"exact_match": 0.0, "valid_json": 0.0}
        value: Any = found[0]
        for name in self.field.split(".") if self.field else ():
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return {"exact_match": 0.0, "valid_json": 1.0}
        return {"exact_match": float(_same(value, row.fields["answer"])), "valid_json": 1.0}


@dataclass(frozen=True, slots=True)
class UnitTests:
    """The answer's program passes the row's tests in the sandbox: `test` (with `entry_point`: its `check` of that), or
    `test_setup_code` and the `test_list`. `timeout`: seconds of CPU."""

    timeout: float = 5.0
    memory_mb: int = 1024
    metrics = ("pass@1",)
    higher_is_better = True

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        return Limits(timeout=self.timeout, memory_mb=self.memory_mb)

    @property
    def isolation(self) -> str:
        """How the network is kept from programs on this machine."""
        return network_isolation()

    def check(self, row: Row) -> None:
        tests_of(row)

    def __call__(self, response: str, row: Row) -> Scores:
        return {"pass@1": float(run_tests(program_of(response, row), tests_of(row), self.limits()).passed)}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the user's: `function(response, row)` gives a number, true or false, or a number by name.
    `timeout`: seconds it may take for an answer, the first of which may load what it needs; more is a UserError."""

    name: str
    function: Any  # a callable
    main: str | None = None
    higher_is_better: bool = True
    timeout: float = 60.0

    def __post_init__(self) -> None:
        _check_timeout(self.timeout)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.main or self.name.rpartition(".")[2],)

    def check(self, row: Row) -> None:
        """Only the function knows what it needs."""

    def __call__(self, response: str, row: Row) -> Scores:
        try:
            given = within(self.timeout, lambda: self.function(response, dict(row.fields)))
        except LateError:
            remedy = "mend it, or give it longer with scorer={name: …, timeout: SECONDS}"
            raise UserError(f"{row.where}: {self.name} took over {self.timeout:g} s on an answer; {remedy}") from None
        except Exception as error:  # the user's program: whatever it raises is told in one line
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"{row.where}: {self.name} raised {told} ({self._line(error)})") from error
        scores = given if isinstance(given, Mapping) else {self.metrics[0]: given}
        for name, value in scores.items():
            if not isinstance(name, str) or not isinstance(value, int | float):
                raise UserError(f"{row.where}: {self.name} gave {given!r:.60}; a number, a bool, or numbers by name")
            if not isfinite(value):
                raise UserError(f"{row.where}: {self.name} gave {given!r:.60}; {name} must be finite to be averaged")
        if self.metrics[0] not in scores:
            names = ", ".join(scores) or "nothing"
            raise UserError(f"{row.where}: {self.name} gave {names}; say which counts: scorer={{name: …, main: NAME}}")
        return {name: float(value) for name, value in scores.items()}

    def _line(self, error: Exception) -> str:
        """Where it was raised: the innermost line of the function's own file."""
        frames = traceback.extract_tb(error.__traceback__)
        source = inspect.getsourcefile(inspect.unwrap(self.function))
        own = [frame for frame in frames if source is not None and Path(frame.filename) == Path(source)]
        return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"


SCORERS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "exact_match": (Text, {"main": "exact_match"}),
    "f1": (Text, {"main": "f1"}),
    "contains": (Text, {"main": "contains"}),
    "regex": (Regex, {}),
    "number": (Number, {}),
    "json_field": (JsonField, {}),
    "unit_tests": (UnitTests, {}),
}


def build_scorer(given: str | Mapping[str, Any], trusted: tuple[str, ...], key: str = "scorer") -> Scorer:
    """Of a name, a mapping with `name` and its keys, or the dotted path of a function in a trusted package."""
    keys = {"name": given} if isinstance(given, str) else dict(given)
    name, constructor = str(keys.pop("name", "")), Constructor(trusted)
    owner, fixed = SCORERS.get(name, (Function, {"name": name}))
    if owner is Function:
        if "." not in name:
            known = f"known: {', '.join(SCORERS)}, or a function of yours such as mylab.score.my_function"
            raise UserError(f"{key}={name!r} is unknown: {did_you_mean(name, SCORERS)}{known}")
        fixed = {"name": name, "function": constructor.function(name, key)}
    if taken := [k for k in keys if k in fixed]:
        raise UserError(f"{key}.{taken[0]} is not to be given: the name {name} says it")
    scorer: Scorer = constructor.call(owner, {**keys, **fixed}, key)
    return scorer


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds < 1_000_000:
        raise UserError(f"scorer.timeout={seconds}: seconds that an answer may take: more than 0, and under a million")


def scorer_text(given: str | Mapping[str, Any]) -> str:
    """As it is recorded: the name, then its keys as given."""
    if isinstance(given, str):
        return given
    keys = ", ".join(f"{k}: {shown(v)}" for k, v in sorted(given.items()) if k != "name")
    return f"{given.get('name')}{{{keys}}}" if keys else str(given.get("name"))


def golds(row: Row) -> tuple[str, ...]:
    """The right answers as texts: `answer`, one or a list of which each counts, and `aliases`."""
    if not row.has("answer"):
        raise UserError(f"{row.where}: answer is missing (fields: {', '.join(row.fields)}); fields={{answer: YOURS}}")
    answer = row.fields["answer"]
    found = []
    for value in [*(answer if isinstance(answer, list) else [answer]), *row.entries("aliases")]:
        if isinstance(value, bool):
            found.append(json.dumps(value))
        elif isinstance(value, int | float):
            found.append(str(value))
        else:
            found.append(row.checked(value, "answer").strip())
    if not found:
        raise UserError(f"{row.where}: answer is an empty list; at least one right answer is needed")
    return tuple(found)


def normalised(text: str) -> str:
    """As SQuAD compares answers; what would vanish altogether, such as `?`, only loses case and blanks."""
    lower = text.strip().lower()
    bare = "".join(c for c in lower if not unicodedata.category(c).startswith("P"))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the")) or lower


def last_number(text: str) -> Decimal | None:
    """The number behind the first `####`, where the answer has one, else its last number."""
    _, marked, behind = text.partition("####")
    if marked and (first := _NUMBER.search(behind)):
        return _value(first)
    *_, last = (None, *_NUMBER.finditer(text))
    return None if last is None else _value(last)


def as_number(text: str) -> Decimal | None:
    """A text that is one number, with or without $, %, a final period and thousands."""
    match = _NUMBER.fullmatch(text.strip().rstrip(".").removesuffix("%").strip())
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["value"].replace(",", ""))
    return -value if match["sign"] else value


def _f1(answer: list[str], gold: list[str]) -> float:
    shared = (Counter(answer) & Counter(gold)).total()
    return 2 * shared / (len(answer) + len(gold)) if shared else 0.0


def _jsons(text: str) -> Iterator[tuple[Any]]:
    """Objects and lists within a text, each in a tuple; or the text itself, whatever it is, where it is JSON."""
    decoder = json.JSONDecoder()
    starts = [0, *(match.start() for match in re.finditer(r"[{\[]", text))]
    for number, start in enumerate(starts):
        try:
            value, end = decoder.raw_decode(text.lstrip() if number == 0 else text, 0 if number == 0 else start)
        except (ValueError, RecursionError):
            continue
        if number or not text.lstrip()[end:].strip():
            yield (value,)


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        return value.keys() == wanted.keys() and all(_same(value[k], wanted[k]) for k in value)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, Mapping | list) or isinstance(wanted, Mapping | list):
        return False
    numbers = [None if isinstance(v, bool | None) else as_number(str(v)) for v in (value, wanted)]
    if None not in numbers and not (isinstance(value, str) and isinstance(wanted, str)):
        return numbers[0] == numbers[1]
    texts = [v.strip() if isinstance(v, str) else json.dumps(v) for v in (value, wanted)]
    return texts[0] == texts[1]
