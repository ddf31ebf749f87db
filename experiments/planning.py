"""Arithmetic of memory and time for any model, layout and hardware, on paper: no weight is read, nothing is measured.

The model is the roofline: a forward takes as long as its bytes at the memory's bandwidth or its operations at the peak
of products, whichever is longer. Real programs reach shares of both, by which the same numbers are shown again. Bytes
are those of weights and of keys and values; activations, communication and the host's own time are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from ..attention.cache import rounded
from ..attention.layout import SCALE_BYTES, LayerKV, Layout
from ..decoding.cost import DraftCost, Profile
from ..decoding.model.config import LAYOUT, kind_of, stated_layout
from ..errors import UserError
from ..quantization.codes import Scheme
from ..quantization.none import AsStored
from ..quantization.quantiser import Quantiser, settings_of

GIGA = 1e9
_PROJECTIONS = "attention's projections"
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
_MOE = {"mixtral": ("num_local_experts", "intermediate_size"), "qwen3_moe": ("num_experts", "moe_intermediate_size")}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device: `bandwidth` of its memory in GB/s, `flops` of dense products in TFLOP/s, `memory` in GB; null: this
    machine's, measured. `devices`: so many split each layer (tensor parallel). `price_per_hour` of one device. `mfu`,
    `mbu`: what programs usually reach of the peaks, in prefill and in decoding."""

    bandwidth: float | None = None
    flops: float | None = None
    memory: float | None = None
    devices: int = 1
    price_per_hour: float | None = None
    mfu: tuple[float, float] = (0.4, 0.6)
    mbu: tuple[float, float] = (0.6, 0.8)

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory"):
            if (value := getattr(self, name)) is not None and not 0 < value < inf:
                raise UserError(f"hardware.{name} must be above 0, or null for this machine's, got {value}")
        if self.devices < 1:
            raise UserError(f"hardware.devices must be at least 1, got {self.devices}")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < inf:
            raise UserError(f"hardware.price_per_hour must be at least 0, got {self.price_per_hour}")
        for name in ("mfu", "mbu"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise UserError(f"hardware.{name} must be two shares, the lower first, got {[low, high]}")


@dataclass(frozen=True, slots=True)
class PlanJob:
    """Of the job `plan`. `reserve`: share of the memory for activations, graphs and the allocator; `page`: tokens of a
    block of a paged cache; `max_length`: for which a contiguous cache reserves (None: the model's context)."""

    reserve: float = 0.1
    page: int = 16
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("page", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"plan.{name} must be at least 1, got {value}")
        if not 0 <= self.reserve < 1:
            raise UserError(f"plan.reserve must be at least 0 and below 1, got {self.reserve}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of one model. `experts` MLPs a layer, of which a row goes through `active`; 1 and 1: no router."""

    name: str
    dim: int
    heads: int
    mlp_dim: int
    vocab: int
    max_positions: int
    layout: Layout
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 1
    active: int = 1

    @staticmethod
    def of(name: str, config: Mapping[str, Any]) -> "Architecture":
        """From the keys of a transformers config. Refuses by name what has other parts."""
        kind = kind_of(config)
        if kind not in KNOWN:
            raise UserError(f"{name}: the sizes of architecture {kind!r} are not known here; known: {', '.join(KNOWN)}")
        wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
        experts_key, mlp_key = _MOE.get(kind, (None, "intermediate_size"))
        needed = [*wanted, mlp_key, *([experts_key, "num_experts_per_tok"] if experts_key else [])]
        for key in needed:
            if type(config.get(key)) is not int or config[key] < 1:
                raise UserError(f"{name}: {key} must be a whole number above 0, got {config.get(key)!r}")
        for key in ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers"):
            value, least = config.get(key), int(key != "max_window_layers")
            if value is not None and (type(value) is not int or value < least):
                raise UserError(f"{name}: {key} must be a whole number of at least {least}, or null, got {value!r}")
        if experts_key and config["num_experts_per_tok"] > config[experts_key]:
            raise UserError(
                f"{name}: num_experts_per_tok={config['num_experts_per_tok']} is more than the {config[experts_key]} "
                f"of {experts_key}"
            )
        if kind == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise UserError(f"{name}: layers without experts among those with them are not known here")
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise UserError(f"{name}: {heads} attention heads are not a multiple of {kv_heads} KV heads")
        windows = _windows(kind, config, layers)
        usual = Layout(tuple(LayerKV(i, kv_heads, window) for i, window in enumerate(windows)), head_dim)
        bias = bool(config.get("attention_bias", False))
        return Architecture(
            name=name,
            dim=config["hidden_size"],
            heads=heads,
            mlp_dim=config[mlp_key],
            vocab=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            layout=stated_layout(config.get(LAYOUT), usual, heads),
            tied=bool(config.get("tie_word_embeddings", kind == "smollm3")),
            qkv_bias=kind == "qwen2" or bias,
            output_bias=kind != "qwen2" and bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=config[experts_key] if experts_key else 1,
            active=config["num_experts_per_tok"] if experts_key else 1,
        )

    @property
    def layers(self) -> int:
        return len(self.layout.layers)


def _windows(kind: str, config: Mapping[str, Any], layers: int) -> list[int | None]:
    """As `decoding.model.config` reads them: of every layer of Mistral's, of the others' layers that are called so."""
    window = config.get("sliding_window")
    always = kind in ("mistral", "mixtral")
    if window is None or not (always or config.get("use_sliding_window", False)):
        return [None] * layers
    kinds = config.get("layer_types")
    if always or kinds is None:
        first = 0 if always else config.get("max_window_layers", layers)
        return [window if i >= first else None for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"layer_types must be a list of {layers} kinds, one a layer, got {kinds!r:.60}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Part:
    """Weights of one kind over all layers. `experts`: of how many there is one such part in each layer; `elements` and
    `bytes` are of all of them. `product`: multiplied by each row, not merely looked up or added."""

    name: str
    elements: int
    bytes: int
    experts: int = 1
    product: bool = True


def parts(a: Architecture, layout: Layout, itemsize: int, quantiser: Quantiser | AsStored | None = None) -> list[Part]:
    """All weights of `a` with this layout: layers without keys of their own have none for them. Only linear layers of
    the blocks are quantised, by the names that overrides go by."""
    D = layout.head_dim
    found = {name: [0, 0] for name in (_PROJECTIONS, "MLP", "experts", "router")}
    rest = a.dim  # norms and biases, in elements
    for i, entry in enumerate(layout.layers):
        kv = entry.kv_heads * D
        linear = {"self_attn.q_proj": (a.heads * D, a.dim), "self_attn.o_proj": (a.dim, a.heads * D)}
        if entry.owner == i:
            linear |= {"self_attn.k_proj": (kv, a.dim), "self_attn.v_proj": (kv, a.dim)}
        mlp = {
            "mlp.gate_proj": (a.mlp_dim, a.dim),
            "mlp.up_proj": (a.mlp_dim, a.dim),
            "mlp.down_proj": (a.dim, a.mlp_dim),
        }
        for name, shape in (linear | mlp).items():
            inside = name.startswith("mlp")
            times = a.experts if inside else 1
            where = found[("experts" if a.experts > 1 else "MLP") if inside else _PROJECTIONS]
            where[0] += times * prod(shape)
            where[1] += times * linear_bytes(shape, _scheme(quantiser, f"model.layers.{i}.{name}", shape), itemsize)
        if a.experts > 1:
            found["router"][0] += a.experts * a.dim
            found["router"][1] += a.experts * a.dim * itemsize
        owned = 2 * kv if entry.owner == i else 0
        rest += 2 * a.dim + (2 * D if a.qk_norm else 0) + (a.heads * D + owned if a.qkv_bias else 0)
        rest += (a.dim if a.output_bias else 0) + (a.experts * (2 * a.mlp_dim + a.dim) if a.mlp_bias else 0)
    listed = [
        Part(name, elements, size, a.experts if name == "experts" else 1)
        for name, (elements, size) in found.items()
        if elements
    ]
    table = a.vocab * a.dim
    listed.append(Part("unembedding", table, table * itemsize))
    if not a.tied:
        listed.append(Part("embedding", table, table * itemsize, product=False))
    return [*listed, Part("norms and biases", rest, rest * itemsize, product=False)]


def _scheme(quantiser: Quantiser | AsStored | None, name: str, shape: tuple[int, int]) -> Scheme | None:
    if quantiser is None or isinstance(quantiser, AsStored):
        return None
    own = settings_of(quantiser, name)
    return None if own is None else own.scheme(shape)


def linear_bytes(shape: tuple[int, int], scheme: Scheme | None, itemsize: int) -> int:
    """As our own codes take: without gaps, with a float16 scale a group, and a zero point of 8 bits or a float16 shift.
    None: not quantised."""
    rows, columns = shape
    if scheme is None:
        return rows * columns * itemsize
    groups = -(-columns // scheme.group_size)
    return rows * -(-columns * scheme.bits // 8) + rows * groups * (2 + (2 if scheme.shift else 1))


def parameters(a: Architecture) -> int:
    """As a model's page counts them: a tied table once."""
    return sum(part.elements for part in parts(a, a.layout, 2))


def active_parameters(a: Architecture) -> int:
    """Those that one row goes through, the embedding table among them."""
    return sum(part.elements * (a.active if part.experts > 1 else 1) // part.experts for part in parts(a, a.layout, 2))


def touched_share(experts: int, active: int, rows: int) -> int | float:
    """Of a layer's experts, those that some of so many rows go through, if each row draws `active` of them alike and on
    its own: 1 − (1 − k ÷ E)^rows. Real routers are less even, and touch fewer."""
    return 1 - (1 - active / experts) ** rows


def touched_parameters(a: Architecture, rows: int) -> int | float:
    """Those that a forward of so many rows reads."""
    share = touched_share(a.experts, a.active, rows)
    return sum(part.elements * (share if part.experts > 1 else 1) for part in parts(a, a.layout, 2))


def on_each(layout: Layout, devices: int, heads: int) -> Layout:
    """What one of so many devices holds of a layout: max(1, kv_heads ÷ devices) heads a layer. With more devices than
    KV heads each head is on several of them."""
    if heads % devices:
        raise UserError(f"hardware.devices={devices} does not divide the {heads} attention heads")
    for i, layer in enumerate(layout.layers):
        if layer.kv_heads % devices and devices % layer.kv_heads:
            raise UserError(
                f"hardware.devices={devices}: layer {i} has {layer.kv_heads} KV heads, of which each device would hold "
                "a broken number: give a number of devices that divides them, or that they divide"
            )
    return replace(layout, layers=tuple(replace(e, kv_heads=max(1, e.kv_heads // devices)) for e in layout.layers))


def paged_bytes(layout: Layout, tokens: int, itemsize: int, page: int) -> int:
    """One sequence in whole pages, as in a PagedCache: windows are masks there, and save nothing."""
    return -(-tokens // page) * page * layout.bytes_per_token(itemsize)


def contiguous_bytes(layout: Layout, tokens: int, itemsize: int) -> int:
    """What is reserved for a sequence of up to so many tokens, as in a LayeredCache: a windowed layer has a ring."""
    return layout.sequence_bytes(rounded(tokens), itemsize)


def read_bytes(layout: Layout, tokens: int, itemsize: int) -> int:
    """What one row's attention reads behind so many tokens. A shared cache is held once and read by each layer."""
    return sum(e.held(tokens) * layout.layer_bytes(e.owner, itemsize) for e in layout.layers)


def attention_flops(layout: Layout, heads: int, tokens: int) -> int:
    """Of one row that sees so many keys: scores and their weighted sum."""
    return sum(4 * heads * layout.head_dim * entry.held(tokens) for entry in layout.layers)


def prefill_attention_flops(layout: Layout, heads: int, tokens: int) -> int:
    """Of a prompt: row i sees i keys, in a windowed layer no more than that holds."""
    total = 0
    for entry in layout.layers:
        most = entry.held(tokens)
        total += 4 * heads * layout.head_dim * (most * (most + 1) // 2 + (tokens - most) * most)
    return total


@dataclass(frozen=True, slots=True)
class Peak:
    """One device, in bytes, bytes and operations a second."""

    bandwidth: float
    flops: float
    memory: float


@dataclass(frozen=True, slots=True)
class Cost:
    """One forward on one device. `split`: operations by what they are spent on."""

    weight_bytes: int | float
    kv_bytes: int | float
    split: Mapping[str, float]

    @property
    def flops(self) -> int | float:
        return sum(self.split.values())

    @property
    def bytes(self) -> int | float:
        return self.weight_bytes + self.kv_bytes

    def seconds(self, peak: Peak, mfu: float = 1.0, mbu: float = 1.0) -> float:
        return max(self.flops / (peak.flops * mfu), self.bytes / (peak.bandwidth * mbu))

    def bound(self, peak: Peak) -> str:
        return "bandwidth" if self.bytes / peak.bandwidth >= self.flops / peak.flops else "products"


@dataclass(frozen=True, slots=True)
class Setup:
    """A model with its layout and weights on so many devices. `itemsize`: bytes of what is computed."""

    architecture: Architecture
    layout: Layout
    itemsize: int
    quantiser: Quantiser | AsStored | None = None
    devices: int = 1

    @property
    def parts(self) -> list[Part]:
        return parts(self.architecture, self.layout, self.itemsize, self.quantiser)

    @property
    def weight_bytes(self) -> int:
        """Of all devices together."""
        return sum(part.bytes for part in self.parts)

    @property
    def own(self) -> Layout:
        """One device's part of the layout."""
        return on_each(self.layout, self.devices, self.architecture.heads)

    def step(self, batch: int, rows: int, context: int) -> Cost:
        """One forward of `rows` rows of each of `batch` sequences, all scored, behind `context` tokens each. The rows
        of a sequence read its keys once."""
        a = self.architecture
        total = batch * rows
        share = touched_share(a.experts, a.active, total)
        weights = sum(part.bytes * (share if part.experts > 1 else 1) for part in self._read)
        seen = total * attention_flops(self.layout, a.heads, context)
        kv = batch * read_bytes(self.own, context, self.itemsize)
        return Cost(weights / self.devices, kv, self._split(total, total, seen))

    def prefill(self, tokens: int) -> Cost:
        """One prompt, of which the last row is scored. What is written of keys and values is read no more than once."""
        a = self.architecture
        share = touched_share(a.experts, a.active, tokens)
        weights = sum(part.bytes * (share if part.experts > 1 else 1) for part in self._read)
        seen = prefill_attention_flops(self.layout, a.heads, tokens)
        return Cost(
            weights / self.devices, self.own.sequence_bytes(tokens, self.itemsize), self._split(tokens, 1, seen)
        )

    @property
    def _read(self) -> Iterator[Part]:
        """Of the embedding table a row a token is looked up: nothing beside the rest."""
        return (part for part in self.parts if part.name != "embedding")

    def _split(self, rows: int, scored: int, seen: int) -> dict[str, float]:
        split = {}
        for part in self.parts:
            if part.product:
                active = self.architecture.active / part.experts if part.experts > 1 else 1
                times = scored if part.name == "unembedding" else rows
                split[part.name] = 2 * part.elements * active * times / self.devices
        return split | {"attention over the cache": seen / self.devices}


@dataclass(frozen=True, slots=True)
class Room:
    """How many sequences fit into one device's memory. In bytes; of one sequence are `sequence`, its tokens in whole
    pages, `contiguous`, what is reserved for it instead, `draft`, the rows of a draft, and `drafter_kv`, its drafter's
    keys and values."""

    memory: int | float
    reserve: int | float
    weights: int | float
    drafter: int | float
    sequence: int
    draft: int
    drafter_kv: int
    contiguous: int

    @property
    def headroom(self) -> int | float:
        """What is left for keys and values."""
        return self.memory - self.reserve - self.weights - self.drafter

    @property
    def concurrency(self) -> int:
        return self._fit(self.sequence)

    @property
    def contiguous_concurrency(self) -> int:
        return self._fit(self.contiguous)

    @property
    def most(self) -> int:
        """In the cache that holds more: with windows, that is seldom the one of pages."""
        return max(self.concurrency, self.contiguous_concurrency)

    def _fit(self, sequence: int) -> int:
        return max(0, int(self.headroom // (sequence + self.draft + self.drafter_kv)))


def room(
    setup: Setup, peak: Peak, job: PlanJob, context: int, *, rows: int = 0, drafters: Sequence[Setup] = ()
) -> Room:
    """Of sequences of `context` tokens. `rows`: of a draft, staged behind each sequence in every layer. `drafters`:
    models that draft, each with a cache of its own, whole on every device."""
    own, itemsize = setup.own, setup.itemsize
    reserved = setup.architecture.max_positions if job.max_length is None else job.max_length
    if context > reserved:
        what = f"the model's {reserved:,}" if job.max_length is None else f"plan.max_length={reserved}"
        raise UserError(f"context={context} is longer than {what}; plan.max_length={context} plans beyond it")
    return Room(
        memory=peak.memory,
        reserve=job.reserve * peak.memory,
        weights=setup.weight_bytes / setup.devices,
        drafter=sum(d.weight_bytes for d in drafters),
        sequence=paged_bytes(own, context, itemsize, job.page),
        draft=rows * own.bytes_per_token(itemsize),
        drafter_kv=sum(paged_bytes(d.layout, context, d.itemsize, job.page) for d in drafters),
        contiguous=contiguous_bytes(own, reserved, itemsize),
    )


def profile(setup: Setup, peak: Peak, batch: int, context: int, rows: Sequence[int]) -> Profile:
    """T(k): the roofline's seconds of a forward of k rows a sequence."""
    return Profile(context, {k: setup.step(batch, k, context).seconds(peak) for k in rows})


def drafting_cost(drafters: Sequence[Setup], peak: Peak, batch: int, context: int) -> DraftCost:
    """Models that draft decode a token at a time; what else a drafter costs is not known on paper, and left out."""
    return DraftCost(0.0, sum((d.step(batch, 1, context).seconds(peak) for d in drafters), 0.0), 0.0)


def per_million(price_per_hour: int | float, tokens_per_second: int | float) -> float:
    """What a million tokens cost."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def formula(layout: Layout, itemsize: int) -> str:
    """Bytes a token, written out with its numbers: one product for owners that are alike."""
    groups: dict[tuple[int, int], int] = {}
    for i in layout.owners:
        key = layout.layers[i].kv_heads, layout.layers[i].bits
        groups[key] = groups.get(key, 0) + 1
    said = []
    for (kv_heads, bits), owners in groups.items():
        D = layout.head_dim
        wide = f"{D} × {itemsize}" if bits == 16 else f"({D} × {bits} ÷ 8 + {SCALE_BYTES})"
        said.append(f"2 × {owners} × {kv_heads} × {wide}")
    return f"{' + '.join(said)} = {layout.bytes_per_token(itemsize):,} B"
