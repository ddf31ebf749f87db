"""Strategy against baseline: the same prompts, one process, in alternating order, and every output compared."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..decoding.errors import UserError
from ..decoding.events import Generation, finish
from ..decoding.model.storage import cache_dir
from ..decoding.request import Request
from . import exactness
from .compare_hf import HfPeer
from .exactness import Divergence
from .items import Item
from .lab import Lab
from .tasks import Task, TaskSettings, encode, encode_documents

WARM_TOKENS = 16


@dataclass(slots=True)
class Sample:
    """One prompt: a turn of an item. `unit` is the batch that it ran in; `hf`: transformers' runs by mode."""

    id: str
    category: str
    unit: int
    prompt: list[int]
    request: Request
    baseline: Generation | None = None
    strategy: Generation | None = None
    divergence: Divergence | None = None
    top_logit: float = 0.0
    hf: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.id


@dataclass(slots=True)
class Measurement:
    samples: list[Sample]
    baseline_kind: str
    timed: bool
    interrupted: bool = False
    kv_bytes: int = 0
    kv_bytes_formula: int = 0


class Sides:
    """Both sides of the comparison. Neither may be timed before it has been warmed up."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab, self._seed = lab, seed
        self._warm = False
        self.baseline_kind = "drafting=none"

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Each side twice; the faster plain decoding becomes the baseline, as its last run went."""
        short = [_shortened(r, WARM_TOKENS) for r in requests]
        seconds = {}
        for _ in range(2):
            for kind, run in (("drafting=none", self._lab.undrafted), ("plain decoder", self._lab.plain)):
                done = finish(run(short, self._seed))
                seconds[kind] = max(g.latency_s for g in done) - max(g.ttft_s for g in done)
            finish(self._lab.strategy(short, self._seed))
        self.baseline_kind = min(seconds, key=lambda kind: seconds[kind])
        self._warm = True

    def baseline(self, requests: Sequence[Request]) -> list[Generation]:
        assert self._warm, "timed before its warm-up"
        run = self._lab.plain if self.baseline_kind == "plain decoder" else self._lab.undrafted
        return finish(run(requests, self._seed))

    def strategy(self, requests: Sequence[Request]) -> list[Generation]:
        assert self._warm, "timed before its warm-up"
        return finish(self._lab.strategy(requests, self._seed))


def _shortened(r: Request, tokens: int) -> Request:
    from dataclasses import replace

    return replace(r, stop=replace(r.stop, max_new_tokens=min(tokens, r.stop.max_new_tokens)))


def measure(
    lab: Lab,
    task: Task,
    settings: TaskSettings,
    *,
    seed: int,
    batch: int,
    timing: str,
    hf: HfPeer | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Measurement:
    """Run every prompt on both sides. Ctrl-C keeps the prompts that are finished (`interrupted`)."""
    total = sum(item.turns for item in task.items)
    sides = Sides(lab, seed)
    stored = Baselines.open(lab, seed, batch) if timing == "untimed" else None
    out = Measurement([], "plain decoder", timed=timing == "paired")
    try:
        for unit, (names, items, requests) in enumerate(_units(lab, task, settings, batch, out)):
            if unit == 0 and timing == "paired":
                if progress is not None:
                    progress(0, total, "warming up")
                sides.warm_up(requests)
                out.baseline_kind = sides.baseline_kind
            baseline, strategy = _both(sides, lab, requests, unit, stored, seed)
            samples = [
                Sample(name, item.category, unit, list(r.prompt), r, b, s)
                for name, item, r, b, s in zip(names, items, requests, baseline, strategy, strict=True)
            ]
            for i, sample in enumerate(samples):
                _compare(lab, sample, requests, i, seed)
            if hf is not None:
                _ask_hf(hf, samples, unit, lab)
            out.samples += samples
            if progress is not None:
                progress(len(out.samples), total, _running(out.samples, out.timed))
    except KeyboardInterrupt:
        if not out.samples:
            raise
        out.interrupted = True
    return out


def _units(
    lab: Lab, task: Task, settings: TaskSettings, batch: int, out: Measurement
) -> Iterator[tuple[list[str], list[Item], list[Request]]]:
    """Batches of prompts: the first turn of `batch` items, then their second ones, after the baseline's answers."""
    for at in range(0, len(task.items), batch):
        group = task.items[at : at + batch]
        answers: dict[str, list[str]] = {item.id: [] for item in group}
        for turn in range(max(item.turns for item in group)):
            items = [item for item in group if turn < item.turns]
            names = [item.id if item.turns == 1 else f"{item.id}/turn{turn + 1}" for item in items]
            requests = []
            for name, item in zip(names, items, strict=True):
                prompt = encode(item, answers[item.id], lab.tokenizer, settings)
                try:
                    requests.append(
                        lab.request(prompt, settings.max_new_tokens, documents=encode_documents(item, lab.tokenizer))
                    )
                except UserError as error:
                    raise UserError(f"{name}: {error}") from error
            yield names, items, requests
            for item, sample in zip(items, out.samples[-len(items) :], strict=True):
                assert sample.baseline is not None
                answers[item.id].append(lab.text(sample.baseline.tokens))


def _both(
    sides: Sides, lab: Lab, requests: list[Request], unit: int, stored: "Baselines | None", seed: int
) -> tuple[list[Generation], list[Generation]]:
    """Which side goes first alternates from unit to unit, so that drift and caches favour neither."""
    if stored is not None:
        return stored.get(lab, requests, seed), finish(lab.strategy(requests, seed))
    if unit % 2:
        strategy = sides.strategy(requests)
        return sides.baseline(requests), strategy
    baseline = sides.baseline(requests)
    return baseline, sides.strategy(requests)


def _compare(lab: Lab, sample: Sample, requests: Sequence[Request], index: int, seed: int) -> None:
    """Set the sample's divergence; the plain decoder runs again only to read its scores there."""
    assert sample.baseline is not None
    assert sample.strategy is not None
    at = exactness.first_difference(sample.baseline.tokens, sample.strategy.tokens)
    if at is None:
        return
    seen: dict[int, torch.Tensor] = {}

    def watch(request: int, position: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        if request == index and position == at:
            seen[at] = scores.clone()
            sample.top_logit = float(logits.float().abs().max())

    for _ in lab.plain(requests, seed, watch=watch):
        if at in seen:
            break
    sample.divergence = exactness.divergence(
        sample.id, sample.baseline.tokens, sample.strategy.tokens, lambda _: seen[at]
    )


def _ask_hf(hf: HfPeer, samples: Sequence[Sample], unit: int, lab: Lab) -> None:
    modes = list(hf.modes)
    for sample in samples:
        for mode in modes[unit % len(modes) :] + modes[: unit % len(modes)]:
            sample.hf[mode] = hf.generate(mode, sample.prompt, sample.request.stop.limit, lab.eos_ids)


def _running(samples: Sequence[Sample], timed: bool) -> str:
    """What the progress line says so far."""
    same = sum(s.divergence is None for s in samples)
    text = f"{same}/{len(samples)} identical"
    if timed:
        base = sum(s.baseline.decode_s for s in samples if s.baseline)
        ours = sum(s.strategy.decode_s for s in samples if s.strategy)
        if ours:
            text = f"speedup {base / ours:.2f}x, {text}"
    return text


class Baselines:
    """Plain decoding's tokens kept on disk, for `timing=untimed`: a sweep over drafters decodes a prompt plainly once.

    The name of the file holds everything that the tokens depend on but the prompt.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens: dict[str, tuple[list[int], str]] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line cut short by a kill; it is decoded again
                self._tokens[row["key"]] = (row["tokens"], row["reason"])

    @staticmethod
    def open(lab: Lab, seed: int, batch: int) -> "Baselines":
        law, target = lab.acceptance.law(), lab.target
        parts = [lab.source.digest, target.dtype, target.device, target.implementation, torch.__version__]
        parts += [torch.get_num_threads(), law, seed if law.sample else None, batch, lab.eos_ids, _code_digest()]
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
        return Baselines(cache_dir() / "baselines" / f"{name}.jsonl")

    def get(self, lab: Lab, requests: list[Request], seed: int) -> list[Generation]:
        keys = [_prompt_key(r, requests) for r in requests]
        if all(key in self._tokens for key in keys):
            out = []
            for i, (r, key) in enumerate(zip(requests, keys, strict=True)):
                tokens, reason = self._tokens[key]
                out.append(Generation(i, len(r.prompt), list(tokens), reason=reason, delivered=[]))  # type: ignore[arg-type]
            return out
        done = finish(lab.plain(requests, seed))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for key, g in zip(keys, done, strict=True):
                self._tokens[key] = (g.tokens, str(g.reason))
                file.write(json.dumps({"key": key, "tokens": g.tokens, "reason": g.reason}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return done


def _prompt_key(r: Request, batch: Sequence[Request]) -> str:
    """Batch mates are part of it: in half precision they may move a near-tie."""
    what = [r.prompt, r.stop.limit, r.stop.stop, [m.prompt for m in batch if m is not r]]
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _code_digest() -> str:
    """The decoder's own code: tokens of another version are not reused."""
    root = Path(__file__).parents[1]
    files = sorted(f for folder in ("decoding", "attention", "kernels") for f in (root / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
