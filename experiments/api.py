"""The Python interface: `load`, `generate`, `compare`, `load_runs`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import yaml  # type: ignore[import-untyped]  # comes with transformers

from ..decoding.acceptance import Acceptance
from ..decoding.draft import DrafterSettings
from ..decoding.errors import UserError
from ..decoding.events import Generation, finish
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, named, open_source
from .compose import groups
from .composition import resolve_device, resolve_dtype, resolve_pair
from .construct import Constructor, did_you_mean
from .hardware import describe_device
from .items import Item, Message
from .lab import Heard, Lab, build_lab
from .measure import measure
from .result import build_result, provenance
from .tasks import Task, TaskSettings, load_task

if TYPE_CHECKING:
    import pandas as pd

Prompt = str | Sequence[int]
Part = str | Mapping[str, Any]


@dataclass(frozen=True)
class LanguageModel:
    """A loaded target. Drafters and rules are chosen call by call."""

    source: Source
    target: Decoder

    def encode(self, prompt: Prompt, chat: bool = False) -> list[int]:
        """Token ids; `chat` wraps the text as one user message in the chat template."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if chat:
            messages = [{"role": "user", "content": prompt}]
            return list(
                self.source.tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            )
        return list(self.source.tokenizer(prompt)["input_ids"])


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

    >>> import decodelab
    >>> lm = decodelab.load("smollm2-135m")
    """
    where = resolve_device(device)
    kind, _ = resolve_dtype(dtype, where)
    names = groups()["model"]
    spec = named(model) if model in names else ModelSpec(path=model)
    spec = ModelSpec(spec.name, spec.path, revision or spec.revision, adapter)
    source = open_source(spec)
    return LanguageModel(source, load_decoder(source, dtype=kind, device=where))


def part(group: str, chosen: Any, expected: Any) -> Any:
    """A part by its option's name, by a mapping with `name` and keys to change, or as settings built already."""
    if isinstance(chosen, str):
        chosen = {"name": chosen}
    if not isinstance(chosen, Mapping):
        return chosen
    keys = dict(chosen)
    name, options = keys.pop("name", None), groups()[group]
    if name not in options:
        raise UserError(
            f"{group}={name} is unknown: {did_you_mean(str(name), options)}options are {', '.join(options)}"
        )
    content = yaml.safe_load(options[name].read_text(encoding="utf-8"))
    return Constructor().build(_merged(content, keys), expected, group)


def _merged(content: Any, keys: Mapping[str, Any]) -> Any:
    out = dict(content)
    for key, value in keys.items():
        out[key] = (
            _merged(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
        )
    return out


def _lab(lm: LanguageModel, drafting: Any, acceptance: Any) -> Lab:
    settings = part("drafting", drafting, DrafterSettings)
    rule = part("acceptance", acceptance, Acceptance)
    notes = resolve_pair(settings, rule, lm.source).notes()
    return build_lab(lm.source, lm.target, settings, rule, notes)


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
    stop: Sequence[str] = (),
    documents: Sequence[str] = (),
    seed: int = 0,
    logprobs: bool = False,
    stream: bool = False,
) -> Any:
    """Continue one prompt (text) or several (texts or lists of ids, side by side in one batch).

    `stream=True` yields the text of one prompt piece by piece. Parts are named as on the command line, with their keys
    in a mapping: `drafting={"name": "prompt_lookup", "max_draft": 6}`.

    >>> decodelab.generate(lm, "def add(a, b):", max_new_tokens=16).text  # doctest: +SKIP
    >>> for piece in decodelab.generate(lm, "Once upon a time", stream=True): print(piece, end="")  # doctest: +SKIP
    """
    lab = _lab(lm, drafting, acceptance)
    single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    wanted = [prompts] if single else list(prompts)
    if not wanted:
        raise UserError("prompts is empty; give a text, or a list with at least one")
    copied = [lm.encode(document) for document in documents]
    requests = [lab.request(lm.encode(p, chat), max_new_tokens, stop=stop, documents=copied) for p in wanted]
    if stream:
        if not single:
            raise UserError(f"stream=True takes one prompt, got {len(wanted)}; loop over them")
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
    decoded = sum(step.emitted for step in g.steps)
    return Completion(
        text=lab.text(g.tokens),
        tokens=tuple(g.tokens),
        reason=str(g.reason),
        logprobs=None if g.logprobs is None else tuple(g.logprobs),
        tokens_per_step=decoded / len(g.steps) if g.steps else None,
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

    >>> decodelab.compare(lm, ["def add(a, b):"] * 5)["exactness"]["verdict"]  # doctest: +SKIP
    'exact'
    """
    lab = _lab(lm, drafting, acceptance)
    if prompts is None or isinstance(prompts, TaskSettings):
        settings = prompts or TaskSettings()
        task = load_task(settings)
    else:
        if isinstance(prompts, str) or not prompts:
            raise UserError("prompts must be a list with at least one text, or TaskSettings")
        settings = TaskSettings(name=None, max_new_tokens=max_new_tokens, chat=chat)
        items = [Item(str(i), "prompts", (Message("user", text),), raw=True) for i, text in enumerate(prompts)]
        task = Task(tuple(items), "prompts", "")
    with Heard() as heard:
        measured = measure(lab, task, settings, seed=seed, batch=batch, timing=timing)
    return build_result(
        {"seed": seed, "batch": batch, "timing": timing, "drafting": repr(drafting), "acceptance": repr(acceptance)},
        batch,
        lab,
        measured,
        digests={"weights": lm.source.digest, "draft": None, "task": task.digest},
        provenance=provenance(lm.target.dtype, seed, device=describe_device(lm.target.device)),
        peaks=None,
        peak_bytes=None,
        warnings=[*lab.notes, *heard.texts],
    )


def load_runs(*folders: str | Path) -> "pd.DataFrame":
    """Every `result.json` at or below the folders, a row each; nested keys are joined by dots (`speedup.value`).

    >>> decodelab.load_runs("outputs")[["strategy.tokens_per_step", "exactness.verdict"]]  # doctest: +SKIP
    """
    import pandas as pd

    rows = []
    for folder in folders or ("outputs",):
        root = Path(folder).expanduser()
        if not root.exists():
            raise UserError(f"there is no folder {folder}; a run writes to outputs/ unless output=DIR says otherwise")
        for file in sorted([root] if root.name == "result.json" else root.rglob("result.json")):
            try:
                rows.append({**json.loads(file.read_text(encoding="utf-8")), "folder": str(file.parent)})
            except json.JSONDecodeError as error:
                raise UserError(f"{file} is not a whole result ({error.msg}); delete it and run again") from error
    return pd.json_normalize(rows)
