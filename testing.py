"""What a part of one's own must pass. Nothing here needs pytest: a failed promise is an AssertionError that says which."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .decoding.model.config import ModelConfig
from .decoding.model.decoder import Decoder


def tiny_decoder(seed: int = 0, dtype: torch.dtype = torch.float64, *, scale: float = 16.0, **config: Any) -> Decoder:
    """A random Llama of 61 tokens, 2 layers, 4 heads over 2 KV heads; `config` overrides fields of LlamaConfig.

    Its matrices are scaled up, so that the gap between the two best tokens is wide and the output varied; a smaller
    `scale` gives more repetition.
    """
    sizes: dict[str, Any] = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    settings = LlamaConfig(**(sizes | config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    weights = {name: w * scale if w.dim() > 1 else w for name, w in model.state_dict().items()}
    return Decoder(ModelConfig.from_hf(settings), weights, dtype=dtype)
