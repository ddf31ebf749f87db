"""The seam between what proposes tokens and the loop that decides on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.cache import Cache
from ..errors import UserError
from .law import LawSettings, Processors
from .model.decoder import Decoder, Tap
from .noise import Noise

S = TypeVar("S")
Shape = Literal["chain", "tree", "forest"]


@dataclass(frozen=True, slots=True)
class Draft:
    """K proposed rows as a forest, host-side. Siblings are offered in index order.

    `parents[i]`: the row that row i follows; −1 follows the last emitted token. `q_row[i]`: the row of `q` [P, V] that
    candidate i was drawn from, given the siblings before it (without replacement: their tokens taken out and
    renormalised; with replacement: the same row); −1: its distribution is one-hot. A candidate may have a q only if
    neither its being offered nor its place among its siblings depends on its own token. `judged[i]` False: verified for
    the drafter's sake, never a candidate; a judged row's ancestors are judged. `source[i]`: which of the drafter's
    `sources` proposed it; `also[i]`: which others proposed the same one-hot candidate, where one row serves them all.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Float[Tensor, "P V"] | None = None
    q_row: tuple[int, ...] = ()
    judged: tuple[bool, ...] = ()
    source: tuple[int, ...] = ()
    also: tuple[tuple[int, ...], ...] = ()  # empty: nobody did

    def __post_init__(self) -> None:
        K = len(self.tokens)
        if len(self.also) not in (0, K):
            raise ValueError(f"a draft of {K} tokens has {len(self.also)} also; give one for each token, or none")
        for name in ("parents", "q_row", "judged", "source"):
            if len(getattr(self, name)) != K:
                raise ValueError(f"a draft of {K} tokens has {len(getattr(self, name))} {name}")
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"draft row {i} has parent {parent}; a parent is -1 or an earlier row")
            if parent >= 0 and self.judged[i] and not self.judged[parent]:
                raise ValueError(f"draft row {i} is a candidate behind row {parent}, which is not")
        if self.q is None and any(row >= 0 for row in self.q_row):
            raise ValueError("a draft names rows of q but brings none")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Of each row: 1 behind the last emitted token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    @property
    def depth(self) -> int:
        """The longest path of candidates."""
        return max((d for d, judged in zip(self.depths, self.judged, strict=True) if judged), default=0)


def chain(tokens: Sequence[int], q: Float[Tensor, "K V"] | None = None, source: int = 0) -> Draft:
    """Candidates one behind the other; row i of `q` is what token i was drawn from (None: one-hot)."""
    K = len(tokens)
    rows = tuple(range(K)) if q is not None else (-1,) * K
    return Draft(tuple(tokens), tuple(range(-1, K - 1)), q, rows, (True,) * K, (source,) * K)


def tree(tokens: Sequence[int], parents: Sequence[int], source: int = 0) -> Draft:
    """One-hot candidates as a tree."""
    K = len(tokens)
    return Draft(tuple(tokens), tuple(parents), None, (-1,) * K, (True,) * K, (source,) * K)


EMPTY = Draft()


@dataclass(frozen=True, slots=True)
class Room:
    """What a draft may take: `depth` candidates on one path, `rows` rows in all. Both may be 0."""

    depth: int
    rows: int

    @property
    def chain(self) -> int:
        """The longest chain that fits."""
        return max(0, min(self.depth, self.rows))


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter must be given. `taps`: hidden states of verified rows; `prefill_hidden`: of the prompt's too;
    `choices`: what plain decoding would emit behind each row, with the noise of that row's position; `costs`: what rows
    cost the target, measured before it drafts."""

    taps: tuple[Tap, ...] = ()
    prefill_hidden: bool = False
    argmax: bool = False
    choices: bool = False
    topk: int = 0
    target_cache: bool = False
    second_model: bool = False
    documents: bool = False
    costs: bool = False


MOST_ROWS = 16_384  # that a step may verify of one sequence: what holds them is set aside before it starts


@dataclass(frozen=True, slots=True)
class Gives:
    """What a drafter may propose: its shape, the most rows and depth, and what its candidates are drawn from."""

    shape: Shape
    rows: int
    depth: int
    q: Literal["one-hot", "sampled"] = "one-hot"

    def within(self, budget: int | None, limit: int) -> int:
        """The most rows of a step, where `limit` tokens may be emitted; refuses more than can be verified at once."""
        rows = self.rows if budget is None else min(budget, self.rows)
        rows = min(rows, limit) if self.shape == "chain" else rows
        if rows > MOST_ROWS:
            raise UserError(
                f"the drafter may propose {rows} rows a step, and {MOST_ROWS} can be verified at once: give smaller "
                "numbers for its width, window or nodes"
            )
        return rows


@dataclass(frozen=True, slots=True)
class Opened:
    """What a drafter may know of a request: never its gold. `prompt` holds earlier output too when a request resumes.

    `cache` is the target's, where the request is `sequence`; `processors` make the target's law out of logits.
    """

    prompt: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    processors: Processors
    sequence: int
    cache: Cache


@dataclass(frozen=True, slots=True)
class Seen:
    """What one forward decided. `tokens` follow the N newly committed rows; the first has index `position`.

    In a chunk of the prompt they are the prompt's own next tokens (with the first generated one behind the last chunk).
    `own_path`: the kept rows of this drafter's draft, root to leaf. `argmax` [1 + K], `choices` [1 + K], `topk`
    [1 + K, k] and `hidden` [1 + K, dim] speak of the root row and of the draft's rows in its own order, `committed`
    [N, dim] of the committed rows; each is None or empty unless asked for in `needs`.
    """

    tokens: tuple[int, ...]
    position: int
    own_path: tuple[int, ...] = ()
    prefill: bool = False
    argmax: tuple[int, ...] | None = None
    choices: tuple[int, ...] | None = None
    topk: tuple[tuple[int, ...], ...] | None = None
    hidden: dict[Tap, Tensor] | None = None
    committed: dict[Tap, Tensor] | None = None


@runtime_checkable
class Drafter(Protocol[S]):
    """Settings and weights; all that varies from request to request lives in the states.

    `propose` and `observe` take the live sequences side by side. `observe` also follows a step without `propose`, and
    each chunk of the prompt. `finish` comes at the end, on abort and on preemption, after which `start` replays.
    """

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def gives(self) -> Gives: ...
    def start(self, requests: Sequence[Opened]) -> list[S]: ...
    def propose(self, states: Sequence[S], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]: ...
    def observe(self, states: Sequence[S], seen: Sequence[Seen]) -> list[S]: ...
    def finish(self, state: S) -> None: ...


@runtime_checkable
class ReadsFiles(Protocol):
    """Settings that name files beside models: heads, a tree, a corpus. What is in them is part of a run's key."""

    @property
    def files(self) -> tuple[Path, ...]: ...


@runtime_checkable
class Remembers(Protocol):
    """A drafter that learns from one request for the next, where its settings ask for that: what it drafts then depends
    on what ran before. `forget` takes it back to what it was when it was built; a measurement begins with it."""

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Resources:
    """What a drafter is built beside: the target, its tokenizer, the law it will be judged by. In a replay no target is
    `loaded`, and the tokenizer is read only for a drafter that asks for it: `text` is it, or gives it."""

    loaded: Decoder | None
    text: PreTrainedTokenizerBase | Callable[[], PreTrainedTokenizerBase]
    law: LawSettings
    progress: Callable[[str, int, int], None] | None = None  # (what, done, total)

    @property
    def target(self) -> Decoder:
        if self.loaded is None:
            raise UserError("replay has answers and no model, and this drafter is built beside one: leave replay out")
        return self.loaded

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.text if isinstance(self.text, PreTrainedTokenizerBase) else self.text()


@runtime_checkable
class DrafterSettings(Protocol):
    """What a YAML builds: settings without weights. A drafter without weights is its own settings.

    `check` sees the target's `Source` (config, tokenizer, file headers; typed loosely so that settings stay importable
    without it), raises UserError for a pair that cannot work and returns warnings. `build` loads what is needed.
    """

    @property
    def needs(self) -> Needs: ...
    @property
    def gives(self) -> Gives: ...
    def check(self, target: Any) -> list[str]: ...
    def build(self, resources: Resources) -> Drafter[Any]: ...
