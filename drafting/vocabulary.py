"""A head that foretells some tokens alone: the rows of the target's unembedding that belong to them are all it reads.

A small model's unembedding is a fifth of what a step reads (49,152 tokens and 135M parameters), and a head reads it at
every level; for the 8,192 likeliest tokens that is a sixth (FR-Spec, arXiv:2502.14856; EAGLE-3's own vocabulary). A
token that the head does not know is never drafted, which costs acceptance and nothing else.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ..decoding.model.reading import Product
from ..decoding.training import Text
from ..errors import UserError
from ..kernels.linear import Linear


def frequent(texts: Sequence[Text], size: int, vocab: int) -> Int[Tensor, " V"]:
    """The tokens said most often in what is learnt from, in rising order; where too few were said, those with the
    lowest ids beside them."""
    count = Counter(token for text in texts for token in text.tokens[text.first :])
    ranked = sorted(range(vocab), key=lambda token: (-count[token], token))
    return torch.tensor(sorted(ranked[:size]))


def known(
    size: int | None, texts: Sequence[Text], vocab: int, begun: Int[Tensor, " V"] | None
) -> Int[Tensor, " V"] | None:
    """The tokens that a head is to know; None: all. `begun`: those that a head which it goes on from knows."""
    return begun if begun is not None or size is None else frequent(texts, size, vocab)


def check_size(size: int | None, width: int, vocab: int) -> None:
    """Refuses fewer tokens than the drafts that a head is judged by try behind a node, or more than there are."""
    if size is not None and not width <= size <= vocab:
        raise UserError(
            f"train.vocabulary must be from {width}, which drafts try behind a node, to the target's {vocab} tokens, "
            f"or null for all, got {size}"
        )


def check_known(start: str, size: int | None, begun: int | None) -> None:
    """Refuses to go on from a head that knows another number of tokens than is asked for."""
    if size != begun:
        said = "all tokens" if begun is None else f"{begun} tokens"
        raise UserError(f"train.start={start} knows {said}: take train.vocabulary={'null' if begun is None else begun}")


def narrowed(unembedding: Product, ids: Int[Tensor, " V"] | None) -> Product:
    """The rows of `ids`; None: all."""
    return unembedding if ids is None else Linear(unembedding.dense()[ids.to(unembedding.device)].contiguous())
