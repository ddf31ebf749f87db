"""The process that runs a sweep's cells, one after the other, with the target kept warm between them.

It reads cells' folders from standard input, a line each, and answers each with a line once the cell's status is
written. `job.json` goes in, a folder like that of a single run comes out: a cluster's scheduler can call `serve` too.
"""

import errno
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch

from ...errors import UserError
from ..compose import compose
from ..hardware import forget_peak_memory
from ..lab import Warm
from ..run import execute
from .cells import JOB, LOG, Job, State, Status, write
from .version import code_digest, package_digest

READY = "ready"
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_DETAILS: Mapping[Status, str] = {
    "broken": "its output is not the target's",
    "failed": "a task of its quality failed; speed is in its folder, and so are the answers",
    "interrupted": "what was finished is in its folder",
}


def main() -> None:
    """Ends when standard input does."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable()  # a crash leaves its place in the log
        # a sweep that was started in the background ignores Ctrl-C, and so would its worker: its sweep tells it instead
        signal.signal(signal.SIGINT, signal.default_int_handler)
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(sys.stdin, folders), daemon=True).start()
        warm, package = Warm(), package_digest()
        print(READY, file=replies, flush=True)
        while True:
            folder = folders.get()
            _log_to(folder / LOG)
            serve(folder, warm, package)
            print(folder, file=replies, flush=True)


def _listen(jobs: TextIO, folders: "queue.SimpleQueue[Path]") -> None:
    for line in jobs:
        folders.put(Path(line.rstrip("\n")))
    os.killpg(os.getpid(), signal.SIGKILL)  # the sweep is over or was killed; with whatever the cells have started


def _log_to(file: Path) -> None:
    """All that this process says, also from C."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def serve(folder: Path, warm: Warm, package: str) -> State:
    """Run the cell whose job lies in `folder`; whatever it does short of ending the process becomes its status.
    `package`: the digest of the sources as they were when this process loaded them."""
    job = Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    state = State("running", started_at=started, pid=os.getpid())
    write(folder, state)
    print(f"{started}: {job.label}", flush=True)
    forget_peak_memory()  # the cell before was another
    try:
        config = compose(job.overrides, [Path(folder) for folder in job.config_dirs])
        state = replace(state, code=code_digest(package, config.trusted))
        write(folder, state)
        output = str(folder)
        config = replace(config, output=output, threads=job.threads, resolved=config.resolved | {"output": output})
        outcome = execute(config, speed=job.job == "run", warm=warm, sweep=job.sweep, key=job.key)
        status = outcome.result["status"]
        detail = _DETAILS.get(status, "")
    except BaseException as error:  # noqa: BLE001  # an interrupt and sys.exit too: it is this cell's end alone
        status, detail = verdict(error)
        if status not in ("refused", "interrupted"):
            traceback.print_exc()
    sys.stdout.flush()
    state = replace(state, status=status, detail=detail, seconds=round(time.monotonic() - began, 3), pid=None)
    write(folder, state)
    return state


def verdict(error: BaseException) -> tuple[Status, str]:
    """What an exception makes of a cell, and the line that says it."""
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "nothing of it was finished"
    if isinstance(error, UserError):
        return "refused", text
    full = isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
    if full or isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "out_of_memory", told
    if isinstance(error, SystemExit):
        return "failed", f"the cell called sys.exit({error.code!r})"
    return "failed", told


if __name__ == "__main__":
    main()
