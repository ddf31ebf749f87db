"""The Python interface: `load`, `generate`, `compare`, `evaluate`, `load_runs`."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings
from ..decoding.events import Generation, finish
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, named, open_source
from ..errors import UserError
from .compose import described, groups
from .composition import resolve_device, resolve_dtype, resolve_pair
from .config import DTYPES, RunConfig
from .construct import Constructor
from .files import read_result, result_files
from .hardware import describe_device, peak_memory_bytes, peaks
from .items import Item, Message
from .lab import Heard, Lab, build_lab, draft_digest
from .load import load_of_others, moment, others_since
from .measure import measure
from .metrics import acceptance as acceptance_of
from .quality.evaluate import ANSWERS, measure_quality, prepare, quality_digest
from .quality.run_quality import RunQuality
from .quality.settings import QualitySettings, TaskSpec
from .result import build_result, provenance, run_key, write_run
from .tasks import Task, TaskSettings, encode, load_task

if TYPE_CHECKING:
    import pandas as pd

Prompt = str | Sequence[int]
Part = str | Mapping[str, Any]
QualityTask = str | Mapping[str, Any] | TaskSpec


@dataclass(frozen=True)
class LanguageModel:
    """A loaded target. Drafters and rules are chosen call by call."""

    source: Source
    target: Decoder

    def encode(self, prompt: Prompt, chat: bool = False) -> list[int]:
        """Token ids, as a task's prompt gets them; `chat` wraps the text as one user message in the chat template."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if chat and not self.source.tokenizer.chat_template:
            raise UserError(f"the tokenizer of {self.source.label} has no chat template; leave chat=True out")
        item = Item("the prompt", "prompts", (Message("user", prompt),), raw=True)
        return encode(item, (), self.source.tokenizer, TaskSettings(name=None, chat=chat))


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt came to. `tokens_per_step` is τ; `logprobs` of the raw logits, one a token, where asked for."""

    text: str
    tokens: tuple[int, ...]
    reason: str
    logprobs: tuple[float, ...] | None
    tokens_per_step: float | None


def load(
    model: str = "smollm2-135m",
    *,
    adapter: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> LanguageModel:
    """Load a target: a name of configs/model, a hub id, a folder or a GGUF file.

    >>> lm = decodelab.load("smollm2-135m", dtype="float32")
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    where = resolve_device(device)
    kind, _ = resolve_dtype(dtype, where)
    spec = named(model) if model in groups()["model"] else ModelSpec(path=model)
    source = open_source(replace(spec, revision=revision or spec.revision, adapter=adapter))
    return LanguageModel(source, load_decoder(source, dtype=kind, device=where))


def part(group: str, chosen: Any, expected: Any) -> Any:
    """A part by its option's name, by a mapping with `name` and keys to change, or as settings built already."""
    if isinstance(chosen, expected):
        return chosen
    if not isinstance(chosen, str | Mapping):
        raise UserError(f"{group} must be a name, a mapping with name and keys, or settings; got {chosen!r}")
    return Constructor().build(described(group, chosen, groups()[group]), expected, group)


def _lab(lm: LanguageModel, settings: DrafterSettings, rule: Acceptance) -> Lab:
    notes = resolve_pair(settings, rule, lm.source).notes()
    return build_lab(lm.source, lm.target, settings, rule, notes)


def _listed(texts: str | Sequence[str]) -> list[str]:
    """One text stands for a list of one, not for its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


@overload
def generate(lm: LanguageModel, prompts: str, *, stream: Literal[False] = False, **options: Any) -> Completion: ...
@overload
def generate(lm: LanguageModel, prompts: str, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
@overload
def generate(
    lm: LanguageModel, prompts: Sequence[Any], *, stream: Literal[False] = False, **options: Any
) -> list[Completion]: ...
def generate(  # type: ignore[misc]  # the three lines above abbreviate the keywords below
    lm: LanguageModel,
    prompts: Any,
    *,
    drafting: Part | DrafterSettings = "prompt_lookup",
    acceptance: Part | Acceptance = "greedy",
    max_new_tokens: int = 64,
    chat: bool = False,
    stop: str | Sequence[str] = (),
    documents: str | Sequence[str] = (),
    seed: int = 0,
    logprobs: bool = False,
    stream: bool = False,
) -> Any:
    """Continue one prompt (a text or a list of ids) or several (a list of those, side by side in one batch).

    `stream=True` yields the text of one prompt piece by piece. Parts are named as on the command line, with their keys
    in a mapping: `drafting={"name": "prompt_lookup", "max_draft": 6}`. `documents` are what `reference` copies from.
    A sampled output is a function of the prompt and `seed`, in any batch: another `seed` draws another.

    >>> decodelab.generate(lm, "1, 2, 3, 1, 2, 3,", max_new_tokens=6).text
    ' 4, 5,'
    >>> for piece in decodelab.generate(lm, "1, 2, 3, 1, 2, 3,", stream=True, max_new_tokens=6):
    ...     print(piece, end="")
     4, 5,
    """
    lab = _lab(lm, part("drafting", drafting, DrafterSettings), part("acceptance", acceptance, Acceptance))
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    wanted = [prompts] if single else list(prompts)
    if not wanted:
        raise UserError("prompts is empty; give a text, or a list with at least one")
    tokenizer = lm.source.tokenizer
    copied = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _listed(documents)]
    requests = [lab.request(lm.encode(p, chat), max_new_tokens, stop=_listed(stop), documents=copied) for p in wanted]
    for note in lab.notes:
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    if stream:
        if not single:
            raise UserError(f"stream=True takes one prompt, got {len(wanted)}; loop over them")
        if logprobs:
            raise UserError("stream=True yields text alone; leave logprobs=True out")
        return _pieces(lab, lab.strategy(requests, seed))
    done = finish(lab.strategy(requests, seed, logprobs=logprobs))
    completions = [_completion(lab, g) for g in done]
    return completions[0] if single else completions


def _pieces(lab: Lab, steps: Iterator[list[Generation]]) -> Iterator[str]:
    """New text after each step; an unfinished character waits for its other bytes."""
    shown = ""
    text = ""
    for (g,) in steps:
        text = lab.text(g.tokens)
        if not text.endswith("�") and text.startswith(shown):
            if text != shown:
                yield text[len(shown) :]
            shown = text
    if text != shown:
        yield text[len(shown) :]


def _completion(lab: Lab, g: Generation) -> Completion:
    return Completion(
        text=lab.text(g.tokens),
        tokens=tuple(g.tokens),
        reason=str(g.reason),
        logprobs=None if g.logprobs is None else tuple(g.logprobs),
        tokens_per_step=acceptance_of(g.steps)["tokens_per_step"],
    )


def compare(
    lm: LanguageModel,
    prompts: Sequence[str] | TaskSettings | None = None,
    *,
    drafting: Part | DrafterSettings = "prompt_lookup",
    acceptance: Part | Acceptance = "greedy",
    max_new_tokens: int = 64,
    chat: bool = False,
    seed: int = 0,
    batch: int = 1,
    timing: Literal["paired", "untimed"] = "paired",
) -> dict[str, Any]:
    """Strategy against plain decoding on texts, or on a task (default: the demo). Returns what `result.json` holds.

    A TaskSettings brings its own `max_new_tokens` and `chat`.

    >>> decodelab.compare(lm, ["def add(a, b):"], max_new_tokens=8)["exactness"]["verdict"]
    'exact'
    """
    started, load_before, begun = datetime.now(UTC), load_of_others(), moment()
    settings = part("drafting", drafting, DrafterSettings)
    rule = part("acceptance", acceptance, Acceptance)
    asked = prompts if isinstance(prompts, TaskSettings) else TaskSettings(max_new_tokens=max_new_tokens, chat=chat)
    if prompts is None and not chat:
        asked = replace(asked, chat=None)
    config = RunConfig(ModelSpec(path=lm.source.label), settings, rule, asked, seed=seed, batch=batch, timing=timing)
    lab = _lab(lm, settings, rule)
    if prompts is None or isinstance(prompts, TaskSettings):
        task = load_task(asked)
    elif isinstance(prompts, str) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError("prompts must be a list with at least one text, or TaskSettings")
    else:
        items = tuple(Item(str(i), "prompts", (Message("user", text),), raw=True) for i, text in enumerate(prompts))
        task = Task(items, "prompts", hashlib.sha256(repr(list(prompts)).encode()).hexdigest())
    device, dtype = lm.target.device, lm.target.dtype
    with Heard() as heard:
        peak = peaks(device, dtype, torch.get_num_threads()) if timing == "paired" else None
        measured = measure(lab, task, asked, seed=seed, batch=batch, timing=timing)
    return build_result(
        {
            "model": {"path": lm.source.label},
            "drafting": repr(settings),
            "acceptance": repr(rule),
            "task": asdict(asked),
            "dtype": str(dtype).removeprefix("torch."),
            **{key: getattr(config, key) for key in ("seed", "batch", "timing")},
        },
        lab,
        measured,
        digests={
            "weights": lm.source.digest,
            "model": lm.source.identity,
            "draft": draft_digest(settings),
            "task": task.digest,
            "quality": None,
            "replay": None,
        },
        provenance=provenance(
            dtype,
            seed,
            device=describe_device(device),
            started_at=started.isoformat(timespec="seconds"),
            load_before=load_before,
            load_after=others_since(begun),
        ),
        peaks=peak,
        peak_bytes=peak_memory_bytes(device),
        warnings=[*lab.notes, *heard.texts],
    )


def evaluate(
    lm: LanguageModel,
    tasks: QualityTask | Sequence[QualityTask],
    *,
    drafting: Part | DrafterSettings = "prompt_lookup",
    acceptance: Part | Acceptance = "greedy",
    against: str | Path | None = None,
    output: str | Path | None = None,
    seed: int = 0,
    batch: int = 1,
    trusted: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Quality on tasks: names of lm-eval, or mappings with `path` and what else a task of one's own takes.

    Returns what `result.json` holds; `quality` is in it, and in that `against`, the comparison with the run in that
    folder. `output`: a new folder for the files of this run, so that another can name it; without one they are not
    kept. `options` are the keys of `quality`: limit, shots, chat, system, max_new_tokens, repeats, epsilon, allow, …

    >>> with open("sums.jsonl", "w") as file:
    ...     _ = file.write('{"question": "2 + 2 =", "choices": ["4", "5"], "answer": 0}')
    >>> found = decodelab.evaluate(lm, [{"path": "sums.jsonl"}])["quality"]
    >>> found["tasks"]["sums"]["metrics"]["acc"]["n"]
    1
    """
    started, load_before, begun = datetime.now(UTC), load_of_others(), moment()
    settings = part("drafting", drafting, DrafterSettings)
    rule = part("acceptance", acceptance, Acceptance)
    given = {"tasks": [tasks] if isinstance(tasks, str | Mapping | TaskSpec) else list(tasks), **options}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    quality = Constructor(tuple(trusted)).call(QualitySettings, listed, "quality")
    if not quality.tasks:
        raise UserError("tasks is empty; name a task, such as {'path': 'my.jsonl'}")
    config = RunConfig(
        ModelSpec(path=lm.source.label), settings, rule, TaskSettings(), quality,
        seed=seed, batch=batch, against=None if against is None else str(against), trusted=tuple(trusted),
    )  # fmt: skip
    device, dtype = lm.target.device, lm.target.dtype
    described = {
        "model": {"path": lm.source.label},
        "drafting": repr(settings),
        "acceptance": {"_target_": f"{type(rule).__module__}.{type(rule).__qualname__}", **asdict(rule)},
        "quality": asdict(quality),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "seed": seed,
        "batch": batch,
    }
    resolved = json.loads(json.dumps(described))  # as it is read back
    weights, model, draft = lm.source.digest, lm.source.identity, draft_digest(settings)
    digests = {"weights": weights, "model": model, "draft": draft, "task": None, "replay": None}
    with Heard() as heard, TemporaryDirectory() as apart:
        digests["quality"] = quality_digest(config)
        key = run_key(resolved, digests)
        exam = prepare(config, lm.source, key, resolved)
        assert exam is not None
        folder = Path(apart) if output is None else _new_folder(Path(output).expanduser())
        lab = _lab(lm, settings, rule)
        made = provenance(
            dtype,
            seed,
            device=describe_device(device),
            started_at=started.isoformat(timespec="seconds"),
            load_before=load_before,
        )
        mine = RunQuality(folder, key, {}, resolved, digests, made, ())
        found = measure_quality(lab, exam, config, mine, lambda what, done, total: None)
        if found["failed"]:
            raise UserError("; ".join(f"quality of {name} failed: {why}" for name, why in found["failed"].items()))
        result = build_result(
            resolved,
            lab,
            None,
            digests=digests,
            provenance=made | {"load_after": others_since(begun)},
            peaks=None,
            peak_bytes=peak_memory_bytes(device),
            warnings=[*lab.notes, *heard.texts],
            quality=found,
        )
        if output is not None:
            (folder / ANSWERS).unlink(missing_ok=True)
            write_run(folder, result, (), lm.source.tokenizer)
    return result


def _new_folder(folder: Path) -> Path:
    if (folder / "result.json").exists():
        raise UserError(f"output={folder} already holds a result; name another folder or delete that one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={folder} cannot be made ({error.strerror}); name another folder") from error
    return folder


def load_runs(*folders: str | Path | Sequence[str | Path]) -> "pd.DataFrame":
    """Every `result.json` at or below the folders (several, or one list of them), a row each: its name in a report,
    `strategy`, then what the file holds; nested keys are joined by dots (`speedup.value`).

    >>> decodelab.load_runs("outputs")[["strategy", "exactness.verdict"]]
            strategy exactness.verdict
    0  prompt_lookup             exact
    """
    import pandas as pd

    from .report.load import Run
    from .report.rows import labelled

    named = [one for some in folders for one in ([some] if isinstance(some, str | Path) else some)]
    runs = []
    for folder in named if folders else ("outputs",):
        root = Path(folder).expanduser()
        if not root.exists():
            raise UserError(f"there is no folder {folder}; a run writes to outputs/ unless output=DIR says otherwise")
        runs += [Run(file.parent, read_result(file)) for file in result_files(root)]
    labels = labelled(runs)
    frame = pd.json_normalize([{**run.result, "folder": str(run.folder)} for run in runs])
    frame = frame.drop(columns="strategy", errors="ignore")  # where a run of quality alone has none
    frame.insert(0, "strategy", [labels[run.folder] for run in runs])
    return frame
