"""Sections of whole models: plain and speculative decoding, T(k), prefill. Random weights are as slow as others."""

import gc
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...attention.rows import chains
from ...decoding import loop, reference
from ...decoding.acceptance import Greedy
from ...decoding.cost import measure_target
from ...decoding.draft import Drafter
from ...decoding.events import Generation
from ...decoding.model.config import ModelConfig
from ...decoding.model.decoder import Decoder
from ...decoding.model.fetch import NotHere
from ...decoding.model.source import Source, named, open_source
from ...decoding.reference import PREFILL_CHUNK
from ...decoding.request import Request, request
from ...drafting.none import Nothing
from ...drafting.reference import Reference
from ...kernels.dispatch import Kernels
from ...kernels.linear.reference import relative_error
from .bars import Row
from .kernels import prefill_attention
from .lab import Lab

_REAL = ("qwen2.5-coder-7b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-coder-1.5b", "llama-3.2-1b", "smollm2-135m")
_MODES = {"fast": Kernels(row_invariant=False), "exact": Kernels(row_invariant=True)}
_TEXTS = (
    "def quicksort(values):\n    ",
    "The three laws of thermodynamics, in simple words:\n1.",
    "SELECT customers.name, SUM(orders.total) FROM",
)
_LARGE = 40 * 2**30  # bytes of memory for 8 billion weights, and what is beside them
_REPEATS = 15


def _shape(lab: Lab, large: bool) -> dict[str, Any]:
    """Fields of LlamaConfig: Llama 3 8B's, Llama 3.2 1B's, or tiny ones."""
    if lab.tiny:
        sizes = (64, 2, 4, 2, 96, 101, True)
    else:
        sizes = (4096, 32, 32, 8, 14336, 128_256, False) if large else (2048, 16, 32, 8, 8192, 128_256, True)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip((*names, "vocab_size", "tie_word_embeddings"), sizes, strict=True)) | {
        "max_position_embeddings": 16_384
    }


class RandomWeights(Mapping[str, Tensor]):
    """By transformers' names; made when they are asked for, the same each time, where the model is."""

    def __init__(self, config: ModelConfig, lab: Lab) -> None:
        self._lab, c = lab, config
        self._shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.dim)}
        self._shapes |= {"model.norm.weight": (c.dim,)} | ({} if c.tied else {"lm_head.weight": (c.vocab, c.dim)})
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        for layer in range(c.layers):
            at = f"model.layers.{layer}."
            norms = dict.fromkeys((at + "input_layernorm.weight", at + "post_attention_layernorm.weight"), (c.dim,))
            self._shapes |= norms | {
                at + "self_attn.q_proj.weight": (q, c.dim),
                at + "self_attn.k_proj.weight": (kv, c.dim),
                at + "self_attn.v_proj.weight": (kv, c.dim),
                at + "self_attn.o_proj.weight": (c.dim, q),
                at + "mlp.gate_proj.weight": (c.mlp_dim, c.dim),
                at + "mlp.up_proj.weight": (c.mlp_dim, c.dim),
                at + "mlp.down_proj.weight": (c.dim, c.mlp_dim),
            }

    def __getitem__(self, name: str) -> Tensor:
        shape, on = self._shapes[name], self._lab.device
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._lab.dtype, device=on)
        generator = torch.Generator(on).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, dtype=self._lab.dtype, device=on).mul_(shape[1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True, slots=True)
class _Task:
    """Prompts, and so many tokens behind each."""

    prompts: Sequence[Sequence[int]]
    tokens: int

    def requests(self, target: Decoder, documents: Sequence[Sequence[int]] | None = None) -> list[Request]:
        law, c = Greedy().law(), target.config
        sizes: dict[str, Any] = {"max_new_tokens": self.tokens, "vocab": c.vocab, "context": c.max_positions}
        copied = [()] * len(self.prompts) if documents is None else [(document,) for document in documents]
        return [
            request(prompt, law=law, documents=of, device=target.device, **sizes)
            for prompt, of in zip(self.prompts, copied, strict=True)
        ]


def whole_model(lab: Lab) -> Iterator[Row]:
    """Random weights: their gaps between tokens are small, so that exactness is a hard question."""
    from transformers import LlamaConfig

    large = lab.memory_bytes >= _LARGE
    config = ModelConfig.from_hf(LlamaConfig(**_shape(lab, large)))
    rng = torch.Generator().manual_seed(1)
    length, tokens = (20, 12) if lab.tiny else (512, 64)
    prompts = [torch.randint(config.vocab, (length,), generator=rng).tolist() for _ in range(3)]
    for mode, kernels in _MODES.items():
        target = Decoder(config, RandomWeights(config, lab), dtype=lab.dtype, device=lab.device, kernels=kernels)
        about = {"model": "random", "mode": mode, "shape": "tiny" if lab.tiny else "8B" if large else "1B"}
        yield about | _measured(target, _Task(prompts, tokens), lab)
        del target
        _forget(lab)


def real_model(lab: Lab) -> Iterator[Row]:
    """The largest named model that the cache holds; nothing where it holds none."""
    if (source := _found()) is None:
        return
    config = ModelConfig.from_hf(source.config)
    prompts = [source.tokenizer(text)["input_ids"] for text in _TEXTS]
    for mode, kernels in _MODES.items():
        target = Decoder(
            config, source.tensors(), dtype=lab.dtype, device=lab.device, codes=source.codes, kernels=kernels
        )
        yield {"model": source.label, "mode": mode} | _measured(target, _Task(prompts, 64), lab)
        del target
        _forget(lab)


def _found() -> Source | None:
    for name in _REAL:
        try:
            return open_source(named(name), fetch=False)
        except NotHere:
            continue
    return None


def _measured(target: Decoder, task: _Task, lab: Lab) -> dict[str, Any]:
    """Seconds of a plain step and of a speculative one's token, T(8) / T(1), and whether both emit the same. Steps are
    replayed graphs, which are compiled and recorded before anything is timed."""
    requests = task.requests(target)
    replayed = _replays_are_launches(target, task)  # no speed of what is wrong
    reference.generate(target, requests[:1], Greedy().law())
    loop.generate(target, requests[:1], Nothing(), Greedy())
    plain = [reference.generate(target, [one], Greedy().law())[0] for one in requests]
    through_loop = [loop.generate(target, [one], Nothing(), Greedy())[0] for one in requests]
    drafter: Drafter[Any] = Reference(trigger=1, copy=7, per_match=None)
    copied = task.requests(target, [one.tokens for one in plain])
    loop.generate(target, copied[:1], drafter, Greedy())
    fast = [loop.generate(target, [one], drafter, Greedy())[0] for one in copied]
    step = min(_seconds_a_token(plain), _seconds_a_token(through_loop))
    context = len(task.prompts[0])
    profile = measure_target(target, context=context, rows=(1, 8), repeats=3 if lab.tiny else _REPEATS)
    # a step's keys: half of what is emitted is there on the mean
    mean = sum(len(one) + task.tokens // 2 for one in task.prompts) // len(task.prompts)
    nbytes = target.weight_bytes + target.config.layout.sequence_bytes(mean, lab.dtype.itemsize)
    return {
        "implementation": target.implementation,
        "step_s": step,
        "of_bandwidth": nbytes / step / lab.bandwidth,
        "t1_s": profile.at(1),
        "t8": profile.ratio(8),
        "speculative_s": _seconds_a_token(fast),
        "speedup": step / _seconds_a_token(fast),
        "tokens_per_step": sum(len(g.tokens) - 1 for g in fast) / sum(len(g.steps) for g in fast),
        "replayed": replayed,
        "exact": sum(a.tokens == b.tokens for a, b in zip(plain, fast, strict=True)) / len(plain),
    }


@torch.inference_mode()
def _replays_are_launches(target: Decoder, task: _Task) -> float:
    """The share of chains whose logits are the same to the bit, replayed and launched: as rows of a prompt are."""
    prompt = task.prompts[0]
    cache = target.open_cache(1, len(prompt) + 64)
    slot = cache.open()
    target(chains([prompt], [slot], prompt=True), cache, logits_of=torch.tensor([len(prompt) - 1]))
    cache.commit({slot: range(len(prompt))})
    same = []
    for rows in (1, 5, 8, 5, 1):  # recorded first, and then replayed with other tokens behind a longer prefix
        found = []
        for as_prompt in (True, False):
            found.append(target(chains([prompt[:rows]], [slot], prompt=as_prompt), cache).logits)
            cache.drop()
        same.append(torch.equal(*found))
        target(chains([prompt[-2:]], [slot]), cache)
        cache.commit({slot: range(2)})
    return sum(same) / len(same)


def _seconds_a_token(done: Sequence[Generation]) -> float:
    return sum(g.decode_s for g in done) / sum(len(g.tokens) - g.delivered[0][1] for g in done)


@torch.inference_mode()
def prefill(lab: Lab) -> Iterator[Row]:
    """Attention alone, and a model of a billion weights beside transformers' with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    yield from prefill_attention(lab)
    settings = LlamaConfig(**_shape(lab, large=False), attn_implementation="sdpa", dtype=lab.dtype)
    config = ModelConfig.from_hf(settings)
    weights = RandomWeights(config, lab)
    tokens = torch.randint(config.vocab, (40 if lab.tiny else 2 * PREFILL_CHUNK,)).tolist()
    target = Decoder(config, weights, dtype=lab.dtype, device=lab.device)
    with lab.device:
        theirs = LlamaForCausalLM(settings).to(lab.dtype).requires_grad_(False)
    theirs.load_state_dict(dict(weights), strict=False)  # tied: the unembedding is the embedding
    ids = torch.tensor([tokens], device=lab.device)
    error = relative_error(_read(target, tokens), theirs(ids, logits_to_keep=1).logits[0, 0])
    assert error < 0.1, f"the last row's logits are off by {error:.3g}"  # no speed of what is wrong
    ours = _median(lambda: int(_read(target, tokens).argmax()), lab)
    sdpa = _median(lambda: int(theirs(ids, logits_to_keep=1).logits.argmax()), lab)
    yield {"what": f"model, {len(tokens)} rows", "seconds": ours, "alternatives": {"transformers, sdpa": sdpa}}


def _read(target: Decoder, tokens: Sequence[int]) -> Float[Tensor, " V"]:
    """The logits behind a prompt."""
    cache = target.open_cache(1, len(tokens))
    slot = cache.open()
    for at in range(0, len(tokens), PREFILL_CHUNK):
        piece = tokens[at : at + PREFILL_CHUNK]
        out = target(chains([piece], [slot], prompt=True), cache, logits_of=torch.tensor([len(piece) - 1]))
        cache.commit({slot: range(len(piece))})
    return out.logits[0]


def _median(call: Any, lab: Lab) -> float:
    """Of a call that ends with a number on the host."""
    times = []
    for _ in range(2 + (1 if lab.tiny else 7)):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times[2:])[len(times[2:]) // 2]


def _forget(lab: Lab) -> None:
    gc.collect()
    if lab.device.type == "cuda":
        torch.cuda.empty_cache()
