"""Files on this machine: where the cache is, writes that are whole or absent, and digests of content."""

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ...cache_dir import cache_dir
from ...errors import UserError

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_ABANDONED = 24 * 3600  # seconds after which a partial file is taken for the rest of a killed process
_SETTLED = 2_000_000_000  # ns: a file changed more recently may change again under the same size and time stamp


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """A full disk or a folder that cannot be written, met while writing at `path`, as one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise UserError(f"the disk is full: {path} was not written; {_more_room(path)}") from error
        if error.errno in _UNUSABLE:
            remedy = f"{_place(path)} a folder of yours"
            raise UserError(f"{path} is not writable ({error.strerror}): {remedy}") from error
        raise


def _more_room(path: Path) -> str:
    return f"free some space, or {_place(path)} a folder on a larger disk"


def _place(path: Path) -> str:
    """How a user moves what lies there: the cache, or a folder that a command has named."""
    return "set DECODELAB_CACHE to" if path.absolute().is_relative_to(cache_dir().absolute()) else "name"


@contextmanager
def atomic_file(path: Path, size: int = 0) -> Iterator[BinaryIO]:
    """Write `path` whole or not at all: a file of a unique name beside it, synced, takes its place on a clean exit.

    With `size` in bytes, too little free space is refused before anything is written.
    """
    with explained(path):
        partial = _partial(path, size)
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same for a folder of a few small files. Where another process was faster, its folder stays."""
    with explained(path):
        partial = _partial(path)
        partial.mkdir()
        try:
            yield partial
            for file in partial.iterdir():
                with file.open("r+b") as written:
                    os.fsync(written.fileno())
            try:
                partial.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def file_digest(path: Path) -> str:
    """sha256 of the content, remembered in the cache for as long as path, size, time stamp and inode stay."""
    path = path.resolve()
    status = path.stat()
    stamp = [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
    note = cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    with suppress(OSError, ValueError):  # no note, or not one of ours
        known = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.get("stamp") == stamp:
            return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - status.st_mtime_ns > _SETTLED:
        with suppress(UserError), atomic_file(note) as file:  # without the note, on a full disk, it is only slower
            file.write(json.dumps({"stamp": stamp, "sha256": digest}).encode())
    return digest


def first_line(error: Exception) -> str:
    """Of what a library says at length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _partial(path: Path, size: int = 0) -> Path:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"{path} needs {_gb(size)}, but its disk has {_gb(free)} free: {_more_room(path)}")
    return folder / f".{path.name}.{uuid.uuid4().hex}.partial"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
