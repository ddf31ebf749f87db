"""Rows of a user's file as questions: what stands before an answer, what is scored or generated, and the gold."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError
from ..items import Row
from .programs import CODE_STOPS, MBPP_STOP, tests_of
from .scorers import Scorer, Text, as_number, build_scorer, golds, scorer_text
from .settings import Kind, TaskSpec

KINDS = (
    "choices and answer, or context and target (its last word): multiple_choice; question or prompt and answer, "
    "prompt, entry_point and test, text and test_list: generate; text: perplexity"
)
FIELDS = (
    "id", "category", "subject", "question", "passage", "choices", "answer", "aliases", "solution", "relation",
    "context", "target", "text", "prompt", "entry_point", "canonical_solution", "test", "test_list", "test_setup_code",
    "code",
)  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DELIMITER = "\n\n"  # between solved examples
ANSWER = "Answer:"
CONNECTIVES = {"cause": "because", "effect": "therefore"}
SUBJECT = "The following are multiple choice questions (with answers) about {}."
PROGRAM = "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n{}"
COMPLETE = "Complete this function. Answer with all of it, in one block of code.\n\n```python\n{}\n```"

# (lm-eval's name of the aggregation over items, whether higher is better) by metric, the main one first.
Metrics = Mapping[str, tuple[str, bool]]
CHOSEN: Metrics = {"acc": ("mean", True), "acc_norm": ("mean", True)}
ACCURACY: Metrics = {"acc": ("mean", True)}  # letters and equal continuations have equal lengths
LAST_WORD: Metrics = {"acc": ("mean", True), "perplexity": ("perplexity", False)}
TEXT: Metrics = {
    "word_perplexity": ("weighted_perplexity", False),
    "byte_perplexity": ("weighted_perplexity", False),
    "bits_per_byte": ("bits_per_byte", False),
}

_GAP = re.compile(r"(?<!\w)_(?!\w)")
_FIELD = re.compile(r"\{(\w+)\}")

Prompt = Callable[[Row], str]


@dataclass(frozen=True, slots=True)
class Question:
    """An item as it is put to a model.

    `contexts`: what stands before the continuation; one text, or one a choice where the choice is part of it.
    `messages`: the same as a user's turns in a chat, where the answer begins with `begun`. `continuations`: whose
    likelihood is taken, each with the blank it begins with: one a choice, or a text; none to generate. `gold`: the
    index of the right one of `choices`, or the row's answer. A solved example is a context and `solved`, in a chat a
    message and `reply`; null where the row does not tell. `heading`: what stands once before the examples and it; in a
    chat, at the end of the system prompt.
    """

    row: Row
    contexts: tuple[str, ...]
    messages: tuple[str, ...]
    continuations: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    gold: Any = None
    solved: str | None = None
    reply: str | None = None
    begun: str = ""
    heading: str = ""
    id: str = ""

    @property
    def category(self) -> str | None:
        found = next((self.row.fields[key] for key in ("category", "subject") if self.row.has(key)), None)
        return None if found is None else str(found)

    @property
    def example(self) -> str:
        """The context of a solved example."""
        return self.contexts[self.gold if len(self.contexts) > 1 else 0]


Ask = Callable[[Row], Question]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a file become questions, and what is measured. `stop`: what ends an answer outside of a chat."""

    kind: Kind
    ask: Ask
    metrics: Metrics
    scorer: Scorer | None
    scorer_text: str
    stop: tuple[str, ...] = ()


def reading(rows: Sequence[Row], spec: TaskSpec, shots: int, trusted: tuple[str, ...]) -> Reading:
    """Decided by all rows, so that it does not depend on `limit`."""
    kind = spec.kind or _kind(rows[0], spec)
    if kind == "perplexity":
        if spec.prompt or spec.scorer or spec.shots or spec.shots_path:
            raise UserError(f"{spec.path}: a perplexity has no prompt, scorer or shots; leave them out")
        return Reading(kind, _text, TEXT, None, next(iter(TEXT)))
    prompt = None if spec.prompt is None else _renderer(spec.prompt)
    if kind == "multiple_choice":
        return _likelihood(rows, spec, prompt)
    return _generation(rows, spec, prompt, shots, trusted)


def _kind(row: Row, spec: TaskSpec) -> Kind:
    if row.has("choices") or (row.has("context") and row.has("target")):
        return "multiple_choice"
    asked = spec.prompt is not None or row.has("question") or row.has("prompt")
    scored = row.has("answer") or row.has("target") or row.has("test") or spec.scorer is not None
    if row.has("test_list") or (asked and scored):
        return "generate"
    if row.has("text"):
        return "perplexity"
    fields = f"its fields ({', '.join(row.fields):.200}) are of no kind of task"
    raise UserError(f"{row.where}: {fields}; known: {KINDS}; fields={{question: YOURS}} says which is which")


# Likelihoods


def _likelihood(rows: Sequence[Row], spec: TaskSpec, prompt: Prompt | None) -> Reading:
    metrics: Metrics = CHOSEN
    ask: Ask = _chosen
    if not rows[0].has("choices") and rows[0].has("context"):
        if prompt is not None:
            raise UserError(f"{spec.path}: a last word follows its context as that is; leave prompt out")
        metrics, ask = LAST_WORD, _last_word
    elif prompt is not None:
        ask = _prompted(prompt)
    elif all(row.has("subject") for row in rows):
        metrics, ask = ACCURACY, _lettered
    elif all(row.has("relation") for row in rows):
        ask = _connected
    elif all(len(_GAP.findall(str(row.fields.get("question")))) == 1 for row in rows):
        metrics, ask = ACCURACY, _filled
    main = next(iter(metrics)) if spec.scorer is None else spec.scorer
    if not isinstance(main, str) or main not in metrics:
        raise UserError(f"{spec.path}: scorer={main!r}: of these likelihoods {' or '.join(metrics)} may be what counts")
    return Reading("multiple_choice", ask, {main: metrics[main], **metrics}, None, main)


def _chosen(row: Row) -> Question:
    """Passage (if any) and question, then each choice: as lm-eval puts ARC, BoolQ and PubMedQA."""
    choices, gold = _choices(row)
    return _question(row, _asked(row), tuple(f" {choice}" for choice in choices), choices, gold)


def _lettered(row: Row) -> Question:
    """The choices with letters, one of which is to follow, under a heading with the subject: as lm-eval puts MMLU."""
    choices, gold = _choices(row)
    letters = tuple(f" {letter}" for letter in LETTERS[: len(choices)])
    heading = SUBJECT.format(_need(row, "subject").replace("_", " "))
    return replace(_question(row, _options(row, choices), letters, choices, gold), heading=heading)


def _connected(row: Row) -> Question:
    """The sentence without its period, `because` or `therefore`, each choice in lower case: as lm-eval puts COPA."""
    choices, gold = _choices(row)
    if (relation := _need(row, "relation")) not in CONNECTIVES:
        raise UserError(f"{row.where}: relation={relation!r} must be {' or '.join(CONNECTIVES)}")
    context = f"{_need(row, 'question').strip().removesuffix('.')} {CONNECTIVES[relation]}"
    continuations = tuple(f" {choice[0].lower()}{choice[1:]}" for choice in choices)
    return _question(row, context, continuations, choices, gold, begun="")


def _filled(row: Row) -> Question:
    """The sentence up to the gap `_` with each choice in it, then what follows, the same for all: partial scoring
    (Trinh and Le, arXiv:1806.02847), as lm-eval puts WinoGrande."""
    choices, gold = _choices(row)
    before, after = _GAP.split(_need(row, "question"))
    rest = after.rstrip()
    if not rest:
        raise UserError(f"{row.where}: nothing follows the gap _ in question, so no choice can be told from another")
    contexts = tuple(before + choice for choice in choices)
    return Question(row, contexts, contexts, (rest,) * len(choices), choices, gold, rest, rest.strip())


def _last_word(row: Row) -> Question:
    """A context and its last word: as lm-eval puts LAMBADA."""
    target = _need(row, "target").strip()
    return _question(row, _need(row, "context").rstrip(), (f" {target}",), (target,), 0, begun="")


def _text(row: Row) -> Question:
    return Question(row, ("",), ("",), (_need(row, "text"),))


def _prompted(prompt: Prompt) -> Ask:
    """The blank at the prompt's end goes to the choices: a choice begins with one in any case."""

    def ask(row: Row) -> Question:
        choices, gold = _choices(row)
        text = prompt(row)
        blank = text[len(text.rstrip()) :] or " "
        return _question(row, text.rstrip(), tuple(f"{blank}{choice}" for choice in choices), choices, gold, begun="")

    return ask


def _question(
    row: Row,
    asked: str,
    continuations: tuple[str, ...],
    choices: tuple[str, ...],
    gold: int,
    begun: str = ANSWER,
) -> Question:
    """`begun`, on a line of its own, ends the context; in a chat it begins the answer, so that a choice follows it with
    its blank there too (where lm-eval takes the blank away)."""
    context = f"{asked}\n{begun}" if begun else asked
    solved = continuations[gold]
    reply = f"{begun}{solved}".strip()
    return Question(row, (context,), (asked,), continuations, choices, gold, solved, reply, begun)


def _choices(row: Row) -> tuple[tuple[str, ...], int]:
    """The choices, and which one `answer` means: an index from 0, a choice's text, or its letter."""
    choices = tuple(row.checked(choice, f"choices[{i}]").strip() for i, choice in enumerate(row.entries("choices")))
    if not 2 <= len(choices) <= len(LETTERS):
        given = f"not {row.fields.get('choices')!r:.60}"
        raise UserError(f"{row.where}: choices must be a list of 2 to {len(LETTERS)} texts, {given}")
    answer = row.fields.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return choices, answer
    if isinstance(answer, str):
        for known in (choices, LETTERS[: len(choices)]):
            if answer.strip() in list(known):
                return choices, known.index(answer.strip())
    right = f"an index from 0 to {len(choices) - 1}, a choice's text or its letter"
    raise UserError(f"{row.where}: answer={answer!r:.60} is none of the {len(choices)} choices; give {right}")


# Generation


def _generation(
    rows: Sequence[Row], spec: TaskSpec, prompt: Prompt | None, shots: int, trusted: tuple[str, ...]
) -> Reading:
    first, rows = rows[0], [_answered(row) for row in rows]
    given = spec.scorer
    if given is None and (first.has("test") or first.has("test_list")):
        given = "unit_tests"
    elif given is None and isinstance(first.fields.get("answer"), dict):
        given = "json_field"
    elif given is None and first.has("choices"):
        given = {"name": "regex", "pattern": r"\b([A-Z])\b"}
    elif given is None:
        numbers = all(as_number(gold) is not None for row in rows for gold in golds(row))
        given = "number" if numbers else "exact_match"
    scorer = build_scorer(given, trusted)
    for row in rows:
        scorer.check(row)
    stop: tuple[str, ...]
    short = isinstance(scorer, Text) and not any("\n" in gold for row in rows for gold in golds(row))
    if prompt is not None:
        made = prompt
        ask, stop = _free(lambda row: made(row).rstrip(" \t")), (DELIMITER,) if shots else ()
    elif first.has("prompt") and first.has("entry_point"):
        ask, stop, short = _completed, CODE_STOPS, False
    elif first.has("test") or first.has("test_list"):
        ask, stop, short = _programmed, (MBPP_STOP,), False
    elif first.has("prompt") or first.has("context"):
        ask, stop = _free(lambda row: _need(row, "prompt" if row.has("prompt") else "context")), ()
    else:
        ask, stop = _free(_questioned), ("Question:",)
    metrics = dict.fromkeys(scorer.metrics, ("mean", scorer.higher_is_better))
    return Reading(
        "generate", lambda row: ask(_answered(row)), metrics, scorer, scorer_text(given), ("\n",) if short else stop
    )


def _answered(row: Row) -> Row:
    """With its gold as `answer`: the right choice's letter, or the target of a context."""
    if row.has("choices"):
        return Row({**row.fields, "answer": LETTERS[_choices(row)[1]]}, row.where)
    if row.has("target") and not row.has("answer"):
        return Row({**row.fields, "answer": row.fields["target"]}, row.where)
    return row


def _free(prompt: Prompt) -> Ask:
    """Whatever follows the prompt."""

    def ask(row: Row) -> Question:
        context, reply = prompt(row), _solution(row)
        blank = "" if context[-1:].isspace() else " "
        solved = None if reply is None else f"{blank}{reply}"
        return Question(row, (context,), (context,), gold=row.fields.get("answer"), solved=solved, reply=reply)

    return ask


def _completed(row: Row) -> Question:
    """A function to complete: as lm-eval puts HumanEval. A chat is asked for the whole function."""
    prompt, solution = _need(row, "prompt"), row.fields.get("canonical_solution")
    message = COMPLETE.format(prompt.strip("\n"))
    reply = None if solution is None else f"```python\n{(prompt + solution).strip()}\n```"
    return Question(row, (prompt,), (message,), solved=solution, reply=reply)


def _programmed(row: Row) -> Question:
    """A program by its description and its tests: as lm-eval puts MBPP. `[BEGIN]` and `[DONE]` are not for chats."""
    described = next((row.text(key) for key in ("text", "question", "prompt") if row.has(key)), None)
    if described is None:
        raise UserError(f"{row.where}: text is missing: what the tested program is to do; fields={{text: YOURS}}")
    tests = "\n".join(row.entries("test_list")) if row.has("test_list") else tests_of(row)
    message = PROGRAM.format(described.strip(), tests)
    code = row.text("code").replace("\r\n", "\n") if row.has("code") else None
    solved, reply = (None, None) if code is None else (f"{code}\n{MBPP_STOP}", f"```python\n{code}\n```")
    return Question(row, (f"{message}\n[BEGIN]\n",), (message,), solved=solved, reply=reply)


def _solution(row: Row) -> str | None:
    """`solution`, where that ends in the answer (GSM8K's do); else the answer."""
    answer, solution = row.fields.get("answer"), row.fields.get("solution")
    if answer is None:
        return None
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    first = golds(row)[0]
    return solution.strip() if isinstance(solution, str) and solution.strip().endswith(first) else first


# Texts


def _asked(row: Row) -> str:
    passage = f"{_need(row, 'passage').strip()}\n" if row.has("passage") else ""
    return f"{passage}Question: {_need(row, 'question').strip()}"


def _questioned(row: Row) -> str:
    """As `_asked`, with the choices if there are any; a question that ends in `A:` or `Answer:` is a prompt already."""
    if row.has("choices"):
        return f"Question: {_options(row, _choices(row)[0])}\n{ANSWER}"
    if _need(row, "question").rstrip().endswith(("A:", ANSWER)):
        return _asked(row).removeprefix("Question: ")
    return f"{_asked(row)}\n{ANSWER}"


def _options(row: Row, choices: Sequence[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([_need(row, "question").strip(), *lines])


def _need(row: Row, key: str) -> str:
    if not row.has(key):
        fields = f"fields: {', '.join(row.fields):.200}"
        raise UserError(f"{row.where}: {key} is missing ({fields}); fields={{{key}: YOURS}} names another field")
    return row.text(key)


def _renderer(template: str) -> Prompt:
    """Of a Jinja template, or of a text in which `{field}` stands for a row's field."""
    if "{{" not in template and "{%" not in template:
        return lambda row: _FIELD.sub(lambda match: _inserted(row, match[1]), template)
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise UserError(f"prompt={template!r:.60} is no Jinja template: {_line(error)}") from error

    def render(row: Row) -> str:
        try:
            text: str = compiled.render(dict(row.fields))
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # a program of its own
            raise UserError(f"{row.where}: prompt={template!r:.60} cannot be filled in: {_line(error)}") from error
        return row.checked(text, "the prompt")

    return render


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _inserted(row: Row, name: str) -> str:
    if not row.has(name):
        raise UserError(f"{row.where}: prompt names the field {name}; the row has {', '.join(row.fields):.200}")
    value = row.fields[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
