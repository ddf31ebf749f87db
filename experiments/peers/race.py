"""Contenders on the same prompts, in turn: round by round, prompt by prompt, another one first each time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeVar

from ..compare_hf import Turn
from ..exactness import Divergence, Verdict, first_difference

Kind = Literal["plain", "draft", "lookup"]
_SETTLE = 0.02  # seconds after a turn, in which the threads of whoever had it fall asleep
_FORWARDS = 3  # of each number of rows, whose median counts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    ids: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """`kind`: plain decoding, a second model's drafts, or drafts without one. `low_bit`: of quantised weights;
    `forward`: that of its model. Of ours: `judge(prompt, tokens)`, where an output leaves what it must be, and what
    `verdict` that makes of so many prompts. Of the peers': `same_as`, the contender whose output it should be."""

    name: str
    whose: Literal["ours", "transformers", "llama.cpp"]
    kind: Kind
    low_bit: bool
    forward: str
    settings: str
    run: Callable[[Prompt], Turn]
    judge: Callable[[Prompt, list[int]], Divergence | None] | None = None
    verdict: Callable[[Mapping[str, Divergence], int], Verdict] | None = None
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """`seconds(k)`: of one forward of k rows of a model."""

    name: str
    whose: Literal["ours", "transformers", "llama.cpp"]
    low_bit: bool
    seconds: Callable[[int], float]


@dataclass(slots=True)
class Measured:
    """`turns[contender][prompt]`: one a round; `forwards[name][k]`: seconds, one for each prompt of each round;
    `bandwidth`: bytes read a second, before each round and after the last; `left[contender][prompt]`: where its output
    leaves what it must be."""

    turns: dict[str, dict[str, list[Turn]]]
    forwards: dict[str, dict[int, list[float]]]
    bandwidth: list[float] = field(default_factory=list)
    left: dict[str, dict[str, Divergence]] = field(default_factory=dict)
    interrupted: bool = False

    def prompts(self) -> list[str]:
        """Those on which every contender has had a turn."""
        first, *rest = self.turns.values()
        return [prompt for prompt in first if all(prompt in done for done in rest)]


def race(
    contenders: Sequence[Contender],
    forwards: Sequence[Forward],
    prompts: Sequence[Prompt],
    *,
    rounds: int,
    rows: Sequence[int],
    bandwidth: Callable[[], float],
    progress: Callable[[str, int, int, str], None],
    after: Callable[[int, Prompt, Contender, Turn], None],
) -> Measured:
    """Ctrl-C keeps what is measured, if every contender has had a turn on a prompt. `after` hears of each turn."""
    out = Measured(
        {one.name: {} for one in contenders},
        {one.name: {k: [] for k in rows} for one in forwards},
        left={one.name: {} for one in contenders},
    )
    total = rounds * len(prompts)
    try:
        for turn in range(total):
            number, at = divmod(turn, len(prompts))
            if at == 0:
                out.bandwidth.append(bandwidth())
            prompt = prompts[at]
            progress("decoding", turn, total, f"round {number + 1}: {prompt.id}")
            for one in _rotated(contenders, number + at):
                done = one.run(prompt)
                out.turns[one.name].setdefault(prompt.id, []).append(done)
                _judge(one, prompt, done, out)
                after(number, prompt, one, done)
                time.sleep(_SETTLE)
            for model in _rotated(forwards, number + at):
                model.seconds(1)  # its threads awake, and others' weights out of the caches
                each: dict[int, list[float]] = {k: [] for k in rows}
                for _ in range(_FORWARDS):
                    for k in rows:
                        each[k].append(model.seconds(k))
                for k in rows:
                    out.forwards[model.name][k].append(median(each[k]))
                time.sleep(_SETTLE)
        out.bandwidth.append(bandwidth())
        progress("decoding", total, total, "")
    except KeyboardInterrupt:
        if not out.prompts():
            raise
        out.interrupted = True
    return out


def _rotated(of: Sequence[T], by: int) -> list[T]:
    by %= max(1, len(of))
    return [*of[by:], *of[:by]]


def _judge(one: Contender, prompt: Prompt, done: Turn, out: Measured) -> None:
    """Of ours; the first divergence on a prompt is kept."""
    if one.judge is not None and prompt.id not in out.left[one.name]:
        found = one.judge(prompt, done.tokens)
        if found is not None:
            out.left[one.name][prompt.id] = found


def differing(mine: Mapping[str, Sequence[Turn]], theirs: Mapping[str, Sequence[Turn]], of: Sequence[str]) -> int:
    """Prompts on which two contenders' outputs differ in any round."""
    return sum(
        any(first_difference(theirs[prompt][0].tokens, turn.tokens) is not None for turn in mine[prompt])
        for prompt in of
    )
