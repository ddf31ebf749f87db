"""What a step costs, measured, and what speculation should then gain: T(k), the draft's cost, and the theory on top.

The theory is that of arXiv:2211.17192 (expected tokens a step, and the walltime they take), with one change: there,
verifying γ + 1 rows takes as long as one row, and drafting costs c of it a token; here T(γ + 1) is measured, and
drafting has a cost a step beside that a token. With T constant and no cost a step the formulas are the paper's.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol, runtime_checkable

import torch

from ..attention.paged import PagedCache
from ..attention.rows import chains
from ..kernels.argmax import largest
from .acceptance import Acceptance
from .draft import Drafter
from .loop import generate
from .model.decoder import Decoder
from .reference import PREFILL_CHUNK
from .request import Request

ROWS = (1, 2, 4, 8, 16, 32)
_WARM = 2  # untimed rounds
_NO_FASTER = 0.95  # more rows may take this much of what fewer took: less is noise


@dataclass(frozen=True, slots=True)
class Profile:
    """T(k): `seconds` of one forward of k rows of one sequence behind `context` committed ones; k = 1 among them."""

    context: int
    seconds: dict[int, float]

    def __post_init__(self) -> None:
        if 1 not in self.seconds:
            raise ValueError(f"a profile needs T(1), the plain step; it has k = {sorted(self.seconds)}")

    def at(self, k: int | float) -> float:
        """T(k): on a line between its measured neighbours; beyond the last, along the last two, but never falling."""
        if k < 1:
            raise ValueError(f"a forward has at least 1 row, got {k}")
        ks = sorted(self.seconds)
        right = bisect_left(ks, k)
        if right < len(ks) and ks[right] == k:
            return self.seconds[ks[right]]
        if len(ks) == 1:
            return self.seconds[1]
        beyond = right == len(ks)
        a, b = ks[-2:] if beyond else ks[right - 1 : right + 1]
        slope = (self.seconds[b] - self.seconds[a]) / (b - a)
        return self.seconds[b] + (k - b) * max(slope, 0.0) if beyond else self.seconds[a] + (k - a) * slope

    def ratio(self, k: int | float) -> float:
        """T(k) ÷ T(1)."""
        return self.at(k) / self.at(1)

    def doubt(self, busy: bool) -> str | None:
        """Why what follows from these times is noise, in a line. `busy`: others used the cores when they were taken."""
        why = ["other programs used the cores while T(k) was measured"] if busy else []
        for j, k in pairwise(sorted(self.seconds)):
            if self.seconds[k] < _NO_FASTER * self.seconds[j]:
                why.append(f"T({k}) is only {self.seconds[k] / self.seconds[j]:.2f} of T({j})")
                break
        return (
            f"{' and '.join(why)}: what is predicted from T(k) is noisy; measure it again when quiet" if why else None
        )


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds: `step_s` a step whatever is drafted, `token_s` a token on top; `host_s`: the loop's own a step."""

    step_s: float
    token_s: float
    host_s: float

    def at(self, drafted: int | float) -> float:
        """Seconds of drafting in a step that drafts so many tokens."""
        return self.step_s + drafted * self.token_s


@runtime_checkable
class Counted(Protocol):
    """What a step came to; a `Step` of the event log is one."""

    @property
    def verified(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def emitted(self) -> int: ...


def measure_target(
    target: Decoder,
    *,
    context: int,
    rows: Sequence[int] = ROWS,
    repeats: int = 9,
    layers: Sequence[int] | None = None,
    pages: PagedCache | None = None,
) -> Profile:
    """T(k) as the loop's verification pays it. The k take turns. `layers`: of these alone, as a draft of the target's
    own layers pays it. `pages`: behind rows in these, else contiguous."""
    forward = TimedForward(target, context=context, most=max(rows), layers=layers, pages=pages)
    seconds: dict[int, list[float]] = {k: [] for k in rows}
    order, turns = random.Random(0), list(rows)
    for turn in range(_WARM + repeats):
        order.shuffle(turns)  # no k always follows the same other one
        for k in turns:
            spent = forward(k)
            if turn >= _WARM:
                seconds[k].append(spent)
    forward.close()
    return Profile(context, {k: median(found) for k, found in sorted(seconds.items())})


class TimedForward:
    """Seconds of one forward of k ≤ `most` rows of one sequence behind `context` committed ones: all their logits, the
    argmax on the host."""

    @torch.inference_mode()
    def __init__(
        self,
        target: Decoder,
        *,
        context: int,
        most: int,
        layers: Sequence[int] | None = None,
        pages: PagedCache | None = None,
    ) -> None:
        self._target, self._layers = target, layers
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(target.config.vocab, (context + most,), generator=generator).tolist()
        self._cache = target.open_cache(1, len(tokens), pages)
        self._slot, self._next = self._cache.open(), tokens[context:]
        for at in range(0, context, PREFILL_CHUNK):
            piece = tokens[at : min(at + PREFILL_CHUNK, context)]
            last = torch.tensor([len(piece) - 1])
            target(chains([piece], [self._slot], prompt=True), self._cache, logits_of=last)
            self._cache.commit({self._slot: range(len(piece))})

    @torch.inference_mode()
    def __call__(self, k: int) -> float:
        feed = chains([self._next[:k]], [self._slot])
        begin = time.perf_counter()
        largest(self._target(feed, self._cache, layers=self._layers).logits)
        spent = time.perf_counter() - begin
        self._cache.drop()
        return spent

    def close(self) -> None:
        """The rows go, from pages that outlive them too."""
        self._cache.free(self._slot)


def draft_cost(
    target: Decoder,
    drafter: Drafter[Any],
    acceptance: Acceptance,
    requests: Sequence[Request],
    *,
    tokens: int = 16,
    seed: int = 0,
    pages: PagedCache | None = None,
) -> DraftCost:
    """The drafter's cost, from generations of its own of `tokens` tokens, one request at a time.

    Each request runs under several budgets of draft rows, so that drafts of several lengths tell the cost of a step
    from that of a token.
    """
    short = [replace(r, stop=replace(r.stop, max_new_tokens=min(tokens, r.stop.max_new_tokens))) for r in requests]
    most = drafter.gives.rows
    budgets = sorted({min(1, most), -(-most // 2), most})
    options: dict[str, Any] = {"seed": seed, "pages": pages}
    generate(target, short[:1], drafter, acceptance, **options)  # untimed: what is allocated or built once
    drafted: list[int] = []
    seconds: list[float] = []
    host: list[float] = []
    for request in short:
        for budget in budgets:
            (out,) = generate(target, [request], drafter, acceptance, budget=budget, **options)
            emitted = 1
            for step in out.steps:
                host.append(step.accept_s + step.commit_s + step.other_s)
                if emitted + 1 < request.stop.limit:  # else no draft fits, and the drafter was not asked
                    drafted.append(step.drafted)
                    seconds.append(step.draft_s)
                emitted += step.emitted
    step_s, token_s = fit_cost(drafted, seconds)
    return DraftCost(step_s, token_s, median(host) if host else 0.0)


def fit_cost(drafted: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) ≥ 0 of seconds ≈ a + b · drafted: least squares over the median at each count, weighted by its steps.

    Steps of one count cannot tell the two apart: then all is put on the tokens, so that longer drafts never seem free.
    """
    groups: dict[int, list[float]] = {}
    for n, s in zip(drafted, seconds, strict=True):
        groups.setdefault(n, []).append(s)
    if not groups:
        return 0.0, 0.0
    points = [(float(n), median(found), len(found)) for n, found in groups.items()]
    weight = sum(w for _, _, w in points)
    x_mean = sum(w * x for x, _, w in points) / weight
    y_mean = sum(w * y for _, y, w in points) / weight
    spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
    if not spread:
        return (0.0, y_mean / x_mean) if x_mean else (y_mean, 0.0)
    slope = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
    if slope < 0:
        return y_mean, 0.0
    if (start := y_mean - slope * x_mean) < 0:
        return 0.0, sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
    return start, slope


def predict(profile: Profile, cost: DraftCost, steps: Sequence[Counted]) -> float | None:
    """Speedup over plain decoding that `steps` should have come to at these costs. None without steps."""
    if not steps:
        return None
    plain = sum(s.emitted for s in steps) * (profile.at(1) + cost.host_s)
    return plain / sum(step_seconds(profile, cost, s.verified, s.drafted) for s in steps)


def step_seconds(profile: Profile, cost: DraftCost, rows: int | float, drafted: int | float) -> float:
    """Draft, verify, and the loop's own time."""
    return profile.at(rows) + cost.at(drafted) + cost.host_s


def acceptance_probability(steps: Sequence[Counted]) -> float | None:
    """α: the chance that the next candidate of a path is kept where those before it were. None if none was ever judged.

    The maximum-likelihood estimate for a constant chance: kept ÷ (kept + paths that ended in a rejection). A path that
    the stop rule cut (nothing was emitted behind it) ended in none.
    """
    kept = sum(s.accepted for s in steps)
    rejected = sum(s.accepted < min(s.depth, s.emitted) for s in steps)
    return kept / (kept + rejected) if kept + rejected else None


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 − α^(γ+1)) ÷ (1 − α) tokens from a chain of γ candidates, the target's own token included; γ + 1 at α = 1."""
    return sum(alpha**i for i in range(gamma + 1))


def speedup(alpha: float, gamma: int, profile: Profile, cost: DraftCost, share: float = 1.0) -> float:
    """Expected speedup of chains of γ candidates. γ = 0: plain decoding, 1.

    `share` of the steps draft; the others find nothing to draft, pay the drafter's cost a step and emit one token.
    """
    if gamma == 0:
        return 1.0
    return gain(expected_tokens(alpha, gamma), gamma, profile, cost, share)


def gain(tokens: float, drafted: int, profile: Profile, cost: DraftCost, share: float = 1.0) -> float:
    """Speedup over plain decoding where `share` of the steps draft so many candidates and emit `tokens` on average; the
    others pay the drafter's cost a step, verify one row and emit one token."""
    drafting, idle = step_seconds(profile, cost, 1 + drafted, drafted), step_seconds(profile, cost, 1, 0)
    tau = share * tokens + (1 - share)
    return tau * (profile.at(1) + cost.host_s) / (share * drafting + (1 - share) * idle)


def best_gamma(alpha: float, profile: Profile, cost: DraftCost, share: float = 1.0, most: int = 32) -> int:
    """The chain length of the highest expected speedup, the shortest of equals; 0: better not to draft."""
    return max(range(most + 1), key=lambda gamma: speedup(alpha, gamma, profile, cost, share))


def break_even_alpha(gamma: int, profile: Profile, cost: DraftCost, share: float = 1.0) -> float | None:
    """The least α at which chains of γ candidates are no slower than plain decoding. None: not even if all are kept."""
    if speedup(1.0, gamma, profile, cost, share) < 1:
        return None
    if speedup(0.0, gamma, profile, cost, share) >= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # the speedup rises with α
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, gamma, profile, cost, share) >= 1 else (middle, high)
    return high


def account(
    profile: Profile, cost: DraftCost, steps: Sequence[Counted], measured: float | None = None
) -> dict[str, Any]:
    """T(k), the draft's cost, and what follows from them, as plain data. `measured`: the speedup that was timed."""
    return {
        "context": profile.context,
        "seconds": profile.seconds,
        "draft": asdict(cost),
        "alpha": acceptance_probability(steps),
        "predicted_speedup": predict(profile, cost, steps),
        "explained": explain(profile, cost, steps, measured),
    }


def explain(profile: Profile, cost: DraftCost, steps: Sequence[Counted], measured: float | None = None) -> list[str]:
    """The waterfall from tokens a step to speedup in a few lines of words; `measured` is the speedup that was timed."""
    predicted = predict(profile, cost, steps)
    if predicted is None:
        return ["no step followed the first token, so there is nothing to explain"]
    tau = fmean(s.emitted for s in steps)
    rows, drafted = fmean(s.verified for s in steps), fmean(s.drafted for s in steps)
    verify_s = fmean(profile.at(s.verified) for s in steps)
    plain, unaided = profile.at(1) + cost.host_s, verify_s + cost.host_s
    whole = unaided + cost.at(drafted)
    rest = ""
    if measured is not None:
        rest = f"; measured {measured:.2f}×, unexplained {100 * (measured / predicted - 1):+.0f} %"
    lines = [
        f"{tau:.2f} tokens a step, ÷ {unaided / plain:.2f} for verifying {_number(rows)} rows, "
        f"÷ {whole / unaided:.2f} for drafting → predicted {predicted:.2f}×{rest}",
        f"verifying: {_ms(verify_s)} a step for {_number(rows)} rows, {verify_s / profile.at(1):.2f} × the "
        f"{_ms(profile.at(1))} of one row",
        f"drafting: {_ms(cost.at(drafted))} a step for {_number(drafted)} tokens ({_ms(cost.step_s)} a step and "
        f"{_ms(cost.token_s)} a token), {100 * cost.at(drafted) / plain:.0f} % of a plain step",
        f"the loop's own time: {_ms(cost.host_s)} a step, {100 * cost.host_s / plain:.0f} % of a plain step",
    ]
    return lines + _advice(profile, cost, steps, tau, whole / plain)


def _advice(profile: Profile, cost: DraftCost, steps: Sequence[Counted], tau: float, needed: float) -> list[str]:
    """What would have to be so for it to pay, and how long a draft should be."""
    alpha = acceptance_probability(steps)
    if alpha is None:
        return [f"nothing was drafted: a step costs {needed:.2f} plain steps and emits one token"]
    lines = [
        f"break-even: a step costs {needed:.2f} plain ones and pays from {needed:.2f} tokens on; it emits {tau:.2f}"
    ]
    if any(s.drafted != s.depth for s in steps):
        return lines  # trees: α and γ are of chains
    drafting = [s for s in steps if s.depth]
    share, gamma = len(drafting) / len(steps), max(1, round(fmean(s.depth for s in drafting)))
    least, best = break_even_alpha(gamma, profile, cost, share), best_gamma(alpha, profile, cost, share)
    if least is None:
        pays = f"drafts of {gamma} cannot pay here, even if every token were kept"
    else:
        pays = f"drafts of {gamma} pay from α = {least:.2f} on"
    if best == 0:
        advice = "best not to draft"
    else:
        advice = f"best length at this α: {best} (expected {speedup(alpha, best, profile, cost, share):.2f}×)"
    return [*lines, f"α = {alpha:.2f} (chance that a drafted token is kept); {pays}; {advice}"]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
