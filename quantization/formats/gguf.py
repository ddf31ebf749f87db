"""ggml's blocks, as GGUF files hold them, and the codes that they stand for. A layer X has X.blocks uint8 [N, bytes of
a row]; quantization_config says of each layer its type. As a checkpoint of safetensors this is only what a GGUF file is
made from, and how one is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float16, Float32, UInt8
from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme
from ..quantiser import Quantised
from .format import Shape, check_finite, float16, matrix, need, refuse

GROUP = 32  # columns of a group, in all types that are written
BLOCKS: Mapping[str, tuple[int, int]] = {  # (columns, bytes) of the types that are read
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}


class GGUFBlocks:
    name: ClassVar[str] = "gguf"
    title: ClassVar[str] = "gguf"
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {"blocks": ("U8",)}

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        found = {}
        for layer, kind in config["layers"].items():
            if kind not in BLOCKS:
                raise UserError(f"{layer} is of ggml type {kind}, and {', '.join(BLOCKS)} are read")
            columns, nbytes = BLOCKS[kind]
            shape = matrix(layer, "blocks", shapes)
            need(layer, shapes, {"blocks": (shape[0], -(-shape[-1] // nbytes) * nbytes)})
            found[layer] = shape[0], shape[1] // nbytes * columns
        return found

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        kind = config["layers"][layer]
        shift = kind in ("Q4_1", "Q4_K")
        return Scheme(shape, int(kind[1]), 16 if kind == "Q6_K" else GROUP, not shift, shift)

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        codes = codes_of(tensor(f"{layer}.blocks"), config["layers"][layer])
        for part in (codes.scale, codes.shift):
            if part is not None:
                check_finite(f"{layer}.blocks", part)
        return codes

    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        refuse(self, {layer: _misfits(scheme) for layer, scheme in layers.items()})

    def fit(self, codes: Codes) -> Quantised:
        found = codes_of(blocks_of("a layer", codes), kind_of(codes.scheme))
        notes = () if torch.equal(found.dequantise(), codes.dequantise()) else ("shifts are rounded to float16",)
        return Quantised(found, notes)

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        refuse(self, {layer: _misfits(codes.scheme)})
        return {f"{layer}.blocks": blocks_of(layer, codes)}

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": self.name, "layers": {layer: kind_of(scheme) for layer, scheme in layers.items()}}


def codes_of(blocks: UInt8[Tensor, "N B"], kind: str) -> Codes:
    """Dequantised, they are what the gguf package makes of the blocks, bit for bit."""
    b = blocks.view(len(blocks), -1, BLOCKS[kind][1])
    zero = shift = None
    match kind:
        case "Q4_0":
            bits, middle, scale, codes = 4, 8, _half(b[..., :2]), _nibbles(b[..., 2:])
        case "Q4_1":
            bits, scale, shift, codes = 4, _half(b[..., :2]), _half(b[..., 2:4]), _nibbles(b[..., 4:])
        case "Q5_0":
            fifth = _fields(b[..., 2:6], 1).flatten(-2)
            bits, middle, scale, codes = 5, 16, _half(b[..., :2]), _nibbles(b[..., 6:]) | fifth << 4
        case "Q8_0":
            bits, middle, scale, codes = 8, 128, _half(b[..., :2]), b[..., 2:] ^ 128  # of int8: + 128
        case "Q4_K":
            steps, lows = _six_bits(b[..., 4:16])
            bits, scale, shift = 4, _half(b[..., :2]).float() * steps, -(_half(b[..., 2:4]).float() * lows)
            codes = _nibbles(b[..., 16:].unflatten(-1, (4, 32)))
        case "Q6_K":
            bits, middle = 6, 32
            low = _nibbles(b[..., :128].unflatten(-1, (2, 64)))
            high = _fields(b[..., 128:192].unflatten(-1, (2, 32)), 2).transpose(-2, -1).flatten(-2)
            codes = low | high << 4
            scale = _half(b[..., 208:]).float() * b[..., 192:208].view(torch.int8).float()
        case _:
            raise AssertionError(kind)
    N = len(blocks)
    codes, scale = codes.reshape(N, -1).contiguous(), scale.reshape(N, -1).contiguous()
    if shift is None:
        zero = torch.full(scale.shape, middle, dtype=torch.uint8)
    else:
        shift = shift.reshape(N, -1).contiguous()
    return Codes(codes, scale, bits, codes.shape[1] // scale.shape[1], zero=zero, shift=shift)


def blocks_of(layer: str, codes: Codes) -> UInt8[Tensor, "N B"]:
    """In the type `kind_of` its scheme. Wider groups than ggml's become several of the same scale."""
    kind, N = kind_of(codes.scheme), codes.shape[0]
    c, times = codes.codes.view(N, -1, GROUP), codes.group_size // GROUP
    parts = [_bytes(layer, codes.scale, times)]
    if kind == "Q8_0":
        return torch.cat([*parts, c ^ 128], -1).view(N, -1)
    if kind == "Q4_1":
        shift = codes.shift
        if shift is None:
            assert codes.zero is not None
            shift = -codes.scale.float() * codes.zero
        parts.append(_bytes(layer, shift, times))
    low, high = c.chunk(2, -1)
    return torch.cat([*parts, low | high << 4], -1).view(N, -1)


def kind_of(scheme: Scheme) -> str:
    """The type that holds codes of a scheme that is not refused."""
    if scheme.bits == 8:
        return "Q8_0"
    return "Q4_0" if scheme.symmetric and not scheme.shift else "Q4_1"


def _misfits(scheme: Scheme) -> list[str]:
    K, told = scheme.shape[1], []
    if scheme.bits not in (4, 8):
        told.append(f"bits={scheme.bits} is neither 4 nor 8")
    if scheme.bits == 8 and (scheme.shift or not scheme.symmetric):
        told.append("codes of 8 bits are not symmetric")
    if K % scheme.group_size or scheme.group_size % GROUP:
        told.append(f"group_size={scheme.group_size} is no multiple of {GROUP} that divides {K} columns")
    if scheme.grouped:
        told.append("columns are not grouped in order")
    if scheme.activation_bits is not None:
        told.append("their inputs are rounded as well")
    return told


def _half(two: UInt8[Tensor, "*S 2"]) -> Float16[Tensor, "*S 1"]:
    return two.contiguous().view(torch.float16)


def _bytes(layer: str, values: Tensor, times: int) -> UInt8[Tensor, "N G 2"]:
    """Of float16, each repeated."""
    half = float16(layer, values).repeat_interleave(times, 1)
    return half.contiguous().view(torch.uint8).view(len(values), -1, 2)


def _nibbles(packed: UInt8[Tensor, "*S B"]) -> UInt8[Tensor, "*S C"]:
    """The low half of each byte, then the high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fields(packed: UInt8[Tensor, "*S B"], bits: int) -> UInt8[Tensor, "*S B F"]:
    """What each byte holds, the lowest first."""
    return packed[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & 2**bits - 1


def _six_bits(packed: UInt8[Tensor, "*S 12"]) -> tuple[Float32[Tensor, "*S 8"], Float32[Tensor, "*S 8"]]:
    """(scales, minima) of the eight groups of a block of Q4_K."""
    a, b, c = packed.split(4, -1)
    steps = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
    lows = torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)
    return steps.float(), lows.float()
