import os
import time
from pathlib import Path

import pytest

from decodelab.experiments import load
from decodelab.experiments.load import Moment, load_of_others, moment, others_since


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 100 ticks a second that says what this file says."""
    file = tmp_path / "stat"
    monkeypatch.setattr(load, "_STAT", file)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    return file


def test_what_others_worked_is_all_less_our_own(stat: Path, monkeypatch: pytest.MonkeyPatch):
    stat.write_text("cpu  400 100 200 9000 50 30 20 100 77 66\ncpu0 1 2 3\n")
    monkeypatch.setattr(time, "perf_counter", lambda: 12.0)
    monkeypatch.setattr(time, "process_time", lambda: 4.5)
    assert moment() == Moment(12.0, 8.5, 4.5)  # without idle, waiting for disks, and the guests, which are users too
    assert others_since(Moment(10.0, 5.0, 3.0)) == pytest.approx((3.5 - 1.5) / 2)
    assert others_since(Moment(10.0, 8.0, 3.0)) == 0.0  # ticks are coarse
    assert others_since(Moment(12.0, 5.0, 3.0)) is None


def test_our_own_work_is_no_load_of_others(monkeypatch: pytest.MonkeyPatch):
    """As in a sweep, where the cell before this one worked until now."""
    if moment() is None:
        pytest.skip("this system does not tell")
    then, until = moment(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert then is not None
    now = moment()
    assert now is not None
    assert now.own - then.own >= 0.3
    assert now.all - then.all >= now.own - then.own - 0.1  # it is among all the work, in coarse ticks


def test_a_system_that_does_not_tell(stat: Path, monkeypatch: pytest.MonkeyPatch):
    assert moment() is None
    assert others_since(None) is None
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0), raising=False)
    assert load_of_others() == 1.5
    monkeypatch.delattr(os, "getloadavg")
    assert load_of_others() is None
