"""lm-eval's side of the tasks: a file of the user's as one of its tasks, and its own by name."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml  # type: ignore[import-untyped]  # comes with transformers
from jinja2.exceptions import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ...errors import UserError
from ..construct import did_you_mean
from .questions import DELIMITER, Question
from .settings import QualitySettings
from .tasks import OwnTask, included

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
    """Knows all of the names; loads nothing. Refuses folders whose YAML cannot be read, which lm-eval passes over, or
    would run code that is not trusted."""
    folders = [str(folder) for folder in included(settings)]
    for folder in folders:
        _refuse_code(Path(folder), trusted)
        for file in sorted(Path(folder).rglob("*.yaml")):
            _check_file(file)
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


def _check_file(file: Path) -> None:
    try:
        config = load_yaml(file, resolve_func=False)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        remedy = "mend it, or take it out of the folder that quality.include names"
        raise UserError(f"{file} cannot be read as a task of lm-eval's: {_told(error)}; {remedy}") from error
    tags = config.get("tag") or []
    for name in (config.get("group", config.get("task")), *(tags if isinstance(tags, list) else [tags])):
        if name is not None and not isinstance(name, str):
            raise UserError(f"{file}: the name {name!r:.60} of a task, group or tag is to be a text; put it in quotes")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"


def _named(name: str, known: TaskManager, settings: QualitySettings) -> dict[str, Task]:
    file = known.task_index[name].yaml_path
    of = "" if file is None else f" of {file}"
    try:
        found: dict[str, Task] = known.load([name])["tasks"]
    except (
        OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, TemplateError,
        datasets.exceptions.DatasetsError,
    ) as error:  # fmt: skip  # whatever a wrong key of the file comes to within lm-eval
        raise UserError(f"quality.tasks={name!r}{of} cannot be loaded: {_told(error)}") from error
    for task in found.values():
        if wrong := _unscored(task):
            raise UserError(f"quality.tasks={name!r}{of} cannot be scored: it {wrong}")
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", settings.shots)
        if task.OUTPUT_TYPE == "generate_until":
            options = task.get_config("generation_kwargs") or {}
            if not {"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"} & options.keys():
                task.set_config("generation_kwargs", options | {"max_gen_toks": settings.max_new_tokens})
    return found


def _unscored(task: Task) -> str | None:
    """What lm-eval only warns of, and stumbles over once all is answered."""
    metrics, own = task.aggregation(), task.get_config("process_results") is not None
    if not metrics:
        return "names no metric in metric_list"
    for metric, aggregation in metrics.items():
        if aggregation is None:
            return f"names for {metric} an aggregation that lm-eval does not know; mean is one"
        if not own and getattr(task, "_metric_fn_list", {}).get(metric, mean) is None:
            return f"names the metric {metric}, which lm-eval does not know; exact_match is one"
    return None


def _chat(question: Question, message: str, examples: Sequence[Question], system: str, chat: Chat) -> str:
    said = [{"role": "system", "content": system}] if system else []
    for example in examples:
        asked = example.messages[example.gold if len(example.messages) > 1 else 0]
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": str(example.reply)}]
    return chat([*said, {"role": "user", "content": message}], add_generation_prompt=True) + question.begun
