"""Tiny models and a tiny tokenizer, built in milliseconds."""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.testing import tiny_decoder, tiny_tokenizer

__all__ = ["clockwork", "tiny_decoder", "tiny_tokenizer"]


def clockwork(follows: Sequence[int], dtype: torch.dtype = torch.float64) -> Decoder:
    """A model that knows nothing but which token follows which, for certain; their number is a multiple of 8."""
    V = len(follows)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=V,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=V // 8,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    unembedding = torch.zeros(V, V)
    unembedding[torch.tensor(follows), range(V)] = 20
    block = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": torch.eye(V),
        "model.norm.weight": torch.ones(V),
        "lm_head.weight": unembedding,
        block + "input_layernorm.weight": torch.ones(V),
        block + "post_attention_layernorm.weight": torch.ones(V),
        block + "self_attn.q_proj.weight": torch.zeros(V, V),
        block + "self_attn.k_proj.weight": torch.zeros(8, V),
        block + "self_attn.v_proj.weight": torch.zeros(8, V),
        block + "self_attn.o_proj.weight": torch.zeros(V, V),
        block + "mlp.gate_proj.weight": torch.zeros(8, V),
        block + "mlp.up_proj.weight": torch.zeros(8, V),
        block + "mlp.down_proj.weight": torch.zeros(V, 8),
    }
    return Decoder(ModelConfig.from_hf(config), weights, dtype=dtype)
