"""A smaller model drafts a chain (arXiv:2211.17192, arXiv:2302.01318), keeping its own KV."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..decoding.distillation import FILE
from ..decoding.draft import EMPTY, Draft, Drafter, Gives, Needs, Opened, Resources, Room, Seen, chain
from ..decoding.law import LawSettings, Processors, keyed_scores, perturbed
from ..decoding.model.config import ModelConfig
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, open_source
from ..decoding.model.weights import open_safetensors
from ..decoding.model.whose import NOTE, relation
from ..decoding.noise import Noise
from ..errors import UserError
from ..kernels.argmax import largest
from .across import LONGER, MARGIN, Bridge, Shared, TextDrafter, Window
from .second_model import Reader, Reading, by_cache

Proposal = Literal["coupled", "sampled"]
Vocabulary = Literal["same", "text", "intersection"]
LEAST = 0.5  # of the draft model's law, on tokens that the target has too: with less it has something else to say


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Which model drafts: the keys of the group `model`, and `dtype` (None: the target's)."""

    name: str | None = None
    path: str | None = None
    revision: str | None = None
    adapter: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16", "float16", "float64"):
            raise UserError(
                f"drafting.model.dtype must be float32, bfloat16, float16, float64 or null, got {self.dtype!r}"
            )

    @property
    def model(self) -> ModelSpec:
        if self.name is None and self.path is None:
            raise UserError(
                "drafting=draft_model has no model; name one with drafting.model.name= or drafting.model.path="
            )
        return ModelSpec(self.name, self.path, self.revision, self.adapter)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Settings. `max_draft` is the papers' γ.

    `proposal=coupled`: the draft chooses as the target would, with the target's own processors and its noise at each
    position (Gumbel coupling, arXiv:2408.07978), and the choice is offered as a one-hot candidate: the output equals
    plain decoding token for token, under sampling too, and the draft agrees with the target about as often as any
    coupling can. `proposal=sampled`: drawn from q and judged by rejection, as in the papers: the same law, not the same
    tokens. `temperature`: of q when sampled (None: the target's). `confidence`: stop drafting where the likeliest next
    token has less probability than this; it looks at q before a token is drawn, so the law holds.

    `vocabulary`: same, or two tokenizers: `text`, the draft model's likeliest text in the target's tokens, one-hot; or
    `intersection`, only tokens that both have, coupled or sampled from q over them.
    """

    model: DraftSpec = field(default_factory=DraftSpec)
    max_draft: int = 4
    proposal: Proposal = "coupled"
    temperature: float | None = None
    confidence: float = 0.0
    vocabulary: Vocabulary = "same"

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise UserError(f"drafting.max_draft must be at least 1, got {self.max_draft}")
        if self.proposal not in ("coupled", "sampled"):
            raise UserError(f"drafting.proposal must be coupled or sampled, got {self.proposal!r}")
        if self.temperature is not None and not (1e-6 <= self.temperature < inf and self.proposal == "sampled"):
            raise UserError(
                "drafting.temperature must be at least 1e-6 and finite, and goes with proposal=sampled, "
                f"got {self.temperature} with {self.proposal}"
            )
        if not 0 <= self.confidence < 1:
            raise UserError(f"drafting.confidence must be at least 0 and below 1, got {self.confidence}")
        if self.vocabulary not in ("same", "text", "intersection"):
            raise UserError(f"drafting.vocabulary must be same, text or intersection, got {self.vocabulary!r}")
        if self.vocabulary == "text" and self.proposal == "sampled":
            raise UserError(
                "drafting.vocabulary=text offers a text, which has no q: take proposal=coupled, or "
                "vocabulary=intersection to sample"
            )

    @property
    def needs(self) -> Needs:
        return Needs(second_model=True)

    @property
    def gives(self) -> Gives:
        return Gives("chain", self.max_draft, self.max_draft, "sampled" if self.proposal == "sampled" else "one-hot")

    def check(self, target: Source) -> list[str]:
        """Refuses another tokenizer, unless it is to be bridged; warns of a context shorter than the target's, and of a
        draft model that was trained for another target."""
        draft = open_source(self.model.model)
        told = _told_apart(self.model.path, draft, target)
        if self.vocabulary == "same":
            same_tokens(draft.tokenizer, target.tokenizer, draft.label, target.label)
        elif self.vocabulary == "intersection":
            Shared.between(target.tokenizer, draft.tokenizer)
        ours, theirs = ModelConfig.from_hf(draft.config).max_positions, ModelConfig.from_hf(target.config).max_positions
        if ours < theirs:
            told.append(f"{draft.label} holds {ours} tokens, {target.label} {theirs}: nothing is drafted past {ours}")
        return told

    def build(self, resources: Resources) -> "ModelDrafter | TextDrafter":
        source = open_source(self.model.model)
        target = resources.target
        if self.vocabulary == "same":
            same_tokens(source.tokenizer, resources.tokenizer, source.label, "the target")
        dtype = target.dtype if self.model.dtype is None else getattr(torch, self.model.dtype)
        model = load_decoder(
            source, dtype=dtype, device=target.device, kernels=target.kernels, progress=resources.progress
        )
        return self.around(model, source.tokenizer, resources)

    def around(
        self, model: Decoder, tokenizer: PreTrainedTokenizerBase, resources: Resources
    ) -> "ModelDrafter | TextDrafter":
        """The drafter with a model that is loaded already, and its tokenizer."""
        if self.vocabulary == "same":
            return ModelDrafter(self, model, resources.target.config.vocab, resources.law)
        bridge = Bridge.between(resources.tokenizer, tokenizer)
        if self.vocabulary == "text":
            return TextDrafter(Reader(model), bridge, self.max_draft, self.confidence)
        shared = Shared.between(resources.tokenizer, tokenizer, model.device)
        return ModelDrafter(self, model, resources.target.config.vocab, resources.law, bridge, shared)


def _told_apart(path: str | None, draft: Source, target: Source) -> list[str]:
    """What a draft model that we trained says of its target, where that is another one."""
    weights = Path(path or "").expanduser() / FILE
    if path is None or not weights.is_file():
        return []
    note = json.loads((open_safetensors(weights).metadata() or {}).get(NOTE, "{}"))
    if relation(note, target) != "other":
        return []
    return [
        f"{draft.label} was trained to draft for {note.get('target_label')}, not for {target.label}: train one for it"
    ]


def same_tokens(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, name: str, target_name: str) -> None:
    """Two models may share ids only if every token has one id; their embeddings may differ in size by padding."""
    a, b = draft.get_vocab(), target.get_vocab()
    if a == b:
        return
    differing = min(t for t in (*a, *b) if a.get(t) != b.get(t))
    raise UserError(
        f"{name} cannot draft for {target_name}: their tokenizers differ (token {differing!r} has id "
        f"{a.get(differing)} and {b.get(differing)}); name a draft model with the target's tokenizer, or take "
        "vocabulary=text or intersection (drafting.vocabulary; in a merge the member's own)"
    )


@dataclass(slots=True)
class State:
    """`window`: the text in both tokenizers, where there are two."""

    reading: Reading
    processors: Processors
    window: Window | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, in the target's ids."""
        return self.reading.tokens if self.window is None else self.window.target


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """The drafter with its weights. `vocab`: the target's; `bridge` and `shared`: to another tokenizer."""

    settings: DraftModel
    model: Decoder
    vocab: int
    law: LawSettings
    bridge: Bridge | None = None
    shared: Shared | None = None
    sources: tuple[str, ...] = ("draft_model",)

    @property
    def sampled(self) -> bool:
        """Whether candidates carry their q. A greedy target has no law to sample: the draft is coupled to it then."""
        return self.settings.proposal == "sampled" and self.law.sample

    @property
    def needs(self) -> Needs:
        return self.settings.needs

    @property
    def gives(self) -> Gives:
        return replace(self.settings.gives, q="sampled" if self.sampled else "one-hot")

    @property
    def reader(self) -> Reader:
        return Reader(self.model)

    def start(self, requests: Sequence[Opened]) -> list[State]:
        windows: Sequence[Window | None] = [None] * len(requests)
        texts: Sequence[list[int]] = [list(r.prompt) for r in requests]
        open_end, longer = 0, 1
        if self.bridge is not None:
            windows, texts = zip(*(self.bridge.open(r.prompt) for r in requests), strict=True)
            open_end, longer = MARGIN, LONGER
        longest = max(len(t) + longer * r.max_new_tokens for t, r in zip(texts, requests, strict=True))
        readings = self.reader.open(texts, open_end, longest + self.settings.max_draft)
        return [State(reading, r.processors, w) for reading, r, w in zip(readings, requests, windows, strict=True)]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = [EMPTY] * len(states)
        depth = [
            self.reader.depth(s.reading, min(self.settings.max_draft, r.chain) if _is_whole(s) else 0)
            for s, r in zip(states, room, strict=True)
        ]
        for mine in by_cache([s.reading for s in states], [i for i, d in enumerate(depth) if d]):
            drawn = self._chains([states[i] for i in mine], [depth[i] for i in mine], [noise[i] for i in mine])
            for i, draft in zip(mine, drawn, strict=True):
                drafts[i] = draft
        return drafts

    def _chains(self, states: list[State], depth: list[int], noise: list[Noise]) -> list[Draft]:
        """Draft side by side: one forward a token for all sequences that go on."""
        tokens: list[list[int]] = [[] for _ in states]
        laws: list[list[Tensor]] = [[] for _ in states]
        going = list(range(len(states)))
        while going:
            readings = [states[i].reading for i in going]
            fed = [(r.tokens + self._own(tokens[i]))[r.cached :] for r, i in zip(readings, going, strict=True)]
            logits = self.reader.feed(readings, fed)
            best = self._best(logits)
            on = []
            for row, i in enumerate(going):
                if best is not None:
                    tokens[i].append(best[row])
                    if len(tokens[i]) < depth[i]:
                        on.append(i)
                    continue
                scores = states[i].processors.scores(self._over(logits[row]), [*states[i].tokens, *tokens[i]])
                if (
                    self._broken(scores)
                    or self._speechless(logits[row], scores)
                    or (tokens[i] and self._unsure(scores))
                ):
                    continue
                token, q = self._choose(scores, noise[i], len(tokens[i]))
                tokens[i].append(token)
                laws[i].append(q)
                if len(tokens[i]) < depth[i]:
                    on.append(i)
            going = on
        return [chain(t, torch.stack(q) if self.sampled and q else None) for t, q in zip(tokens, laws, strict=True)]

    def _best(self, logits: Tensor) -> list[int] | None:
        """The likeliest tokens, where nothing else is asked of the logits and all of them are numbers."""
        asked = self.sampled or not self.law.plain or self.shared is not None or self.settings.confidence > 0
        if asked or logits.shape[1] != self.vocab:
            return None
        found = largest(logits)
        return None if bool(logits[range(len(found)), found].isnan().any()) else found

    def _broken(self, scores: Tensor) -> bool:
        """Whether its numbers overflowed: there is no law to draw from."""
        if not bool(scores.isnan().any()):
            return False
        text = (
            f"the draft model's logits are not finite in {self.model.dtype}: no drafts there; try drafting.model.dtype"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return True

    def _own(self, tokens: Sequence[int]) -> list[int]:
        """Drafted tokens in the draft model's ids."""
        return list(tokens) if self.shared is None else [self.shared.own[token] for token in tokens]

    def _over(self, logits: Tensor) -> Tensor:
        """Logits [V] over the target's vocabulary: −inf for padding ids and for what is not shared."""
        if self.shared is not None:
            return self.shared.over(logits, self.vocab)
        logits = logits[: self.vocab]
        missing = self.vocab - logits.shape[0]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _speechless(self, logits: Tensor, scores: Tensor) -> bool:
        """Whether what it has to say is mostly in tokens that are not shared, or none that is shared is allowed."""
        if self.shared is None:
            return False
        return self.shared.mass(logits) < LEAST or not bool(torch.isfinite(scores).any())

    def _unsure(self, scores: Tensor) -> bool:
        return self.settings.confidence > 0 and float(torch.softmax(scores, -1).max()) < self.settings.confidence

    def _choose(self, scores: Tensor, noise: Noise, offset: int) -> tuple[int, Tensor]:
        """(token, the law that it was drawn from, when sampled)."""
        if not self.sampled:
            return int(keyed_scores(self.law, scores, noise.target(offset)).argmax()), scores
        if self.settings.temperature is not None:
            scores = scores * (self.law.temperature / self.settings.temperature)
        log_q = torch.log_softmax(scores, -1)
        return int(perturbed(log_q, noise.draft(offset)).argmax()), log_q.exp()

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for state, news in zip(states, seen, strict=True):
            new = news.tokens[len(state.tokens) - news.position :]
            if not new:
                continue
            if state.window is not None and self.bridge is not None:
                state.reading.rewrite(*self.bridge.follow(state.window, new), MARGIN)
            else:  # the last token's row must be fed to draft behind it
                state.reading.rewrite(len(state.reading.tokens), new, 1)
        self.reader.keep([s.reading for s in states])
        return list(states)

    def finish(self, state: State) -> None:
        self.reader.close(state.reading)


def _is_whole(state: State) -> bool:
    """No character at the end lacks bytes, which the other tokenizer would not know of."""
    return state.window is None or state.window.whole


def _is_drafter(drafter: ModelDrafter) -> Drafter[State]:
    return drafter  # for the type checker
