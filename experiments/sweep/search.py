"""The best values of a few keys, by optuna: its trials are the cells of a sweep's folder.

Optuna is asked for one trial after the other, from a fixed seed. So a search that is started again in its folder asks
for the same trials, is told of the finished ones from their files, and goes on where it was.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...errors import UserError
from ..columns import Column, fit, stdout, table
from ..compose import Composer
from ..files import NOT_IN_KEY
from ..format import mark_notes, marks, number
from .cells import CellOutcome, Runner
from .grid import Cell, written
from .process import Worker
from .settings import VERDICTS, Bound, Choices, Range, SearchSettings
from .show import short_name
from .sweep import StartWorker, Sweep, folder_of, settings_of

if TYPE_CHECKING:
    from ..config import RunConfig

_ASKED = 50  # times as often as there are trials: what optuna proposes may have been tried
_RANDOM = 6  # trials before there is something to go by; of any number, so that a longer search goes on with a shorter
_DIGITS = 4  # of a trial's number: enough, and a label that can be read
_PLACES = 3  # of a number in the table
# Parts of a result, and numbers anywhere in it, that are null where nothing is timed; so is whatever ends with _s.
_TIMED = ("speedup", "end_to_end_speedup", "decode", "prefill")
_TIMES = ("tokens_per_second", "burst", "speedup")
# What a run of the best values leaves out.
_OF_THE_SEARCH = ("search", "output", "rerun", "cell", "stop_after_failures", "budget_hours")


@dataclass(frozen=True, slots=True)
class Trial:
    """A cell that was tried. `value`: of the objective, None where the trial failed; `excess`: by bound, above 0
    outside; `configured`: with the values that the configuration had before; `lacks`: what has no value in a result
    that is whole, such as an acceptance rate where nothing was drafted."""

    words: tuple[str, ...]
    outcome: CellOutcome
    value: float | None
    excess: Mapping[str, float]
    configured: bool = False
    lacks: str = ""

    @property
    def within(self) -> bool:
        return self.value is not None and max(self.excess.values(), default=0.0) <= 0


def search(
    job: str,
    config: "RunConfig",
    overrides: Sequence[str],
    composer: Composer,
    config_dirs: Sequence[Path] = (),
    start_worker: StartWorker = Worker,
) -> int:
    """Look, and tell what was found. 0: some values keep the bounds; 1: none do; 130: interrupted."""
    settings = config.search
    assert settings is not None
    check_space(job, config, overrides, composer)
    whole = settings_of([config])
    folder = folder_of(whole.output, job, overrides, config_dirs)
    trials, interrupted, most = list[Trial](), False, count(settings)
    with Sweep(folder, job, whole, config_dirs, start_worker) as sweep:
        sweep.foresee(most, f"a search of {most} trials (search.trials={settings.trials})")
        try:
            for trial in look(sweep, settings, _base(overrides), config.resolved):
                trials.append(trial)  # what came before an interrupt is kept
        except KeyboardInterrupt:
            interrupted = True
    console = stdout()
    kept = [word for word in overrides if _first(word) not in _OF_THE_SEARCH]
    off = ["search=null"] if composer.compose([*kept]).search is not None else []
    dirs = [word for path in config_dirs for word in ("--config-dir", str(path))]
    for text in told(trials, settings, ["decodelab", job, *dirs, *kept, *off], console.width):
        console.print(text, soft_wrap=isinstance(text, str))
    todo = "" if len(trials) == most else f"; the same command with output={folder} goes on with the others"
    console.print(f"{len(trials)} of {most} trials, in {folder}{todo}", soft_wrap=True)
    return 130 if interrupted else int(best(trials, settings) is None)


def check_space(job: str, config: "RunConfig", overrides: Sequence[str], composer: Composer) -> None:
    """Each key takes each end of its range, and what is asked of a result is measured; otherwise one line, before
    anything runs."""
    settings = config.search
    assert settings is not None
    _optuna()
    for name in (settings.objective, *settings.bounds()):
        if (why := _unmeasured(name, job, config)) is not None:
            raise UserError(f"search: {name} is not measured: {why}")
    for key, dimension in settings.dimensions().items():
        if _first(key) in NOT_IN_KEY:
            raise UserError(
                f"search.space: {key} changes nothing that is measured, so its trials are one: leave it out"
            )
        for end in dimension.ends:
            composer.compose([*_base(overrides), f"{key}={written(end, key)}"])


def _unmeasured(name: str, job: str, config: "RunConfig") -> str | None:
    """Why no result of this configuration has such a number."""
    first, last = (name.split(".")[place] for place in (0, -1))
    timed = first in _TIMED or last in _TIMES or last.endswith("_s") or "time_share" in name
    if name == "exactness" and config.replay is not None:
        return "a replay has no output of its own"
    if name.startswith("quality/"):
        return None if config.quality.tasks else "name the task in quality.tasks"
    if job == "evaluate":
        return "evaluate finds quality alone; objective and bound are quality/TASK/METRIC, or the job is run"
    if config.replay is not None and timed:
        return "a replay times nothing; choose another, such as predicted_speedup or strategy.tokens_per_step"
    if config.timing == "untimed" and timed:
        return "timing=untimed; choose another timing, or another number, such as strategy.tokens_per_step"
    needed = {"predicted_speedup": "profile", "profile": "profile", "compare_hf": "compare_hf"}.get(first)
    if needed is not None and config.replay is None and not getattr(config, needed):
        return f"it needs {needed}=true"
    return None


def look(
    runner: Runner, settings: SearchSettings, base: Sequence[str], start: Mapping[str, Any] | None = None
) -> Iterator[Trial]:
    """Each trial as it ends, no values twice; the values of `start`, a configuration, come first where they lie in the
    space. Ends early where the space is exhausted or the sweep starts no other cell."""
    optuna = _optuna()
    space, bounds = settings.dimensions(), settings.bounds()
    study = optuna.create_study(
        direction="maximize" if settings.maximise else "minimize",
        sampler=optuna.samplers.TPESampler(seed=settings.seed, n_startup_trials=_RANDOM),
    )
    first = {key: _place(_at(start or {}, key.split(".")), dimension) for key, dimension in space.items()}
    if None not in first.values():
        study.enqueue_trial(first)
    tried: dict[tuple[str, ...], Trial] = {}
    for _ in range(_ASKED * settings.trials):
        if len(tried) >= count(settings):
            return
        asked = study.ask()
        words = tuple(f"{key}={written(_drawn(asked, key, dimension), key)}" for key, dimension in space.items())
        if words not in tried:
            outcome = runner.run_cell(Cell([*base, *words], " ".join(words)))
            if outcome.status == "not started":
                return
            trial = _trial(words, outcome, settings.objective, bounds)
            tried[words] = replace(trial, configured=not tried and None not in first.values())
            yield tried[words]
        trial = tried[words]
        for name, excess in trial.excess.items():
            asked.set_constraint(name, excess)
        if trial.value is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, trial.value)


def count(settings: SearchSettings) -> int:
    """Of trials: as many as are asked for, or as the space has."""
    return int(min(settings.trials, math.prod(map(_size, settings.dimensions().values()))))


def _trial(words: tuple[str, ...], outcome: CellOutcome, objective: str, bounds: Mapping[str, Bound]) -> Trial:
    result = outcome.result
    if outcome.status not in ("done", "broken") or result is None:
        return Trial(words, outcome, None, {})
    named = [name for name, bound in bounds.items() if not bound.allowed]
    for what, name in (("objective", objective), *(("bound", name) for name in named)):
        if not _is_in(result, name):
            raise UserError(_nowhere(what, name, outcome))
    value = number_at(result, objective)
    found = {name: _verdict(result) if bound.allowed else number_at(result, name) for name, bound in bounds.items()}
    lacking = [name for name, one in {objective: value, **found}.items() if one is None]
    if value is None or lacking:  # where nothing was drafted there is no acceptance rate
        return Trial(words, outcome, None, {}, lacks=lacking[0])
    excess = {name: bound.excess(found[name]) for name, bound in bounds.items()}
    if (verdict := _verdict(result)) is not None:  # broken is out of bounds, whatever they are
        excess.setdefault("exactness", Bound(allowed=VERDICTS).excess(verdict))
    return Trial(words, outcome, value, excess)


def _is_in(result: Mapping[str, Any], name: str) -> bool:
    """Whether a number can stand there; it may be null, or its part be."""
    found: Any = result
    for key in _path(name):
        if found is None:
            return True
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    number = found.get("value", "") if isinstance(found, Mapping) else found
    return number is None or number_at(result, name) is not None


def _nowhere(what: str, name: str, outcome: CellOutcome) -> str:
    where = f"search.{what}: {name} is no number in {outcome.folder / 'result.json'}"
    return f"{where}; name one that is, such as speedup.value, strategy.tokens_per_step or quality/TASK/METRIC"


def number_at(result: Mapping[str, Any], name: str) -> float | None:
    """A number of result.json by its keys, or of a task as quality/TASK/METRIC."""
    found = _at(result, _path(name))
    found = found.get("value") if isinstance(found, Mapping) else found
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _path(name: str) -> list[str]:
    if name.startswith("quality/"):
        task, _, metric = name.removeprefix("quality/").rpartition("/")
        return ["quality", "tasks", task, "metrics", metric]
    return name.removesuffix(".value").split(".")


def _verdict(result: Mapping[str, Any]) -> Any:
    return _at(result, ["exactness", "verdict"])


def _at(content: Any, path: Sequence[str]) -> Any:
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def best(trials: Sequence[Trial], settings: SearchSettings) -> Trial | None:
    """Of those within the bounds."""
    sign = 1 if settings.maximise else -1
    within = [trial for trial in trials if trial.within]
    return max(within, key=lambda trial: sign * (trial.value or 0.0), default=None)


def told(
    trials: Sequence[Trial], settings: SearchSettings, command: Sequence[str], width: int
) -> Iterator[Table | str]:
    """The trials, the best of them as a command line, and how much that is to be believed."""
    if not trials:
        return
    found = best(trials, settings)
    yield from _table(trials, settings, found, width)
    if found is None:
        yield "no trial is within the bounds" if any(t.value is not None for t in trials) else "no trial was finished"
        return
    yield f"best: {settings.objective} {_shown(found, settings.objective)} with {' '.join(found.words)}"
    for trial in trials:
        if trial.configured and trial is not found and trial.value is not None:
            yield f"as configured: {_shown(trial, settings.objective)} with {' '.join(trial.words)}"
    low, high = _interval(found, settings.objective)
    others = [t for t in trials if t is not found and t.within and low is not None and low <= (t.value or 0.0) <= high]
    noise = f", and {len(others)} others lie within its interval" if others else ""
    yield f"it is the best of {len(trials)} on these prompts, so its number is optimistic{noise}; measured by itself:"
    yield f"  {shlex.join([*command, *found.words])}"


def _table(trials: Sequence[Trial], settings: SearchSettings, found: Trial | None, width: int) -> Iterator[Table | str]:
    results = [trial.outcome.result or {} for trial in trials]
    names = [key.rpartition(".")[2] for key in settings.space]
    values = [[word.partition("=")[2] for word in trial.words] for trial in trials]
    keys = [
        Column(name if names.count(name) == 1 else key, [row[i] for row in values])
        for i, (key, name) in enumerate(zip(settings.space, names, strict=True))
    ]
    outcome = [Column(settings.objective, [_shown(trial, settings.objective) for trial in trials])]
    for rank, name in enumerate(settings.bounds(), 1):
        if name != "exactness":
            outcome.append(Column(name, [number(number_at(one, name), _PLACES) for one in results], rank))
    outcome.append(Column("output", list(map(_output, results))))
    outcome.append(Column("", [_remark(trial, found) for trial in trials], right=False))
    columns = [Column("", [str(place) for place, _ in enumerate(trials, 1)]), *keys, *outcome]
    if not fit(columns, width):
        columns = [Column("trial", [short_name(" ".join(trial.words)) for trial in trials]), *outcome]
    made, left = table(columns, width)
    yield made
    yield from filter(None, (left, *mark_notes([one for one in results if one], "trials")))


def _output(result: Mapping[str, Any]) -> str:
    return "replayed" if result.get("replay") else str(_verdict(result) or "–")


def _remark(trial: Trial, found: Trial | None) -> str:
    if trial.value is None:
        return f"no {trial.lacks}" if trial.lacks else trial.outcome.status
    said = list(filter(None, [marks(trial.outcome.result or {})]))
    said += ["as configured"] if trial.configured else []
    return ", ".join([*said, *(["best"] if trial is found else [] if trial.within else ["out of bounds"])])


def _shown(trial: Trial, objective: str) -> str:
    low, high = _interval(trial, objective)
    return number(trial.value, _PLACES) + ("" if low is None else f" [{number(low, _PLACES)}, {number(high, _PLACES)}]")


def _interval(trial: Trial, name: str) -> tuple[Any, Any]:
    beside = _at(trial.outcome.result or {}, _path(name))
    return (beside.get("low"), beside.get("high")) if isinstance(beside, Mapping) else (None, None)


def _base(overrides: Sequence[str]) -> list[str]:
    """The command line of a trial, without its values."""
    return [*(word for word in overrides if _first(word) != "search"), "search=null"]


def _first(word: str) -> str:
    return word.lstrip("+").partition("=")[0].partition(".")[0]


def _drawn(asked: Any, key: str, dimension: Range | Choices) -> Any:
    if isinstance(dimension, Choices):
        return dimension.values[asked.suggest_categorical(key, range(len(dimension.values)))]
    if dimension.whole:
        return asked.suggest_int(key, dimension.low, dimension.high, log=dimension.log)
    drawn = float(f"{asked.suggest_float(key, dimension.low, dimension.high, log=dimension.log):.{_DIGITS}g}")
    return min(max(drawn, dimension.low), dimension.high)


def _place(value: Any, dimension: Range | Choices) -> Any:
    """What optuna calls this value; None outside of the space."""
    if isinstance(dimension, Choices):
        return dimension.values.index(value) if value in dimension.values else None
    fits = isinstance(value, int if dimension.whole else int | float) and not isinstance(value, bool)
    return value if fits and dimension.low <= value <= dimension.high else None


def _size(dimension: Range | Choices) -> int | float:
    if isinstance(dimension, Choices):
        return len(dimension.values)
    return dimension.high - dimension.low + 1 if dimension.whole else math.inf


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise UserError("search needs optuna, which is not installed: pip install 'decodelab[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
