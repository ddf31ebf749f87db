"""A tiny model's quantisation from the command line, and text to calibrate it on."""

import pytest
import torch

from decodelab.experiments.cli import main
from decodelab.tests.experiments.bench import Bench

WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "one",
    "two",
    "three",
    "four",
    "five",
)


def sentence(seed: int, words: int = 16) -> str:
    g = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (words,), generator=g))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def quantize(bench: Bench, *words: str, output: str = "copy") -> int:
    model = [f"model.path={bench.checkpoint}", "dtype=float32", "device=cpu", "threads=1"]
    return main(["quantize", *model, f"output={bench.root / output}", *words])
