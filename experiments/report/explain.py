"""Why a run was slow or fast, in words, from its files alone, and what to try: nothing that they do not show.

speedup = tokens a step × seconds of a plain step ÷ seconds of a step; both steps are those of the target's forwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ...decoding import cost
from ...decoding.events import Step
from ...errors import UserError
from ..files import read_lines, read_result
from ..format import BUSY, counted, diverged, percent, positions, seconds, sources
from ..metrics import by_source
from .load import Run, number_at
from .log import FEW, Log
from .rows import drafter

_WORTH = 0.03  # of the speedup: less is not told
_LENGTHS = ("max_draft", "copy")  # what the drafters call the length of a draft
_SIZES = ("nodes", "guesses")  # and the size of a tree
_DEAR = 1.5  # plain steps: verifying a tree that costs less is no reason for a smaller one
_COPIES = ("prompt_lookup", "reference", "suffix")
_LEARNS = ("token_recycling", "lookahead", "jacobi")  # from the target's own rows
_IDLE = 0.25  # of the steps without a draft: enough for another drafter to fill


def explain(folder: Path) -> list[str]:
    """Lines: what it came to, what made it so, in numbers, what to doubt, and overrides to try."""
    log = Log(Run(folder, read_result(folder / "result.json")))
    if log.run.at("strategy") is None:
        return [
            *_quality(log.run),
            *_diverged(log.run),
            "no decoding was timed here: decodelab run measures speed, with quality.tasks=… both",
        ]
    if log.timed and min(log.plain.forwards, log.plain.seconds, log.ours.seconds) <= 0:
        raise UserError(f"{folder / 'samples.jsonl'} times no answer, and result.json has a speedup: run it again")
    lost = _diverged(log.run)
    return [*_outcome(log), *_drafts(log), *_costs(log), *_categories(log.run), *lost, *_doubts(log), *_advice(log)]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step as it would have been (`decoding/cost.py` counts it like one of the log)."""

    verified: int
    drafted: int
    depth: int
    accepted: int
    emitted: int


# --- what it came to


def _outcome(log: Log) -> Iterator[str]:
    run, status = log.run, log.run.at("status")
    if run.at("exactness.verdict") == "broken":
        yield "the output is broken, so its speed means nothing: see the divergences in result.json"
    if status == "interrupted":
        yield f"it was interrupted after {counted(run.at('prompts'), 'prompt')}"
    if not log.timed:
        if run.at("replay") is not None:
            yield f"replayed from {run.at('replay.source')}: no model ran, so nothing was timed"
            if (predicted := run.number("predicted_speedup")) is not None:
                yield f"T(k) of the recorded run and what drafting took in the replay predict {predicted:.2f}×"
            return
        tau = run.number("strategy.tokens_per_step")
        if run.at("timing.mode") == "untimed":
            emitted = "" if tau is None else f": {tau:.2f} tokens a step"
            yield f"nothing was timed (timing=untimed){emitted}"
            if (predicted := run.number("predicted_speedup")) is not None:
                yield f"T(k) and the drafts' cost, measured apart, predict {predicted:.2f}×"
        else:
            yield "no token followed the first of any prompt, so there is no speed: raise task.max_new_tokens"
        return
    found, plain, ours = run.at("speedup"), log.plain, log.ours
    value, over = found["value"], "on one prompt" if found["n"] == 1 else f"over {found['n']} prompts"
    kind = run.at("baseline.kind")
    faster = f"{value:.2f}× as fast as {kind if '=' in str(kind) else f'the {kind}'}"
    if found["low"] is None or found["high"] is None:
        yield f"{faster} {over}, too few for an interval"
    else:
        unsure = ": it may be no gain at all" if found["low"] <= 1 <= found["high"] else ""
        yield f"{faster} {over}, 95 % interval {found['low']:.2f} to {found['high']:.2f}{unsure}"
    tokens = f"{ours.burst:.2f} tokens a step"
    if round(plain.burst, 2) != 1:  # batches
        tokens += f" ÷ {plain.burst:.2f} of plain decoding"
    yield (
        f"= {tokens} × {seconds(plain.step)} of a plain step ÷ {seconds(ours.step)} of a step: a step costs "
        f"as much as {ours.step / plain.step:.2f} plain ones, so it pays where it emits more than "
        f"{plain.burst * ours.step / plain.step:.2f} tokens"
    )


# --- the drafts


def _drafts(log: Log) -> Iterator[str]:
    run, steps, drafting = log.run, log.steps, log.drafting
    if not steps:
        return
    if not drafting:
        yield f"nothing was drafted in {len(steps)} steps, so each emits one token"
        return
    idle = len(steps) - len(drafting)
    if idle:
        yield f"{idle} of {len(steps)} steps ({percent(idle / len(steps))}) had no draft and emit one token"
    offered, kept = fmean(s.depth for s in drafting), fmean(s.accepted for s in drafting)
    yield f"a draft offers {offered:.1f} tokens, of which {kept:.1f} are kept ({percent(kept / offered)})"
    if (told := positions(run.at("strategy.acceptance_by_position") or [])) is not None:
        yield told
    if (brought := sources(by_source(steps), len(steps))) is not None:
        yield brought


# --- what it cost


def _costs(log: Log) -> Iterator[str]:
    if not log.timed or not log.steps:
        return
    run, plain = log.run, log.plain
    parts = {
        f"verifying {fmean(s.verified for s in log.steps):.1f} rows a sequence": log.phase("verify"),
        "drafting": log.phase("draft"),
        "accepting, committing and the loop": log.phase("accept", "commit", "other"),
    }
    shares = ", ".join(f"{spent / plain.step:.2f} {what}" for what, spent in parts.items())
    yield f"in plain steps, a step is: {shares}"
    losses = dict(_losses(log))
    value = run.result["speedup"]["value"]
    told = [(what, other) for what, other in losses.items() if other > value * (1 + _WORTH)]
    told.sort(key=lambda loss: -loss[1])
    if told:
        yield "it would be " + ", ".join(f"{other:.2f}× if {what}" for what, other in told)
    if (predicted := run.number("predicted_speedup")) is not None:
        rest = 100 * (value / predicted - 1)
        yield f"T(k) and the drafts' cost, measured apart, predict {predicted:.2f}×: {rest:+.0f} % unexplained"
    if (start := _start(log)) is not None:
        yield start


def _losses(log: Log) -> Iterator[tuple[str, float]]:
    """What the speedup would be without each loss, all else equal."""
    value, step = log.run.result["speedup"]["value"], log.ours.step
    if (free := step - log.phase("draft")) > 0:
        yield "drafting took no time", value * step / free
    if (unaided := step - log.phase("accept", "commit", "other")) > 0:
        yield "the loop took no time", value * step / unaided
    if log.one_row is not None and all(s.batch == 1 for s in log.steps):
        rows = step - max(0.0, log.phase("verify") - log.one_row)
        yield "verifying cost no more than one row", value * step / rows
    drafting, emitted = log.drafting, fmean(s.emitted for s in log.steps)
    if drafting:
        kept = fmean((s.depth + 1 if s.accepted < min(s.depth, s.emitted) else s.emitted) for s in log.steps)
        yield "every draft were kept whole", value * kept / emitted
    if len(drafting) >= FEW and len(drafting) < len(log.steps) and all(s.batch == 1 for s in log.steps):
        pace = fmean(s.emitted for s in drafting) / fmean(s.total_s for s in drafting)
        yield (
            "every step were like those that had a draft",
            value * pace * fmean(s.total_s for s in log.steps) / emitted,
        )


def _start(log: Log) -> str | None:
    """What the drafter does before the first token."""
    rows = read_lines(log.run.folder / "events.jsonl")
    prefills = [r for r in rows if (r.get("side"), r.get("event")) == ("strategy", "prefill")]
    spent = [found for r in prefills if (found := number_at(r, "draft_s")) is not None]
    latency = log.run.number("strategy.latency_s")
    if not spent or not latency or fmean(spent) < _WORTH * latency:
        return None
    return (
        f"before the first token the drafter takes {seconds(fmean(spent))} a prompt, "
        f"{percent(fmean(spent) / latency)} of the latency: in the end-to-end speedup alone"
    )


# --- by category


def _categories(run: Run) -> Iterator[str]:
    rows = {
        name: row
        for name, row in (run.at("by_category") or {}).items()
        if row["speedup"]["value"] is not None and row["tokens_per_step"] is not None
    }
    if len(rows) < 2:
        return
    order = sorted(rows, key=lambda name: rows[name]["speedup"]["value"])
    if rows[order[-1]]["speedup"]["value"] < rows[order[0]]["speedup"]["value"] * (1 + _WORTH):
        return
    for what, name in (("best", order[-1]), ("worst", order[0])):
        row = rows[name]
        rate = "nothing drafted" if row["acceptance_rate"] is None else f"{percent(row['acceptance_rate'])} kept"
        yield (
            f"{what} on {name}: {row['speedup']['value']:.2f}× (n={row['speedup']['n']}), {rate}, "
            f"{row['tokens_per_step']:.2f} tokens a step"
        )


# --- what to doubt


def _doubts(log: Log) -> Iterator[str]:
    run = log.run
    if log.timed and (load := run.number("provenance.load_before") or 0.0) > BUSY:
        yield f"the machine was busy (load {load:.1f} before it began): its times are noise, run it again when quiet"
    drift = run.number("timing.drift")
    if drift is not None and abs(drift - 1) > 0.02:
        yield f"the baseline of an earlier cell had drifted by {100 * (drift - 1):+.1f} % (timing=paired has its own)"
    yield from _ties(run)
    if run.at("exactness.verdict") == "lossy" and not run.at("quality"):
        yield "its output is lossy by design, and no quality was measured: without it the speed says little"
    reasons = [s["baseline"]["reason"] for s in log.samples]
    if cut := reasons.count("length"):
        limit = run.at("config.task.max_new_tokens")
        yield f"{cut} of {len(reasons)} answers end at {limit} tokens: what would have followed is not in these numbers"
    yield from _prefill(log)


def _ties(run: Run) -> Iterator[str]:
    found = run.at("exactness.divergences") or []
    if run.at("exactness.verdict") != "near-tie":
        return
    gaps = [d["gap"] for d in found if d["gap"] is not None]
    widest = f", at most {max(gaps):.3g} apart" if gaps else ""
    yield (
        f"{len(found)} of {run.at('prompts')} outputs leave plain decoding's where two tokens tie within the rounding "
        f"of {run.at('provenance.dtype')}{widest}"
    )


def _prefill(log: Log) -> Iterator[str]:
    run, decode, whole = log.run, log.run.number("speedup.value"), log.run.number("end_to_end_speedup.value")
    ttft, latency = run.number("baseline.ttft_s"), run.number("baseline.latency_s")
    if decode is None or whole is None or not ttft or not latency:
        return
    if ttft / latency >= 0.25:
        yield (
            f"reading the prompt is {percent(ttft / latency)} of plain decoding's latency, and no drafter shortens "
            f"that: end to end it is {whole:.2f}×, and could be {latency / ttft:.2f}× at most"
        )


# --- what to try


def _advice(log: Log) -> Iterator[str]:
    if log.run.at("exactness.verdict") == "broken":
        return
    if log.timed and log.drafting:
        yield from _length(log)
        yield from _draft_model(log)
        if log.model is None and log.run.at("config.batch") == 1:
            yield "try profile=true: the log does not tell what a forward of one row costs, so no length is computed"
    if not log.timed:
        yield from _coverage(log)
    if not log.timed and log.run.at("timing.mode") == "untimed":
        yield "try timing=paired for a speed: tokens a step are not yet a speedup"


def _length(log: Log) -> Iterator[str]:
    """The best length of a draft, as far as the log tells: shorter drafts are replayed, longer ones extrapolated."""
    value = log.run.result["speedup"]["value"]
    key = next((key for key in _LENGTHS if log.run.at(f"config.drafting.{key}") is not None), None)
    if log.model is None or any(s.drafted != s.depth for s in log.steps):  # trees
        yield from _smaller(log)
        if value < 1:
            yield "try drafting=none: plain decoding was faster than this run"
        return
    longest = max(s.depth for s in log.steps)
    speeds = {m: found for m in range(1, longest) if (found := log.expected(list(replayed(log.steps, m)))) is not None}
    best = max(speeds, key=lambda m: speeds[m], default=None)
    top = value if best is None else max(value, speeds[best])
    if best is not None and speeds[best] > value * (1 + _WORTH):
        what = f"drafting.{key}={best}" if key else f"drafts of at most {best} tokens"
        yield f"try {what}: the same drafts, cut at {best}, come to {speeds[best]:.2f}× at the costs of this run"
    elif key is not None:
        longer = _longer(log, longest)
        if longer is not None:
            yield f"try drafting.{key}={longer[0]}: {longer[1]:.2f}× if what lies beyond {longest} is kept as often"
            top = max(top, longer[1])
        elif speeds and value >= 1:
            yield f"no draft shorter than {longest} would have been faster"
    if top < 1:
        yield "try drafting=none: no length of these drafts pays here"


def _smaller(log: Log) -> Iterator[str]:
    """What makes a tree that is dear to verify smaller."""
    cost, drafting, settings = log.phase("verify") / log.plain.step, log.drafting, log.run.at("config.drafting")
    if cost < _DEAR or not isinstance(settings, Mapping) or not any(s.drafted > s.depth for s in drafting):
        return
    nodes, tree = round(fmean(s.drafted for s in drafting)), settings.get("tree", False)
    dear = f"drafts of {nodes} tokens on average make verifying cost {cost:.1f} plain steps"
    if "members" in settings:
        yield f"try drafting.budget=auto, or a number below {nodes}: {dear}"
    elif not isinstance(tree, bool) and (tree is not None or drafter(log.run) != "eagle"):  # eagle's own is dynamic
        size = "" if log.run.at("profile") else " nodes=16"
        yield (
            f"try a smaller tree, which `decodelab tree {log.run.folder} output=tree.json{size}` makes of what was "
            f"kept here and drafting.tree=tree.json reads: {dear}"
        )
    elif (key := next((k for k in _SIZES if settings.get(k) is not None), None)) is not None:
        yield f"try drafting.{key} below {settings[key]}: {dear}"


def _coverage(log: Log) -> Iterator[str]:
    """What tokens a step alone can tell."""
    steps, drafting = log.steps, log.drafting
    if not drafting:
        return
    tau, drafted = fmean(s.emitted for s in steps), fmean(s.emitted for s in drafting)
    if drafted > tau * (1 + _WORTH):
        yield f"tokens a step would be {drafted:.2f} if every step were like those that had a draft"
        if (len(steps) - len(drafting)) / len(steps) >= _IDLE and (pair := _pair(log.run)) is not None:
            yield f"try drafting=merge 'drafting.members=[{pair}]': the other one may fill steps without a draft"
    longest = max(s.depth for s in drafting)
    whole = [s for s in drafting if s.depth == longest and s.accepted == longest]
    key = next((key for key in _LENGTHS if log.run.at(f"config.drafting.{key}") == longest), None)
    if key is not None and 2 * len(whole) >= len(drafting):
        full = f"{len(whole)} of {len(drafting)} drafts were as long as may be and kept whole"
        yield f"try drafting.{key}={2 * longest}: {full}"


def _pair(run: Run) -> str | None:
    """A run's drafter beside one of another kind, both by bare name; a replay has no model to learn from."""
    name = drafter(run)
    if name in _COPIES:
        return f"{name}, token_recycling" if run.at("replay") is None else None
    return f"{name}, suffix" if name in _LEARNS else None


def replayed(steps: Sequence[Step], most: int) -> Iterator[Replayed]:
    """The steps of chains as they would have been with drafts of at most `most` tokens: a run of accepted tokens that
    is longer is drafted again in pieces, from the token that the target put behind each."""
    for step in steps:
        emitted, accepted, depth = step.emitted, step.accepted, step.depth
        while emitted > most + 1:
            yield Replayed(1 + most, most, most, most, most + 1)
            emitted, accepted, depth = emitted - most - 1, accepted - most - 1, depth - most - 1
        offered = max(0, min(depth, most))
        yield Replayed(1 + offered, offered, offered, max(0, min(accepted, offered)), emitted)


def _longer(log: Log, longest: int) -> tuple[int, float] | None:
    """(a length, its expected speedup), where most drafts were as long as they might be."""
    full = [s for s in log.drafting if s.depth == longest]
    alpha = cost.acceptance_probability(log.drafting)
    if log.model is None or alpha is None or 2 * len(full) < len(log.drafting):
        return None
    profile, draft = log.model
    share = len(log.drafting) / len(log.steps)
    best = cost.best_gamma(alpha, profile, draft, share)
    now, then = (cost.speedup(alpha, gamma, profile, draft, share) for gamma in (longest, best))
    if best <= longest or then < now * (1 + _WORTH):
        return None
    return best, log.run.result["speedup"]["value"] * then / now


def _draft_model(log: Log) -> Iterator[str]:
    if log.run.at("config.drafting.model") is None:
        return
    drafted, step = fmean(s.drafted for s in log.steps), log.ours.step
    share = log.phase("draft") / step
    if share < 0.25 or not drafted:
        return
    value = log.run.result["speedup"]["value"]
    yield (
        f"try a smaller drafting.model: a drafted token costs {log.phase('draft') / drafted / log.plain.step:.2f} "
        f"plain steps, and at half of that, kept as often, it is {value / (1 - share / 2):.2f}×"
    )


# --- quality


def _diverged(run: Run) -> Iterator[str]:
    """What became of the reference's predictions, and where."""
    if (found := run.at("quality.divergence")) is not None:
        yield from diverged(found)


def _quality(run: Run) -> Iterator[str]:
    for name, found in (run.at("quality.tasks") or {}).items():
        metric = found["main"]
        score = found["metrics"][metric]
        low, high = score["low"], score["high"]
        interval = "" if low is None or high is None else f", 95 % interval {low:.3f} to {high:.3f}"
        repeats = f", {found['repeats']} answers each" if found["repeats"] > 1 else ""
        better = "higher" if found["higher_is_better"] else "lower"
        yield (
            f"{name}: {metric} {score['value']:.3f}{interval} over {found['n']} items{repeats} ({better} is better; "
            f"measures {'the decoding' if found['measures'] == 'decoding' else 'the model only'})"
        )
        if found["truncated"]:
            yield f"{name}: {percent(found['truncated'])} of the answers were cut at their length limit"
    if run.at("quality.interrupted"):
        yield "its quality was interrupted: the numbers are of the items that were done"
