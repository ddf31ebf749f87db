"""One sweep or training a folder, and one sweep a GPU: locks that end with the processes that hold them, however they
end."""

import os
import platform
import time
from pathlib import Path

from ...cache_dir import cache_dir
from ...decoding.model.storage import explained
from ...errors import UserError

_PATIENCE_S = 5.0  # a killed sweep's worker takes a moment to end
_FOLDER = ".lock"


class Lock:
    """Held from its creation on. A child that inherits `fd` holds it too: while a killed sweep's worker still runs, no
    other sweep begins. Raises UserError with `busy`, in which {} is who holds it, where another does."""

    def __init__(self, file: Path, busy: str, what: str = "a sweep") -> None:
        try:
            import fcntl
        except ImportError:
            raise UserError(f"{what} locks its folder as Linux and macOS do; on Windows use WSL") from None
        file.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sweep, worker, *_ = [*os.pread(self.fd, 50, 0).decode(errors="replace").split(), "", ""]
                if time.monotonic() < until and not _alive(sweep):
                    time.sleep(0.1)
                    continue
                os.close(self.fd)
                left = f"process {worker} of a killed sweep still runs"
                who = left if _alive(worker) and not _alive(sweep) else f"process {sweep or 'unknown'} runs {what}"
                raise UserError(busy.format(who)) from None
        self._name(os.getpid())

    def hand_down(self, worker: int) -> None:
        """Name the child that holds it too."""
        self._name(os.getpid(), worker)

    def _name(self, *pids: int) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{' '.join(map(str, pids))}\n".encode(), 0)

    def release(self) -> None:
        os.close(self.fd)


def lock_folder(folder: Path, what: str = "a sweep") -> Lock:
    """Of what runs in it."""
    busy = f"{{}} in {folder}: wait for it, or name another folder with output=DIR"
    return Lock(folder / _FOLDER, busy, what)


def lock_gpu(device: str) -> Lock:
    """Of cuda or cuda:1, on this machine, whatever CUDA_VISIBLE_DEVICES calls it."""
    index = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    file = cache_dir() / "locks" / f"{platform.node()}-cuda-{name.replace('/', '_')}.lock"
    with explained(file):
        return Lock(file, f"{{}} on {device}: wait for it, or choose another with device=cuda:1")


def _alive(pid: str) -> bool:
    """Whether a process has this id; also one of another user."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
