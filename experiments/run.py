"""The job `run`: strategy against baseline on a task."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from ..decoding import cost
from ..decoding.draft import Resources
from ..decoding.model.source import ModelSpec, Source, open_source
from ..errors import UserError
from . import hardware, load, table
from .compare_hf import Assist, HfPeer, summarise, why_not
from .composition import draft_models, resolve, unused_gpu
from .config import RunConfig
from .files import make_folder, read_result, unwritable, write_result
from .format import BUSY, NOISY, attention_name, counted
from .identity import Identity, drafter_name, identify, overlaps, standing_in
from .lab import Heard, Lab, Progress, Warm, build_lab
from .measure import Measurement, Sample, ask_hf, measure, units
from .memory import Plan
from .progress import Watch
from .quality.answers import answers_key
from .quality.evaluate import ANSWERS, Exam, measure_quality, no_quality, prepare
from .quality.run_quality import RunQuality
from .replay import carry_out, doubts, predicted, recorded, tokenizer_of
from .result import build_result, provenance, run_key, speedup, write_replay, write_run
from .tracking import RunInfo, Running, Tracker

PROFILED = 3  # prompts from which the draft's cost is taken
CODES = {"done": 0, "broken": 1, "failed": 1, "interrupted": 130}  # of the command, by the run's status
UNFINISHED = ("interrupted", "failed")
UNKNOWN_COST = (
    "the output is lossy by design, and what that costs was not measured: add quality.tasks=[{path: FILE.jsonl}], a "
    "task whose answers are generated"
)
BATCHED = "no speedup is predicted for batch > 1: T(k) is measured for the rows of one sequence"


@dataclass(frozen=True)
class Outcome:
    """A run that was carried out: its folder and what result.json holds. `code`: the command's exit code."""

    folder: Path
    result: Mapping[str, Any]
    code: int


def run(config: RunConfig) -> int:
    """Measure, write the run's folder, print the table. 1 if the output is broken or quality failed, 130 if
    interrupted, else 0."""
    return execute(config).code


def evaluate(config: RunConfig) -> int:
    """Quality alone, in the same folder layout."""
    return execute(config, speed=False).code


def execute(
    config: RunConfig,
    *,
    speed: bool = True,
    warm: Warm | None = None,
    sweep: str | None = None,
    key: str | None = None,
) -> Outcome:
    """One run, whole. `warm`: what a worker keeps from cell to cell; `sweep`: the id of the sweep it belongs to; `key`:
    what it had when it was planned, and a run that has become another one since is refused."""
    config.tracking.check()
    with hardware.torch_threads(config.threads):
        if config.replay is not None:
            return _replay(config, speed, sweep, key)
        return _execute(config, speed, Warm() if warm is None else warm, sweep, key)


def _execute(config: RunConfig, speed: bool, warm: Warm, sweep: str | None, key: str | None) -> Outcome:
    started = datetime.now(UTC)
    load_before, begun = load.load_of_others(), load.moment()
    if config.compare_hf and (reason := why_not(config.acceptance.law())) is not None:
        raise UserError(reason)
    with Watch() as watch, Heard() as heard:
        what = identify(config, watch.step, speed=speed)
        _as_planned(what, key)
        assert what.source is not None, "a replay is carried out elsewhere"
        exam = prepare(config, what.source, what.key, what.resolved)
        overlapping = overlaps(what.calibrated, what.task, {} if exam is None else exam.tasks)  # before a copy is made
        source, dtype, device = what.target(watch.step), what.dtype, what.device
        notes = [*overlapping, *resolve(config, source, what.task).notes()]
        if (idle := unused_gpu()) is not None:
            notes.append(idle)
        if (instead := standing_in(dtype, device)) is not None:
            notes.append(instead)
        if exam is None and config.acceptance.guarantee == "lossy":
            notes.append(UNKNOWN_COST)
        folder = _folder(config, what, started)
        title = f"{source.label}: {drafter_name(config)}, {type(config.acceptance).__name__.lower()}"
        title += f", {attention_name(what.resolved['attention'])}" if what.layout is not None else ""
        title += f", {what.task.label}" if what.task else ", quality"
        job = "both" if speed and config.quality.tasks else "speed" if speed else "quality"
        made = provenance(
            dtype,
            config.seed,
            device=hardware.describe_device(device),
            dtype_reason=what.why,
            started_at=started.isoformat(timespec="seconds"),
            load_before=load_before,
        )
        if (quantised := what.quantised) is not None:
            made |= {"quantised": quantised}
            notes += quantised["warnings"] or ()
        info = RunInfo(what.key, title, job, folder, what.resolved, what.digests, made, sweep)
        with config.tracking.open(info) as tracker:
            measured = profiled = peaks = quality = failure = hf = None

            def found(quality: dict[str, Any] | None) -> dict[str, Any]:
                late = {"load_after": load.others_since(begun), "clock_mhz": hardware.clock_mhz()}
                return build_result(
                    what.resolved,
                    lab,
                    measured,
                    digests=what.digests,
                    provenance=made | late,
                    peaks=peaks,
                    peak_bytes=hardware.peak_memory_bytes(device),
                    warnings=[*notes, *heard.texts, *tracker.warnings],
                    profile=profiled,
                    compare_hf=_summary(hf, measured.samples) if hf and measured else None,
                    quality=quality,
                )

            try:
                kernels = config.kernels.kernels
                held = warm.holds(source, dtype, device, what.layout, kernels)
                if not held:
                    warm.forget()
                plan = Plan.of(source, config.drafting, dtype, device, compares=config.compare_hf and speed, held=held)
                plan.check()
                target = warm.target(source, dtype, device, watch.step, what.layout, kernels)
                lab = build_lab(
                    source, target, config.drafting, config.acceptance, progress=watch.step, pages=config.pages
                )
                hf = _peer(config, source, dtype, device) if plan.compares and not plan.apart else None
                if what.task is not None:
                    timed = config.timing != "untimed"
                    peaks = hardware.peaks(device, dtype, torch.get_num_threads()) if timed else None
                    then = load.moment()
                    measured = measure(
                        lab,
                        what.task,
                        config.task,
                        seed=config.seed,
                        batch=config.batch,
                        timing=config.timing,
                        hf=hf,
                        baselines=warm.baselines,
                        progress=lambda done, total, note: watch.step("decoding", done, total, note),
                        after=_told(tracker, timed),
                    )
                    busy = max(load_before or 0.0, load.others_since(then) or 0.0) > BUSY
                    if peaks is not None and (busy or not peaks.quiet):
                        notes.append(NOISY)
                    profiled = _profile(lab, measured, config.batch, config.seed) if config.profile else None
                if exam is not None and not (measured is not None and measured.interrupted):
                    if measured is not None:  # what ends the process from here on does not take it away
                        unfinished = no_quality({}) | {"interrupted": True}
                        write_run(folder, found(unfinished), measured.samples, source.tokenizer)
                    mine = RunQuality(folder, what.key, {}, what.resolved, what.digests, made, ())
                    quality, failure = _quality(lab, exam, config, mine, watch.step)
            except BaseException:
                with suppress(OSError):  # it is empty
                    folder.rmdir()
                raise
            result = found(quality)
            samples = measured.samples if measured else []
            if plan.apart and measured is not None and not measured.interrupted and failure is None:
                del lab, target
                warm.forget()
                _compare_apart(result, lambda: _peer(config, source, dtype, device), samples, source, plan, watch.step)
            console = Console(highlight=False, markup=False)
            table.show(result, samples, title, console)  # first: a full disk does not take it away
            write_run(folder, result, samples, source.tokenizer)
            if result["status"] not in UNFINISHED:
                (folder / ANSWERS).unlink(missing_ok=True)
            console.print(f"\nwritten to {folder}", soft_wrap=True)
            tracker.done(result)
        _tell_late(folder, result, tracker)
    _tell_unfinished(folder, result)
    if failure is not None:
        raise failure
    return Outcome(folder, result, CODES[result["status"]])


def _quality(
    lab: Lab, exam: Exam, config: RunConfig, mine: RunQuality, progress: Progress
) -> tuple[dict[str, Any], BaseException | None]:
    """What was found, and what ended it and is to be raised once that and the speed are written."""
    try:
        return measure_quality(lab, exam, config, mine, progress), None
    except BaseException as error:  # noqa: BLE001  # its owner raises it: whatever it is, the speed is not lost to it
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return no_quality(dict.fromkeys(exam.tasks, why)), error


def _tell_unfinished(folder: Path, result: Mapping[str, Any]) -> None:
    """On standard error: what is missing, and how to go on."""
    if result["status"] not in UNFINISHED:
        return
    quality = result["quality"] or {}
    told = [f"quality of {name} failed: {why}" for name, why in quality.get("failed", {}).items()]
    if result["status"] == "interrupted":
        told.insert(0, f"interrupted after {counted(result['prompts'], 'prompt')}; they are in {folder}")
    if quality:
        told.append(f"the same command with output={folder} asks for the answers that are missing")
    print("decodelab: " + "; ".join(told), file=sys.stderr)


def _as_planned(what: Identity, key: str | None) -> None:
    if key not in (None, what.key):
        raise UserError("a file of its task, model or configuration has changed since it was planned: start it again")


def _replay(config: RunConfig, speed: bool, sweep: str | None, key: str | None) -> Outcome:
    """The drafter on recorded answers: a run's folder without samples, which are where they were read."""
    started = datetime.now(UTC)
    with Watch() as watch, Heard() as heard:
        what = identify(config, watch.step, speed=speed)
        _as_planned(what, key)
        recording = what.recording
        assert recording is not None
        notes = resolve(config, what.source).notes()
        folder = _folder(config, what, started)
        title = f"{drafter_name(config)} on the answers of {recording.label}"
        made = provenance(
            what.dtype,
            config.seed,
            device=hardware.describe_device(what.device),
            dtype_reason=what.why,
            started_at=started.isoformat(timespec="seconds"),
            load_before=None,
        )
        made |= {"dtype": recording.run.get("provenance", {}).get("dtype")}
        info = RunInfo(what.key, title, "replay", folder, what.resolved, what.digests, made, sweep)
        with config.tracking.open(info) as tracker:
            try:
                tokenizer = what.source.tokenizer if what.source else tokenizer_of(recording.model, watch.step)
                resources = Resources(None, tokenizer, config.acceptance.law(), watch.step)
                samples = recorded(recording, config.task, resources)
                measured = carry_out(config.drafting, samples, resources, watch.step)
            except BaseException:
                with suppress(OSError):  # it is empty
                    folder.rmdir()
                raise
            notes += doubts(recording, config.drafting, measured.samples)
            result = build_result(
                what.resolved,
                None,
                measured,
                digests=what.digests,
                provenance=made | {"load_after": None, "clock_mhz": hardware.clock_mhz()},
                peaks=None,
                peak_bytes=None,
                warnings=[*notes, *heard.texts, *tracker.warnings],
                profile=predicted(recording, measured),
                replay=recording.about(len(measured.samples)),
            )
            console = Console(highlight=False, markup=False)
            table.show(result, measured.samples, title, console)
            write_replay(folder, result, measured.samples)
            console.print(f"\nwritten to {folder}", soft_wrap=True)
            tracker.done(result)
        _tell_late(folder, result, tracker)
    if measured.interrupted:
        print(
            f"decodelab: interrupted after {counted(result['prompts'], 'prompt')}; they are in {folder}",
            file=sys.stderr,
        )
    return Outcome(folder, result, 130 if measured.interrupted else 0)


def _tell_late(folder: Path, result: dict[str, Any], tracker: Tracker) -> None:
    """What failed once the folder was whole."""
    if late := [text for text in tracker.warnings if text not in result["warnings"]]:
        result["warnings"] += late
        write_result(folder, result)


def _told(tracker: Tracker, timed: bool) -> Callable[[Sequence[Sample]], None]:
    """Hands the tracker a row a prompt."""
    running = Running()

    def after(batch: Sequence[Sample]) -> None:
        same = sum(s.divergence is None for s in batch)
        for row in running.add([s.baseline for s in batch], [s.strategy for s in batch], same, timed):
            tracker.row(row)

    return after


def _profile(lab: Lab, measured: Measurement, batch: int, seed: int) -> dict[str, Any] | None:
    """T(k) and the draft's cost, measured apart from the timed run, and what they say of it. T(k) is of one sequence.

    None where the run was interrupted or is now: what was measured before is kept.
    """
    if measured.interrupted:
        return None
    samples = measured.samples
    steps = [step for s in samples for step in s.strategy.steps]
    context = round(mean(len(s.prompt) + len(s.plain) / 2 for s in samples))
    some = [s.request for s in samples[:PROFILED]]
    try:
        context, pages = max(1, min(context, lab.context - max(cost.ROWS))), lab.pages_apart()
        profile = cost.measure_target(lab.target, context=context, pages=pages)
        draft = cost.draft_cost(lab.target, lab.drafter, lab.acceptance, some, seed=seed, pages=pages)
    except KeyboardInterrupt:
        measured.interrupted = True
        return None
    timed = speedup(samples, "decode").value if measured.timed else None
    found = cost.account(profile, draft, steps, timed)
    return found if batch == 1 else found | {"predicted_speedup": None, "explained": [BATCHED]}


def _peer(config: RunConfig, source: Source, dtype: torch.dtype, device: torch.device) -> HfPeer:
    """transformers' model, assisted by the drafter's first model that shares its tokenizer, with drafts as long."""
    draft = assistant(draft_models(config.drafting), source)
    assists = {"assisted": Assist(max(1, config.drafting.gives.depth), 0.0)}
    return HfPeer.build(source, dtype, device, draft, assists)


def assistant(drafts: Iterable[ModelSpec], source: Source) -> Source | None:
    """The first of `drafts` that can assist transformers: it needs the target's tokenizer."""
    opened = (open_source(spec) for spec in drafts)
    return next((d for d in opened if d.tokenizer.get_vocab() == source.tokenizer.get_vocab()), None)


def _summary(hf: HfPeer, samples: Sequence[Sample], interleaved: bool = True) -> dict[str, Any]:
    runs = {mode: [s.hf[mode] for s in samples] for mode in hf.modes}
    return summarise(hf, runs, [s.plain for s in samples], interleaved)


def _compare_apart(
    result: dict[str, Any],
    peer: Callable[[], HfPeer],
    samples: Sequence[Sample],
    source: Source,
    plan: Plan,
    progress: Progress,
) -> None:
    """transformers on the same prompts, now that our models are gone. What was measured before is never lost to it."""
    try:
        hf = peer()
        batches = units(samples)
        for i, batch in enumerate(batches):
            ask_hf(hf, batch, i, source.eos_ids)
            progress("transformers", i + 1, len(batches))
        result["compare_hf"] = _summary(hf, samples, interleaved=False)
        result["warnings"].append(plan.why_apart())
    except UserError as error:
        result["warnings"].append(f"transformers was not compared: {error}")
    except KeyboardInterrupt:
        result["status"] = "interrupted" if result["status"] == "done" else result["status"]


def _folder(config: RunConfig, what: Identity, started: datetime) -> Path:
    """`output`, or outputs/TIME-SLUG-KEY; made at once: a folder that cannot be written fails before the work.

    An `output` that holds the same run unfinished is taken again: speed is measured anew, quality goes on.
    """
    if config.output is not None and not config.output.strip():
        raise UserError("output is empty; name a folder, or null for a new one under outputs/")
    if config.output is not None:
        folder = Path(config.output).expanduser()
    else:
        folder = Path("outputs") / f"{started:%Y%m%d-%H%M%S}-{what.slug}-{what.key}"
    try:
        result = folder / "result.json"
        if (folder / "sweep.json").exists():
            raise UserError(f"output={config.output} holds a sweep; name another folder for a single run")
        if config.output is not None and result.exists() and not _goes_on(what, result):
            raise UserError(f"output={config.output} already holds a result; name another folder or delete that one")
        plain, count = folder, 1
        while config.output is None and folder.exists():  # two runs of one second
            count += 1
            folder = plain.with_name(f"{plain.name}-{count}")
        make_folder(folder, exist_ok=config.output is not None)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def _goes_on(what: Identity, file: Path) -> bool:
    """The run there is unfinished, and this is the same one: what is asked of quality may have been mended meanwhile,
    if the answers that are there are still its answers."""
    found = read_result(file)
    if found["status"] not in UNFINISHED:
        return False
    return bool(found["key"] == what.key) or (
        found["quality"] is not None
        and _beside_quality(found["config"], found["digests"]) == _beside_quality(what.resolved, what.digests)
    )


def _beside_quality(config: Mapping[str, Any], digests: Mapping[str, Any]) -> tuple[str, str]:
    speed = {key: value for key, value in config.items() if key not in ("quality", "tasks")}
    return run_key(speed, {**digests, "quality": None}), answers_key(config, digests)
