"""What a run's folder holds, as its readers want it: its prompts, its steps, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from ...decoding import cost
from ...decoding.events import Step
from ...errors import UserError
from ..files import misfit, read_lines
from .load import Run

FEW = 3  # steps from which a time is taken
# What is taken for granted of the lines of a run's files; seconds are not there where nothing was timed.
_ANSWER = {
    "tokens": list, "reason": (str, None), "ttft_s": (float, None), "latency_s": (float, None),
    "delivered": (list, None),
}  # fmt: skip
_SAMPLE = {
    "id": str, "category": str, "batch": int, "prompt_tokens": int, "baseline": _ANSWER, "strategy": _ANSWER,
}  # fmt: skip
_PHASES = ("draft_s", "verify_s", "accept_s", "commit_s", "other_s")
_STEP = {
    "id": str, **dict.fromkeys(("batch", "drafted", "verified", "depth", "accepted", "emitted"), int),
    **dict.fromkeys((f"{name}?" for name in _PHASES), float),
    "ranks?": [int], "offered?": [int], "sources?": [str], "also_proposed?": [[str]], "drafted_by?": {"*": int},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """Forwards after the prompt, their seconds, and the tokens that came of them; a forward of a batch is one."""

    forwards: int
    seconds: float
    tokens: int

    @property
    def step(self) -> float:
        return self.seconds / self.forwards

    @property
    def burst(self) -> float:
        """Tokens a forward."""
        return self.tokens / self.forwards


def seconds_of(answer: Mapping[str, Any]) -> float | None:
    """From the first token to the last; None where it was not timed."""
    first, last = answer["ttft_s"], answer["latency_s"]
    return None if first is None or last is None else float(last - first)


@dataclass(frozen=True)
class Log:
    """What a run's folder holds."""

    run: Run

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        file = self.run.folder / "samples.jsonl"
        return _whole(file, read_lines(file), _SAMPLE)

    def rows(self, side: str) -> list[dict[str, Any]]:
        """The steps of a side as the file has them."""
        file = self.run.folder / "events.jsonl"
        return _whole(file, (r for r in read_lines(file) if (r.get("side"), r.get("event")) == (side, "step")), _STEP)

    @cached_property
    def steps(self) -> list[Step]:
        return self._steps("strategy")

    @cached_property
    def plain_steps(self) -> list[Step]:
        """Empty where the baseline was the plain decoder, which logs no steps."""
        return self._steps("baseline")

    def _steps(self, side: str) -> list[Step]:
        names = [field.name for field in fields(Step)]
        return [Step(**{n: r[n] for n in names if n in r}) for r in self.rows(side)]

    @cached_property
    def drafting(self) -> list[Step]:
        return [step for step in self.steps if step.depth]

    @cached_property
    def timed(self) -> bool:
        return self.run.number("speedup.value") is not None

    def side(self, name: str) -> Side:
        """Over the prompts that both sides decoded, as the speedup is."""
        units: dict[Any, list[dict[str, Any]]] = {}
        for sample in self.samples:
            units.setdefault(sample["batch"], []).append(sample)
        forwards, spent, tokens = 0, 0.0, 0
        for unit in units.values():
            if any(sum(len(s[side]["tokens"]) - 1 for s in unit) <= 0 for side in ("baseline", "strategy")):
                continue
            done = [s[name] for s in unit]
            if any(seconds_of(g) is None or not g["delivered"] for g in done):
                continue
            forwards += max(len(g["delivered"]) - 1 for g in done)
            spent += max(g["latency_s"] for g in done) - max(g["ttft_s"] for g in done)
            tokens += sum(len(g["tokens"]) - 1 for g in done)
        return Side(forwards, spent, tokens)

    @cached_property
    def plain(self) -> Side:
        return self.side("baseline")

    @cached_property
    def ours(self) -> Side:
        return self.side("strategy")

    def phase(self, *names: str) -> float:
        """Seconds of a step of ours in some phases."""
        return self.ours.step * sum(self.run.number(f"strategy.time_share.{name}") or 0.0 for name in names)

    @cached_property
    def one_row(self) -> float | None:
        """Seconds in which the target verifies one row of one sequence: T(1)."""
        if (measured := self.run.number("profile.seconds.1")) is not None:
            return measured
        for steps in (self.steps, self.plain_steps):
            alone = [step.verify_s for step in steps if step.verified == 1 and step.batch == 1]
            if len(alone) >= FEW:
                return median(alone)
        return None

    @cached_property
    def model(self) -> tuple[cost.Profile, cost.DraftCost] | None:
        """T(k) and the draft's cost: as `profile=true` measured them, else as the steps of this run took. None where
        these do not tell, and for batches."""
        if any(step.batch > 1 for step in self.steps):
            return None
        if isinstance(known := self.run.at("profile"), Mapping):
            times = {int(k): float(s) for k, s in known["seconds"].items() if k.isdecimal()}
            return cost.Profile(known["context"], times), cost.DraftCost(**known["draft"])
        if self.one_row is None or not self.steps:
            return None
        by_rows: dict[int, list[float]] = {}
        for step in self.steps:
            by_rows.setdefault(step.verified, []).append(step.verify_s)
        times = {k: median(found) for k, found in by_rows.items() if len(found) >= FEW} | {1: self.one_row}
        a_step, a_token = cost.fit_cost([s.drafted for s in self.steps], [s.draft_s for s in self.steps])
        host = median(step.accept_s + step.commit_s + step.other_s for step in self.steps)
        return cost.Profile(0, times), cost.DraftCost(a_step, a_token, host)

    def expected(self, steps: Sequence[cost.Counted]) -> float | None:
        """The speedup that other steps would have come to. The measured one is where this run's own steps are put, so
        only the difference between the two is computed."""
        if self.model is None or not self.timed:
            return None
        profile, draft = self.model
        ours, theirs = cost.predict(profile, draft, self.steps), cost.predict(profile, draft, steps)
        return None if ours is None or theirs is None else self.run.result["speedup"]["value"] * theirs / ours


def _whole(file: Path, rows: Iterable[dict[str, Any]], shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = list(rows)
    if (wrong := next(filter(None, (misfit(row, shape) for row in found)), None)) is not None:
        raise UserError(f"{file} is damaged: of a line, {wrong}; run it again")
    return found
