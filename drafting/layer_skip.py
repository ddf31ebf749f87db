"""The target drafts for itself with some of its layers: a set left out (Self-Speculative Decoding, Zhang et al. 2023,
arXiv:2309.08168) or the first few alone (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710).

Nothing is loaded and nothing is kept: drafted rows are staged in the target's own cache, behind the keys and values
that all of its layers computed, and dropped before the draft is handed over. LayerSkip's verification goes on from
where its draft left off; here it runs all layers, as every drafter's does. Self-Speculative Decoding skips attention
and MLP apart, by Bayesian optimisation; here layers are skipped whole, and `decodelab layers` climbs to its set.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..attention.layout import Layout
from ..attention.rows import chains
from ..decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen, chain
from ..decoding.law import LawSettings, keyed_scores
from ..decoding.model.config import ModelConfig
from ..decoding.model.decoder import Decoder
from ..decoding.model.source import Source
from ..decoding.noise import Noise
from ..errors import UserError

KIND = "layer_skip"


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """Settings. `skip`: layers left out, from 0, or a file that `decodelab layers` wrote; `exit`: only so many first
    layers. `max_draft`: tokens of the chain; a warning says where the file found another length best.

    The draft chooses as the target would, with its processors and the noise of each position, so that output equals
    plain decoding token for token, sampled or not. `confidence`: stop where the likeliest next token has less
    probability than this.
    """

    skip: str | tuple[int, ...] | None = None
    exit: int | None = None
    max_draft: int = 4
    confidence: float = 0.0

    needs: ClassVar[Needs] = Needs(target_cache=True)

    def __post_init__(self) -> None:
        if self.skip is not None and self.exit is not None:
            raise UserError("drafting.skip and drafting.exit both say which layers draft: give one of them")
        if self.max_draft < 1:
            raise UserError(
                f"drafting.max_draft must be at least 1, got {self.max_draft}; drafting=none drafts nothing"
            )
        if not 0 <= self.confidence < 1:
            raise UserError(f"drafting.confidence must be at least 0 and below 1, got {self.confidence}")

    @property
    def files(self) -> tuple[Path, ...]:
        return (Path(self.skip),) if isinstance(self.skip, str) else ()

    @property
    def gives(self) -> Gives:
        return Gives("chain", self.max_draft, self.max_draft)

    def check(self, target: Source) -> list[str]:
        """Refuses layers that the target lacks, and a file of another target's."""
        found = _read(self.skip) if isinstance(self.skip, str) else None
        if found is not None and found.target != target.digest:
            raise UserError(
                f"drafting.skip={self.skip} was found for other weights ({found.target[:12]}) than those of "
                f"{target.label} ({target.digest[:12]}): search again with decodelab layers"
            )
        self.layers(ModelConfig.from_hf(target.config).layout)
        if found is None or found.max_draft in (None, self.max_draft):
            return []
        return [
            f"drafting.skip={self.skip} was found with drafts of {found.max_draft}, and these are of {self.max_draft}: "
            f"drafting.max_draft={found.max_draft} does what was predicted"
        ]

    def layers(self, layout: Layout) -> tuple[int, ...]:
        """Those that draft, ascending."""
        count = len(layout.layers)
        if self.exit is not None:
            if not 1 <= self.exit < count:
                raise UserError(
                    f"drafting.exit must be 1 to {count - 1} of the target's {count} layers, got {self.exit}"
                )
            return tuple(range(self.exit))
        skipped = _read(self.skip).skip if isinstance(self.skip, str) else self.skip
        if not skipped:
            raise UserError(
                "drafting=layer_skip leaves out no layer: give drafting.skip=[5,6,9] or drafting.exit=12, or let "
                "decodelab layers look for the best"
            )
        if wrong := [layer for layer in skipped if not 0 <= layer < count]:
            raise UserError(f"drafting.skip names layer {wrong[0]}, but the target's are 0 to {count - 1}")
        return kept(layout, skipped)

    def build(self, resources: Resources) -> "SkippingDrafter":
        target = resources.target
        return SkippingDrafter(self, target, self.layers(target.config.layout), resources.law)


def kept(layout: Layout, skipped: Sequence[int]) -> tuple[int, ...]:
    """The layers that remain. Refuses to leave none, and to leave one without the layer whose keys it reads: rows that
    are drafted would have none there."""
    remain = tuple(layer for layer in range(len(layout.layers)) if layer not in skipped)
    if not remain:
        raise UserError(f"drafting.skip leaves none of the target's {len(layout.layers)} layers: keep at least one")
    for layer in remain:
        if (owner := layout.layers[layer].owner) not in remain:
            raise UserError(
                f"drafting.skip leaves out layer {owner}, whose keys and values layer {layer} reads: keep it, or leave "
                f"out {layer} too"
            )
    return remain


class _Found(NamedTuple):
    """What `decodelab layers` wrote: the digest of the target, the layers left out, the best length of a draft."""

    target: str
    skip: tuple[int, ...]
    max_draft: int | None


def _read(file: str) -> _Found:
    try:
        found = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        if found["kind"] == KIND:
            best = found.get("max_draft")
            return _Found(str(found["target"]), tuple(map(int, found["skip"])), None if best is None else int(best))
    except OSError as error:
        raise UserError(f"drafting.skip={file} cannot be read ({error.strerror}): decodelab layers writes it") from None
    except (ValueError, LookupError, TypeError):
        pass
    raise UserError(f"drafting.skip={file} holds no set of layers: decodelab layers writes such files")


@dataclass(slots=True)
class State:
    """`tokens`: prompt and output."""

    tokens: list[int]
    opened: Opened


@dataclass(frozen=True, slots=True)
class SkippingDrafter:
    """The settings and the target. `layers`: those that draft."""

    settings: LayerSkip
    target: Decoder
    layers: tuple[int, ...]
    law: LawSettings

    sources: ClassVar[tuple[str, ...]] = ("layer_skip",)
    needs: ClassVar[Needs] = LayerSkip.needs

    @property
    def gives(self) -> Gives:
        return self.settings.gives

    def start(self, requests: Sequence[Opened]) -> list[State]:
        return [State(list(r.prompt), r) for r in requests]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        """One forward a token for all sequences that go on. Of n drafted tokens n − 1 are staged, and the last decided
        one before them: as many rows as their verification takes, less one."""
        depth = [min(self.settings.max_draft, r.chain) for r in room]
        drafted: list[list[int]] = [[] for _ in states]
        above = [-1] * len(states)  # the row that was staged last
        going = [i for i, d in enumerate(depth) if d]
        cache = states[0].opened.cache
        try:
            while going:
                first = cache.staged
                fed = [[(drafted[i] or states[i].tokens)[-1]] for i in going]
                rows = chains(fed, [states[i].opened.sequence for i in going], [above[i] for i in going], first)
                logits = self.target(rows, cache, layers=self.layers).logits
                on = []
                for row, i in enumerate(going):
                    above[i] = first + row
                    context = [*states[i].tokens, *drafted[i]] if self.law.reads_context else ()
                    scores = states[i].opened.processors.scores(logits[row], context)
                    if drafted[i] and self._unsure(scores):
                        continue
                    keyed = keyed_scores(self.law, scores, noise[i].target(len(drafted[i])))
                    drafted[i].append(int(keyed.argmax()))
                    if len(drafted[i]) < depth[i]:
                        on.append(i)
                going = on
        finally:
            cache.drop()
        return [chain(tokens) for tokens in drafted]

    def _unsure(self, scores: Tensor) -> bool:
        return self.settings.confidence > 0 and float(scores.softmax(-1).max()) < self.settings.confidence

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for state, new in zip(states, seen, strict=True):
            state.tokens += new.tokens[len(state.tokens) - new.position :]
        return list(states)

    def finish(self, state: State) -> None:
        pass
