"""Kernels of the CPU in C++: compiled when they are first used, for the processor they run on, and kept.

They need a compiler and AVX-512 with VNNI; elsewhere PyTorch's own operations stand in for them, and `implementation`
says which ran. `DECODELAB_NATIVE`: the folder that they are kept in (by default native/ of the cache), or 0 for none.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from ..cache_dir import cache_dir

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-shared")
_SECONDS = 120  # that a compiler may take


@cache
def library() -> ctypes.CDLL | None:
    """None where there is none; `missing` says why."""
    if missing():
        return None
    found = ctypes.CDLL(str(_path()))
    found.matmul_codes.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 7
    return found


@cache
def missing() -> str | None:
    """Why there are no kernels in C++ here; None where there are."""
    if os.environ.get("DECODELAB_NATIVE") == "0":
        return "DECODELAB_NATIVE=0"
    if platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_vnni_supported():
        return "the processor has no AVX-512 with VNNI"
    if (compiler := _compiler()) is None:
        return "there is no C++ compiler: install g++ or set CXX"
    try:
        if not _path().exists():
            _compile(compiler, _path())
        ctypes.CDLL(str(_path()))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"{compiler} did not compile them ({' '.join(told.split())[:200]})"
    return None


def _compiler() -> str | None:
    named = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in named if (found := shutil.which(name))), None)


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*/native.cpp"))


@cache
def _path() -> Path:
    """Of this code, compiler and processor."""
    compiler = _compiler()
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    target = subprocess.run(
        [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    code = [file.read_text(encoding="utf-8") for file in (*_sources(), Path(__file__).with_name("native.h"))]
    about = "\n".join([version.stdout, target.stdout, *_FLAGS, torch.__version__, *code])
    folder = Path(os.environ.get("DECODELAB_NATIVE") or cache_dir() / "native").expanduser()
    return folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"


def _compile(compiler: str, path: Path) -> None:
    """Whole or not at all: several processes may come to it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        # two pools of threads would wait for each other's cores: PyTorch's own is the one to link with
        threads = [str(file) for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))[:1]]
        parts = [compiler, *_FLAGS, *map(str, _sources()), "-o", str(made), *threads]
        subprocess.run(parts, capture_output=True, text=True, timeout=_SECONDS, check=True)
        os.replace(made, path)
