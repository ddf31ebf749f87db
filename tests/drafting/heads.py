"""Medusa heads that know nothing, as files."""

import torch
from safetensors.torch import save_file

DIM, V = 32, 61  # of `tiny_decoder`


def random_heads(heads=3, blocks=1, own=False, prefix="", seed=0):
    """Tensors in the published layout."""
    draws = torch.Generator().manual_seed(seed)
    out = {}
    for i in range(heads):
        for j in range(blocks):
            out[f"{prefix}{i}.{j}.linear.weight"] = torch.randn(DIM, DIM, generator=draws)
            out[f"{prefix}{i}.{j}.linear.bias"] = torch.randn(DIM, generator=draws)
        if own:
            out[f"{prefix}{i}.{blocks}.weight"] = torch.randn(V, DIM, generator=draws)
    return out


def saved(path, tensors, metadata=None):
    save_file(tensors, path, metadata)
    return str(path)
