"""The token of the largest logit: PyTorch takes as long for bfloat16 as a small model for a layer."""

from jaxtyping import Float
from torch import Tensor

from ..native import argmax


def largest(logits: Float[Tensor, "R V"]) -> list[int]:
    """Of each row the first of the largest; where there is one, the first that is not a number."""
    found = argmax(logits)
    return logits.argmax(-1).tolist() if found is None else found
