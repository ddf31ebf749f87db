"""lm-eval's side of the tasks: a file of the user's as one of its tasks, and its own by name."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from ...decoding.errors import UserError
from ..construct import did_you_mean
from .questions import DELIMITER, Question
from .settings import QualitySettings
from .tasks import OwnTask

Chat = Callable[..., str]


class FileTask(ConfigurableTask):
    """`own` as lm-eval asks it. Documents hold `number`, `id`, `category` and the `row` as JSON.

    Plain: the system prompt, the heading, the solved examples and the context, blank lines between. Chat: the system
    prompt with the heading, the examples' messages and replies and the message, through the model's template.
    """

    def __init__(self, own: OwnTask) -> None:
        self.own = own
        likelihood = "loglikelihood_rolling" if own.kind == "perplexity" else "multiple_choice"
        config = {
            "task": own.name,
            "output_type": "generate_until" if own.kind == "generate" else likelihood,
            "test_split": "test",
            "num_fewshot": own.shots,
            "metric_list": [
                {"metric": name, "aggregation": aggregation, "higher_is_better": higher}
                for name, (aggregation, higher) in own.metrics.items()
            ],
            "process_results": self._scores,
            "doc_to_text": self._context,
            "doc_to_target": self._gold,
        }
        if own.kind == "generate":
            config["generation_kwargs"] = {"until": list(own.stop or ()), "max_gen_toks": own.max_new_tokens}
        super().__init__(config=config)

    def download(self, *_: Any, **__: Any) -> None:
        rows = [
            {
                "number": number,
                "id": question.id,
                "category": question.category,
                "row": json.dumps(dict(question.row.fields), ensure_ascii=False),
            }
            for number, question in enumerate(self.own.questions)
        ]
        self.dataset = {"test": datasets.Dataset.from_list(rows)}

    def fewshot_docs(self) -> None:
        """None that lm-eval would draw from: the examples are `own`'s."""

    def fewshot_context(
        self,
        doc: Mapping[str, Any],
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = True,
        chat_template: Chat | None = None,
        gen_prefix: str | None = None,
    ) -> str | list[str]:
        """What stands before the continuations; a list where each choice has its own."""
        question = self.own.question(doc)
        examples = self.own.examples(question)
        system = [text for text in (system_instruction, question.heading) if text]
        if apply_chat_template and chat_template is not None:
            made = [_chat(question, m, examples, DELIMITER.join(system), chat_template) for m in question.messages]
        else:
            begin = "".join(f"{part}{DELIMITER}" for part in [*system, *(f"{e.example}{e.solved}" for e in examples)])
            made = [begin + context for context in question.contexts]
        return made if len(made) > 1 else made[0]

    def construct_requests(self, doc: Mapping[str, Any], ctx: str | list[str], **kwargs: Any) -> list[Instance]:
        question = self.own.question(doc)
        asked: list[tuple[Any, ...]]
        if self.own.kind == "generate":
            kind, asked = "generate_until", [(ctx, dict(self.config.generation_kwargs))]
        elif self.own.kind == "perplexity":
            kind, asked = "loglikelihood_rolling", [question.continuations]
        else:
            contexts = ctx if isinstance(ctx, list) else [ctx] * len(question.continuations)
            kind, asked = "loglikelihood", list(zip(contexts, question.continuations, strict=True))
        known = {name: kwargs[name] for name in ("metadata",) if name in kwargs}
        return [Instance(kind, doc, arguments, number, **known) for number, arguments in enumerate(asked)]

    def _context(self, doc: Mapping[str, Any]) -> str:
        return self.own.question(doc).contexts[0]

    def _gold(self, doc: Mapping[str, Any]) -> Any:
        question = self.own.question(doc)
        return question.choices[0] if len(question.choices) == 1 else question.gold

    def _scores(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """By metric a number, or what the aggregation takes: (log-likelihood, words or bytes)."""
        question = self.own.question(doc)
        if self.own.scorer is not None:
            scores = dict(self.own.scorer(results[0], question.row))
            for name in scores.keys() - self._aggregation_list.keys():  # a function gives what it likes
                self._aggregation_list[name], self._higher_is_better[name] = mean, self.own.higher_is_better
            return scores
        if self.own.kind == "perplexity":
            (text,) = question.continuations
            words, size = self.count_words(text), self.count_bytes(text)
            return {name: (results[0], words if name == "word_perplexity" else size) for name in self.own.metrics}
        totals = np.array([total for total, _ in results])
        lengths = np.array([len(text.strip()) for text in question.continuations])
        found = {
            "acc": float(results[0][1]) if len(results) == 1 else float(np.argmax(totals) == question.gold),
            "acc_norm": float(np.argmax(totals / lengths) == question.gold),
            "perplexity": totals[0],
        }
        return {name: found[name] for name in self.own.metrics}


def named_tasks(
    names: Sequence[str], settings: QualitySettings, trusted: Sequence[str] = ()
) -> dict[str, dict[str, Task]]:
    """lm-eval's tasks under each name, which may be a group or a tag of several."""
    if not names:
        return {}
    found = manager(names, settings, trusted)
    return {name: _named(name, found, settings) for name in names}


def manager(names: Sequence[str], settings: QualitySettings, trusted: Sequence[str] = ()) -> TaskManager:
    """Knows all of the names; loads nothing. Refuses folders whose YAML would run code that is not trusted."""
    folders = [str(Path(folder).expanduser()) for folder in settings.include]
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"quality.include={folder!r} is no folder; it is to hold YAML files of lm-eval's tasks")
        _refuse_code(Path(folder), trusted)
    found = TaskManager(include_path=folders or None, include_defaults=False)
    if any(name not in found.all_tasks for name in names):
        found = TaskManager(include_path=folders or None)
    for name in names:
        if name not in found.all_tasks:
            near = did_you_mean(name, found.all_tasks)
            raise UserError(f"quality.tasks={name!r}: no such task; {near}a file is {{path: FILE.jsonl}}")
    return found


def _refuse_code(folder: Path, trusted: Sequence[str]) -> None:
    for file in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        for called in re.findall(r"!function\s+['\"]?([\w.]+)", file.read_text(encoding="utf-8", errors="replace")):
            module = called.partition(".")[0]
            if module not in trusted:
                raise UserError(f"{file} calls {called}, and code runs only if you trust it: trusted=[{module}]")


def _named(name: str, known: TaskManager, settings: QualitySettings) -> dict[str, Task]:
    try:
        found: dict[str, Task] = known.load([name])["tasks"]
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
        told = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"quality.tasks={name!r} cannot be loaded: {type(error).__name__}: {told}") from error
    for task in found.values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", settings.shots)
        if task.OUTPUT_TYPE == "generate_until":
            options = task.get_config("generation_kwargs") or {}
            if not {"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"} & options.keys():
                task.set_config("generation_kwargs", options | {"max_gen_toks": settings.max_new_tokens})
    return found


def _chat(question: Question, message: str, examples: Sequence[Question], system: str, chat: Chat) -> str:
    said = [{"role": "system", "content": system}] if system else []
    for example in examples:
        asked = example.messages[example.gold if len(example.messages) > 1 else 0]
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": str(example.reply)}]
    return chat([*said, {"role": "user", "content": message}], add_generation_prompt=True) + question.begun
