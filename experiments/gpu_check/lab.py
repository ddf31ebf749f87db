"""What sections measure with: a device, its copy bandwidth, and seconds of a call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
_COLD = 4  # times the last-level cache: what calls read in turn is no longer there when its turn comes again
_MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Lab:
    """`seconds(calls)`: of one of them, where they run one after the other. `cache_bytes`: of the last-level cache.
    `tiny`: shapes for trying the sections themselves."""

    device: torch.device
    dtype: torch.dtype
    seconds: Callable[[Sequence[Call]], float]
    bandwidth: float
    cache_bytes: int
    memory_bytes: int
    tiny: bool = False

    def copies(self, nbytes: int) -> int:
        """How many of a thing to take turns with, so that each is read from memory."""
        return max(1, min(_MOST_COPIES, -(-_COLD * self.cache_bytes // nbytes)))

    def alternatives(self, of: Mapping[str, Callable[[], Sequence[Call]]]) -> tuple[dict[str, float], dict[str, str]]:
        """(seconds of those that run here, why the others do not)."""
        found, absent = {}, {}
        for name, make in of.items():
            try:
                found[name] = self.seconds(make())
            except (RuntimeError, NotImplementedError, AttributeError) as error:  # what torch has for this GPU differs
                absent[name] = str(error).splitlines()[0][:200]
        return found, absent


def gpu_lab() -> Lab:
    """Of the first GPU, which is used meanwhile by nobody else."""
    device = torch.device("cuda")
    about = torch.cuda.get_device_properties(device)
    cache = int(getattr(about, "L2_cache_size", 0)) or 64 * 2**20
    return Lab(device, torch.bfloat16, graphed, copy_bandwidth(), cache, torch.cuda.mem_get_info(device)[0])


def graphed(calls: Sequence[Call]) -> float:
    """The median of replays of one CUDA graph of all calls, so that launches cost what they do in a step."""
    from triton.testing import do_bench

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled or set aside at first is no part of the graph
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return do_bench(graph.replay, warmup=10, rep=50, return_mode="median") / 1e3 / len(calls)


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    nbytes = min(2**30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.ones(nbytes // 4, device="cuda")
    to = torch.empty_like(source)
    return 2 * source.nbytes / graphed([lambda: to.copy_(source)])
