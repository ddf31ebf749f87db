"""A tiny target that was trained on a language of phrases, so that what it says next can be learnt."""

import random
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import Drafter
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import Source
from decodelab.decoding.training import Text
from decodelab.testing import tiny_tokenizer
from decodelab.tests.rigged import ask

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LENGTH = 32


def sentences(count: int, seed: int) -> list[list[int]]:
    """Phrases of four tokens one after the other; which one follows is a matter of chance, what is in it is not."""
    rng = random.Random(0)
    phrases = [rng.sample(range(3, 61), 4) for _ in range(24)]
    rng = random.Random(seed)
    return [[t for _ in range(LENGTH // 4) for t in rng.choice(phrases)] for _ in range(count)]


@cache
def taught_source() -> Source:
    """Trained from scratch in a few seconds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        texts = torch.tensor(sentences(512, seed=1))
        for step in range(96):
            batch = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(step))[:32]]
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Source("taught", model.config, tiny_tokenizer(), (), "0" * 64, 0, lambda progress: tensors)


@cache
def taught() -> Decoder:
    source = taught_source()
    return Decoder(ModelConfig.from_hf(source.config), source.tensors(), dtype=torch.float32)


@cache
def said(count: int, seed: int = 2, tokens: int = 20) -> tuple[Text, ...]:
    """What it says to beginnings of other sentences."""
    prompts = [sentence[:6] for sentence in sentences(count, seed)]
    done = reference.generate(taught(), [ask(p, Greedy(), tokens) for p in prompts], Greedy().law())
    return tuple(Text((*p, *g.tokens), len(p)) for p, g in zip(prompts, done, strict=True))


def tokens_per_step(drafter: Drafter[Any]) -> float:
    """On beginnings that nothing was learnt from; the output is plain decoding's."""
    requests = [ask(sentence[:6], Greedy(), 20) for sentence in sentences(8, seed=5)]
    done = loop.generate(taught(), requests, drafter, Greedy())
    want = reference.generate(taught(), requests, Greedy().law())
    assert [g.tokens for g in done] == [w.tokens for w in want]
    return sum(s.emitted for g in done for s in g.steps) / sum(len(g.steps) for g in done)
