"""What a forward pass is fed: rows of one or many sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """T rows, those of one sequence side by side. All three are host tensors.

    `parents` index the rows staged since the last commit, of which this forward's first is number `first`; −1 follows
    the sequence's committed prefix. A row sees that prefix, its ancestors and itself; its position is prefix + depth,
    so siblings share one. `chain`: each row follows the row before it of its sequence, and the first one the rows that
    its sequence has staged already. `prompt`: the chain is prefill, which no single-row forward is held against, so it
    may be summed in another order, and no T × T mask is built.
    """

    tokens: Int[Tensor, " T"]
    parents: Int[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    chain: bool
    first: int = 0
    prompt: bool = False

    def __len__(self) -> int:
        return self.tokens.shape[0]


def chains(
    tokens: Sequence[Sequence[int]],
    sequences: Sequence[int],
    last: Sequence[int] | None = None,
    first: int = 0,
    prompt: bool = False,
) -> Rows:
    """One chain a sequence, side by side; `last[i]` is the staged row that chain i follows (−1: the prefix)."""
    parents: list[int] = []
    for i, chain in enumerate(tokens):
        at = first + len(parents)
        parents += [-1 if last is None else last[i], *range(at, at + len(chain) - 1)][: len(chain)]
    flat = [t for chain in tokens for t in chain]
    owner = [s for s, chain in zip(sequences, tokens, strict=True) for _ in chain]
    return Rows(torch.tensor(flat), torch.tensor(parents), torch.tensor(owner), True, first, prompt)


@lru_cache(maxsize=4096)
def forest(parents: tuple[int, ...]) -> tuple[tuple[int, ...], np.ndarray]:
    """(depth of each row, [T, T] bool: row i sees row j). Cached: drafts repeat their shape step after step."""
    T = len(parents)
    sees = np.zeros((T, T), dtype=bool)
    depth: list[int] = []
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"row {i} has parent {parent}; a parent is -1 or an earlier row")
        if parent >= 0:
            sees[i] = sees[parent]
        sees[i, i] = True
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    sees.flags.writeable = False
    return tuple(depth), sees


def segments(sequence: Int[Tensor, " T"]) -> list[tuple[int, int, int]]:
    """(sequence, first row, row after the last) for each run of rows. A sequence may have one run only."""
    owner = sequence.tolist()
    borders = [0, *(i for i in range(1, len(owner)) if owner[i] != owner[i - 1]), len(owner)]
    runs = [(owner[a], a, b) for a, b in pairwise(borders)]
    if len({s for s, _, _ in runs}) != len(runs):
        raise ValueError("the rows of one sequence must stand side by side")
    return runs
