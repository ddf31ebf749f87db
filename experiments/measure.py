"""Strategy against baseline: the same prompts, one process, in alternating order, and every output compared.

Outputs are compared with the plain decoder's, the oracle, whichever plain decoding is faster and so the baseline.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from ..cache_dir import cache_dir
from ..decoding.events import Generation, finish
from ..decoding.model.storage import explained
from ..decoding.request import Request
from ..errors import UserError
from . import exactness, metrics
from .compare_hf import HfPeer
from .exactness import Divergence
from .hardware import describe_device
from .items import Item
from .lab import Baseline, Lab
from .tasks import Task, TaskSettings, encode, encode_documents

WARM_TOKENS = 24
LEAST_ANCHORS, ANCHOR_SHARE = 3, 0.1  # batches of prompts whose baseline an anchored cell times again
DRIFT, RENEWED = 0.02, 0.1  # of the baseline since it was timed: what is told, and what makes it be timed anew


@dataclass(slots=True)
class Sample:
    """One prompt: a turn of an item. `unit`: the batch that it ran in; `plain`: the plain decoder's tokens; `hf`:
    transformers' runs by mode."""

    id: str
    category: str
    unit: int
    request: Request
    baseline: Generation
    strategy: Generation
    plain: list[int]
    divergence: Divergence | None = None
    hf: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt


@dataclass(frozen=True, slots=True)
class Timing:
    """How the baseline was timed. `baseline`: here, beside the strategy; stored, by an earlier cell of this worker;
    anew, by this cell behind the strategy, because the stored one had drifted; None: not at all. `anchors`: batches of
    prompts whose stored baseline was timed again; `drift`: their decode seconds now ÷ then."""

    mode: str = "paired"
    baseline: Literal["here", "stored", "anew"] | None = "here"
    anchors: int | None = None
    drift: float | None = None


@dataclass(slots=True)
class Measurement:
    """What was run. `timed`: both sides were; `interrupted`: by Ctrl-C, so that samples are missing."""

    timed: bool
    samples: list[Sample] = field(default_factory=list)
    baseline_kind: str = "plain decoder"
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)
    timing: Timing = Timing()


class Sides:
    """Both sides of the comparison. Neither may be timed before it has been warmed up."""

    def __init__(self, lab: Lab, seed: int, kind: str | None = None) -> None:
        """`kind`: which plain decoding is the baseline, where an earlier cell has found that out."""
        self._lab, self._seed = lab, seed
        self._warm = False
        plain: dict[str, Callable[..., Iterator[list[Generation]]]] = {
            "drafting=none": lab.undrafted,
            "plain decoder": partial(lab.plain, paged=True),
        }
        self._plain = plain if kind is None else {kind: plain[kind]}
        self.baseline_kind = next(iter(self._plain))

    def warm_up(self, requests: Sequence[Request], progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Each side twice; the plain decoding whose better run was the faster becomes the baseline. What was drafted or
        is left in pages must not be known already when it is timed, so all of it is forgotten. `progress(done, of)`
        counts what was decoded."""
        short = [_shortened(r, WARM_TOKENS) for r in requests]
        seconds: dict[str, float] = {}
        runs = [*self._plain.items(), (None, self._lab.strategy)] * 2
        for i, (kind, run) in enumerate(runs):
            progress(i, len(runs))
            done = finish(run(short, self._seed))
            if kind is not None:
                spent = max(g.latency_s for g in done) - max(g.ttft_s for g in done)
                seconds[kind] = min(spent, seconds.get(kind, spent))
        self.baseline_kind = min(seconds, key=lambda kind: seconds[kind])
        for kind in self._plain.keys() - {self.baseline_kind}:
            self._lab.pools.pop(kind, None)
        self._lab.forget()
        self._warm = True

    def baseline(self, requests: Sequence[Request]) -> list[Generation]:
        assert self._warm, "timed before its warm-up"
        return finish(self._plain[self.baseline_kind](requests, self._seed))

    def strategy(self, requests: Sequence[Request]) -> list[Generation]:
        assert self._warm, "timed before its warm-up"
        return finish(self._lab.strategy(requests, self._seed))


def _shortened(r: Request, tokens: int) -> Request:
    return replace(r, stop=replace(r.stop, max_new_tokens=min(tokens, r.stop.max_new_tokens)))


class Anchored:
    """A baseline that an earlier cell timed. A few of its units, spread over the task, are timed again."""

    def __init__(self, stored: Baseline) -> None:
        n = len(stored.units)
        count = min(n, max(LEAST_ANCHORS, round(ANCHOR_SHARE * n)))
        self.stored = stored
        self.anchors = [(2 * i + 1) * n // (2 * count) for i in range(count)]
        self.renewed = False
        self._again: dict[int, list[Generation]] = {}

    @property
    def drift(self) -> float | None:
        """Decode seconds of the anchors now ÷ then, a ratio of sums; None before any, and where nothing was decoded."""
        now = sum(map(metrics.decode_seconds, self._again.values()))
        return metrics.ratio(now, sum(metrics.decode_seconds(self.stored.units[unit]) for unit in self._again))

    def drifted_by(self, bound: float) -> bool:
        return self.drift is not None and abs(self.drift - 1) > bound

    def both(self, sides: Sides, requests: list[Request], unit: int) -> tuple[list[Generation], list[Generation]]:
        """The stored baseline and the strategy; at an anchor the baseline runs as well, in turn with it."""
        if unit not in self.anchors:
            return self.stored.units[unit], sides.strategy(requests)
        self._again[unit], strategy = _both(sides, requests, self.anchors.index(unit))
        return self.stored.units[unit], strategy

    def renew(self, sides: Sides, samples: Sequence[Sample]) -> None:
        """The whole baseline anew, behind the strategy; the anchors were timed beside it."""
        now = [self._again.get(i) or sides.baseline([s.request for s in unit]) for i, unit in enumerate(units(samples))]
        for sample, again in zip(samples, chain.from_iterable(now), strict=True):
            sample.baseline = again
        self.renewed = True

    @property
    def timing(self) -> Timing:
        return Timing("anchored", "anew" if self.renewed else "stored", len(self._again), self.drift)

    def warnings(self) -> list[str]:
        if self.drift is None or not self.drifted_by(DRIFT):
            return []
        moved = f"the baseline of {len(self._again)} anchors takes {100 * self.drift:.1f} % of the time"
        moved += " that it took when this worker timed it"
        if self.renewed:
            return [f"{moved}: it was timed anew, behind the strategy"]
        return [f"{moved}: speedups read too {'low' if self.drift > 1 else 'high'} by about as much"]


def measure(
    lab: Lab,
    task: Task,
    settings: TaskSettings,
    *,
    seed: int,
    batch: int,
    timing: str,
    hf: HfPeer | None = None,
    baselines: MutableMapping[str, Baseline] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    after: Callable[[Sequence[Sample]], None] | None = None,
) -> Measurement:
    """Run every prompt on both sides. Ctrl-C keeps the prompts that are finished (`interrupted`).

    `timing=anchored` takes the baseline from `baselines` if it is there, and puts it there if not. `after` is called
    with the prompts of each batch, once both sides have run.
    """
    first = [
        request_of(lab, item, (), settings) for item in task.items
    ]  # what is wrong with one is said before any runs
    total = sum(item.turns for item in task.items)
    plain = Plain.open(lab, seed, batch)
    kept = baselines if baselines is not None and timing == "anchored" else {}
    mine = [lab.acceptance, lab.pages, lab.shares, torch.get_num_threads(), task.digest, settings]
    key = _digest([*_circumstances(lab, seed, batch), *mine])
    anchored = Anchored(kept[key]) if key in kept else None
    sides = Sides(lab, seed, anchored.stored.kind if anchored else None)
    out = Measurement(timed=timing != "untimed", timing=Timing(timing, "here" if timing != "untimed" else None))
    try:
        for unit, (names, items, requests) in enumerate(_units(lab, task, settings, batch, first, out)):
            if unit == 0 and out.timed:
                if progress is None:
                    sides.warm_up(requests)
                else:
                    sides.warm_up(requests, lambda i, of: progress(0, total, f"warming up {i}/{of}"))
                out.baseline_kind = sides.baseline_kind
            if out.timed:
                baseline, strategy = (anchored.both if anchored else _both)(sides, requests, unit)
                known = out.baseline_kind == "plain decoder" and not lab.shares
                expected = baseline if known else plain.get(lab, requests, seed)
            else:
                baseline = expected = plain.get(lab, requests, seed)
                strategy = finish(lab.strategy(requests, seed))
                for g in (*baseline, *strategy):
                    g.delivered.clear()  # nothing was timed against anything
            samples = [
                Sample(name, item.category, unit, r, b, s, e.tokens)
                for name, item, r, b, s, e in zip(names, items, requests, baseline, strategy, expected, strict=True)
            ]
            for i, sample in enumerate(samples):
                sample.divergence = _divergence(lab, sample, requests, i, seed)
                if sample.baseline.tokens != sample.plain:
                    out.warnings.append(f"{sample.id}: {_unlike(lab, sample, requests, i, seed, out.baseline_kind)}")
            if hf is not None:
                ask_hf(hf, samples, unit, lab.eos_ids)
            out.samples += samples
            if progress is not None:
                progress(len(out.samples), total, _running(out))
            if after is not None:
                after(samples)
        if anchored is not None and anchored.drifted_by(RENEWED):
            anchored.renew(sides, out.samples)
        if anchored is None or anchored.renewed:
            kept[key] = Baseline(out.baseline_kind, tuple([s.baseline for s in unit] for unit in units(out.samples)))
    except KeyboardInterrupt:
        if not out.samples:
            raise
        out.interrupted = True
    if anchored is not None:
        out.timing = anchored.timing
        out.warnings += anchored.warnings()
    return out


def request_of(lab: Lab, item: Item, answers: Sequence[str], settings: TaskSettings) -> Request:
    """Turn number `len(answers)` of an item."""
    prompt = encode(item, answers, lab.tokenizer, settings)
    try:
        return lab.request(prompt, settings.max_new_tokens, documents=encode_documents(item, lab.tokenizer))
    except UserError as error:
        raise UserError(f"{item.id}: {error}") from error


def _units(
    lab: Lab, task: Task, settings: TaskSettings, batch: int, first: Sequence[Request], out: Measurement
) -> Iterator[tuple[list[str], list[Item], list[Request]]]:
    """Batches of prompts: the first turn of `batch` items, then their second ones, after plain decoding's answers.

    Turns that no longer fit the context are left out with a warning: nobody knows beforehand how long answers get.
    """
    for at in range(0, len(task.items), batch):
        live = list(zip(task.items, first, strict=True))[at : at + batch]
        answers: dict[str, list[str]] = {item.id: [] for item, _ in live}
        turn = 1
        while live:
            items, requests = [item for item, _ in live], [request for _, request in live]
            yield [item.id if item.turns == 1 else f"{item.id}/turn{turn}" for item in items], items, requests
            for item, sample in zip(items, out.samples[-len(items) :], strict=True):
                answers[item.id].append(lab.text(sample.plain))
            live = []
            for item in items:
                if turn < item.turns:
                    try:
                        live.append((item, request_of(lab, item, answers[item.id], settings)))
                    except UserError as error:
                        out.warnings.append(f"turns from {turn + 1} on are left out: {error}")
            turn += 1


def _both(sides: Sides, requests: list[Request], unit: int) -> tuple[list[Generation], list[Generation]]:
    """Which side goes first alternates from unit to unit, so that drift and caches favour neither."""
    if unit % 2:
        strategy = sides.strategy(requests)
        return sides.baseline(requests), strategy
    baseline = sides.baseline(requests)
    return baseline, sides.strategy(requests)


def units(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples by the batch they ran in."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.unit, []).append(sample)
    return list(found.values())


def _divergence(lab: Lab, sample: Sample, requests: Sequence[Request], index: int, seed: int) -> Divergence | None:
    """Where the strategy leaves plain decoding."""
    seen_at = scores_of(lab, requests, index, seed)
    return exactness.divergence(sample.id, sample.plain, sample.strategy.tokens, seen_at)


def _unlike(lab: Lab, sample: Sample, requests: Sequence[Request], index: int, seed: int, kind: str) -> str:
    """What the baseline is said to be that emits other tokens than the plain decoder, which shares nothing."""
    if not lab.shares:
        return f"{kind} does not emit what the plain decoder emits"
    seen_at = scores_of(lab, requests, index, seed)
    found = exactness.divergence(sample.id, sample.plain, sample.baseline.tokens, seen_at)
    tie = found is not None and exactness.is_near_tie(found, lab.target.dtype)
    how = "at a tie: rows behind a shared prefix are computed in other products, which round otherwise"
    return f"{kind} on shared pages differs from contiguous plain decoding{f' {how}' if tie else ''}"


def scores_of(
    lab: Lab, requests: Sequence[Request], index: int, seed: int
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor] | None]:
    """What plain decoding of request `index` maximises at a position, and raw logits: it runs again to read them."""

    def seen_at(at: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def watch(request: int, position: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
            if request == index and position == at:
                seen.append((scores.clone(), logits.clone()))

        for _ in lab.plain(requests, seed, watch=watch):
            if seen:
                return seen[0]
        return None

    return seen_at


def ask_hf(hf: HfPeer, samples: Sequence[Sample], unit: int, eos_ids: Sequence[int]) -> None:
    """transformers on the prompts of one batch, its modes in another order at each `unit`."""
    modes = list(hf.modes)
    for sample in samples:
        for mode in modes[unit % len(modes) :] + modes[: unit % len(modes)]:
            sample.hf[mode] = hf.generate(mode, sample.prompt, sample.request.stop.limit, eos_ids)


def _running(out: Measurement) -> str:
    """What the progress line says so far."""
    same = sum(s.divergence is None for s in out.samples)
    text = f"{same}/{len(out.samples)} identical"
    if out.timed:
        each = units(out.samples)
        base = sum(metrics.decode_seconds([s.baseline for s in unit]) for unit in each)
        ours = sum(metrics.decode_seconds([s.strategy for s in unit]) for unit in each)
        if ours:
            text = f"speedup {base / ours:.2f}x, {text}"
    return text


class Plain:
    """The plain decoder's tokens, kept on disk: a sweep over drafters decodes a prompt plainly once.

    The name of the file holds everything that the tokens depend on but the prompt.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens: dict[str, tuple[list[int], str]] = {}
        lines: list[str] = []
        with suppress(OSError, UnicodeDecodeError):  # no file yet, or not one of ours
            lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            # a line cut short by a kill or a full disk, or not one of ours: its prompt is decoded again
            with suppress(json.JSONDecodeError, TypeError, KeyError, ValueError):
                row = json.loads(line)
                self._tokens[row["key"]] = ([int(token) for token in row["tokens"]], str(row["reason"]))

    @staticmethod
    def open(lab: Lab, seed: int, batch: int) -> "Plain":
        return Plain(cache_dir() / "baselines" / f"{_digest(_circumstances(lab, seed, batch))[:24]}.jsonl")

    def get(self, lab: Lab, requests: list[Request], seed: int) -> list[Generation]:
        keys = [_prompt_key(r, requests) for r in requests]
        if all(key in self._tokens for key in keys):
            out = []
            for i, (r, key) in enumerate(zip(requests, keys, strict=True)):
                tokens, reason = self._tokens[key]
                out.append(Generation(i, len(r.prompt), list(tokens), reason=reason))  # type: ignore[arg-type]
            return out
        done = finish(lab.plain(requests, seed))
        self._tokens |= {key: (g.tokens, str(g.reason)) for key, g in zip(keys, done, strict=True)}
        rows = [{"key": key, "tokens": g.tokens, "reason": g.reason} for key, g in zip(keys, done, strict=True)]
        with suppress(UserError), explained(self._path):  # where it cannot be kept, the next run is only slower
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
        return done


def _circumstances(lab: Lab, seed: int, batch: int) -> list[Any]:
    """What plain decoding's tokens depend on, all but the prompts."""
    law, target = lab.acceptance.law(), lab.target
    parts = [lab.source.identity, target.config, target.dtype, target.implementation, describe_device(target.device)]
    return [*parts, torch.__version__, law, seed if law.sample else None, batch, lab.eos_ids, _code_digest()]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _prompt_key(r: Request, batch: Sequence[Request]) -> str:
    """Batch mates are part of it: in half precision they may move a near-tie."""
    return _digest([r.prompt, r.stop.limit, r.stop.stop, [m.prompt for m in batch if m is not r]])


def _code_digest() -> str:
    """The decoder's own code: tokens of another version are not reused."""
    root = Path(__file__).parents[1]
    files = sorted(f for folder in ("decoding", "attention", "kernels") for f in (root / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
