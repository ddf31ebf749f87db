"""From the weights of a model's own keys and values to those of another layout of them, each as it is read.

Fewer heads: those of a group become one (arXiv:2305.13245). More: each is repeated, which changes no logit. A cache
that several layers read (arXiv:2405.12981) is filled by the weights of its owner, or by the mean of all of their
weights; they are applied to what enters the owner, and its RoPE turns the keys.
"""

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .layout import LayerKV, Layout, Pool

_OF_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")


def converts(layout: Layout, native: Layout) -> bool:
    """Whether weights that go with `native` are not those of `layout` as they stand."""
    return any(a.kv_heads != b.kv_heads or a.owner != b.owner for a, b in _pairs(layout, native))


def lossless(layout: Layout, native: Layout) -> bool:
    """Whether the logits stay what they are: heads are repeated at most."""
    return all(a.kv_heads % b.kv_heads == 0 and a.owner == b.owner for a, b in _pairs(layout, native))


def impossible(layout: Layout, native: Layout) -> str | None:
    """Why weights that go with `native` cannot become those of `layout`; None: they can."""
    for i, (wanted, own) in enumerate(_pairs(layout, native)):
        if wanted.owner == i != own.owner:
            return f"layer {i} would have keys of its own, but its weights have none: they go with layer {own.owner}"
    return None


def pooled(heads: Tensor, have: int, want: int, pool: Pool) -> Tensor:
    """`heads` [have · D, …] as [want · D, …]: each new head is the mean, or the first, of those that the attention
    heads of its group read before."""
    split = heads.unflatten(0, (have, -1))
    every = math.lcm(have, want)
    split = split.repeat_interleave(every // have, 0)
    if every != want:
        groups = split.unflatten(0, (want, -1))
        split = groups[:, 0] if pool == "first" else _wide(groups).mean(1)
    return split.flatten(0, 1)


class ConvertedTensors(Mapping[str, Tensor]):
    """A model's tensors, by transformers' names, as those of `layout`; what is a mean is in float32, or more."""

    def __init__(self, stored: Mapping[str, Tensor], native: Layout, layout: Layout) -> None:
        self._stored, self._native, self._layout = stored, native, layout

    def __getitem__(self, name: str) -> Tensor:
        found = _OF_KV.fullmatch(name)
        if found is None:
            return self._stored[name]
        layer, part = int(found[1]), found[2]
        if self._layout.layers[layer].owner != layer and part != "k_norm":
            raise KeyError(name)
        read = [layer]
        if self._layout.pooling.layers == "mean" and part != "k_norm":
            every = enumerate(_pairs(self._layout, self._native))
            read = [i for i, (wanted, own) in every if wanted.owner == layer and own.owner == i]
        each = [self._resized(name.replace(f".{layer}.", f".{i}.", 1), i, part) for i in read]
        return each[0] if len(each) == 1 else torch.stack([_wide(tensor) for tensor in each]).mean(0)

    def _resized(self, name: str, layer: int, part: str) -> Tensor:
        have, want = (of.layers[layer].kv_heads for of in (self._native, self._layout))
        stored = self._stored[name]
        if part == "k_norm" or have == want:  # all heads have one norm
            return stored
        return pooled(stored, have, want, self._layout.pooling.heads)

    def __iter__(self) -> Iterator[str]:
        for name in self._stored:
            found = _OF_KV.fullmatch(name)
            if found is None or found[2] == "k_norm" or self._layout.layers[int(found[1])].owner == int(found[1]):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _pairs(layout: Layout, native: Layout) -> Iterator[tuple[LayerKV, LayerKV]]:
    return zip(layout.layers, native.layers, strict=True)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
