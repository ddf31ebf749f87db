"""The text that a quantiser reads: what stands between its rows, and files that are none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.errors import UserError
from decodelab.experiments.calibration import load_calibration
from decodelab.quantization.quantiser import Calibration

WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return open_source(ModelSpec(path=str(checkpoint))).tokenizer


def read(file: Path, tokenizer: Any, template: str | None = None) -> list[int]:
    settings = Calibration(str(file), template, tokens=16, length=16)
    return list(load_calibration(settings, "gptq", tokenizer, 128).pieces[0])


def rows(file: Path, *values: object) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"messages": [{"role": "user"}]}, "my.jsonl:1: a message needs role and content, not {'role': 'user'}"),
        ({"messages": ["hello"]}, "my.jsonl:1: a message needs role and content, not 'hello'"),
        *(
            ({"messages": [{"role": "user", "content": content}]}, "my.jsonl:1: content must be a text that is not")
            for content in (None, 5, "", [{"type": "text", "text": "hello"}])
        ),
        ({"messages": []}, "my.jsonl:1: messages must end with a user's"),
        ({"messages": {"role": "user"}}, "my.jsonl:1: messages must be a list, not {'role': 'user'}"),
        ({"prompt": 5}, "my.jsonl:1: prompt must be a text that is not empty, not 5"),
        ({}, "my.jsonl:1: nothing to prompt with among its fields (none)"),
    ],
)
def test_a_row_that_is_no_text_is_a_line(tmp_path: Path, tokenizer: Any, row: object, line: str):
    with pytest.raises(UserError, match=re.escape(line)) as error:
        read(rows(tmp_path / "my.jsonl", row), tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no\\nsystem') }}", "no system"),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
    ],
)
def test_a_template_that_refuses_a_row_is_a_line(tmp_path: Path, tokenizer: Any, template: str, told: str):
    file = rows(tmp_path / "my.jsonl", {"prompt": WORDS})
    with pytest.raises(UserError, match="name another template, or null") as error:
        read(file, tokenizer, template)
    assert str(error.value).startswith("my.jsonl:1: quantization.calibration.template refuses it (")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["my.jsonl", "my.txt"])
def test_a_file_that_is_no_utf8_is_a_line(tmp_path: Path, tokenizer: Any, name: str):
    (tmp_path / name).write_bytes(WORDS.encode() * 20 + b"\xff\xfe\x00")
    with pytest.raises(
        UserError, match=r"my\.[^\n]* is not UTF-8 \(invalid start byte at byte 960\); save it as UTF-8"
    ):
        read(tmp_path / name, tokenizer)


@pytest.mark.parametrize(
    ("bos", "eos", "template", "between"),
    [
        ("<s>", "</s>", "{{ messages }}", "<s>"),
        (None, "</s>", None, "</s>"),
        (None, "<end>", "{{ messages }}<end>", "<pad>"),
        ("<s>", "<end>", "<s>{{ messages }}<end>", "<pad>"),
    ],
)
def test_documents_stand_apart(tmp_path: Path, tokenizer: Any, bos, eos, template, between):
    """By what begins or ends a document, not a turn of a chat; what a template writes has marks of its own."""
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": eos, "additional_special_tokens": ["<s>"]})
    tokenizer.bos_token, tokenizer.chat_template = bos, template
    file = rows(tmp_path / "my.jsonl", *({"prompt": "ab"} for _ in range(60)))
    text = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("ab"))
    apart = [tokenizer.convert_tokens_to_ids(between), *text]
    assert read(file, tokenizer)[: len(apart)] in (apart, [*text, apart[0]])
    want = tokenizer("[ab]", add_special_tokens=False)["input_ids"]
    got = read(file, tokenizer, "[{{ messages[0].content }}]")
    assert set(got) == set(want)
