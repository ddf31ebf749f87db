"""What a model of the Llama family is made of, read from transformers' configs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...attention.layout import LayerKV, Layout, uniform
from ...errors import UserError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
LAYOUT = "decodelab_layout"  # our key in config.json: a table of keys and values that transformers' keys cannot say
# Before the model_type of such a config.json: transformers passes over a key that it does not know, but not over a kind
# of model, and would fill the weights that it misses with noise.
_OURS = "decodelab_"
_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder. `rotates[l]`: layer l applies RoPE (SmolLM3 leaves it out of some)."""

    architecture: str
    vocab: int
    dim: int
    layers: int
    heads: int
    mlp_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotates: tuple[bool, ...]
    inv_freq: tuple[float, ...]
    rope_scale: float
    layout: Layout

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def kv_heads(self) -> int:
        return self.layout.layers[0].kv_heads

    @staticmethod
    def from_hf(config: PretrainedConfig) -> "ModelConfig":
        """Refuses an architecture or a RoPE variant that the decoder does not compute, by name."""
        kind = config.model_type
        if kind not in SUPPORTED:
            raise UserError(f"architecture {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
        if config.hidden_act not in ("silu", "swish"):
            raise UserError(f"activation {config.hidden_act!r} of {kind} is not supported; supported: silu")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = config.num_key_value_heads or heads
        if heads % kv_heads:
            raise UserError(f"{kind}: {heads} attention heads are not a multiple of {kv_heads} KV heads")
        layers = config.num_hidden_layers
        sizes = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": layers,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
        }
        for name, size in sizes.items():
            if not 0 < size < inf:
                raise UserError(f"{kind}: {name} is {size}, but must be above 0: the config is not this model's")
        no_rope = getattr(config, "no_rope_layers", None)  # 1 means that the layer does rotate
        inv_freq, scale = _rope(config, head_dim)
        if not bool(torch.isfinite(inv_freq).all()):
            raise UserError(f"{kind}: rope_parameters {config.rope_parameters} give no finite frequency: correct them")
        return ModelConfig(
            architecture=kind,
            vocab=config.vocab_size,
            dim=config.hidden_size,
            layers=layers,
            heads=heads,
            mlp_dim=config.intermediate_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
            output_bias=kind != "qwen2" and bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            rotates=tuple(bool(r) for r in no_rope[:layers]) if no_rope else (True,) * layers,
            inv_freq=tuple(inv_freq.tolist()),
            rope_scale=scale,
            layout=stated_layout(
                getattr(config, LAYOUT, None), uniform(layers, kv_heads, head_dim, _windows(config, layers)), heads
            ),
        )


def with_layout(config: PretrainedConfig, layout: Layout) -> PretrainedConfig:
    """A copy of `config` whose model keeps keys and values so; with our own key only where there is no other way."""
    content = {key: value for key, value in config.to_dict().items() if key != LAYOUT}
    first = layout.layers[0].kv_heads
    made = type(config).from_dict(content | {"num_key_value_heads": first})
    if ModelConfig.from_hf(made).layout.layers == layout.layers:
        return made
    return type(config).from_dict(made.to_dict() | {LAYOUT: [asdict(layer) for layer in layout.layers]})


def states_layout(config: PretrainedConfig) -> bool:
    """Whether transformers has no words for its layout of keys and values."""
    return getattr(config, LAYOUT, None) is not None


def content_of(config: PretrainedConfig) -> dict[str, Any]:
    """What its config.json holds."""
    content = config.to_dict()
    return (
        content | {"model_type": _OURS + config.model_type, "architectures": None} if states_layout(config) else content
    )


def kind_of(content: Mapping[str, Any]) -> Any:
    """The `model_type` of what a config.json holds, as transformers knows it."""
    kind = content.get("model_type")
    return kind.removeprefix(_OURS) if isinstance(kind, str) and LAYOUT in content else kind


def stated_layout(given: Any, usual: Layout, heads: int) -> Layout:
    """The table under our key, if there is one."""
    if given is None:
        return usual
    try:
        found = Layout(tuple(_entry(one) for one in _listed(given, len(usual.layers))), usual.head_dim)
        if uneven := [n for n in (layer.kv_heads for layer in found.layers) if heads % n]:
            raise ValueError(f"{heads} attention heads are not a multiple of {uneven[0]} KV heads")
    except ValueError as error:
        raise UserError(f"{LAYOUT} in config.json is no table of this model's layers ({error}): correct it") from None
    return found


def _listed(given: Any, layers: int) -> list[Any]:
    if not isinstance(given, list) or len(given) != layers:
        raise ValueError(f"it needs a list of {layers} entries")
    return given


def _entry(given: Any) -> LayerKV:
    names = [field.name for field in fields(LayerKV)]
    if not isinstance(given, Mapping) or set(given) != set(names):
        raise ValueError(f"each entry has {', '.join(names)}, not {given!r:.60}")
    if wrong := [n for n in names if type(given[n]) is not int and not (n == "window" and given[n] is None)]:
        raise ValueError(f"{wrong[0]} is {given[wrong[0]]!r:.60}, but must be an integer")
    return LayerKV(**given)


def _windows(config: PretrainedConfig, layers: int) -> list[int | None]:
    """Mistral windows every layer; the others the layers that their config calls sliding, if they slide at all."""
    window = getattr(config, "sliding_window", None)
    slides = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    if window is None or not slides:
        return [None] * layers
    if window < 1:
        raise UserError(f"{config.model_type}: sliding_window is {window}, but must be at least 1, or null for none")
    if config.model_type == "mistral":
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]


def _rope(config: PretrainedConfig, head_dim: int) -> tuple[Float[torch.Tensor, " half"], float]:
    """(inverse frequencies [D/2], factor on cos and sin)."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in _ROPE:
        raise UserError(f"RoPE type {kind!r} is not supported; supported: {', '.join(_ROPE)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; only 1.0 is")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    theta = parameters["rope_theta"]
    if not isinstance(theta, int | float):
        raise UserError(f"rope_theta is {theta!r}, but a number is needed: correct config.json")
    return 1.0 / theta**exponent, 1.0
