"""Programs that a model wrote, run against their tests in a process of their own that can do little harm.

This guards against what models write by accident. Code that sets out to break an interpreter from within needs more.
"""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from ...errors import UserError

INSIDE = Path(__file__).with_name("inside.py")
TIMEOUT = 124  # how it exits when time runs out
SHOWN = 2_000  # characters of a program's output that are kept, from its end
# Its own users, network and processes; all of them die with the first one.
NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")

# -P -s and an environment of ours isolate as -I would, which also ignores PYTHONHASHSEED: the order of a set must
# not decide whether a program passes. A BLAS of many threads would take all of the address space, and so would glibc's
# 64 MB of it for each of a program's own threads.
PYTHON = (sys.executable, "-P", "-s", "-B", str(INSIDE))
ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}  # fmt: skip

Isolation = Literal["namespace", "blocked sockets"]


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout`: seconds of CPU, and three times that by the clock, so that a busy machine fails no program.
    `memory_mb`: of address space; `file_mb`: of each file it writes."""

    timeout: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_mb", "file_mb"):
            if not 0 < (value := getattr(self, name)) < 1_000_000:
                raise UserError(f"{name}={value}: more than 0, and under a million")

    @property
    def wall(self) -> float:
        return 3 * self.timeout


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason`: passed, timeout, memory, or "failed: " and the last line it printed. `output`: the end of all that."""

    passed: bool
    reason: str
    output: str
    isolation: Isolation


def run_tests(program: str, tests: str, limits: Limits | None = None) -> Verdict:
    """Whether `tests` run to their end after `program`, in its names.

    A process of this Python, alone in a session, without this one's environment and packages of the user's, in a fresh
    folder which is all that it may write to, with limits on CPU time, memory, files and processes. It has no network:
    by a namespace of the kernel where an ordinary user may have one, else by blocking sockets in the interpreter.
    Whatever the program prints and however it ends, it has passed only if a random token was written after its tests.
    """
    if os.name != "posix":
        raise UserError("unit tests of programs need limits that only POSIX systems have: leave such tasks out here")
    limits = limits or Limits()
    isolation, token = network_isolation(), secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="decodelab-program-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as verdict,
        tempfile.TemporaryFile() as output,
    ):
        job = {
            "program": program,
            "tests": tests,
            "token": token,
            "verdict": verdict.fileno(),
            "network": isolation == "namespace",
            "limits": {
                "CPU": math.ceil(limits.timeout),
                "AS": limits.memory_mb << 20,
                "FSIZE": limits.file_mb << 20,
                "NOFILE": 64,
                "CORE": 0,
                "WALL": math.ceil(limits.wall),
                # outside of a namespace all processes and threads of the user count; the interpreter starts none there
                **({"NPROC": 256} if isolation == "namespace" else {}),
            },
        }
        late = _run(json.dumps(job).encode(), home, limits.wall, isolation, verdict, output)
        verdict.seek(0)
        passed = not late and verdict.read() == token.encode()
        shown = _end(output)
    last = shown.strip().rpartition("\n")[2].strip()[:200]
    ended = "memory" if last.startswith("MemoryError") else f"failed: {last or 'it ended before its tests did'}"
    reason = "passed" if passed else "timeout" if late else ended
    return Verdict(passed, reason, shown, isolation)


@cache
def network_isolation() -> Isolation:
    """Tried once: whether the kernel gives an ordinary user a network namespace."""
    with suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=10, check=False)
        return "namespace" if tried.returncode == 0 else "blocked sockets"
    return "blocked sockets"


def _run(job: bytes, home: str, wall: float, isolation: Isolation, verdict: IO[bytes], output: IO[bytes]) -> bool:
    """Whether time ran out. Nothing of its process group is left behind."""
    process = subprocess.Popen(
        [*(NAMESPACES if isolation == "namespace" else ()), *PYTHON],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=home,
        env={"HOME": home, "TMPDIR": home, "PATH": os.defpath} | ENVIRONMENT,
        start_new_session=True,
        pass_fds=(verdict.fileno(),),
    )
    try:
        process.communicate(job, timeout=wall)
    except subprocess.TimeoutExpired:
        return True
    finally:
        with suppress(ProcessLookupError, PermissionError):  # it is gone already; macOS says so by the second
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode == TIMEOUT


def _end(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * SHOWN))
    return output.read().decode("utf-8", "replace")[-SHOWN:]
