"""The target's law: logits, processed as asked, and the keyed draw from them. Plain decoding and the loop share it.

Processors are transformers' own, in this order: repetition_penalty, presence and frequency penalties (ours;
transformers has none), no_repeat_ngram, bad_words, min_new_tokens, temperature, top_k, top_p, min_p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import UserError
from .noise import Noise, gumbels

BadWord = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LawSettings:
    """What becomes of the logits. `sample`: draw from the processed law; otherwise take its argmax."""

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bad_words: tuple[BadWord, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        checks = (
            (
                "temperature",
                1e-6 <= self.temperature < inf,
                "at least 1e-6 and finite; use acceptance=greedy for argmax",
            ),
            ("top_k", self.top_k >= 0, "at least 0 (0: off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0 and finite (1: off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("no_repeat_ngram", self.no_repeat_ngram >= 0, "at least 0 (0: off)"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
        )
        for name, holds, bound in checks:
            if not holds:
                raise UserError(f"acceptance.{name} must be {bound}, got {getattr(self, name)}")

    @property
    def reads_context(self) -> bool:
        """Whether the law at a row depends on the tokens before it."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.no_repeat_ngram
            or self.bad_words
            or self.min_new_tokens
        )

    @property
    def plain(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return not self.sample and not self.reads_context


def law_of(rule: Any, *, sample: bool) -> LawSettings:
    """The law that a rule's keys ask for; keys of the rule's own play no part."""
    keys = (field.name for field in fields(LawSettings) if field.name != "sample")
    return LawSettings(sample=sample, **{key: getattr(rule, key) for key in keys if hasattr(rule, key)})


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one request; a function of the tokens before a row and its logits, nothing else."""

    settings: LawSettings
    prompt_length: int
    hf: LogitsProcessorList
    warpers: LogitsProcessorList

    @staticmethod
    def build(
        settings: LawSettings,
        prompt_length: int,
        eos_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
    ) -> "Processors":
        s, hf, warpers = settings, LogitsProcessorList(), LogitsProcessorList()
        if s.no_repeat_ngram:
            hf.append(NoRepeatNGramLogitsProcessor(s.no_repeat_ngram))
        if s.bad_words:
            hf.append(NoBadWordsLogitsProcessor(_word_ids(s.bad_words, tokenizer), list(eos_ids) or None))
        if s.min_new_tokens and eos_ids:
            hf.append(
                MinNewTokensLengthLogitsProcessor(prompt_length, s.min_new_tokens, list(eos_ids), device=str(device))
            )
        if s.sample:
            if s.temperature != 1:
                warpers.append(TemperatureLogitsWarper(s.temperature))
            if s.top_k:
                warpers.append(TopKLogitsWarper(s.top_k))
            if s.top_p < 1:
                warpers.append(TopPLogitsWarper(s.top_p))
            if s.min_p:
                warpers.append(MinPLogitsWarper(s.min_p))
        return Processors(s, prompt_length, hf, warpers)

    def scores(self, logits: Float[Tensor, " V"], context: Sequence[int]) -> Float[Tensor, " V"]:
        """Processed logits in float32 after `context` (prompt and generated tokens); −inf where forbidden."""
        scores = logits.to(torch.float32 if logits.dtype != torch.float64 else torch.float64)[None]
        s = self.settings
        ids = torch.tensor([context], device=logits.device) if s.reads_context else torch.zeros(1, 0, dtype=torch.long)
        if s.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, scores)
        if s.presence_penalty or s.frequency_penalty:
            counts = torch.bincount(ids[0, self.prompt_length :], minlength=scores.shape[1]).to(scores.dtype)
            scores = scores - s.presence_penalty * (counts > 0) - s.frequency_penalty * counts
        return self.warpers(ids, self.hf(ids, scores))[0]

    def allowed(self, logits: Float[Tensor, " V"], context: Sequence[int]) -> Bool[Tensor, " V"]:
        """What bad_words, no_repeat_ngram and min_new_tokens leave of the vocabulary."""
        ids = torch.tensor([context], dtype=torch.long, device=logits.device)
        return torch.isfinite(self.hf(ids, torch.zeros_like(logits)[None])[0])


def _word_ids(words: Sequence[BadWord], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """A word is forbidden at the start of a text and after a space, which tokenise differently."""
    out: list[list[int]] = []
    for word in words:
        if not word:
            raise UserError("acceptance.bad_words has an empty word, which would forbid the space; leave it out")
        if not isinstance(word, str):
            out.append(list(word))
            continue
        if tokenizer is None:
            raise UserError(f"acceptance.bad_words has the text {word!r}, but there is no tokenizer; give token ids")
        for form in (word, " " + word):
            ids = tokenizer(form, add_special_tokens=False)["input_ids"]
            if ids and ids not in out:
                out.append(ids)
    return out


class Law:
    """p at the rows of one sequence's forest: row 0 follows the last emitted token, row i + 1 follows draft token i.

    A row's law is computed when it is asked for, once.
    """

    def __init__(
        self,
        processors: Processors,
        logits: Float[Tensor, "R V"],
        context: Sequence[int],
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        argmax: Sequence[int] | None = None,
    ) -> None:
        """`context`: prompt and emitted tokens; `tokens`, `parents`: the draft; `argmax` of the rows' raw logits."""
        self._processors, self._logits, self._context = processors, logits, context
        self._tokens, self._parents, self._argmax = tokens, parents, argmax
        self._scores: dict[int, Tensor] = {}

    @property
    def settings(self) -> LawSettings:
        return self._processors.settings

    def path(self, row: int) -> list[int]:
        """The drafted tokens from the root to `row`, its own included."""
        out: list[int] = []
        at = row - 1
        while at >= 0:
            out.append(self._tokens[at])
            at = self._parents[at]
        return out[::-1]

    def scores(self, row: int) -> Float[Tensor, " V"]:
        """Processed logits, float32."""
        if row not in self._scores:
            self._scores[row] = self._processors.scores(self._logits[row], self._before(row))
        return self._scores[row]

    def allowed(self, row: int) -> Bool[Tensor, " V"]:
        """What no processor forbids outright there; top_k and the like make p smaller, not the vocabulary."""
        return self._processors.allowed(self._logits[row], self._before(row))

    def _before(self, row: int) -> Sequence[int]:
        return [*self._context, *self.path(row)] if self.settings.reads_context else ()

    def at(self, row: int) -> Float[Tensor, " V"]:
        """p, float32."""
        return torch.softmax(self.scores(row), -1)

    def choose(self, row: int, noise: Noise, offset: int) -> int:
        """What plain decoding emits after `row`: the argmax, or the keyed draw `offset` tokens ahead of `noise`."""
        if self.settings.plain and self._argmax is not None:
            return self._argmax[row]
        return best(keyed_scores(self.settings, self.scores(row), noise.target(offset)))


def best(scores: Float[Tensor, " V"]) -> int:
    """The token of the highest score. Refuses a law that forbids every token."""
    token = int(scores.argmax())
    if float(scores[token]) == -inf:
        raise UserError(
            "acceptance forbids every token of the vocabulary here (bad_words, no_repeat_ngram); forbid fewer"
        )
    return token


def keyed_scores(settings: LawSettings, scores: Any, key: int) -> Float[Tensor, " V"]:
    """What the choice maximises: the processed logits, with Gumbel noise of `key` added to log p when sampling."""
    if not settings.sample:
        return scores
    return perturbed(torch.log_softmax(scores, -1), key)


def perturbed(log_p: Float[Tensor, " V"], key: int) -> Float[Tensor, " V"]:
    """log p + Gumbel noise of `key`, float64; its argmax is a draw from p. Noise is made only where p > 0."""
    allowed = torch.isfinite(log_p).nonzero()[:, 0]
    out = torch.full_like(log_p, -torch.inf, dtype=torch.float64)
    out[allowed] = log_p[allowed].double() + gumbels(key, allowed)
    return out
