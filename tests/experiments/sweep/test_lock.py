"""Locks of folders and GPUs, and who holds them."""

import os
import subprocess
from pathlib import Path

import pytest

from decodelab.errors import UserError
from decodelab.experiments.sweep import lock
from decodelab.experiments.sweep.lock import Lock, lock_folder, lock_gpu


def test_a_lock_is_held_by_one(tmp_path: Path):
    held = lock_folder(tmp_path / "new")
    with pytest.raises(
        UserError, match=rf"process {os.getpid()} runs a sweep in .*/new: wait for it, or .* output=DIR"
    ):
        lock_folder(tmp_path / "new")
    held.release()
    lock_folder(tmp_path / "new").release()


def test_a_worker_that_outlives_its_sweep_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process that the file names is gone; what it started may still write into the folder."""
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.05)
    file = tmp_path / "lock"
    lock_held = Lock(file, "held by {}")
    worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock_held.fd])
    lock_held.hand_down(worker.pid)
    assert file.read_text() == f"{os.getpid()} {worker.pid}\n"
    held = os.open(file, os.O_RDWR)
    os.ftruncate(held, 0)
    os.pwrite(held, b"4194304000\n", 0)  # of no process
    lock_held.release()
    with pytest.raises(UserError, match="held by process 4194304000 runs a sweep"):
        Lock(file, "held by {}")
    os.pwrite(held, f"4194304000 {worker.pid}\n".encode(), 0)
    with pytest.raises(UserError, match=f"held by process {worker.pid} of a killed sweep still runs"):
        Lock(file, "held by {}")
    monkeypatch.setattr(lock, "_PATIENCE_S", 30.0)
    monkeypatch.setattr(lock.time, "sleep", lambda _: worker.communicate())  # it ends while the next sweep waits
    Lock(file, "held by {}").release()
    os.close(held)
    assert file.read_text() == f"{os.getpid()}\n"


def test_a_gpu_has_one_lock_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    held = lock_gpu("cuda:1")
    other = lock_gpu("cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, index in (("cuda:1", 1), ("cuda:3", 3)):
        with pytest.raises(UserError, match=rf"process \d+ runs a sweep on cuda:{index}: wait for it, or choose"):
            lock_gpu(name)
    lock_gpu("cuda:0").release()
    held.release()
    other.release()
