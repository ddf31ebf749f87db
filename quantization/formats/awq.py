"""AWQ's checkpoints, as its GEMM kernels read them. A layer X has X.qweight int32 [K, N / 8] and X.qzeros int32
[G, N / 8], eight codes of 4 bits a word along N in an order of their own, and X.scales float16 [G, N]. Zero points are
stored as they are, 0 among them (GPTQModel#2350)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme
from ..quantiser import Quantised
from .format import (
    AGAIN,
    FLOATS,
    Shape,
    common,
    flag,
    float16,
    matrix,
    misfits,
    need,
    owners,
    refuse,
    unlike,
    unwords,
    whole,
    words,
)

BITS = 4
SIZES = (16, 32, 64, 128)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns, in a word


@dataclass(frozen=True, slots=True)
class AWQFormat:
    name: ClassVar[str] = "awq"
    title: ClassVar[str] = "awq"
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        bits, size = _bits(config), _size(config)
        if bits != BITS:
            raise UserError(f"it has AWQ codes of {bits} bits, and {BITS} are read")
        if (said := str(config.get("version") or config.get("format") or "gemm").lower()) != "gemm":
            raise UserError(f"its AWQ codes are in the format {said!r}, and gemm is read")
        found = {}
        for layer in owners(shapes, "qweight", ("qzeros", "scales")):
            K, packed = matrix(layer, "qweight", shapes)
            if size != -1 and K % size:
                raise UserError(f"{layer} has {K} columns, which group_size={size} does not divide: {AGAIN}")
            groups = 1 if size == -1 else K // size
            need(layer, shapes, {"scales": (groups, packed * 8)})
            if flag(config, "zero_point") is not False:
                need(layer, shapes, {"qzeros": (groups, packed)})
            elif f"{layer}.qzeros" in shapes:
                raise UserError(
                    f"{layer}.qzeros is there, but must not be, as quantization_config says zero_point=false: say true "
                    "there if the weights have zero points, or download it again"
                )
            found[layer] = packed * 8, K
        return found

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        size = shape[1] if _size(config) == -1 else _size(config)
        return Scheme(shape, BITS, size, flag(config, "zero_point") is False)

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        codes = _taken_apart(tensor(f"{layer}.qweight"))
        scale = tensor(f"{layer}.scales").T.contiguous()
        zero = torch.full(scale.shape, 2 ** (BITS - 1), dtype=torch.uint8)
        if flag(config, "zero_point") is not False:
            zero = _taken_apart(tensor(f"{layer}.qzeros"))
        size = codes.shape[1] if _size(config) == -1 else _size(config)
        return Codes(codes, scale, BITS, size, zero=zero)

    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        odd = unlike({layer: Scheme(s.shape, s.bits, s.group_size, True) for layer, s in layers.items()})
        refuse(self, {layer: _misfits(scheme) + odd[layer] for layer, scheme in layers.items()})

    def fit(self, codes: Codes) -> Quantised:
        return Quantised(codes)

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        refuse(self, {layer: _misfits(codes.scheme)})
        assert codes.zero is not None
        return {
            f"{layer}.qweight": _put_together(codes.codes),
            f"{layer}.qzeros": _put_together(codes.zero),
            f"{layer}.scales": float16(layer, codes.scale).T.contiguous(),
        }

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        bits, size, _ = common(layers)
        return {
            "quant_method": self.name,
            "bits": bits,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(skipped) or None,
        }


def _bits(config: Mapping[str, Any]) -> int:
    return whole(config, "bits" if "bits" in config else "w_bit")


def _size(config: Mapping[str, Any]) -> int:
    return whole(config, "group_size" if "group_size" in config else "q_group_size", or_row=True)


def _put_together(codes: Tensor) -> Tensor:
    """[N, C] as words [C, N / 8]."""
    N, C = codes.shape
    return words(codes.T.reshape(C, N // 8, 8)[..., ORDER].reshape(C, N), BITS)


def _taken_apart(packed: Tensor) -> Tensor:
    C, count = packed.shape
    eight = unwords(packed, BITS, count * 8).view(C, count, 8)
    back = torch.empty_like(eight)
    back[..., ORDER] = eight
    return back.view(C, count * 8).T.contiguous()


def _misfits(scheme: Scheme) -> list[str]:
    N = scheme.shape[0]
    found = misfits(scheme, (BITS,), SIZES)
    if scheme.grouped:
        found.append("columns are not grouped in order")
    if scheme.activation_bits is not None:
        found.append("their inputs are rounded as well")
    return found + ([f"{N} rows are no multiple of 8"] if N % 8 else [])
