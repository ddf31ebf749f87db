"""What a drafter learnt for one target: tensors in a safetensors file, with a note of what they are and of whose."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..decoding.model.source import Source
from ..decoding.model.whose import NOTE, relation
from ..errors import UserError

CONFIG = "config.json"
SHIPPED = Path(__file__).parent / "heads"


@dataclass(frozen=True, slots=True)
class Trained:
    """The header of a trained part. `about`: our note (kind, target's digest, sizes), or the folder's config.json where
    it is another project's. `shapes`: by tensor."""

    file: Path
    about: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    ours: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """What it is read from: its tensors and, where it is another project's, the config beside them."""
        config = self.file.parent / CONFIG
        return (self.file, config) if not self.ours and config.is_file() else (self.file,)

    def tensors(self) -> dict[str, Tensor]:
        with safe_open(self.file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in self.shapes}

    def check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuses numbers that are not: from a broken training, or too large for the dtype they were read into."""
        if wrong := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
            dtype = tensors[wrong[0]].dtype
            raise UserError(f"{self.file}: {wrong[0]} is not finite in {dtype}: corrupt, or too large for it")

    def check_target(self, target: Source) -> list[str]:
        """Refuses a part of another target; warns where nobody noted whose it is, and where the weights that it was
        trained for and the target's are quantised copies of the same, or one of the other."""
        related = relation(self.about, target)
        if related == "unknown":
            return [f"{self.file} does not say which model it belongs to: with another one its drafts are worthless"]
        if related == "own":
            return []
        told = self.about.get("target_label", "another model")
        if related == "kin":
            return [
                f"{self.file} was trained for {told}, and {target.label} has the same weights quantised otherwise: its "
                "drafts may be accepted less often"
            ]
        if self.file.parent == SHIPPED:
            raise UserError(
                f"drafting.path is not set, and what is shipped was trained for {told}, not for {target.label}: train "
                f"one (decodelab train train={self.about['kind']} model=…), or name it with drafting.path="
            )
        raise UserError(
            f"{self.file} was trained for {told} (weights {str(self.about['target'])[:12]}), not for {target.label} "
            f"({target.digest[:12]}): train one for it, or name its own model"
        )


def open_trained(path: str | None, kind: str, names: tuple[str, ...], key: str = "drafting.path") -> Trained:
    """A file, or a folder with one of `names` in it; None: what is shipped, for the default model. Reads the header
    alone; pickled files are never read. `key`: the setting that gave the path."""
    where = SHIPPED if path is None else Path(path).expanduser()
    file = where
    if where.is_dir():
        found = [where / name for name in names if (where / name).is_file()]
        if not found:
            pickled = next((p.name for p in where.iterdir() if p.suffix in (".pt", ".bin", ".pth")), None)
            rest = f"; {pickled} is pickled and not read: convert it to safetensors" if pickled else ""
            raise UserError(f"{key}={path} holds none of {', '.join(names)}{rest}")
        file = found[0]
    elif not where.exists():
        raise UserError(f"{key}={path} does not exist; it is a folder or a safetensors file")
    elif where.suffix != ".safetensors":
        raise UserError(f"{key}={path} is no safetensors file; pickled files are not read, convert them")
    try:
        with safe_open(file, framework="pt") as stored:
            note = (stored.metadata() or {}).get(NOTE)
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        about = json.loads(note) if note is not None else _config(file.parent)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({' '.join(str(error).split())[:200]}): fetch or train it again"
        ) from None
    if not isinstance(about, dict):
        told = "its note" if note is not None else f"the {CONFIG} beside it"
        raise UserError(f"{file}: {told} is {str(about)[:60]!r}, but must be a mapping: fetch or train it again")
    if note is not None and about.get("kind") != kind:
        part = key.partition(".")[0]
        raise UserError(f"{file} holds {about.get('kind')}, not {kind}: choose {part}={about.get('kind')}")
    return Trained(file, about, shapes, note is not None)


def _config(folder: Path) -> Any:
    file = folder / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
