"""The same random weights in transformers' model and in ours."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def twins(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, scale: float = 4.0
) -> tuple[PreTrainedModel, Decoder]:
    """Norms and biases are random too, and matrices `scale` times as large as transformers makes them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.mul_(scale)
                elif "norm" in name:
                    weight.normal_(1.0, 0.3)
                else:
                    weight.normal_(0.0, 0.3)
    return model, Decoder(ModelConfig.from_hf(config), model.state_dict(), dtype=dtype)


def llama_twins(vocab: int = 61, scale: float = 4.0, **config: Any) -> tuple[PreTrainedModel, Decoder]:
    """A Llama of two layers, in float64: both choose the same tokens."""
    sizes = SIZES | {"vocab_size": vocab, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48} | config
    return twins(LlamaConfig(**sizes), torch.float64, scale)
