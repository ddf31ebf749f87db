"""The job `plan`: the arithmetic of `planning` for one configuration, as tables. It reads sizes, and no weights."""

import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..attention.layout import SCALE_BYTES, Layout
from ..attention.options import MHA, MQA, Attention, CrossLayer, Hybrid, LowBits, Native, Window
from ..attention.options import Table as AnyTable
from ..attention.picture import picture
from ..decoding.cost import ROWS, best_gamma, break_even_alpha, speedup
from ..decoding.model.fetch import NotHere
from ..decoding.model.source import ModelSpec, named, open_source
from ..errors import UserError
from ..quantization.none import AsStored
from ..quantization.quantiser import Quantiser
from ..quantization.rtn import RTN
from . import hardware as machine
from .architectures import architectures
from .compose import groups
from .composition import draft_specs, resolve_device, resolve_dtype
from .config import RunConfig
from .construct import did_you_mean
from .format import counted, number, seconds, size
from .planning import (
    GIGA,
    Architecture,
    Cost,
    Hardware,
    Peak,
    Room,
    Setup,
    active_parameters,
    drafting_cost,
    formula,
    parameters,
    per_million,
    profile,
    room,
    touched_parameters,
    touched_share,
)
from .table import columns

RECIPE = "5*(window=1024) 1*full | kv_heads=1 share=2 bits=8"
_PATTERN = 6  # layers of the recipe's pattern
_LAYOUTS: Mapping[str, Attention] = {
    "native": Native(),
    "mha": MHA(),
    "mqa": MQA(),
    "cross_layer, share=2": CrossLayer(2),
    "window, size=1024": Window(1024),
    "hybrid, 5 of 6 windows": Hybrid(1024),
    "kv_int8": LowBits(8),
    "kv_int4": LowBits(4),
    "mqa, hybrid, CLA, int8": AnyTable(RECIPE),
}
_LENGTHS = (1, 2, 4, 8, 16)  # of drafts
_ALPHA = 0.8  # at which a draft's gain is told
_BATCHES = (1, 8, 32, 128)
_NAME = 20  # columns that the name of a fact takes
_UNIT = re.compile(r"(?<=\d) (?=[KMG]i?B\b|B\b|%|ms\b|s\b|TFLOP|=)|(?<==) (?=\d)")  # blanks at which no line ends


def by_name(overrides: Sequence[str], options: Collection[str]) -> tuple[str, ...]:
    """`model=NAME` of a model that is known by its sizes, and is none of the `options` of the group, as its key. Of
    several, the last stands, as of any key."""
    named = [word for word in overrides if word.startswith("model=")]
    return tuple(_key(word, options) for word in overrides if word not in named[:-1] or word == named[-1])


def _key(word: str, options: Collection[str]) -> str:
    group, _, name = word.partition("=")
    if group != "model" or name in options:
        return word
    if name not in architectures():
        known = sorted({*options, *architectures()})
        near = did_you_mean(name, known)
        raise UserError(
            f"model={name} is unknown: {near}sizes are known of {', '.join(known)}; a folder or a config.json goes in "
            f"model.path={name}"
        )
    return f"model.name={name}"


def architecture_of(spec: ModelSpec) -> Architecture:
    """By its name, or from the config.json of a folder, a config.json alone, or a model that is here."""
    known = spec.name in architectures()
    if known and (spec.path is None or (spec.name in groups()["model"] and spec.path == named(str(spec.name)).path)):
        return Architecture.of(str(spec.name), architectures()[str(spec.name)])
    if spec.path is not None:
        path = Path(spec.path).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if file.suffix == ".json":
            return Architecture.of(path.stem if path.is_file() else path.resolve().name, _json(file))
    try:
        source = open_source(spec, fetch=False)
    except NotHere as absent:
        raise UserError(
            f"{absent} is not here, and its sizes are not known: give model.path=FOLDER, or a config.json, or a "
            f"name of {', '.join(architectures())}"
        ) from None
    return Architecture.of(source.label, source.config.to_dict())


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a config ({' '.join(str(error).split())}): give another") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is no config: it holds a {type(found).__name__}, and an object is needed")
    return found


@dataclass(frozen=True)
class _Planned:
    """What the tables are about."""

    config: RunConfig
    setup: Setup
    drafters: tuple[Setup, ...]
    peak: Peak
    about: str  # the hardware in words
    dtype: torch.dtype
    rows: int  # of a draft

    @property
    def batch(self) -> int:
        return self.config.batch

    @property
    def context(self) -> int:
        return self.config.context

    def with_layout(self, attention: Attention) -> Setup:
        a = self.setup.architecture
        return Setup(
            a, attention.layout(a.layout, a.heads), self.setup.itemsize, self.setup.quantiser, self.setup.devices
        )

    def room(self, setup: Setup, drafting: bool = True) -> Room:
        drafters, rows = (self.drafters, self.rows) if drafting else ((), 0)
        return room(setup, self.peak, self.config.plan, self.context, rows=rows, drafters=drafters)


def plan(config: RunConfig) -> int:
    """Print it."""
    found = _planned(config)
    console = Console(highlight=False, markup=False)
    for part in list(_told(found)):  # whatever is wrong is said before a line is printed
        if isinstance(part, Table):
            with console.capture() as drawn:
                console.print(part)
            lines = drawn.get().splitlines()
        elif isinstance(part, str):
            lines = _wrapped(part, console.width)
        else:
            lines = _beside(*part, console.width)
        print(*(line.rstrip() for line in lines), sep="\n")
    return 0


def _wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Lines that end with words; a number stays with its unit."""
    lines = textwrap.wrap(_UNIT.sub("\xa0", text), width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines] or [""]


def _beside(name: str, text: str, width: int) -> list[str]:
    """What a fact is called, and the fact."""
    lines = [line for told in text.splitlines() for line in _wrapped(told, max(width - _NAME, 20), "")]
    return [f"{name if i == 0 else '':{_NAME}}{line}" for i, line in enumerate(lines)]


def _planned(config: RunConfig) -> _Planned:
    if config.output is not None:
        raise UserError(f"output={config.output} is of jobs that write files, and plan prints: leave it out")
    if config.pages.size is not None:
        raise UserError(f"pages.size is of a run: plan counts pages of plan.page={config.pages.size} tokens")
    a = architecture_of(config.model)
    hardware = config.hardware
    on_paper = None not in (hardware.bandwidth, hardware.flops, hardware.memory)
    if on_paper and config.dtype == "auto":
        dtype = torch.bfloat16
    else:
        dtype, _ = resolve_dtype(config.dtype, resolve_device(config.device))
    quantiser = config.quantization
    if not isinstance(quantiser, AsStored) and not isinstance(quantiser.overrides, Mapping):
        raise UserError("quantization.overrides is a file or auto, and plan reads none: give them as keys")
    layout = config.attention.layout(a.layout, a.heads)
    setup = Setup(a, layout, dtype.itemsize, quantiser, hardware.devices)
    drafters = []
    for spec in draft_specs(config.drafting):
        draft = architecture_of(spec.model)
        itemsize = dtype.itemsize if spec.dtype is None else getattr(torch, spec.dtype).itemsize
        drafters.append(Setup(draft, draft.layout, itemsize))
    peak, about = _peak(hardware, config, dtype)
    return _Planned(config, setup, tuple(drafters), peak, about, dtype, config.drafting.gives.rows)


def _peak(given: Hardware, config: RunConfig, dtype: torch.dtype) -> tuple[Peak, str]:
    """One device, and what it is in words. What is null is measured, or read off this machine."""
    bandwidth, flops, memory = given.bandwidth, given.flops, given.memory
    where, each = "", "" if given.devices == 1 else f"each of {given.devices} devices: "
    if bandwidth is None or flops is None or memory is None:
        device = resolve_device(config.device)
        threads = config.threads or torch.get_num_threads()
        mine = [name for name in ("bandwidth", "flops", "memory") if getattr(given, name) is None]
        whose = f"; {' and '.join(mine)} {'is' if len(mine) == 1 else 'are'} this machine's"
        cores = f", {counted(threads, 'thread')}" if device.type == "cpu" else ""
        where = f"{', this machine' if len(mine) == 3 else whose} ({device}{cores})"
        if bandwidth is None or flops is None:
            peaks = machine.peaks(device, dtype, threads)
            bandwidth = peaks.read_bytes_per_s / GIGA if bandwidth is None else bandwidth
            flops = peaks.flops_per_s / 1e12 if flops is None else flops
        free = machine.available_memory(device)
        if memory is None and free is None:
            raise UserError("this system does not tell how much memory is free: give hardware.memory=GB")
        memory = (free or 0) / GIGA if memory is None else memory
    about = f"{each}{bandwidth:,.0f} GB/s, {flops:,.3g} TFLOP/s, {memory:,.1f} GB{where}"
    return Peak(bandwidth * GIGA, flops * 1e12, memory * GIGA), about


_Told = str | Table | tuple[str, str]  # a sentence, a table, or a fact and its name


def _told(p: _Planned) -> Iterator[_Told]:
    a, hw = p.setup.architecture, p.config.hardware
    name = str(p.dtype).removeprefix("torch.")
    yield f"{a.name}: {counted(p.batch, 'sequence')} of {p.context:,} tokens, computed in {name}"
    yield p.about
    yield ""
    yield from _facts(p)
    yield ""
    yield _times(p)
    yield f"usual: {_band(hw.mfu)} of the products' peak (MFU), {_band(hw.mbu)} of the bandwidth (MBU)"
    yield from _split(p)
    yield ""
    yield _layouts(p)
    yield "KiB: of a token; in pages, contiguous: of a sequence, and how many fit"
    yield "what a model was not trained with costs quality, which is to be measured"
    yield "a shared cache is held once, and read by each of its layers"
    if p.setup.devices > 1:
        yield "keys, values and headroom are of each device, weights stored of all together"
    yield ""
    yield _weights(p)
    if a.experts > 1:
        yield ""
        yield from _experts(p)
    if p.rows and p.room(p.setup).most:
        yield ""
        yield from _drafting(p)
    if hw.price_per_hour is not None and p.room(p.setup).most:
        yield ""
        yield from _price(p, hw.price_per_hour)
    for note in _notes(p):
        yield f"note: {note}"


def _facts(p: _Planned) -> Iterator[tuple[str, str]]:
    setup, a, job = p.setup, p.setup.architecture, p.config.plan
    layout, own, itemsize = setup.layout, setup.own, setup.itemsize
    yield "attention", picture(layout)
    windowed = ", in windowed layers only while inside the window" if _windowed(layout) else ""
    yield "KV a token", f"{formula(layout, itemsize)} ({layout.bytes_per_token(itemsize) / 1024:.1f} KiB){windowed}"
    scale = f"; + {SCALE_BYTES}: the float16 scale" if any(layer.bits < 16 for layer in layout.layers) else ""
    yield "", f"2 × layers with keys of their own × KV heads × head width × bytes{scale}"
    mha = MHA().layout(a.layout, a.heads)
    if mha.bytes_per_token(itemsize) != layout.bytes_per_token(itemsize):
        told = f"{mha.bytes_per_token(itemsize) / 1024:.1f} KiB: MHA, where each has a KV head of its own"
        yield "", f"the textbook's formula, with all {a.heads} attention heads in all {a.layers} layers, is {told}"
    one = layout.sequence_bytes(p.context, itemsize)
    paged = layout.bytes_per_token(itemsize) * p.context
    masked = f"; in pages, where windows are masks, {_gb(paged)}" if paged != one else ""
    yield "KV a sequence", f"{_gb(one)}{masked}"
    yield f"KV of {p.batch}", f"{_gb(p.batch * one)} ({size(p.batch * one)})"
    if setup.devices > 1:
        held = own.sequence_bytes(p.context, itemsize)
        most = max(layer.kv_heads for layer in own.layers)
        yield "  on each device", f"{_gb(p.batch * held)}: max(1, KV heads ÷ {setup.devices}) = {most} a layer"
    stored = f", {getattr(setup.quantiser, 'kind', 'as computed')}"
    yield "weights stored", f"{_gb(setup.weight_bytes)} ({_billions(parameters(a))} parameters{stored})"
    found = p.room(setup)
    each = "" if setup.devices == 1 else " on each device"
    kept = f"{_gb(found.memory)} less {_gb(found.reserve)} in reserve (activations, graphs, allocator)"
    drafts = f", {_gb(found.drafter)} of draft models" if found.drafter else ""
    yield "headroom", f"{_gb(found.headroom)}{each}: {kept}, {_gb(found.weights)} of weights{drafts}"
    if found.headroom <= 0:
        yield "sequences that fit", f"none: {_too_heavy(found)}{each}"
        return
    draft = f", and {_mb(found.draft)} for {p.rows} draft rows" if p.rows else ""
    draft += f", {_mb(found.drafter_kv)} for its drafter's keys and values" if p.drafters else ""
    pages = f"{_mb(found.sequence)} a sequence{each} in pages of {job.page}{draft}"
    yield "sequences that fit", f"{_of_batch(found.concurrency, p.batch)}: {pages}"
    plain = p.room(setup, drafting=False).concurrency
    if plain != found.concurrency:
        yield "", f"{plain:,} without drafting"
    unused = 1 - own.sequence_bytes(p.context, itemsize) / found.contiguous
    rest = 1 - own.bytes_per_token(itemsize) * p.context / found.sequence
    length = job.max_length or a.max_positions
    slots = " or ".join(f"{n:,}" for n in sorted({layer.held(length) for layer in own.layers}))
    yield (
        "contiguous",
        f"{_of_batch(found.contiguous_concurrency, p.batch)}: {slots} slots reserved for each, {_percent(unused)} of "
        f"them unused (in pages: {_percent(rest)})",
    )


def _of_batch(fit: int, batch: int) -> str:
    return f"{fit:,}" if fit >= batch else f"{fit:,}, so that batch={batch} does not fit"


def _times(p: _Planned) -> Table:
    table = columns("", "roofline", "usual", "bound by", "MFU", "MBU")
    for name, cost in (
        (f"ttft of {p.context:,}", p.setup.prefill(p.context)),
        (f"tpot, batch {p.batch}", p.setup.step(p.batch, 1, p.context)),
    ):
        ideal = cost.seconds(p.peak)
        mfu, mbu = cost.flops / ideal / p.peak.flops, cost.bytes / ideal / p.peak.bandwidth
        row = (seconds(ideal), _usual(cost, p), cost.bound(p.peak), _percent(mfu), _percent(mbu))
        table.add_row(name, *row)
    return table


def _split(p: _Planned) -> Iterator[str]:
    for name, cost in (
        ("prefill", p.setup.prefill(p.context)),
        ("a decoded step", p.setup.step(p.batch, 1, p.context)),
    ):
        spent = sorted(cost.split.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{what} {_percent(flops / cost.flops)}" for what, flops in spent)
        read = f"reads {_gb(cost.weight_bytes)} of weights and {_gb(cost.kv_bytes)} of KV"
        yield f"{name}: {cost.flops / 1e12:.3g} TFLOP ({listed}), {read}"


def _layouts(p: _Planned) -> Table:
    table = columns("layout", "KiB", "in pages", "fit", "contiguous", "fit", "tpot")
    shown = dict(_LAYOUTS)
    if p.setup.architecture.layers < _PATTERN:
        shown.popitem()
    if (asked := p.config.attention) not in shown.values():
        shown["asked for"] = asked
    for name, attention in shown.items():
        setup = p.with_layout(attention)
        found = p.room(setup)
        mark = " *" if attention == p.config.attention else ""
        table.add_row(
            name + mark,
            f"{setup.own.bytes_per_token(setup.itemsize) / 1024:,.1f}",
            _mb(found.sequence),
            f"{found.concurrency:,}",
            _mb(found.contiguous),
            f"{found.contiguous_concurrency:,}",
            seconds(setup.step(p.batch, 1, p.context).seconds(p.peak)),
        )
    return table


def _weights(p: _Planned) -> Table:
    table = columns("weights", "stored", "headroom", "fit in pages", "tpot")
    name = str(p.dtype).removeprefix("torch.")
    shown: dict[str, Quantiser | AsStored] = {name: AsStored()}
    shown |= {f"{bits} bits, groups of 64": RTN(bits=bits) for bits in (8, 4)}
    if (asked := p.config.quantization) not in shown.values():
        shown[f"asked for, {getattr(asked, 'kind', '')}"] = asked
    for label, quantiser in shown.items():
        setup = Setup(p.setup.architecture, p.setup.layout, p.setup.itemsize, quantiser, p.setup.devices)
        found = p.room(setup)
        table.add_row(
            label + (" *" if quantiser == asked else ""),
            _gb(setup.weight_bytes),
            _gb(found.headroom),
            f"{found.concurrency:,}",
            seconds(setup.step(p.batch, 1, p.context).seconds(p.peak)),
        )
    return table


def _experts(p: _Planned) -> Iterator[str | Table]:
    a = p.setup.architecture
    active = active_parameters(a)
    of = f"{_billions(active)} of {_billions(parameters(a))} parameters"
    yield f"a row goes through {a.active} of {a.experts} experts a layer: {of} are active"
    table = columns("rows a forward", "experts touched", "parameters touched", "of all")
    for rows in sorted({*_BATCHES, p.batch}):
        touched = touched_parameters(a, rows)
        share = touched_share(a.experts, a.active, rows)
        table.add_row(f"{rows}", f"{share * a.experts:.1f}", _billions(touched), _percent(touched / parameters(a)))
    yield table
    yield "if rows choose experts alike and on their own; real routers touch fewer"


def _drafting(p: _Planned) -> Iterator[str | Table]:
    gives = p.config.drafting.gives
    lengths = [n for n in _LENGTHS if n < gives.depth] + [gives.depth]
    rows = sorted({*ROWS, *(n + 1 for n in lengths)})
    times = profile(p.setup, p.peak, p.batch, p.context, rows)
    cost = drafting_cost(p.drafters, p.peak, p.batch, p.context)
    table = columns("T(k), rows a sequence", *map(str, ROWS))
    table.add_row("seconds", *(seconds(times.at(k)) for k in ROWS))
    table.add_row("of T(1)", *(f"{times.ratio(k):.2f}" for k in ROWS))
    yield table
    yield ""
    table = columns("a chain of", "a step costs", "pays from α", f"at α = {_ALPHA}")
    for n in lengths:
        least = break_even_alpha(n, times, cost)
        table.add_row(
            f"{n}",
            f"{(times.at(1 + n) + cost.at(n)) / times.at(1):.2f}×",
            "never" if least is None else number(least),
            f"{speedup(_ALPHA, n, times, cost):.2f}×",
        )
    yield table
    best = best_gamma(_ALPHA, times, cost, most=gives.depth)
    drafts = (
        f"a drafted token takes {seconds(cost.token_s)}" if p.drafters else "what drafting itself takes is not counted"
    )
    yield f"best length at α = {_ALPHA}: {best or 'none, do not draft'}; {drafts}"


def _price(p: _Planned, price: int | float) -> Iterator[str | Table]:
    hw = p.config.hardware
    hour = price * hw.devices
    table = columns("a million tokens", "roofline", "usual")
    batch = min(p.batch, p.room(p.setup).most)
    for name, cost, tokens in (
        ("of a prompt", p.setup.prefill(p.context), p.context),
        (f"decoded, batch {batch}", p.setup.step(batch, 1, p.context), batch),
    ):
        ideal = per_million(hour, tokens / cost.seconds(p.peak))
        low, high = (
            per_million(hour, tokens / cost.seconds(p.peak, mfu, mbu))
            for mfu, mbu in ((hw.mfu[1], hw.mbu[1]), (hw.mfu[0], hw.mbu[0]))
        )
        table.add_row(name, f"{ideal:.3g}", f"{low:.3g} – {high:.3g}")
    yield table
    yield f"in the unit of hardware.price_per_hour, at {hour:g} an hour, while nothing waits"


def _notes(p: _Planned) -> Iterator[str]:
    config, needs = p.config, p.config.drafting.needs
    found = p.room(p.setup)
    if found.most < p.batch:
        why = f"{found.most:,} do" if found.headroom > 0 else _too_heavy(found)
        yield f"batch={p.batch} does not fit: {why}; times are those of {p.batch} all the same"
    if _windowed(p.setup.layout):
        yield (
            "a windowed layer keeps window + sinks tokens where slots are reserved, and times are of those; in pages, "
            "where windows are masks, it keeps all"
        )
    if p.context > p.setup.architecture.max_positions:
        yield f"the model's own context ends at {p.setup.architecture.max_positions:,} tokens"
    if needs.prefill_hidden or needs.taps:
        yield "weights, keys and values of a trained drafter are in its file, and not counted"
    if config.hardware.flops is not None and p.dtype.itemsize > 2:
        yield f"hardware.flops={config.hardware.flops:g} is taken for this dtype too, and presets are of 16 bits"
    if config.hardware.devices > 1:
        yield "what devices tell each other is not counted"


def _windowed(layout: Layout) -> bool:
    return any(layer.window is not None for layer in layout.layers)


def _too_heavy(found: Room) -> str:
    weights, left = _gb(found.weights + found.drafter), _gb(found.memory - found.reserve)
    return f"the weights alone take {weights}, and {left} are there for them"


def _usual(cost: Cost, p: _Planned) -> str:
    hw = p.config.hardware
    fast, slow = cost.seconds(p.peak, hw.mfu[1], hw.mbu[1]), cost.seconds(p.peak, hw.mfu[0], hw.mbu[0])
    return f"{seconds(fast)} – {seconds(slow)}"


def _band(band: tuple[float, float]) -> str:
    return f"{100 * band[0]:.0f}–{100 * band[1]:.0f} %"


def _gb(value: int | float) -> str:
    return f"{value / GIGA:,.1f} GB" if abs(value) >= 0.95 * GIGA else _mb(value)


def _mb(value: int | float) -> str:
    return f"{value / 1e6:,.1f} MB" if abs(value) < GIGA else f"{value / GIGA:,.2f} GB"


def _billions(value: int | float) -> str:
    return f"{value / GIGA:,.2f} B" if value >= 1e9 else f"{value / 1e6:,.1f} M"


def _percent(share: int | float) -> str:
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.1 else f"{100 * share:.2g} %"
