"""What a race came to, for people, in 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..format import BUSY, counted, interval, number, percent, seconds, size
from ..table import columns

FILE = "peers.txt"  # that tables are kept in

_NAME = 24  # characters of a contender's name
_WHO = 40  # of two


def show(found: Mapping[str, Any], console: Console) -> None:
    console.print(Group(*_parts(found)))


def _parts(found: Mapping[str, Any]) -> Iterator[Any]:
    yield Text(f"{found['model']} beside its peers, {found['task']}", style="bold")
    yield Text(f"{found['device']} · {found['dtype']} · {counted(found['prompts'], 'prompt')}")
    yield Text()
    yield _contenders(found["contenders"])
    yield from map(Text, _outputs(found["contenders"]))
    if found["ratios"]:
        yield Text()
        yield _ratios(found["ratios"])
    yield Text()
    yield _forwards(found)
    yield Text()
    yield from map(Text, _memory(found))
    if found["bars"]:
        yield Text()
        yield _bars(found["bars"], busy=found["others_cores"] > BUSY)
    yield from (Text(f"{name}: {one['settings']}", style="dim") for name, one in found["contenders"].items())
    yield from (Text(f"note: {note}", style="yellow") for note in found["notes"])


def _contenders(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = columns("", "tokens/s", "a token", "τ", "ttft", "prefill/s", "output")
    for name, one in found.items():
        broken = one["output"]["verdict"] == "broken"
        table.add_row(
            Text(_short(name)),
            number(one["tokens_per_second"], 1),
            seconds(one["tpot_s"]),
            number(one["tokens_per_step"]),
            seconds(one["ttft_s"]),
            number(one["prefill_tokens_per_second"], 0),
            Text(one["output"]["verdict"] or _same(one), style="bold red" if broken else ""),
        )
    return table


def _same(one: Mapping[str, Any]) -> str:
    output = one["output"]
    return "its own" if output["as"] is None else f"{output['identical']}/{output['prompts']} same"


def _outputs(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Why a row has no speed, and where outputs differ from what they are held against."""
    for name, one in found.items():
        output = one["output"]
        if output["verdict"] == "broken":
            first = output["left"][0] if output["left"] else {"id": "?", "position": "?"}
            yield (
                f"{name} has no speed: its output is NOT the plain decoder's ({output['identical']} of "
                f"{output['prompts']} identical; first on {first['id']}, at token {first['position']})"
            )
        elif output["as"] is not None and output["identical"] < output["prompts"]:
            yield f"{name}: {output['identical']} of {output['prompts']} outputs are those of {output['as']}"


def _ratios(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    table = columns("ours", "against", "per token [95 %]", "ttft")
    for name, peers in found.items():
        for i, (peer, ratio) in enumerate(peers.items()):
            first = Text(_short(name) if not i else "")
            table.add_row(first, Text(_short(peer)), interval(ratio["decode"]), _times(ratio["prefill"]["value"]))
    return table


def _times(value: float | None) -> str:
    return number(value, 2, "×")


def _forwards(found: Mapping[str, Any]) -> Table:
    rows = list(next(iter(found["forwards"].values()))["seconds"])
    table = columns(f"k rows behind {found['context']} tokens", *(f"T({k})" for k in rows), "÷ T(1)")
    for name, one in found["forwards"].items():
        spent = one["seconds"]
        grown = number(spent[rows[-1]] / spent[1]) if spent[1] and spent[rows[-1]] else "–"
        table.add_row(Text(_short(name)), *(seconds(spent[k]) for k in rows), grown)
    return table


def _memory(found: Mapping[str, Any]) -> Iterator[str]:
    bandwidth = found["bandwidth"]
    measured = bandwidth["measured"]
    yield (
        f"read bandwidth {bandwidth['median'] / 1e9:.1f} GB/s, the median of {len(measured)} "
        f"({min(measured) / 1e9:.1f} to {max(measured) / 1e9:.1f})"
    )
    for name, share in bandwidth["share"].items():
        outside = found["outside"][name]
        yield (
            f"{name} uses {percent(share['value'])} of it; {percent(outside['share']['value'])} of its time is outside "
            f"the model's arithmetic; forwards alone, timed beside it, take {percent(outside['bare'])} of its time"
        )
    for name, one in found["resident"].items():
        yield (
            f"{name}: at most {size(one['peak'])} resident, {size(one['before'])} of it before any weight; weights and "
            f"KV are {size(one['weights'] + one['kv'])}"
        )


def _bars(found: Sequence[Mapping[str, Any]], busy: bool) -> Table:
    table = columns("bar", "measured [95 %]", "must be", "")
    for bar in found:
        met = {None: "–", True: "met", False: "missed"}[bar["met"]] + (" (busy)" if busy else "")
        style = {None: "", True: "green", False: "yellow"}[bar["met"]]
        what = f"{bar['what']} (stretch)" if bar["stretch"] else bar["what"]
        who = f"  {bar['ours']}" if bar["theirs"] is None else f"  {bar['ours']} ÷ {bar['theirs']}"
        bound = f"{bar['sign']} {_value(bar['bound'], bar['unit'])}"
        table.add_row(Text(what), _measured(bar), bound, Text(met, style=style))
        table.add_row(Text(_short(who, _WHO), style="dim"))
    return table


def _measured(bar: Mapping[str, Any]) -> str:
    found, unit = bar["value"], bar["unit"]
    if unit == "×" or found["value"] is None:
        return interval(found)
    value = _value(found["value"], unit)
    return value if found["low"] is None else f"{value} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def _value(value: float, unit: str) -> str:
    return percent(value) if unit == "%" else f"{value:g}×"


def _short(name: str, most: int = _NAME) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
