"""One layer of the Llama family, over rows of many sequences: one fused product where others have three."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ...attention.book import Placement
from ...attention.cache import Cache
from ...attention.kept import spread
from ...kernels.verify_attention import causal_attention, verify_attention
from .config import ModelConfig
from .reading import Product, Weights


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        super().__init__()
        c = config
        self.layer, self.heads, self.head_dim, self.eps = layer, c.heads, c.head_dim, c.norm_eps
        entry = c.layout.layers[layer]
        self.kv_heads, self.sight, self.owns = entry.kv_heads, entry.sight, entry.owner == layer
        self.rotates, self.bits = c.rotates[layer], entry.bits
        self.scale = c.head_dim**-0.5
        at = f"model.layers.{layer}."

        def joined(names: Sequence[str], where: str, bias: bool) -> Product:
            return weights.product([f"{at}{where}.{n}" for n in names], bias)

        self.qkv = joined(("q_proj", "k_proj", "v_proj") if self.owns else ("q_proj",), "self_attn", c.qkv_bias)
        self.output = joined(("o_proj",), "self_attn", c.output_bias)
        self.gate_up = joined(("gate_proj", "up_proj"), "mlp", c.mlp_bias)
        self.down = joined(("down_proj",), "mlp", c.mlp_bias)
        self.attention_norm = weights.read(f"{at}input_layernorm.weight")
        self.mlp_norm = weights.read(f"{at}post_attention_layernorm.weight")
        self.qk_norm = None
        if c.qk_norm:  # one weight a head, queries' then keys', so that both are normed in one call
            q, k = weights.read(f"{at}self_attn.q_norm.weight"), weights.read(f"{at}self_attn.k_norm.weight")
            self.qk_norm = torch.cat([q.expand(c.heads, -1), k.expand(self.kv_heads, -1)])

    def forward(
        self, x: Float[Tensor, "T dim"], cos: Tensor, sin: Tensor, cache: Cache, place: Placement
    ) -> Float[Tensor, "T dim"]:
        prefill = all(part.causal for part in place.parts)
        normed = F.rms_norm(x, x.shape[1:], self.attention_norm, self.eps)
        x = x + self.output(self._attend(self.qkv(normed, prefill=prefill), cos, sin, cache, place), prefill=prefill)
        gate, up = self.gate_up(F.rms_norm(x, x.shape[1:], self.mlp_norm, self.eps), prefill=prefill).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up), prefill=prefill)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Cache, place: Placement) -> Tensor:
        T, H, D = qkv.shape[0], self.heads, self.head_dim
        heads = qkv.view(T, -1, D)
        qk = heads[:, : H + self.kv_heads] if self.owns else heads
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (D,), None, self.eps) * self.qk_norm[: qk.shape[1]]
        if self.rotates:  # sin carries the sign of the half that is turned
            qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
        if self.bits == 4:
            qk = spread(qk)
        q = qk[:, :H]
        parts = []
        for part in place.parts:
            a, b = part.first, part.stop
            if self.owns:
                cache.write(self.layer, part, qk[a:b, H:], heads[a:b, H + self.kv_heads :])
            k, v = cache.view(self.layer, part)
            mine = q[a:b].contiguous()
            if part.causal:
                parts.append(causal_attention(mine, k, v, self.scale, *self.sight))
            else:
                parts.append(verify_attention(mine, k, v, part.blocked.get(self.sight), self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
