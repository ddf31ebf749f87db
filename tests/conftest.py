"""Fixtures. Everything runs offline on a small CPU: tiny models are built, never downloaded."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # before anything reads them

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors; more threads only fight over the cores

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("DECODELAB_SHARED", ROOT.parent / "shared"))
NO_DATA = "the shared data is not at"


@pytest.fixture
def shared() -> Path:
    """The folder of real data (`DECODELAB_SHARED`, default `../shared` from the root); skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{NO_DATA} {SHARED}; DECODELAB_SHARED names its folder")
    return SHARED


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
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped: {NO_DATA} {SHARED}")
