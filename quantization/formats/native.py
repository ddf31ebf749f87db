"""Our own format: everything that codes can be. A layer X has X.codes uint8 [N, ⌈K · bits / 8⌉], a row's codes as one
stream of bits, X.scale [N, G], one of X.zero uint8 [N, G] and X.shift [N, G], and X.groups int32 [K] where the columns
are not grouped in order. quantization_config says of each layer its columns, bits and group size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme, pack, unpack
from ..quantiser import Quantised
from .format import AGAIN, FLOATS, Shape, check_groups, matrix, whole

VERSION = 1


class Native:
    name: ClassVar[str] = "decodelab"
    title: ClassVar[str] = "native"
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {
        "codes": ("U8",),
        "scale": FLOATS,
        "zero": ("U8",),
        "shift": FLOATS,
        "groups": ("I32",),
    }

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        if config.get("version") != VERSION:
            raise UserError(
                f"quantization_config is of version {config.get('version')}, and {VERSION} is read: quantise again"
            )
        found = {}
        for layer, about in config["layers"].items():
            columns, bits, group = (whole(about, key) for key in ("columns", "bits", "group_size"))
            parts, activation_bits = set(about["parts"]), about["activation_bits"]
            if not {"scale"} < parts <= {"scale", "zero", "shift", "groups"} or {"zero", "shift"} <= parts:
                raise UserError(f"{layer} has the parts {sorted(parts)}, but must have scale, zero or shift: {AGAIN}")
            if bits > 8 or group > columns or activation_bits not in (None, 8):
                raise UserError(
                    f"{layer} has bits={bits}, group_size={group} of {columns} columns and activation_bits="
                    f"{activation_bits}, but must have at most 8, at most the columns, and 8 or null: {AGAIN}"
                )
            rows = matrix(layer, "codes", shapes)[0] if f"{layer}.codes" in shapes else 0
            groups = -(-columns // group)
            wanted: dict[str, Shape | None] = {
                "codes": (rows, -(-columns * bits // 8)),
                **{part: (rows, groups) if part in parts else None for part in ("scale", "zero", "shift")},
                "groups": (columns,) if "groups" in parts else None,
            }
            for part, shape in wanted.items():
                if shapes.get(f"{layer}.{part}") != shape:
                    raise UserError(
                        f"{layer}.{part} is {shapes.get(f'{layer}.{part}')}, but must be {shape} by "
                        "quantization_config: the checkpoint is incomplete or of two models; quantise again"
                    )
            found[layer] = rows, columns
        return found

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        """Whether zero points all stand in the middle is not noted."""
        about = config["layers"][layer]
        shift, grouped = (part in about["parts"] for part in ("shift", "groups"))
        return Scheme(shape, about["bits"], about["group_size"], False, shift, grouped, about["activation_bits"])

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        about = config["layers"][layer]
        parts = {part: tensor(f"{layer}.{part}") for part in about["parts"]}
        top = 2 ** about["bits"] - 1
        if "zero" in parts and (most := int(parts["zero"].max())) > top:
            raise UserError(f"{layer}.zero holds {most}, but must hold at most {top}: it is damaged; {AGAIN}")
        if "groups" in parts:
            check_groups(f"{layer}.groups", parts["groups"], about["group_size"])
        return Codes(
            unpack(tensor(f"{layer}.codes"), about["bits"], about["columns"]),
            bits=about["bits"],
            group_size=about["group_size"],
            activation_bits=about["activation_bits"],
            **parts,
        )

    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        pass

    def fit(self, codes: Codes) -> Quantised:
        return Quantised(codes)

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        parts = {f"{layer}.{name}": getattr(codes, name).contiguous() for name in _parts(codes.scheme)}
        return {f"{layer}.codes": pack(codes.codes, codes.bits), **parts}

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        about = {
            layer: {
                "columns": scheme.shape[1],
                "bits": scheme.bits,
                "group_size": scheme.group_size,
                "activation_bits": scheme.activation_bits,
                "parts": _parts(scheme),
            }
            for layer, scheme in layers.items()
        }
        return {"quant_method": self.name, "version": VERSION, "layers": about}


def _parts(scheme: Scheme) -> list[str]:
    return ["scale", "shift" if scheme.shift else "zero", *(["groups"] if scheme.grouped else [])]
