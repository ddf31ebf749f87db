"""Uptraining: a model whose weights were converted to another layout of keys and values learns to be what it was.

It is distilled from the model itself, in float32 beside the frozen original: from its distribution at the rows of a
text and, since few tokens have to do, from its hidden states behind every layer (arXiv:2305.13245 uptrains on the loss
of a language model, with a thousand times as many).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from ..attention.conversion import ConvertedTensors, converts, impossible
from ..attention.layout import Layout
from ..attention.options import Attention
from ..errors import UserError
from .distillation import Distance, Distillation, StudentLearner
from .model.config import ModelConfig, with_layout
from .model.decoder import Decoder
from .model.differentiable import Passed, forward
from .model.source import Source
from .model.weights import shapes_of
from .training import Schedule, Text

Parts = Literal["kv", "attention", "all"]
_PARTS: Mapping[str, tuple[str, ...]] = {
    "kv": (".k_proj.", ".v_proj.", ".k_norm."),
    "attention": (".self_attn.", ".input_layernorm."),
    "all": ("",),
}


class ConvertedStudent:
    """The converted model, in float32. `parameters`: those of its tensors that learn."""

    def __init__(self, source: Source, layout: Layout, parts: Parts, device: torch.device) -> None:
        self.config: PretrainedConfig = with_layout(source.config, layout)
        self.model = replace(ModelConfig.from_hf(self.config), layout=layout)
        native, stored = ModelConfig.from_hf(source.config).layout, source.tensors()
        found = ConvertedTensors(stored, native, layout) if converts(layout, native) else stored
        self.tensors = {name: found[name].to(device, torch.float32, copy=True) for name in shapes_of(self.model)}
        self.parameters: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if any(part in name for part in _PARTS[parts]) and not self._unread(name):
                self.parameters[name] = tensor.requires_grad_()

    def _unread(self, name: str) -> bool:
        """The norm of the keys that a layer does not have."""
        return ".k_norm." in name and int(name.split(".")[2]) not in self.model.layout.owners

    def __call__(self, tokens: Int[Tensor, "B S"]) -> Passed:
        return forward(self.model, self.tensors, tokens)

    def logits(self, final: Float[Tensor, "R dim"]) -> Float[Tensor, "R V"]:
        return F.linear(final, self.tensors["model.embed_tokens.weight" if self.model.tied else "lm_head.weight"])


@dataclass(frozen=True, slots=True)
class TrainKV:
    """Settings. `attention`: what the model is trained for. `parts`: what learns, the weights of keys and values, those
    of the attention with its norms, or all. `hidden`: the weight of the distance of hidden states. `texts`: JSONL files
    that are learnt from as they are; none: the target's answers to the prompts of the task."""

    attention: Attention
    parts: Parts = "all"
    hidden: float = 1.0
    texts: tuple[str, ...] = ()
    loss: Distance = field(default_factory=Distance)
    schedule: Schedule = field(default_factory=Schedule)

    kind: ClassVar[str] = "kv"

    def __post_init__(self) -> None:
        if self.parts not in _PARTS:
            raise UserError(f"train.parts must be one of {', '.join(_PARTS)}, got {self.parts!r}")
        if not 0 <= self.hidden < float("inf"):
            raise UserError(f"train.hidden must be 0 or more, got {self.hidden}")

    def check(self, target: Source) -> Mapping[str, Tensor] | None:
        """Nothing is gone on from. Refuses a layout that weights are not trained for."""
        if target.codes:
            raise UserError(f"{target.label} is quantised, and train=kv trains weights: give the unquantised model")
        native, layout = ModelConfig.from_hf(target.config), self.layout(target)
        if layout == native.layout:
            raise UserError(
                "train=kv trains a model for another attention than its own: give one, such as attention=mqa"
            )
        if (reason := impossible(layout, native.layout)) is not None:
            raise UserError(f"attention: {reason}")
        if low := [layer.bits for layer in layout.layers if layer.bits != 16]:
            raise UserError(f"train=kv computes keys and values in 16 bits or more, not in {low[0]}: leave bits out")
        if self.schedule.longest > native.max_positions:
            raise UserError(
                f"{target.label} holds {native.max_positions} tokens: lower train.schedule.longest="
                f"{self.schedule.longest} to that"
            )
        return None

    def layout(self, target: Source) -> Layout:
        native = ModelConfig.from_hf(target.config)
        return self.attention.layout(native.layout, native.heads)

    def learner(
        self,
        source: Source,
        target: Decoder,
        texts: Sequence[Text],
        seed: int,
        start: Mapping[str, Tensor] | None,
    ) -> StudentLearner:
        student = ConvertedStudent(source, self.layout(source), self.parts, target.device)
        return StudentLearner(self.kind, Distillation(self.loss, target, student, hidden=self.hidden))
