"""A page for colleagues: what a run lost or gained against its reference, on which items, and of what exactly."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UserError
from ..files import read_lines, read_result
from ..format import chance, counted, difference, few_tokens, folded, noise_floor, percent, share
from ..quality.against import RULE, overall
from ..seeds import title as quantiser
from .drawing import DARK, LIGHT
from .load import Run, at
from .rows import drafter, model

TEMPLATE = Path(__file__).with_name("certificate.html")
_FLIPS = 3  # shown, each way
_EXCERPT = 400  # characters of a text
_ABOUT_KL = (
    "KL(reference‖run) of each token of the gold answers, read as they stand; a lower bound, since the reference's "
    "likeliest {top} tokens are kept and the rest is one: the reference's own predictions are at least {ratio:.2f}× as "
    "perplexing here. The same choice: both hold the same token likeliest."
)


@dataclass(frozen=True, slots=True)
class Section:
    """`lines` stand above the table (titles, rows), `texts` below: each a heading with named excerpts."""

    title: str
    lines: tuple[str, ...] = ()
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    texts: tuple[tuple[str, Sequence[tuple[str, str]]], ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    title: str
    verdict: str
    meaning: str
    sections: tuple[Section, ...]


def certificate(folder: Path) -> Certificate:
    """UserError for a run that was compared with none."""
    run = Run(folder, read_result(folder / "result.json"))
    found = run.at("quality.against")
    if not found:
        raise UserError(f"{folder} was compared with no reference: run it with quality.tasks=[…] against=DIR")
    try:
        verdict, why = overall(found, run.at("quality.divergence"))
        sections = [_tasks(found), *_tokens(run), _flips(folder, found), _made(run), _origins(run)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder} is not as this version writes a run ({error!r}); run it again") from None
    title = f"{_named(run)} against {found['reference']['folder']}"
    return Certificate(title, verdict, why, tuple(sections))


def _named(run: Run) -> str:
    made = run.at("provenance.quantised")
    return _model(run) if made is None else f"{_model(run)}, {quantiser(made)}"


def _model(run: Run) -> str:
    """What was quantised; of weights as stored their folder, where that was named."""
    path = str(run.at("config.model.path") or "")
    folder = Path(path).name if path[:1] in ("/", ".", "~") else None
    return str(run.at("provenance.quantised.source.label") or folder or model(run))


# --- what was found


def _tasks(found: Mapping[str, Any]) -> Section:
    titles = ("task", "reference", "this run", "difference [95 %]", "p", "n", "detectable", "verdict")
    rows = []
    for name, task in found["tasks"].items():
        main = task["metrics"][task["main"]]
        least = main["detectable"]
        unit = "×" if main["effect"] == "ratio" else ""
        rows.append(
            (
                f"{name}, {task['main']}{'' if task['higher_is_better'] else ' (less is better)'}",
                _score(main["reference"]),
                _score(main["mine"]),
                difference(main),
                chance(task["p_holm"]),
                str(main["n"]),
                "–" if least is None else f"{1 + least:.3f}×" if unit else f"{least:.3f}",
                task["verdict"],
            )
        )
    if (mean := found["combined"]) is not None:
        label = f"mean of {len(mean['tasks'])}"
        rows.append((label, "", "", difference(mean), chance(mean["p_holm"]), str(mean["n"]), "", mean["verdict"]))
    lines = [
        f"ε, a difference that does not matter: {found['epsilon']:g}. p is corrected for all tasks and their mean "
        "(Holm). Detectable: the least difference that so many items show in 4 of 5 such comparisons.",
        RULE,
    ]
    lines += [f"{one['what']} differs in {', '.join(one['tasks'])}, as was accepted" for one in found["allowed"]]
    if missing := [*found["only_here"], *found["only_there"]]:
        lines.append(f"in one of the runs only, so not compared: {', '.join(missing)}")
    if any(found["interrupted"].values()):
        lines.append("one of the runs was interrupted: what is compared are the items that both answered")
    return Section("Tasks", tuple(lines), (titles, rows))


def _score(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.2e}"


def _tokens(run: Run) -> Iterator[Section]:
    found = run.at("quality.divergence")
    if not found:
        yield Section("Token by token", ("Not measured: run both with quality.kl=true.",))
        return
    lines = [_ABOUT_KL.format(top=found["top"], ratio=exp(found["kl"]["value"]))]
    if found["reference"]["key"] != run.at("quality.against.reference.key"):
        lines.append(f"Of another reference than the tasks: {found['reference']['folder']}.")
    floor = found["floor"]
    lines.append(
        "The noise of rounding was not measured."
        if floor is None
        else f"{noise_floor(floor)[0].upper()}{noise_floor(floor)[1:]}."
    )
    lines += filter(None, [few_tokens(found)])
    titles = ("gold answers of", "KL a token [95 %]", "median", "99 of 100 under", "worst", "same choice", "tokens")
    rows = [_told(name, one) for name, one in found["tasks"].items()]
    yield Section("Token by token", tuple(lines), (titles, [*rows, _told("all", found)] if len(rows) > 1 else rows))
    if found["where"]:
        by = ("by", "worst slice", "of the tokens", "of all KL", "of changed choices", "p")
        shares = [
            (row["by"], row["name"], *(percent(row[key]) for key in ("size", "share", "flips")), chance(row["p_holm"]))
            for row in found["where"]
        ]
        about = "The slice with the most KL beyond its size, and how often chance would make one as bad (Holm)."
        yield Section("Where it degrades", (about,), (by, shares))


def _told(name: str, one: Mapping[str, Any]) -> Sequence[str]:
    kl, same = one["kl"], one["agreement"]
    bounds = "" if kl["low"] is None else f" [{kl['low']:.2g}, {kl['high']:.2g}]"
    return (
        name,
        f"{kl['value']:.2g}{bounds}",
        *(f"{kl[which]:.2g}" for which in ("p50", "p99", "max")),
        share(same["value"]),
        str(one["tokens"]),
    )


def _flips(folder: Path, found: Mapping[str, Any]) -> Section:
    """Of tasks with an answer each; the perplexity of a text changes with anything."""
    asked = [name for name, task in found["tasks"].items() if task["metrics"][task["main"]]["effect"] == "difference"]
    rows = [row for row in read_lines(folder / "flips.jsonl") if row["task"] in asked]  # worst first
    lost, gained = [row for row in rows if row["gain"] < 0], [row for row in rows if row["gain"] > 0]
    shown = [*_some_of_each(lost, asked), *_some_of_each(gained[::-1], asked)]
    lines = [f"{counted(len(lost), 'item')} lost, {len(gained)} gained; all are in flips.jsonl."] if asked else []
    return Section("Items to read", tuple(lines or ["No task has answers to read."]), texts=tuple(map(_flip, shown)))


def _some_of_each(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """As many of each task as make `_FLIPS`, one at least."""
    by_task = [some for name in tasks if (some := [row for row in rows if row["task"] == name])]
    for some in by_task:
        yield from some[: max(1, _FLIPS // len(by_task))]


def _flip(row: Mapping[str, Any]) -> tuple[str, Sequence[tuple[str, str]]]:
    word = "lost" if row["gain"] < 0 else "gained"
    title = f"{word}: {row['task']} {row['id']}, {row['metric']} {row['reference']['score']:.3g} → "
    sides = [("reference", row["reference"]["responses"][0]), ("this run", row["mine"]["responses"][0])]
    choices = row.get("choices")  # an older run has none
    if all(map(_likelihoods, (answer for _, answer in sides))):
        told = list(_chosen(row["gold"], choices, dict(sides)))
    else:
        told = [("gold", _excerpt(row["gold"])), *((name, _excerpt(answer)) for name, answer in sides)]
    texts = [("prompt", _excerpt(row["prompt"])), *told]
    return f"{title}{row['mine']['score']:.3g}", [(name, text) for name, text in texts if text]


def _likelihoods(answer: Any) -> bool:
    return isinstance(answer, list) and len(answer) > 1 and all(isinstance(value, int | float) for value in answer)


def _chosen(gold: Any, choices: Any, sides: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
    """A line a choice, with how likely each side held it; then which is each side's likeliest, and what is as likely at
    the digits shown."""
    names = [chr(65 + i) for i in range(len(next(iter(sides.values()))))]
    right = names[gold] if isinstance(gold, int) and 0 <= gold < len(names) else None
    for i, name in enumerate(names):
        text = _excerpt(choices[i]) if choices else ""
        told = ", ".join(f"{side} {values[i]:.2f}" for side, values in sides.items()).replace("-", "−")
        yield f"{name}{' (right)' if name == right else ''}", f"{text}{' ' if text else ''}(log p: {told})"
    if right is None:
        yield "gold", _excerpt(gold)
    for side, values in sides.items():
        best = max(range(len(values)), key=lambda i: values[i])
        ties = [name for i, name in enumerate(names) if i != best and f"{values[i]:.2f}" == f"{values[best]:.2f}"]
        yield side, f"{names[best]} is likeliest" + (f", {' and '.join(ties)} as likely to two digits" if ties else "")


def _excerpt(text: Any) -> str:
    said = text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False)
    half = _EXCERPT // 2
    return said if len(said) <= _EXCERPT else f"{said[:half]} […] {said[-half:]}"


# --- what it was found of


def _made(run: Run) -> Section:
    made = run.at("provenance.quantised")
    calibration = at(made, "calibration")
    settings = {
        "model": _model(run),
        "quantiser": "none, the weights as stored" if made is None else quantiser(made),
        "its settings": _plain(at(made, "settings"), ("bits", "group_size", "calibration")),
        "calibration": None
        if made is None
        else "none"
        if calibration is None
        else f"{at(calibration, 'tokens')} tokens, digest {at(calibration, 'digest')}",
        "drafter": drafter(run),
        "acceptance": str(run.at("config.acceptance._target_")).rpartition(".")[2],
        "dtype": run.at("provenance.dtype"),
        "seed": run.at("config.seed"),
        "batch": run.at("config.batch"),
        "differs from the reference in": ", ".join(folded(run.at("quality.against.differs_in") or ()))
        or "nothing recorded",
    }
    return _listed("Settings", settings)


def _plain(settings: Any, without: Sequence[str]) -> str | None:
    if not isinstance(settings, Mapping):
        return None
    return ", ".join(f"{k}={v}" for k, v in settings.items() if k not in without and v not in (None, {}, [])) or None


def _origins(run: Run) -> Section:
    digests = {f"digest of {name}": value for name, value in (run.at("digests") or {}).items()}
    kernels = ", ".join(f"{name}: {what}" for name, what in (run.at("implementation") or {}).items())
    commit = run.at("provenance.commit")
    made = {
        "run": f"{run.folder}, key {run.at('key')}",
        "reference": f"{run.at('quality.against.reference.folder')}, key {run.at('quality.against.reference.key')}",
        **digests,
        "kernels": kernels or None,
        "device": run.at("provenance.device"),
        "versions": ", ".join(
            f"{name} {value}"
            for name in ("python", "torch", "transformers")
            if (value := run.at(f"provenance.{name}")) is not None
        ),
        "decodelab": run.at("provenance.version"),
        "commit": f"{commit}{' with changes' if run.at('provenance.dirty') else ''}" if commit else None,
        "asked and scored by": run.at("quality.backend"),
        "started": run.at("provenance.started_at"),
    }
    return _listed("Origins", made)


def _listed(title: str, rows: Mapping[str, Any]) -> Section:
    return Section(title, table=(("", ""), [(k, str(v)) for k, v in rows.items() if v not in (None, "")]))


# --- as text


def markdown(made: Certificate) -> str:
    return "\n".join(_markdown(made)) + "\n"


def _markdown(made: Certificate) -> Iterator[str]:
    from .tables import literal, table

    yield f"# {literal(made.title)}\n"
    yield f"**{made.verdict}**. {literal(made.meaning)}\n"
    for section in made.sections:
        yield f"## {section.title}\n"
        for line in section.lines:
            yield f"{literal(line)}\n"
        if section.table is not None:
            yield from table(*section.table)
            yield ""
        for heading, texts in section.texts:
            yield f"### {literal(heading)}\n"
            for name, text in texts:
                yield f"{name}:\n"
                yield from (f"    {line}" for line in text.splitlines() or [""])
                yield ""


def page(made: Certificate) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(made=made, version=__version__, light=LIGHT, dark=DARK)
