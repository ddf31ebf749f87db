"""A smaller model of the same vocabulary drafts a chain (arXiv:2211.17192, arXiv:2302.01318), keeping its own KV."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.cache import Cache
from ..attention.rows import chains
from ..decoding.draft import EMPTY, Draft, Drafter, Gives, Needs, Opened, Resources, Room, Seen, chain
from ..decoding.errors import UserError
from ..decoding.law import LawSettings, Processors, keyed_scores, perturbed
from ..decoding.model.config import ModelConfig
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, open_source
from ..decoding.noise import Noise
from ..decoding.reference import PREFILL_CHUNK

Proposal = Literal["coupled", "sampled"]


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
    """

    model: DraftSpec = field(default_factory=DraftSpec)
    max_draft: int = 4
    proposal: Proposal = "coupled"
    temperature: float | None = None
    confidence: float = 0.0

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

    @property
    def needs(self) -> Needs:
        return Needs(second_model=True)

    @property
    def gives(self) -> Gives:
        return Gives("chain", self.max_draft, self.max_draft, "sampled" if self.proposal == "sampled" else "one-hot")

    def check(self, target: Source) -> list[str]:
        """Refuses another tokenizer; warns of a context shorter than the target's."""
        draft = open_source(self.model.model)
        same_tokens(draft.tokenizer, target.tokenizer, draft.label, target.label)
        ours, theirs = ModelConfig.from_hf(draft.config).max_positions, ModelConfig.from_hf(target.config).max_positions
        if ours < theirs:
            return [f"{draft.label} holds {ours} tokens, {target.label} {theirs}: nothing is drafted past {ours}"]
        return []

    def build(self, resources: Resources) -> "ModelDrafter":
        source = open_source(self.model.model)
        same_tokens(source.tokenizer, resources.tokenizer, source.label, "the target")
        target = resources.target
        dtype = target.dtype if self.model.dtype is None else getattr(torch, self.model.dtype)
        model = load_decoder(source, dtype=dtype, device=target.device, progress=resources.progress)
        return ModelDrafter(self, model, target.config.vocab, resources.law)


def same_tokens(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, name: str, target_name: str) -> None:
    """Two models may share ids only if every token has one id; their embeddings may differ in size by padding."""
    a, b = draft.get_vocab(), target.get_vocab()
    if a == b:
        return
    differing = min(t for t in (*a, *b) if a.get(t) != b.get(t))
    raise UserError(
        f"{name} cannot draft for {target_name}: their tokenizers differ (token {differing!r} has id "
        f"{a.get(differing)} and {b.get(differing)}); name a draft model with the target's tokenizer"
    )


@dataclass(slots=True)
class State:
    """`staged`: (number in the cache, token) of this sequence's rows since the last commit, in order."""

    tokens: list[int]
    processors: Processors
    cache: Cache
    slot: int
    staged: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Committed and staged rows; they hold the first tokens."""
        return self.cache.length(self.slot) + len(self.staged)


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """The drafter with its weights. `vocab`: the target's."""

    settings: DraftModel
    model: Decoder
    vocab: int
    law: LawSettings
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

    def start(self, requests: Sequence[Opened]) -> list[State]:
        longest = max(len(r.prompt) + r.max_new_tokens + self.settings.max_draft for r in requests)
        cache = self.model.open_cache(len(requests), min(longest, self.model.config.max_positions))
        states = [State(list(r.prompt), r.processors, cache, cache.open()) for r in requests]
        for state in states:
            if not self._can_read(state):
                continue  # never drafts
            for at in range(0, len(state.tokens), PREFILL_CHUNK):
                piece = state.tokens[at : at + PREFILL_CHUNK]
                self.model(chains([piece], [state.slot], prompt=True), cache, logits_of=torch.tensor([len(piece) - 1]))
                cache.commit({state.slot: range(len(piece))})
        return states

    def _depth(self, state: State, room: Room) -> int:
        """How many tokens to draft; none past the draft model's own context."""
        wanted = min(self.settings.max_draft, room.chain)
        if not wanted or not self._can_read(state):
            return 0
        # drafting n tokens feeds all tokens so far and n - 1 drafted ones
        return min(wanted, self.model.config.max_positions - len(state.tokens) + 1)

    def _can_read(self, state: State) -> bool:
        """Whether the draft model can be fed what is decided: its context and its embedding have an end."""
        config = self.model.config
        if len(state.tokens) > config.max_positions:
            text = f"the draft model's context of {config.max_positions} tokens is full: no drafts past it"
        elif max(state.tokens[state.cached :], default=0) >= config.vocab:
            text = f"the text holds a token beyond the draft model's {config.vocab} embeddings: no drafts behind it"
        else:
            return True
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        drafts = [EMPTY] * len(states)
        depth = [self._depth(s, r) for s, r in zip(states, room, strict=True)]
        caches = {id(s.cache): s.cache for s in states}
        for cache in caches.values():
            mine = [i for i, s in enumerate(states) if s.cache is cache and depth[i]]
            if mine:
                drawn = self._chains(
                    cache, [states[i] for i in mine], [depth[i] for i in mine], [noise[i] for i in mine]
                )
                for i, draft in zip(mine, drawn, strict=True):
                    drafts[i] = draft
        return drafts

    def _chains(self, cache: Cache, states: list[State], depth: list[int], noise: list[Noise]) -> list[Draft]:
        """Draft side by side: one forward a token for all sequences that go on."""
        tokens: list[list[int]] = [[] for _ in states]
        laws: list[list[Tensor]] = [[] for _ in states]
        going = list(range(len(states)))
        while going:
            fed = [(states[i].tokens + tokens[i])[states[i].cached :] for i in going]
            logits = self._feed(cache, [states[i] for i in going], fed)
            on = []
            for row, i in enumerate(going):
                scores = states[i].processors.scores(logits[row], [*states[i].tokens, *tokens[i]])
                if tokens[i] and self._unsure(scores):
                    continue
                token, q = self._choose(scores, noise[i], len(tokens[i]))
                tokens[i].append(token)
                laws[i].append(q)
                if len(tokens[i]) < depth[i]:
                    on.append(i)
            going = on
        return [chain(t, torch.stack(q) if self.sampled else None) for t, q in zip(tokens, laws, strict=True)]

    def _feed(self, cache: Cache, states: list[State], fed: list[list[int]]) -> Tensor:
        """Logits [n, V] behind the last token fed of each, over the target's vocabulary: padding ids get −inf."""
        first = cache.staged
        last = [s.staged[-1][0] if s.staged else -1 for s in states]
        rows = chains(fed, [s.slot for s in states], last, first)
        ends = []
        for state, piece in zip(states, fed, strict=True):
            state.staged += [(first + i, token) for i, token in enumerate(piece)]
            first += len(piece)
            ends.append(first - rows.first - 1)
        logits = self.model(rows, cache, logits_of=torch.tensor(ends)).logits[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

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
        keep: dict[int, tuple[Cache, dict[int, list[int]]]] = {}
        for state, new in zip(states, seen, strict=True):
            state.tokens += new.tokens[len(state.tokens) - new.position :]
            # what was staged and came true stays, short of the last token: its row must be fed to draft behind it
            start, limit = state.cache.length(state.slot), len(state.tokens) - 1
            kept = []
            for i, (number, token) in enumerate(state.staged):
                if start + i >= limit or state.tokens[start + i] != token:
                    break
                kept.append(number)
            keep.setdefault(id(state.cache), (state.cache, {}))[1][state.slot] = kept
        for cache, kept_of in keep.values():
            cache.commit(kept_of)
        for state in states:
            state.staged.clear()
        return list(states)

    def finish(self, state: State) -> None:
        if state.cache.staged:  # aborted between propose and observe
            state.cache.drop()
        state.staged.clear()
        state.cache.free(state.slot)


def _is_drafter(drafter: ModelDrafter) -> Drafter[State]:
    return drafter  # for the type checker
