import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decodelab.errors import UserError
from decodelab.experiments.items import GOLD, Item, Message, Row, conversation, read_item
from decodelab.experiments.tasks import TaskSettings, encode, encode_documents, load_task

CONFIGS = Path(__file__).parents[2] / "configs" / "task"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GOLD_NAMES = [name.replace("*", end) for name in GOLD for end in ("", "_list")[: 1 + name.count("*")]]
READ_BY = {
    "prompt": {"prompt": "shown"},
    "turns": {"turns": ["shown", "shown too"]},
    "messages": {"messages": [{"role": "user", "content": "shown"}]},
    "before": {"instruction": "shown", "before": "shown = 1\n"},
    "files_before": {"files_before": {"a.py": "shown = 1\n"}},
    "question": {"question": "shown"},
    "text": {"text": "shown"},
}


def bytes_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token a byte, and a BOS that it adds by itself, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template, model_max_length=100
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bytes_tokenizer()


def write(path: Path, *rows: Mapping[str, object]) -> TaskSettings:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return TaskSettings(path=str(path))


def read(**row) -> Item:
    return read_item(Row(row, "t.jsonl:1"), "t/0", "t")


def prompt(item: Item, tokenizer, settings: TaskSettings | None = None, answers: tuple[str, ...] = ()) -> str:
    return tokenizer.decode(encode(item, answers, tokenizer, settings or TaskSettings()))


# --- what a row is read as


def test_prompt_is_raw_text_and_chat_wraps_it(tokenizer):
    item = read(prompt="def f(x):\n", question="not this one")
    assert prompt(item, tokenizer) == "<s>def f(x):\n"
    assert prompt(item, tokenizer, TaskSettings(chat=True)) == "<s><user>def f(x):\n</><assistant>"


def test_later_turns_continue_the_answers_they_are_given(tokenizer):
    item = read(turns=["Hi", "Why?", "So?"])
    assert item.turns == 3
    assert prompt(item, tokenizer) == "<s><user>Hi</><assistant>"
    assert prompt(item, tokenizer, answers=("A1",)) == "<s><user>Hi</><assistant>A1</><user>Why?</><assistant>"
    assert prompt(item, tokenizer, answers=("A1", "A2")).endswith("</><assistant>A2</><user>So?</><assistant>")


def test_assistant_messages_at_the_end_are_dropped(tokenizer):
    roles = ["system", "user", "assistant", "user", "assistant", "assistant"]
    item = read(messages=[{"role": role, "content": f"m{i}"} for i, role in enumerate(roles)])
    assert prompt(item, tokenizer) == "<s><system>m0</><user>m1</><assistant>m2</><user>m3</><assistant>"
    assert item.turns == 1


def test_code_is_fenced_after_the_instruction_and_is_a_document():
    item = read(instruction="Rename f.", language="python", before="f = 1\n")
    assert item.opening == (Message("user", "Rename f.\n\n```python\nf = 1\n```"),)
    assert item.documents == ("f = 1\n",)


def test_a_row_with_code_alone_asks_for_the_bug():
    assert read(before="f = 1").opening[0].content == "Fix the bug in this program.\n\n```\nf = 1\n```"


def test_each_file_stands_under_its_name():
    item = read(instruction="Do.", files_before={"a.py": "a = 1\n", "b.py": "", "c.py": None})
    assert item.opening[0].content == "Do.\n\na.py\n```\na = 1\n```\n\nb.py\n```\n\n```"
    assert item.documents == ("a = 1\n",)


def test_a_fence_is_longer_than_any_in_the_code():
    assert read(before="x = '''\n```\n'''\n").opening[0].content.endswith("\n\n````\nx = '''\n```\n'''\n````")


@pytest.mark.parametrize("key", ["question", "text"])
def test_a_question_or_text_is_one_user_turn(key):
    assert read(**{key: "Why?"}) == Item("t/0", "t", (Message("user", "Why?"),))


def test_passages_are_read_before_the_message_and_are_documents():
    passages = [
        {"title": "Glass", "text": "It floats.", "doc_id": 1},
        {"title": None, "text": "It cools."},
        "It breaks.",
    ]
    item = read(question="Why?", passages=passages, documents=["Elsewhere."])
    text = "Passage 1: Glass\nIt floats.\n\nPassage 2\nIt cools.\n\nPassage 3\nIt breaks.\n\nWhy?"
    assert item.opening == (Message("user", text),)
    assert item.documents == ("Elsewhere.", "Glass\nIt floats.", "It cools.", "It breaks.")


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"messages": [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]}, 3),
        ({"turns": ["first", "second"]}, 0),
        ({"prompt": "raw"}, 0),
        ({"before": "code"}, 0),
    ],
)
def test_passages_go_before_the_user_message_answered_first(row, place):
    opening = read(passages=["P."], **row).opening
    assert [message.content.startswith("Passage 1\nP.\n\n") for message in opening].index(True) == place
    assert place == len(opening) - 1


def test_category_and_id_fall_back():
    assert read(text="x", category="a", task="b", source="c").category == "a"
    assert read(text="x", category=None, task="b", source="c").category == "b"
    assert read(text="x", source="c").category == "c"
    assert read(text="x").category == "t"
    assert [read(text="x", id=7).id, read(text="x", task_id="T/1").id, read(text="x").id] == ["7", "T/1", "t/0"]


# --- gold


@pytest.mark.parametrize("shown", READ_BY.values(), ids=READ_BY)
def test_gold_is_neither_in_the_prompt_nor_in_a_document(shown, tokenizer):
    gold = {name: f"GOLD-{name}" for name in GOLD_NAMES}
    item = read(**gold, **shown, passages=["a passage"], documents=[{"title": "T", "text": "a document"}])
    told = [*item.documents, *item.later]
    for chat in (True, False, None):
        told += [prompt(item, tokenizer, TaskSettings(chat=chat), ("an answer",) * turn) for turn in range(item.turns)]
    told += [tokenizer.decode(ids) for ids in encode_documents(item, tokenizer)]
    assert not [text for text in told if "GOLD" in text]
    assert item.gold == gold
    assert "GOLD" not in repr(item)


def test_gold_names_are_those_of_the_files():
    for name in ("test", "test_list", "test_setup_code", "files_test", "files_after", "challenge_test_list", "answer"):
        assert read(text="x", **{name: ["gold"]}).gold == {name: ["gold"]}
    assert read(text="x", answerability="y", context="z", contest="w").gold == {}


@pytest.mark.parametrize("part", ["prompts", "code", "edit", "rag", "qa"])
def test_every_real_file_runs_as_it_is_and_shows_no_gold(part, shared, tokenizer):
    paths = sorted((shared / "data" / part).glob("*.jsonl"))
    assert paths
    for path in paths:
        settings = TaskSettings(path=str(path))
        task = load_task(settings)
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]
        assert [item.id for item in task.items] == [row["id"] for row in rows]
        for item, row in zip(task.items, rows, strict=True):
            without = {key: value for key, value in row.items() if key not in item.gold}
            bare = read_item(Row(without, "row"), item.id, task.label)
            assert (bare.opening, bare.later, bare.documents) == (item.opening, item.later, item.documents)
            assert item.gold or not {"reference", "answer", "after", "files_after", "code", "test"} & row.keys()
        for item in task.items[:20]:
            for turn in range(item.turns):
                assert encode(item, ["answer"] * turn, tokenizer, settings)


# --- token ids


def test_a_raw_prompt_has_one_bos_even_where_its_text_begins_with_one(tokenizer):
    assert encode(read(prompt="<s>a"), [], tokenizer, TaskSettings()) == encode(
        read(prompt="a"), [], tokenizer, TaskSettings()
    )
    assert encode(read(prompt="a"), [], tokenizer, TaskSettings())[0] == tokenizer.bos_token_id


def test_a_conversation_has_the_special_tokens_of_its_template_alone(tokenizer):
    ids = encode(read(text="a"), [], tokenizer, TaskSettings())
    assert type(ids) is list
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


def test_documents_have_no_special_tokens(tokenizer):
    ids = encode_documents(read(text="x", documents=["ab", ""]), tokenizer)
    assert [tokenizer.decode(document) for document in ids] == ["ab", ""]


def test_without_chat_a_conversation_is_its_texts(tokenizer):
    item = read(turns=["Hi", "Why?"])
    assert prompt(item, tokenizer, TaskSettings(chat=False), ("A1",)) == "<s>Hi\n\nA1\n\nWhy?"


def test_a_conversation_needs_a_chat_template():
    bare = bytes_tokenizer(chat_template=None)
    with pytest.raises(
        UserError, match=r"t/0 is a conversation and the tokenizer has no chat template: .*task\.chat=false"
    ):
        encode(read(text="Hi"), [], bare, TaskSettings())
    assert prompt(read(text="Hi"), bare, TaskSettings(template="[{{ messages[0].content }}]")) == "[Hi]"
    assert prompt(read(prompt="Hi"), bare) == "<s>Hi"


def test_a_chat_template_from_a_file(tmp_path, tokenizer):
    file = tmp_path / "chat.jinja"
    file.write_text("Q: {{ messages[-1].content }}\nA:", encoding="utf-8")
    assert prompt(read(text="Hi"), tokenizer, TaskSettings(template=str(file))) == "Q: Hi\nA:"
    with pytest.raises(UserError, match=r"task\.template=.*chat\.jinj' does not exist; did you mean .*chat\.jinja'\?"):
        encode(read(text="Hi"), [], tokenizer, TaskSettings(template=str(file)[:-1]))


@pytest.mark.parametrize("template", ["{{ messages[0].content }", "{{ raise_exception('user first') }}"])
def test_a_template_that_fails_is_one_line(template, tokenizer):
    with pytest.raises(UserError, match=r"^t/0: the chat template refuses it \(.+\); task\.template=FILE$") as error:
        encode(read(text="Hi"), [], tokenizer, TaskSettings(template=template))
    assert "\n" not in str(error.value)


def test_a_prompt_without_tokens_is_refused(tokenizer):
    with pytest.raises(UserError, match="t/0: the prompt has no tokens"):
        encode(read(text="Hi"), [], tokenizer, TaskSettings(template="{{ '' }}"))


# --- files


def test_a_byte_order_mark_and_blank_lines_are_allowed(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xa9\xe2\x80\xa8x"}\r\n\r\n{"text": "b"}\n')
    task = load_task(TaskSettings(path=str(tmp_path / "t.jsonl")))
    assert [item.opening[0].content for item in task.items] == ["é\u2028x", "b"]
    assert task.label == "t"


def test_the_digest_is_of_what_is_used(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    task = load_task(write(tmp_path / "t.jsonl", *rows))
    assert load_task(write(tmp_path / "other.jsonl", *rows)).digest == task.digest
    assert load_task(write(tmp_path / "u.jsonl", {"text": "a"}, {"text": "c"})).digest != task.digest
    path = str(tmp_path / "t.jsonl")
    assert load_task(TaskSettings(path=path, limit=1)).digest != task.digest
    assert load_task(TaskSettings(path=path, limit=9)).digest == task.digest
    assert load_task(TaskSettings(path=path, template="{{ messages }}")).digest != task.digest


def test_limit_takes_the_first_and_reads_no_further(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\nnot json\n', encoding="utf-8")
    assert len(load_task(TaskSettings(path=str(tmp_path / "t.jsonl"), limit=1)).items) == 1


def test_repeated_ids_get_a_suffix(tmp_path):
    settings = write(tmp_path / "t.jsonl", *({"id": i, "text": "x"} for i in ("a", "a#2", "a", "a", "b")))
    assert [item.id for item in load_task(settings).items] == ["a", "a#2", "a#3", "a#4", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"the task '.*bad\.jsonl' is empty; give it at least one row"),
        ('{"text": "a"}\n{"text": \n', r"^bad\.jsonl:2 is not JSON \(Expecting value, column 10\); write an object a"),
        ('["a"]\n', r"^bad\.jsonl:1 is a JSON list, not an object"),
        ("null\n", r"^bad\.jsonl:1 is a JSON NoneType, not an object"),
        ('{"context": "a", "target": "b"}\n', r"nothing to prompt with among its fields \(context, target\); known: "),
        ('{"prompt": " "}\n', r"bad\.jsonl:1: prompt must be a text that is not empty, not ' '$"),
        ('{"prompt": ["a"]}\n', r"bad\.jsonl:1: prompt must be a text that is not empty, not \['a'\]$"),
        ('{"turns": []}\n', r"bad\.jsonl:1: turns is empty; at least one user turn is needed"),
        ('{"turns": "Hi"}\n', r"bad\.jsonl:1: turns must be a list, not 'Hi'"),
        ('{"turns": ["Hi", 3]}\n', r"bad\.jsonl:1: each of turns must be a text that is not empty, not 3"),
        ('{"messages": [{"content": "a"}]}\n', r"bad\.jsonl:1: a message needs role and content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', r"bad\.jsonl:1: messages must end with a user's"),
        ('{"messages": [{"role": "system", "content": "a"}]}\n', r"bad\.jsonl:1: messages must end with a user's"),
        ('{"files_before": ["a"]}\n', r"bad\.jsonl:1: files_before must map names to texts"),
        ('{"files_before": {}}\n', r"bad\.jsonl:1: files_before must map at least one name to a text"),
        ('{"text": "a", "passages": "b"}\n', r"bad\.jsonl:1: passages must be a list, not 'b'"),
        ('{"text": "a", "documents": [{"title": "b"}]}\n', r"bad\.jsonl:1: documents must hold texts or {title, text}"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line_with_its_place(content, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        load_task(TaskSettings(path=str(tmp_path / "bad.jsonl")))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match=r"^t\.jsonl:2 is not UTF-8 \(.* at byte 10\); save it as UTF-8$"):
        load_task(TaskSettings(path=str(tmp_path / "t.jsonl")))


def test_a_missing_file_names_the_nearest_or_the_missing_folder(tmp_path):
    write(tmp_path / "humaneval.jsonl", {"text": "a"})
    with pytest.raises(
        UserError, match=r"task\.path='.*human_eval\.jsonl' does not exist; did you mean '.*humaneval\.jsonl'\?"
    ):
        load_task(TaskSettings(path=str(tmp_path / "human_eval.jsonl")))
    with pytest.raises(UserError, match=r"does not exist; there is no folder '.*nowhere'$"):
        load_task(TaskSettings(path=str(tmp_path / "nowhere" / "deep" / "t.jsonl")))
    with pytest.raises(UserError, match=r"cannot be read: Is a directory"):
        load_task(TaskSettings(path=str(tmp_path)))


def test_settings_out_of_range():
    with pytest.raises(UserError, match=r"task\.limit=0: at least 1, or null for every prompt"):
        TaskSettings(limit=0)
    with pytest.raises(UserError, match=r"task\.max_new_tokens=0: at least 1"):
        TaskSettings(max_new_tokens=0)


def test_a_task_without_a_source():
    with pytest.raises(UserError, match=r"task\.name='dmeo' is unknown: demo; a file is task\.path=FILE\.jsonl"):
        load_task(TaskSettings(name="dmeo"))
    with pytest.raises(UserError, match=r"no task is named: task\.path=FILE\.jsonl, task\.dataset=NAME or task=demo"):
        load_task(TaskSettings(name=None))


# --- the datasets library


@pytest.fixture
def dataset_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_dataset_is_read_like_a_file(tmp_path, dataset_cache):
    settings = write(
        tmp_path / "t.jsonl", {"id": "a", "turns": ["x"], "answer": "y"}, {"id": "b", "turns": ["z"], "answer": None}
    )
    got = load_task(TaskSettings(dataset="json", path=settings.path, split="train"))
    assert got.items == load_task(settings).items
    assert got.label == "t"
    assert load_task(TaskSettings(dataset="json", path=settings.path, limit=1)).items == got.items[:1]  # its only split


def test_a_dataset_with_several_splits_needs_one(tmp_path, dataset_cache):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", {"text": "train"})
    write(tmp_path / "set" / "test.jsonl", {"text": "test"})
    folder = str(tmp_path / "set")
    assert load_task(TaskSettings(dataset=folder, split="test")).items[0].opening[0].content == "test"
    with pytest.raises(
        UserError, match=r"task\.dataset='.*set' has the splits train, test: choose one with task\.split"
    ):
        load_task(TaskSettings(dataset=folder))
    with pytest.raises(
        UserError, match=r"cannot be loaded: Unknown split \"tset\"\..*; see its name, task\.subset and task\.split$"
    ):
        load_task(TaskSettings(dataset=folder, split="tset"))


def test_an_unknown_dataset_is_one_line(dataset_cache):
    with pytest.raises(UserError, match=r"^task\.dataset='no-such-set' cannot be loaded: .+; see its name, ") as error:
        load_task(TaskSettings(dataset="no-such-set"))
    assert "\n" not in str(error.value)


def test_a_format_needs_its_file():
    with pytest.raises(UserError, match=r"task\.dataset='json' is a format of files: name the file with task\.path"):
        load_task(TaskSettings(dataset="json"))


# --- the demo and the configs


def test_the_demo_is_a_fair_mix_with_something_to_copy(tokenizer):
    items = load_task(TaskSettings()).items
    categories = {"code_completion", "code_editing", "summarising", "passage_qa", "chat"}
    assert len(items) == 20
    assert [sum(item.category == name for item in items[:10]) for name in categories] == [2] * 5
    for item in items:
        assert item.category in categories
        assert item.raw == (item.category == "code_completion")
        assert bool(item.documents) == (item.category not in ("code_completion", "chat"))
        shown = "".join(message.content for message in conversation(item, []))
        assert all(document.split("\n", 1)[-1].rstrip("\n") in shown for document in item.documents)
        assert len(shown) < 1500  # under 500 tokens
        assert not item.gold


@pytest.mark.parametrize("name", ["demo", "file"])
def test_yaml_keys_are_the_settings(name):
    config = OmegaConf.load(CONFIGS / f"{name}.yaml")
    assert list(config) == [field.name for field in fields(TaskSettings)]
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TaskSettings), config))
    assert settings == TaskSettings(name="demo" if name == "demo" else None)


def test_a_path_alone_is_enough(tmp_path):
    write(tmp_path / "mine.jsonl", {"text": "a"})
    override = OmegaConf.from_dotlist([f"path={tmp_path / 'mine.jsonl'}"])
    config = OmegaConf.merge(OmegaConf.structured(TaskSettings), OmegaConf.load(CONFIGS / "demo.yaml"), override)
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, TaskSettings)
    assert load_task(settings).label == "mine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0].content.index('zzz') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_as_a_program_is_one_line(template: str) -> None:
    item = read_item(Row({"question": "abc"}, "t:1"), "t/0", "t")
    with pytest.raises(UserError, match="t/0: the chat template refuses it"):
        encode(item, (), bytes_tokenizer(), TaskSettings(template=template))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a\\ud800b"}', "holds half of a surrogate pair"),
        ('{"prompt": "a", "id": "\\udfff"}', "holds half of a surrogate pair"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "is more than is read"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "is more than is read"),
    ],
)
def test_json_that_is_no_text_is_one_line(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=rf"t.jsonl:1 {message}"):
        load_task(TaskSettings(path=str(tmp_path / "t.jsonl")))


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    (item,) = load_task(TaskSettings(path=str(tmp_path / "t.jsonl"))).items
    assert item.opening[0].content == "\U0001f600"


@pytest.mark.parametrize("key", ["path", "dataset", "subset", "split"])
@pytest.mark.parametrize("text", ["", " ", "a\0b"])
def test_a_text_that_names_nothing_is_refused(key: str, text: str) -> None:
    with pytest.raises(UserError, match=f"task.{key}=.* names nothing"):
        TaskSettings(**{key: text})


def test_a_home_that_nobody_has_is_a_path_like_any_other() -> None:
    with pytest.raises(UserError, match=r"~nobody-has-this-name/t.jsonl' does not exist"):
        load_task(TaskSettings(path="~nobody-has-this-name/t.jsonl"))
