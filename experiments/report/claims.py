"""What the literature claims, beside what runs here measured, or what follows from them by arithmetic that is stated.

`decodelab run experiment=claims` measures what is needed; any other runs count as well. A claim about a part that is
not there yet says what it needs.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any, Literal

from ...decoding import cost
from ..format import BUSY, counted, percent
from .load import Run
from .log import Log, seconds_of
from .rows import drafter, model, task

Kind = Literal["measured", "predicted", "not yet"]

_BLOCK = 16  # tokens of a page, vLLM's default
# The pair of arXiv:2302.01318, and two of NVIDIA's H200 (its data sheet), which hold both in bfloat16.
_TARGET, _DRAFT, _LENGTH, _BYTES = 70e9, 4e9, 4, 2
_READ, _FLOPS, _DEVICES = 2 * 4.8e12, 2 * 989e12, "2 × H200 (9.6 TB/s and 1,978 TFLOP/s in bfloat16 together)"
# Which prompts a claim is about, by category.
_RETRIEVAL, _CODE = re.compile(r"passage|rag\b|retriev|summar"), re.compile(r"cod(e|ing)|edit")


@dataclass(frozen=True, slots=True)
class Claim:
    """`here`: the value measured or predicted, or what is needed for one; `how`: from what."""

    text: str
    source: str
    claimed: str
    here: str
    kind: Kind
    how: str


def claims(runs: Sequence[Run]) -> list[Claim]:
    """Each once, from the runs that say most about it."""
    sound = [r for r in runs if r.at("status") == "done" and r.at("strategy") is not None and not r.at("replay")]
    return [make(sound) for make in _CLAIMS]


# --- a draft model


def _draft_model(runs: Sequence[Run]) -> Claim:
    """Both models read their weights once a forward; drafting and verifying follow one another."""
    step = partial(_roofline, _TARGET)
    profile = cost.Profile(0, {k: step(k) for k in (1, _LENGTH + 1)})
    drafting = cost.DraftCost(0.0, _roofline(_DRAFT, 1), 0.0)
    speedup = partial(cost.speedup, gamma=_LENGTH, profile=profile, cost=drafting)
    needed = next(a / 100 for a in range(101) if speedup(a / 100) >= 2)
    how = (
        f"a forward takes as long as reading its weights in bfloat16 on {_DEVICES}: {1e3 * step(1):.1f} ms and "
        f"{1e3 * drafting.token_s:.2f} ms; {_LENGTH} tokens a draft, KV and launches left out"
    )
    pair = _most(run for run in runs if drafter(run) == "draft_model" and _alpha(run) is not None)
    alpha = None if pair is None else _alpha(pair)
    if pair is None or alpha is None:
        here = f"halved where a drafted token is kept with a chance of {needed:.2f} or more"
        how += "; no pair of models was measured here for that chance: drafting=draft_model"
    else:
        now = speedup(alpha)
        here = f"{percent(1 - 1 / now)} less ({now:.2f}×) at α = {alpha:.2f}; halved from {needed:.2f} on"
        how += f"; α is that of {_pair(pair)} on {_where(pair)}, assumed to hold for the large pair"
    text = "a 4B draft for a 70B target cuts latency by more than half"
    return Claim(text, "arXiv:2302.01318 (2 to 2.5× on Chinchilla)", "> 50 % less", here, "predicted", how)


def _roofline(parameters: float, rows: int) -> float:
    """Seconds of a forward: the longer of reading the weights and of the products."""
    return max(parameters * _BYTES / _READ, 2 * parameters * rows / _FLOPS)


def _alpha(run: Run) -> float | None:
    return cost.acceptance_probability(Log(run).steps)


def _pair(run: Run) -> str:
    name, path = (run.at(f"config.drafting.model.{key}") for key in ("name", "path"))
    return f"{name or str(path).rstrip('/').rpartition('/')[2]} for {model(run)}"


# --- copies


def _copying(runs: Sequence[Run]) -> Claim:
    tests: dict[str, Callable[[dict[str, Any]], bool]] = {
        "retrieval": lambda s: bool(_RETRIEVAL.search(s["category"])),
        "multi-turn": lambda s: bool(re.search(r"/turn([2-9]|\d\d)", s["id"])),
        "code": lambda s: bool(_CODE.search(s["category"])),
    }
    told, used = [], dict[str, Run]()
    for what, test in tests.items():
        for name in ("reference", "prompt_lookup"):
            run = _most(
                r for r in runs if drafter(r) == name and r.at("config.batch") == 1 and r.number("speedup.value")
            )
            found = [] if run is None else [s for s in Log(run).samples if test(s)]
            if run is not None and (value := _speedup(found)) is not None:
                told.append(f"{what} {value:.2f}× ({name}, n={len(found)})")
                used[name] = run
    claimed = ("copying from a reference gives about 2× on retrieval, multi-turn and code", "arXiv:2304.04487", "≈ 2×")
    if not told:
        need = "needs drafting=reference or prompt_lookup, timed, on prompts of these kinds"
        return Claim(*claimed, need, "not yet", "")
    where = "; ".join(dict.fromkeys(f"{model(run)}, {_where(run)}" for run in used.values()))
    return Claim(*claimed, "; ".join(told), "measured", f"decode seconds per token, baseline ÷ strategy: {where}")


def _speedup(samples: Sequence[dict[str, Any]]) -> float | None:
    """As in a run's row: a ratio of sums."""
    sums = []
    for side in ("baseline", "strategy"):
        some = [(spent, s[side]) for s in samples if (spent := seconds_of(s[side])) and len(s[side]["tokens"]) > 1]
        sums.append((sum(spent for spent, _ in some), sum(len(g["tokens"]) - 1 for _, g in some)))
    (plain_s, plain_n), (ours_s, ours_n) = sums
    return plain_s * ours_n / (plain_n * ours_s) if plain_n and ours_s else None


# --- what text is predictable


def _predictable(runs: Sequence[Run]) -> Claim:
    claimed = (
        "predictable text accepts long drafts, surprising text few",
        "arXiv:2211.17192 (α of 0.5 to 0.9 by task)",
        "by how predictable the text is",
    )
    for name in ("draft_model", "prompt_lookup"):
        run = _most(r for r in runs if drafter(r) == name and len(_kept(r)) > 1)
        if run is not None:
            kept = _kept(run)
            order = sorted(kept, key=lambda category: -kept[category])
            here = f"{kept[order[0]]:.1f} tokens kept a draft on {order[0]}, {kept[order[-1]]:.1f} on {order[-1]}"
            how = f"accepted tokens a step that drafted, by category: {name}, {model(run)}, {_where(run)}"
            return Claim(*claimed, here, "measured", how)
    need = "needs drafting=draft_model or prompt_lookup on prompts of two categories or more"
    return Claim(*claimed, need, "not yet", "")


def _kept(run: Run) -> dict[str, float]:
    """Tokens kept of a draft, by category."""
    log = Log(run)
    category = {s["id"]: s["category"] for s in log.samples}
    found: dict[str, list[int]] = {}
    for row in log.rows("strategy"):
        if row["depth"] and row["id"] in category:
            found.setdefault(category[row["id"]], []).append(row["accepted"])
    return {name: sum(counts) / len(counts) for name, counts in found.items()}


# --- memory and prompts


def _caching(runs: Sequence[Run]) -> Claim:
    claimed = (
        "prompt caching saves up to 75 % of latency",
        "providers' documents (up to 80 % and 85 % for long prompts)",
        "up to 75 %",
    )
    shares = [
        (s["baseline"]["ttft_s"] / s["baseline"]["latency_s"], s["prompt_tokens"], len(s["baseline"]["tokens"]), run)
        for run in runs
        if run.at("config.batch") == 1
        for s in Log(run).samples
        if s["baseline"]["latency_s"] and s["baseline"]["ttft_s"]
    ]
    if not shares:
        return Claim(*claimed, "needs a timed run", "not yet", "")
    top, prompt, answer, run = max(shares, key=lambda share: share[0])
    middle = sorted(share for share, *_ in shares)[len(shares) // 2]
    here = (
        f"up to {percent(top)} (a prompt of {prompt} tokens, an answer of {answer}); {percent(middle)} for the median"
    )
    how = "time to first token ÷ latency of plain decoding, as if all of the prompt were cached: "
    how += f"{model(run)}, {_where(run)}"
    return Claim(*claimed, here, "predicted", how)


def _paging(runs: Sequence[Run]) -> Claim:
    claimed = ("paging brings KV waste to a few percent", "arXiv:2309.06180", "< 4 %")
    run = _most(runs)
    samples = [] if run is None else Log(run).samples
    lengths = [s["prompt_tokens"] + len(s["strategy"]["tokens"]) - 1 for s in samples]  # the last is not cached
    limit = None if run is None else run.number("config.task.max_new_tokens")
    if run is None or not lengths or limit is None:
        return Claim(*claimed, "needs a run", "not yet", "")
    paged = sum(-(-n // _BLOCK) * _BLOCK for n in lengths)
    reserved = (max(s["prompt_tokens"] for s in samples) + limit) * len(samples)
    waste, elsewhere = 100 * (1 - sum(lengths) / paged), percent(1 - sum(lengths) / reserved)
    here = f"{waste:.1f} % in pages, {elsewhere} in slots for the longest"
    how = (
        f"arithmetic on the lengths of {_where(run)}: pages of {_BLOCK} tokens filled but the last, against a slot a "
        "sequence that holds the longest prompt and the most tokens; no paged cache was run"
    )
    return Claim(*claimed, here, "predicted", how)


# --- parts that are not there yet


def _medusa(runs: Sequence[Run]) -> Claim:
    claimed = ("Medusa gives about 1.9×", "NVIDIA, Llama 3.1 405B on HGX H200 (1.5× on 70B)", "≈ 1.9×")
    run = _most(r for r in runs if drafter(r) == "medusa" and r.number("speedup.value"))
    if run is None:
        return Claim(*claimed, "needs trained heads and drafting=medusa", "not yet", "")
    return Claim(*claimed, f"{run.number('speedup.value'):.2f}×", "measured", f"{model(run)}, {_where(run)}")


def _eight_bits(runs: Sequence[Run]) -> Claim:
    need = "needs an 8-bit model judged against its original (evaluate against=DIR)"
    source = "arXiv:2208.07339; arXiv:2411.02355 (1 to 3 % worse where activations are int8 too)"
    return Claim("int8 is often lossless", source, "no loss", need, "not yet", "")


def _four_bits(runs: Sequence[Run]) -> Claim:
    need = "needs a 4-bit model judged against its original, on mathematics as well (evaluate against=DIR)"
    text = "4-bit needs care, and degrades in mathematics and edge cases"
    return Claim(text, "arXiv:2501.03035", "11 % worse on average in mathematics, 32 % at most", need, "not yet", "")


_CLAIMS: Sequence[Callable[[Sequence[Run]], Claim]] = (
    _draft_model, _copying, _medusa, _eight_bits, _four_bits, _predictable, _caching, _paging,
)  # fmt: skip


def _most(runs: Iterable[Run]) -> Run | None:
    """The run over the most prompts, the latest of them."""
    return max(runs, key=lambda r: (r.number("prompts") or 0, str(r.at("provenance.started_at"))), default=None)


def _where(run: Run) -> str:
    busy = ", while busy" if (run.number("provenance.load_before") or 0.0) > BUSY else ""
    return f"{task(run)} ({counted(run.at('prompts') or 0, 'prompt')}, {run.at('provenance.device')}{busy})"


# --- as text


def markdown(found: Sequence[Claim]) -> str:
    """A table, and below it what each value comes from."""
    lines = ["| claim | source | claimed | here | |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(map(_cell, (c.text, c.source, c.claimed, c.here, c.kind)))} |" for c in found]
    notes = [f"- {_cell(c.text)}: {c.how}" for c in found if c.how]
    return "\n".join([*lines, "", *notes, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def text(found: Sequence[Claim], width: int) -> list[str]:
    """Lines for a terminal."""
    lines = []
    for c in found:
        lines += ["", c.text]
        for name, said in (("claimed", f"{c.claimed}: {c.source}"), (c.kind, c.here), ("", c.how)):
            lines += wrap(f"  {name:10} {said}", width, subsequent_indent=" " * 13) if said else []
    return lines[1:]
