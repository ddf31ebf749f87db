"""`quantize format=gguf`: the copy that is made block by block in the cache becomes one GGUF file."""

import shutil
from pathlib import Path

from ..decoding.model.gguf_export import check_gguf, write_gguf
from ..decoding.model.source import open_source
from ..errors import UserError
from .files import make_folder, write_atomic
from .lab import Progress
from .quantised_folder import READ, REPORT, copy_of
from .quantising import Quantising


def export(plan: Quantising, folder: Path, progress: Progress | None = None) -> None:
    """The folder holds the file, which comes last, and the record. The copy in the cache goes."""
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if others := [name for name in there if name not in (REPORT, READ) and not name.endswith(".partial")]:
        raise UserError(f"{folder} is not empty (it holds {others[0]}): name another output")
    check_gguf(plan.source)
    copy = copy_of(plan, progress)
    assert copy.path is not None
    made = Path(copy.path)
    make_folder(folder)
    for name in (REPORT, READ):
        if (made / name).is_file():
            write_atomic(folder / name, (made / name).read_text(encoding="utf-8"))
    write_gguf(plan.source, open_source(copy, progress), folder / f"{folder.resolve().name}.gguf", progress)
    shutil.rmtree(made)
