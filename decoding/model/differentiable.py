"""The decoder's forward pass with gradients: the Llama family over whole texts side by side, in any layout of keys and
values. It computes what `Decoder` does, from the same tensors by transformers' names, and keeps no cache."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...attention.layout import LayerKV
from .config import ModelConfig
from .decoder import angles


@dataclass(frozen=True, slots=True)
class Passed:
    """`states[l]`: the residual stream that leaves layer l; `final`: what the unembedding reads."""

    states: tuple[Float[Tensor, "B S dim"], ...]
    final: Float[Tensor, "B S dim"]


def forward(config: ModelConfig, tensors: Mapping[str, Tensor], tokens: Int[Tensor, "B S"]) -> Passed:
    """Row i of a text sees the rows up to it, so that padding behind a text is seen by none of it."""
    x = F.embedding(tokens, tensors["model.embed_tokens.weight"])
    cos, sin = (turn[:, 0] for turn in angles(config, tokens.shape[1], x.device, x.dtype))
    shared: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by their owner
    states = []
    for layer in range(config.layers):
        x = _layer(config, tensors, layer, x, (cos, sin), shared)
        states.append(x)
    return Passed(tuple(states), _norm(config, tensors, "model.norm", x))


def _layer(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    layer: int,
    x: Tensor,
    turns: tuple[Tensor, Tensor],
    shared: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    at, entry, c = f"model.layers.{layer}", config.layout.layers[layer], config

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{at}.{name}.weight"], tensors.get(f"{at}.{name}.bias"))

    def heads(name: str, x: Tensor, norm: str | None) -> Tensor:
        """[B, heads, S, D], normed and turned where they are queries or keys."""
        found = product(f"self_attn.{name}", x).unflatten(-1, (-1, c.head_dim))
        if norm is None:
            return found.transpose(1, 2)
        if c.qk_norm:
            found = F.rms_norm(found, (c.head_dim,), tensors[f"{at}.self_attn.{norm}.weight"], c.norm_eps)
        found = found.transpose(1, 2)
        return found * turns[0] + found.roll(c.head_dim // 2, -1) * turns[1] if c.rotates[layer] else found

    normed = _norm(config, tensors, f"{at}.input_layernorm", x)
    if entry.owner == layer:
        shared[layer] = heads("k_proj", normed, "k_norm"), heads("v_proj", normed, None)
    q = heads("q_proj", normed, "q_norm")
    k, v = (one.repeat_interleave(c.heads // entry.kv_heads, 1) for one in shared[entry.owner])
    mask = _seen(entry, x.shape[1], x.device)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    x = x + product("self_attn.o_proj", attended.transpose(1, 2).flatten(2))
    normed = _norm(config, tensors, f"{at}.post_attention_layernorm", x)
    return x + product("mlp.down_proj", F.silu(product("mlp.gate_proj", normed)) * product("mlp.up_proj", normed))


def _norm(config: ModelConfig, tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config.norm_eps)


def _seen(entry: LayerKV, length: int, device: torch.device) -> Bool[Tensor, "S S"] | None:
    """None: all that came before."""
    if entry.window is None:
        return None
    behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (behind >= 0) & ((behind < entry.window) | (torch.arange(length, device=device) < entry.sink))
