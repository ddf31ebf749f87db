"""tracking=wandb: a run or a training mirrored as a run of Weights & Biases, while it goes on and when it is over.

One run a cell and sweep: its id is the run's key and the sweep's id, with a number behind it where that is taken. A run
of no sweep has the key and random digits: others of its key may lie in folders that are not known here, and go to the
same project. So nothing is ever appended to an earlier run. Nothing that goes wrong here ends the run.
"""

import importlib.util
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import UserError
from .files import read_lines
from .tracking import RUN_FILES, RunInfo, Tracker, Untracked

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]
MODES: tuple[Mode, ...] = get_args(Mode)
MOST_ROWS = 10_000  # wandb's own bound of a logged table
START_S, FINISH_S = 30.0, 300.0  # how long an unreachable server may hold a run up, at its start and at its end
COLUMNS = (
    "id", "category", "speedup", "tokens_per_step", "accepted", "baseline", "strategy", "divergence"
)  # fmt: skip
# Names in wandb: where the number stands in result.json. What is null there is not logged.
SUMMARY: Mapping[str, str] = {
    "status": "status",
    "speedup/value": "speedup.value",
    "speedup/low": "speedup.low",
    "speedup/high": "speedup.high",
    "speedup/n": "speedup.n",
    "speedup/end_to_end": "end_to_end_speedup.value",
    "speedup/predicted": "predicted_speedup",
    "accept/rate": "strategy.acceptance_rate",
    "accept/tokens_per_step": "strategy.tokens_per_step",
    "accept/tokens_per_drafted_step": "strategy.tokens_per_drafted_step",
    "accept/drafted_per_step": "strategy.drafted_per_step",
    "accept/steps": "strategy.steps",
    "accept/steps_without_draft": "strategy.steps_without_draft",
    "exactness/verdict": "exactness.verdict",
    "exactness/identical": "exactness.identical",
    "exactness/prompts": "exactness.prompts",
    "time/ttft_s": "strategy.ttft_s",
    "time/tpot_s": "strategy.tpot_s",
    "time/latency_s": "strategy.latency_s",
    "time/itl_p50_s": "strategy.itl_p50_s",
    "time/itl_p99_s": "strategy.itl_p99_s",
    "time/tokens_per_second": "strategy.tokens_per_second",
    "time/draft_share": "strategy.time_share.draft",
    "time/verify_share": "strategy.time_share.verify",
    "baseline/ttft_s": "baseline.ttft_s",
    "baseline/tpot_s": "baseline.tpot_s",
    "baseline/tokens_per_second": "baseline.tokens_per_second",
    "hardware/mbu": "decode.mbu",
    "hardware/mfu_prefill": "prefill.mfu_useful",
    "memory/weights_bytes": "memory.weights_bytes",
    "memory/kv_bytes": "memory.kv_bytes",
    "memory/peak_bytes": "memory.peak_bytes",
}


@dataclass(frozen=True, slots=True)
class WeightsAndBiases:
    """Settings of tracking=wandb; the keys are explained in configs/tracking/wandb.yaml."""

    mode: Mode | None = None
    project: str | None = None
    entity: str | None = None
    tags: tuple[str, ...] = ()
    dir: str | None = None
    rows: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.rows <= MOST_ROWS:
            raise UserError(f"tracking.rows={self.rows}: between 0 and {MOST_ROWS}; samples.jsonl has every prompt")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise UserError(f"tracking.tags: {tag!r} has {len(tag)} characters; a tag has 1 to 64")
        if self.dir is not None and not self.dir.strip():
            raise UserError("tracking.dir is empty; name a folder, or null for the run's own")

    def chosen_mode(self) -> Mode:
        said = self.mode or os.environ.get("WANDB_MODE") or "online"
        for mode in MODES:
            if said == mode:
                return mode
        raise UserError(f"WANDB_MODE={said} is unknown here: {', '.join(MODES)}; tracking.mode=… overrules it")

    def check(self) -> None:
        """No package, a name that wandb refuses, or online without a login: one line, and nobody is asked anything."""
        mode = self.chosen_mode()
        if mode == "disabled":
            return
        found = importlib.util.find_spec("wandb")
        if found is None or found.origin is None:  # without an origin: a folder `wandb` that an offline run has left
            raise UserError("tracking=wandb needs wandb: pip install 'decodelab[tracking]', or tracking=none")
        with _at_home(None):
            import wandb
            from wandb.sdk.lib import wbauth

            try:
                wandb.Settings(project=self.chosen_project(), entity=self.entity)
            except wandb.Error as error:
                raise UserError(f"tracking.project={self.chosen_project()} is refused: {error}") from None
            if mode != "online":
                return
            host = wandb.setup().settings.base_url
            try:
                login = wbauth.authenticate_session(host=host, source="decodelab", prompt=False, update_session=False)
            except wandb.Error as error:
                raise UserError(f"tracking.mode=online finds a login that is none: {_line(error)}") from None
        if login is None:
            remedy = "run `wandb login`, or set WANDB_API_KEY, or take tracking.mode=offline"
            raise UserError(f"tracking.mode=online needs a login to {host}, and there is none: {remedy}")

    def chosen_project(self) -> str:
        return self.project or os.environ.get("WANDB_PROJECT") or "decodelab"

    def open(self, run: RunInfo) -> Tracker:
        return Untracked() if self.chosen_mode() == "disabled" else Mirror(self, run)


@dataclass(slots=True)
class Mirror:
    """One run of wandb. A row that cannot be logged is the last one that is tried; the end is tried all the same."""

    settings: WeightsAndBiases
    info: RunInfo
    warnings: list[str] = field(default_factory=list)
    _run: "wandb.Run | None" = None
    _deaf: bool = False
    _status: str = "failed"

    @property
    def root(self) -> Path:
        """wandb makes a folder `wandb` in it."""
        return Path(self.settings.dir or self.info.folder).expanduser().absolute()

    def __enter__(self) -> "Mirror":
        with self._harmless("start a run"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._run = self._started()
            if self._trains:
                self._run.define_metric("*", step_metric="step")
            else:
                self._run.define_metric("running/*", step_metric="prompt")
        return self

    @property
    def _trains(self) -> bool:
        return self.info.job == "train"

    def row(self, row: Mapping[str, Any]) -> None:
        if self._run is None or self._deaf:
            return
        self._deaf = True
        with self._harmless("log a row"):
            self._run.log(_known(row))
            self._deaf = False

    def done(self, result: Mapping[str, Any], files: Sequence[str] = RUN_FILES) -> None:
        self._status = str(result["status"])
        if self._run is None:
            return
        with self._harmless("log the result"):
            self._run.summary.update(_known(result) if self._trains else flat(result))
        if not self._trains:
            with self._harmless("log the table of prompts"):
                import wandb

                rows = table(self.info.folder, self.settings.rows)
                self._run.log({"prompts": wandb.Table(columns=list(COLUMNS), data=rows)})
        with self._harmless("keep the files of the run as an artifact"):
            import wandb

            artifact = wandb.Artifact(f"{self._run.id}-files", type="run")
            for file in (self.info.folder.absolute() / name for name in files):
                if file.exists():  # where it lies: no copy, neither here nor in a cache
                    artifact.add_file(str(file), policy="immutable", skip_cache=True)
            self._run.log_artifact(artifact)

    def __exit__(self, *error: object) -> None:
        if self._run is None:
            return
        _, raised, _ = error
        if raised is not None:
            self._status = "interrupted" if isinstance(raised, KeyboardInterrupt) else "failed"
        with self._harmless("log how the run ended"):
            said = {} if raised is None else {"error": _line(raised) or type(raised).__name__}
            self._run.summary.update({"status": self._status, **said})
        with self._harmless("finish the run"):
            self._run.finish(exit_code=0 if self._status == "done" else 1)

    def _started(self) -> "wandb.Run":
        import wandb

        mode = self.settings.chosen_mode()
        for run_id in self._free_ids():
            try:
                return self._init(run_id, mode)
            except wandb.Error as error:
                if mode == "online" and "already exists" in str(error):  # on the server
                    continue
                if mode != "online":
                    raise
                self._warn(f"wandb did not start online ({_line(error)}): the run is recorded offline")
                mode = "offline"  # under the next id: what failed to start still holds this one
        raise AssertionError("the numbers have an end")

    def _init(self, run_id: str, mode: Mode) -> "wandb.Run":
        import wandb

        info, settings = self.info, self.settings
        recorded = {"digests": dict(info.digests), "provenance": dict(info.provenance)}
        return wandb.init(
            id=run_id,
            mode=mode,
            dir=str(self.root),
            project=settings.chosen_project(),
            entity=settings.entity,
            group=info.sweep,
            job_type=info.job,
            name=info.label,
            tags=list(settings.tags),
            config={**info.config, "key": info.key, "sweep_id": info.sweep, **recorded},
            resume="never",  # a run of this id on the server is an error, not something to append to
            reinit="create_new",  # runs that the user's program has open are left alone
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                x_disable_stats=True,  # sampling the machine would disturb what is timed
                init_timeout=START_S,
                finish_timeout=FINISH_S,
                finish_timeout_raises=True,
            ),
        )

    def _free_ids(self) -> Iterator[str]:
        """The key with the sweep's id or random digits; then the same with -2, -3, …: ids that no run here has had."""
        sweep = secrets.token_hex(4) if self.info.sweep is None else self.info.sweep
        wanted = f"{self.info.key}-{re.sub(r'[^A-Za-z0-9_.-]', '-', sweep)[-40:]}"
        everywhere, there = (self.root, "") if self.settings.dir else (self.root.parent, "*/")  # of runs beside it too
        for number in count(1):
            run_id = wanted if number == 1 else f"{wanted}-{number}"
            if not any(everywhere.glob(f"{there}wandb/*run-????????_??????-{run_id}")):
                yield run_id

    @contextmanager
    def _harmless(self, doing: str) -> Iterator[None]:
        """What fails inside is a line in `warnings` and on standard error."""
        try:
            with _at_home(self.root / "wandb"):
                yield
        except Exception as error:  # noqa: BLE001  # wandb's errors have no common class, and none may end a run
            why = _line(error) or type(error).__name__
            self._warn(f"wandb could not {doing} ({why}); the run goes on, its files hold everything")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        print(f"decodelab: warning: {text}", file=sys.stderr)


def flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """What result.json holds under the names that wandb shows: those of SUMMARY, `accept/position/I`,
    `category/NAME/{speedup,tokens_per_step,acceptance_rate}`, `compare_hf/MODE/tokens_per_{second,step}` and
    `quality/TASK/METRIC` with its bounds as `…/low` and `…/high`. What is null is left out."""
    found = {name: _at(result, path) for name, path in SUMMARY.items()}
    for i, at in enumerate(_at(result, "strategy.acceptance_by_position") or (), 1):
        found[f"accept/position/{i}"] = at["rate"]
    for name, category in result["by_category"].items():
        found[f"category/{name}/speedup"] = category["speedup"]["value"]
        for key in ("tokens_per_step", "acceptance_rate"):
            found[f"category/{name}/{key}"] = category[key]
    for mode, row in (result["compare_hf"] or {}).items():
        for key in ("tokens_per_second", "tokens_per_step"):
            found[f"compare_hf/{mode}/{key}"] = row[key]
    for task, scores in (_at(result, "quality.tasks") or {}).items():
        for metric, score in scores["metrics"].items():
            found[f"quality/{task}/{metric}"] = score["value"]
            found |= {f"quality/{task}/{metric}/{bound}": score[bound] for bound in ("low", "high")}
    return _known(found)


def table(folder: Path, rows: int) -> list[list[Any]]:
    """A row a prompt, at most so many, in the order of COLUMNS, from the files of a run. `speedup` and
    `tokens_per_step` are of this prompt alone; `divergence`: the first position where the outputs differ."""
    steps: dict[str, list[Mapping[str, Any]]] = {}
    for event in read_lines(folder / "events.jsonl"):
        if event["event"] == "step" and event["side"] == "strategy":
            steps.setdefault(event["id"], []).append(event)
    made: list[list[Any]] = []
    for sample, _ in zip(read_lines(folder / "samples.jsonl"), range(rows), strict=False):
        mine = steps.get(sample["id"], [])
        base, ours = sample["baseline"]["tpot_s"], sample["strategy"]["tpot_s"]
        made.append(
            [
                sample["id"],
                sample["category"],
                base / ours if base is not None and ours else None,
                sum(step["emitted"] for step in mine) / len(mine) if mine else None,
                sum(step["accepted"] for step in mine),
                sample["baseline"]["text"],
                sample["strategy"]["text"],
                sample["divergence"]["position"] if sample["divergence"] else None,
            ]
        )
    return made


def _at(result: Mapping[str, Any], path: str) -> Any:
    """None where a part of the path is null."""
    found: Any = result
    for name in path.split("."):
        found = None if found is None else found[name]
    return found


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


@contextmanager
def _at_home(folder: Path | None) -> Iterator[None]:
    """wandb in silence, with its caches and logs in `folder`, and telling nobody of its own errors; what the user's
    environment says of these stands."""
    ours = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    if folder is not None:
        ours |= {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_DATA_DIR": str(folder / "data")}
    added = [name for name in ours if name not in os.environ]
    os.environ.update({name: ours[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
