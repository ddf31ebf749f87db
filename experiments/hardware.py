"""The machine: what it can do at most, what it is called, and how busy it is."""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..cache_dir import cache_dir
from ..decoding.model.storage import atomic_file
from ..errors import UserError
from ..kernels.linear import Linear
from .composition import native_bfloat16

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")
_STATUS_OF_SELF, _CLEAR_PEAK_OF_SELF = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_GROUPS_OF_SELF, _GROUPS_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_LEAST_BUFFER = 256 * 2**20
_LARGEST = 8192  # rows and columns of the largest product tried
_WORTH_TIMING = 0.01  # seconds that a product must take
_GROUPS, _CALLS, _LIMIT = 5, 3, 1.0  # medians of so many calls each, and seconds after which no other is begun


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes a second read from memory, and floating-point operations a second of a product in one dtype.

    `quiet`: nobody else used the cores meanwhile; where someone did, the peaks are too low and what is measured against
    them reads too high.
    """

    read_bytes_per_s: float
    flops_per_s: float
    quiet: bool = True


def peaks(device: torch.device, dtype: torch.dtype, threads: int, cache: bool = True) -> Peaks:
    """Measured once a machine, dtype and number of threads, in about two seconds, and kept in the cache if `cache`.

    What was measured while the cores were shared is not kept.
    """
    machine = _machine(device, dtype, threads)
    note = _note(machine)
    if cache and (known := _read(note)) is not None:
        return known
    with torch_threads(threads):
        found = _measure(device, dtype, threads)
    if cache and found.quiet:
        with suppress(UserError), atomic_file(note) as file:  # not writable or full: it is measured again next time
            file.write(json.dumps({"machine": machine, **asdict(found)}, indent=1).encode())
    return found


def known_peaks(device: torch.device, dtype: torch.dtype, threads: int) -> Peaks | None:
    """What was measured earlier."""
    return _read(_note(_machine(device, dtype, threads)))


def _note(machine: Mapping[str, Any]) -> Path:
    return cache_dir() / "hardware" / f"{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]}.json"


def _machine(device: torch.device, dtype: torch.dtype, threads: int) -> dict[str, Any]:
    """What the peaks depend on. Clouds call many processors by one name, so family and model are part of it."""
    names = ("cpu family", "model", "stepping", "CPU part")
    first = next(iter(_processors()), {})
    return {
        "device": _gpu_name(device) if device.type == "cuda" else _processor_name(),
        "processor": {name: first[name] for name in names if name in first},
        "cores": os.cpu_count(),
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def _read(note: Path) -> Peaks | None:
    with suppress(OSError, ValueError, TypeError, KeyError):  # no note, or not one of ours
        known = json.loads(note.read_text(encoding="utf-8"))
        return Peaks(float(known["read_bytes_per_s"]), float(known["flops_per_s"]))
    return None


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """So many for a while; None: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _measure(device: torch.device, dtype: torch.dtype, threads: int) -> Peaks:
    buffer = _buffer(device)
    wall, cpu = time.perf_counter(), time.process_time()
    read = buffer.nbytes / _seconds(buffer.sum, device)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall) / threads
    del buffer
    return Peaks(read, _flops(device, dtype), quiet=device.type == "cuda" or share > 0.9)


@torch.inference_mode()
def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum reads from memory, now, with torch's threads."""
    buffer = _buffer(device)
    return buffer.nbytes / _seconds(buffer.sum, device)


def _buffer(device: torch.device) -> torch.Tensor:
    return torch.ones(_buffer_bytes(device) // 4, device=device)  # float32; sums of other types are slower


def _buffer_bytes(device: torch.device) -> int:
    """Several times the last-level cache; on a GPU an eighth of the free memory at most."""
    if device.type == "cuda":
        return min(4 * 2**30, torch.cuda.mem_get_info(device)[0] // 8)
    return max(_LEAST_BUFFER, 4 * _last_level_cache())


def _last_level_cache() -> int:
    """Bytes over all processors; 0 where the system does not tell."""
    found: dict[tuple[int, str], int] = {}  # (level, processors that share it): bytes
    for index in _CACHES.glob("cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError):
            level, shared, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            found[int(level), shared] = int(size.removesuffix("K")) * 1024
    return sum(size for (level, _), size in found.items() if level == max(at for at, _ in found))


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Of the fastest product at hand, on square matrices large enough to be worth timing."""
    n = 512
    while True:
        weight, x = torch.randn(2, n, n, device=device).to(dtype).unbind()
        products = [partial(Linear(weight), x), partial(torch.matmul, x, weight)]
        once = min(_once(product, device) for product in products * 2)
        if once > _WORTH_TIMING or n == _LARGEST:
            return 2.0 * n**3 / min(_seconds(product, device) for product in products)
        n *= 2


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The least of several medians: no single call that was lucky or disturbed decides."""
    _once(call, device)
    begin = time.perf_counter()
    medians: list[float] = []
    while not medians or (len(medians) < _GROUPS and time.perf_counter() - begin < _LIMIT):
        medians.append(median(_once(call, device) for _ in range(_CALLS)))
    return min(medians)


def _once(call: Callable[[], Any], device: torch.device) -> float:
    _settle(device)
    begin = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_device(device: torch.device) -> str:
    """The device in a few words: "AMD EPYC, 2 threads, bfloat16 native", or a GPU's name."""
    if device.type == "cuda":
        return _gpu_name(device)
    threads = torch.get_num_threads()
    native = "native" if native_bfloat16() else "not native"
    return f"{_processor_name()}, {threads} thread{'' if threads == 1 else 's'}, bfloat16 {native}"


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _processor_name() -> str:
    named = (p["model name"] for p in _processors() if p.get("model name"))
    return next(named, None) or platform.processor() or platform.machine()


def _processors() -> list[dict[str, str]]:
    """What Linux says of each; empty elsewhere."""
    try:
        blocks = _CPUINFO.read_text(encoding="utf-8", errors="replace").strip().split("\n\n")
    except OSError:
        return []
    lines = ([line.partition(":") for line in block.splitlines()] for block in blocks)
    return [{name.strip(): value.strip() for name, _, value in block} for block in lines]


def clock_mhz() -> float | None:
    """The processors' clock now, their mean; None where the system does not tell."""
    clocks = [float(p["cpu MHz"]) for p in _processors() if "cpu MHz" in p]
    return sum(clocks) / len(clocks) if clocks else None


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated: of a GPU's memory, or of the machine's, within the limits of the control
    groups that a container or a Slurm job runs in. None where the system does not tell."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    free = _number_after("MemAvailable:", _MEMINFO)
    if free is None:
        return None
    return min([free * 1024, *_room_in_groups()])


def _room_in_groups() -> Iterator[int]:
    """What each group with a limit leaves; a file cache that is not in use is free."""
    try:
        lines = _GROUPS_OF_SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS_ROOT / "memory" if controllers else _GROUPS_ROOT
        most, used, idle = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        group = root / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # no such file, or "max": no limit
                limit, current = (int((folder / name).read_text()) for name in (most, used))
                yield max(0, limit - current + (_number_after(f"{idle} ", folder / "memory.stat") or 0))


def _number_after(start: str, file: Path) -> int | None:
    """The number of the line that begins so."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith(start):
                return int(line.removeprefix(start).split()[0])
    return None


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory in use since the process began or `forget_peak_memory`: its resident memory, or a GPU's tensors.
    None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (most := _number_after("VmHWM:", _STATUS_OF_SELF)) is not None:
        return most * 1024
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux its parent's peak counts as its own
    return most if sys.platform == "darwin" else most * 1024


def resident_bytes() -> int | None:
    """What the process has in memory now; None where the system does not tell."""
    now = _number_after("VmRSS:", _STATUS_OF_SELF)
    return None if now is None else now * 1024


def forget_peak_memory() -> None:
    """Count anew, as far as the system can."""
    with suppress(OSError):
        _CLEAR_PEAK_OF_SELF.write_text("5")
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
