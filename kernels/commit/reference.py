"""The definition: what is kept is read whole before anything is written."""

from collections.abc import Sequence

import torch
from torch import Tensor


def commit_reference(
    caches: Sequence[Tensor], tables: Tensor | None, prefix: Tensor, kept: Tensor, count: Tensor
) -> None:
    """See `commit`."""
    for s, (start, n) in enumerate(zip(prefix.tolist(), count.tolist(), strict=True)):
        to = start + torch.arange(n, device=kept.device)
        source = start + kept[s, :n].long()
        for cache in caches:
            block = cache.shape[1]

            def places(slot: Tensor, block: int = block, s: int = s) -> tuple[Tensor, Tensor]:
                of = torch.full_like(slot, s) if tables is None else tables[s, slot // block].long()
                return of, slot % block

            cache[places(to)] = cache[places(source)]
