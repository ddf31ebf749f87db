"""GPTQ's checkpoints. A layer X has X.qweight int32 [K · bits / 32, N], the codes of a column of words being neighbours
along K, X.qzeros int32 [G, N · bits / 32], along N, X.scales float16 [G, N] and X.g_idx int32 [K], each input's group.
Words have no gaps, so that one in three codes of 3 bits lies across two.

Version 1 stores zero points less one, and so has none of 0; version 2 stores them as they are. There are checkpoints of
the second kind that say they are of the first (vllm#38966), so where they are symmetric the zero points decide.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...errors import UserError
from ..codes import Codes, Scheme
from ..quantiser import Quantised
from .format import (
    FLOATS,
    Shape,
    check_groups,
    common,
    flag,
    float16,
    matrix,
    misfits,
    need,
    owners,
    refuse,
    uneven,
    unlike,
    unwords,
    whole,
    words,
)

BITS = (2, 3, 4, 8)
SIZES = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class GPTQFormat:
    """`version`: of what is written; both are read."""

    version: Literal[1, 2] = 2

    name: ClassVar[str] = "gptq"
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {
        "qweight": ("I32",),
        "qzeros": ("I32",),
        "scales": FLOATS,
        "g_idx": ("I32", "I64"),
    }

    @property
    def title(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        bits, size = _bits_and_size(config)
        if bits not in BITS:
            raise UserError(f"it has GPTQ codes of {bits} bits, and {', '.join(map(str, BITS))} are read")
        _version(config)
        flag(config, "sym")
        for pattern, about in (config.get("dynamic") or {}).items():
            if about and not pattern.startswith("-:"):
                raise UserError(f"quantization_config.dynamic gives {pattern!r} settings of its own, which is not read")
        found = {}
        for layer in owners(shapes, "qweight", ("qzeros", "scales", "g_idx")):
            rows, N = matrix(layer, "qweight", shapes)
            K = rows * 32 // bits
            groups = 1 if size == -1 else -(-K // size)
            need(layer, shapes, {"qzeros": (groups, -(-N * bits // 32)), "scales": (groups, N)})
            if f"{layer}.g_idx" in shapes or flag(config, "desc_act"):
                need(layer, shapes, {"g_idx": (K,)})
            found[layer] = N, K
        return found

    def scheme(self, layer: str, shape: tuple[int, int], config: Mapping[str, Any]) -> Scheme:
        bits, size = int(config["bits"]), int(config["group_size"])
        symmetric, grouped = flag(config, "sym") is not False, bool(config.get("desc_act", False))
        return Scheme(shape, bits, shape[1] if size == -1 else min(size, shape[1]), symmetric, grouped=grouped)

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes:
        bits, size = _bits_and_size(config)
        qweight, scales = tensor(f"{layer}.qweight"), tensor(f"{layer}.scales")
        K, N = qweight.shape[0] * 32 // bits, qweight.shape[1]
        size = K if size == -1 else min(size, K)
        stored = unwords(tensor(f"{layer}.qzeros"), bits, N).T.contiguous()
        groups = None
        try:
            given = tensor(f"{layer}.g_idx")
        except KeyError:
            pass
        else:
            check_groups(f"{layer}.g_idx", given, size)
            if not torch.equal(given.long(), torch.arange(K) // size):
                groups = given.int()
        found = Codes(unwords(qweight.T, bits, K), scales.T.contiguous(), bits, size, zero=stored, groups=groups)
        middle, symmetric = 2 ** (bits - 1), flag(config, "sym")
        if symmetric is not False and any(bool((stored == each).all()) for each in (middle - 1, middle)):
            return replace(found, zero=torch.full_like(stored, middle))
        if symmetric:
            raise UserError(
                f"{layer}.qzeros holds {int(stored.min())} to {int(stored.max())}, but must hold {middle} alone (or "
                f"{middle - 1}), as quantization_config says sym=true: say false there if the weights have zero "
                "points, or download it again"
            )
        if _version(config) == 2:
            _judge(found, stored, 2)
            return found
        if int(stored.max()) == 2**bits - 1:
            raise UserError(
                f"{layer}.qzeros of version 1 holds {2**bits - 1}, of which programs make a zero point of 0 or of "
                f"{2**bits}: give a checkpoint of gptq_v2, or say so in quantization_config if it is one"
            )
        _judge(found, stored, 1)
        return replace(found, zero=stored + 1)

    def check(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> None:
        """The loaders know one description for all layers."""
        odd = unlike(layers)
        refuse(self, {layer: _misfits(scheme) + odd[layer] for layer, scheme in layers.items()})

    def fit(self, codes: Codes) -> Quantised:
        """Version 1: a zero point of 0 becomes 1, and the codes of its group are one more; the greatest is lost."""
        if self.version == 2 or codes.zero is None or bool((codes.zero > 0).all()):
            return Quantised(codes)
        lifted = (codes.zero == 0)[:, codes.column_groups]
        top = 2**codes.bits - 1
        moved = torch.where(lifted, codes.codes.clamp_max(top - 1) + 1, codes.codes)
        told = "format=gptq has no zero point of 0: 1 in its place; the greatest weights there lost a step"
        return Quantised(replace(codes, codes=moved, zero=codes.zero.clamp_min(1)), (told,))

    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        refuse(self, {layer: _misfits(codes.scheme)})
        assert codes.zero is not None
        zero = codes.zero
        if self.version == 1:
            assert bool((zero > 0).all())
            zero = zero - 1
        return {
            f"{layer}.qweight": words(codes.codes, codes.bits).T.contiguous(),
            f"{layer}.qzeros": words(zero.T.contiguous(), codes.bits),
            f"{layer}.scales": float16(layer, codes.scale).T.contiguous(),
            f"{layer}.g_idx": codes.column_groups.int(),
        }

    def config(self, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Any]:
        """Loaders take every linear layer within the blocks to be quantised, unless those that are, are named."""
        bits, size, _ = common(layers)
        some = {"modules_in_block_to_quantize": [list(layers)]} if set(skipped) - {"lm_head"} else {}
        return {
            "quant_method": self.name,
            "bits": bits,
            "group_size": size,
            "desc_act": any(scheme.grouped for scheme in layers.values()),
            "sym": all(scheme.symmetric for scheme in layers.values()),
            "true_sequential": True,
            "checkpoint_format": self.title,
            "lm_head": False,
            **some,
        }


def _bits_and_size(config: Mapping[str, Any]) -> tuple[int, int]:
    return whole(config, "bits"), whole(config, "group_size", or_row=True)


def _judge(codes: Codes, stored: Tensor, version: int) -> None:
    """Warns where zero points seem to be of the other version than is said. Weights are 0 in the mean, or a small part
    of a step: read by the wrong version, they are a whole step from it."""
    counts = torch.bincount(codes.column_groups, minlength=stored.shape[1]).float()
    steps = codes.codes.float()
    mean = float(steps.mean() - stored.float().mean(0) @ counts / counts.sum())
    clear = float(steps.std()) / steps.numel() ** 0.5 < 0.1  # what chance does to the mean of so many weights
    fits = [each for each, off in ((1, mean - 1), (2, mean)) if clear and abs(off) < 0.25]  # of 1, all is one more
    names, other = {1: "gptq", 2: "gptq_v2"}, 3 - version
    if fits == [version]:
        return
    if fits == [other]:
        told = f"but its zero points are of {names[other]}, by the mean of the weights: correct checkpoint_format if so"
    else:
        told = f"and whether its zero points are of {names[other]} cannot be told by the weights"
    warnings.warn(f"GPTQ weights with zero points are read as {names[version]}, {told}", RuntimeWarning, stacklevel=2)


def _version(config: Mapping[str, Any]) -> int:
    given = [config.get(key) for key in ("checkpoint_format", "format")]
    said = next((each for each in given if each is not None), "gptq")
    versions = {"gptq": 1, "gptq_v2": 2}
    if not isinstance(said, str) or said not in versions:
        raise UserError(f"its GPTQ codes are in the format {said!r}, and {' and '.join(versions)} are read")
    return versions[said]


def _misfits(scheme: Scheme) -> list[str]:
    (N, K), bits = scheme.shape, scheme.bits
    found = misfits(scheme, BITS, SIZES)
    if scheme.activation_bits is not None:
        found.append("their inputs are rounded as well")
    return found + uneven(K, bits, "columns") + uneven(N, bits, "rows")
