"""How long a cell takes, guessed before anything like it has run."""

from dataclasses import dataclass

import torch

from ..config import RunConfig
from ..hardware import known_peaks, peaks
from ..identity import Identity
from ..memory import Held


@dataclass(frozen=True, slots=True)
class Work:
    """`bytes` are read from memory where every answer is as long as it may be, and each token, of the baseline and of
    the strategy, reads the weights once. Loading, prompts and a drafter come on top; drafts that fit save some."""

    bytes: int
    device: torch.device
    dtype: torch.dtype
    threads: int

    @staticmethod
    def of(config: RunConfig, what: Identity) -> "Work | None":
        """None where it is not known: a replay reads no weights, and the items of quality are not counted yet."""
        if what.source is None or what.task is None or config.quality.tasks:
            return None
        answers = -(-sum(item.turns for item in what.task.items) // config.batch)
        read = 2 * answers * config.task.max_new_tokens * Held.of(what.source, what.dtype, what.device).bytes
        return Work(read, what.device, what.dtype, what.resolved["threads"])

    def seconds(self) -> float | None:
        """At the bandwidth that is measured once a machine. On a GPU that is left to a worker, which has it to itself;
        None until then."""
        measured = known_peaks if self.device.type == "cuda" else peaks
        found = measured(self.device, self.dtype, self.threads)
        return None if found is None else self.bytes / found.read_bytes_per_s
