"""The pictures of a report: what to look at, from the same rows as its tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from statistics import median
from typing import TYPE_CHECKING, Any

from ..format import BUSY_MARK, is_busy, size
from .drawing import (
    LIGHT,
    NOTE,
    PHASES,
    ROW,
    SERIES,
    WIDEST,
    Picture,
    at_right,
    canvas,
    grid_lines,
    legend,
    legend_of_dots,
    mark_dot,
    name_rows,
    numbered,
    plain_ticks,
    shorten,
)
from .load import number_at
from .rows import Group, Measure, Row, Value, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 50  # rows of a picture; the table has all
PANELS = 8  # tasks of a picture
ACROSS = 9  # kinds of prompt side by side: more stand below
TRACED = 6  # lines of a picture that have a colour and a name
LEAST = 5  # drafts that a share is of
MARKS = ("o", "s", "^", "D", "v", "P", "<", ">")  # of quantisers
_BESIDE = ((7, 3, "left"), (-7, 3, "right"), (0, 7, "center"), (0, -13, "center"), (7, -11, "left"), (-7, -11, "right"))
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True, eq=False)
class _Spot:
    """Where a row stands; `label`: instead of the row's."""

    row: Row
    x: float
    y: float
    label: str = ""


def pictures(group: Group, colours: Mapping[str, str], prefix: str = "g") -> Iterator[Picture]:
    """Those that the group has numbers for. `colours`: of the drafters, the same in all pictures of a report; `prefix`:
    of the pictures' names, which no two on a page share."""
    for draw in (speedups, positions, phases, categories, quality, step_costs):
        if (picture := draw(group, colours)) is not None:
            yield replace(picture, name=f"{prefix}-{picture.name}")


# --- the pictures


def speedups(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """A dot and its interval a row, the fastest on top."""
    found = [row for row in group.rows if row.speedup.value is not None]
    if not found:
        return None
    found.sort(key=lambda row: row.speedup.value or 0.0, reverse=True)
    shown = found[:SHOWN]
    with canvas(0.6 + ROW * len(shown)) as (figure, axes):
        highest = max(max(row.speedup.high or 0.0, row.speedup.value or 0.0) for row in shown)
        lowest = min(min(row.speedup.low or 1e9, row.speedup.value or 1e9) for row in shown)
        if highest > 8 * max(lowest, 1e-9):
            axes.set_xscale("log")
            plain_ticks(axes.xaxis)
        else:
            axes.set_xlim(0, highest * 1.05)
        axes.axvline(1, color=LIGHT["text"], linewidth=0.9)
        for y, row in numbered(shown):
            v, colour = row.speedup, _colour(row, colours)
            if v.low is not None and v.high is not None:
                axes.plot([v.low, v.high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt", alpha=0.75)
            mark_dot(axes, v.value or 0.0, y, colour, hollow=v.low is None)
            predicted = row.run.number("predicted_speedup")
            if predicted is not None:
                axes.plot([predicted], [y], marker="|", markersize=9, markeredgewidth=1.6, color=LIGHT["muted"])
            at_right(axes, y, _times(v.value) if v.low is not None else f"{_times(v.value)} (n={v.n})")
        name_rows(axes, shown)
        grid_lines(axes, "x")
        axes.set_xlabel("speedup over plain decoding")
    said = [
        "Decode seconds per token, plain ÷ strategy, with 95 % intervals over prompts; right of the line is faster."
    ]
    if any(row.speedup.low is None for row in shown):
        said.append("A hollow dot: too few prompts for an interval.")
    if any(row.run.number("predicted_speedup") is not None for row in shown):
        said.append("A grey tick: the speedup predicted from what steps cost.")
    return Picture("speedup", "Speedup", " ".join(said) + _more(found), figure)


def positions(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """The chance that a drafted token is kept, by its place in the draft."""
    found = [(row, curve) for row in group.rows if len(curve := _curve(row)) > 0]
    if not found:
        return None
    traced = found[:TRACED]
    styles, own = _styles([row for row, _ in traced]), [_colour(row, colours) for row, _ in traced]
    if len(set(own)) < len(own):  # rows of one drafter
        own = [LIGHT[name] for name in SERIES[: len(own)]]
    with canvas(5.0, rows=2, sharex=True) as (figure, panels):
        for axes, name, title in zip(
            panels, ("rate", "conditional"), ("kept up to here", "kept, where all before it were"), strict=True
        ):
            ends: list[tuple[float, float, str, str]] = []
            for _, curve in found[TRACED:]:
                _line(axes, curve, name, LIGHT["grid"], "-")
            for (row, curve), style, colour in zip(traced, styles, own, strict=True):
                if (end := _line(axes, curve, name, colour, style)) is not None:
                    ends.append((*end, shorten(row.label, 36), colour))
            axes.set_ylim(0, 1.03)
            axes.set_title(title, loc="left", color=LIGHT["text"])
            axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
            grid_lines(axes, "y")
            axes.set_xlim(0.7, max(len(curve) for _, curve in found) + 0.3)
            _name_lines(axes, ends)
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel("position in the draft")
    rest = f" Grey: the {len(found) - TRACED} rows ranked lower." if len(found) > TRACED else ""
    about = (
        "Above: of all steps that drafted, the share that kept at least so many tokens. Below: of the drafts that came "
        f"so far, the share whose next token was kept (of {LEAST} drafts or more).{rest}"
    )
    return Picture("positions", "Acceptance by position", about, figure)


def phases(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """Milliseconds a token by phase; the baseline's beside them."""
    found = [
        row
        for row in group.rows
        if row.run.number("strategy.tpot_s") and row.run.number("strategy.time_share.verify") is not None
    ]
    if not found:
        return None
    shown = found[:SHOWN]
    with canvas(0.9 + ROW * len(shown)) as (figure, axes):
        for y, row in numbered(shown):
            whole, left = 1e3 * (row.run.number("strategy.tpot_s") or 0.0), 0.0
            for phase in PHASES:
                width = whole * (row.run.number(f"strategy.time_share.{phase}") or 0.0)
                axes.barh(y, width, 0.62, left=left, color=LIGHT[phase], linewidth=0)
                left += width
            plain = row.run.number("baseline.tpot_s")
            if plain is not None:
                axes.plot([1e3 * plain] * 2, [y - 0.42, y + 0.42], color=LIGHT["text"], linewidth=1.4)
            at_right(axes, y, f"{whole:.3g} ms")
        name_rows(axes, shown)
        axes.set_xlim(0, None)
        grid_lines(axes, "x")
        axes.set_axisbelow(True)
        axes.set_xlabel("milliseconds a token")
        legend(figure, [(phase, LIGHT[phase]) for phase in PHASES])
    about = "What a token costs after the first, by what the time went into, and what it costs plain decoding there."
    return Picture("phases", "Time per phase", about + _more(found), figure)


def categories(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """Rows by kinds of prompt, coloured by speedup (by tokens a step where nothing was timed)."""
    names = list(dict.fromkeys(name for row in group.rows for name in _categories(row)))
    found = [row for row in group.rows if _categories(row)]
    if not found or len(names) < 2:
        return None
    shown = found[:SHOWN]
    timed = any(number_at(row, "speedup.value") is not None for r in shown for row in _categories(r).values())
    path = "speedup.value" if timed else "tokens_per_step"
    count = ceil(len(names) / ACROSS)
    across = ceil(len(names) / count)  # evenly, and none so narrow that its numbers touch
    blocks = [names[at : at + across] for at in range(0, len(names), across)]
    slanted = max(len(name) for name in names) * across > 52
    with canvas(count * ((1.25 if slanted else 0.55) + ROW * len(shown)), rows=count) as (figure, grid):
        for axes, block in zip(list(grid) if count > 1 else [grid], blocks, strict=True):
            for y, row in enumerate(shown):
                for x, name in enumerate(block):
                    _cell(axes, x, y, number_at(_categories(row).get(name), path))
            name_rows(axes, shown)
            axes.set_xlim(-0.52, across - 0.48)
            axes.xaxis.tick_top()
            axes.set_xticks(range(len(block)), [shorten(name, 22) for name in block])
            if slanted:
                for label in axes.get_xticklabels():
                    label.set(rotation=30, ha="left", rotation_mode="anchor")
    what = "Speedup" if timed else "Tokens per step"
    about = f"{what} by the kind of prompt; green is more than plain decoding, red is less."
    return Picture("categories", "By category", about + _more(found), figure)


def _cell(axes: "Axes", x: int, y: int, value: float | None) -> None:
    if value is None:
        axes.text(x, y, "–", ha="center", va="center", color=LIGHT["muted"])
        return
    strength = min(1.0, abs(log2(max(value, 1e-3))) / 2)
    colour = LIGHT["good"] if value >= 1 else LIGHT["bad"]
    axes.barh(y, 0.96, 0.9, left=x - 0.48, color=colour, alpha=round(0.06 + 0.6 * strength, 2), linewidth=0)
    axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=LIGHT["text"])


def quality(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """A panel a task: score against speed, and the front that no other row beats in both."""
    found = [(measure, _spots(group, measure)) for measure in group.measures]
    known = [(measure, spots) for measure, spots in found if spots]
    if not known:
        return None
    panels = known[:PANELS]
    columns = min(2, len(panels))
    lines = ceil(len(panels) / columns)
    drawn = [row for row in group.rows if any(row is spot.row for _, spots in panels for spot in spots)]
    forms = sorted({row.form for row in drawn})
    marks = {form: MARKS[i % len(MARKS)] for i, form in enumerate(forms)}
    with canvas(2.7 * lines + 0.2 + 0.25 * (len(forms) > 1), rows=lines, columns=columns) as (figure, grid):
        cells = list(grid) if len(panels) > 1 else [grid]
        for axes, (measure, spots) in zip(cells, panels, strict=False):
            _front(axes, measure, spots, colours, marks, 26 if columns == 2 else WIDEST)
            axes.set_xlabel(group.speed)
        for axes in cells[len(panels) :]:
            axes.set_axis_off()
        if len(forms) > 1:
            drafters = dict.fromkeys(row.drafter for row in drawn)
            named = {"no drafter" if name == "none" else name: LIGHT[colours[name]] for name in drafters}
            legend_of_dots(figure, named, marks)
    about = [
        f"Score against {group.speed}, with 95 % intervals. The line joins the rows that no other beats in both (the "
        "Pareto front); hollow marks are beaten, crosses are broken."
    ]
    if len(forms) > 1:
        about.append("Colours are drafters, shapes are quantisers, named with the bytes of their weights in memory.")
    if busy := sum(is_busy(row.run.result) for row in drawn):
        about.append(f"{BUSY_MARK} {busy} of {len(drawn)} were timed on a busy machine: the front may be noise.")
    if few := sum(row.whole and not row.comparable for row in drawn):
        about.append(f"{few} of {len(drawn)} were timed on too few prompts for an interval.")
    if len(known) > PANELS:
        about.append(f"The first {PANELS} of {len(known)} tasks.")
    return Picture("quality", "Quality against speed", " ".join(about), figure)


def step_costs(group: Group, colours: Mapping[str, str]) -> Picture | None:
    """T(k) ÷ T(1), and where each row stands: tokens a step over rows verified."""
    found = [(row, curve) for row in group.rows if (curve := _costs(row))]
    if not found:
        return None
    with canvas(3.4) as (figure, axes):
        ks = sorted({k for _, curve in found for k in curve})
        for _, curve in found:
            axes.plot(list(curve), list(curve.values()), color=LIGHT["grid"], linewidth=1.2)
        middle = {k: median(curve[k] for _, curve in found if k in curve) for k in ks}
        axes.plot(list(middle), list(middle.values()), color=LIGHT["text"], linewidth=1.8, marker="o", markersize=3)
        # all k − 1 drafted tokens kept, and the target's own
        axes.plot([1, ks[-1]], [1, ks[-1]], color=LIGHT["muted"], linewidth=1, linestyle=STYLES[1])
        spots: list[_Spot] = []
        for row, _ in found[:SHOWN]:
            rows, tau = row.run.number("strategy.rows_verified_per_step"), row.run.number("strategy.tokens_per_step")
            if rows is not None and tau is not None:
                mark_dot(axes, rows, tau, _colour(row, colours))
                spots.append(_Spot(row, rows, tau))
        most = max([*middle.values(), *(spot.y for spot in spots)])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [f"{k:g}" for k in ks])
        axes.set_xlim(0.93, ks[-1] * 1.1)
        axes.set_ylim(0.5 if most < 4 else 0, most * 1.18)
        _name_spots(axes, spots[:TRACED], colours, 30)
        grid_lines(axes, "y")
        axes.set_xlabel("rows k in one forward pass")
        axes.set_ylabel("T(k) ÷ T(1);  tokens a step")
    about = (
        "The line: what a forward pass over k rows costs, in plain steps (the median of the runs; each in grey). The "
        "dots: tokens a step at the rows verified. A dot above the line pays, one below loses; the draft's own cost "
        "comes on top. Dashed: every draft kept, the most there is."
    )
    return Picture("costs", "Cost of a step, T(k)", about, figure)


# --- parts of pictures


def _line(axes: "Axes", curve: Sequence[Any], name: str, colour: str, style: Any) -> tuple[float, float] | None:
    """Where it ends; None where nothing is known."""
    known = [place for place in curve if name != "conditional" or (number_at(place, "reached") or 0) >= LEAST]
    points = [(float(i), y) for i, place in enumerate(known, 1) if (y := number_at(place, name)) is not None]
    if not points:
        return None
    axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.6, marker="o", markersize=2.6)
    return points[-1]


def _name_lines(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right, each at the height of its line's end, moved apart where they would meet."""
    gap, ends = 0.085, sorted(ends, key=lambda end: end[1])
    heights = [y for _, y, _, _ in ends]
    for i in range(1, len(ends)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    highest = 1.0
    for i in reversed(range(len(ends))):  # back from the top, where there was no room
        heights[i] = min(heights[i], highest)
        highest = heights[i] - gap
    right = axes.get_xlim()[1]
    for (x, y, label, colour), height in zip(ends, heights, strict=True):
        axes.plot([x, right], [y, height], color=colour, linewidth=0.6, alpha=0.5)  # leads to the name
        at_right(axes, height, label, colour)


def _spots(group: Group, measure: Measure) -> list[_Spot]:
    """Speed and score of the rows that have both."""
    known = ((row, row.speed, row.scores.get(measure, Value()).value) for row in group.rows)
    return [_Spot(row, x, y) for row, x, y in known if x is not None and y is not None]


def _name_spots(axes: "Axes", spots: Sequence[_Spot], colours: Mapping[str, str], widest: int) -> None:
    """Names beside points; one that has no room is left out."""
    from matplotlib.transforms import Bbox

    figure: Any = axes.figure
    figure.draw_without_rendering()
    dots = [axes.transData.transform((spot.x, spot.y)) for spot in spots]
    taken = [Bbox([dot - 4, dot + 4]) for dot in dots]
    inside = axes.get_window_extent()
    for spot in spots:
        name, at, colour = shorten(spot.label or spot.row.label, widest), (spot.x, spot.y), _colour(spot.row, colours)
        for across, up, side in _BESIDE:
            text = axes.annotate(name, at, xytext=(across, up), ha=side, color=colour, **NOTE)
            box = text.get_window_extent()
            within = box.x0 >= inside.x0 and box.x1 <= inside.x1 + 8 and box.y0 >= inside.y0
            if within and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _front(
    axes: "Axes",
    measure: Measure,
    spots: Sequence[_Spot],
    colours: Mapping[str, str],
    marks: Mapping[str, str],
    widest: int,
) -> None:
    sign = 1 if measure.higher else -1
    whole = [spot for spot in spots if spot.row.whole]
    best = [whole[i] for i in front([(spot.x, sign * spot.y) for spot in whole])]
    if best:
        xs, ys = zip(*((spot.x, spot.y) for spot in best), strict=True)
        axes.step(xs, ys, where="pre", color=LIGHT["muted"], linewidth=1.1)
    for spot in spots:
        row, colour, on = spot.row, _colour(spot.row, colours), spot in best
        faint: dict[str, Any] = {"color": colour, "linewidth": 0.9, "alpha": 0.45 if on else 0.22}
        speed, score = row.speedup, row.scores[measure]
        if speed.low is not None and speed.high is not None and spot.x == speed.value:
            axes.plot([speed.low, speed.high], [spot.y] * 2, **faint)
        if score.low is not None and score.high is not None:
            axes.plot([spot.x] * 2, [score.low, score.high], **faint)
        if row.verdict == "broken":
            axes.plot([spot.x], [spot.y], marker="x", markersize=6, markeredgewidth=1.6, color=LIGHT["bad"])
        else:
            mark_dot(axes, spot.x, spot.y, colour, hollow=not on, size=5.5 if on else 4.0, shape=marks[row.form])
    axes.set_title(shorten(measure.title, 40), loc="left")
    grid_lines(axes, "both")
    axes.tick_params(labelcolor=LIGHT["muted"])
    axes.margins(0.12)
    if not measure.higher:
        axes.invert_yaxis()
    if len(marks) > 1:
        mixed = len({is_busy(spot.row.run.result) for spot in spots}) > 1  # else the caption says it of all
        ordered = [*best, *(spot for spot in spots if spot not in best)]
        named = [replace(spot, label=_form(spot.row, mixed)) for spot in ordered]
    else:
        named = best
    _name_spots(axes, named, colours, widest)


def _form(row: Row, marked: bool) -> str:
    """The quantiser and what its weights take."""
    held = row.run.number("memory.weights_bytes")
    told = row.form if held is None else f"{row.form}, {size(held)}"
    return f"{told} {BUSY_MARK}" if marked and is_busy(row.run.result) else told


def _styles(rows: Sequence[Row]) -> list[Any]:
    """Rows of one drafter share its colour and differ in their lines."""
    seen: dict[str, int] = {}
    out = []
    for row in rows:
        seen[row.drafter] = seen.get(row.drafter, -1) + 1
        out.append(STYLES[seen[row.drafter] % len(STYLES)])
    return out


def _curve(row: Row) -> Sequence[Any]:
    found = row.run.at("strategy.acceptance_by_position")
    return found if isinstance(found, list) else ()


def _categories(row: Row) -> Mapping[str, Any]:
    found = row.run.at("by_category")
    return found if isinstance(found, Mapping) else {}


def _costs(row: Row) -> dict[float, float]:
    """T(k) ÷ T(1) by k; empty without T(1)."""
    seconds = row.run.at("profile.seconds")
    first = number_at(seconds, "1")
    if not first or not isinstance(seconds, Mapping):
        return {}
    known = {
        float(k): value for k in seconds if str(k).isdecimal() and (value := number_at(seconds, str(k))) is not None
    }
    return {k: known[k] / first for k in sorted(known)}


def _colour(row: Row, colours: Mapping[str, str]) -> str:
    return LIGHT[colours[row.drafter]]


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _more(found: Sequence[Row]) -> str:
    return f" The first {SHOWN} of {len(found)} rows." if len(found) > SHOWN else ""
