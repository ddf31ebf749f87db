"""The job `peers`: the cells of a sweep, grouped into races over the same model, dtype and prompts, each run beside
transformers and llama.cpp on the same weights, threads and tokens."""

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from rich.console import Console

from ...attention.options import Native
from ...decoding.cost import TimedForward
from ...decoding.model.config import ModelConfig
from ...decoding.model.decoder import Decoder
from ...decoding.model.load import load_decoder
from ...decoding.model.source import Source, open_source
from ...errors import UserError
from ...quantization.none import AsStored
from .. import hardware, load
from ..compare_hf import Assist, HfPeer, Turn, why_not
from ..composition import draft_models, resolve
from ..config import RunConfig
from ..files import make_folder, unwritable, write_atomic
from ..format import BUSY, NOISY, counted, size
from ..identity import Identity, identify
from ..lab import Heard, build_lab
from ..memory import Held, Plan
from ..progress import Watch
from ..result import provenance
from ..run import assistant
from ..sweep.grid import Cell
from ..tasks import encode, encode_documents
from ..tracking import Untracked
from . import bars, llama, resident, table
from .findings import Race, findings
from .ours import Ours, contender, name_of
from .race import Contender, Forward, Kind, Prompt, race

RESULT, TURNS = "peers.json", "turns.jsonl"
SCHEMA = 1
_DEFAULT = "transformers assisted"  # as it comes

# llama.cpp's threads wait for each other between any two operations, PyTorch's around each
ASLEEP = (
    "OMP_WAIT_POLICY={policy}: threads that sleep whenever they wait made llama.cpp 3.4 and transformers 1.6 times as "
    "slow on 2 cores, so this is no race: unset it"
)


@dataclass(frozen=True)
class Entry:
    """A cell, known before any weight is loaded."""

    cell: Cell
    config: RunConfig
    what: Identity

    @property
    def race(self) -> tuple[object, ...]:
        """Cells of one race have it in common: the weights as stored, the dtype, the prompts."""
        assert self.what.task is not None
        return str(self.config.model), self.what.dtype, self.what.task.digest, self.config.task


@dataclass
class Loaded:
    """What one race leaves for the next over the same model: targets of ours by identity, and transformers' models."""

    of: object = None
    targets: dict[str, Decoder] = field(default_factory=dict)
    hf: tuple[object, HfPeer] | None = None

    def keep(self, of: object) -> None:
        if of != self.of:
            self.of, self.hf = of, None
            self.targets.clear()
            gc.collect()

    def target(self, entry: Entry, source: Source, watch: Watch) -> Decoder:
        if source.identity not in self.targets:
            dtype, device = entry.what.dtype, entry.what.device
            self.targets[source.identity] = load_decoder(
                source, dtype=dtype, device=device, kernels=entry.config.kernels.kernels, progress=watch.step
            )
        return self.targets[source.identity]


def peers(cells: Sequence[Cell], configs: Sequence[RunConfig], config_dirs: Sequence[Path] = ()) -> int:
    """1 if an output of ours is broken, 130 if interrupted, else 0."""
    _check(configs)
    first = configs[0]
    with hardware.torch_threads(first.threads), Watch() as watch:
        started = datetime.now(UTC)
        entries = [Entry(c, config, identify(config, watch.step)) for c, config in zip(cells, configs, strict=True)]
        races: dict[tuple[object, ...], list[Entry]] = {}
        models = list(dict.fromkeys(str(entry.config.model) for entry in entries))
        for entry in sorted(entries, key=lambda entry: models.index(str(entry.config.model))):
            races.setdefault(entry.race, []).append(entry)
        folder = _folder(first, started, [e.what.key for e in entries])
        console = Console(highlight=False, markup=False)
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "provenance": provenance(
                entries[0].what.dtype,
                first.seed,
                device=hardware.describe_device(entries[0].what.device),
                started_at=started.isoformat(timespec="seconds"),
            ),
            "cells": [{"label": e.cell.label, "config": e.what.resolved, "digests": e.what.digests} for e in entries],
            "races": [],
        }
        loaded = Loaded()
        for number, some in enumerate(races.values()):
            try:
                done = _race(some, loaded, folder, number, config_dirs, watch)
            except BaseException:
                with suppress(OSError):  # it is empty
                    folder.rmdir()
                raise
            found["races"].append(done)
            write_atomic(folder / RESULT, json.dumps(found, indent=1, default=str) + "\n")
            table.show(done, console)
            console.print()
            with (folder / table.FILE).open("a", encoding="utf-8") as lines:
                table.show(done, Console(file=lines, width=100, highlight=False, markup=False))
                lines.write("\n")
            if done["interrupted"]:
                break
    console.print(f"written to {folder}", soft_wrap=True)
    if found["races"][-1]["interrupted"]:
        told = counted(found["races"][-1]["prompts"], "prompt")
        left = len(races) - len(found["races"])
        rest = f", {counted(left, 'race')} not begun" if left else ""
        print(f"decodelab: interrupted after {told}{rest}; what was measured is in {folder}", file=sys.stderr)
        return 130
    outputs = [one["output"]["verdict"] for done in found["races"] for one in done["contenders"].values()]
    return 1 if "broken" in outputs else 0


def _check(configs: Sequence[RunConfig]) -> None:
    """What a race has no place for."""
    for config in configs:
        wrong = {
            "replay": config.replay is not None,
            "quality.tasks": bool(config.quality.tasks),
            "search": config.search is not None,
            f"batch={config.batch}": config.batch > 1,
            "pages": config.pages.size is not None,
            "attention": not isinstance(config.attention, Native),
            "tracking": not isinstance(config.tracking, Untracked),
            f"timing={config.timing}": config.timing != "paired",
        }
        for key, given in wrong.items():
            if given:
                raise UserError(f"peers times single prompts on the model's own attention, alone: leave {key} out")
        if why_not(config.acceptance.law()) is not None or config.acceptance.guarantee != "same tokens":
            raise UserError("peers compares greedy decoding alone: take acceptance=greedy, without penalties")
        for key in ("threads", "peers", "output", "device", "kernels"):
            if getattr(config, key) != getattr(configs[0], key):
                raise UserError(f"{key} is one for all cells of peers: take it out of the sweep")


def _folder(config: RunConfig, started: datetime, keys: Sequence[str]) -> Path:
    key = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:12]
    folder = Path(config.output or f"outputs/{started:%Y%m%d-%H%M%S}-peers-{key}").expanduser()
    if (folder / RESULT).exists():
        raise UserError(f"output={folder} already holds a result; name another folder or delete that one")
    try:
        make_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def _race(
    some: Sequence[Entry], loaded: Loaded, folder: Path, number: int, config_dirs: Sequence[Path], watch: Watch
) -> dict[str, Any]:
    """One race, from its models to what it came to."""
    first = some[0]
    job, what, limit = first.config.peers, first.what, first.config.task.max_new_tokens
    assert what.task is not None
    base = open_source(first.config.model, watch.step)
    loaded.keep(str(first.config.model))
    with Heard() as heard:
        notes = [note for e in some for note in resolve(e.config, base, e.what.task).notes()]
        if (policy := os.environ.get("OMP_WAIT_POLICY", "")).lower() == "passive":
            notes.append(ASLEEP.format(policy=policy))
        reason = _no_llama(first, base)
        if reason is not None:
            notes.append(f"llama.cpp was not measured: {reason}")
        targets = [e.what.target(watch.step) for e in some]
        prompts, told = _prompts(first, base)
        draft = assistant([spec for e in some for spec in draft_models(e.config.drafting)], base)
        _check_memory(some, targets, base, draft, None if reason else base.file, loaded)
        memory = _resident(some, targets, loaded, config_dirs, watch) if job.resident else {}
        notes += [f"resident memory of {name}: {why}" for name, why in memory.items() if isinstance(why, str)]
        resident_of = {name: one for name, one in memory.items() if isinstance(one, resident.Resident)}

        most = max(len(prompt.ids) for prompt in prompts) + limit
        context = sum(len(prompt.ids) for prompt in prompts) // len(prompts) + limit // 2
        up = LineUp(context, max(job.rows))
        up.ours(some, targets, loaded, watch)
        watch.step("transformers", 0, 1)
        up.theirs("transformers", _transformers(first, base, draft, loaded), limit, base.eos_ids)
        if reason is None:
            assert base.file is not None
            watch.step("llama.cpp", 0, 1)
            lookups = {f"llama.cpp lookup {n}": n for n in job.lookup}
            room = max(most, context + max(job.rows))
            peer = llama.LlamaPeer.build(base.file, torch.get_num_threads(), room, lookups)
            up.theirs("llama.cpp", peer, limit, base.eos_ids)
        up.warm_up(prompts, job.rows, watch)

        then = load.moment()
        with (folder / TURNS).open("a", encoding="utf-8") as lines:

            def after(turn: int, prompt: Prompt, one: Contender, done: Turn) -> None:
                row = {"race": number, "round": turn, "prompt": prompt.id, "contender": one.name, **asdict(done)}
                lines.write(json.dumps(row) + "\n")
                lines.flush()

            measured = race(
                up.contenders,
                up.forwards,
                prompts,
                rounds=job.rounds,
                rows=job.rows,
                bandwidth=lambda: hardware.read_bandwidth(what.device),
                progress=watch.step,
                after=after,
            )
        busy = load.others_since(then) or 0.0
    large = Held.of(base, what.dtype, what.device).bytes >= bars.LARGE
    lengths = {prompt.id: len(prompt.ids) for prompt in prompts}
    found = findings(Race(up.contenders, up.forwards, context, lengths, up.bytes_read, large), measured)
    found["bars"] += [bars.memory_bar(name, one).as_dict() for name, one in resident_of.items()]
    return {
        "model": base.label,
        "task": what.task.label,
        "dtype": what.resolved["dtype"],
        "device": hardware.describe_device(what.device),
        **found,
        "resident": {name: asdict(one) for name, one in resident_of.items()},
        "others_cores": busy,
        "implementation": {name: mine.lab.target.implementation for name, mine in up.mine.items()},
        "notes": list(dict.fromkeys([*notes, *told, *([NOISY] if busy > BUSY else []), *heard.texts])),
    }


@runtime_checkable
class Peer(Protocol):
    """`modes`: their settings by name, one of them `plain`. A mode that looks prompts up has `lookup` in its name."""

    @property
    def modes(self) -> Mapping[str, str]: ...
    def generate(
        self, mode: str, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
    ) -> Turn: ...
    def forward(self, context: int, most: int) -> Callable[[int], float]: ...


@dataclass
class LineUp:
    """Who races. Forwards are of up to `rows` rows behind `context` tokens."""

    context: int
    rows: int
    contenders: list[Contender] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    mine: dict[str, Ours] = field(default_factory=dict)
    bytes_read: dict[str, float] = field(default_factory=dict)

    def ours(self, some: Sequence[Entry], targets: Sequence[Source], loaded: Loaded, watch: Watch) -> None:
        known: dict[str, dict[str, list[int]]] = {}
        for entry, source, name in zip(some, targets, _names(some, targets), strict=True):
            decoder = loaded.target(entry, source, watch)
            lab = build_lab(source, decoder, entry.config.drafting, entry.config.acceptance, progress=watch.step)
            plain = known.setdefault(source.identity, {})
            self.mine[name] = Ours(lab, entry.config.task.max_new_tokens, entry.config.seed, plain)
            label = _target_name(entry, source)
            settings = entry.cell.label or "as configured"
            self.contenders.append(contender(name, entry.config, self.mine[name], label, settings))
            if label not in (forward.name for forward in self.forwards):
                seconds = TimedForward(decoder, context=self.context, most=self.rows)
                self.forwards.append(Forward(label, "ours", bool(source.codes), seconds))
            per_token = decoder.config.layout.bytes_per_token(decoder.dtype.itemsize)
            self.bytes_read[name] = float(decoder.weight_bytes + per_token * self.context)

    def theirs(
        self, whose: Literal["transformers", "llama.cpp"], peer: Peer, limit: int, eos_ids: Sequence[int]
    ) -> None:
        """transformers' greedy output should be ours; each one's speculation, its own greedy output."""
        oracle = next((one.name for one in self.contenders if (one.kind, one.low_bit) == ("plain", False)), None)
        low_bit = whose == "llama.cpp"
        for mode, settings in peer.modes.items():
            kind: Kind = "plain" if mode == "plain" else "lookup" if "lookup" in mode else "draft"
            same_as = whose if kind != "plain" else None if low_bit else oracle
            name = whose if kind == "plain" else mode
            run = _runs(peer, mode, limit, eos_ids)
            self.contenders.append(Contender(name, whose, kind, low_bit, whose, settings, run, same_as=same_as))
        self.forwards.append(Forward(whose, whose, low_bit, peer.forward(self.context, self.rows)))

    def warm_up(self, prompts: Sequence[Prompt], rows: Sequence[int], watch: Watch) -> None:
        """Everyone once, untimed, on the shortest prompt."""
        short = min(prompts, key=lambda prompt: len(prompt.ids))
        for i, one in enumerate(self.contenders):
            watch.step("warming up", i, len(self.contenders), one.name)
            one.run(short)
        for model in self.forwards:
            for k in rows:
                model.seconds(k)


def _runs(peer: Peer, mode: str, limit: int, eos_ids: Sequence[int]) -> Callable[[Prompt], Turn]:
    return lambda prompt: peer.generate(mode, prompt.ids, limit, eos_ids)


def _no_llama(entry: Entry, base: Source) -> str | None:
    """Why llama.cpp is not measured; if it was asked for, that is the user's error."""
    wanted = entry.config.peers.llama
    if wanted is False:
        return "peers.llama=false"
    reason = llama.absent(base.file)
    if reason is None and entry.what.device.type != "cpu":
        reason = f"it is measured on the CPU, and device={entry.what.device}"
    if wanted is True and reason is not None:
        raise UserError(f"peers.llama=true, but {reason}")
    return reason


def _names(some: Sequence[Entry], targets: Sequence[Source]) -> list[str]:
    """Short and different."""
    names: list[str] = []
    for entry, source in zip(some, targets, strict=True):
        name = name_of(entry.config, _quantised(entry, source))
        same = sum(known.partition(" #")[0] == name for known in names)
        names.append(f"{name} #{same + 1}" if same else name)
    return names


def _target_name(entry: Entry, source: Source) -> str:
    return f"ours {_quantised(entry, source) or entry.what.resolved['dtype']}"


def _quantised(entry: Entry, source: Source) -> str | None:
    """How the weights are quantised, in a word."""
    if not source.codes:
        return None
    made = entry.what.quantising
    if made is not None:
        return made.label.removeprefix(f"{made.source.label}-")
    return "quantised" if isinstance(entry.config.quantization, AsStored) else "gguf"


def _prompts(entry: Entry, source: Source) -> tuple[list[Prompt], list[str]]:
    """The first turn of each item, since later ones hang on answers; and what to say of that."""
    task = entry.what.task
    assert task is not None
    found = []
    for item in task.items:
        documents = tuple(tuple(ids) for ids in encode_documents(item, source.tokenizer))
        found.append(Prompt(item.id, tuple(encode(item, (), source.tokenizer, entry.config.task)), documents))
    context, limit = ModelConfig.from_hf(source.config).max_positions, entry.config.task.max_new_tokens
    for prompt in found:
        if len(prompt.ids) + limit > context:
            raise UserError(
                f"{prompt.id}: the prompt has {len(prompt.ids)} tokens, task.max_new_tokens={limit}, and the context "
                f"holds {context}; shorten one of them"
            )
    mean, rows = sum(len(prompt.ids) for prompt in found) // len(found) + limit // 2, max(entry.config.peers.rows)
    if mean + rows > context:
        raise UserError(f"peers.rows={rows} behind {mean} tokens, and the context holds {context}: take fewer rows")
    several = sum(item.turns > 1 for item in task.items)
    return found, [f"of {counted(several, 'conversation')} the first turn alone was asked"] if several else []


def _transformers(entry: Entry, base: Source, draft: Source | None, loaded: Loaded) -> HfPeer:
    """Models that are there already stay."""
    key = (base.identity, entry.what.dtype, None if draft is None else draft.identity)
    if loaded.hf is None or loaded.hf[0] != key:
        loaded.hf = None
        job = entry.config.peers
        ways = {f"transformers assisted {n}": Assist(n, 0.0) for n in job.assisted} | {_DEFAULT: Assist()}
        lookups = {f"transformers lookup {n}": n for n in job.lookup}
        loaded.hf = key, HfPeer.build(base, entry.what.dtype, entry.what.device, draft, ways, lookups)
    return loaded.hf[1]


def _resident(
    some: Sequence[Entry], targets: Sequence[Source], loaded: Loaded, config_dirs: Sequence[Path], watch: Watch
) -> dict[str, resident.Resident | str]:
    """Of each target that is not loaded here yet, one after the other; or why it is not known."""
    found: dict[str, resident.Resident | str] = {}
    for i, (entry, source) in enumerate(zip(some, targets, strict=True)):
        name = _target_name(entry, source)
        watch.step("resident memory", i, len(some), name)
        if name in found or source.identity in loaded.targets or entry.what.device.type != "cpu":
            continue
        found[name] = resident.measured(entry.cell.overrides, config_dirs, torch.get_num_threads())
    return found


def _check_memory(
    some: Sequence[Entry],
    targets: Sequence[Source],
    base: Source,
    draft: Source | None,
    file: Path | None,
    loaded: Loaded,
) -> None:
    """Everything is in memory at once."""
    dtype, device = some[0].what.dtype, some[0].what.device
    needed: dict[str, int] = {}
    for entry, source in zip(some, targets, strict=True):
        plan = Plan.of(source, entry.config.drafting, dtype, device, compares=False, held=False)
        held, *drafts = plan.models
        if source.identity not in loaded.targets:
            needed[f"{held.label} of ours"] = source.bytes if source.codes else held.bytes + held.packed
        for one in drafts:
            needed[f"{one.label} that drafts in {entry.cell.label}"] = one.bytes + one.packed
    if loaded.hf is None:
        theirs = [Held.of(one, dtype, device) for one in (base, draft) if one is not None]
        needed |= {f"transformers' {one.label}": one.bytes for one in theirs}
    if file is not None:
        needed["llama.cpp, twice"] = 2 * file.stat().st_size
    free = hardware.available_memory(device)
    if free is not None and sum(needed.values()) > free:
        listed = ", ".join(f"{name} {size(n)}" for name, n in needed.items())
        raise UserError(
            f"peers holds all models at once, and {size(sum(needed.values()))} ({listed}) are more than the "
            f"{size(free)} of memory that are free: race fewer cells, or set peers.llama=false"
        )
