"""quantization.overrides=auto: which layers are worth 8 bits, by what the whole model's output gains per byte.

The model is held in float32 for it, with its codes beside. Each kind of layer in each part of the model goes back to 8
bits by itself, and the output on text that was not calibrated on is held against that of the model as it is. Of all
choices within the budget the one is taken whose gains have the greatest sum. That gains add up is an approximation; so
the choice is measured once, as a whole, against uniform settings.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from math import ceil, floor, prod
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
from ..quantization.codes import Codes, Scheme
from ..quantization.formats import Format
from ..quantization.grid import Grid, round_to_nearest
from ..quantization.quantiser import Calibration, Quantiser, deciding, settings_of
from ..quantization.sequential import quantise
from .calibration import Pieces, draw
from .config import QuantizeJob
from .files import make_folder, write_atomic
from .lab import Progress
from .overlap import Marks, check_overlap
from .quantised_folder import FOUND
from .quantising import Quantising, layer_shapes, plan

BACK = 8  # bits of a layer that goes back
ROWS = 256  # whose logits are in memory at once
YAML, RECORD = FOUND


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
    form: Format
    trials: tuple[Trial, ...]

    def keep(self, folder: Path) -> None:
        """How the overrides were found, and they themselves, as a file that can be given back."""
        assert isinstance(self.settings.overrides, Mapping)
        make_folder(folder)
        write_atomic(folder / YAML, yaml.safe_dump(dict(self.settings.overrides), sort_keys=False))
        record = {name: [asdict(each) for each in getattr(self, name)] for name in ("units", "taken", "trials")}
        about = {"kl": self.kl, "digest": self.text.pieces.digest, "tokens": self.text.pieces.tokens}
        write_atomic(folder / RECORD, json.dumps(about | record, indent=1) + "\n")

    def verified(self, folder: Path) -> "Chosen":
        """With the folder's own KL among the trials, which are written again."""
        source = open_source(ModelSpec(path=str(folder)))
        nbytes = sum(_stored(self.form, codes) for codes in source.codes.values())
        trial = Trial("chosen", nbytes, 8 * nbytes / self.text.weights, self.text.kl(source.tensors()))
        done = replace(self, trials=(*self.trials, trial))
        done.keep(folder)
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
    gone = replace(base, overrides=_with(base, list(uniform.schemes)))
    back = {name: settings_of(gone, name).scheme(now.shape) for name, now in uniform.schemes.items()}
    nbytes, more = _prices(uniform.schemes, back, form)
    weights = sum(map(prod, layer_shapes(ModelConfig.from_hf(source.config)).values()))
    room = _budget(job, weights, nbytes, nbytes + sum(more.values()), base.bits, uniform.nbytes_beside) - nbytes
    text = HeldOut(source, held_out(uniform, job), progress)
    kl, units = _units(_quantised(uniform, progress), more, text, job.parts, progress)
    taken = best(units, room)
    trials = [Trial(uniform.label, nbytes, 8 * nbytes / weights, kl)]
    if base.bits + 1 < BACK:
        rival = plan(replace(base, bits=base.bits + 1), source, dtype, form)
        trials.append(_trial(rival, text, progress))
    chosen = [name for unit in taken for name in unit.layers]
    settings = replace(base, overrides=_with(base, chosen, list(uniform.layers)))
    return Chosen(settings, tuple(units), taken, kl, text, form, tuple(trials))


def best(units: Sequence[Unit], room: int) -> tuple[Unit, ...]:
    """Those whose gains have the greatest sum within `room` bytes, exactly: after each unit, of the choices so far stay
    those that no other with as few bytes betters."""
    kept: list[tuple[int, float, tuple[Unit, ...]]] = [(0, 0.0, ())]  # (bytes, gain, choice), both rising
    for unit in units:
        more = [(n + unit.more, gain + unit.recovered, (*choice, unit)) for n, gain, choice in kept]
        tried = sorted((each for each in [*kept, *more] if each[0] <= room), key=lambda each: (each[0], -each[1]))
        kept = []
        for each in tried:
            if not kept or each[1] > kept[-1][1]:
                kept.append(each)
    return kept[-1][2]


def _prices(now: Mapping[str, Scheme], back: Mapping[str, Scheme], form: Format) -> tuple[int, dict[str, int]]:
    """(bytes of all layers as they are, bytes more for each that goes back): of what is written, by shapes alone."""
    known = {scheme: _stored(form, _blank(scheme)) for scheme in {*now.values(), *back.values()}}
    return sum(known[scheme] for scheme in now.values()), {name: known[back[name]] - known[now[name]] for name in now}


def _blank(scheme: Scheme) -> Codes:
    """Codes of that scheme, of no weight in particular."""
    (N, K), size = scheme.shape, scheme.group_size
    part = torch.ones(N, -(-K // size), dtype=torch.float16)
    zero = torch.full_like(part, 2 ** (scheme.bits - 1) if scheme.symmetric else 1, dtype=torch.uint8)
    return Codes(
        torch.zeros(N, K, dtype=torch.uint8),
        part,
        scheme.bits,
        size,
        zero=None if scheme.shift else zero,
        shift=part if scheme.shift else None,
        groups=torch.arange(K).div(size, rounding_mode="floor").int() if scheme.grouped else None,
        activation_bits=scheme.activation_bits,
    )


def _stored(form: Format, codes: Codes) -> int:
    """Bytes of the tensors that are written of a layer."""
    return sum(tensor.nbytes for tensor in form.write("layer", codes).values())


def _budget(job: QuantizeJob, weights: int, least: int, most: int, bits: int, rest: int) -> int:
    """Of all layers, which take `least` bytes with none gone back, `most` with all; `rest`: of what is beside them."""
    assert not isinstance(job.budget, str)  # it was refused
    if job.budget is None:
        return least + weights // 8
    given = job.budget * weights / 8 if job.budget <= 32 else job.budget

    def all_in(width: int, nbytes: int, rounded: Callable[[float], int]) -> str:
        a_weight = rounded(8000 * nbytes / weights) / 1000  # so that it is a budget that can be given
        beside = f"beside {rest / 1e6:.1f} MB of the folder that are not of the budget"
        return f"the {a_weight:.3f} bits a weight, {nbytes} bytes, that all layers take in {width} bits, {beside}"

    if given < least:
        told = all_in(bits, least, ceil)
        raise UserError(f"quantize.budget={job.budget} is less than {told}: give more, or fewer bits")
    if given > most:
        told = all_in(BACK, most, floor)
        raise UserError(f"quantize.budget={job.budget} is more than {told}: give less, or all {BACK} bits")
    return int(given)


def held_out(plan: Quantising, job: QuantizeJob) -> Pieces:
    """Text that the calibration does not read; where it does, it is refused, or warned of, as its settings say."""
    own, context = plan.settings.calibration, ModelConfig.from_hf(plan.source.config).max_positions
    if job.path is not None or own is None:
        if job.path is None:
            raise UserError("quantization.overrides=auto compares outputs on a text: name it with quantize.path=FILE")
        length = min(512, context, job.tokens)
        settings = Calibration(path=job.path, tokens=job.tokens, length=length)
        pieces = draw(settings, plan.source.tokenizer, context, key="quantize")
        if own is not None and plan.pieces is not None:
            for told in check_overlap(Marks.of_pieces(plan.pieces), Marks.of_pieces(pieces), own.overlap):
                warnings.warn(told, RuntimeWarning, stacklevel=2)
        return pieces
    if job.tokens < own.length:
        raise UserError(
            f"quantize.tokens={job.tokens} is less than one piece of quantization.calibration.length={own.length}"
        )
    assert plan.pieces is not None
    return draw(replace(own, tokens=job.tokens), plan.source.tokenizer, context, without=plan.pieces.pieces)


def _quantised(plan: Quantising, progress: Progress) -> list[CalibratedBlock]:
    """All blocks, with what their quantised layers were as well: scales that a quantiser moves are moved in both."""
    model, tensors = ModelConfig.from_hf(plan.source.config), plan.source.tensors()
    pieces = () if plan.pieces is None else plan.pieces.pieces
    text = passages(pieces, tensors["model.embed_tokens.weight"].float())
    blocks = []
    for layer in range(model.layers):
        progress(f"quantising in {plan.label}", layer, model.layers)
        block = CalibratedBlock(model, layer, tensors, text)
        chosen = {name: plan.layers[name] for stage in block.stages for name in stage.names}
        for _ in quantise(block, chosen, plan.form.fit):
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
    blocks: Sequence[CalibratedBlock], more: Mapping[str, int], text: HeldOut, parts: int, progress: Progress
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
            for block in part:
                for name in set(layers) & set(block.codes):
                    grid = Grid(BACK, before[name].group_size, symmetric=False)
                    block.codes[name] = round_to_nearest(block.tensors[f"{name}.weight"], grid)
                    block.changed()
            now = text.kl_of(states(_through(blocks[at:], _copied(entered[i]))))
            for block in part:
                block.codes |= {name: old for name, old in before.items() if name in block.codes}
                block.changed()
            last = at + len(part) - 1
            units.append(Unit(f"{kind} of blocks {at}–{last}", layers, now, kl - now, sum(more[n] for n in layers)))
    progress("trying layers", len(starts) * len(kinds), len(starts) * len(kinds))
    return kl, sorted(units, key=lambda unit: -unit.recovered / unit.more)


def _copied(text: Sequence[Passage]) -> list[Passage]:
    return [Passage(passage.rows, passage.hidden) for passage in text]


def _trial(plan: Quantising, text: HeldOut, progress: Progress) -> Trial:
    blocks = _quantised(plan, progress)
    nbytes, _ = _prices(plan.schemes, plan.schemes, plan.form)
    kl = text.kl_of(states(_through(blocks, text.begin())))
    return Trial(plan.label, nbytes, 8 * nbytes / text.weights, kl)


def _with(settings: Any, names: Sequence[str], layers: Sequence[str] = ()) -> dict[str, Any]:
    """Overrides by which these layers have 8 bits, and else what the settings' own overrides say of them. `layers`: all
    that there are, of which a kind that is wholly among `names`, and told alike, is one pattern."""
    own = settings.overrides
    said = {name: {} if (pattern := deciding(own, name)) is None else own[pattern] for name in names}
    found = {name: {**keys, "bits": BACK} for name, keys in said.items()}
    for pattern in dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names):
        fits = [name for name in layers if fnmatchcase(name, pattern)]
        if fits and all(name in found and found[name] == found[fits[0]] for name in fits):
            found = {name: keys for name, keys in found.items() if name not in fits} | {pattern: found[fits[0]]}
    return {pattern: keys for pattern, keys in own.items() if pattern not in found} | found
