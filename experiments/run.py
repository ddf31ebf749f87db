"""The job `run`: strategy against baseline on a task."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from ..decoding import cost
from ..decoding.draft import Resources
from ..decoding.errors import UserError
from ..decoding.model.source import ModelSpec, Source, open_source
from . import hardware, table
from .compare_hf import HfPeer, summarise, why_not
from .composition import draft_models, resolve, resolve_device, resolve_dtype, unused_gpu
from .config import RunConfig
from .files import read_result, write_result
from .format import BUSY, NOISY
from .lab import Heard, Lab, Progress, Warm, build_lab, draft_digest
from .measure import Measurement, Sample, ask_hf, measure, units
from .memory import Plan
from .progress import Watch
from .quality.against import RunQuality
from .quality.answers import answers_key
from .quality.evaluate import ANSWERS, Exam, measure_quality, no_quality, prepare, quality_digest
from .replay import Recording, carry_out, open_recording, predicted, recorded, tokenizer_of
from .result import build_result, provenance, run_key, speedup, write_replay, write_run
from .tasks import Task, load_task
from .tracking import RunInfo, Running, Tracker

PROFILED = 3  # prompts from which the draft's cost is taken
CODES = {"done": 0, "broken": 1, "failed": 1, "interrupted": 130}  # of the command, by the run's status
UNFINISHED = ("interrupted", "failed")
BATCHED = "no speedup is predicted for batch > 1: T(k) is measured for the rows of one sequence"


@dataclass(frozen=True)
class Identity:
    """What a run is before any weight is loaded. `key` is a hash of `resolved` and `digests`. A replay has a recording,
    and no source but to read its texts."""

    source: Source | None
    task: Task | None
    device: torch.device
    dtype: torch.dtype
    why: str  # the reason of the dtype
    digests: Mapping[str, str | None]
    resolved: Mapping[str, Any]
    slug: str  # drafter and model
    key: str
    recording: Recording | None = None


def identify(
    config: RunConfig,
    progress: Progress | None = None,
    *,
    speed: bool = True,
    opened: Callable[[ModelSpec], Source] | None = None,
) -> Identity:
    """Opens the files of the model and the task. Without `speed`, the job is `evaluate` and the task plays no part.
    `opened`: of many cells, what opens a model once for all."""
    opened = opened or partial(open_source, progress=progress)
    if config.replay is not None:
        return _identify_replay(config, config.replay, opened, speed)
    if not speed and not config.quality.tasks:
        raise UserError("evaluate has nothing to do: name tasks, such as tasks=[{path: my.jsonl}]")
    device = resolve_device(config.device)
    dtype, why = resolve_dtype(config.dtype, device)
    task = load_task(config.task) if speed else None
    source = opened(config.model)
    digests = {
        "weights": source.digest,
        "draft": draft_digest(config.drafting, opened),
        "task": None if task is None else task.digest,
        "quality": quality_digest(config),
        "replay": None,
    }
    # what `auto` and null came to is part of what was run
    settled = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "threads": config.threads or torch.get_num_threads(),
    }
    resolved = config.resolved | settled
    slug = f"{_drafter(config)}-{source.label}".replace("/", "_")
    return Identity(source, task, device, dtype, why, digests, resolved, slug, run_key(resolved, digests))


def _identify_replay(config: RunConfig, replay: str, opened: Callable[[ModelSpec], Source], speed: bool) -> Identity:
    if not speed:
        raise UserError("evaluate needs a model, and replay has answers and none: leave replay out")
    recording = open_recording(replay, config.task)
    source = opened(config.model) if recording.task else None
    known = recording.run.get("digests", {})
    digests = {
        "weights": source.digest if source else known.get("weights"),
        "draft": draft_digest(config.drafting, opened),
        "task": recording.task.digest if recording.task else known.get("task", recording.digest),
        "quality": None,
        "replay": recording.digest,
    }
    threads = {"device": "cpu", "threads": config.threads or torch.get_num_threads()}
    resolved = recording.settled(config.resolved) | threads
    slug = f"{_drafter(config)}-replay-{recording.label}".replace("/", "_")
    cpu, why = torch.device("cpu"), "nothing is computed in it"
    key = run_key(resolved, digests)
    return Identity(source, recording.task, cpu, torch.float32, why, digests, resolved, slug, key, recording)


def _drafter(config: RunConfig) -> str:
    return type(config.drafting).__module__.rpartition(".")[2]  # one file a drafter


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
    load_before = hardware.load_average()
    if config.compare_hf and (reason := why_not(config.acceptance.law())) is not None:
        raise UserError(reason)
    with Watch() as watch, Heard() as heard:
        what = identify(config, watch.step, speed=speed)
        _as_planned(what, key)
        source, dtype, device = what.source, what.dtype, what.device
        assert source is not None, "a run has a model"
        notes = resolve(config, source, what.task).notes()
        if (idle := unused_gpu()) is not None:
            notes.append(idle)
        exam = prepare(config, source, what.key, what.resolved)
        folder = _folder(config, what, started)
        title = f"{source.label}: {_drafter(config)}, {type(config.acceptance).__name__.lower()}"
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
        info = RunInfo(what.key, title, job, folder, what.resolved, what.digests, made, sweep)
        with config.tracking.open(info) as tracker:
            try:
                held = warm.holds(source, dtype, device)
                if not held:
                    warm.forget()
                plan = Plan.of(source, config.drafting, dtype, device, compares=config.compare_hf and speed, held=held)
                plan.check()
                target = warm.target(source, dtype, device, watch.step)
                lab = build_lab(source, target, config.drafting, config.acceptance, progress=watch.step)
                measured = profiled = peaks = quality = failure = None
                hf = _peer(config, source, dtype, device) if plan.compares and not plan.apart else None
                if what.task is not None:
                    timed = config.timing != "untimed"
                    peaks = hardware.peaks(device, dtype, torch.get_num_threads()) if timed else None
                    if peaks is not None and (not peaks.quiet or (load_before or 0.0) > BUSY):
                        notes.append(NOISY)
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
                    profiled = _profile(lab, measured, config.batch, config.seed) if config.profile else None
                if exam is not None and not (measured is not None and measured.interrupted):
                    mine = RunQuality(folder, what.key, {}, what.resolved, what.digests, made, ())
                    quality, failure = _quality(lab, exam, config, mine, watch.step)
            except BaseException:
                with suppress(OSError):  # it is empty
                    folder.rmdir()
                raise
            result = build_result(
                what.resolved,
                lab,
                measured,
                digests=what.digests,
                provenance=made | {"load_after": hardware.load_average(), "clock_mhz": hardware.clock_mhz()},
                peaks=peaks,
                peak_bytes=hardware.peak_memory_bytes(device),
                warnings=[*notes, *heard.texts, *tracker.warnings],
                profile=profiled,
                compare_hf=_summary(hf, measured.samples) if hf and measured else None,
                quality=quality,
            )
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
        told.insert(0, f"interrupted after {result['prompts']} prompts; they are in {folder}")
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
        title = f"{_drafter(config)} on the answers of {recording.label}"
        made = provenance(
            what.dtype,
            config.seed,
            device=hardware.describe_device(what.device),
            dtype_reason=what.why,
            started_at=started.isoformat(timespec="seconds"),
            load_before=hardware.load_average(),
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
            if config.drafting.needs.documents and not any(s.request.documents for s in samples):
                notes.append(f"no prompt of {recording.label} has documents, from which this drafter copies")
            result = build_result(
                what.resolved,
                None,
                measured,
                digests=what.digests,
                provenance=made | {"load_after": hardware.load_average(), "clock_mhz": hardware.clock_mhz()},
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
        print(f"decodelab: interrupted after {result['prompts']} prompts; they are in {folder}", file=sys.stderr)
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
            tracker.prompt(row)

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
        profile = cost.measure_target(lab.target, context=max(1, min(context, lab.context - max(cost.ROWS))))
        draft = cost.draft_cost(lab.target, lab.drafter, lab.acceptance, some, seed=seed)
    except KeyboardInterrupt:
        measured.interrupted = True
        return None
    timed = speedup(samples, "decode").value if measured.timed else None
    found = cost.account(profile, draft, steps, timed)
    return found if batch == 1 else found | {"predicted_speedup": None, "explained": [BATCHED]}


def _peer(config: RunConfig, source: Source, dtype: torch.dtype, device: torch.device) -> HfPeer:
    """transformers' model, assisted by the drafter's first model that shares its tokenizer, with drafts as long."""
    drafts = (open_source(spec) for spec in draft_models(config.drafting))
    draft = next((d for d in drafts if d.tokenizer.get_vocab() == source.tokenizer.get_vocab()), None)
    return HfPeer.build(source, dtype, device, draft, max(1, config.drafting.gives.depth))


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
        folder.mkdir(parents=True, exist_ok=config.output is not None)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"output folder {folder} cannot be written ({error.strerror}); name another with output=DIR"
        ) from error
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
