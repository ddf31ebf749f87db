"""Kernels of the CPU in C++: compiled when they are first used, for the processor they run on, and kept.

They need a compiler and AVX-512 with VNNI; elsewhere PyTorch's own operations stand in for them, and `implementation`
says which ran. `DECODELAB_NATIVE`: the folder that they are kept in (by default native/ of the cache), or 0 for none.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from jaxtyping import BFloat16, Shaped
from torch import Tensor

from ..cache_dir import cache_dir

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-shared")
_SECONDS = 120  # that a compiler may take


@cache
def library() -> ctypes.CDLL | None:
    """None where there is none; `missing` says why."""
    if missing():
        return None
    found = ctypes.CDLL(str(_path()))
    found.product.argtypes = [ctypes.POINTER(Product), ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3]
    found.layers.argtypes = [ctypes.c_void_p]
    found.norm_rows.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_float, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    found.norm_rows.restype = None
    found.nanoseconds.restype = ctypes.c_int64
    found.argmax.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return found


class Product(ctypes.Structure):
    """y [T, N] = x [T, K] Wᵀ + b, all in bfloat16: pointers to W as it is or in codes, to b, and to the order in which
    columns are read. `whole`: a row is rounded with one scale. It keeps none of them alive. `prefill`: the rows are a
    prompt's, which over 16 bits are summed in another order: that of a product of many."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "bias", "order")),
        *((name, ctypes.c_int32) for name in ("N", "K", "group", "bits", "shifted", "whole")),
    )

    def __call__(self, x: BFloat16[Tensor, "T K"], prefill: bool = False) -> BFloat16[Tensor, "T N"]:
        found = library()
        assert found is not None
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self.K
        x = x.contiguous()
        y = x.new_empty(len(x), self.N)
        sizes = (len(x), torch.get_num_threads(), prefill)
        if found.product(ctypes.byref(self), x.data_ptr(), y.data_ptr(), *sizes):
            raise MemoryError(f"no memory for {len(x)} rows of {self.K}")
        return y


def argmax(x: Shaped[Tensor, "R N"]) -> list[int] | None:
    """Of each row; None where there is no such function for it, or a row has a NaN."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not x.numel() or (found := library()) is None:
        return None
    x, numbers = x.contiguous(), (ctypes.c_int64 * len(x))()
    return None if found.argmax(x.data_ptr(), *x.shape, numbers) else list(numbers)


def seconds() -> float | None:
    """How long its calls took, all together, since the process began; None where there are none."""
    return None if (found := library()) is None else found.nanoseconds() / 1e9


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
    except subprocess.TimeoutExpired:
        return f"{compiler[0]} did not compile them in {_SECONDS} s"
    except subprocess.CalledProcessError as error:
        return f"{compiler[0]} did not compile them ({_line(error.stderr.strip() or error)})"
    except (OSError, RuntimeError) as error:  # RuntimeError: of a home that nobody has
        return f"they cannot be kept ({_line(error)}): DECODELAB_NATIVE may name another folder"
    return None


def _line(told: object) -> str:
    return " ".join(str(told).split())[:200]


def _compiler() -> list[str] | None:
    """The command that begins with it: CXX may hold arguments too."""
    named = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"], ["c++"]]
    return next(([found, *rest] for name, *rest in named if (found := shutil.which(name))), None)


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*/native.cpp"))


@cache
def _path() -> Path:
    """Of this code, compiler and processor."""
    compiler = _compiler()
    assert compiler is not None
    version = _run([*compiler, "--version"])
    target = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    here = Path(__file__).parent
    code = [file.read_text(encoding="utf-8") for file in (*_sources(), *sorted(here.glob("**/native.h")))]
    about = "\n".join([version, target, *compiler[1:], *_FLAGS, torch.__version__, *code])
    given = os.environ.get("DECODELAB_NATIVE") or cache_dir() / "native"
    folder = Path(given).expanduser().absolute()  # a bare name would be looked for in the system's folders
    return folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"


def _compile(compiler: list[str], path: Path) -> None:
    """Whole or not at all: several processes may come to it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        # two pools of threads would wait for each other's cores: PyTorch's own is the one to link with
        threads = [str(file) for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))[:1]]
        parts = [*compiler, *_FLAGS, *map(str, _sources()), "-o", str(made), *threads]
        _run(parts)
        os.replace(made, path)


def _run(command: list[str]) -> str:
    """What it prints, in whatever encoding: a message's letters do not matter."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    return done.stdout
