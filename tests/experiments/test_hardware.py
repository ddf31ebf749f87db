"""What is said of the machine, and peaks that are measured once. Nothing here asserts how fast it is."""

import gc
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decodelab.experiments import hardware
from decodelab.experiments.hardware import (
    Peaks,
    clock_mhz,
    describe_device,
    forget_peak_memory,
    peak_memory_bytes,
    peaks,
    resident_bytes,
)

CPU = torch.device("cpu")
CPUINFO = """processor	: 0
cpu family	: 25
model		: 17
model name	: Fast CPU 9000: special
cpu MHz		: 2400.000

processor	: 1
model name	: Fast CPU 9000: special
cpu MHz		: 3600.000
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own and a processor of ours."""
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers in place of a measurement, and with how many threads each was taken."""
    taken: list[int] = []

    def measure(device: torch.device, dtype: torch.dtype, threads: int) -> Peaks:
        taken.append(torch.get_num_threads())
        return Peaks(1e9 + len(taken), 2e9, quiet=threads < 4)

    monkeypatch.setattr(hardware, "_measure", measure)
    return taken


def test_peaks_are_measured_and_plausible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "_LEAST_BUFFER", 2**20)
    monkeypatch.setattr(hardware, "_last_level_cache", lambda: 0)
    monkeypatch.setattr(hardware, "_WORTH_TIMING", 0.0)
    monkeypatch.setattr(hardware, "_GROUPS", 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = peaks(CPU, dtype, 1, cache=False)
        assert 1e7 < found.read_bytes_per_s < 1e14
        assert 1e6 < found.flops_per_s < 1e16


def test_peaks_are_kept_by_machine_dtype_and_threads(measured: list[int], machine: Path):
    first = peaks(CPU, torch.float32, 1)
    assert peaks(CPU, torch.float32, 1) == first
    assert len(measured) == 1
    peaks(CPU, torch.bfloat16, 1)
    peaks(CPU, torch.float32, 2)
    assert len(measured) == 3
    (machine / "cpuinfo").write_text(CPUINFO.replace("model		: 17", "model		: 18"), encoding="utf-8")
    peaks(CPU, torch.float32, 1)  # another machine that shares the cache
    assert len(measured) == 4
    peaks(CPU, torch.float32, 1, cache=False)
    assert len(measured) == 5


def test_the_threads_asked_for_measure_and_the_others_come_back(measured: list[int]):
    before = torch.get_num_threads()
    peaks(CPU, torch.float32, 3)
    assert measured == [3]
    assert torch.get_num_threads() == before


def test_what_was_measured_on_a_busy_machine_is_not_kept(measured: list[int]):
    assert not peaks(CPU, torch.float32, 4).quiet
    peaks(CPU, torch.float32, 4)
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": 1, "read_bytes_per_s": 5}', "\x00"])
def test_a_spoiled_note_is_replaced(measured: list[int], machine: Path, content: str):
    first = peaks(CPU, torch.float32, 1)
    (note,) = (machine / "cache" / "hardware").iterdir()
    note.write_text(content)
    again = peaks(CPU, torch.float32, 1)
    assert again != first
    assert json.loads(note.read_text())["read_bytes_per_s"] == again.read_bytes_per_s


def test_without_a_cache_that_can_be_written_it_is_measured_again(measured: list[int], machine: Path, monkeypatch):
    from decodelab.errors import UserError

    def full(path: Path):
        raise UserError("the disk is full")

    monkeypatch.setattr(hardware, "atomic_file", full)
    peaks(CPU, torch.float32, 1)
    peaks(CPU, torch.float32, 1)
    assert len(measured) == 2


def test_a_share_of_the_cores_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Two threads that got 1.2 cores: the peak is of a shared machine."""
    monkeypatch.setattr(hardware, "_LEAST_BUFFER", 2**10)
    monkeypatch.setattr(hardware, "_last_level_cache", lambda: 0)
    monkeypatch.setattr(hardware, "_flops", lambda device, dtype: 1.0)
    monkeypatch.setattr(hardware, "_seconds", lambda call, device: 1.0)
    wall, cpu = iter([0.0, 10.0] * 2), iter([0.0, 12.0, 0.0, 19.5])
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(hardware.time, "process_time", lambda: next(cpu))
    assert not hardware._measure(CPU, torch.float32, 2).quiet
    assert hardware._measure(CPU, torch.float32, 2).quiet


def test_the_buffer_is_larger_than_all_last_level_caches(machine: Path, monkeypatch: pytest.MonkeyPatch):
    """Two sockets, a 400 MiB cache each, shared by two processors; smaller caches do not count."""
    for cpu in range(4):
        for level, shared, size in ((1, f"{cpu}", "48K"), (3, "0-1" if cpu < 2 else "2-3", f"{400 * 1024}K")):
            folder = machine / "cpus" / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(hardware, "_CACHES", machine / "cpus")
    assert hardware._buffer_bytes(CPU) == 4 * 2 * 400 * 2**20
    monkeypatch.setattr(hardware, "_CACHES", machine / "nowhere")
    assert hardware._buffer_bytes(CPU) == 256 * 2**20


def test_the_least_of_the_medians_counts(monkeypatch: pytest.MonkeyPatch):
    """Neither the luckiest call (1) nor a disturbed group decides."""
    times = iter([99.0, *[5.0, 1.0, 4.0], *[9.0, 9.0, 9.0], *[3.0, 3.0, 50.0], *[7.0] * 6])
    monkeypatch.setattr(hardware, "_once", lambda call, device: next(times))
    assert hardware._seconds(lambda: None, CPU) == 3.0


@pytest.mark.parametrize(("native", "word"), [(True, "native"), (False, "not native")])
def test_the_device_in_words(monkeypatch: pytest.MonkeyPatch, native: bool, word: str):
    monkeypatch.setattr(hardware, "native_bfloat16", lambda: native)
    assert torch.get_num_threads() == 1
    assert describe_device(CPU) == f"Fast CPU 9000: special, 1 thread, bfloat16 {word}"


def test_a_machine_that_tells_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch):
    (machine / "cpuinfo").unlink()
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "riscv64")
    assert clock_mhz() is None
    assert describe_device(CPU).startswith("riscv64, 1 thread")


def test_clock(machine: Path):
    assert clock_mhz() == 3000.0


def test_peak_memory_is_in_bytes():
    gc.collect()  # what other tests left must not go while this one measures
    before = resident_bytes()
    if before is None:
        pytest.skip("this system does not tell")
    held = torch.ones(2**26)
    peak = peak_memory_bytes(CPU)
    assert peak is not None
    assert peak >= before + held.nbytes // 2


def test_a_peak_is_forgotten():
    """A worker's second cell is not told of the first one's memory."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not forget")
    gc.collect()  # what other tests left must not go while this one measures
    forget_peak_memory()
    before = peak_memory_bytes(CPU)
    held = mmap.mmap(-1, 2**26)  # fresh pages: malloc may have some of its own left
    for _ in range(64):
        held.write(b"x" * 2**20)
    assert (most := peak_memory_bytes(CPU)) >= before + 2**25
    held.close()
    assert peak_memory_bytes(CPU) >= before + 2**25
    forget_peak_memory()
    assert peak_memory_bytes(CPU) < most - 2**25


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | None]:
    """What is available where these files say so: meminfo, the groups of this process, and files under the groups."""

    def available(
        meminfo: str = "MemTotal: 9 kB\nMemAvailable:    64 kB\n", own: str = "", **files: int | str
    ) -> int | None:
        root = tmp_path / "groups"
        for name, content in files.items():
            file = root / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        for name, text in (("_MEMINFO", meminfo), ("_GROUPS_OF_SELF", own)):
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(hardware, name, tmp_path / name)
        monkeypatch.setattr(hardware, "_GROUPS_ROOT", root)
        return hardware.available_memory(torch.device("cpu"))

    return available


def test_available_memory(system: Callable[..., int | None]):
    assert system() == 64 * 1024
    assert system(meminfo="MemTotal: 9 kB\n") is None


def test_a_control_group_limits_it(system: Callable[..., int | None]):
    """The tightest on the way to the root counts (version 2); a file cache that is not in use is free."""
    own = "0::/job/step\n"
    assert system(own=own, job__step__memory_dot_max="max", job__step__memory_dot_current=500) == 64 * 1024
    held = {
        "job__memory_dot_max": 4000,
        "job__memory_dot_current": 3000,
        "job__memory_dot_stat": "anon 1\ninactive_file 200",
    }
    assert system(own=own, **held) == 1200
    assert system(own=own, job__memory_dot_current=9000, job__memory_dot_stat="") == 0


def test_a_control_group_of_version_1(system: Callable[..., int | None]):
    own = "9:cpu:/other\n4:cpuset,memory:/job\n"
    held = {
        "memory__job__memory_dot_limit_in_bytes": 4000,
        "memory__job__memory_dot_usage_in_bytes": 3500,
        "memory__job__memory_dot_stat": "inactive_file 7\ntotal_inactive_file 100",
    }
    assert system(own=own, **held) == 600
