"""Numbers as people read them. What is not known is –."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

BUSY = 0.5  # cores that others keep busy: more, and what is timed is noise
NOISY = "other programs use the cores: speeds are noisy and MBU is off; run it again when quiet"
BUSY_MARK = "‡"  # behind a row whose speed is of such a run
UNTRAINED = (
    "keys and values are converted from weights that were trained for others, which costs quality: train=kv trains "
    "them, and no speed of this run stands without its quality"
)
CHANGED = (
    "attention is not the model's own, so that the target itself is another one: output and speed are held against "
    "plain decoding on the same layout, and what it loses against attention=native was not measured: add quality.tasks "
    "to both"
)
TRAINED = (
    "the model was trained for another layout of keys and values than its original's (train=kv), and what that cost "
    "was not measured: add quality.tasks to both"
)
UNJUDGED_MARK = "§"  # behind a row of such a target, without its quality
SIGNIFICANT = 0.05  # a p that is told
FEW_TOKENS = 32  # of gold answers, from which on a KL is one
_LISTED = 3  # keys of one group
_POSITIONS = 4  # of a draft, that are told


def is_busy(result: Mapping[str, Any]) -> bool:
    """Whether the speed in a result.json is that of a machine that did something else as well."""
    return (result.get("speedup") or {}).get("value") is not None and not result.get("replay") and was_busy(result)


def was_busy(result: Mapping[str, Any]) -> bool:
    """Whether the machine did something else when a result.json came to be."""
    load = (result.get("provenance") or {}).get("load_before")
    return NOISY in (result.get("warnings") or ()) or (isinstance(load, int | float) and load > BUSY)


def is_unjudged(result: Mapping[str, Any]) -> bool:
    """Whether the target of a result.json keeps keys and values as its model does not, at a cost that is not told."""
    told = result.get("warnings") or ()
    return any(text in told for text in (UNTRAINED, CHANGED, TRAINED)) and not (result.get("quality") or {}).get(
        "tasks"
    )


def marks(result: Mapping[str, Any]) -> str:
    """Behind a row of a table."""
    return BUSY_MARK * is_busy(result) + UNJUDGED_MARK * is_unjudged(result)


def mark_notes(results: Sequence[Mapping[str, Any]], what: str) -> Iterator[str]:
    """What the marks in one table say; `what` its rows are, in the plural."""
    if noisy := sum(map(is_busy, results)):
        yield f"{BUSY_MARK} {noisy} of {len(results)} {what} ran on a busy machine: their speeds are noisy"
    if unjudged := sum(map(is_unjudged, results)):
        yield (
            f"{UNJUDGED_MARK} {unjudged} of {len(results)} {what} keep keys and values as their model does not, and "
            "have no quality beside their speed: give quality.tasks"
        )


def attention_name(settings: Mapping[str, Any]) -> str:
    """The option of the group `attention`, by its class and keys in a resolved configuration."""
    kind = str(settings.get("_target_")).rpartition(".")[2]
    named = {"LowBits": f"kv_int{settings.get('bits')}", "Table": "layout", "CrossLayer": "cross_layer"}
    return (named | {"SinkWindow": "sink_window"}).get(kind, kind.lower())


def counted(n: int, what: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def chance(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 else "≤ 0.001"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def share(value: float) -> str:
    """Of what is near to all: with as many digits as tell it from all."""
    return "100 %" if value == 1 else f"{100 * min(value, 0.9999):.{1 if value < 0.995 else 2}f} %"


def difference(effect: Mapping[str, Any]) -> str:
    """An effect of `quality.against` with its 95 % interval."""
    sign, unit = ("", "×") if effect["effect"] == "ratio" else ("+", "")
    value = f"{effect['value']:{sign}.3f}{unit}"
    bounds = "" if effect["low"] is None else f" [{effect['low']:{sign}.3f}, {effect['high']:{sign}.3f}]"
    return f"{value}{bounds}".replace("-", "−")


def folded(keys: Iterable[str]) -> list[str]:
    """Dotted keys, where more than `_LISTED` are of one group its name alone."""
    listed = list(keys)
    groups = Counter(key.partition(".")[0] for key in listed)
    many = {group for group, n in groups.items() if n > _LISTED}
    return list(dict.fromkeys(group if (group := key.partition(".")[0]) in many else key for key in listed))


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes = round(seconds / 60)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def size(value: int | float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def positions(rates: Sequence[Mapping[str, Any]]) -> str | None:
    """What is kept at a few positions of a draft, the first and the last among them; None for fewer than two."""
    told = [(i, p["rate"]) for i, p in enumerate(rates, 1) if p["rate"] is not None]
    if len(told) < 2:
        return None
    every = max(1, (len(told) - 1) // (_POSITIONS - 1))
    picked = dict([*told[::every][: _POSITIONS - 1], told[-1]])
    listed = ", ".join(f"{i}: {percent(rate)}" for i, rate in picked.items())
    return f"kept at position {listed} (of the steps that drafted)"


def sources(found: Mapping[str, Mapping[str, Any]] | None, steps: int) -> str | None:
    """What each source of drafts brought, by `metrics.by_source`; None for fewer than two. `steps`: of the run."""
    if found is None or len(found) < 2:
        return None
    several = sum(row["accepted"] > 0 for row in found.values()) > 1
    return f"kept by source, in {counted(steps, 'step')}: " + "; ".join(
        _source(name, row, several) for name, row in found.items()
    )


def _source(name: str, row: Mapping[str, Any], several: bool) -> str:
    if row["drafted"] == 0:
        return f"{name} drafted nothing"
    drafted = "" if row["drafted"] is None else f" of {row['drafted']} drafted in {row['steps']}"
    return f"{name} {row['accepted']}{drafted}" + (f" ({row['alone']} it alone)" if several and row["alone"] else "")


def interval(found: Mapping[str, Any]) -> str:
    """A speedup with its 95 % interval; with n where there are too few prompts for one."""
    if found["value"] is None:
        return "–"
    if found["low"] is None or found["high"] is None:
        return f"{found['value']:.2f}× (n={found['n']})"
    return f"{found['value']:.2f}× [{found['low']:.2f}, {found['high']:.2f}]"


def few_tokens(found: Mapping[str, Any]) -> str | None:
    """Of `quality.divergence`: the tasks whose KL says next to nothing."""
    few = {name: one["tokens"] for name, one in found["tasks"].items() if one["tokens"] < FEW_TOKENS}
    if not few:
        return None
    listed = ", ".join(f"{name} ({n})" for name, n in few.items())
    return f"KL means little of fewer than {FEW_TOKENS} tokens of gold answers: {listed}"


def diverged(found: Mapping[str, Any]) -> Iterator[str]:
    """`quality.divergence` in words."""
    kl, same = found["kl"], found["agreement"]
    floor = found["floor"]
    noise = "" if floor is None else f"; {noise_floor(floor)}"
    yield (
        f"KL to {found['reference']['folder']} {kl['value']:.2g} a token over {found['tokens']} tokens of gold "
        f"answers, the same token likeliest in {share(same['value'])}{noise}"
    )
    if (few := few_tokens(found)) is not None:
        yield few
    for row in found["where"]:
        if row["p_holm"] < SIGNIFICANT:
            yield (
                f"by {row['by']}, {row['name']} has {percent(row['share'])} of the KL in {percent(row['size'])} of the "
                f"tokens (p {chance(row['p_holm'])})"
            )


def noise_floor(floor: Mapping[str, Any]) -> str:
    """What rounding does to the reference's own weights."""
    other, mine = floor["dtypes"]
    return (
        f"rounding alone: KL {floor['kl']:.2g}, {share(floor['agreement'])} ({other} against {mine} of the "
        "reference's own weights)"
    )
