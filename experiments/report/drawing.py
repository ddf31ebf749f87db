"""How the pictures of a report are drawn: their colours, their frame, and the parts that several of them have.

Colours are names of the page's style sheet, so that one picture reads on a light and on a dark page; texts stay texts.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .rows import Group, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What the style sheet names, by the colour that stands for it in the drawing: no other drawing may use these.
LIGHT: Mapping[str, str] = {
    "text": "#1d2329", "muted": "#69737d", "grid": "#e0e4e8", "page": "#fefefe", "bad": "#c2372e", "good": "#2f7d4f",
    "c0": "#2867b2", "c1": "#c96a12", "c2": "#208576", "c3": "#8f4fb0", "c4": "#a63d63", "c5": "#6f7a1e",
    "c6": "#7d5a38", "c7": "#4a6076",
    "draft": "#dd9f4a", "verify": "#93a8c0", "accept": "#79b3a0", "commit": "#b497c4", "other": "#c3c9cf",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "text": "#e4e8ec", "muted": "#98a2ac", "grid": "#333b43", "page": "#15191d", "bad": "#f0776d", "good": "#62bd86",
    "c0": "#6ea8ee", "c1": "#efa04e", "c2": "#4fc4b1", "c3": "#c896e6", "c4": "#ea86aa", "c5": "#b9c456",
    "c6": "#c79f76", "c7": "#93adc6",
    "draft": "#b57c2c", "verify": "#5f748c", "accept": "#4d8674", "commit": "#846794", "other": "#59626b",
}  # fmt: skip
SERIES = tuple(f"c{i}" for i in range(8))
PHASES = ("draft", "verify", "accept", "commit", "other")
WIDTH = 7.2  # inches; the page shows them at 100 pixels each
ROW = 0.235  # inches of a row
WIDEST = 46  # characters of a label in a picture
NOTE: Mapping[str, Any] = {"textcoords": "offset points", "fontsize": 8}  # a text beside what it tells of


@dataclass(frozen=True)
class Picture:
    """`about` says how to read it. Texts of the figure may come from configurations: `svg` escapes them."""

    name: str
    title: str
    about: str
    figure: "Figure"


def palette(groups: Iterable[Group]) -> dict[str, str]:
    """A colour for each drafter."""
    names = dict.fromkeys(row.drafter for group in groups for row in group.rows)
    return {name: SERIES[i % len(SERIES)] for i, name in enumerate(sorted(names))}


def svg(picture: Picture) -> str:
    """To stand within a page: no prologue, ids of its own, colours by name, nothing that is fetched."""
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        picture.figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(id="|xlink:href="#)', rf" \1{picture.name}-", text).replace("url(#", f"url(#{picture.name}-")
    text = text.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    width, height = (round(72 * inches) for inches in picture.figure.get_size_inches())
    head = f'<svg role="img" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
    return re.sub(r"<svg[^>]*>", head, text, count=1)


@contextmanager
def canvas(height: float, rows: int = 1, columns: int = 1, sharex: bool = False) -> Iterator[tuple[Any, Any]]:
    """A figure without a window, and its axes; drawn in the page's colours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 8.5, "axes.titlesize": 8.5, "axes.labelsize": 8.5, "xtick.labelsize": 8, "ytick.labelsize": 8,
        "text.parse_math": False, "text.color": LIGHT["text"], "axes.labelcolor": LIGHT["muted"],
        "axes.edgecolor": LIGHT["grid"], "xtick.color": LIGHT["grid"], "ytick.color": LIGHT["grid"],
        "xtick.labelcolor": LIGHT["muted"], "ytick.labelcolor": LIGHT["text"], "axes.spines.top": False,
        "axes.spines.right": False, "axes.spines.left": False, "axes.facecolor": "none", "figure.facecolor": "none",
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure((WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=sharex)
        yield figure, axes.flat if rows * columns > 1 else axes


def numbered(rows: Sequence[Row]) -> Iterator[tuple[float, Row]]:
    """With the height that each is drawn at."""
    return ((float(i), row) for i, row in enumerate(rows))


def name_rows(axes: "Axes", rows: Sequence[Row]) -> None:
    """A line a row, from the top, named at the left."""
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [shorten(row.label, WIDEST) for row in rows])
    axes.tick_params(length=0)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        if row.verdict == "broken":
            label.set_color(LIGHT["bad"])
        elif row.dominated:
            label.set_color(LIGHT["muted"])


def grid_lines(axes: "Axes", axis: Literal["x", "y", "both"]) -> None:
    axes.grid(axis=axis, color=LIGHT["grid"], linewidth=0.6)


def at_right(axes: "Axes", y: float, text: str, colour: str = LIGHT["text"]) -> None:
    """A text at the right, beside the axes."""
    axes.annotate(text, (1, y), xycoords=axes.get_yaxis_transform(), xytext=(6, 0), va="center", color=colour, **NOTE)


def mark_dot(
    axes: "Axes", x: float, y: float, colour: str, hollow: bool = False, size: float = 5.5, shape: str = "o"
) -> None:
    face = LIGHT["page"] if hollow else colour
    dot: dict[str, Any] = {"markerfacecolor": face, "markeredgewidth": 1.3, "zorder": 3}
    axes.plot([x], [y], marker=shape, markersize=size, color=colour, **dot)


def legend(figure: "Figure", entries: Sequence[tuple[str, str]]) -> None:
    """In one line above the axes, the upright line of plain decoding first."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    plain = Line2D([], [], linestyle="", marker="|", markersize=9, markeredgewidth=1.4, color=LIGHT["text"])
    figure.legend(
        handles=[plain, *(Patch(color=colour, linewidth=0) for _, colour in entries)],
        labels=["plain decoding", *(name for name, _ in entries)],
        loc="outside upper right", ncols=1 + len(entries), frameon=False,
        handlelength=0.9, handleheight=0.9, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def legend_of_dots(figure: "Figure", colours: Mapping[str, str], shapes: Mapping[str, str]) -> None:
    """In one line above the axes: colours as bars, then shapes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dots = [Line2D([], [], linestyle="", marker=shape, markersize=5, color=LIGHT["text"]) for shape in shapes.values()]
    figure.legend(
        handles=[*(Patch(color=colour, linewidth=0) for colour in colours.values()), *dots],
        labels=[shorten(name, 24) for name in (*colours, *shapes)],
        loc="outside upper left", ncols=min(6, len(colours) + len(shapes)), frameon=False,
        handlelength=0.9, handleheight=0.9, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def shorten(text: str, widest: int) -> str:
    """Without its middle: what tells labels apart stands at both ends."""
    tail = (widest - 1) * 3 // 5
    return text if len(text) <= widest else f"{text[: widest - 1 - tail]}…{text[-tail:]}"


def plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
