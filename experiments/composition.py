"""What a configuration amounts to, known without weights: whether it runs, where, and in which number format."""

import json
import platform
import shutil
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..attention.conversion import converts, impossible, lossless
from ..attention.layout import Layout
from ..attention.options import Native
from ..decoding.acceptance import Acceptance
from ..decoding.distillation import FILE
from ..decoding.draft import DrafterSettings
from ..decoding.law import LawSettings
from ..decoding.model.config import ModelConfig, states_layout
from ..decoding.model.load import check_convertible
from ..decoding.model.source import ModelSpec, Source
from ..decoding.model.weights import open_safetensors
from ..decoding.model.whose import NOTE
from ..decoding.replay import needs_model
from ..drafting.draft_model import DraftSpec
from ..drafting.trees import HasTree
from ..errors import UserError
from ..quantization.none import AsStored
from .blocks import check_blocks
from .config import KernelSettings, RunConfig
from .format import CHANGED, TRAINED, UNTRAINED
from .tasks import Task

Verdict = Literal["runs", "runs with a fallback", "refused"]
Exactness = Literal["exact", "same law", "lossy"]

UNSHARED = "this drafter reads hidden states of the whole prompt, so no prompt shares pages (pages.share)"
_NVIDIA = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))


@dataclass(frozen=True, slots=True)
class Composition:
    """`reasons`: why it is refused, or what the fallback is. `exactness`: what the output has to plain decoding's."""

    verdict: Verdict
    exactness: Exactness
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = {"runs": "runs", "runs with a fallback": "runs, with this fallback: ", "refused": "refused, because "}
        return words[self.verdict] + "; ".join(self.reasons)

    def notes(self) -> list[str]:
        """Fallbacks and warnings, for a run's record; a refused composition is the user's error."""
        if self.verdict == "refused":
            raise UserError(str(self))
        return [*self.reasons, *self.warnings]


def resolve(config: RunConfig, target: Source | None = None, task: Task | None = None) -> Composition:
    """Whether the parts go together. Without `target`, what needs its tokenizer, config or digest is left out."""
    if config.replay is not None:
        return _replayed(config.drafting, target, task)
    found = resolve_pair(config.drafting, config.acceptance, target, task)
    if (idle := idle_kernels(config)) is not None:
        found = replace(found, warnings=(*found.warnings, idle))
    if config.pages.share and config.drafting.needs.prefill_hidden and found.verdict != "refused":
        found = replace(found, verdict="runs with a fallback", reasons=(*found.reasons, UNSHARED))
    try:
        if target is not None and (layout := layout_of(config, target)) is not None:
            found = replace(found, warnings=(*found.warnings, *_another(config, layout, target)))
        if target is not None and not config.quality.tasks and was_trained(config.model):
            found = replace(found, warnings=(*found.warnings, TRAINED))
        if target is not None and task is not None and config.pages.blocks is not None:
            pages = replace(config.pages, share=config.pages.share and not config.drafting.needs.prefill_hidden)
            context = ModelConfig.from_hf(target.config).max_positions
            check_blocks(pages, task, config.task, config.batch, target.tokenizer, context)
    except UserError as error:
        reasons = (*(found.reasons if found.verdict == "refused" else ()), str(error))
        return replace(found, verdict="refused", reasons=reasons)
    return found


def layout_of(config: RunConfig, target: Source) -> Layout | None:
    """How the target keeps keys and values; None: as it has them. Refuses what is not carried out yet."""
    model = ModelConfig.from_hf(target.config)
    layout = config.attention.layout(model.layout, model.heads)
    if config.compare_hf and states_layout(target.config):
        raise UserError(f"transformers has no words for the layout of {target.label}: leave compare_hf out")
    if layout == model.layout:
        return None
    if (reason := impossible(layout, model.layout)) is not None:
        raise UserError(f"attention: {reason}; decodelab plan does its arithmetic")
    if converts(layout, model.layout):
        check_convertible(target)
        if not isinstance(config.quantization, AsStored):
            raise UserError(
                "attention converts weights, and quantization makes a copy of those that it would convert: "
                "train=kv first, then quantise its folder"
            )
    if config.compare_hf:
        raise UserError("compare_hf=true compares the model's own attention alone: leave it out, or attention=native")
    return layout


def _another(config: RunConfig, layout: Layout, target: Source) -> tuple[str, ...]:
    """A warning where the model says something else over this layout: its weights were trained for another one, or its
    rows see less than they did. Of the latter quality tells."""
    native = ModelConfig.from_hf(target.config).layout
    if not lossless(layout, native):
        return (UNTRAINED,)
    if config.quality.tasks or all(
        (a.sight, a.bits) == (b.sight, b.bits) for a, b in zip(layout.layers, native.layers, strict=True)
    ):
        return ()
    return (CHANGED,)


def was_trained(model: ModelSpec) -> bool:
    """Whether it is a folder that train=kv wrote."""
    file = Path(model.path or "").expanduser() / FILE
    if model.path is None or not file.is_file():
        return False
    note = json.loads((open_safetensors(file).metadata() or {}).get(NOTE, "{}"))
    return bool(note.get("kind") == "kv")


def contiguous(config: RunConfig, job: str) -> None:
    """Refuses pages in a job that keeps none."""
    if config.pages.size is not None:
        raise UserError(f"pages.size={config.pages.size} is of a run, and {job} keeps no pages: leave it out")


def own_attention(config: RunConfig, job: str) -> None:
    """Refuses another one in a job that knows none."""
    if not isinstance(config.attention, Native):
        raise UserError(f"{job} is of the model's own attention: leave attention out")


def _replayed(drafting: DrafterSettings, target: Source | None, task: Task | None) -> Composition:
    """Answers are what they are, whatever the rule: the drafter must do without a model."""
    warnings = list(_bare(drafting, task))
    reason = needs_model(drafting.needs, type(drafting).__module__.rpartition(".")[2])
    if reason is None and target is not None:
        try:
            warnings += drafting.check(target)
        except UserError as error:
            reason = str(error)
    return Composition("refused" if reason else "runs", "exact", (reason,) if reason else (), tuple(warnings))


def resolve_pair(
    drafting: DrafterSettings, acceptance: Acceptance, target: Source | None = None, task: Task | None = None
) -> Composition:
    """The same for a drafter and a rule."""
    refused, fallbacks = _pair(drafting, acceptance)
    warnings: list[str] = []
    if target is not None:
        try:
            warnings += drafting.check(target)
        except UserError as error:
            refused.append(str(error))
    warnings += _bare(drafting, task)
    verdict: Verdict = "refused" if refused else "runs with a fallback" if fallbacks else "runs"
    return Composition(verdict, _exactness(drafting, acceptance), tuple(refused or fallbacks), tuple(warnings))


def _bare(drafting: DrafterSettings, task: Task | None) -> tuple[str, ...]:
    """A warning where there is nothing to copy from."""
    if task is None or not drafting.needs.documents or any(item.documents for item in task.items):
        return ()
    return (f"no prompt of the task {task.label} has documents, from which this drafter copies",)


def _pair(drafting: DrafterSettings, acceptance: Acceptance) -> tuple[list[str], list[str]]:
    """(why this drafter and this rule are refused, what they fall back to)."""
    refused, fallbacks = [], []
    gives, law = drafting.gives, acceptance.law()
    rule = f"acceptance={type(acceptance).__name__.lower()}"
    if gives.rows and gives.shape not in acceptance.shapes:
        shapes = " and ".join(f"{shape}s" for shape in acceptance.shapes)
        form = _chain_form(drafting) if "chain" in acceptance.shapes else None
        refused.append(
            f"{rule} judges {shapes}, and this drafter proposes a {gives.shape}: "
            f"choose {f'{form} or ' if form else ''}acceptance=sampling"
        )
    if acceptance.reads == "all rows" and law.reads_context:
        refused.append(
            f"{rule} reads all rows at once, and {', '.join(_stateful(law))} must be followed along a path: "
            "leave them out, or choose acceptance=sampling"
        )
    if gives.rows and gives.q == "sampled" and not law.sample:
        fallbacks.append(f"{rule} does not sample, so drafts are chosen as the target chooses, not sampled")
    if gives.rows and gives.q == "one-hot" and acceptance.needs_q:
        fallbacks.append(f"{rule} reads q and this drafter has none: all of q is taken to be on the drafted token")
    return refused, fallbacks


def _chain_form(drafting: DrafterSettings) -> str | None:
    """The key with which this drafter proposes a chain."""
    if not is_dataclass(drafting) or "tree" not in {field.name for field in fields(drafting)}:
        return None
    branches = isinstance(getattr(drafting, "tree", None), bool)
    if not (branches or isinstance(drafting, HasTree)):
        return None
    value = False if branches else "chain"
    chained: Any = replace(drafting, tree=value)
    return f"drafting.tree={str(value).lower()}" if chained.gives.shape == "chain" else None


def _stateful(law: LawSettings) -> list[str]:
    """The keys that make the law depend on the tokens before a row."""
    keys = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    keys += ["no_repeat_ngram", "bad_words", "min_new_tokens"]
    plain = LawSettings()
    return [key for key in keys if getattr(law, key) != getattr(plain, key)]


def _exactness(drafting: DrafterSettings, acceptance: Acceptance) -> Exactness:
    """One-hot candidates leave sampled output what it is in plain decoding; no candidates, any output."""
    gives = drafting.gives
    if acceptance.guarantee == "lossy":
        return "lossy"
    if acceptance.guarantee == "same law" and acceptance.needs_q:
        return "same law"
    if not gives.rows or acceptance.guarantee == "same tokens":
        return "exact"
    return "same law" if gives.q == "sampled" else "exact"


def draft_specs(settings: Any) -> list[DraftSpec]:
    """The models that a drafter's settings name, at any depth."""
    if isinstance(settings, DraftSpec):
        return [settings]
    parts = settings if isinstance(settings, tuple | list) else ()
    if is_dataclass(settings):
        parts = [getattr(settings, field.name) for field in fields(settings)]
    return [spec for part in parts for spec in draft_specs(part)]


def draft_models(settings: Any) -> list[ModelSpec]:
    return [spec.model for spec in draft_specs(settings)]


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} is unknown; there are auto, cpu, cuda, and cuda:1 for the second GPU")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = "a CPU build" if _is_cpu_build() else "a GPU build that finds no GPU"
            raise UserError(f"device={name}, but torch {torch.__version__} is {build}; device=cpu works")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"device={name}, but the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def idle_kernels(config: RunConfig) -> str | None:
    """Of keys that say how our kernels compute, where they do not run."""
    if config.kernels == KernelSettings():
        return None
    device = resolve_device(config.device)
    dtype, _ = resolve_dtype(config.dtype, device)
    if config.kernels.kernels.run_on(device, dtype):
        return None
    given = ", ".join(
        f"kernels.{field.name}=false" for field in fields(config.kernels) if not getattr(config.kernels, field.name)
    )
    return (
        f"{given} changes nothing on {device} in {str(dtype).removeprefix('torch.')}: it is of our Triton kernels, "
        "which run on a GPU in bfloat16, float16 and float32"
    )


def resolve_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """(the dtype, why). `auto` is bfloat16 on a GPU and on a CPU with native bfloat16 dot products, else float32."""
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        return torch.bfloat16, "auto, on a GPU"
    if native_bfloat16():
        return torch.bfloat16, "auto, this CPU multiplies bfloat16 natively"
    return torch.float32, "auto, this CPU does not multiply bfloat16 natively"


def native_bfloat16() -> bool:
    """Whether oneDNN's products in bfloat16 run on instructions made for them; it emulates them on any AVX-512."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True


def unused_gpu() -> str | None:
    """A warning where the machine has an NVIDIA GPU and torch is a CPU build."""
    if _is_cpu_build() and (any(path.exists() for path in _NVIDIA) or shutil.which("nvidia-smi")):
        return f"this machine has an NVIDIA GPU, but torch {torch.__version__} is a CPU build: install a CUDA build"
    return None


def _is_cpu_build() -> bool:
    return torch.version.cuda is None and torch.version.hip is None
