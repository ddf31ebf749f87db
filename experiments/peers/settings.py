"""What the job `peers` measures, beside the strategies themselves."""

from dataclasses import dataclass
from typing import Literal

from ...errors import UserError


@dataclass(frozen=True, slots=True)
class PeersJob:
    """`assisted`: lengths of transformers' drafts, beside its own default; `lookup`: of drafts that are looked up, by
    transformers and llama.cpp; `llama`: llama.cpp too, auto: where it is installed and the model is a GGUF file;
    `rows` of one forward that are timed; `resident`: the most memory of each model of ours, in a process of its own."""

    rounds: int = 2
    assisted: tuple[int, ...] = (3, 5)
    lookup: tuple[int, ...] = (3, 10)
    llama: bool | Literal["auto"] = "auto"
    rows: tuple[int, ...] = (1, 8)
    resident: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"peers.rounds must be at least 1, got {self.rounds}")
        for name in ("assisted", "lookup", "rows"):
            numbers: tuple[int, ...] = getattr(self, name)
            if any(n < 1 for n in numbers) or len(set(numbers)) < len(numbers):
                raise UserError(f"peers.{name} lists different numbers of at least 1, got {list(numbers)}")
        if 1 not in self.rows:
            raise UserError(f"peers.rows needs 1, the plain step; got {list(self.rows)}")
