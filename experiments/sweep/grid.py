"""Which cells a sweep has: the product of every `a,b` on the command line and of the alternatives under `sweep`.

An alternative is a mapping of overrides, so that an option comes with keys of its own:

    sweep:
      - drafting: none
      - {drafting: prompt_lookup, drafting.max_draft: [4, 8]}

are three cells; a list is a list of values. Several axes have names, and an entry that is no mapping is a value of the
key that its axis is named after: `sweep: {drafting: [none, {…}], seed: [0, 1]}`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from itertools import chain, islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import UserError
from ..compose import Composer, OtherOptionError, quoted

if TYPE_CHECKING:
    from ..config import RunConfig

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
MOST = 10_000  # cells: planning takes a hundredth of a second for each, before the first one runs
_SHOWN = 3  # mistakes of different cells in one message
_FORM = "sweep is a list of mappings of overrides, [{drafting: none}, {seed: [0, 1]}], or a mapping of names to lists"


class Cell(NamedTuple):
    """One combination of a sweep: overrides that are a command line of their own, and what is its own among them."""

    overrides: list[str]
    label: str


def expand(overrides: Sequence[str], composer: Composer, *, multirun: bool = True) -> list[Cell]:
    """The cells of a command line, each once, the last axis fastest; without a sweep, one that has no label.

    Without `multirun`, a word that lists several values is no axis, and so a mistake.
    """
    axes = [_values(word.lstrip("+"), composer) if multirun else [word.lstrip("+")] for word in overrides]
    _bounded(axes)
    found = chain.from_iterable(_rows(words, composer) for words in product(*axes))
    rows = list(islice(found, MOST + 1))
    _bounded([rows])
    rows = list(dict.fromkeys(rows))
    return [Cell(list(row), label) for row, label in zip(rows, _labels(rows, composer), strict=True)]


def composed(cells: Sequence[Cell], composer: Composer) -> list["RunConfig"]:
    """Every cell's configuration. What is wrong with any of them is said before the first one runs."""
    configs, wrong, foreign = [], dict[str, list[str]](), False
    for cell in cells:
        try:
            configs.append(composer.compose(cell.overrides))
        except UserError as error:
            if len(cells) == 1:
                raise
            foreign = foreign or isinstance(error, OtherOptionError)
            wrong.setdefault(str(error), []).append(cell.label)
    if not wrong:
        return configs
    told = [f"{_some(labels)}: {message}" for message, labels in wrong.items()]
    more = [f"and {len(told) - _SHOWN} more mistakes"] if len(told) > _SHOWN else []
    count = sum(map(len, wrong.values()))
    remedy = "; a key goes with its option in 'sweep=[{GROUP: OPTION, GROUP.KEY: VALUE}, …]'" if foreign else ""
    mistakes = "; ".join([*told[:_SHOWN], *more])
    raise UserError(f"{count} of {len(cells)} cells cannot be run, so none is: {mistakes}{remedy}")


def _bounded(axes: Sequence[Sized]) -> None:
    """Before they are multiplied."""
    if (count := prod(map(len, axes))) > MOST:
        raise UserError(
            f"these are more cells than the {MOST:,} of a sweep, at least {count:,}: list fewer values, or look for "
            "the best with search.space={KEY: [LOW, HIGH]}"
        )


def _some(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} (and {len(labels) - 1} more)"


def _rows(words: tuple[str, ...], composer: Composer) -> list[tuple[str, ...]]:
    """A command line without lists of values, multiplied by what its sweep lists."""
    axes = _axes(composer.sweep(words), composer)
    if not axes:
        return [words]
    _bounded(axes)
    fixed = (*(word for word in words if _key(word) != "sweep"), "sweep=null")
    rows = [(*fixed, *chain.from_iterable(some)) for some in product(*axes)]
    for row in rows:
        key, count = Counter(map(_key, row)).most_common(1)[0]
        if count > 1 and key not in map(_key, fixed):
            raise UserError(f"sweep: {key} has two values in one cell; a key belongs to one axis")
        if count > 1:
            (word,) = (word for word in fixed if _key(word) == key)
            raise UserError(
                f"{word} is given, and the sweep has values of {key}: leave one out, sweep=null for the other"
            )
    return rows


def _axes(sweep: Any, composer: Composer) -> list[list[tuple[str, ...]]]:
    """Of each axis, the words of each of its points."""
    if sweep is None:
        return []
    axes = sweep if isinstance(sweep, Mapping) else {"": sweep}
    if not axes or not all(isinstance(axis, list) and axis for axis in axes.values()):
        raise UserError(_FORM)
    return [[p for entry in axis for p in _points(str(name), entry, composer)] for name, axis in axes.items()]


def _points(name: str, entry: Any, composer: Composer) -> list[tuple[str, ...]]:
    """An alternative, its lists multiplied."""
    if not isinstance(entry, Mapping):
        if not name:
            raise UserError(f"{_FORM}; got {entry!r}")
        entry = {name: [entry]}
    listed = {str(key): value if isinstance(value, list) else [value] for key, value in entry.items()}
    for key, values in listed.items():
        if not values:
            raise UserError(f"sweep: {key} has no values")
    if any(_key(key).partition(".")[0] == "sweep" for key in listed):
        raise UserError(f"a sweep stands in no other sweep; {_FORM}")
    axes = [[f"{key}={written(value, key)}" for value in values] for key, values in listed.items()]
    _bounded(axes)
    for word in chain.from_iterable(axes):
        composer.parse(word)
    return list(product(*axes))


def written(value: Any, key: str) -> str:
    """As it stands on a command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(v, key)}" for name, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(v, key) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"sweep: {key} has a value of no type that a command line knows, {value!r}; quote it")
    plain = _PLAIN.fullmatch(value) and value.lower() not in ("true", "false", "null", "nan", "inf")
    return value if plain else quoted(value)


def _values(word: str, composer: Composer) -> list[str]:
    """What one word of the command line contributes."""
    from hydra.core.override_parser.types import Glob

    override = composer.parse(word)
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise UserError(f"{word} has no end of values: a sweep takes a,b or range(1,4)")
    swept: Any = override.value()
    if isinstance(swept, Glob):
        values = swept.filter(list(composer.options.get(override.key_or_group, ())))
    else:
        try:
            values = list(islice(override.sweep_string_iterator(), MOST + 1))
        except ValueError as error:
            raise UserError(f"{word}: {error}") from None
    if not values:
        raise UserError(f"{word} names nothing to run")
    return [f"{key}={value}" for value in values]


def _key(word: str) -> str:
    return word.partition("=")[0]


def _labels(rows: Sequence[tuple[str, ...]], composer: Composer) -> list[str]:
    """What each row has that not all have. A key loses its group where the option stands before it and no other group
    has it: `drafting=prompt_lookup max_draft=8`."""
    common = set(rows[0]).intersection(*rows)
    own = [[word for word in row if word not in common and word != "sweep=null"] for row in rows]
    groups: dict[str, set[str]] = {}
    for key in map(_key, chain.from_iterable(own)):
        group, _, name = key.partition(".")
        groups.setdefault(name or group, set()).add(group)
    labels = []
    for words in own:
        keys = set(map(_key, words))
        short = []
        for word in words:
            group, dot, name = _key(word).partition(".")
            clear = dot and group in keys and group in composer.options and len(groups[name]) == 1
            short.append(word.removeprefix(f"{group}.") if clear else word)
        labels.append(" ".join(short))
    return [label or ("default" if len(rows) > 1 else "") for label in labels]
