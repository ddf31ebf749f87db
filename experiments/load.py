"""How much of the machine other programs use. Imports nothing heavy: it is asked before torch is loaded."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_WHILE = 0.2  # seconds
_IDLE = (3, 4)  # of the fields: doing nothing, and waiting for a disk
_TWICE = slice(8)  # the later ones are counted among these already


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds at a moment: on the clock, of all the cores' work, of this process's."""

    wall: float
    all: float
    own: float


def moment() -> Moment | None:
    """None where the system does not tell."""
    try:
        fields = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(field) for field in fields[1:]][_TWICE]
        second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    worked = sum(t for i, t in enumerate(ticks) if i not in _IDLE)
    return Moment(time.perf_counter(), worked / second, time.process_time())


def others_since(then: Moment | None) -> float | None:
    """Cores that others kept busy since, on average: other programs, and other machines on the same processor.

    The load average would not do: it remembers the last minute, in which this very program may have worked.
    """
    now = moment()
    if then is None or now is None or now.wall <= then.wall:
        return None
    return max(0.0, (now.all - then.all) - (now.own - then.own)) / (now.wall - then.wall)


def load_of_others() -> float | None:
    """The same of the next fifth of a second; the load average where the system does not tell; None on Windows."""
    if (then := moment()) is not None:
        time.sleep(_WHILE)
        return others_since(then)
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
