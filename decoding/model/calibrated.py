"""A block of the decoder as a quantiser takes it: in float32, with a calibration text on its way through the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...attention.cache import DenseCache
from ...attention.rows import Rows, chains
from ...errors import UserError
from ...quantization.codes import Codes
from .block import Block
from .config import ModelConfig
from .decoder import angles
from .reading import Weights

_SIDE_BY_SIDE = 2048  # tokens of a forward pass


@dataclass(slots=True)
class Passage:
    """Some pieces of text side by side: their rows, and their hidden states at the block that is next."""

    rows: Rows
    hidden: Float[Tensor, "T dim"]


def passages(pieces: Sequence[Sequence[int]], embedding: Float[Tensor, "V dim"]) -> list[Passage]:
    """Each piece sees itself alone; none is padded."""
    found: list[Passage] = []
    batch: list[Sequence[int]] = []
    for i, piece in enumerate(pieces):
        batch.append(piece)
        if i + 1 == len(pieces) or sum(map(len, batch)) + len(pieces[i + 1]) > _SIDE_BY_SIDE:
            rows = chains(batch, range(len(batch)), prompt=True)
            found.append(Passage(rows, F.embedding(rows.tokens.to(embedding.device), embedding)))
            batch = []
    return found


class _ReachedError(Exception):
    """The layers whose input was wanted have it."""


class CalibratedBlock:
    """A block in float32. `tensors` by transformers' names; the passages move on by `advance`."""

    def __init__(self, config: ModelConfig, layer: int, tensors: Mapping[str, Tensor], text: Sequence[Passage]) -> None:
        self.config, self.layer, self.text = config, layer, text
        self.at = f"model.layers.{layer}."
        device = text[0].hidden.device if text else torch.device("cpu")
        self.tensors = {
            name: tensors[name].to(device=device, dtype=torch.float32) for name in tensors if name.startswith(self.at)
        }
        self.codes: dict[str, Codes] = {}
        self._block: Block | None = None
        c, attention, mlp = config, f"{self.at}self_attn.", f"{self.at}mlp."
        entry = c.layout.layers[layer]
        owns = entry.owner == layer
        read = ("q_proj", "k_proj", "v_proj") if owns else ("q_proj",)
        values = None
        if owns and not any(other.owner == layer for other in c.layout.layers[layer + 1 :]):  # they read them as well
            values = _Rows(f"{attention}v_proj", repeats=c.heads // entry.kv_heads, width=c.head_dim)
        self.stages: tuple[LayerStage, ...] = (
            LayerStage(self, "qkv", tuple(attention + n for n in read), _Norm(f"{self.at}input_layernorm.weight")),
            LayerStage(self, "output", (f"{attention}o_proj",), values),
            LayerStage(
                self,
                "gate_up",
                (f"{mlp}gate_proj", f"{mlp}up_proj"),
                _Norm(f"{self.at}post_attention_layernorm.weight"),
            ),
            LayerStage(self, "down", (f"{mlp}down_proj",), _Rows(f"{mlp}up_proj", repeats=1, width=c.mlp_dim)),
        )

    @property
    def block(self) -> Block:
        """As it is now. What is quantised computes with the dequantised weight."""
        if self._block is None:
            now = self.tensors | {f"{name}.weight": codes.dequantise() for name, codes in self.codes.items()}
            device = next(iter(self.tensors.values())).device
            self._block = Block(self.config, self.layer, Weights(now, torch.float32, device))
        return self._block

    def changed(self) -> None:
        self._block = None

    @torch.no_grad()
    def advance(self) -> None:
        for passage in self.text:
            passage.hidden = self._run(passage)

    def _run(self, passage: Passage) -> Tensor:
        if (owner := self.config.layout.layers[self.layer].owner) != self.layer:
            raise UserError(
                f"layer {self.layer} reads the keys and values of layer {owner}, and blocks are calibrated one by one: "
                "choose a method without calibration, such as quantization=rtn"
            )
        lengths = torch.bincount(passage.rows.sequence).tolist()
        cache = DenseCache(
            self.config.layout,
            sequences=len(lengths),
            capacity=max(lengths),
            dtype=torch.float32,
            device=passage.hidden.device,
        )
        for _ in lengths:
            cache.open()
        place = cache.stage(passage.rows)
        cos, sin = angles(self.config, max(lengths), passage.hidden.device, torch.float32)
        return self.block(passage.hidden, cos[place.positions], sin[place.positions], cache, place)

    @torch.no_grad()
    def inputs(self, product: str) -> Iterator[Float[Tensor, "T K"]]:
        """What the block's attribute `product` is fed."""
        caught: list[Tensor] = []

        def catch(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
            caught.append(given[0])
            raise _ReachedError

        for passage in self.text:
            with getattr(self.block, product).register_forward_pre_hook(catch):
                try:
                    self._run(passage)
                except _ReachedError:
                    yield caught.pop()


@dataclass(frozen=True, slots=True)
class _Norm:
    """What feeds a stage is a norm's weight."""

    name: str

    def feasible(self, by: Tensor) -> Tensor:
        return by

    def divide(self, tensors: dict[str, Tensor], by: Tensor) -> None:
        tensors[self.name] = tensors[self.name] / by


@dataclass(frozen=True, slots=True)
class _Rows:
    """What feeds a stage are the output rows of a layer, each `width` of them read `repeats` times: a KV head, by a
    group of attention heads."""

    name: str
    repeats: int
    width: int

    def feasible(self, by: Tensor) -> Tensor:
        """The mean over the columns that are fed by the same row."""
        if self.repeats == 1:
            return by
        mean = by.view(-1, self.repeats, self.width).mean(1, keepdim=True)
        return mean.expand(-1, self.repeats, -1).reshape(-1)

    def divide(self, tensors: dict[str, Tensor], by: Tensor) -> None:
        rows = by.view(-1, self.repeats, self.width)[:, 0].reshape(-1)
        tensors[f"{self.name}.weight"] = tensors[f"{self.name}.weight"] / rows[:, None]
        if (bias := tensors.get(f"{self.name}.bias")) is not None:
            tensors[f"{self.name}.bias"] = bias / rows


@dataclass(frozen=True, slots=True, eq=False)
class LayerStage:
    """Layers that read the same input. `source`: what feeds them, if a scale may be moved there."""

    owner: CalibratedBlock
    product: str
    names: tuple[str, ...]
    source: _Norm | _Rows | None

    def weight(self, name: str) -> Float[Tensor, "N K"]:
        return self.owner.tensors[f"{name}.weight"]

    def put(self, name: str, codes: Codes) -> None:
        self.owner.codes[name] = codes
        self.owner.changed()

    def inputs(self, sink: float = 1.0) -> Iterator[Float[Tensor, "T K"]]:
        """`sink`: what the first token of a text weighs where keys and values are made."""
        for passage, x in zip(self.owner.text, self.owner.inputs(self.product), strict=True):
            if self.product == "qkv" and sink != 1:
                first = passage.rows.parents.to(x.device) < 0
                x = torch.where(first[:, None], sink**0.5 * x, x)
            yield x

    def feasible(self, by: Float[Tensor, " K"]) -> Float[Tensor, " K"] | None:
        """None also where what feeds the layers is quantised already."""
        if self.source is None or self.source.name in self.owner.codes:
            return None
        return self.source.feasible(by)

    def scale(self, by: Float[Tensor, " K"]) -> None:
        assert self.source is not None
        for name in self.names:
            self.owner.tensors[f"{name}.weight"] = self.owner.tensors[f"{name}.weight"] * by
        self.source.divide(self.owner.tensors, by)
        self.owner.changed()
