"""transformers' own `generate` on the same prompts, weights and dtype, in the same process: what most people run.

It takes turns with us. Where both models do not fit into memory (`memory.py`), it runs once ours is gone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decoding.law import LawSettings
from ..decoding.model.source import Source
from ..errors import UserError
from .metrics import mean, ratio

PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class HfRun:
    """One generation. `first`: tokens in the first delivery; `ttft_s`: until it; `decode_s`: from it to the last one;
    `steps`: deliveries after the first.

    In a speculative mode the pass that reads the prompt verifies a draft as well, so `first` may be more than one.
    """

    tokens: list[int]
    first: int
    ttft_s: float
    decode_s: float
    steps: int


@dataclass(frozen=True)
class HfPeer:
    """transformers' model, and the one that assists it if any. Greedy, one prompt at a time; calls leave no trace."""

    model: Any
    draft: Any | None = None
    draft_tokens: int = 4

    @classmethod
    def build(
        cls,
        source: Source,
        dtype: torch.dtype,
        device: torch.device | str,
        draft: Source | None = None,
        draft_tokens: int = 4,
    ) -> "HfPeer":
        """Load and warm up. `draft_tokens`: what the draft proposes a step in the mode `assisted`."""
        with _quietly():
            assistant = None if draft is None else _load(draft, dtype, device)
            if assistant is not None:  # read from the draft, not from the call; the default is 20 and a threshold
                settings = assistant.generation_config
                settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = draft_tokens, "constant"
                settings.assistant_confidence_threshold = 0.0
            peer = cls(_load(source, dtype, device), assistant, draft_tokens)
            for mode in peer.modes:
                peer.generate(mode, [1, 2, 3, 4] * 4, 8)
        return peer

    @property
    def modes(self) -> dict[str, str]:
        """What can be asked for, with the settings of each."""
        known = {"plain": "greedy", "prompt_lookup": f"prompt_lookup_num_tokens={PROMPT_LOOKUP_TOKENS}"}
        if self.draft is not None:
            known["assisted"] = f"num_assistant_tokens={self.draft_tokens}, constant, no confidence threshold"
        return known

    def generate(self, mode: str, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()) -> HfRun:
        """Greedy, up to and with the first of `eos_ids` or `max_new_tokens`."""
        from transformers import GenerationConfig

        if mode not in self.modes:
            raise UserError(f"compare_hf knows no mode {mode!r} here; known are {', '.join(self.modes)}")
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=next(iter(eos_ids), 0),
            prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS if mode == "prompt_lookup" else None,
        )
        ids = torch.tensor([list(prompt_ids)], device=self.model.device)
        clock = _Clock()
        assistant = {"assistant_model": self.draft} if mode == "assisted" else {}
        with torch.inference_mode():
            begin = time.perf_counter()
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **assistant
            )
        (_, *at), (_, *counts) = clock.at, clock.counts  # the first delivery is the prompt
        return HfRun(out[0, ids.shape[1] :].tolist(), counts[0], at[0] - begin, at[-1] - at[0], len(at) - 1)


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
    runs: dict[str, list[HfRun]] = {mode: [] for mode in modes}
    for i, prompt in enumerate(prompts):
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            runs[mode].append(peer.generate(mode, prompt, max_new_tokens, eos_ids))
    return summarise(peer, runs, baseline_tokens)


def summarise(
    peer: HfPeer,
    runs: Mapping[str, Sequence[HfRun]],
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


def _row(done: Sequence[HfRun], baseline_tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    seconds, decoded = sum(r.decode_s for r in done), sum(len(r.tokens) - r.first for r in done)
    return {
        "tokens_per_second": ratio(decoded, seconds),
        "tpot_s": ratio(seconds, decoded),
        "ttft_s": mean(r.ttft_s for r in done),
        "tokens_per_step": ratio(decoded, sum(r.steps for r in done)),
        "identical": sum(r.tokens == list(want) for r, want in zip(done, baseline_tokens, strict=True)),
        "prompts": len(done),
    }
