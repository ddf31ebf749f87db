"""Tokenizers of one alphabet that cut a text differently, and models that know how it goes on."""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from decodelab.decoding.model.decoder import Decoder
from decodelab.tests.tiny import clockwork

SPECIAL = ("<s>", "</s>")


def spelling(
    letters: str, merges: Sequence[str] = (), *, special: Sequence[str] = SPECIAL, begins: bool = False
) -> PreTrainedTokenizerFast:
    """A token a letter, ids in the order given, behind the special ones; then one for each merge of two, `ab`.
    `begins`: a text begins with the first special token."""
    vocabulary = [*special, *letters, *merges]
    bpe = models.BPE({token: i for i, token in enumerate(vocabulary)}, [(m[0], m[1:]) for m in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    named = {"bos_token": special[0], "eos_token": special[1]} if len(special) > 1 else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def reciting(tokenizer: PreTrainedTokenizerFast, cycle: Mapping[str, str]) -> Decoder:
    """Behind a token comes the one in `cycle` under its last letter."""
    vocabulary = tokenizer.get_vocab()
    follows = list(range(-(-len(vocabulary) // 8) * 8))
    for token, i in vocabulary.items():
        if token[-1] in cycle:
            follows[i] = vocabulary[cycle[token[-1]]]
    return clockwork(follows)
