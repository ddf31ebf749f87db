"""What a quantiser is: one linear layer and what was seen of its input in, codes out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..errors import UserError
from .codes import Codes, Scheme

OVERRIDABLE = ("bits", "group_size", "symmetric", "clip", "type")
Overrides = Mapping[str, Any] | str  # by patterns of names; a file of them; auto: looked for by the job quantize


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that a model is run over. `path`: rows as a task has them, or plain text; `template`: a chat template
    that wraps each row's prompt and response (None: bare text); `tokens` in all, in pieces of `length`, drawn by
    `seed`. The template `chat` is the tokenizer's own. `overlap`: whether to refuse, or to warn of, a judgement by
    rows that are in the text."""

    path: str | None = None
    template: str | None = None
    tokens: int = 16384
    length: int = 512
    seed: int = 0
    overlap: Literal["refuse", "warn"] = field(default="refuse", repr=False)  # the quantised weights are the same

    def __post_init__(self) -> None:
        at = "quantization.calibration."
        if self.length < 8:
            raise UserError(f"{at}length must be at least 8, got {self.length}")
        if self.tokens < self.length:
            raise UserError(f"{at}tokens={self.tokens} is less than one piece of {at}length={self.length}")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was seen of the rows x that a layer reads. `hessian`: the mean of x xᵀ, `magnitude`: of |x|, both float32;
    `count`: how many rows there were."""

    hessian: Float[Tensor, "K K"]
    magnitude: Float[Tensor, " K"]
    count: int

    @staticmethod
    def of(rows: Iterable[Float[Tensor, "T K"]]) -> "Inputs":
        """Padding must not be among the rows. Sums are in float32, products too: half types overflow here."""
        total: Tensor | None = None
        count = 0
        for some in rows:
            x = some.float()
            if total is None:
                total, magnitude = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1])
            total.addmm_(x.T, x)
            magnitude += x.abs().sum(0)
            count += len(x)
        assert total is not None
        return Inputs(total.div_(count), magnitude / count, count)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A layer's codes, and notes on what did not go as was asked, such as a fallback."""

    codes: Codes
    notes: tuple[str, ...] = ()


@runtime_checkable
class Quantiser(Protocol):
    """Settings of the group `quantization`. `calibration`: None where nothing is read of a layer's input."""

    @property
    def kind(self) -> str: ...
    @property
    def calibration(self) -> Calibration | None: ...
    @property
    def overrides(self) -> Overrides: ...
    def check(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        """Before anything is read. Refuses layers [N, K] that cannot be quantised so, all in one line; warns."""

    def scheme(self, shape: tuple[int, int]) -> Scheme:
        """Of the codes that a layer [N, K] will have, as far as it is known: columns `grouped` if they may be."""

    def layer(self, weight: Float[Tensor, "N K"], seen: Inputs | None) -> Quantised: ...


@runtime_checkable
class Scales(Quantiser, Protocol):
    """It first moves part of the input's scale into the weights of the layers that read it (AWQ)."""

    def scale(
        self,
        layers: Sequence[tuple[Quantiser, Float[Tensor, "_ K"]]],
        seen: Inputs,
        feasible: Callable[[Float[Tensor, " K"]], Float[Tensor, " K"]],
    ) -> Float[Tensor, " K"] | None:
        """What the columns are to be multiplied by, and the input divided by; None: left as it is. `layers`: what reads
        the input, and how it will be quantised; `feasible`: the nearest scale that the input can be divided by."""


def deciding(overrides: Mapping[str, Any], name: str) -> str | None:
    """The last pattern that fits the layer `name`; None if none does."""
    return next((pattern for pattern in reversed(list(overrides)) if fnmatchcase(name, pattern)), None)


def settings_of(settings: Any, name: str) -> Any:
    """The settings for the layer `name`: the last pattern in `overrides` that fits it decides (none: not quantised)."""
    pattern = deciding(settings.overrides, name)
    found: Any = {} if pattern is None else settings.overrides[pattern]
    if found in (None, "none"):
        return None
    own = {each.name for each in fields(settings)}
    keys = [key for key in OVERRIDABLE if key in own]
    if not isinstance(found, Mapping) or (unknown := [key for key in found if key not in keys]):
        said = f"has {unknown[0]}" if isinstance(found, Mapping) else f"is {found!r}"
        raise UserError(f"quantization.overrides of {name} {said}: give none, or a mapping of {', '.join(keys)}")
    for key, value in found.items():
        now = getattr(settings, key)
        if type(value) is not type(now) and now is not None:
            kind = {bool: "true or false", int: "a whole number", str: "a name"}[type(now)]
            raise UserError(f"quantization.overrides of {pattern}: {key} must be {kind}, got {value!r}")
    return replace(settings, **found, overrides={}) if found else settings


def check_overrides(settings: Any, names: Iterable[str]) -> None:
    """Refuses a pattern that fits no layer, or is no text."""
    known = list(names)
    for pattern in settings.overrides:
        if not isinstance(pattern, str):
            raise UserError(
                f"quantization.overrides: {pattern!r} is no text: give a pattern of layers' names, such as '*.v_proj'"
            )
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UserError(
                f"quantization.overrides: {pattern!r} fits none of the {len(known)} layers, such as {known[0]}"
            )
