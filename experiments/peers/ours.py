"""A strategy of ours as a contender: built on a loaded target, judged by the plain decoder on the same weights."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain

import torch

from ...decoding.events import finish
from ...decoding.request import Request
from ...kernels import native
from .. import exactness
from ..compare_hf import Turn
from ..composition import draft_models
from ..config import RunConfig
from ..exactness import Divergence
from ..identity import drafter_name
from ..lab import Lab
from ..measure import scores_of
from .race import Contender, Kind, Prompt


@dataclass(frozen=True)
class Ours:
    """`plain`: what the plain decoder emits on this target, by prompt, as far as it has been asked."""

    lab: Lab
    limit: int
    seed: int
    plain: MutableMapping[str, list[int]]

    def request(self, prompt: Prompt) -> Request:
        return self.lab.request(prompt.ids, self.limit, documents=prompt.documents)

    def run(self, prompt: Prompt) -> Turn:
        """What was drafted before, on this prompt too, is forgotten."""
        self.lab.forget()
        delivered = self.lab.strategy([self.request(prompt)], self.seed)
        after, before = next(delivered), native.seconds()
        (done,) = finish(chain([after], delivered))
        arithmetic = sum(step.verify_s for step in done.steps)
        if before is not None and "native" in self.lab.target.implementation["attention"]:
            arithmetic = (native.seconds() or 0.0) - before
        first, steps = done.delivered[0][1], len(done.delivered) - 1
        return Turn(done.tokens, first, done.ttft_s, done.decode_s, steps, arithmetic)

    def judge(self, prompt: Prompt, tokens: list[int]) -> Divergence | None:
        request = self.request(prompt)
        if prompt.id not in self.plain:
            (done,) = finish(self.lab.plain([request], self.seed))
            self.plain[prompt.id] = done.tokens
        seen_at: Callable[[int], tuple[torch.Tensor, torch.Tensor] | None]
        seen_at = scores_of(self.lab, [request], 0, self.seed)
        return exactness.divergence(prompt.id, self.plain[prompt.id], tokens, seen_at)

    def verdict(self, left: Mapping[str, Divergence], prompts: int) -> exactness.Verdict:
        lab = self.lab
        return exactness.verdict(list(left.values()), prompts, lab.drafter, lab.acceptance, lab.target.dtype)


def kind_of(config: RunConfig) -> Kind:
    if not config.drafting.gives.rows:
        return "plain"
    return "draft" if draft_models(config.drafting) else "lookup"


def contender(name: str, config: RunConfig, mine: Ours, forward: str, settings: str) -> Contender:
    low_bit = bool(mine.lab.source.codes)
    return Contender(name, "ours", kind_of(config), low_bit, forward, settings, mine.run, mine.judge, mine.verdict)


def name_of(config: RunConfig, quantised: str | None) -> str:
    """Short: `plain`, `draft_model`, `prompt_lookup rtn-4g64`. `quantised`: how the weights are, if they are."""
    drafter = "plain" if not config.drafting.gives.rows else drafter_name(config)
    return drafter if quantised is None else f"{drafter} {quantised}"
