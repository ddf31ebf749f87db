import re
import signal
import threading
import time

import pytest

from decodelab.experiments.quality import deadline
from decodelab.experiments.quality.deadline import LateError, within


def swallow():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            if swallowed:
                raise
            swallowed.append(1)


swallowed: list[int] = []


def test_what_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(deadline, "AGAIN", 0.05)
    swallowed.clear()
    for endless in (lambda: re.search("(a+)+$", "a" * 50 + "b"), lambda: time.sleep(60), swallow):
        with pytest.raises(LateError):
            within(0.05, endless)
    assert swallowed == [1]


def test_what_ends_in_time_is_as_it_would_be_without():
    before = signal.getsignal(signal.SIGALRM)
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(KeyError, match="own"):
        within(60.0, lambda: {}["own"])
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_another_thread_has_no_alarm():
    found = []
    thread = threading.Thread(target=lambda: found.append(within(0.01, lambda: time.sleep(0.05))))
    thread.start()
    thread.join()
    assert found == [None]
