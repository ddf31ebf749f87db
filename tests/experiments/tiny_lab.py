"""A tiny model with its drafter and rule, ready to be measured, without files."""

from collections.abc import Sequence
from typing import Any

import torch

from decodelab.decoding.acceptance import Acceptance, Greedy
from decodelab.decoding.draft import Drafter
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import Source
from decodelab.drafting.prompt_lookup import PromptLookup
from decodelab.experiments.items import Item, Message
from decodelab.experiments.lab import Lab
from decodelab.experiments.tasks import Task, TaskSettings
from decodelab.tests.tiny import tiny_decoder, tiny_tokenizer

PROMPTS = ("ab", "ab cd ab c", "the cat and the dog and the c")


def tiny_lab(
    drafter: Drafter[Any] | None = None,
    rule: Acceptance | None = None,
    *,
    target: Decoder | None = None,
    digest: str = "weights",
    eos_ids: tuple[int, ...] = (),
) -> Lab:
    """By default `prompt_lookup` and `greedy` on `tiny_decoder` in float32; a token is a character."""
    target = tiny_decoder(dtype=torch.float32, scale=4.0) if target is None else target
    source = Source("tiny", None, tiny_tokenizer(), eos_ids, digest, 0, lambda progress: {})
    drafter = PromptLookup() if drafter is None else drafter
    return Lab(source, target, drafter, Greedy() if rule is None else rule)


def texts(*prompts: str, tokens: int = 12) -> tuple[Task, TaskSettings]:
    """A task of raw prompts, named 0, 1, …"""
    items = tuple(Item(str(i), "texts", (Message("user", text),), raw=True) for i, text in enumerate(prompts))
    return Task(items, "texts", "digest"), TaskSettings(name=None, max_new_tokens=tokens, chat=False)


def talk(*turns: Sequence[str], tokens: int = 12) -> tuple[Task, TaskSettings]:
    """A task of conversations, named a, b, …; without a template, their messages' texts with blank lines between."""
    items = tuple(
        Item("abc"[i], "talk", (Message("user", first),), tuple(later)) for i, (first, *later) in enumerate(turns)
    )
    return Task(items, "talk", "digest"), TaskSettings(name=None, max_new_tokens=tokens, chat=False)
