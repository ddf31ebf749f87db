"""From the words of a command line to a RunConfig: Hydra composes the YAML, a strict constructor builds from it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # comes with transformers

from ..errors import UserError
from .construct import Constructor, UnknownKeyError, as_list, did_you_mean, shown

if TYPE_CHECKING:  # --help waits for neither torch nor Hydra
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from .config import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"
_INSTEAD = {
    "model": "a hub id, a folder or a GGUF file goes in model.path={}",
    "task": "a file goes in task.path={}",
    "experiment": "--config-dir DIR adds DIR/experiment/*.yaml",
}


class OtherOptionError(UserError):
    """A key that other options of its group have, and not the one that is taken."""


def groups(config_dirs: Sequence[Path] = ()) -> dict[str, dict[str, Path]]:
    """The options of each group, as YAML files: decodelab's and those of `config_dirs`."""
    found: dict[str, dict[str, Path]] = {group: {} for group in defaults()}
    for folder in (CONFIGS, *config_dirs):
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder} is no folder; it holds YAML such as drafting/mine.yaml")
        for file in sorted(file for file in folder.glob("*/*.yaml") if file.is_file()):
            options = found.setdefault(file.parent.name, {})
            if file.stem in options:
                raise UserError(f"{file} has the name of another option, {options[file.stem]}; rename it")
            options[file.stem] = file
    return found


def content(file: Path) -> dict[str, Any]:
    """What the YAML file of an option says."""
    try:
        with file.open(encoding="utf-8") as opened:  # so that PyYAML names it
            found = yaml.safe_load(opened)
        json.dumps(found, default=str, skipkeys=True)  # refuses what contains itself
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8: save it in that encoding") from None
    except yaml.YAMLError as error:
        raise UserError(_line(error)) from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} contains itself by an anchor, or is nested too deep") from None
    if not isinstance(found, dict | None):
        raise UserError(f"{file} must hold keys, a line KEY: VALUE each; it is {shown(found)[:80]}")
    return found or {}


def defaults() -> dict[str, str | None]:
    """The groups, each with the option that is taken unless another is named."""
    listed = yaml.safe_load((CONFIGS / "run.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in listed if isinstance(entry, dict) for group, option in entry.items()}


def compose(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> "RunConfig":
    """The typed configuration; whatever is wrong with it is one UserError. No weights are loaded."""
    return Composer(config_dirs).compose(overrides)


class Composer:
    """Composes any number of configurations. The YAML of each choice of options is read once, so that a cell of a sweep
    takes a tenth of what Hydra takes to compose it."""

    def __init__(self, config_dirs: Sequence[Path] = ()) -> None:
        self.options: Mapping[str, Mapping[str, Path]] = groups(config_dirs)
        self._searchpath = ",".join(quoted(f"file://{folder.resolve()}") for folder in config_dirs)
        self._chosen: dict[tuple[str, ...], DictConfig] = {}
        self._parsed: dict[str, Override] = {}
        self._sound: set[Path] = set()

    def compose(self, overrides: Sequence[str]) -> "RunConfig":
        """As the function `compose`."""
        from omegaconf import OmegaConf

        with _one_line():
            composed = self._composed(overrides)
            content: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        return _built(content, self.options)

    def sweep(self, overrides: Sequence[str]) -> Any:
        """What stands at `sweep`, as plain data; null without a sweep."""
        from omegaconf import OmegaConf

        with _one_line():
            found = self._composed(overrides).get("sweep")
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    def parse(self, word: str) -> "Override":
        """KEY=VALUE, read; each word once."""
        if word not in self._parsed:
            self._parsed[word] = _parsed(word)
        return self._parsed[word]

    def _composed(self, overrides: Sequence[str]) -> "DictConfig":
        from omegaconf import OmegaConf

        words = [self.parse(word) for word in overrides]
        for override in words:
            _check(override, self.options)
            if override.key_or_group in self.options:
                self._read(override)
        composed = deepcopy(self._choose(tuple(str(o.input_line) for o in words if o.key_or_group in self.options)))
        for override in words:
            if override.key_or_group not in self.options:  # it may be new to the YAML: the constructor knows
                value = override.value()
                merge = not isinstance(value, list)  # a list replaces whatever stands there
                OmegaConf.update(composed, override.key_or_group, value, merge=merge, force_add=True)
        return composed

    def _read(self, override: "Override") -> None:
        """The user's own files of options, which are said to be wrong by their names."""
        named, files = override.value(), self.options[override.key_or_group]
        for file in (files[str(name)] for name in (named if isinstance(named, list) else [named])):
            if file not in self._sound and not file.is_relative_to(CONFIGS):
                content(file)
            self._sound.add(file)

    def _choose(self, words: tuple[str, ...]) -> "DictConfig":
        """What Hydra composes of the options that `words` name."""
        from hydra import compose as hydra_compose
        from hydra import initialize_config_module

        if words not in self._chosen:
            with _no_other_hydra(), initialize_config_module("decodelab.configs", "decodelab", version_base="1.3"):
                self._chosen[words] = hydra_compose("run", [*words, f"hydra.searchpath=[{self._searchpath}]"])
        return self._chosen[words]


def _parsed(word: str) -> "Override":
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    if word.startswith("~"):
        raise UserError(f"{word!r} would delete a key; one that is off is written KEY=null")
    split = any(word.count(opening) != word.count(closing) for opening, closing in ("[]", "{}"))
    if not equals and not split:
        raise UserError(f"{word!r} is no KEY=VALUE: write {word}=VALUE")
    if split and not equals:
        raise UserError(f"{word!r} is the end of something: put single quotes around the whole argument, 'KEY=[…]'")
    if not key or not value:
        raise UserError(f"{word!r} lacks a {'value' if key else 'key'}: write KEY=VALUE, and null for nothing")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        listed = value.startswith("[") and value.endswith("]") and not set("{}") & set(value)
        remedy = f"quote its entries: '{key}={as_list(value)}'" if listed else f"""quote the value: '{key}="{value}"'"""
        if split:
            remedy = f"its brackets do not match: put single quotes around the whole argument, '{key}=[…]'"
        elif value[0] in "[{" and not listed:
            remedy = (
                f"""quote the texts in it, and put single quotes around the whole argument: '{key}=[{{path: "…"}}]'"""
            )
        raise UserError(f"{word!r} is not understood ({_line(error)}); {remedy}") from None


def _check(override: "Override", options: Mapping[str, Mapping[str, Path]]) -> None:
    """One value, and where it chooses an option, one that there is."""
    word, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        value = word.partition("=")[2]
        raise UserError(f"""{word} lists several values: -m runs each; for one value quote it, '{key}="{value}"'""")
    if key.partition("/")[0].partition(".")[0] == "hydra":
        raise UnknownKeyError("hydra", _top_level())
    if key not in options:
        if "/" in key:
            near = key.replace("/", ".")
            raise UserError(f"there is no group {key}; groups are {', '.join(options)}; a key has dots: {near}")
        return
    named = override.value()
    if isinstance(named, dict) or (isinstance(named, list) and key != "experiment"):
        raise UserError(
            f"{word}: {key} takes the name of an option, {', '.join(options[key])}; keys are {key}.KEY=VALUE"
        )
    for name in named if isinstance(named, list) else [named]:
        if name is None or str(name) not in options[key]:
            raise UserError(_unknown_option(key, "null" if name is None else str(name), options[key]))


def _unknown_option(group: str, name: str, options: Collection[str]) -> str:
    listed = f"options are {', '.join(options)}" if options else f"{group} has no options"
    instead = f"; {_INSTEAD[group].format(name)}" if group in _INSTEAD else ""
    return f"{group}={name} is unknown: {did_you_mean(name, options)}{listed}{instead}"


def _built(content: dict[str, Any], options: Mapping[str, Mapping[str, Path]]) -> "RunConfig":
    from .config import RunConfig

    known = _top_level()
    for key in content:
        if key in options and key not in known:
            raise UserError(f"a file of the group {key} has the keys of a run: begin it with '# @package _global_'")
        if key not in known:
            if near := _elsewhere(key, content):
                raise UserError(f"{key} is unknown: did you mean {' or '.join(near)}?")
            raise UnknownKeyError(key, known)
    trusted = Constructor().build(content["trusted"], tuple[str, ...], "trusted")
    content = content | {"drafting": _with_members(content["drafting"], options["drafting"])}
    try:
        config = Constructor(trusted).call(RunConfig, content)
    except UnknownKeyError as error:
        if not (owners := _owners(error.key, options)):
            raise UserError(f"{error}{_as_option(error.key, options)}") from None
        raise OtherOptionError(f"{error}; it is a key of {owners}") from None
    return replace(config, resolved=content)


def _elsewhere(key: str, content: Mapping[str, Any]) -> list[str]:
    """Keys of parts that end so."""
    parts = {part: value for part, value in content.items() if isinstance(value, Mapping)}
    found = [f"{part}.{key}" for part, value in parts.items() if key in value]
    return found + [f"{part}.{inner}" for part, value in parts.items() for inner in _elsewhere(key, value)]


def _with_members(drafting: Any, options: Mapping[str, Path]) -> Any:
    """The members of a merge, at any depth, with the keys of the options that they name."""
    if not isinstance(drafting, dict) or not isinstance(drafting.get("members"), list):
        return drafting
    return drafting | {"members": [described("drafting.members", member, options) for member in drafting["members"]]}


def described(group: str, chosen: Any, options: Mapping[str, Path]) -> dict[str, Any]:
    """The content of an option by its name, or by a mapping with `name` and the keys to change."""
    if isinstance(chosen, Mapping) and "_target_" in chosen:
        return _with_members(dict(chosen), options)
    chosen = {"name": chosen} if isinstance(chosen, str) else chosen
    if not isinstance(chosen, Mapping):
        raise UserError(f"{group} must be a name, or a mapping with name and keys; got {chosen!r}")
    keys = dict(chosen)
    if "name" not in keys:
        raise UserError(f"{group} is a mapping without name: give one of {', '.join(options)}")
    if (name := keys.pop("name")) not in options:
        raise UserError(
            f"{group}={name} is unknown: {did_you_mean(str(name), options)}options are {', '.join(options)}"
        )
    return _with_members(_changed(content(options[name]), keys), options)


def _changed(content: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(content)
    for key, value in keys.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _changed(out[key], value) if nested else value
    return out


def _top_level() -> tuple[str, ...]:
    from .config import RunConfig

    return tuple(field.name for field in fields(RunConfig) if field.name != "resolved")


def _owners(key: str, options: Mapping[str, Mapping[str, Path]]) -> str:
    """GROUP=OPTION, … that do have the key; empty if none has."""
    group, _, name = key.partition(".")
    have = []
    for option, file in options.get(group, {}).items():
        with suppress(UserError):  # a broken one that was not chosen is no matter here
            if name in content(file):
                have.append(option)
    return f"{group}={', '.join(have)}" if have else ""


def _as_option(key: str, options: Mapping[str, Mapping[str, Path]]) -> str:
    """Where somebody gave a value to an option as if it were a key."""
    group, _, name = key.partition(".")
    if (file := options.get(group, {}).get(name)) is None:
        return ""
    keys = [f"{group}.{own}=…" for own in content(file) if own != "_target_"]
    return f"; {name} is an option: {' '.join([f'{group}={name}', *keys])}"


@contextmanager
def _no_other_hydra() -> Iterator[None]:
    """Hydra has one global state; a program that uses Hydra itself finds its own again."""
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


@contextmanager
def _one_line() -> Iterator[None]:
    """Hydra's, OmegaConf's and PyYAML's errors as ours."""
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        yield
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is missing: give {error.full_key}=…") from None
    except OmegaConfBaseException as error:
        at = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{at}{str(error).splitlines()[0]}") from error
    except (HydraException, yaml.YAMLError) as error:
        raise UserError(_line(error)) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:  # of a file that another one names
        raise UserError(f"a YAML file is not UTF-8, holds no keys, or contains itself: {_line(error)[:200]}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()
