"""Whether a server has a kernel for the layers that `quantize` would write, by what its own source says; what that does
not say is unknown, and not guessed.

vLLM, for one NVIDIA GPU of compute capability 8.0 up, in float16 or bfloat16, as its public main branch was in 2026.
Which layers of a format it takes at all: auto_gptq.py (its TYPE_MAP), auto_awq.py, and of compressed_tensors/schemes
compressed_tensors_wNa16.py and compressed_tensors_w8a8_int8.py, all in vllm/model_executor/layers/quantization. With
which kernel: marlin.py, machete.py and exllama.py in vllm/model_executor/kernels/linear/mixed_precision, in utils of
layers/quantization marlin_utils.py and machete_utils.py, and scaled_mm_helper.hpp for int8:

| kernel | codes | groups | columns K, rows N |
| --- | --- | --- | --- |
| Marlin | symmetric 4 and 8 bits, asymmetric 4 bits | -1 32 64 128 | K % 128 = 0, N % 64 = 0 |
| Machete, on Hopper alone | 4 and 8 bits | -1 64 128 | K % 64 = 0, N % 128 = 0 |
| Exllama, in float16 alone | symmetric 4 and 8 bits | any but -1 | N % (32 / bits) = 0 |
| AWQ's own, behind Marlin | 4 bits in awq | 32 64 128 | N % 8 = 0 |
| Cutlass int8, up to Hopper | 8 bits, inputs too | -1 | |

Newer versions of Marlin pad other K and N (marlin_padded_nk), earlier ones do not. Layers that read the same input are
one product, of all their rows, and must be quantised alike (is_layer_skipped in quant_utils.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..decoding.model.config import ModelConfig
from ..decoding.model.source import Source
from ..errors import UserError
from ..quantization.codes import Scheme
from ..quantization.formats import NATIVE, WRITTEN, QuantisedLayers
from .format import counted
from .quantising import Quantising, layer_shapes

TARGETS = ("vllm",)
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MARLIN = (-1, 32, 64, 128)
_FLOAT16, _PADS, _EITHER = (
    "with vLLM's --dtype float16",
    "in a version that pads",
    "with vLLM's --dtype float16, or in a version that pads",
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """`found`: whether there is one; None: not known. `told`: its name, or the reason. `only`: on what it hangs."""

    found: bool | None
    told: str
    only: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `check` says of a target. `found`: as of a kernel, of all products; `told`: which kernels they have."""

    target: str
    found: bool | None
    only: tuple[str, ...]
    told: str

    def __str__(self) -> str:
        begins = {True: "yes", False: "no", None: "not known"}[self.found]
        if self.found and self.only:
            begins = "only if " + ", and ".join(self.only)
        return f"{begins}: {self.told}"


def answer(target: str, plan: Quantising | None, source: Source | None = None) -> Answer:
    """How many products have which kernel, with one of each. `source`: a model that may be quantised already."""
    if target not in TARGETS:
        raise UserError(f"target must be one of {', '.join(TARGETS)}, or null, got {target!r}")
    read = ""
    if plan is not None:
        form, schemes = plan.form.title, plan.schemes
        skipped = [name for name, q in plan.layers.items() if q is None]
    elif source is not None and isinstance(source.codes, QuantisedLayers):
        form, given = source.codes.form.title, source.codes.schemes
        layers = layer_shapes(ModelConfig.from_hf(source.config))
        schemes = {name: given[name] for name in (*layers, *given) if name in given}  # in the model's order
        skipped = [name for name in layers if name not in given]
        read = f"as its config says, {source.codes.form.name}: {_kinds(schemes)}; "
    else:
        raise UserError(
            f"target={target} is asked of what quantize would write, or of a folder that it wrote: name "
            "quantization=rtn or another, and format; or model.path=DIR"
        )
    found = vllm(form, schemes, skipped)
    said = {kernel: "no kernel: " if kernel.found is False else "" for kernel in found.values()}
    said |= {kernel: "not known: " for kernel in said if kernel.found is None and not kernel.only}
    counts = Counter(found.values())
    example = {kernel: name for name, kernel in reversed(found.items())}
    told = [f"{said[k]}{k.told} ({n} of {len(found)} products, such as {example[k]})" for k, n in counts.items()]
    if len(found) < len(schemes):
        told.append(f"{len(schemes)} layers, of which those that read the same input are one product")
    if form == NATIVE.title:
        other = _other(schemes, skipped)
        again = (
            f"quantise the model with the same keys and format={other}: decodelab quantize … format={other} output=DIR"
        )
        told.append("it has no kernel for these layers in another format either" if other is None else again)
    known: bool | None = True
    if any(kernel.found is None and not kernel.only for kernel in counts):
        known = None
    if any(kernel.found is False for kernel in counts):
        known = False
    only = {kernel.only for kernel in counts if kernel.only}
    if _PADS in only:
        only.discard(_EITHER)
    return Answer(target, known, tuple(sorted(only)), read + "; ".join(told))


def _other(schemes: Mapping[str, Scheme], skipped: Sequence[str]) -> str | None:
    """A format in which these layers have kernels."""
    for title, form in WRITTEN.items():
        with suppress(UserError):
            form.check(schemes, [*skipped, "lm_head"])
            if all(kernel.found for kernel in vllm(title, schemes, skipped).values()):
                return title
    return None


def _kinds(schemes: Mapping[str, Scheme]) -> str:
    """How many layers are of which bits, groups and order."""
    kinds = Counter(
        f"{s.bits} bits, {'whole rows' if s.group_size == s.shape[1] else f'groups of {s.group_size}'}"
        f"{', columns in any order' if s.grouped else ''}{', inputs rounded too' if s.activation_bits else ''}"
        for s in schemes.values()
    )
    return "; ".join(f"{kind} ({counted(n, 'layer')})" for kind, n in kinds.items())


def vllm(form: str, layers: Mapping[str, Scheme], skipped: Sequence[str]) -> dict[str, Kernel]:
    """The kernel of each product, by its first layer. `form`: the key `format`."""
    found = {}
    for names in _products([*layers, *skipped]):
        schemes = [layers[name] for name in names if name in layers]
        if not schemes:
            continue
        alike = {replace(scheme, shape=(0, scheme.shape[1])) for scheme in schemes}
        if len(alike) > 1 or len(schemes) < len(names):
            kinds = ", ".join(name.rpartition(".")[2] for name in names)
            found[names[0]] = Kernel(False, f"{kinds} are one product, and are not quantised alike")
        else:
            rows = sum(scheme.shape[0] for scheme in schemes)
            found[names[0]] = _kernel(form, replace(schemes[0], shape=(rows, schemes[0].shape[1])))
    return found


def _products(names: Sequence[str]) -> list[list[str]]:
    """Layers that are one product, in the model's order of their first."""
    known, done, found = set(names), set[str](), []
    for name in names:
        block, _, kind = name.rpartition(".")
        fused = next((kinds for kinds in _FUSED if kind in kinds), (kind,))
        together = [one for each in fused if (one := f"{block}.{each}" if block else each) in known]
        if name not in done:
            found.append(together)
            done.update(together)
    return found


def _kernel(form: str, scheme: Scheme) -> Kernel:
    (N, K), bits, symmetric = scheme.shape, scheme.bits, scheme.symmetric
    group = -1 if scheme.group_size == K else scheme.group_size
    kind = f"{bits} bits, {'' if symmetric else 'a'}symmetric"
    refused = _refused(form, scheme, group, kind)
    if refused is not None:
        return refused
    if scheme.activation_bits is not None:
        return Kernel(True, "Cutlass, int8, up to Hopper")
    on_hopper = group in (-1, 64, 128) and K % 64 == 0 and N % 128 == 0 and form != "awq"
    marlin = (bits == 4 or symmetric) and group in _MARLIN
    if marlin and K % 128 == 0 and N % 64 == 0:
        return Kernel(True, "Marlin, or Machete on Hopper" if on_hopper else "Marlin")
    if not marlin and on_hopper:
        return Kernel(None, f"Machete on Hopper, and none that is known elsewhere ({kind})", "on Hopper")
    if form == "awq":
        return Kernel(True, "AWQ's own, or Marlin where it pads") if marlin else Kernel(None, f"group_size={group}")
    if symmetric and group != -1 and N % (32 // bits) == 0:
        if marlin:
            return Kernel(True, "Exllama, in float16 alone, or Marlin where it pads", _EITHER)
        return Kernel(True, "Exllama, in float16 alone", _FLOAT16)
    if marlin:
        told = f"Marlin in versions that pad {N} rows and {K} columns, and none that is known in others"
        return Kernel(None, told, _PADS)
    return Kernel(None, f"{kind}, group_size={group}")


def _refused(form: str, scheme: Scheme, group: int, kind: str) -> Kernel | None:
    """What vLLM takes in no shape."""
    (bits, symmetric), refused = (scheme.bits, scheme.symmetric), None
    if form == "native":
        refused = Kernel(False, "vLLM does not read format=native")
    elif form in ("gptq", "gptq_v2"):
        if bits not in (4, 8) or not symmetric:
            refused = Kernel(False, f"{kind}: of GPTQ it takes 4 and 8 bits, symmetric")
        elif group not in _MARLIN:
            refused = Kernel(False, f"group_size={group}: of GPTQ it takes {', '.join(map(str, _MARLIN))}")
    elif form == "compressed_tensors" and scheme.activation_bits is None and bits not in (4, 8):
        refused = Kernel(None, f"{kind}: which kernel takes it is not said")
        if not symmetric:
            refused = Kernel(False, f"{kind}: of asymmetric codes it takes 4 and 8 bits")
    elif form not in ("awq", "compressed_tensors"):
        refused = Kernel(None, f"format={form}")
    return refused
