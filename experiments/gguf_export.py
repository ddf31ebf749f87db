"""`quantize format=gguf`: the copy that is made block by block in the cache becomes one GGUF file."""

import shutil
from pathlib import Path

from ..decoding.model.gguf_export import check_gguf, write_gguf
from ..decoding.model.quantised import STATE
from ..decoding.model.source import open_source
from ..errors import UserError
from .files import make_folder
from .lab import Progress
from .quantised_folder import READ, REPORT, copy_of, entries, keep, read_record
from .quantising import Quantising


def export(plan: Quantising, folder: Path, progress: Progress | None = None) -> None:
    """The folder holds the file, which comes last, and the record. The copy in the cache goes."""
    check_gguf(plan.source)
    make_folder(folder)
    if others := [name for name in entries(folder) if name not in (STATE, REPORT, READ)]:
        raise UserError(f"{folder} is not empty (it holds {others[0]}): name another output")
    keep(folder, STATE, {"key": plan.key})
    copy = copy_of(plan, progress)
    assert copy.path is not None
    made = Path(copy.path)
    for name in (REPORT, READ):
        if (made / name).is_file():
            record = read_record(made, name)
            record.pop("files", None)  # of the copy
            keep(folder, name, record)
    write_gguf(plan.source, open_source(copy, progress), folder / f"{folder.resolve().name}.gguf", progress)
    (folder / STATE).unlink()
    shutil.rmtree(made)
