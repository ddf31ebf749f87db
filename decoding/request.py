"""One prompt to be continued, and the checks it must pass before a model runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .law import LawSettings, Processors
from .noise import mix
from .stopping import StopRule


@dataclass(frozen=True, slots=True)
class Request:
    """`key` names the request in the noise: the same key draws the same in any batch.

    `documents` are token ids that a drafter may copy from; gold answers have no place here.
    """

    prompt: tuple[int, ...]
    stop: StopRule
    processors: Processors
    key: int
    documents: tuple[tuple[int, ...], ...] = ()


def request(
    prompt: Sequence[int],
    *,
    law: LawSettings,
    max_new_tokens: int,
    vocab: int,
    context: int,
    eos_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    documents: Sequence[Sequence[int]] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    sample: int = 0,
    device: torch.device | str = "cpu",
) -> Request:
    """`sample` tells repeated draws of one prompt apart; the rest of the key is the prompt itself."""
    if not prompt:
        raise UserError("the prompt is empty (0 tokens); give at least one token")
    if len(prompt) >= context:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, but the context holds {context} and one must be free; shorten it"
        )
    if wrong := [t for t in prompt if not 0 <= t < vocab]:
        raise UserError(f"the prompt holds token id {wrong[0]}, but the model's vocabulary is 0 to {vocab - 1}")
    if wrong := [e for e in eos_ids if not 0 <= e < vocab]:
        raise UserError(f"EOS id {wrong[0]} is outside the vocabulary of {vocab}; correct eos_ids")
    for word in law.bad_words:
        if not isinstance(word, str) and (wrong := [t for t in word if not 0 <= t < vocab]):
            raise UserError(f"acceptance.bad_words holds token id {wrong[0]}, but the vocabulary is 0 to {vocab - 1}")
    rule = StopRule(
        max_new_tokens=max_new_tokens,
        eos_ids=tuple(eos_ids),
        stop=tuple(stop),
        text=_reader(tokenizer) if tokenizer is not None else None,
        context_room=context - len(prompt),
    )
    processors = Processors.build(law, len(prompt), eos_ids, tokenizer, device)
    copied = tuple(tuple(d) for d in documents)
    return Request(tuple(prompt), rule, processors, mix(sample, *prompt), copied)


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    def read(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return read
