"""The folder of a quantised model, made block by block, so that what was broken off goes on where it was."""

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from ..cache_dir import cache_dir
from ..decoding.model.calibrated import CalibratedBlock, Passage, passages
from ..decoding.model.config import ModelConfig, content_of
from ..decoding.model.quantised import STATE
from ..decoding.model.source import ModelSpec
from ..decoding.model.storage import atomic_file, explained, file_digest, first_line
from ..decoding.model.weights import INDEX, StoredTensors, open_safetensors, read_headers, read_json
from ..errors import UserError
from ..quantization.codes import Scheme
from ..quantization.dequantised import most_common, stored_grid
from ..quantization.sequential import Report, quantise
from .files import make_folder, misfit, write_atomic
from .format import counted
from .hardware import peak_memory_bytes
from .lab import Progress
from .overlap import Marks, Overlap
from .quantising import Quantising, layer_shapes

REPORT = "quantization.json"
FOUND = ("overrides.yaml", "overrides.json")  # those that were found by themselves, before the weights are made
READ = "calibration.json"  # marks of the rows that were calibrated on
# Of these files, what their readers take for granted (`misfit`). `files`: digests by name, of what is whole.
_SHAPES: Mapping[str, Any] = {
    STATE: {"key": str, "files?": {"*": str}},
    REPORT: {
        "kind": str, "settings": dict, "calibration": (dict, None), "source": {"label": str, "digest": str},
        "warnings?": [str], "layers": [{"notes": [str]}], "skipped": {"*": str}, "files?": {"*": str},
    },
    READ: {"overlap": str, "marks": {"*": str}},
}  # fmt: skip


def copy_of(plan: Quantising, progress: Progress | None = None) -> ModelSpec:
    """The quantised copy in the cache, made where it is not there, and made whole where it is damaged."""
    folder = cache_dir() / "quantised" / f"{plan.label.replace('/', '_')}-{plan.key}"
    if (damaged := _damaged(folder)) is not None:
        told = f"{folder / damaged} is damaged or gone: what is not as it was written is quantised again"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        try:
            files = read_record(folder, REPORT).get("files", {})
        except UserError:
            files = {}
        keep(folder, STATE, {"key": plan.key, "files": files})
    if damaged is not None or not (folder / INDEX).is_file():
        write(plan, folder, progress)
    return ModelSpec(name=plan.label, path=str(folder))


def _damaged(folder: Path) -> str | None:
    """The first file of a copy, or of the beginning of one, that is not as it was written."""
    if not folder.is_dir() or not entries(folder):
        return None
    whole = (folder / INDEX).is_file()
    try:
        files = read_record(folder, REPORT if whole else STATE).get("files", {})
    except UserError:
        return REPORT if whole else STATE
    return next((name for name, digest in files.items() if whole and not _is(folder / name, digest)), None)


def _is(file: Path, digest: str | None) -> bool:
    return file.is_file() and file_digest(file) == digest


def entries(folder: Path) -> list[str]:
    """Less what a killed process has left of its writing, and FOUND."""
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if not name.endswith(".partial") and name not in FOUND]


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """STATE, REPORT or READ."""
    found = read_json(folder / name) if (folder / name).is_file() else None
    wrong = misfit(found, _SHAPES[name])
    if name == READ and wrong is None and found is not None and found["overlap"] not in get_args(Overlap):
        wrong = f"overlap is {found['overlap']!r}"
    if found is None or wrong is not None:
        raise UserError(f"{folder / name} is damaged ({wrong}): delete the folder, and quantise again")
    return found


def keep(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    with explained(folder / name):
        write_atomic(folder / name, json.dumps(content, indent=1, default=str) + "\n")


def check_output(folder: Path) -> None:
    """Refuses, before the work, a folder that is finished, holds something else, or cannot be written."""
    if (folder / INDEX).is_file() or (folder / f"{folder.resolve().name}.gguf").is_file():
        raise UserError(
            f"{folder} holds a finished model already: load it with model.path={folder}, or name another output"
        )
    there = folder.is_dir()
    make_folder(folder)
    if not there:  # it is made by what is sure to fill it
        folder.rmdir()
    elif not (folder / STATE).is_file() and (others := entries(folder)):
        raise UserError(f"{folder} is not empty (it holds {others[0]}): name another output")


def _begin(folder: Path, plan: Quantising) -> dict[str, str]:
    """Marks a folder as one that is not whole yet. Refuses one that holds something else; of a beginning of the same
    quantisation, the digests of its files."""
    make_folder(folder)
    if (folder / STATE).is_file():
        found = read_record(folder, STATE)
        if found["key"] != plan.key:
            raise UserError(f"{folder} holds the beginning of another quantisation: name another output, or delete it")
        return dict(found.get("files", {}))
    if others := entries(folder):
        raise UserError(f"{folder} is not empty (it holds {others[0]}): name another output")
    keep(folder, STATE, {"key": plan.key, "files": {}})
    return {}


def write(plan: Quantising, folder: Path, progress: Progress | None = None) -> list[Report]:
    """The folder of a quantised model: a safetensors file a block, and one for the rest; the index comes last.

    Memory holds what `quantise` says, and not the model, whose tensors are read block by block, but for the pages of
    its file that the system keeps."""
    known = _begin(folder, plan)
    try:
        return _write_model(plan, folder, known, progress)
    except KeyboardInterrupt:
        of = ModelConfig.from_hf(plan.source.config).layers
        told = f"interrupted; {len(known)} of {of} blocks are kept, and the same command goes on behind them"
        raise KeyboardInterrupt(told) from None


def _write_model(plan: Quantising, folder: Path, known: dict[str, str], progress: Progress | None) -> list[Report]:
    """`known`: the digests of the files that are kept, to which those of new ones come."""
    began = time.monotonic()
    source, model = plan.source, ModelConfig.from_hf(plan.source.config)
    tensors = source.tensors(progress)
    text = _text(plan, tensors)  # empty where no layer reads any
    reports: list[Report] = []
    index: dict[str, str] = {}
    schemes: dict[str, Scheme] = {}
    kept = {name for name, digest in known.items() if _is(folder / name, digest)}
    again = f"{counted(len(kept), 'block')} kept of {model.layers}, passed through again"
    for layer in range(model.layers):
        name = f"block-{layer:05d}.safetensors"
        file = folder / name
        if progress is not None:  # by names of their own, so that the time left is of what is quantised alone
            progress(*((again, layer, len(kept)) if name in kept else ("quantising", layer, model.layers)))
        block = CalibratedBlock(model, layer, tensors, text)
        done = _read_block(file, block, plan) if name in kept else None
        if done is None:
            chosen = {n: plan.layers[n] for stage in block.stages for n in stage.names}
            _write_block(file, block, list(quantise(block, chosen, plan.form.fit)), plan)
            known[name] = file_digest(file)
            keep(folder, STATE, {"key": plan.key, "files": known})
            done = _read_block(file, block, plan)  # as it is stored: what is broken off goes on from the same
        reports += done
        index |= dict.fromkeys(_stored(block, plan), name)
        schemes |= {n: c.scheme for n, c in block.codes.items()}
        block.advance()
    if progress is not None:
        progress("quantising", model.layers, model.layers)
    rest = {n: tensors[n].to(plan.dtype) for n in tensors if not n.startswith("model.layers.")}
    if model.tied:
        rest.pop("lm_head.weight", None)
    _write(folder / "rest.safetensors", rest, {})
    index |= dict.fromkeys(rest, "rest.safetensors")
    device = text[0].hidden.device if text else torch.device("cpu")
    made = {"seconds": time.monotonic() - began, "peak_bytes": peak_memory_bytes(device), "resumed": len(kept)}
    _finish(folder, plan, schemes, reports, index, made | {"warnings": [*plan.warnings, *_of_source(plan, tensors)]})
    return reports


def _of_source(plan: Quantising, tensors: Mapping[str, Tensor]) -> list[str]:
    """A warning where the weights were quantised before: settings that suit their grid then lose nothing."""
    last = max(int(name.split(".")[2]) for name in plan.layers)
    looked = [name for name in plan.layers if int(name.split(".")[2]) in (0, last // 2, last)]
    grid, n = most_common(stored_grid(tensors[f"{name}.weight"]) for name in looked)
    if grid is None:
        return []
    bits, size = grid.bits, grid.group_size
    told = (
        f"{plan.source.label} is itself dequantised: {n} of {len(looked)} layers looked at lie on grids of {bits} bits "
        f"in groups of {size}, which {bits} bits with a float shift (hqq, gguf) reproduce with next to no error"
    )
    if any(scheme.group_size <= size and scheme.bits >= bits for scheme in plan.schemes.values()):
        told += "; these settings are as fine, so that what they lose says little of the method: choose wider groups"
    return [told]


def _text(plan: Quantising, tensors: Mapping[str, Tensor]) -> list[Passage]:
    if plan.pieces is None:
        return []
    return passages(plan.pieces.pieces, tensors["model.embed_tokens.weight"].float())


def _stored(block: CalibratedBlock, plan: Quantising) -> dict[str, Tensor]:
    """What a file of a block holds."""
    found: dict[str, Tensor] = {}
    for layer, codes in block.codes.items():
        found |= plan.form.write(layer, codes)
    quantised = {f"{layer}.weight" for layer in block.codes}
    found |= {name: t.to(plan.dtype) for name, t in block.tensors.items() if name not in quantised}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _write_block(file: Path, block: CalibratedBlock, reports: Sequence[Report], plan: Quantising) -> None:
    about = plan.form.config({name: codes.scheme for name, codes in block.codes.items()}, ())
    note = {"reports": [asdict(report) for report in reports], "config": about}
    _write(file, _stored(block, plan), {"decodelab-quantised": json.dumps(note)})


def _write(file: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str]) -> None:
    """The same bytes for the same content: the library writes notes in any order, and so the header is put in order."""
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt", **note})
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:start]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    with atomic_file(file, len(content)) as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.write(memoryview(content)[start:])


def _read_block(file: Path, block: CalibratedBlock, plan: Quantising) -> list[Report]:
    """What was done; the block becomes what is stored of it."""
    note = json.loads(open_safetensors(file).metadata()["decodelab-quantised"])
    table = read_headers([file])
    tensors = StoredTensors(table)
    shapes = {name: stored.shape for name, stored in table.items()}
    block.codes.clear()  # in the order of the file
    for layer in plan.form.layers(shapes, note["config"]):
        block.codes[layer] = plan.form.read(layer, tensors.__getitem__, note["config"])
    for name in block.tensors:
        if name in table:
            block.tensors[name] = tensors[name].float()
    block.changed()
    return [Report(**report | {"notes": tuple(report["notes"])}) for report in note["reports"]]


def _finish(
    folder: Path,
    plan: Quantising,
    schemes: Mapping[str, Scheme],
    reports: Sequence[Report],
    index: Mapping[str, str],
    made: Mapping[str, Any],
) -> None:
    source, shapes = plan.source, layer_shapes(ModelConfig.from_hf(plan.source.config))
    config = content_of(source.config) | {"dtype": str(plan.dtype).removeprefix("torch.")}
    about = plan.form.config(schemes, plan.untouched)
    config["quantization_config"] = about | {"origin": source.digest, "kind": plan.settings.kind}
    keep(folder, "config.json", config)
    keep(folder, "generation_config.json", {"eos_token_id": list(source.eos_ids)})
    try:
        source.tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises no narrower one
        raise UserError(
            f"the tokenizer was not written to {folder} ({first_line(error)}): name another output"
        ) from error
    record = {
        "source": {"label": source.label, "digest": source.digest},
        "settings": asdict(plan.settings),  # type: ignore[call-overload]
        "kind": plan.settings.kind,
        "calibration": _calibration(plan),
        "layers": [asdict(report) for report in reports],
        "skipped": dict(plan.skipped),
        "share": sum(prod(shapes[report.name]) for report in reports) / sum(map(prod, shapes.values())),
        **made,
    }
    if plan.pieces is not None:
        assert plan.settings.calibration is not None
        keep(folder, READ, {"overlap": plan.settings.calibration.overlap, "marks": Marks.of_pieces(plan.pieces).rows})
    size = sum((folder / name).stat().st_size for name in set(index.values()))
    content = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(index)}, indent=1) + "\n"
    names = [name for name in entries(folder) if name not in (STATE, REPORT, INDEX) and (folder / name).is_file()]
    files = {name: file_digest(folder / name) for name in names}
    files[INDEX] = hashlib.sha256(content.encode()).hexdigest()
    keep(folder, REPORT, record | {"files": files})
    with explained(folder / INDEX):
        write_atomic(folder / INDEX, content)
    (folder / STATE).unlink(missing_ok=True)  # two runs may make the same copy


def _calibration(plan: Quantising) -> dict[str, Any] | None:
    """Of the record."""
    if plan.pieces is None:
        return None
    assert plan.settings.calibration is not None
    known = {"digest": plan.pieces.digest, "tokens": plan.pieces.tokens, "rows": len(plan.pieces.read)}
    return asdict(plan.settings.calibration) | known
