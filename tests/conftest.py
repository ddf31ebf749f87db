"""Fixtures. Everything runs offline on a small CPU: tiny models are built, never downloaded."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial, wraps
from inspect import isgeneratorfunction
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ForwardRef, get_args

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait must not spin, as in the command
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # before anything reads them

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray
from torch.utils._device import _device_constructors

torch.set_num_threads(1)  # tiny tensors; more threads only fight over the cores


def _of_arrays(hint: Any) -> bool:
    """Whether only jaxtyping knows what to do with it; a text, too, since it leaves alone what it cannot resolve."""
    if isinstance(hint, str | ForwardRef) or (isinstance(hint, type) and issubclass(hint, AbstractArray)):
        return True
    return any(map(_of_arrays, hint if isinstance(hint, list) else get_args(hint)))


def _gated(part: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(part)
    def call(*args, **kwargs):
        if jaxtyping.config.jaxtyping_disable:
            return part(*args, **kwargs)
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:
            raise TypeError(str(error)) from error  # as jaxtyping's own errors are

    return call


def _typed(made: set[CodeType], jaxtyped: Callable[..., Any], typechecker: Any, part: Any) -> Any:
    """What jaxtyping's decorator does, in a tenth of its time.

    A function within another is made with every call of it, and the checks of its types would be compiled with it,
    which takes a millisecond: the first one made is checked. And a function without arrays needs beartype alone.
    """
    if is_dataclass(part) and "__init__" in vars(part):
        part.__init__ = _typed(made, jaxtyped, typechecker, part.__init__)
        return part
    if not isinstance(part, FunctionType):
        return jaxtyped(part, typechecker=typechecker)
    if "<locals>" in part.__qualname__:
        if part.__code__ in made:
            return part
        made.add(part.__code__)
    if any(map(_of_arrays, part.__annotations__.values())):
        return jaxtyped(part, typechecker=typechecker)
    if isgeneratorfunction(part) and ".tests." in part.__module__:
        return part  # by which pytest knows a fixture that goes on after its test
    return _gated(part, typechecker(part))


def _decorator(made: set[CodeType], jaxtyped: Callable[..., Any], *, typechecker: Any) -> Callable[[Any], Any]:
    return partial(_typed, made, jaxtyped, typechecker)


jaxtyping.jaxtyped = partial(_decorator, set(), jaxtyping.jaxtyped)  # what is imported from here on is decorated so

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("DECODELAB_SHARED", ROOT.parent / "shared"))
NO_DATA = "the shared data is not at"
CACHE = Path(os.environ.get("DECODELAB_CACHE") or "~/.cache/decodelab").expanduser()  # the user's: tests read it alone


os.environ.setdefault("DECODELAB_NATIVE", str(CACHE / "native"))  # compiled once, for all caches of tests


@pytest.fixture
def shared() -> Path:
    """The folder of real data (`DECODELAB_SHARED`, default `../shared` from the root); skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{NO_DATA} {SHARED}; DECODELAB_SHARED names its folder")
    return SHARED


@pytest.fixture(scope="session")
def real_models() -> Iterator[Path]:
    """A cache in which the models of the user's cache are found, and whatever is written is thrown away.

    The default model is fetched into the user's cache if it is not there yet, as any command would; skips where it
    cannot be had.
    """
    from decodelab.decoding.model.source import ModelSpec, open_source
    from decodelab.errors import UserError

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DECODELAB_CACHE", str(CACHE))
        try:
            open_source(ModelSpec("smollm2-135m"))
        except UserError as error:
            pytest.skip(f"the default model is not here: {error}")
    with tempfile.TemporaryDirectory(prefix="decodelab-tests-") as folder:
        for kind in ("models", "gguf"):
            (Path(folder) / kind).mkdir()
            for found in (CACHE / kind).glob("[!.]*"):
                if kind == "models" or (found / "model.safetensors").is_file():  # else it would be written into
                    (Path(folder) / kind / found.name).symlink_to(found.resolve())
        if (CACHE / "digests").is_dir():
            shutil.copytree(CACHE / "digests", Path(folder) / "digests")
        yield Path(folder)


@pytest.fixture
def real_cache(real_models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same as `DECODELAB_CACHE`, with two threads of torch and without checks of types, which would take longer."""
    monkeypatch.setenv("DECODELAB_CACHE", str(real_models))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch.set_num_threads(2)
    yield real_models
    torch.set_num_threads(1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the suite was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.is_complex() or tensor.dtype == torch.bool:
            return tensor
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    return empty


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN (the largest value for integers): what leaves a cell unwritten and reads it fails loudly."""
    _device_constructors()  # is kept from its first call on: `with torch.device` must know the functions themselves
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped: {NO_DATA} {SHARED}")
