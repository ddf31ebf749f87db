"""What is asked of quality: tasks, how they are put to the model, and what they are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UserError

Kind = Literal["multiple_choice", "generate", "perplexity"]
# What runs must not differ in to be compared, unless `allow` names it: the task's files, kind, metric or scorer; chat,
# template, system prompt, shots, or the prompts that came of them; items side by side; what computed the scores;
# max_new_tokens, stop, thinking, limit, repeats; the law of answers; the seed of drawn ones.
Difference = Literal["task", "template", "batch", "backend", "counting", "acceptance", "seed"]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task of the user's own: a JSONL file, offline.

    `kind` null: as the rows say (`choices`: multiple_choice; a gold answer or tests: generate; `text` alone:
    perplexity). `fields`: ours to theirs, where the names of a row's fields differ. `prompt`: in place of the standard
    one, with `{field}`, or as Jinja. `scorer`: a name, a mapping with `name` and its keys, or the dotted path of a
    function of a trusted package; of a likelihood, the metric that counts. `shots_path`: a file of solved examples,
    else they are other rows of the same. null elsewhere: as `quality` says, and as suits the rows.
    """

    path: str
    kind: Kind | None = None
    name: str | None = None
    shots: int | None = None
    shots_path: str | None = None
    fields: Mapping[str, str] | None = None
    scorer: str | Mapping[str, Any] | None = None
    prompt: str | None = None
    stop: tuple[str, ...] | None = None
    max_new_tokens: int | None = None
    limit: int | None = None

    @property
    def title(self) -> str:
        return self.name or Path(self.path).stem

    def __post_init__(self) -> None:
        for name in ("path", "name", "shots_path", "prompt"):
            if (text := getattr(self, name)) is not None and (not text.strip() or "\0" in text):
                raise UserError(f"a task's {name}={text!r} names nothing: leave it out for none")
        for name, least in (("shots", 0), ("max_new_tokens", 1), ("limit", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UserError(f"{name}={value} of the task {self.path}: at least {least}")
        if self.stop is not None and "" in self.stop:
            raise UserError(f"stop of the task {self.path} has an empty text, which would end every answer at once")


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """`tasks`: names of lm-eval, or files (`my.jsonl` alone is one, too). The other keys hold for each task that does
    not say otherwise. `kl`: predictions of the gold answers are kept, or with a reference run held against its."""

    tasks: tuple[str | TaskSpec, ...] = ()
    include: tuple[str, ...] = ()
    limit: int | None = None
    shots: int = 0
    chat: bool = False
    template: str | None = None
    system: str | None = None
    thinking: tuple[str, str] | None = None
    max_new_tokens: int = 256
    max_length: int | None = None
    repeats: int = 1
    batch: int | None = None
    epsilon: float = 0.02
    allow: tuple[Difference, ...] = ()
    kl: bool = False

    def __post_init__(self) -> None:
        files = (TaskSpec(t) if isinstance(t, str) and t.endswith(".jsonl") else t for t in self.tasks)
        object.__setattr__(self, "tasks", tuple(files))
        if self.limit is not None and self.limit < 1:
            raise UserError(f"quality.limit={self.limit}: at least 1, or null for every item")
        if self.shots < 0:
            raise UserError(f"quality.shots={self.shots}: at least 0")
        for name in ("max_new_tokens", "max_length", "repeats", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"quality.{name}={value}: at least 1")
        if self.thinking is not None and not all(tag.strip() for tag in self.thinking):
            raise UserError(f"quality.thinking={list(self.thinking)}: two tags that are not empty, or null for none")
        if not 0 < self.epsilon < 1:
            raise UserError(f"quality.epsilon={self.epsilon}: a difference of scores between 0 and 1, such as 0.02")
