"""The worker's process, seen from the sweep: started, asked, watched, interrupted, killed; and what its end means."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from .cells import Status

_START_S = 600.0  # for a process to be up: imports from a slow disk take minutes
_SLICE_S = 0.5  # between looks at a cell that runs
_GRACE_S = 60.0  # for an interrupted cell to write what it has
# A shell beside the worker that kills the group when the sweep is gone, which closes the pipe ${0}. A thread of the
# worker would not do: it waits as long as a cell holds the interpreter's lock.
_GUARD = '{ read _; kill -9 0; } < "/dev/fd/$0" & exec "$@"'
# -P: modules of the working directory stay out of the way
_COMMAND = (sys.executable, "-P", "-m", "decodelab.experiments.sweep.worker")


@runtime_checkable
class CellWorker(Protocol):
    """What runs cells of one group, one after the other."""

    group: str
    pid: int

    def run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> tuple[Status, str] | None:
        """None once the cell has written its own status; otherwise what became of it. `tick` is called meanwhile.

        Ctrl-C goes to the cell, which keeps what it has, and is raised here afterwards; a second one kills the cell.
        """

    def stop(self) -> object: ...


class Worker:
    """One process in a session of its own, so that the terminal's Ctrl-C is the sweep's to pass on. It ends, with all
    that it has started, when this process does, however that ends."""

    def __init__(self, group: str, log: Path, keep: Sequence[int] = (), command: Sequence[str] = _COMMAND) -> None:
        """`log`: of what it says before its first cell; `keep`: file descriptors that it inherits."""
        self.group = group
        self._alive: int | None
        watched, self._alive = os.pipe()  # children inherit neither end but by pass_fds
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ("/bin/sh", "-c", _GUARD, str(watched), *command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                pass_fds=(*keep, watched),
                bufsize=0,
            )
        os.close(watched)
        self.pid = self._process.pid
        self._ready = False

    def run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> tuple[Status, str] | None:
        """The seconds of `timeout` begin when the process is up. Where it returns what became of a cell, the process is
        gone."""
        try:
            return self._run(folder, timeout, tick)
        except KeyboardInterrupt:
            try:
                self._interrupt(tick)
            finally:
                self.stop()
            raise

    def _run(self, folder: Path, timeout: float | None, tick: Callable[[], None]) -> tuple[Status, str] | None:
        kills = oom_kills()
        answered = self._ready or self._answered(_START_S, tick)
        if answered is None:
            self.stop()
            return "failed", f"its process was not up after {_START_S:g} s"
        if answered:
            self._ready = True
            with suppress(BrokenPipeError):
                self._stdin.write(f"{folder.resolve()}\n".encode())
            answered = self._answered(timeout, tick)
        if answered:
            return None
        code = self.stop()
        if answered is None:
            return "timeout", f"stopped after {timeout:g} s (cell.timeout)"
        return ended(code, kills, oom_kills())

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answered(self, seconds: float | None, tick: Callable[[], None]) -> bool | None:
        """True: a line came; False: the process ended; None: neither within `seconds`."""
        replies = self._process.stdout
        assert replies is not None
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or time.monotonic() < until:
            wait = _SLICE_S if until is None else min(_SLICE_S, max(0.0, until - time.monotonic()))
            # what the process started may hold the pipe open when it is gone itself, so its end is asked for too
            gone = self._process.poll() is not None
            if select.select([replies], [], [], 0 if gone else wait)[0]:
                return replies.readline() != b""
            if gone:
                return False
            tick()
        return None

    def _interrupt(self, tick: Callable[[], None]) -> None:
        print("interrupting: what this cell has finished is kept; Ctrl-C again stops it at once", file=sys.stderr)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        self._answered(_GRACE_S, tick)

    def stop(self) -> int:
        """Kill it and all that it started; its exit code, of the end that it may have come to before."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._alive is not None:
            os.close(self._alive)
        self._alive = None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return code


def ended(code: int, kills_before: int | None = None, kills_after: int | None = None) -> tuple[Status, str]:
    """What the exit code of a process that ended in the middle of a cell says of the cell.

    A process that something killed is taken to have been killed for its memory: the kernel does so, and so do the
    daemons of desktops and clusters.
    """
    number = -code if code < 0 else code - 128 if code > 128 else 0
    with suppress(ValueError):
        name = signal.Signals(number).name
        if name != "SIGKILL":
            return "failed", f"the process ended with {name} (exit {128 + number})"
        if kills_before is not None and kills_after is not None and kills_after > kills_before:
            return "out_of_memory", "the kernel killed the process: out of memory"
        return "out_of_memory", "the process was killed (SIGKILL), most likely for its memory"
    return "failed", f"the process ended by itself (exit {code})"


def oom_kills() -> int | None:
    """Processes of this control group that the kernel has killed for memory; None where it does not tell."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        events = (Path("/sys/fs/cgroup") / group / "memory.events").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    return None
