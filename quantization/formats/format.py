"""What a format is, and a checkpoint's quantised layers read through one."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme, pack, unpack
from ..quantiser import Quantised

Shape = tuple[int, ...]
AGAIN = "download it again, or quantise again"
FLOATS = ("F16", "BF16", "F32")


@runtime_checkable
class Format(Protocol):
    """`config` is what config.json has as quantization_config. A layer's name is that of its weight, less `.weight`."""

    @property
    def name(self) -> str:
        """quant_method in config.json."""

    @property
    def title(self) -> str:
        """What the key `format` calls it."""

    @property
    def dtypes(self) -> Mapping[str, Sequence[str]]:
        """Which of safetensors' types a layer's tensors may have."""

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Which layers are quantised, and their weights' [N, K], from the tensors' shapes. Refuses, in one line, what
        the format's own rules exclude: a tensor that is missing or of another shape, bits that are not read."""

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        """What `config` says of a layer that `layers` found, before any of it is read."""

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes: ...
    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        """Refuses, before there are any codes, what the format does not express: all layers in one line. `skipped`:
        layers that stay as they are."""

    def fit(self, codes: Codes) -> Quantised:
        """The nearest codes that the format expresses, and a note where they are others."""

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        """The tensors of a layer whose codes are fit."""

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        """quantization_config of a checkpoint with these layers."""


class QuantisedLayers(Mapping[str, Codes]):
    """Codes by layer, each read when it is asked for. `shapes`: the weights' [N, K]."""

    def __init__(
        self,
        form: Format,
        config: Mapping[str, Any],
        tensor: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, int]],
    ) -> None:
        self.form, self.shapes = form, shapes
        self._config, self._tensor = config, tensor

    @property
    def schemes(self) -> dict[str, Scheme]:
        """As the checkpoint's config has them."""
        return {layer: self.form.scheme(layer, shape, self._config) for layer, shape in self.shapes.items()}

    def __getitem__(self, layer: str) -> Codes:
        if layer not in self.shapes:
            raise KeyError(layer)
        return self.form.read(layer, self._finite, self._config)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _finite(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        check_finite(name, tensor)
        return tensor


def layers_of(
    form: Format, config: Mapping[str, Any], shapes: Mapping[str, Shape], dtypes: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """`form.layers`, of a checkpoint from elsewhere. Refuses, in one line, a `config` that is none of the format and
    tensors of other types; values are looked at when a layer is read."""
    try:
        layers = form.layers(shapes, config)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        told = " ".join(str(error).split())[:200]
        raise UserError(f"its quantization_config is not one of {form.name} ({told}): {AGAIN}") from None
    for name, found in dtypes.items():
        layer, _, part = name.rpartition(".")
        if layer in layers and found not in (known := form.dtypes.get(part, (found,))):
            raise UserError(
                f"{name} is of {found}, but must be of {' or '.join(known)}: the checkpoint is damaged, or of another "
                f"format; {AGAIN}"
            )
    return layers


def check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise UserError(f"{name!r} of the checkpoint is not finite, as it must be: it is damaged; {AGAIN}")


def check_groups(name: str, groups: Tensor, group_size: int) -> None:
    """Refuses groups of columns of another size than is said; the last may be smaller."""
    K = len(groups)
    wanted = [min(group_size, K - at) for at in range(0, K, group_size)]
    inside = bool(((groups >= 0) & (groups < len(wanted))).all())
    found = torch.bincount(groups.long(), minlength=len(wanted)).tolist() if inside else []
    if found != wanted:
        at = next((g for g, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), 0) if inside else 0
        told = f"{found[at]} columns to group {at}" if inside else f"groups up to {int(groups.max())}"
        raise UserError(
            f"{name} gives {told}, but {K} columns are {len(wanted)} groups of {group_size}: it is damaged; {AGAIN}"
        )


def whole(config: Mapping[str, Any], key: str, least: int = 1, *, or_row: bool = False) -> int:
    """A number in quantization_config. `or_row`: −1, for groups that are whole rows, goes as well."""
    value = config.get(key)
    if type(value) is not int or not (value >= least or (or_row and value == -1)):
        bound = f"a whole number from {least} up" + (", or -1" if or_row else "")
        raise UserError(f"quantization_config has {key}={_short(value)}, but must have {bound}: {AGAIN}")
    return value


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """What quantization_config says; None where it says nothing."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"quantization_config has {key}={_short(value)}, but must have true or false: {AGAIN}")
    return value


def _short(value: Any) -> str:
    return repr(value)[:60]


def matrix(layer: str, part: str, shapes: Mapping[str, Shape]) -> tuple[int, int]:
    """The shape of a layer's tensor, which must have two dimensions."""
    found = shapes.get(f"{layer}.{part}")
    if found is None:
        need(layer, shapes, {part: (0, 0)})
    assert found is not None
    if len(found) != 2 or 0 in found:
        raise UserError(f"{layer}.{part} is {found}, but must be a matrix: it is damaged; {AGAIN}")
    return found[0], found[1]


def words(codes: UInt8[Tensor, "R C"], bits: int) -> Int32[Tensor, "R W"]:
    """Rows of codes as 32-bit words without gaps, the lowest bits first; a code may lie across two words."""
    stream = pack(codes, bits)
    whole = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 4))
    return whole.reshape(-1).view(torch.int32).view(len(codes), -1)  # flat: strides of a single row are anything


def unwords(packed: Tensor, bits: int, columns: int) -> UInt8[Tensor, "R C"]:
    """What `words` was given."""
    stream = packed.reshape(-1).view(torch.uint8).view(len(packed), -1)
    return unpack(stream[:, : -(-columns * bits // 8)], bits, columns)


def float16(layer: str, scale: Tensor) -> Tensor:
    """Scales as most formats store them. Refuses what float16 does not hold."""
    half = scale.to(torch.float16)
    if not bool(((half != 0) == (scale != 0)).all() and torch.isfinite(half).all()):
        raise UserError(f"{layer} has a scale that float16 does not hold: write it with format=native")
    return half


def need(layer: str, shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Refuses a layer whose tensors are not those that are wanted."""
    for part, shape in wanted.items():
        found = shapes.get(f"{layer}.{part}")
        if found is None:
            raise UserError(f"{layer}.{part} is missing: the checkpoint is incomplete; download it again")
        if found != shape:
            raise UserError(
                f"{layer}.{part} is {found}, but must be {shape} by quantization_config: the checkpoint is of another "
                "format, or of two models; download it again"
            )


def owners(shapes: Mapping[str, Shape], main: str, others: Sequence[str]) -> list[str]:
    """The layers that have a tensor `main`. Refuses one that has only others of a layer's tensors."""
    parts = {name.rpartition(".")[::2] for name in shapes}
    found = [layer for layer, part in parts if part == main]
    if left := sorted(f"{layer}.{part}" for layer, part in parts if part in others and (layer, main) not in parts):
        raise UserError(f"{left[0]} is there without its {main}: the checkpoint is incomplete; download it again")
    return sorted(found)


def refuse(form: Format, problems: Mapping[str, Sequence[str]]) -> None:
    """Raises where any layer has problems, all layers in one line, those of the same problem together."""
    by_problem: dict[str, list[str]] = {}
    for layer, each in problems.items():
        for problem in each:
            by_problem.setdefault(problem, []).append(layer)
    if by_problem:
        told = "; ".join(f"{problem}: {_brief(layers)}" for problem, layers in by_problem.items())
        raise UserError(f"format={form.title} does not hold these layers ({told}): choose otherwise, or format=native")


def _brief(layers: Sequence[str]) -> str:
    """All of them; those that differ in one number alone, as model.layers.0,1,5–29.mlp.up_proj."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        if found := re.search(r"(?<=\.)\d+(?=\.)", layer):
            numbers.setdefault((layer[: found.start()], layer[found.end() :]), []).append(found.group())
        else:
            numbers.setdefault((layer, ""), [])
    return ", ".join(f"{head}{_ranges(each)}{tail}" for (head, tail), each in numbers.items())


def _ranges(numbers: Sequence[str]) -> str:
    """Three neighbours or more as the first and the last of them."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def unlike(layers: Mapping[str, Scheme]) -> dict[str, list[str]]:
    """By layer, in what it differs from most others, for a format that has one description for all."""
    most = common(layers)
    told = {}
    for layer, scheme in layers.items():
        mine = described(scheme)
        told[layer] = [
            f"{name}={value}, where most have {other}"
            for name, value, other in zip(("bits", "group_size", "symmetric"), mine, most, strict=True)
            if value != other and not (name == "group_size" and _whole(layers))
        ]
    return told


def common(layers: Mapping[str, Scheme]) -> tuple[int, int, bool]:
    """(bits, group size, whether symmetric) of most layers; a group size of −1 where all groups are whole rows."""
    each = [described(scheme) for scheme in layers.values()]
    bits, group, symmetric = (max(dict.fromkeys(values), key=values.count) for values in zip(*each, strict=True))
    return bits, -1 if _whole(layers) else group, symmetric


def described(scheme: Scheme) -> tuple[int, int, bool]:
    return scheme.bits, scheme.group_size, scheme.symmetric


def _whole(layers: Mapping[str, Scheme]) -> bool:
    return all(scheme.group_size == scheme.shape[1] for scheme in layers.values())


def misfits(scheme: Scheme, bits: Sequence[int], sizes: Sequence[int] | None = None) -> list[str]:
    """What no format of integer zeros expresses of a layer, and bits and group sizes that this one does not."""
    (_, K), group = scheme.shape, scheme.group_size
    told = []
    if scheme.shift:
        told.append("they have float shifts, no integer zeros")
    if scheme.bits not in bits:
        told.append(f"bits={scheme.bits} is none of {', '.join(map(str, bits))}")
    if K % group:
        told.append(f"group_size={group} does not divide {K} columns")
    elif sizes is not None and group != K and group not in sizes:
        told.append(f"group_size={group} is none of -1, {', '.join(map(str, sizes))}")
    return told


def uneven(count: int, bits: int, what: str) -> list[str]:
    """Whether codes do not fill whole 32-bit words."""
    return [f"{count} {what} of {bits} bits do not fill 32-bit words"] if count * bits % 32 else []
