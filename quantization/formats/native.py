"""Our own format: everything that codes can be. A layer X has X.codes uint8 [N, ⌈K · bits / 8⌉], a row's codes as one
stream of bits, X.scale [N, G], one of X.zero uint8 [N, G] and X.shift [N, G], and X.groups int32 [K] where the columns
are not grouped in order. quantization_config says of each layer its columns, bits and group size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme, pack, unpack
from ..quantiser import Quantised
from .format import Shape

VERSION = 1


class Native:
    name: ClassVar[str] = "decodelab"
    title: ClassVar[str] = "native"

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        if config.get("version") != VERSION:
            raise UserError(
                f"quantization_config is of version {config.get('version')}, and {VERSION} is read: quantise again"
            )
        found = {}
        for layer, about in config["layers"].items():
            columns, bits, group = about["columns"], about["bits"], about["group_size"]
            rows = shapes.get(f"{layer}.codes", (0, 0))[0]
            groups = -(-columns // group)
            second = "shift" if "shift" in about["parts"] else "zero"
            wanted = {"codes": (rows, -(-columns * bits // 8)), "scale": (rows, groups), second: (rows, groups)}
            for part, shape in wanted.items():
                if shapes.get(f"{layer}.{part}") != shape:
                    raise UserError(
                        f"{layer}.{part} is {shapes.get(f'{layer}.{part}')}, but must be {shape} by "
                        "quantization_config: the checkpoint is incomplete or of two models; quantise again"
                    )
            found[layer] = rows, columns
        return found

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        about = config["layers"][layer]
        parts = {part: tensor(f"{layer}.{part}") for part in about["parts"]}
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
