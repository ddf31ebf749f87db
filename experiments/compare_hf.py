"""transformers' own `generate` on the same prompts, weights and dtype, in the same process: what most people run.

It takes turns with us. Where both models do not fit into memory (`memory.py`), it runs once ours is gone.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..decoding.law import LawSettings
from ..decoding.model.source import Source
from ..errors import UserError
from .metrics import mean, ratio

PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation. `first`: tokens in the first delivery; `ttft_s`: until it; `decode_s`: from it to the last one;
    `steps`: deliveries after the first; `arithmetic_s`: of the steps, in the model's arithmetic: in our own kernels of
    the CPU, or else in its forwards.

    In a speculative mode the pass that reads the prompt verifies a draft as well, so `first` may be more than one.
    """

    tokens: list[int]
    first: int
    ttft_s: float
    decode_s: float
    steps: int
    arithmetic_s: float | None = None


@dataclass(frozen=True, slots=True)
class Assist:
    """How a draft assists: so many tokens at most, fewer where it is less sure of one than `threshold`. By default as
    transformers does, which moves the threshold while it generates where scikit-learn is installed."""

    tokens: int = 20
    threshold: float = 0.4

    def __str__(self) -> str:
        sure = f"confidence threshold {self.threshold:g} at first" if self.threshold else "no confidence threshold"
        return f"num_assistant_tokens={self.tokens}, constant, {sure}"


@dataclass(frozen=True)
class HfPeer:
    """transformers' model, and the one that assists it if any, in each of the ways `assists`. Greedy, one prompt at a
    time; calls leave no trace. `lookups`: the modes that look prompts up, and for how many tokens."""

    model: Any
    draft: Any | None = None
    assists: Mapping[str, Assist] = field(default_factory=dict)
    lookups: Mapping[str, int] = field(default_factory=lambda: {"prompt_lookup": PROMPT_LOOKUP_TOKENS})

    @classmethod
    def build(
        cls,
        source: Source,
        dtype: torch.dtype,
        device: torch.device | str,
        draft: Source | None = None,
        assists: Mapping[str, Assist] | None = None,
        lookups: Mapping[str, int] | None = None,
    ) -> "HfPeer":
        """Load and warm up. `assists`: by default one, `assisted`, of 4 tokens a step."""
        with _quietly():
            assistant = None if draft is None else _load(draft, dtype, device)
            model = _load(source, dtype, device)
            ways = {"assisted": Assist(4, 0.0)} if assists is None else assists
            known = {"prompt_lookup": PROMPT_LOOKUP_TOKENS} if lookups is None else lookups
            peer = cls(model, assistant, {} if assistant is None else ways, known)
            for mode in peer.modes:
                peer.generate(mode, [1, 2, 3, 4] * 4, 8)
        return peer

    @property
    def modes(self) -> dict[str, str]:
        """What can be asked for, with the settings of each."""
        lookups = {mode: f"prompt_lookup_num_tokens={tokens}" for mode, tokens in self.lookups.items()}
        return {"plain": "greedy", **lookups, **{mode: str(how) for mode, how in self.assists.items()}}

    def generate(self, mode: str, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()) -> Turn:
        """Greedy, up to and with the first of `eos_ids` or `max_new_tokens`."""
        from transformers import GenerationConfig

        if mode not in self.modes:
            raise UserError(f"compare_hf knows no mode {mode!r} here; known are {', '.join(self.modes)}")
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=next(iter(eos_ids), 0),
            prompt_lookup_num_tokens=self.lookups.get(mode),
        )
        ids = torch.tensor([list(prompt_ids)], device=self.model.device)
        clock = _Clock()
        assistant = {}
        if (how := self.assists.get(mode)) is not None:
            assert self.draft is not None
            settings = self.draft.generation_config  # read from the draft, not from the call, and written to
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = how.tokens, "constant"
            settings.assistant_confidence_threshold = how.threshold
            assistant = {"assistant_model": self.draft}
        with torch.inference_mode():
            begin = time.perf_counter()
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **assistant
            )
        (_, *at), (_, *counts) = clock.at, clock.counts  # the first delivery is the prompt
        return Turn(out[0, ids.shape[1] :].tolist(), counts[0], at[0] - begin, at[-1] - at[0], len(at) - 1)

    def forward(self, context: int, most: int) -> Callable[[int], float]:
        """Seconds of one forward of k ≤ `most` rows behind `context` tokens, every row's choice on the host."""
        from transformers import DynamicCache

        ids = torch.arange(context + most, device=self.model.device)[None] % self.model.config.vocab_size
        cache = DynamicCache(config=self.model.config)
        named = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"

        @torch.inference_mode()
        def rows(k: int, at: int = context) -> float:
            begin = time.perf_counter()
            self.model(ids[:, at : at + k], use_cache=True, **{named: cache}).logits.argmax(-1).tolist()
            spent = time.perf_counter() - begin
            if at == context:
                cache.crop(-k)
            return spent

        rows(context, 0)
        return rows


class _Clock:
    """A streamer: when tokens were delivered to the host, and how many."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


def _load(source: Source, dtype: torch.dtype, device: torch.device | str) -> Any:
    """transformers' model of `source`, its own defaults of generation cleared: only what `generate` is given counts."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    stored = source.tensors()
    # a copy: the stored tensors are memory-mapped, which would slow the products down
    weights = {name: stored[name].to(dtype, copy=True) for name in stored}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]
    model, found = kind.from_pretrained(
        None, config=source.config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if found["missing_keys"]:
        lacking = min(found["missing_keys"])
        raise UserError(f"transformers finds no {lacking} in {source.label}; run without compare_hf=true")
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


@contextmanager
def _quietly() -> Iterator[None]:
    """No progress bar, and no warning of what transformers does to itself: its draft is run in a deprecated way."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def why_not(law: LawSettings) -> str | None:
    """Why transformers is not compared under this law; None where it is."""
    if law.plain:
        return None
    return "compare_hf=true compares greedy decoding alone; leave it out, or take acceptance=greedy without penalties"


def compare(
    peer: HfPeer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Sequence[int],
    baseline_tokens: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The part `compare_hf` of result.json. The modes take turns, another one first at each prompt."""
    modes = list(peer.modes)
    runs: dict[str, list[Turn]] = {mode: [] for mode in modes}
    for i, prompt in enumerate(prompts):
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            runs[mode].append(peer.generate(mode, prompt, max_new_tokens, eos_ids))
    return summarise(peer, runs, baseline_tokens)


def summarise(
    peer: HfPeer,
    runs: Mapping[str, Sequence[Turn]],
    baseline_tokens: Sequence[Sequence[int]],
    interleaved: bool = True,
) -> dict[str, Any]:
    """The same from runs that are done, in the order of `baseline_tokens`. `interleaved`: they took turns with ours.

    `tpot_s`: seconds after the first delivery ÷ the tokens that came in them, a ratio of sums; `ttft_s`: mean;
    `tokens_per_step`: those tokens ÷ the deliveries that brought them, as ours are counted;
    `identical`: prompts on which the tokens are those of our plain decoding.
    """
    return {
        mode: {"settings": peer.modes[mode], "interleaved": interleaved, **_row(done, baseline_tokens)}
        for mode, done in runs.items()
    }


def _row(done: Sequence[Turn], baseline_tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    seconds, decoded = sum(r.decode_s for r in done), sum(len(r.tokens) - r.first for r in done)
    return {
        "tokens_per_second": ratio(decoded, seconds),
        "tpot_s": ratio(seconds, decoded),
        "ttft_s": mean(r.ttft_s for r in done),
        "tokens_per_step": ratio(decoded, sum(r.steps for r in done)),
        "identical": sum(r.tokens == list(want) for r, want in zip(done, baseline_tokens, strict=True)),
        "prompts": len(done),
    }
