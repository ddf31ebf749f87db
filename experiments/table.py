"""What a run found, for people: a table, the best and the worst prompt with their reason, and notes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from . import metrics
from .measure import Sample

_MEANING = {
    "exact": "token for token what plain decoding emits",
    "near-tie": "differs only where two tokens tie within rounding",
    "same law": "the same distribution as plain sampling, not the same tokens",
    "lossy": "another distribution by design; see its quality",
    "broken": "NOT the target's output",
}
_STYLE = {"exact": "green", "near-tie": "yellow", "same law": "green", "lossy": "yellow", "broken": "bold red"}


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def interval(found: Mapping[str, Any] | None, unit: str = "×") -> str:
    """A value with its 95 % interval, or with the reason why there is none."""
    if found is None or found["value"] is None:
        return "–"
    if found["low"] is None:
        return f"{found['value']:.2f}{unit} (n = {found['n']}: no interval)"
    return f"{found['value']:.2f}{unit} [{found['low']:.2f}, {found['high']:.2f}]"


def show(result: Mapping[str, Any], samples: Sequence[Sample], title: str, device: str, console: Console) -> None:
    """Print it all."""
    console.print(Group(*_parts(result, samples, title, device)))


def _parts(r: Mapping[str, Any], samples: Sequence[Sample], title: str, device: str) -> list[Any]:
    p, verdict, baseline = r["provenance"], r["exactness"]["verdict"], r["baseline"]["kind"]
    parts: list[Any] = [
        Text(title, style="bold"),
        Text(f"{device} · {p['dtype']} · {p['threads']} threads · {r['prompts']} prompts · baseline: {baseline}"),
        _comparison(r),
    ]
    line = Text("output: ")
    line.append(verdict, style=_STYLE[verdict])
    line.append(
        f" – {_MEANING[verdict]} ({r['exactness']['identical']} of {r['exactness']['prompts']} prompts identical)"
    )
    parts.append(line)
    parts += [
        Text(f"  {d['id']}: differs at token {d['position']}, gap {number(d['gap'], 6)}")
        for d in r["exactness"]["divergences"][:5]
    ]
    parts.append(_categories(r))
    if r["compare_hf"]:
        parts.append(_transformers(r))
    parts += [Text(line) for line in reasons(samples)]
    if r["profile"]:
        parts.append(_profile(r["profile"]))
        parts += [Text(line) for line in r["profile"]["explained"]]
    parts += [Text(f"note: {w}", style="yellow") for w in r["warnings"]]
    return parts


def _comparison(r: Mapping[str, Any]) -> Table:
    base, ours, memory, decode = r["baseline"], r["strategy"], r["memory"], r["decode"] or {}
    table = Table(box=None, pad_edge=False)
    for name in ("", "plain", "strategy"):
        table.add_column(name, justify="left" if not name else "right")
    rows = [
        ("speedup (decode, 95 % interval)", "1.00×", interval(r["speedup"])),
        ("end-to-end speedup", "1.00×", interval(r["end_to_end_speedup"])),
        ("predicted speedup", "", number(r["predicted_speedup"], 2, "×") if r["predicted_speedup"] else None),
        ("tokens per step (τ)", "1.00", number(ours["tokens_per_step"])),
        ("acceptance", "", percent(ours["acceptance_rate"])),
        ("tokens per second", number(base["tokens_per_second"], 1), number(ours["tokens_per_second"], 1)),
        ("time to first token", seconds(base["ttft_s"]), seconds(ours["ttft_s"])),
        ("time per output token", seconds(base["tpot_s"]), seconds(ours["tpot_s"])),
        ("memory bandwidth used (MBU)", percent(decode.get("mbu_baseline")), percent(decode.get("mbu"))),
        (
            "weights / KV / process",
            "",
            " / ".join(size(memory[k]) for k in ("weights_bytes", "kv_bytes", "peak_bytes")),
        ),
        ("time in draft / verify / accept / commit / other", "", _shares(ours["time_share"])),
    ]
    for name, plain, strategy in rows:
        if strategy not in (None, "–"):
            table.add_row(name, plain, strategy)
    return table


def _shares(share: Mapping[str, float | None] | None) -> str | None:
    if share is None or share["verify"] is None:
        return None
    return " / ".join(percent(share[phase]) for phase in ("draft", "verify", "accept", "commit", "other"))


def _categories(r: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("category", "n", "speedup", "tokens/step", "acceptance"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for name, row in r["by_category"].items():
        table.add_row(
            name,
            str(row["n"]),
            interval(row["speedup"]),
            number(row["tokens_per_step"]),
            percent(row["acceptance_rate"]),
        )
    return table


def _transformers(r: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("transformers generate", "tokens/s", "time per token", "ours ÷ it", "identical"):
        table.add_column(name, justify="left" if name.startswith("tr") else "right")
    ours = r["strategy"]["tokens_per_second"]
    for mode, row in r["compare_hf"].items():
        rate = row["tokens_per_second"]
        times = number(ours / rate, 2, "×") if ours and rate else "–"
        table.add_row(mode, number(rate, 1), seconds(row["tpot_s"]), times, f"{row['identical']}/{row['prompts']}")
    return table


def _profile(profile: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"rows in one forward, {profile['context']} tokens of context")
    for k in profile["seconds"]:
        table.add_column(str(k), justify="right")
    first = next(iter(profile["seconds"].values()))
    table.add_row("T(k)", *(seconds(s) for s in profile["seconds"].values()))
    table.add_row("T(k) ÷ T(1)", *(f"{s / first:.2f}" for s in profile["seconds"].values()))
    return table


def reasons(samples: Sequence[Sample]) -> list[str]:
    """The prompt that won most and the one that lost most, with what made the difference."""
    rated = []
    for s in samples:
        if s.baseline and s.strategy and s.baseline.delivered and len(s.baseline.tokens) > 1:
            base, ours = metrics.tpot(s.baseline), metrics.tpot(s.strategy)
            if base and ours:
                rated.append((base / ours, s))
    if len(rated) < 2:
        return []
    rated.sort(key=lambda pair: pair[0])
    (low, worst), (high, best) = rated[0], rated[-1]
    return [
        f"best:  {best.id} ({best.category}) {high:.2f}×: {_why(best)}",
        f"worst: {worst.id} ({worst.category}) {low:.2f}×: {_why(worst)}",
    ]


def _why(s: Sample) -> str:
    assert s.baseline is not None
    assert s.strategy is not None
    steps = s.strategy.steps
    found = metrics.acceptance(steps)
    if not any(step.depth for step in steps):
        return "nothing was drafted, so every step costs what plain decoding costs, and the search for drafts besides"
    per_step = metrics.ratio(sum(x.total_s for x in steps), len(steps)) or 0.0
    plain = metrics.tpot(s.baseline) or per_step
    text = (
        f"{percent(found['acceptance_rate'])} of drafts was kept, {number(found['tokens_per_step'])} tokens a step "
        f"against a step that costs {per_step / plain:.2f}× a plain one"
    )
    idle = found["steps_without_draft"]
    return text + (f" ({idle} of {len(steps)} steps had no draft)" if idle else "")
