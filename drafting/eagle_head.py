"""What a head of EAGLE computes, and the files that hold one: ours, and EAGLE-1, -2 and -3 as published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig

from ..decoding.model.config import ModelConfig
from ..decoding.model.decoder import Tap
from ..decoding.model.reading import Product as Unembedding
from ..decoding.model.source import Source
from ..decoding.model.whose import note_of
from ..errors import UserError
from ..kernels.linear import Linear
from .trained import Trained
from .vocabulary import narrowed

_OURS = {  # what our note calls the fields of a config.json
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_READ = (*_OURS.values(), "rope_theta", "rope_scaling", "rope_parameters", "hidden_act")
_TAPS = "eagle_aux_hidden_state_layer_ids"

Shapes = dict[str, tuple[int, ...]]
Product = Callable[[Tensor], Tensor]
# (q [T, H, D], k [T, Hkv, D], v) of new rows, rotated → [T, H · D]: keeps k and v, and knows what each row sees
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes of a head. `layer`: its decoder layer, with the head's own vocabulary. `taps`: the hidden states it reads,
    `final` (EAGLE-1 and -2), or several that are fused (EAGLE-3). `dim`, `vocab`: the target's."""

    layer: ModelConfig
    taps: tuple[Tap, ...]
    dim: int
    vocab: int

    @property
    def fused(self) -> bool:
        return self.taps != ("final",)

    @property
    def at(self) -> str:
        """Before the names of the layer's tensors."""
        return "midlayer." if self.fused else "layers.0."

    def shapes(self) -> Shapes:
        """Every tensor that the head must have."""
        c, at = self.layer, self.at
        q, kv, wide = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.dim * (1 + self.fused)
        found: Shapes = {
            "fc.weight": (c.dim, len(self.taps) * self.dim if self.fused else 2 * self.dim),
            f"{at}self_attn.q_proj.weight": (q, wide),
            f"{at}self_attn.k_proj.weight": (kv, wide),
            f"{at}self_attn.v_proj.weight": (kv, wide),
            f"{at}self_attn.o_proj.weight": (c.dim, q),
            f"{at}mlp.gate_proj.weight": (c.mlp_dim, c.dim),
            f"{at}mlp.up_proj.weight": (c.mlp_dim, c.dim),
            f"{at}mlp.down_proj.weight": (c.dim, c.mlp_dim),
            f"{at}post_attention_layernorm.weight": (c.dim,),
        }
        if self.fused:
            norms = (f"{at}input_layernorm", f"{at}hidden_norm", "norm")
            found |= {f"{name}.weight": (c.dim,) for name in norms}
        return found

    def more_shapes(self) -> Shapes:
        """What it may have beside them: an embedding, an unembedding, biases, and a vocabulary of its own."""
        c = self.layer
        found: Shapes = {"embed_tokens.weight": (self.vocab, c.dim), "lm_head.weight": (c.vocab, c.dim)}
        found |= {n.replace(".weight", ".bias"): size[:1] for n, size in self.shapes().items() if len(size) == 2}
        found |= {"d2t": (c.vocab,)}
        return found | ({"t2d": (self.vocab,)} if self.fused else {f"{self.at}input_layernorm.weight": (c.dim,)})


def three_taps(layers: int) -> tuple[int, int, int]:
    """The streams that enter layers 2, L // 2 and L − 3, as published. Under 7 layers these would coincide or change
    places: there it is a third of the layers, two thirds and all of them."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return -(-layers // 3), -(-2 * layers // 3), layers


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def read_config(trained: Trained, label: str, dim: int, vocab: int, layers: int) -> HeadConfig:
    """From names and shapes of the tensors and what is noted of them. Refuses what is no head, is incomplete, or is
    one of another target than `label`, which has the sizes `dim`, `vocab` and `layers`."""
    file = trained.file
    shapes = {_bare(name): size for name, size in trained.shapes.items() if not name.endswith("rotary_emb.inv_freq")}
    fused = not any(name.startswith("layers.0.") for name in shapes)

    def rows(name: str, least: int = 1) -> int:
        size = shapes.get(f"{name}.weight", ())
        return max(least, size[0]) if len(size) == 2 else least

    at = "midlayer." if fused else "layers.0."
    if "fc.weight" not in shapes or not any(name.startswith(at) for name in shapes):
        raise UserError(f"{file} holds no EAGLE head: its tensors are {', '.join(list(trained.shapes)[:4])} …")
    own = {"embed_tokens.weight", "lm_head.weight"} <= shapes.keys()  # then it may be narrower than the target
    layer = _layer(
        trained,
        hidden_size=rows("fc") if fused and own else dim,
        intermediate_size=rows(f"{at}mlp.gate_proj"),
        vocab_size=rows("lm_head") if "lm_head.weight" in shapes else (*shapes.get("d2t", ()), vocab)[0],
        query=rows(f"{at}self_attn.q_proj", 2),
    )
    config = HeadConfig(layer, _taps(trained, layers) if fused else ("final",), dim, vocab)
    wanted = config.shapes()
    if missing := [name for name in wanted if name not in shapes]:
        raise UserError(f"{file} lacks {missing[0]}: it is incomplete, or no head of EAGLE-{3 if fused else '1 or -2'}")
    known = wanted | config.more_shapes()
    if unknown := [name for name in shapes if name not in known]:
        raise UserError(f"{file} holds {unknown[0]}, which no head of EAGLE-{3 if fused else '1 or -2'} has")
    if fused and layer.vocab != vocab and "d2t" not in shapes:
        raise UserError(
            f"{file} foretells {layer.vocab} tokens of {label}'s {vocab}, but has no d2t, which says which ones: "
            "save the map with the head, or no draft is ever right"
        )
    for name, size in known.items():
        if shapes.get(name, size) != size:
            raise UserError(
                f"{file}: {name} is {list(shapes[name])}, but must be {list(size)} with {layer.heads} heads over "
                f"{layer.kv_heads}, {label}'s hidden size of {dim} and its vocabulary of {vocab}: the head belongs to "
                "another model, or the config beside it to another head"
            )
    return config


def _layer(trained: Trained, query: int, **sizes: int) -> ModelConfig:
    """The decoder layer. `query`: rows of its query projection."""
    about, file = trained.about, trained.file
    said = {_OURS.get(key, key): value for key, value in about.items()} if trained.ours else about
    heads = said.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        where = "its note" if trained.ours else "a config.json beside it"
        raise UserError(
            f"{file} has {heads} attention heads by {where}, but a number is needed: fetch it with its config"
        )
    try:
        given = {key: said[key] for key in _READ if said.get(key) is not None}
        config = LlamaConfig(**given, **sizes, num_hidden_layers=1, head_dim=max(2, query // heads // 2 * 2))
        return ModelConfig.from_hf(config)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise UserError(f"{file}: its config is no EAGLE head's ({' '.join(str(error).split())[:200]})") from None


def _taps(trained: Trained, layers: int) -> tuple[Tap, ...]:
    """Ours are noted. Projects count differently where a config names them, so only the usual ones are taken there."""
    usual = three_taps(layers)
    if trained.ours:
        noted = trained.about.get("taps", usual)
        is_list = isinstance(noted, list | tuple) and len(noted) > 0
        if not is_list or not all(type(tap) is int and 0 <= tap <= layers for tap in noted):
            raise UserError(f"{trained.file} reads hidden states {noted}, but the target's are 0 to {layers}")
        return tuple(noted)
    inner = trained.about.get("eagle_config")
    named = trained.about.get(_TAPS) or (inner.get(_TAPS) if isinstance(inner, Mapping) else None)
    if named is not None and named not in (list(usual), [tap - 1 for tap in usual]):
        raise UserError(
            f"{trained.file} was fed hidden states {named} by its config, but only those that enter layers "
            f"{', '.join(map(str, usual))} are fed here: another head is needed"
        )
    return usual


def read_tensors(trained: Trained, config: HeadConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """By names without "model."; refuses numbers that are not finite and a d2t that leads out of the vocabulary."""
    stored = {_bare(name): tensor for name, tensor in trained.tensors().items()}
    offsets = stored.pop("d2t", None)
    found = {
        name: stored[name].to(device=device, dtype=dtype)
        for name in config.shapes() | config.more_shapes()
        if name in stored
    }
    trained.check_finite(found)
    if offsets is not None:
        found["d2t"] = offsets = offsets.to(device=device, dtype=torch.long)
        ids = offsets + torch.arange(len(offsets), device=device)
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab or len(ids.unique()) < len(ids):
            raise UserError(
                f"{trained.file}: d2t leads to tokens {int(ids.min())} to {int(ids.max())}, but must lead to different "
                f"ones from 0 to {config.vocab - 1}: token i of the head is i + d2t[i]"
            )
    return found


def known_ids(tensors: Mapping[str, Tensor]) -> Int[Tensor, " V"] | None:
    """The target's tokens that the head knows, in the order of its logits; None: all."""
    offsets = tensors.get("d2t")
    return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)


def unembedding_of(unembedding: Unembedding, tensors: Mapping[str, Tensor]) -> Product:
    """What a head without an unembedding of its own has of the target's."""
    return unembedding if "lm_head.weight" in tensors else narrowed(unembedding, known_ids(tensors))


def dense(weight: Tensor, bias: Tensor | None = None) -> Product:
    """A product through which gradients reach its weight."""
    return partial(F.linear, weight=weight, bias=bias)


class EagleHead:
    """The arithmetic of a head, and nothing else: no cache, no state, no change in place.

    `tensors`: by published names without "model.". `product` makes a product out of a weight and a bias: `Linear`
    packs the weight for decoding, `dense` leaves it as it is, for training. `embedding` [V, dim] and `unembedding` are
    the target's, for a head without its own; the unembedding has the rows of the tokens that the head knows (d2t).
    """

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        unembedding: Product,
        product: Callable[[Tensor, Tensor | None], Product] = Linear,
    ) -> None:
        def made(name: str) -> Product:
            return product(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        self.config, at = config, config.at
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.unembedding = made("lm_head") if "lm_head.weight" in tensors else unembedding
        self.fc = made("fc")
        self.q, self.k, self.v, self.o = (made(f"{at}self_attn.{n}_proj") for n in "qkvo")
        self.gate, self.up, self.down = (made(f"{at}mlp.{n}_proj") for n in ("gate", "up", "down"))
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.norms = {name: tensors.get(f"{at}{name}.weight") for name in norms} | {"norm": tensors.get("norm.weight")}
        self.inv_freq = torch.tensor(config.layer.inv_freq, device=self.embedding.device)
        ids = known_ids(tensors)  # the target's, of each token that is foretold
        self.ids = (torch.arange(config.layer.vocab) if ids is None else ids).to(self.embedding.device)

    def fuse(self, hidden: Sequence[Float[Tensor, "*T F"]]) -> Float[Tensor, "*T d"]:
        """Features from the target's hidden states, one for each tap."""
        return self.fc(torch.cat(list(hidden), -1)) if self.config.fused else hidden[0]

    def __call__(
        self,
        features: Float[Tensor, "*T d"],
        tokens: Int[Tensor, "*T"],
        positions: Int[Tensor, "*T"],
        attend: Attend,
    ) -> Float[Tensor, "*T d"]:
        """The next features, from the features of `positions` and the tokens behind them."""
        embedded = F.embedding(tokens, self.embedding)
        if self.config.fused:
            x = features
            y = torch.cat([self._norm("input_layernorm", embedded), self._norm("hidden_norm", features)], -1)
        else:  # the layer has no norm before its attention as published
            x = self.fc(torch.cat([embedded, features], -1))
            y = self._norm("input_layernorm", x)
        cos, sin = self._angles(positions)
        q, k, v = (made(y).unflatten(-1, (-1, self.config.layer.head_dim)) for made in (self.q, self.k, self.v))
        x = x + self.o(attend(_turn(q, cos, sin), _turn(k, cos, sin), v))
        y = self._norm("post_attention_layernorm", x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def logits(self, features: Float[Tensor, "*T d"]) -> Float[Tensor, "*T V"]:
        """Of the tokens that `ids` names."""
        return self.unembedding(self._norm("norm", features))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.norms[name]
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self.config.layer.norm_eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D], in float32 and then rounded, as the decoder has them."""
        angle = positions[..., None].float() * self.inv_freq
        angle = torch.cat([angle, angle], -1)[..., None, :]
        scale, dtype = self.config.layer.rope_scale, self.embedding.dtype
        return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def note(target: Source, **about: Any) -> dict[str, str]:
    """The metadata of a file of ours. `about`: heads, kv_heads, max_positions, norm_eps, rope_theta; EAGLE-3's taps."""
    return note_of("eagle", target, about)
