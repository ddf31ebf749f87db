"""What a GPU is asked to compute, computed by the interpreter in tiny shapes; and that it is asked of every kernel."""

import pytest
import torch

from decodelab.kernels import aot, checks
from decodelab.kernels.checks import CHECKS, Checked, checked

pytest.importorskip("triton", reason="kernels are interpreted by triton")


def test_every_kernel_is_checked() -> None:
    assert tuple(CHECKS) == aot.OPS  # which are those in the folder


@pytest.mark.parametrize("op", ["linear", "rms_norm", "rope", "swiglu", "accept", "commit"])
def test_kernels_are_what_they_should_be(op: str) -> None:
    """The other ones take longer, and have tests of the same kind."""
    found = list(checked(torch.device("cpu"), False, (op,)))
    assert found
    assert not [one for one in found if not one.passed]


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.swiglu
    monkeypatch.setattr(checks, "swiglu", lambda x: right(x) * 1.01)
    assert not all(one.passed for one in checked(torch.device("cpu"), False, ("swiglu",)))
    assert not Checked("op", "NaN", float("nan"), 1.0).passed
