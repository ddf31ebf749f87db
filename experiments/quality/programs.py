"""The program that an answer stands for, and the one that tests it."""

import re

from ...errors import UserError
from ..items import Row

CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # what ends a completed function (Codex, arXiv:2107.03374)
MBPP_STOP = "[DONE]"

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def program_of(response: str, row: Row) -> str:
    """The program that an answer stands for.

    The first fenced block that defines what is tested (`entry_point`, or a name that the tests use), with what stands
    before that definition in the row's prompt (imports, functions it may call). Without one, an answer that defines it
    by itself; or else a completion: the prompt and the answer, up to the first of Codex's stop sequences. Without an
    `entry_point` there is nothing to complete, and the answer up to `[DONE]` is all.
    """
    point = row.text("entry_point") if row.has("entry_point") else None
    wanted = {point} if point else set(re.findall(r"\w+", tests_of(row)))
    block = next((block for block in _FENCE.findall(response) if wanted & _defined(block)), None)
    if point is None:
        return response.partition(MBPP_STOP)[0] if block is None else block
    prompt = row.text("prompt")
    head = prompt[: match.start()] if (match := _definition(point).search(prompt)) else f"{prompt}\n"
    if block is not None:
        return head + block
    if _definition(point).search(response):
        return head + response
    return prompt + min((response.partition(stop)[0] for stop in CODE_STOPS), key=len)


def tests_of(row: Row) -> str:
    """The program that tests another's names."""
    if row.has("test_list"):
        tests = [row.checked(test, "each of test_list") for test in row.entries("test_list")]
        setup = row.fields.get("test_setup_code") or ""
        if not tests or not isinstance(setup, str):
            raise UserError(f"{row.where}: test_list must hold programs, at least one, and test_setup_code be one")
        return "\n".join([setup, *tests])
    if not row.has("test"):
        raise UserError(f"{row.where}: test or test_list is missing, which the scorer `unit_tests` runs")
    if not row.has("entry_point"):
        return row.text("test")
    return f"{row.text('test')}\ncheck({row.text('entry_point')})"


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)


def _defined(code: str) -> set[str]:
    return set(re.findall(r"^[ \t]*(?:async )?(?:def|class) (\w+)", code, re.MULTILINE)) | set(
        re.findall(r"^(\w+) *(?::[^=\n]+)?=(?!=)", code, re.MULTILINE)
    )
