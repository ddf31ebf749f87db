"""The job `report`: words in; a table, report.md, report.csv and report.html out."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ..files import FULL, result_files, write_atomic

_NAMED = 20  # runs, of a folder that holds more
USAGE = (
    "decodelab report DIR… [--against DIR] [output=DIR], report explain RUN, report certificate RUN, or report claims "
    "DIR…"
)
HELP = f"""decodelab report: runs side by side

  {USAGE}

Reads every run and every cell of a sweep below the folders, prints a table, and writes report.md, report.csv and
report.html (one file that asks for nothing else) into the first of them. Runs of different hardware, weights, dtype or
prompts stand in tables of their own.

  --against DIR     pairs the runs with those below DIR: what became slower or faster, and what it did to quality
  output=DIR        where the files go
  explain RUN       why a run was slow or fast, in words, and what to try
  certificate RUN   one page for colleagues: what a run lost or gained against its reference, and of what exactly;
                    writes certificate.md and certificate.html into its folder
  claims DIR…       what the literature claims beside what these runs say of it; writes claims.md"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line says."""

    folders: tuple[Path, ...]
    against: Path | None = None
    output: Path | None = None


def main(words: Sequence[str]) -> int:
    """0 where anything was read."""
    if not words or any(word in ("-h", "--help") for word in words):
        print(HELP)
        return 0
    if words[0] in SUBCOMMANDS:
        return SUBCOMMANDS[words[0]](words[1:])
    return report(read(words))


def read(words: Sequence[str]) -> Asked:
    folders: list[Path] = []
    against = output = None
    said = list(words)
    while said:
        word, *said = said
        name, equals, value = word.partition("=")
        if name == "--against":
            if not equals and not said:
                raise UserError("--against needs a folder: --against DIR")
            value, said = (value, said) if equals else (said[0], said[1:])
            if against is not None:
                raise UserError(f"--against {value} is the second; runs are compared with one folder")
            against = Path(value).expanduser()
        elif word.startswith("-"):
            raise UserError(f"{word} is unknown: report takes DIR…, --against DIR and output=DIR")
        elif equals and not Path(word).exists():
            if name != "output":
                raise UserError(f"{name}= is unknown: report takes output=DIR")
            if not value.strip():
                raise UserError("output is empty; name a folder")
            output = Path(value).expanduser()
        else:
            folders.append(Path(word).expanduser())
    if not folders:
        raise UserError(f"report needs the folder of a run or a sweep: {USAGE}")
    return Asked(tuple(folders), against, output)


def report(asked: Asked) -> int:
    from ..columns import stdout
    from . import tables
    from .changes import compare
    from .html import page
    from .load import find
    from .rows import grouped

    found = find(asked.folders)
    if not found.runs and not found.unfinished:
        raise UserError("; ".join(found.notes))
    output = _writable(asked)
    groups = grouped(found.runs)
    against = None
    if asked.against is not None:
        reference = find([asked.against])
        if not reference.runs:
            raise UserError(f"--against: {'; '.join(reference.notes) or f'no cell of {asked.against} has a result'}")
        labels = {row.run.folder: row.label for group in groups for row in group.rows}
        against = compare(found.runs, reference.runs, str(asked.against), labels, reference.notes)
    console = stdout()
    tables.show(groups, found, against, console)
    made = {"report.md": tables.markdown, "report.csv": tables.comma_separated, "report.html": page}
    for name, make in made.items():
        _write(output / name, make(groups, found, against))
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    console.print(f"written to {', '.join(str(output / name) for name in made)}", soft_wrap=True)
    return 0


def _writable(asked: Asked) -> Path:
    """Before the work: the folder named, or the first that was read."""
    first = next((folder for folder in asked.folders if folder.exists()), asked.folders[0])
    output = asked.output or (first if first.is_dir() else first.parent)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} cannot be made ({error.strerror}); name another folder with output=DIR") from error
    return output


def _write(file: Path, text: str, remedy: str = "name another folder with output=DIR") -> None:
    try:
        write_atomic(file, text)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"{file} cannot be written ({error.strerror}); {remedy}") from error


def _explain(words: Sequence[str]) -> int:
    from .explain import explain

    for line in explain(_one("explain", words)):
        print(line)
    return 0


def _certificate(words: Sequence[str]) -> int:
    from rich.markdown import Markdown

    from ..columns import stdout
    from .certificate import certificate, markdown, page

    folder = _one("certificate", words)
    made = certificate(folder)
    text = markdown(made)
    stdout().print(Markdown(text)) if sys.stdout.isatty() else print(text)
    for name, content in (("certificate.md", text), ("certificate.html", page(made))):
        _write(folder / name, content, "make the folder writable")
    print(f"written to {folder / 'certificate.md'}, {folder / 'certificate.html'}")
    return 0


def _one(job: str, words: Sequence[str]) -> Path:
    """The folder of the run that is named."""
    if len(words) != 1:
        raise UserError(f"{job} takes the folder of one run, got {len(words)}: decodelab report {job} RUN")
    folder = Path(words[0]).expanduser()
    if not (folder / "result.json").exists():
        raise UserError(_which(folder))
    return folder


def _which(folder: Path) -> str:
    """What to name instead of a folder that is no run."""
    from ..sweep.cells import scan

    labels = {cell.folder: f" ({cell.job.label})" for cell in scan(folder)}
    runs = [file.parent for file in result_files(folder)]
    if not runs:
        return f"{folder} holds no result.json; name the folder of a run"
    named = ", ".join(f"{run}{labels.get(run, '')}" for run in runs[:_NAMED])
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return f"{folder} is not a run, but holds {len(runs)}; name one of them: {named}{more}"


def _claims(words: Sequence[str]) -> int:
    from rich.console import Console

    from .claims import claims, markdown, text
    from .load import find

    asked = read(words)
    if asked.against is not None:
        raise UserError("claims takes folders and output=DIR: decodelab report claims DIR…")
    found = find(asked.folders)
    if not found.runs:
        raise UserError("; ".join(found.notes) or "none of these cells has a result yet: run the sweep to its end")
    output = _writable(asked)
    listed = claims(found.runs)
    console = Console(highlight=False, markup=False)
    for line in text(listed, console.width):
        console.print(line, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    _write(output / "claims.md", markdown(listed))
    console.print(f"\nwritten to {output / 'claims.md'}", soft_wrap=True)
    return 0


SUBCOMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "explain": _explain,
    "certificate": _certificate,
    "claims": _claims,
}
