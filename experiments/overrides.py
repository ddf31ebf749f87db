"""quantization.overrides=auto: which layers are worth 8 bits, by what the whole model's output gains per byte.

The model is held in float32 for it, with its codes beside. Each kind of layer in each part of the model goes back to 8
bits by itself, and the output on text that was not calibrated on is held against that of the model as it is. Gains are
taken to add up when the best per byte are chosen; so the choice is measured once, as a whole, against uniform settings.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]  # comes with transformers
from jaxtyping import Float
from torch import Tensor

from ..decoding.model.calibrated import CalibratedBlock, Passage, passages
from ..decoding.model.config import ModelConfig
from ..decoding.model.source import ModelSpec, Source, open_source
from ..errors import UserError
from ..quantization.formats import Format
from ..quantization.grid import Grid, round_to_nearest
from ..quantization.quantiser import Calibration, Quantiser, settings_of
from ..quantization.sequential import quantise
from .calibration import Pieces, draw
from .config import QuantizeJob
from .files import write_atomic
from .lab import Progress
from .quantising import Quantising, layer_shapes, plan

BACK = 8  # bits of a layer that goes back
ROWS = 256  # whose logits are in memory at once
YAML, RECORD = "overrides.yaml", "overrides.json"


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers of a kind in a part of the model. `kl`: of the whole model once they have 8 bits; `more`: bytes."""

    label: str
    layers: tuple[str, ...]
    kl: float
    recovered: float
    more: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A whole model: its layers' bytes, and its output's KL to that of the model as it is, in nats a token."""

    label: str
    nbytes: int
    bits: float  # a weight
    kl: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """`settings`: with the overrides that were found. `units`: the best per byte first; `kl`: with none of them."""

    settings: Quantiser
    units: tuple[Unit, ...]
    taken: tuple[Unit, ...]
    kl: float
    text: "HeldOut" = field(repr=False)
    trials: tuple[Trial, ...]

    def verified(self, folder: Path) -> "Chosen":
        """With the folder's own KL among the trials; its overrides, and how they were found, are written beside it."""
        source = open_source(ModelSpec(path=str(folder)))
        tensors, nbytes = source.tensors(), sum(codes.nbytes for codes in source.codes.values())
        trial = Trial("chosen", nbytes, 8 * nbytes / self.text.weights, self.text.kl(tensors))
        done = replace(self, trials=(*self.trials, trial))
        assert isinstance(self.settings.overrides, Mapping)
        write_atomic(folder / YAML, yaml.safe_dump(dict(self.settings.overrides), sort_keys=False))
        record = {name: [asdict(each) for each in getattr(done, name)] for name in ("units", "taken", "trials")}
        about = {"kl": self.kl, "digest": self.text.pieces.digest, "tokens": self.text.pieces.tokens}
        write_atomic(folder / RECORD, json.dumps(about | record, indent=1) + "\n")
        return done


class HeldOut:
    """Text by which quantised models are held against the model as it is, whose last hidden states are kept."""

    def __init__(self, source: Source, pieces: Pieces, progress: Progress | None) -> None:
        self.config, self.pieces = ModelConfig.from_hf(source.config), pieces
        self.weights = sum(map(prod, layer_shapes(self.config).values()))
        tensors = source.tensors(progress)
        self.embedding = tensors["model.embed_tokens.weight"].float()
        self.norm = tensors["model.norm.weight"].float()
        self.head = self.embedding if self.config.tied else tensors["lm_head.weight"].float()
        self.reference = self.last(tensors)

    def begin(self) -> list[Passage]:
        return passages(self.pieces.pieces, self.embedding)

    def last(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "T dim"]:
        """Block by block."""
        text = self.begin()
        for layer in range(self.config.layers):
            CalibratedBlock(self.config, layer, tensors, text).advance()
        return states(text)

    def kl(self, tensors: Mapping[str, Tensor]) -> float:
        """Of a model that has this one's embedding and head."""
        return self.kl_of(self.last(tensors))

    @torch.no_grad()
    def kl_of(self, hidden: Float[Tensor, "T dim"]) -> float:
        total = 0.0
        for a, b in zip(self.reference.split(ROWS), hidden.split(ROWS), strict=True):
            p, q = self._logprobs(a), self._logprobs(b)
            total += float(F.kl_div(q, p, reduction="sum", log_target=True))
        return total / len(hidden)

    def _logprobs(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, hidden.shape[1:], self.norm, self.config.norm_eps)
        return (normed @ self.head.T).log_softmax(-1)


def states(text: Sequence[Passage]) -> Float[Tensor, "T dim"]:
    return torch.cat([passage.hidden for passage in text])


def search(
    settings: Quantiser, source: Source, dtype: torch.dtype, form: Format, job: QuantizeJob, progress: Progress
) -> Chosen:
    """The overrides that recover most within the budget."""
    about: Any = settings
    if not isinstance(getattr(about, "bits", None), int) or about.bits >= BACK:
        raise UserError(f"quantization.overrides=auto gives layers {BACK} bits: take a quantiser with bits below that")
    base: Any = replace(about, overrides=type(about)().overrides)
    uniform = plan(base, source, dtype, form)
    first = next(iter(uniform.schemes.items()))
    form.check(uniform.schemes | {first[0]: replace(first[1], bits=BACK)}, list(uniform.skipped))
    text = HeldOut(source, held_out(uniform, job), progress)
    blocks = _quantised(uniform, progress)
    codes = {name: c for block in blocks for name, c in block.codes.items()}
    nbytes = sum(c.nbytes for c in codes.values())
    at_least = nbytes + text.weights // 8
    budget = at_least if job.budget is None else job.budget * text.weights / 8 if job.budget <= 32 else job.budget
    if budget < nbytes:
        raise UserError(
            f"quantize.budget={job.budget} is less than the {8 * nbytes / text.weights:.3f} bits a weight, {nbytes} "
            f"bytes, that all layers take in {base.bits} bits: give more, or fewer bits"
        )
    kl, units = _units(blocks, text, job.parts, progress)
    taken: list[Unit] = []
    for unit in units:
        if unit.recovered > 0 and nbytes + sum(u.more for u in taken) + unit.more <= budget:
            taken.append(unit)
    names = [name for unit in taken for name in unit.layers]
    found = {name: _keys(base, name) | {"bits": BACK} for name in names}
    trials = [Trial(uniform.label, nbytes, 8 * nbytes / text.weights, kl)]
    if base.bits + 1 < BACK:
        rival = plan(replace(base, bits=base.bits + 1), source, dtype, form)
        trials.append(_trial(rival, text, progress))
    settings = replace(base, overrides={**base.overrides, **found})
    return Chosen(settings, tuple(units), tuple(taken), kl, text, tuple(trials))


def held_out(plan: Quantising, job: QuantizeJob) -> Pieces:
    """Text that the calibration does not read."""
    own, context = plan.settings.calibration, ModelConfig.from_hf(plan.source.config).max_positions
    if job.path is not None or own is None:
        if job.path is None:
            raise UserError("quantization.overrides=auto compares outputs on a text: name it with quantize.path=FILE")
        length = min(512, context, job.tokens)
        settings = Calibration(path=job.path, tokens=job.tokens, length=length)
        return draw(settings, plan.source.tokenizer, context, ())
    if job.tokens < own.length:
        raise UserError(
            f"quantize.tokens={job.tokens} is less than one piece of quantization.calibration.length={own.length}"
        )
    assert plan.pieces is not None
    return draw(replace(own, tokens=job.tokens), plan.source.tokenizer, context, plan.pieces.pieces)


def _quantised(plan: Quantising, progress: Progress) -> list[CalibratedBlock]:
    """All blocks, with what their quantised layers were as well: scales that a quantiser moves are moved in both."""
    model, tensors = ModelConfig.from_hf(plan.source.config), plan.source.tensors()
    pieces = () if plan.pieces is None else plan.pieces.pieces
    text = passages(pieces, tensors["model.embed_tokens.weight"].float())
    blocks = []
    for layer in range(model.layers):
        progress(f"quantising in {plan.label}", layer, model.layers)
        block = CalibratedBlock(model, layer, tensors, text)
        for _ in quantise(block, {name: plan.layers[name] for stage in block.stages for name in stage.names}):
            pass
        block.advance()
        block.changed()
        blocks.append(block)
    progress(f"quantising in {plan.label}", model.layers, model.layers)
    return blocks


def _through(blocks: Sequence[CalibratedBlock], text: list[Passage]) -> list[Passage]:
    for block in blocks:
        block.text = text
        block.advance()
        block.changed()
    return text


def _units(
    blocks: Sequence[CalibratedBlock], text: HeldOut, parts: int, progress: Progress
) -> tuple[float, list[Unit]]:
    """(the KL of the quantised model, units by what they recover per byte)."""
    size = -(-len(blocks) // min(parts, len(blocks)))
    starts = list(range(0, len(blocks), size))
    entered: list[list[Passage]] = []  # what enters each part
    passing = text.begin()
    for at in starts:
        entered.append(_copied(passing))
        passing = _through(blocks[at : at + size], passing)
    kl = text.kl_of(states(passing))
    kinds = list(dict.fromkeys(name.split(".", 3)[-1] for block in blocks for name in block.codes))
    units = []
    for i, at in enumerate(starts):
        part = blocks[at : at + size]
        for k, kind in enumerate(kinds):
            progress("trying layers", i * len(kinds) + k, len(starts) * len(kinds))
            layers = tuple(name for block in part for name in block.codes if name.endswith(f".{kind}"))
            if not layers:
                continue
            before = {name: block.codes[name] for block in part for name in block.codes if name in layers}
            more = 0
            for block in part:
                for name in set(layers) & set(block.codes):
                    back = round_to_nearest(
                        block.tensors[f"{name}.weight"], Grid(BACK, before[name].group_size, symmetric=False)
                    )
                    more += back.nbytes - before[name].nbytes
                    block.codes[name] = back
                    block.changed()
            now = text.kl_of(states(_through(blocks[at:], _copied(entered[i]))))
            for block in part:
                block.codes |= {name: old for name, old in before.items() if name in block.codes}
                block.changed()
            last = at + len(part) - 1
            units.append(Unit(f"{kind} of blocks {at}–{last}", layers, now, kl - now, max(more, 1)))
    progress("trying layers", len(starts) * len(kinds), len(starts) * len(kinds))
    return kl, sorted(units, key=lambda unit: -unit.recovered / unit.more)


def _copied(text: Sequence[Passage]) -> list[Passage]:
    return [Passage(passage.rows, passage.hidden) for passage in text]


def _trial(plan: Quantising, text: HeldOut, progress: Progress) -> Trial:
    blocks = _quantised(plan, progress)
    nbytes = sum(codes.nbytes for block in blocks for codes in block.codes.values())
    kl = text.kl_of(states(_through(blocks, text.begin())))
    return Trial(plan.label, nbytes, 8 * nbytes / text.weights, kl)


def _keys(settings: Any, name: str) -> dict[str, Any]:
    """What the settings' own overrides say of a layer."""
    mine = settings_of(settings, name)
    keys = [key for key in ("group_size", "symmetric", "clip") if hasattr(mine, key)]
    return {key: getattr(mine, key) for key in keys if getattr(mine, key) != getattr(settings, key)}
