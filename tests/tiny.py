"""Tiny models and a tiny tokenizer, built in milliseconds."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decodelab.testing import tiny_decoder

__all__ = ["tiny_decoder", "tiny_tokenizer"]

_LETTERS = [" ", *string.ascii_lowercase, *string.digits, *string.ascii_uppercase[:21]]


def tiny_tokenizer(padded: int = 0) -> PreTrainedTokenizerFast:
    """A token a character: <unk>, <s>, </s> and 58 characters, the vocabulary of `tiny_decoder`; `padded` more behind."""
    tokens = ["<unk>", "<s>", "</s>", *_LETTERS, *(f"<extra_{i}>" for i in range(padded))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
