"""The page: one file that asks for nothing else. What models and configurations say stands in it as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ..files import read_lines
from ..format import diverged
from .changes import Comparison
from .drawing import DARK, LIGHT, palette, svg
from .load import Found, at, number_at
from .plots import pictures
from .rows import Group, Row
from .tables import changes, columns, mark, notes

TEMPLATE = Path(__file__).with_name("page.html")
_EXCERPT = 600  # characters of a text


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what was made of it; `speedup` is its own."""

    id: str
    category: str
    speedup: float
    prompt: str
    baseline: str
    strategy: str


def page(groups: Sequence[Group], found: Found, against: Comparison | None) -> str:
    """Tables, pictures and what there is to know of each run."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    colours = palette(groups)
    return template.render(
        version=__version__,
        light=LIGHT,
        dark=DARK,
        parts=[_part(i, group, colours) for i, group in enumerate(groups)],
        unfinished=found.unfinished,
        unread=found.notes,
        against=against,
        changed=list(changes(against)) if against is not None else [],
        svg=svg,
        mark=mark,
    )


def _part(number_of: int, group: Group, colours: Mapping[str, str]) -> dict[str, Any]:
    return {
        "group": group,
        "columns": columns(group),
        "notes": notes(group),
        "pictures": list(pictures(group, colours, f"g{number_of}")),
        "runs": [(row, _settings(row), _said(row), _extremes(row)) for row in group.rows],
        "colours": colours,
    }


def _settings(row: Row) -> list[tuple[str, str]]:
    said = {
        "folder": str(row.run.folder),
        "commit": row.run.at("provenance.commit"),
        "version": row.run.at("provenance.version"),
        "started": row.run.at("provenance.started_at"),
        "seed": row.run.at("config.seed"),
        "key": row.run.at("key"),
    }
    return [(name, str(value)) for name, value in said.items() if value is not None]


def _said(row: Row) -> list[str]:
    """What the run says of itself in words."""
    lines = [*_listed(row.run.at("profile.explained")), *(f"note: {w}" for w in _listed(row.run.at("warnings")))]
    if row.dominated:
        lines.append(f"dominated by {row.dominated}")
    for name, task in _mapping(row.run.at("quality.against.tasks")).items():
        lines.append(f"{name} against {row.run.at('quality.against.reference.folder')}: {at(task, 'verdict')}")
    return [*lines, *(diverged(found) if (found := row.run.at("quality.divergence")) else ())]


def _extremes(row: Row) -> list[tuple[str, Sample]]:
    """The prompt that gained most and the one that gained least."""
    found = sorted(_samples(row), key=lambda sample: sample.speedup)
    return [("best", found[-1]), ("worst", found[0])] if len(found) > 1 else []


def _samples(row: Row) -> Iterator[Sample]:
    for line in read_lines(row.run.folder / "samples.jsonl"):
        plain, ours = (number_at(line, f"{side}.tpot_s") for side in ("baseline", "strategy"))
        if plain and ours:
            texts = (_excerpt(at(line, path)) for path in ("prompt", "baseline.text", "strategy.text"))
            yield Sample(str(line.get("id")), str(line.get("category")), plain / ours, *texts)


def _excerpt(text: Any) -> str:
    said = text if isinstance(text, str) else ""
    half = _EXCERPT // 2
    return said if len(said) <= _EXCERPT else f"{said[:half]} […] {said[-half:]}"


def _listed(found: Any) -> list[str]:
    return [str(item) for item in found] if isinstance(found, list) else []


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
