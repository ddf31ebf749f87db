"""The command `decodelab`: from its words to a configuration, to a job, to an exit code; errors are one line."""

import errno
import io
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # comes with transformers

from .. import __version__
from ..errors import UserError
from .architectures import architectures
from .compose import CONFIGS, Composer, defaults, groups
from .construct import did_you_mean
from .files import FULL
from .load import load_of_others
from .sweep.grid import Cell, composed, expand

if TYPE_CHECKING:
    from .config import RunConfig

USAGE = "decodelab JOB [KEY=VALUE …] [--config-dir DIR] [--cfg job] [-m]"
OPTIONS: Mapping[str, str] = {
    "--config-dir DIR": "more YAML, in folders named like the groups: DIR/drafting/mine.yaml is drafting=mine",
    "--cfg job": "print the configuration and stop",
    "-m, --multirun": "run every combination of a,b and range(1,4), one after the other; sweep= needs no -m",
    "--help": "this text; with drafting=reference that option's keys alone",
    "--version": "the version",
}
EXAMPLES = (
    "decodelab run                                             the default, on the demo prompts",
    "decodelab check drafting=reference task.path=edits.jsonl  would that work?",
    "decodelab run acceptance=sampling acceptance.temperature=0.7 task.limit=20",
    "decodelab run model=qwen2.5-coder-1.5b drafting=draft_model drafting.model.name=qwen2.5-coder-0.5b",
    "decodelab run experiment=drafters task.path=edits.jsonl task.limit=5",
    "decodelab run 'sweep=[{drafting: none}, {drafting: prompt_lookup, drafting.max_draft: [4, 8]}]'",
    "decodelab run -m acceptance=greedy,sampling 'drafting.max_draft=range(4,17,4)'",
)
_NO_KEYS = ("_target_:", "# @package")  # lines of a YAML file that a command line does not set
_OF_SWEEPS = ("stop_after_failures", "budget_hours", "rerun")


def main(argv: Sequence[str] | None = None) -> int:
    """0: fine; 1: a broken or failed run; 2: the user's error; 130: interrupted. A bug keeps its traceback."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] != ["peers"]:  # in which others are to run as they do by themselves
        _wait_for_threads()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks ends no run: it is shown as ?
            stream.reconfigure(errors="replace")
    try:
        code = _in_one_line(lambda: _dispatch(words))
        if sys.stdout is not None:  # closed by whoever started it
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails again
        return _fail(1, "whoever read the output has closed it")
    return code


def _wait_for_threads() -> None:
    """Where other programs use the cores, torch's threads sleep while they wait for each other instead of spinning.

    A thread that spins holds up the one it waits for: beside busy programs decoding was 2 to 10 times slower so. On a
    quiet machine, spinning is twice as fast. OpenMP reads the variable when torch is loaded; the user's own value wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ and (load_of_others() or 0.0) > (os.cpu_count() or 1) / 4:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _in_one_line(do: Callable[[], int]) -> int:
    """The exit code of `do`; what it raises for the user to read becomes a line on standard error."""
    try:
        return do()
    except UserError as error:
        return _fail(2, str(error))
    except KeyboardInterrupt as ended:
        return _fail(130, str(ended) or "interrupted; what was finished before is kept")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _fail(2, f"the name of a file or folder is too long for this disk: {error.filename}")
        if error.errno not in FULL:
            raise
        return _fail(1, _disk_full(error))


def _fail(code: int, message: str) -> int:
    print(f"decodelab: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _disk_full(error: OSError) -> str:
    what = f"{error.filename} was" if error.filename else "a file of the run was"
    if error.errno == errno.EFBIG:
        return f"a file would be larger than is allowed here: {what} not written whole; raise the limit (ulimit -f)"
    return f"the disk is full: {what} not written whole; free some space, or name another disk with output=DIR"


@dataclass(frozen=True, slots=True)
class Words:
    """What a command line says."""

    job: str | None = None
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    show: bool = False
    multirun: bool = False
    help: bool = False
    version: bool = False


def read(argv: Sequence[str]) -> Words:
    """Options may stand anywhere; the first word that is none is the job."""
    words, said = Words(), list(argv)
    while said:
        word, *said = said
        option, equals, value = word.partition("=")
        if option in ("--config-dir", "--cfg"):
            if not equals and not said:
                raise UserError(f"{option} needs a value: {'--cfg job' if option == '--cfg' else '--config-dir DIR'}")
            value, said = (value, said) if equals else (said[0], said[1:])
            if option == "--config-dir":
                words = replace(words, config_dirs=(*words.config_dirs, Path(value).expanduser()))
            elif value == "job":
                words = replace(words, show=True)
            else:
                raise UserError(f"--cfg {value} is unknown: --cfg job prints the configuration")
        elif word in ("-m", "--multirun"):
            words = replace(words, multirun=True)
        elif word in ("-h", "--help"):
            words = replace(words, help=True)
        elif word == "--version":
            words = replace(words, version=True)
        elif word.startswith("-"):
            raise UserError(f"{word} is unknown: options are --config-dir DIR, --cfg job, -m, --help, --version")
        elif words.job is None and "=" not in word:
            words = replace(words, job=word)
        else:
            words = replace(words, overrides=(*words.overrides, word))
    return words


def _dispatch(argv: Sequence[str]) -> int:
    if argv and (plain := PLAIN.get(argv[0])) is not None:
        return plain.do(argv[1:])
    words = read(argv)
    if words.version:
        print(f"decodelab {__version__}")
        return 0
    if words.job in PLAIN:
        raise UserError(f"{words.job} is the first word: decodelab {words.job} …")
    names = (*JOBS, *PLAIN)
    if words.job is not None and words.job not in JOBS:
        raise UserError(f"{words.job!r} is no job: {did_you_mean(words.job, names)}jobs are {', '.join(names)}")
    if words.help or not argv:
        print(help_text(words))
        return 0
    if words.job is None:
        raise UserError(f"name a job, one of {', '.join(names)}: {USAGE}")
    composer, overrides = Composer(words.config_dirs), words.overrides
    if words.job == "plan":
        from .plan import by_name

        overrides = by_name(overrides, composer.options["model"])
    cells = expand(overrides, composer, multirun=words.multirun)
    configs = composed(cells, composer)
    if words.show:
        return _show(cells, configs)
    job = JOBS[words.job]
    single = not words.multirun and len(cells) == 1
    if any(config.search is not None for config in configs):
        from .sweep.search import check_space, search

        if not single:
            raise UserError("search looks for the values of one configuration: leave out the sweep, or search=null")
        if job.measures:
            return search(words.job, configs[0], words.overrides, composer, words.config_dirs)
        check_space("run", configs[0], words.overrides, composer)
    if job.do is None:
        from .peers.command import peers

        return peers(cells, configs, words.config_dirs)
    if single:
        _refuse_sweeps_keys(configs[0])
        return job.do(configs[0])
    if job.measures:
        from .sweep.sweep import sweep

        return sweep(words.job, cells, configs, words.overrides, words.config_dirs)
    if words.job != "check":
        raise UserError(f"{words.job} is of one configuration: leave out the sweep")
    from .check import check_cells

    return check_cells(cells, configs)


def _refuse_sweeps_keys(config: "RunConfig") -> None:
    """What a single run would ignore; a search, which only check gets so far with, would not."""
    given = {"cell.timeout": config.cell.timeout} | {key: getattr(config, key) for key in _OF_SWEEPS}
    set_ = [f"{key}={value}" for key, value in given.items() if value is not None]
    if set_ and config.search is None:
        raise UserError(f"{' '.join(set_)} is of a sweep, and this is a single run: with -m it is a sweep of one cell")


def _run(config: "RunConfig") -> int:
    from .run import run

    return run(config)


def _evaluate(config: "RunConfig") -> int:
    from .run import evaluate

    return evaluate(config)


def _check(config: "RunConfig") -> int:
    from .check import check

    return check(config)


def _layers(config: "RunConfig") -> int:
    from .composition import contiguous, own_attention
    from .layers import layers

    contiguous(config, "layers")
    own_attention(config, "layers")
    return layers(config)


def _plan(config: "RunConfig") -> int:
    from .plan import plan

    return plan(config)


def _quantize(config: "RunConfig") -> int:
    from .composition import contiguous, own_attention
    from .quantise import quantize_job

    contiguous(config, "quantize")
    own_attention(config, "quantize")
    return quantize_job(config)


def _train(config: "RunConfig") -> int:
    from .composition import contiguous
    from .train import train_job

    contiguous(config, "train")
    return train_job(config)


def _report(words: Sequence[str]) -> int:
    from .report.command import main as report

    return report(words)


def _tree(words: Sequence[str]) -> int:
    from .tree import main as tree

    return tree(words)


def _show(cells: Sequence[Cell], configs: Sequence["RunConfig"]) -> int:
    """The configuration; of a sweep, what all cells share, and under each cell's label the rest of it."""
    resolved = [config.resolved for config in configs]
    shown = _shared(resolved)
    if len(cells) > 1:
        shown["cells"] = {cell.label: _beside(shown, own) for cell, own in zip(cells, resolved, strict=True)}
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=1000), end="")
    return 0


def _shared(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mappings[0].items():
        values: list[Any] = [mapping.get(key) for mapping in mappings]
        if all(other == value for other in values):
            found[key] = value
        elif all(isinstance(other, Mapping) for other in values) and (inner := _shared(values)):
            found[key] = inner
    return found


def _beside(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _beside(shared[key], value) if isinstance(shared.get(key), Mapping) else value
        for key, value in own.items()
        if key not in shared or shared[key] != value
    }


@dataclass(frozen=True, slots=True)
class Job:
    """A command: what it does in words, and in code; None where that takes all cells of a sweep at once. `measures`: a
    run's folder comes out, and a sweep's cells are runs in processes of their own."""

    about: str
    do: Callable[["RunConfig"], int] | None
    measures: bool = False


@dataclass(frozen=True, slots=True)
class Plain:
    """A command without a configuration: it reads its own words, `--help` among them."""

    about: str
    do: Callable[[Sequence[str]], int]


JOBS: Mapping[str, Job] = {
    "run": Job(
        "a strategy against plain decoding on a task: table, result.json, events.jsonl, samples.jsonl",
        _run,
        measures=True,
    ),
    "evaluate": Job(
        "quality alone, on the path that decodes; against=DIR compares it with a reference run",
        _evaluate,
        measures=True,
    ),
    "check": Job("what a configuration would do, and whether its parts go together; loads and fetches nothing", _check),
    "plan": Job(
        "on paper: KV cache, memory, roofline and cost of a model, batch, context, layout and hardware; loads nothing",
        _plan,
    ),
    "peers": Job(
        "the cells of a sweep beside transformers and llama.cpp, in turn in one process: ratios, T(k), bandwidth", None
    ),
    "quantize": Job("a quantised copy of the model; writes output=DIR, which model.path=DIR loads", _quantize),
    "train": Job(
        "medusa and eagle heads, a draft, a student, or the model for another attention (kv); writes output=DIR",
        _train,
    ),
    "layers": Job(
        "which layers drafting=layer_skip may leave out, looked for on a task; writes output=FILE.json", _layers
    ),
}
PLAIN: Mapping[str, Plain] = {
    "report": Plain("runs side by side, against earlier ones, or one explained; decodelab report --help", _report),
    "tree": Plain("the static tree that is best by what a run accepted, as a file; decodelab tree --help", _tree),
}


def help_text(words: Words) -> str:
    """Jobs, groups and options, and the keys of a run with their defaults; of options in `words`, their keys alone."""
    found = groups(words.config_dirs)
    taken: dict[str, str | None] = defaults()
    for override in words.overrides:
        group, _, option = override.partition("=")
        if option in found.get(group, ()):
            taken[group] = option
    about = {name: job.about for name, job in JOBS.items()} | {name: job.about for name, job in PLAIN.items()}
    chosen = {group: name for group, name in taken.items() if f"{group}={name}" in words.overrides}
    if chosen:
        some = _options(found, chosen)
        return "\n".join([f"  {USAGE}", *some, "", "decodelab --help lists the jobs, all groups and the keys of a run"])
    jobs = [f"  {name:10}{text}" for name, text in about.items() if words.job in (None, name)]
    lines = ["decodelab: decoding strategies, composed in a config and measured against plain decoding"]
    lines += ["", f"  {USAGE}", "", "JOB", *jobs, "", "OPTIONS"]
    lines += [f"  {option:18}{about}" for option, about in OPTIONS.items()]
    lines += ["", "GROUPS: GROUP=OPTION (* taken here)"]
    for group, options in found.items():
        names = [f"{option}*" if option == taken.get(group) else option for option in options]
        text = f"  {group:14}{', '.join(names)}"
        lines += textwrap.wrap(text, 116, subsequent_indent=" " * 16, break_on_hyphens=False)
    if words.job == "plan":
        lines += ["", "MODEL: plan knows the sizes of these, whether they run here or not; model.path= takes others"]
        lines += textwrap.wrap(
            ", ".join(architectures()), 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    lines += ["", "EXPERIMENTS: runs and sweeps kept as files; --config-dir DIR adds DIR/experiment/*.yaml"]
    for experiment, file in found["experiment"].items():
        lines += textwrap.wrap(f"  {experiment:12}{_about(file)}", 116, subsequent_indent=" " * 14)
    lines += ["", "KEYS, with their defaults", *_keys(CONFIGS / "run.yaml")]
    lines += _options(found, taken)
    return "\n".join([*lines, "", "EXAMPLES", *(f"  {example}" for example in EXAMPLES)])


def _options(found: Mapping[str, Mapping[str, Path]], taken: Mapping[str, str | None]) -> list[str]:
    """The keys of an option of each group."""
    lines = []
    for group, name in taken.items():
        if name is not None:
            head = "" if group == "experiment" else f"{group}.KEY=VALUE, with "
            lines += ["", f"{group.upper()}: {head}{group}={name}", *_keys(found[group][name])]
    return lines


def _about(file: Path) -> str:
    """The first comment of an experiment, behind the line that Hydra reads."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line), "")


def _keys(file: Path) -> list[str]:
    """The lines of a YAML file, comments included, without what a command line does not set."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.parent == CONFIGS:
        text = text.partition("\n\n")[2]  # behind the list of groups
    return [f"  {line}" for line in text.splitlines() if line.strip() and not line.lstrip(" -").startswith(_NO_KEYS)]
