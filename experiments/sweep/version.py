"""Which code a cell was run by: a digest of the sources, also where they are edited between two commits."""

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PARTS = ("attention", "decoding", "drafting", "experiments", "kernels", "quantization")


def package_digest() -> str:
    """Of decodelab's own sources."""
    return _digest(file for part in _PARTS for file in (_ROOT / part).rglob("*.py"))


def code_digest(package: str, trusted: Iterable[str] = ()) -> str:
    """Of decodelab's sources, given by their own digest, and those of the user's packages."""
    return hashlib.sha256(" ".join([package, *(_digest(_sources(name)) for name in trusted)]).encode()).hexdigest()[:12]


def _sources(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    if spec.submodule_search_locations is None and spec.origin is not None:  # a single file
        yield Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        yield from Path(folder).rglob("*.py")


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
