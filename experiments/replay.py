"""Known answers, and what a drafter would have done on them: `replay=FILE`. No model is loaded.

FILE is the folder of a run, or its samples.jsonl: its prompts are ids, and the answers are plain decoding's. Or it is a
task's JSONL whose rows have an `answer` (for a row of several turns a list of them), which the tokenizer of `model`
reads; each turn is a prompt. No other key is read as one: a `reference` or `solution` is seldom what a model would say.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..decoding import cost
from ..decoding.draft import DrafterSettings, Resources
from ..decoding.events import Generation
from ..decoding.law import LawSettings
from ..decoding.model.source import ModelSpec, open_source
from ..decoding.replay import replay
from ..decoding.request import Request, request
from ..drafting.suffix_array import BORDER
from ..errors import UserError
from .files import read_result
from .format import was_busy
from .items import GOLD, Row
from .measure import Measurement, Sample, Timing
from .tasks import Task, TaskSettings, encode, encode_documents, load_task, read_file, read_rows

SAMPLES, RESULT = "samples.jsonl", "result.json"
_ANSWERED = ("model", "acceptance", "task", "dtype", "seed", "quantization", "attention")  # how answers came to be
_ANY_ID = BORDER  # no model says how many there are; drafters keep 32 bits of an id
_SHORT = 8  # tokens of an answer, below which there is next to nothing to draft

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recording:
    """A file of answers. `run`: what the run found that recorded them, empty where no result.json is beside the file;
    `task`: of a file of texts."""

    file: Path
    digest: str
    label: str
    run: Mapping[str, Any] = field(default_factory=dict)
    task: Task | None = None

    @property
    def model(self) -> ModelSpec | None:
        """Which model gave the answers, as far as that was recorded."""
        keys = self.run.get("config", {}).get("model")
        return ModelSpec(**keys) if keys else None

    @property
    def profile(self) -> cost.Profile | None:
        """T(k) of the recorded run."""
        known = self.run.get("profile")
        seconds = {int(k): float(s) for k, s in known["seconds"].items()} if known else {}
        return cost.Profile(known["context"], seconds) if known else None

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration, with what the answers are from in place of what nobody asked for."""
        known = self.run.get("config", {})
        told = {key: known[key] for key in _ANSWERED if key in known}
        if self.task is not None:
            told["task"] = {**config["task"], "name": None, "dataset": None, "path": str(self.file)}
        return {**config, **told, "timing": "untimed", "batch": 1}

    def about(self, prompts: int) -> dict[str, Any]:
        """What result.json says of it under `replay`."""
        made = self.run.get("provenance", {})
        return {
            "source": str(self.file),
            "run": self.run.get("key"),
            "prompts": prompts,
            "answers": "the file's" if self.task else "plain decoding's",
            "device": made.get("device"),
            "dtype": made.get("dtype"),
        }


def open_recording(given: str, settings: TaskSettings) -> Recording:
    """What `replay` names. Recorded answers are read when they are replayed, texts now; `settings` are for those."""
    path = Path(given).expanduser()
    file = path / SAMPLES if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise UserError(f"replay={given} holds no {SAMPLES}: name the folder of one run, or a file of answers")
    digest = hashlib.sha256(read_file(file, "replay")).hexdigest()
    first = next(read_rows(file, "replay"), None)
    if first is None:
        raise UserError(f"replay={given} is empty; it holds a row a prompt, with its answer")
    if "baseline" in first.fields:
        if settings.limit is not None:
            raise UserError("task.limit is of a task, and replay takes a recorded run whole: leave it out")
        beside = file.with_name(RESULT)
        return Recording(file, digest, file.resolve().parent.name, read_result(beside) if beside.exists() else {})
    return Recording(file, digest, file.stem, task=load_task(replace(settings, path=str(file), dataset=None)))


def recorded(recording: Recording, settings: TaskSettings, resources: Resources) -> list[Sample]:
    """Each prompt with its answer on the baseline's side; the strategy has done nothing yet. Ids need no tokenizer."""
    if recording.task is not None:
        found = _texts(recording.task, settings, resources.tokenizer)
    else:
        found = [_recorded(row) for row in read_rows(recording.file, "replay")]
    return [replace(sample, unit=unit) for unit, sample in enumerate(found)]


def _recorded(row: Row) -> Sample:
    if "prompt_ids" not in row.fields:
        raise UserError(f"{row.where} has no prompt_ids, as runs of an earlier version: record it again")
    said = row.fields.get("baseline")
    plain = said if isinstance(said, Mapping) else {}
    answer = _ids(row, plain.get("tokens"), "baseline.tokens")
    documents = [_ids(row, ids, "each of documents") for ids in row.entries("documents")]
    most = row.fields.get("max_new_tokens")
    if type(most) is not int or most < len(answer):
        raise UserError(f"{row.where}: max_new_tokens={most!r} is below the {len(answer)} tokens of its answer")
    asked = _request(_ids(row, row.fields["prompt_ids"], "prompt_ids"), most, documents)
    return _sample(str(row.fields.get("id")), str(row.fields.get("category")), asked, answer, plain)


def _ids(row: Row, found: Any, key: str) -> list[int]:
    if not isinstance(found, list) or not found or not all(type(i) is int and 0 <= i < _ANY_ID for i in found):
        raise UserError(
            f"{row.where}: {key} must be a list of token ids that is not empty, not {found!r:.60}; ids have 32 bits"
        )
    return found


def _texts(task: Task, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Answers are cut at `task.max_new_tokens`, as a run's are."""
    samples = []
    for item in task.items:
        known = item.gold.get("answer")
        answers = [known] if isinstance(known, str) else known
        turns = f"a text, or one for each of {item.turns} turns" if item.turns > 1 else "a text"
        if not isinstance(answers, list) or not 1 <= len(answers) <= item.turns:
            others = ", ".join(key for key, value in item.gold.items() if key in GOLD and value)
            instead = f"; rename one of its {others:.60}, if that is it" if known is None and others else ""
            raise UserError(f"{item.id}: replay reads the key answer, {turns}, not {known!r:.60}{instead}")
        documents = encode_documents(item, tokenizer)
        for turn, text in enumerate(answers):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else []
            if not ids:
                raise UserError(f"{item.id}: the answer must be {turns} that is not empty, not {text!r:.60}")
            name = item.id if item.turns == 1 else f"{item.id}/turn{turn + 1}"
            most = settings.max_new_tokens
            asked = _request(encode(item, answers[:turn], tokenizer, settings), most, documents)
            reason = "length" if len(ids) >= most else None
            samples.append(_sample(name, item.category, asked, ids[:most], {"reason": reason}))
    return samples


def _request(prompt: Sequence[int], most: int, documents: Sequence[Sequence[int]]) -> Request:
    return request(
        prompt,
        law=LawSettings(),
        max_new_tokens=most,
        vocab=_ANY_ID,
        context=len(prompt) + most,
        documents=documents,
    )


def _sample(name: str, category: str, asked: Request, answer: list[int], plain: Mapping[str, Any]) -> Sample:
    known = Generation(0, len(asked.prompt), answer, reason=plain.get("reason"))
    return Sample(name, category, 0, asked, known, Generation(0, len(asked.prompt)), answer)


def tokenizer_of(spec: ModelSpec | None, progress: Progress) -> Callable[[], PreTrainedTokenizerBase]:
    """Opened when it is asked for, once."""

    @cache
    def opened() -> PreTrainedTokenizerBase:
        if spec is None:
            raise UserError("replay has token ids of an unknown model, and this drafter needs its tokenizer")
        return open_source(spec, progress).tokenizer

    return opened


def carry_out(
    settings: DrafterSettings, samples: Sequence[Sample], resources: Resources, progress: Progress
) -> Measurement:
    """The drafter on each answer, in the file's order. Ctrl-C keeps the prompts that are finished."""
    drafter = settings.build(resources)
    out = Measurement(timed=False, timing=Timing("replay", None))
    try:
        for done, sample in enumerate(samples, 1):
            (sample.strategy,) = replay(drafter, [sample.request], [sample.plain])
            sample.strategy.reason = sample.baseline.reason
            out.samples.append(sample)
            progress("replaying", done, len(samples))
    except KeyboardInterrupt:
        if not out.samples:
            raise
        out.interrupted = True
    return out


def predicted(recording: Recording, measured: Measurement) -> dict[str, Any] | None:
    """What the steps would come to by T(k) of the recorded run, with drafting as fast as it was here."""
    known, profile = recording.run.get("profile"), recording.profile
    steps = [step for sample in measured.samples for step in sample.strategy.steps]
    if not known or profile is None or not steps:
        return None
    a_step, a_token = cost.fit_cost([s.drafted for s in steps], [s.draft_s for s in steps])
    return cost.account(profile, cost.DraftCost(a_step, a_token, known["draft"]["host_s"]), steps)


def doubts(recording: Recording, settings: DrafterSettings, samples: Sequence[Sample]) -> Iterator[str]:
    """Why what is found may say little, a line each."""
    if settings.needs.documents and not any(s.request.documents for s in samples):
        yield f"no prompt of {recording.label} has documents, from which this drafter copies"
    if (half := median(len(s.plain) for s in samples)) < _SHORT:
        yield f"half of the answers of {recording.label} have {half:g} tokens or fewer: too short to draft much of them"
    noise = recording.profile.doubt(was_busy(recording.run)) if recording.profile else None
    if noise is not None:
        yield noise
