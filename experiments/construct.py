"""Plain data becomes settings: keys are constructor keywords, `_target_` names the class, annotations are the types.

hydra.utils.instantiate would import whatever a YAML names; this imports decodelab and trusted packages alone.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ..errors import UserError

_NOUNS: Mapping[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    NoneType: ("null", "nulls"),
}
QUOTES = "'\""
_SEQUENCES = (list, tuple, Sequence, Collection)
_UNIONS = (Union, UnionType)


class UnknownKeyError(UserError):
    """A key that the constructor does not take. `known`: those that it does."""

    def __init__(self, key: str, known: Collection[str]) -> None:
        self.key, self.known = key, tuple(known)
        owner, _, name = key.rpartition(".")
        has = f"has {', '.join(known)}" if known else "has no keys"
        super().__init__(f"{key} is unknown: {did_you_mean(name, known)}{owner or 'a run'} {has}")


class _MisfitError(Exception):
    """The value has another type."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}? " if near else ""


@dataclass(frozen=True, slots=True)
class Constructor:
    """`trusted`: packages, beside decodelab, whose classes a `_target_` may name."""

    trusted: tuple[str, ...] = ()

    def call(self, owner: type, given: Mapping[str, Any], key: str = "") -> Any:
        """owner(**given), each value built as its parameter's annotation says. `key`: where `given` stands."""
        signature = inspect.signature(owner, eval_str=True)
        parameters = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for name in given:
            if name not in parameters and len(parameters) == len(signature.parameters):
                raise UnknownKeyError(_join(key, name), tuple(parameters))
        for name, parameter in parameters.items():
            if name not in given and parameter.default is parameter.empty:
                raise UserError(f"{_join(key, name)} is missing: give {_join(key, name)}=…")
        types = {n: Any if p.annotation is p.empty else p.annotation for n, p in parameters.items()}
        return owner(**{n: self.build(value, types.get(n, Any), _join(key, n)) for n, value in given.items()})

    def build(self, value: Any, expected: Any, key: str) -> Any:
        """`value` as `expected`, an annotation."""
        try:
            return self._fitted(value, expected, key)
        except _MisfitError:
            number = type(value) in (bool, int, float)
            quote = f"; a text is quoted: '{key}=\"…\"'" if number and "a text" in _nouns(expected) else ""
            if isinstance(value, str) and any(noun.startswith("a list") for noun in _nouns(expected)):
                quote = f"; a list is written '{key}={as_list(value)}'"
            raise UserError(f"{key} must be {_either(expected)}, got {shown(value)}{quote}") from None

    def _fitted(self, value: Any, expected: Any, key: str) -> Any:
        origin, arms = get_origin(expected), get_args(expected)
        if isinstance(value, Mapping) and "_target_" in value:
            return self._object(value, arms if origin in _UNIONS else (expected,), key)
        if origin in _UNIONS:
            return self._first(value, arms, key)
        if isinstance(value, Mapping):
            return self._from_mapping({str(name): v for name, v in value.items()}, expected, key)
        if isinstance(value, list):
            return self._from_list(value, expected, key)
        if expected is float:
            return float(_checked(value, isinstance(value, int | float) and not isinstance(value, bool)))
        if origin is Literal:
            return _checked(value, any(value == arm and type(value) is type(arm) for arm in arms))
        return _checked(value, expected is Any or type(value) is expected)

    def _first(self, value: Any, arms: Sequence[Any], key: str) -> Any:
        for arm in arms:
            try:
                return self._fitted(value, arm, key)
            except _MisfitError:
                continue
        raise _MisfitError

    def _object(self, value: Mapping[str, Any], allowed: Sequence[Any], key: str) -> Any:
        owner = self.find(value["_target_"], key)
        made = self.call(owner, {str(name): v for name, v in value.items() if name != "_target_"}, key)
        kinds = [get_origin(kind) or kind for kind in allowed]
        if Any not in kinds and not isinstance(made, tuple(kind for kind in kinds if isinstance(kind, type))):
            raise UserError(f"{key}._target_={value['_target_']} is no {' or '.join(kind.__name__ for kind in kinds)}")
        return made

    def _from_mapping(self, value: Mapping[str, Any], expected: Any, key: str) -> Any:
        if is_dataclass(expected) and isinstance(expected, type):
            return self.call(expected, value, key)
        _checked(value, expected is Any or (get_origin(expected) or expected) in (dict, Mapping))
        of = (get_args(expected) or (str, Any))[1]
        return {name: self.build(v, of, _join(key, name)) for name, v in value.items()}

    def _from_list(self, value: list[Any], expected: Any, key: str) -> Any:
        kind, arms = get_origin(expected) or expected, get_args(expected)
        _checked(value, kind is Any or kind in _SEQUENCES)
        each = list(arms) if kind is tuple and arms and Ellipsis not in arms else [*arms[:1], Any][:1] * len(value)
        _checked(value, len(each) == len(value))
        entries = [self._fitted(v, of, f"{key}[{i}]") for i, (v, of) in enumerate(zip(value, each, strict=True))]
        return tuple(entries) if kind is tuple else entries

    def find(self, target: Any, key: str) -> type:
        """The class that `_target_` names. Nothing of a package that is not trusted is imported."""
        named = f"{key}._target_={target}"
        found = self._own(target, named, "a _target_ is a class", ("decodelab", *self.trusted))
        if not isinstance(found, type):
            raise UserError(f"{named}: {_parted(target)[0]} has no class {_parted(target)[1]} of its own")
        return found

    def function(self, target: str, key: str) -> Callable[..., Any]:
        """The function of a trusted package that the dotted path `target` names, as `find` finds classes."""
        named = f"{key}={target}"
        found = self._own(target, named, "it is a function", self.trusted)
        if found is None or isinstance(found, type) or not callable(found):
            raise UserError(f"{named}: {_parted(target)[0]} has no function {_parted(target)[1]} of its own")
        return found

    def _own(self, target: Any, named: str, what: str, allowed: Collection[str]) -> Any:
        """What a module of the `allowed` packages holds under a name and does not merely import; None if nothing."""
        module, name = _parted(target)
        if not module or not _within(module, allowed):
            own = f"{what} of {' or '.join(allowed) or 'a trusted package'}"
            raise UserError(f"{named} is refused: {own}; trusted=[PACKAGE] adds a package of yours")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not _within(module, (error.name,)):
                raise
            where = "" if _within(module, ("decodelab",)) else "; install its package, or name its folder in PYTHONPATH"
            raise UserError(f"{named}: there is no module {error.name}{where}") from None
        return found if _within(getattr(found, "__module__", None) or "", allowed) else None


def _parted(target: Any) -> tuple[str, str]:
    """(module, name) of a dotted path."""
    module, _, name = str(target).rpartition(".")
    return module, name


def shown(value: Any) -> str:
    """As it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return "null" if value is None else repr(value)


def as_list(text: str) -> str:
    """A text that was meant as a list of texts, as a command line takes one."""
    entries = text.strip().removeprefix("[").removesuffix("]").split(",")
    return "[" + ",".join(f'"{entry.strip().strip(QUOTES)}"' for entry in entries) + "]"


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise _MisfitError
    return value


def _either(expected: Any) -> str:
    *others, last = _nouns(expected)
    return f"{', '.join(others)} or {last}" if others else last


def _nouns(expected: Any, many: bool = False) -> list[str]:
    """What a message calls an annotation, alternative by alternative."""
    origin, arms = get_origin(expected), get_args(expected)
    if origin in _UNIONS:
        return [noun for arm in arms for noun in _nouns(arm, many)]
    if origin is Literal:
        return [str(arm) for arm in arms]
    if (origin or expected) in _SEQUENCES:
        of = f" of {' or '.join(_nouns(arms[0], True))}" if arms else ""
        return [f"lists{of}" if many else f"a list{of}"]
    if expected is bool:
        return ["true", "false"]
    if expected in _NOUNS:
        return [_NOUNS[expected][many]]
    if isinstance(expected, type) and is_dataclass(expected):
        return [f"a mapping with {', '.join(field.name for field in fields(expected))}"]
    return [f"a {getattr(expected, '__name__', expected)}"]


def _within(module: str, packages: Collection[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
