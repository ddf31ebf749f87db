"""load, generate, compare, evaluate, load_runs: what a notebook calls."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import decodelab
from decodelab.attention.rows import chains
from decodelab.decoding.acceptance import Sampling
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.errors import UserError
from decodelab.experiments.api import Completion, LanguageModel
from decodelab.experiments.lab import Lab
from decodelab.experiments.quality.settings import TaskSpec
from decodelab.experiments.tasks import TaskSettings
from decodelab.tests.decoding.model.checkpoints import START, TOKENS, tiny_model, write_gguf
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.bench import strict
from decodelab.tests.experiments.schema import ADDED, SCHEMA, at

PROMPT = "12 ab 12 ab 12 ab 12"
OTHERS = ["hello there", "one two three one two three one"]
WARM = {"name": "sampling", "temperature": 1.5}


@pytest.fixture(scope="module")
def lm(checkpoint: Path) -> LanguageModel:
    return decodelab.load(str(checkpoint), dtype="float64")


@pytest.fixture(autouse=True)
def alone(private: Path) -> None:
    """Nothing of the user's cache or folder is read or written."""


def test_load_takes_a_folder_or_a_gguf_file(checkpoint: Path, tmp_path: Path, lm: LanguageModel):
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    found = decodelab.load(str(tmp_path / "tiny.gguf"), dtype="float64", device="cpu")
    assert (found.target.dtype, found.source.label) == (torch.float64, "tiny")
    # the GGUF file has float32 values of the same weights
    assert decodelab.generate(found, PROMPT).tokens == decodelab.generate(lm, PROMPT).tokens


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"dtype": "float8"}, r"^dtype must be one of auto, float32, bfloat16, float16, float64, got 'float8'$"),
        ({"device": "gpu"}, "^device=gpu is unknown"),
        ({"revision": "main"}, "^model.revision='main' is for hub ids"),
        ({"model": "smollm2-135"}, r"^there is no smollm2-135"),
    ],
)
def test_load_says_what_is_wrong(keys: dict[str, str], line: str, checkpoint: Path):
    with pytest.raises(UserError, match=line):
        decodelab.load(**{"model": str(checkpoint)} | keys)


def test_one_prompt(lm: LanguageModel):
    out = decodelab.generate(lm, PROMPT, max_new_tokens=20)
    assert isinstance(out, Completion)
    assert out.text == lm.source.tokenizer.decode(out.tokens, skip_special_tokens=True)
    assert len(out.tokens) <= 20
    assert out.reason in ("length", "eos")
    assert out.tokens_per_step > 1
    assert out.logprobs is None
    plain = decodelab.generate(lm, PROMPT, drafting="none", max_new_tokens=20)
    assert plain.tokens == out.tokens
    assert plain.tokens_per_step == 1.0


def test_ids_are_a_prompt_too(lm: LanguageModel):
    ids = lm.encode(PROMPT)
    want = decodelab.generate(lm, PROMPT)
    assert decodelab.generate(lm, ids) == want
    assert decodelab.generate(lm, [ids, PROMPT]) == [want, want]


@pytest.mark.parametrize("acceptance", ["greedy", WARM])
def test_several_prompts_side_by_side_equal_each_alone(acceptance: Any, lm: LanguageModel):
    """vllm#6038: the same seed with other batch mates. Seeds reproduce, and another seed draws another output."""
    options: dict[str, Any] = {"acceptance": acceptance, "max_new_tokens": 16, "seed": 3}
    together = decodelab.generate(lm, [PROMPT, *OTHERS], **options)
    alone = [decodelab.generate(lm, prompt, **options) for prompt in (PROMPT, *OTHERS)]
    assert together == alone
    other = decodelab.generate(lm, [PROMPT, *OTHERS], **options | {"seed": 4})
    assert (other == together) == (acceptance == "greedy")


def test_a_sampled_output_does_not_depend_on_the_drafter(lm: LanguageModel):
    outputs = {
        decodelab.generate(lm, PROMPT, drafting=drafting, acceptance=WARM).tokens
        for drafting in ("none", "prompt_lookup", {"name": "prompt_lookup", "max_draft": 1}, "reference")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("acceptance", ["greedy", WARM])
def test_a_stream_is_the_text_in_pieces(acceptance: Any, lm: LanguageModel):
    """Random bytes: characters of several tokens come whole."""
    want = decodelab.generate(lm, PROMPT, acceptance=acceptance, max_new_tokens=40)
    stream = decodelab.generate(lm, PROMPT, acceptance=acceptance, max_new_tokens=40, stream=True)
    assert isinstance(stream, Iterator)
    pieces = list(stream)
    assert "".join(pieces) == want.text
    assert len(pieces) > 1
    assert all(pieces)
    assert not any(piece.endswith("�") for piece in pieces[:-1])


def test_a_stream_runs_as_it_is_read(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    forwards: list[int] = []
    honest = type(lm.target).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        forwards.append(1)
        return honest(self, *args, **options)

    monkeypatch.setattr(type(lm.target), "forward", forward)
    stream = decodelab.generate(lm, PROMPT, drafting="none", stream=True, max_new_tokens=30)
    assert not forwards
    next(stream)
    assert 0 < len(forwards) < 30
    stream.close()


@pytest.mark.parametrize("given", [" 12", [" 12", "never"]])
def test_a_stop_string_ends_the_text(given: Any, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """One text is one stop string, not its characters."""
    read = "".join(chr(97 + i % 26) for i in range(262))
    monkeypatch.setattr(type(lm.source.tokenizer), "decode", lambda self, ids, **options: "".join(read[t] for t in ids))
    whole = decodelab.generate(lm, PROMPT, max_new_tokens=20)
    stop = whole.text[6:9]
    first = whole.text.index(stop) + 3
    stops = stop if given == " 12" else [stop, "123"]
    out = decodelab.generate(lm, PROMPT, max_new_tokens=20, stop=stops, logprobs=True)
    assert (out.text, out.reason) == (whole.text[:first], "stop")
    assert len(out.tokens) == len(out.logprobs) == first


def test_log_probabilities_are_the_raw_logits_own(lm: LanguageModel):
    out = decodelab.generate(lm, PROMPT, acceptance={"name": "greedy", "repetition_penalty": 1.3}, logprobs=True)
    ids = lm.encode(PROMPT)
    fed = [*ids, *out.tokens[:-1]]
    cache = lm.target.open_cache(1, len(fed))
    logits = lm.target(chains([fed], [cache.open()]), cache).logits[len(ids) - 1 :]
    want = torch.log_softmax(logits.float(), -1)[range(len(out.tokens)), list(out.tokens)]
    assert out.logprobs == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("given", ["it is 12 ab", ["it is 12 ab", "more"]])
def test_documents_reach_the_drafter_as_text(given: Any, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """Without the special tokens that a prompt begins with, as they would stand in an answer."""
    start = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, TOKENS.index(START))])
    monkeypatch.setattr(lm.source.tokenizer.backend_tokenizer, "post_processor", start)
    seen: list[Any] = []
    honest = Lab.strategy

    def strategy(self: Lab, requests: Any, seed: int = 0, **options: Any) -> Any:
        seen.extend(requests)
        return honest(self, requests, seed, **options)

    monkeypatch.setattr(Lab, "strategy", strategy)
    decodelab.generate(lm, PROMPT, drafting="reference", documents=given, max_new_tokens=4)
    (request,) = seen
    assert request.prompt[0] == TOKENS.index(START)
    texts = [given] if isinstance(given, str) else given
    assert [lm.source.tokenizer.decode(ids) for ids in request.documents] == texts


def test_chat_wraps_the_prompt(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    assert lm.encode("hi", chat=True) == lm.encode("<|im_start|>hi<|im_end|>")
    want = decodelab.generate(lm, "<|im_start|>hi<|im_end|>")
    assert decodelab.generate(lm, "hi", chat=True) == want
    monkeypatch.setattr(lm.source.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match=r"^the tokenizer of tiny has no chat template; leave chat=True out$"):
        decodelab.generate(lm, "hi", chat=True)


def test_parts_by_name_by_mapping_and_as_settings(lm: LanguageModel):
    ways = ["prompt_lookup", {"name": "prompt_lookup"}, PromptLookup()]
    assert len({decodelab.generate(lm, PROMPT, drafting=way).tokens_per_step for way in ways}) == 1
    short = {"name": "prompt_lookup", "max_draft": 1}
    assert decodelab.generate(lm, PROMPT, drafting=short).tokens_per_step <= 2
    assert decodelab.generate(lm, PROMPT, acceptance=Sampling(temperature=1.5)) == decodelab.generate(
        lm, PROMPT, acceptance=WARM
    )


def test_a_model_drafts_for_itself(lm: LanguageModel, checkpoint: Path):
    draft = {"name": "draft_model", "max_draft": 3, "model": {"path": str(checkpoint)}}
    out = decodelab.generate(lm, PROMPT, drafting=draft, max_new_tokens=21)
    assert out.tokens == decodelab.generate(lm, PROMPT, max_new_tokens=21).tokens
    assert out.tokens_per_step > 3


def test_a_fallback_is_a_warning(lm: LanguageModel, checkpoint: Path):
    draft = {"name": "draft_model", "proposal": "sampled", "model": {"path": str(checkpoint)}}
    with pytest.warns(RuntimeWarning, match="^acceptance=greedy does not sample, so drafts are chosen as the target"):
        decodelab.generate(lm, PROMPT, drafting=draft, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"drafting": "prompt_lokup"}, "^drafting=prompt_lokup is unknown: did you mean prompt_lookup"),
        ({"drafting": {"max_draft": 3}}, "^drafting is a mapping without name: give one of draft_model, .*none"),
        (
            {"drafting": {"name": "prompt_lookup", "max_drafts": 3}},
            "^drafting.max_drafts is unknown: did you mean max_draft",
        ),
        ({"drafting": 5}, "^drafting must be a name, a mapping with name and keys, or settings; got 5$"),
        ({"drafting": Sampling()}, "^drafting must be a name, a mapping with name and keys, or settings; got Sampling"),
        ({"acceptance": {"name": "sampling", "temperature": 0}}, "temperature"),
        ({"prompts": []}, "^prompts is empty; give a text, or a list with at least one$"),
        ({"prompts": ""}, "^the prompt: the prompt has no tokens; its text must not be empty$"),
        ({"prompts": [[]]}, "^the prompt is empty"),
        ({"prompts": [999]}, "^the prompt holds token id 999, but the model's vocabulary is 0 to 261$"),
        ({"prompts": "a" * 200}, "^the prompt has 200 tokens, but the context holds 128"),
        ({"max_new_tokens": 0}, "^max_new_tokens must be at least 1, got 0$"),
        ({"stop": ""}, "^a stop string is empty"),
        ({"prompts": ["a", "b"], "stream": True}, "^stream=True takes one prompt, got 2; loop over them$"),
        ({"stream": True, "logprobs": True}, "^stream=True yields text alone; leave logprobs=True out$"),
    ],
)
def test_generate_says_what_is_wrong_before_it_runs(
    options: dict[str, Any], line: str, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    unchecked(monkeypatch)  # the check of types would refuse some of them first
    with pytest.raises(UserError, match=line):
        decodelab.generate(lm, **{"prompts": PROMPT} | options)


def test_compare_returns_what_result_json_holds(lm: LanguageModel, checkpoint: Path):
    found = decodelab.compare(lm, [PROMPT, *OTHERS], max_new_tokens=8)
    names = {path: {"by_category.copy": "by_category.prompts"}.get(path, path) for path in SCHEMA}
    for path, keys in SCHEMA.items():
        there = set(at(found, names[path].replace("by_category.copy.", "by_category.prompts.")))
        assert there == (keys | ADDED.get(path, set())) - {"dtype_reason", "clock_mhz"}, path
    assert strict(json.dumps(found))["exactness"] == found["exactness"]
    assert found["exactness"]["verdict"] == "exact"
    assert (found["prompts"], found["provenance"]["dtype"]) == (3, "float64")
    assert found["speedup"]["value"] > 0
    assert found["decode"]["mbu"] > 0
    draft = {"name": "draft_model", "model": {"path": str(checkpoint)}}
    other = decodelab.compare(lm, [PROMPT], drafting=draft, timing="untimed", max_new_tokens=8)
    assert other["digests"]["draft"] == other["digests"]["model"]
    assert other["key"] != found["key"]
    assert other["speedup"] == {"value": None, "low": None, "high": None, "n": None}


def test_compare_s_key_is_of_what_is_compared(lm: LanguageModel):
    def key(prompts: list[str], **options: Any) -> str:
        return decodelab.compare(lm, prompts, timing="untimed", max_new_tokens=4, **options)["key"]

    same = {key(["ab"]), key(["ab"], drafting={"name": "prompt_lookup"}), key(["ab"], drafting=PromptLookup())}
    assert len(same) == 1
    assert len({*same, key(["ac"]), key(["ab"], drafting="none"), key(["ab"], batch=2), key(["ab"], seed=2)}) == 5


def test_compare_on_a_task(lm: LanguageModel, tmp_path: Path):
    rows = [{"id": "a", "category": "x", "prompt": "ab ab"}, {"id": "b", "category": "y", "turns": ["hi", "ho"]}]
    (tmp_path / "task.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = TaskSettings(path=str(tmp_path / "task.jsonl"), max_new_tokens=5)
    found = decodelab.compare(lm, task, batch=2, timing="untimed", drafting="reference")
    assert {name: row["n"] for name, row in found["by_category"].items()} == {"x": 1, "y": 2}
    assert found["baseline"]["tokens"] <= 15
    assert found["warnings"] == []
    with pytest.raises(UserError, match=r"^demo/"):  # its prompts do not fit into 128 tokens
        decodelab.compare(lm)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"prompts": []}, "^prompts must be a list with at least one text, or TaskSettings$"),
        ({"prompts": "ab"}, "^prompts must be a list with at least one text, or TaskSettings$"),
        ({"prompts": [[1, 2]]}, "^prompts must be a list with at least one text, or TaskSettings$"),
        ({"prompts": ["ab", ""]}, "^1: the prompt has no tokens"),
        ({"batch": 0}, "^batch must be at least 1, got 0$"),
        ({"timing": "never"}, "^timing must be paired, anchored or untimed, got 'never'$"),
        ({"drafting": "prompt"}, "^drafting=prompt is unknown"),
        ({"max_new_tokens": 0}, "^task.max_new_tokens=0: at least 1$"),
    ],
)
def test_compare_says_what_is_wrong(
    options: dict[str, Any], line: str, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    unchecked(monkeypatch)
    with pytest.raises(UserError, match=line):
        decodelab.compare(lm, **{"prompts": ["ab"]} | options)


def result(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True)
    speedup = {"value": 2.0, "low": None, "high": None, "n": 4}
    whole = {"schema": 1, "key": "k", "status": "done", "config": {}, "digests": {}, "speedup": speedup}
    (folder / "result.json").write_text(json.dumps(whole | keys))
    return folder


def test_load_runs_finds_every_result_below(tmp_path: Path):
    for name in ("outputs/b", "outputs/a/deep", "elsewhere"):
        result(tmp_path / name, key=name)
    frame = decodelab.load_runs()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["key"]) == ["outputs/a/deep", "outputs/b"]
    assert list(frame["speedup.value"]) == [2.0, 2.0]
    both = decodelab.load_runs("outputs", tmp_path / "elsewhere")
    assert list(both["key"]) == ["outputs/a/deep", "outputs/b", "elsewhere"]
    one = decodelab.load_runs("elsewhere/result.json")
    assert list(one["folder"]) == ["elsewhere"]
    listed = decodelab.load_runs(["outputs", tmp_path / "elsewhere"])
    assert list(listed["key"]) == list(both["key"])
    assert decodelab.load_runs([]).empty


def test_load_runs_names_them_as_a_report_does(tmp_path: Path):
    for copy in (1, 2):
        drafting = {"_target_": "decodelab.drafting.reference.Reference", "copy": copy}
        result(tmp_path / f"outputs/{copy}", config={"drafting": drafting}, strategy=None)
    frame = decodelab.load_runs()
    assert frame.columns[0] == "strategy"
    assert list(frame["strategy"]) == ["reference copy=1", "reference copy=2"]
    assert not frame.columns.duplicated().any()


def test_load_runs_says_what_is_wrong(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"^there is no folder outputs; a run writes to outputs/ unless output=DIR says"
    ):
        decodelab.load_runs()
    (tmp_path / "outputs").mkdir()
    assert decodelab.load_runs().empty
    (result(tmp_path / "outputs" / "a") / "result.json").write_text('{"schema": 1,')
    with pytest.raises(UserError, match=r"^outputs/a/result.json is not a whole result \(.*\); delete it and"):
        decodelab.load_runs()


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, str]:
    """A task of multiple choice, of which the tiny model answers a part as it should."""
    rows = [{"id": str(i), "question": f"what is {i}?", "choices": [" ab", " cd"], "answer": i % 2} for i in range(6)]
    (tmp_path / "choose.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"path": str(tmp_path / "choose.jsonl")}


@pytest.fixture
def answers(tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{i} ab {i} ab {i} ab", "answer": "ab"} for i in range(5)]
    (tmp_path / "say.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"path": str(tmp_path / "say.jsonl"), "kind": "generate", "scorer": "contains", "max_new_tokens": 6}


def test_quality_against_a_run_that_was_kept(
    lm: LanguageModel,
    questions: dict[str, str],
    answers: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    unchecked(monkeypatch)
    tasks = [questions, TaskSpec(**answers)]
    first = decodelab.evaluate(lm, tasks, drafting="none", output=tmp_path / "first")
    assert strict((tmp_path / "first" / "result.json").read_text()) == json.loads(json.dumps(first))
    assert set(first["quality"]["tasks"]) == {"choose", "say"}
    assert (first["speedup"]["value"], first["strategy"], first["status"]) == (None, None, "done")

    again = decodelab.evaluate(lm, tasks, against=str(tmp_path / "first"), output=tmp_path / "again")
    found = again["quality"]["against"]
    # speculation changes no answer
    assert found["differs_in"].keys() == {"drafting"}
    assert {name: task["metrics"][task["main"]]["changed"] for name, task in found["tasks"].items()} == {
        "choose": 0,
        "say": 0,
    }
    assert found["reference"]["key"] == first["key"] != again["key"]
    names = {"result.json", "events.jsonl", "samples.jsonl", "quality.jsonl"}
    assert {file.name for file in (tmp_path / "first").iterdir()} == names
    assert {file.name for file in (tmp_path / "again").iterdir()} == names | {"flips.jsonl"}

    with pytest.raises(UserError, match=r"^output=.*first already holds a result; name another folder or delete"):
        decodelab.evaluate(lm, tasks, output=tmp_path / "first")
    with pytest.raises(UserError, match=r"batch is 2 here, 1 there; run both alike, or accept it with quality\.allow"):
        decodelab.evaluate(lm, tasks, batch=2, against=tmp_path / "first")
    accepted = decodelab.evaluate(lm, questions, batch=2, against=tmp_path / "first", allow=("batch",))
    assert [departure["key"] for departure in accepted["quality"]["against"]["allowed"]] == ["batch"]
    with pytest.raises(UserError, match=r'acceptance of say is "Sampling\(temperature=1\.5.* here, "Greedy" there'):
        decodelab.evaluate(lm, tasks, acceptance=WARM, against=tmp_path / "first")


def test_an_item_stays_itself_wherever_it_stands_in_its_file(
    lm: LanguageModel, questions: dict[str, str], tmp_path: Path
):
    decodelab.evaluate(lm, questions, output=tmp_path / "first")
    file = Path(questions["path"])
    row = {"id": "new", "question": "what is new?", "choices": [" ab", " cd"], "answer": 0}
    file.write_text(json.dumps(row) + "\n" + file.read_text())
    with pytest.raises(UserError, match=r"digest is .*allow=\[task\]$"):
        decodelab.evaluate(lm, questions, against=tmp_path / "first")
    found = decodelab.evaluate(lm, questions, against=tmp_path / "first", allow=["task"])["quality"]["against"]
    task = found["tasks"]["choose"]
    assert (task["n"], task["unpaired"], task["metrics"]["acc"]["changed"]) == (6, {"mine": 1, "reference": 0}, 0)


def test_quality_leaves_no_files_unless_it_is_told_where(lm: LanguageModel, questions: dict[str, str], tmp_path: Path):
    found = decodelab.evaluate(lm, [questions], limit=2)
    assert found["quality"]["tasks"]["choose"]["n"] == 2
    assert found["config"]["quality"]["limit"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["choose.jsonl"]


@pytest.mark.parametrize(
    ("tasks", "options", "line"),
    [
        ([], {}, r"^tasks is empty; name a task, such as \{'path': 'my\.jsonl'\}$"),
        (["choose.jsonl"], {"limits": 2}, r"^quality\.limits is unknown: did you mean limit\?"),
        (["choose.jsonl"], {"limit": 0}, r"^quality\.limit=0: at least 1"),
        ([{"path": "x.jsonl", "shot": 1}], {}, r"^quality\.tasks\[0\]\.shot is unknown: did you mean shots\?"),
        ([{"path": "x.jsonl"}], {"allow": ["batches"]}, r"^quality\.allow must be "),
        (
            [{"path": "choose.jsonl"}],
            {"against": "nowhere"},
            r"^nowhere holds no result\.json; name the folder of a run",
        ),
        (
            [{"path": "choose.jsonl"}],
            {"output": "choose.jsonl"},
            r"^output=choose\.jsonl cannot be made \(File exists\)",
        ),
    ],
)
def test_quality_says_what_is_wrong(
    lm: LanguageModel, questions: dict[str, str], tasks: list[Any], options: dict[str, Any], line: str
):
    with pytest.raises(UserError, match=line):
        decodelab.evaluate(lm, tasks, **options)
