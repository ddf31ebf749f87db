"""An end, by the clock, of what may never end by itself."""

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

AGAIN = 1.0  # seconds until code that swallowed the first alarm hears the next

T = TypeVar("T")


class LateError(Exception):
    """The time is over."""


class _Alarm(BaseException):
    """No Exception, so that `except Exception` in what is called lets it through."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """call(); LateError once it took `seconds`. Ends Python code and `re`, which look for signals on their way.

    Only a main thread on a POSIX system has alarms: elsewhere there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return call()
    over = False

    def ring(*_: object) -> None:
        if not over:
            raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        try:
            return call()
        finally:
            over = True
    except _Alarm:
        raise LateError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
