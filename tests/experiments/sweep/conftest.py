"""A stage for sweeps: see stage.py."""

import os

import pytest

from decodelab.experiments.compose import Composer
from decodelab.experiments.sweep import sweep as sweeps
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.sweep.stage import Stage


@pytest.fixture(scope="session")
def composer() -> Composer:
    return Composer()


@pytest.fixture
def stage(bench: Bench, composer: Composer, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no machine fails here
    monkeypatch.setattr(sweeps, "Composer", lambda _: composer)  # Hydra reads each YAML once
    monkeypatch.setattr(sweeps, "package_digest", lambda: "package")
    monkeypatch.setattr(sweeps, "code_digest", lambda *_: "code")
    return Stage(bench, composer)
