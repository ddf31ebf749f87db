"""The group `attention`: from the model's own layout of keys and values to another one.

`attention=layout` takes any table in one line, a repeated pattern of layers and what holds for all of them:

    table   = pattern [ "|" word… ]       behind the bar: of every layer that does not say otherwise
    pattern = item…                       repeated until each layer has an entry; what is over is cut off
    item    = [COUNT "*"] entry           so many layers alike
    entry   = word | "(" word… ")"        of one layer; what no word says is as the model has it
    word    = full                        no window
            | window=W | sinks=S          a row sees the keys i − W + 1 … i, and the first S
            | kv_heads=H | bits=16|8|4
            | share=N                     N successive layers of one kind read the cache of the first; 1: each its own
            | owner=L                     it reads the cache of layer L, as that layer keeps it; not in what repeats

Layers are of one kind if all else about them is alike, so that windowed layers share with windowed ones and full layers
with full ones, across what stands between. Character.AI's recipe (MQA, windows in five layers of six, sharing, int8):

    5*(window=1024) 1*full | kv_heads=1 share=2 bits=8
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ..errors import UserError
from .layout import LayerKV, Layout, Pool, Pooling

_FIELDS: Mapping[str, str] = {"window": "window", "sinks": "sink", "kv_heads": "kv_heads", "bits": "bits"}  # of LayerKV
_KEYS = (*_FIELDS, "share", "owner")
_ITEM = re.compile(r"\s*(?:(?P<count>\d+)\s*\*\s*)?(?:\((?P<words>[^()]*)\)|(?P<word>[a-z_][^\s()*]*))")
_EXAMPLE = "write such as '5*(window=1024) 1*full | kv_heads=1 share=2 bits=8'"

_Words = dict[str, int | None]  # `full` is a window of None


@runtime_checkable
class Attention(Protocol):
    """Settings of the group `attention`."""

    def layout(self, native: Layout, heads: int) -> Layout:
        """The layout that is asked for of a model whose own is `native`, with so many attention heads. Refuses, in one
        line, one that no model can have."""


@dataclass(frozen=True, slots=True)
class Native:
    """As the model has it."""

    def layout(self, native: Layout, heads: int) -> Layout:
        return native


@dataclass(frozen=True, slots=True)
class GQA:
    """`kv_heads` in every layer. `pool`: what the weights of one are, where the model has more: the mean of those of
    its group, or its first's."""

    kv_heads: int | None = None
    pool: Pool = "mean"

    def layout(self, native: Layout, heads: int) -> Layout:
        if self.kv_heads is None:
            raise UserError("attention=gqa needs a number of KV heads: attention.kv_heads=2")
        layers = [replace(layer, kv_heads=self.kv_heads) for layer in native.layers]
        return _checked(layers, native, heads, Pooling(heads=self.pool))


@dataclass(frozen=True, slots=True)
class MQA:
    """One KV head in every layer."""

    pool: Pool = "mean"

    def layout(self, native: Layout, heads: int) -> Layout:
        return GQA(1, self.pool).layout(native, heads)


@dataclass(frozen=True, slots=True)
class MHA:
    """As many KV heads as attention heads."""

    def layout(self, native: Layout, heads: int) -> Layout:
        return GQA(heads).layout(native, heads)


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """`share` successive layers of one kind read the cache of the first of them (CLA, arXiv:2405.12981). `pool`:
    whose weights fill it: the mean of theirs, or those of the first."""

    share: int = 2
    pool: Pool = "mean"

    def layout(self, native: Layout, heads: int) -> Layout:
        layers = _shared(native.layers, [self.share] * len(native.layers))
        return _checked(layers, native, heads, Pooling(layers=self.pool))


@dataclass(frozen=True, slots=True)
class Window:
    """Every layer sees `size` keys back, its own among them."""

    size: int = 1024

    def layout(self, native: Layout, heads: int) -> Layout:
        return SinkWindow(self.size, 0).layout(native, heads)


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """The same, and the first `sinks` keys always (arXiv:2309.17453)."""

    size: int = 1024
    sinks: int = 4

    def layout(self, native: Layout, heads: int) -> Layout:
        return _checked([replace(one, window=self.size, sink=self.sinks) for one in native.layers], native, heads)


@dataclass(frozen=True, slots=True)
class Hybrid:
    """`pattern`, repeated over the layers: w has a window of `size`, f sees everything."""

    size: int = 1024
    pattern: str = "wwwwwf"

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) - {"w", "f"}:
            raise UserError(f"attention.pattern must be made of w (a window) and f (full), got {self.pattern!r}")

    def layout(self, native: Layout, heads: int) -> Layout:
        kinds = [self.pattern[i % len(self.pattern)] for i in range(len(native.layers))]
        windows = [self.size if kind == "w" else None for kind in kinds]
        layers = [replace(one, window=w, sink=0) for one, w in zip(native.layers, windows, strict=True)]
        return _checked(layers, native, heads)


@dataclass(frozen=True, slots=True)
class LowBits:
    """Keys and values of every layer in 8 or 4 bits, with a scale a token and head."""

    bits: int

    def layout(self, native: Layout, heads: int) -> Layout:
        return _checked([replace(layer, bits=self.bits) for layer in native.layers], native, heads)


@dataclass(frozen=True, slots=True)
class Table:
    """`layers`: any table, in one line of the grammar above. `pool` and `share_pool`: as in GQA and in CrossLayer."""

    layers: str = "full"
    pool: Pool = "mean"
    share_pool: Pool = "mean"

    def __post_init__(self) -> None:
        _read(self.layers)

    def layout(self, native: Layout, heads: int) -> Layout:
        pattern, every = _read(self.layers)
        count, given = len(native.layers), len(pattern)
        if given > count:
            raise UserError(f"attention.layers is of {given} layers, and the model has {count}")
        if given < count and any("owner" in words for words in pattern):
            raise UserError(f"attention.layers repeats {given} layers, of {count}, so that owner= is of no one layer")
        layers, shares = [], []
        for i, own in enumerate(native.layers):
            words = every | pattern[i % given]
            if "window" in words and words["window"] is None and "sinks" not in pattern[i % given]:
                words["sinks"] = 0  # those behind the bar are of the layers with a window
            said: dict[str, Any] = {field: words[key] for key, field in _FIELDS.items() if key in words}
            layers.append(replace(own, **said))
            shares.append(None if "owner" in pattern[i % given] else words.get("share"))
        found = _shared(layers, shares)
        for i, words in enumerate(pattern):
            if (owner := words.get("owner")) is None:
                continue
            whose = found[owner] if owner < i else found[i]
            for key, field in _FIELDS.items():
                if key in words and words[key] != getattr(whose, field):
                    raise UserError(
                        f"attention.layers: layer {i} reads the cache of layer {owner}, whose {key} differs"
                    )
            found[i] = replace(whose, owner=owner)
        return _checked(found, native, heads, Pooling(self.pool, self.share_pool))


def _shared(layers: Sequence[LayerKV], shares: Sequence[int | None]) -> list[LayerKV]:
    """`shares[l]`: how many successive layers of the kind of layer l have one cache; None: the owner that it has."""
    found: list[LayerKV] = []
    open_: dict[tuple[LayerKV, int], tuple[int, int]] = {}  # by kind: the owner that still takes layers, and how many
    for i, (layer, share) in enumerate(zip(layers, shares, strict=True)):
        if share is None:
            found.append(layer)
            continue
        if share < 1:
            raise UserError(f"attention: layer {i}: share must be at least 1, got {share}")
        kind = replace(layer, owner=0), share
        owner, room = open_.get(kind, (i, 0))
        if not room:
            owner, room = i, share
        open_[kind] = owner, room - 1
        found.append(replace(layer, owner=owner))
    return found


def _checked(layers: Sequence[LayerKV], native: Layout, heads: int, pooling: Pooling | None = None) -> Layout:
    for i, layer in enumerate(layers):
        if layer.kv_heads >= 1 and heads % layer.kv_heads:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UserError(
                f"attention: layer {i}: {heads} attention heads cannot share {layer.kv_heads} KV heads; {fits} can be"
            )
    if tuple(layers) == native.layers:
        return native
    try:
        return Layout(tuple(layers), native.head_dim, pooling or Pooling())
    except ValueError as error:
        raise UserError(f"attention: {error}") from None


def _read(text: str) -> tuple[list[_Words], _Words]:
    """(the words of each layer of the pattern, those behind the bar)."""
    head, _, tail = text.partition("|")
    if "|" in tail:
        raise _wrong(text, text.rindex("|"), "is the second bar")
    pattern: list[_Words] = []
    at = 0
    while head[at:].strip():
        found = _ITEM.match(head, at)
        if found is None:
            raise _wrong(text, at, f"begins no layers: {_EXAMPLE}")
        if len(found["count"] or "") > 4:
            raise _wrong(text, at, "is of more layers than a model has")
        if (count := int(found["count"] or 1)) < 1:
            raise _wrong(text, at, "is of no layer: count from 1")
        which = "word" if found["words"] is None else "words"
        words = _words(text, found.start(which), found[which])
        if not words:
            raise _wrong(text, at, "has no word")
        pattern += [words] * count
        at = found.end()
    if not pattern:
        raise UserError(f"attention.layers={text!r} has no layer: {_EXAMPLE}")
    every = _words(text, len(head) + 1, tail)
    if "owner" in every:
        raise _wrong(text, text.index("owner", len(head)), "is of one layer, not of all")
    return pattern, every


def _words(text: str, start: int, part: str) -> _Words:
    """Of one layer; `part` begins at `start` of the text."""
    said: _Words = {}
    for found in re.finditer(r"[^\s()]+|[()]", part):
        at = start + found.start()
        key, equals, value = found[0].partition("=")
        if found[0] == "full":
            key = "window"
        elif key not in _KEYS:
            raise _wrong(text, at, f"is unknown: words are full and, with a number, {', '.join(_KEYS)}")
        elif not re.fullmatch(r"[0-9]{1,10}", value):
            raise _wrong(text, at, f"needs a whole number of at most ten digits, such as {key}=8")
        if key in said:
            raise _wrong(text, at, f"is a second {key} of the same layer")
        said[key] = int(value) if equals else None
    if {"owner", "share"} <= said.keys():
        raise _wrong(text, start, "has owner= and share=, which both say whose cache it is")
    return said


def _wrong(text: str, at: int, why: str) -> UserError:
    """The place is told from 1."""
    at += len(text[at:]) - len(text[at:].lstrip())
    near = re.match(r"[()|]|[^\s()|]+", text[at:])
    assert near is not None
    return UserError(f"attention.layers, character {at + 1}: {near[0]!r} {why}")
