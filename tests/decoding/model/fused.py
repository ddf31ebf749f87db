"""Models on our kernels: each kind of stored weights, and of what their layers keep."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from decodelab.attention.layout import LayerKV, Layout
from decodelab.attention.paged import PagedCache
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.graphs import Recorder, Run, Scored
from decodelab.kernels.dispatch import Kernels
from decodelab.quantization.codes import Codes
from decodelab.quantization.grid import Grid, round_to_nearest

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def four_bits(weight: Tensor) -> Codes:
    return round_to_nearest(weight, Grid(4, 16, False))


def three_bits_in_any_group(weight: Tensor) -> Codes:
    """With float shifts in the place of zeros."""
    codes = round_to_nearest(weight, Grid(3, 8, False))
    assert codes.zero is not None
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    shift = -codes.scale.float() * codes.zero.float()
    groups = codes.column_groups[order].int()
    return replace(codes, codes=codes.codes[:, order], groups=groups, zero=None, shift=shift)


def eight_bits(weight: Tensor) -> Codes:
    return round_to_nearest(weight, Grid(8, -1, False))


def entries(**of_both: Any) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(layer, 2, **of_both) for layer in range(2))


HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal", "where.Scalar")


class AsksNothing(TorchDispatchMode):
    """Refuses operations that wait for a GPU or copy to it, which a CUDA graph cannot."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(func).removeprefix("aten.").startswith(HOST), func
        return func(*args, **(kwargs or {}))


@dataclass
class Again:
    """In the place of CUDA graphs: runs what was recorded first again, so that whatever a step does not read from its
    buffer is that first step's. As with them, recording computes nothing yet, and results lie where they lay."""

    name: str = "again"
    recorded: int = 0
    replayed: list[int] = field(default_factory=list)  # which of the recorded

    def record(self, run: Run) -> Run:
        number, found = self.recorded, list[Scored]()
        self.recorded += 1

        def replay() -> Scored:
            self.replayed.append(number)
            with AsksNothing():
                found.append(run())
            (logits, hidden), (new, states) = found[0], found[-1]
            logits.copy_(new)
            for tap, of in states.items():
                hidden[tap].copy_(of)
            return found[0]

        return replay


FOUR_BITS = "llama, 4 bits, one cache of both layers"
# a model, how its weights are stored, what a layer keeps (None: the model's own), the size of a page (None: no pages)
CASES: dict[str, tuple[PretrainedConfig, Callable[[Tensor], Codes] | None, tuple[LayerKV, ...] | None, int | None]] = {
    FOUR_BITS: (LlamaConfig(**SIZES), four_bits, (LayerKV(0, 2), LayerKV(0, 2)), None),
    "qwen2, pages": (Qwen2Config(**SIZES, tie_word_embeddings=True), None, None, 4),
    "qwen3, keys of 4 bits": (Qwen3Config(**SIZES, head_dim=16), None, entries(bits=4), None),
    "smollm3, 8 bits, pages of 8 bits, windows": (
        SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
        eight_bits,
        (LayerKV(0, 2, 4, 1, bits=8), LayerKV(1, 2)),
        16,
    ),
    "mistral, 3 bits, rings": (
        MistralConfig(**SIZES, sliding_window=5),
        three_bits_in_any_group,
        (LayerKV(0, 2, 5), LayerKV(1, 2, 4, 1, bits=4)),
        None,
    ),
}


def decoder(name: str, kernels: Kernels | None = None, recorder: Recorder | None = None) -> Decoder:
    """float32; `kernels` None: of the CPU's own."""
    config, quantise, layers, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for part, weight in model.named_parameters():
                weight.mul_(8) if weight.dim() > 1 else weight.normal_(1.0 if "norm" in part else 0.0, 0.3)
    tensors, made = model.state_dict(), ModelConfig.from_hf(config)
    codes = {
        part.removesuffix(".weight"): quantise(weight)
        for part, weight in tensors.items()
        if quantise is not None and part.endswith("proj.weight")
    }
    if layers is not None:
        made = replace(made, layout=Layout(layers, made.head_dim))
    return Decoder(made, tensors, dtype=torch.float32, codes=codes, kernels=kernels, recorder=recorder)


def pages(name: str, model: Decoder) -> PagedCache | None:
    """Where the case has pages."""
    if (size := CASES[name][3]) is None:
        return None
    kernels = Kernels(interpreted=True)
    return PagedCache(model.config.layout, size=size, dtype=model.dtype, device="cpu", kernels=kernels)
