"""What reports on made-up runs share."""

import pytest

from decodelab.experiments.lab import Lab
from decodelab.tests.enumeration import unchecked
from decodelab.tests.experiments.tiny_lab import tiny_lab


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are checked in the tests of the parts."""
    unchecked(monkeypatch)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return tiny_lab()
