"""Random heads of EAGLE for tiny targets."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from decodelab.decoding.draft import Resources
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.drafting.eagle import Eagle, EagleDrafter
from decodelab.drafting.eagle_head import EagleHead, HeadConfig, three_taps
from decodelab.drafting.trees import TreeShape


def eagle(
    target: Decoder, *, fused: bool = True, known: int | None = None, max_positions: int = 512
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Of EAGLE-3 (`fused`) or EAGLE-1, by published names, in the target's dtype. `known`: it foretells every other
    token, so many of them, and no others."""
    dim, vocab = target.config.dim, target.config.vocab
    layer = LlamaConfig(
        vocab_size=known or vocab,
        hidden_size=dim,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
    )
    taps = three_taps(target.config.layers) if fused else ("final",)
    config = HeadConfig(ModelConfig.from_hf(layer), taps, dim, vocab)
    draws = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in config.shapes().items():
        drawn = torch.randn(size, generator=draws, dtype=target.dtype)
        tensors[name] = 2 * drawn * size[1] ** -0.5 if len(size) == 2 else 1 + drawn / 2
    if known is not None:
        tensors["lm_head.weight"] = torch.randn(known, dim, generator=draws, dtype=target.dtype)
        tensors["d2t"] = torch.arange(known)
    return config, tensors


@dataclass(frozen=True)
class WithRandomEagle:
    """A head that knows nothing, and of tokens the even ones."""

    settings: Eagle = Eagle(nodes=8, depth=3, topk=3)  # noqa: RUF009  # frozen
    fused: bool = True
    known: int | None = 30
    max_positions: int = 4096
    shape: TreeShape | None = None

    def build(self, resources: Resources) -> EagleDrafter:
        target = resources.target
        config, tensors = eagle(target, fused=self.fused, known=self.known, max_positions=self.max_positions)
        return EagleDrafter(self.settings, EagleHead(config, tensors, target.embedding, target.unembedding), self.shape)
