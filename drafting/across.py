"""Drafting across two tokenizers: the target's text in the draft model's tokens, and what that drafts in the target's.

`text` (universal assisted generation): the draft model says how the text goes on, and the target's tokenizer makes
tokens of it. `intersection`: it draws only tokens that both vocabularies have, as in arXiv:2502.05202, so that its law
over them, renormalised, is a law over the target's tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Room, Seen, chain
from ..decoding.noise import Noise
from ..errors import UserError
from .second_model import Reader, Reading, by_cache

WINDOW = 32  # of the target's last tokens, at least so many are encoded anew
MARGIN = 2  # of the last tokens of the draft model: more text hardly ever makes others of more than these
LONGER = 2  # tokens of the draft model that there is room for a token of the target's; a text of more moves on
_UNFINISHED = "\ufffd"  # what a decoder makes of a character that lacks bytes


@dataclass(slots=True)
class Window:
    """A sequence in both tokenizers. The draft model's tokens are the first `fixed`, which later text leaves as they
    are, and `ids[lead:]`: `ids` encode `text`, which is `target[begin:]`."""

    target: list[int]
    fixed: int
    begin: int = 0
    lead: int = 0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    whole: bool = True  # no character at the end of the target's tokens lacks bytes
    due: int = 0  # the length at which the window moves on


@dataclass(frozen=True, slots=True)
class Bridge:
    """Two tokenizers. `dropped`: special tokens of the target that the draft model does not know. `ends`: special
    tokens of the draft model, behind which it has nothing to say; True for those that the target knows too. `begin`:
    what the draft model's texts begin with."""

    target: PreTrainedTokenizerBase
    draft: PreTrainedTokenizerBase
    dropped: frozenset[int]
    ends: Mapping[int, bool]
    begin: tuple[int, ...]

    @staticmethod
    def between(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> "Bridge":
        theirs, ours = _special(target), _special(draft)
        bos = draft.bos_token_id
        begins = bos is not None and list(draft("a", verbose=False)["input_ids"])[:1] == [bos]
        return Bridge(
            target,
            draft,
            frozenset(i for i, text in theirs.items() if text not in ours.values()),
            {i: text in theirs.values() for i, text in ours.items()},
            (bos,) if begins else (),
        )

    def open(self, target: Sequence[int]) -> tuple[Window, list[int]]:
        """A prompt, and the draft model's tokens of it."""
        window = Window(list(target), 0)
        self._encode(window)
        begin = [] if tuple(window.ids[: len(self.begin)]) == self.begin else list(self.begin)
        window.fixed = len(begin)
        tokens = begin + window.ids
        self._advance(window)
        return window, tokens

    def follow(self, window: Window, new: Sequence[int]) -> tuple[int, list[int]]:
        """The target has gone on: (from where on the draft model's tokens may be others than before, these tokens)."""
        window.target += new
        self._encode(window)
        told = window.fixed, window.ids[window.lead :]
        if len(window.target) >= window.due:
            self._advance(window)
        return told

    def _encode(self, window: Window) -> None:
        window.text, window.whole = self._said(window.target[window.begin :])
        window.ids = _ids(self.draft, window.text)

    def _said(self, target: Sequence[int]) -> tuple[str, bool]:
        """(the target's text, without a character at its end that lacks bytes; whether there was none)."""
        text = _text(self.target, [i for i in target if i not in self.dropped])
        cut = text.rstrip(_UNFINISHED)
        return cut, cut == text

    def _advance(self, window: Window) -> None:
        """Begin the window later, where encoding from there gives the same tokens; before them everything is fixed."""
        window.due = len(window.target) + WINDOW
        for begin in range(len(window.target) - WINDOW, max(window.begin, len(window.target) - 2 * WINDOW), -1):
            text, _ = self._said(window.target[begin:])
            if not text or not window.text.endswith(text):  # it begins within a character
                continue
            ids = _ids(self.draft, text)
            most = min(len(ids), len(window.ids) - window.lead)
            same = next((n for n in range(most) if ids[-1 - n] != window.ids[-1 - n]), most)
            if 2 * same > len(ids):
                window.fixed += len(window.ids) - same - window.lead
                window.begin, window.lead, window.text, window.ids = begin, len(ids) - same, text, ids
                return

    def back(self, window: Window, drafted: Sequence[int]) -> list[int]:
        """The target's tokens of what the draft model says behind the text; none where they do not follow from it."""
        before, after = _text(self.draft, window.ids), _text(self.draft, [*window.ids, *drafted])
        if not window.whole or not after.startswith(before):
            return []
        said = after[len(before) :].rstrip(_UNFINISHED)
        known, whole = _ids(self.target, window.text), _ids(self.target, window.text + said)
        if whole[: len(known)] == known:
            return whole[len(known) :]
        # the target stopped within what its tokenizer takes for one token
        alone = _ids(self.target, said)
        return alone if self._said([*window.target[window.begin :], *alone])[0] == window.text + said else []


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """No BOS: the text may stand anywhere."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens that both vocabularies have: `draft[i]` and `target[i]` [M] are one. `own`: the draft's by the
    target's."""

    draft: Int[Tensor, " M"]
    target: Int[Tensor, " M"]
    own: Mapping[int, int]

    @staticmethod
    def between(
        target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, device: torch.device | str = "cpu"
    ) -> "Shared":
        theirs, ours = spelled(target), spelled(draft)
        pairs = [(i, theirs[text]) for text, i in ours.items() if text in theirs]
        if not pairs:
            raise UserError(
                "drafting.vocabulary=intersection: the two vocabularies have no token in common; take vocabulary=text"
            )
        draft_ids, target_ids = (torch.tensor(ids, device=device) for ids in zip(*pairs, strict=True))
        return Shared(draft_ids, target_ids, {t: d for d, t in pairs})

    def over(self, logits: Float[Tensor, " Vd"], vocab: int) -> Float[Tensor, " V"]:
        """The draft model's logits as the target's; −inf for what it does not have."""
        out = torch.full((vocab,), -torch.inf, dtype=logits.dtype, device=logits.device)
        out[self.target] = logits[self.draft]
        return out

    def mass(self, logits: Float[Tensor, " Vd"]) -> float:
        """How much of the draft model's law is on shared tokens."""
        return float(torch.softmax(logits.float(), -1)[self.draft].sum())


def spelled(tokenizer: PreTrainedTokenizerBase) -> dict[tuple[bool, bytes], int]:
    """The vocabulary by (special or not, the token's text as bytes), however it writes spaces and bytes."""
    special = _special(tokenizer)
    ordinary = {token: i for token, i in tokenizer.get_vocab().items() if i not in special}
    alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
    if "\u0120" in ordinary and all(char in alphabet for token in ordinary for char in token):
        texts = {bytes(alphabet[char] for char in token): i for token, i in ordinary.items()}
    else:
        pieces = any(token.startswith("\u2581") for token in ordinary)  # SentencePiece's space
        texts = {}
        for token, i in sorted(ordinary.items(), key=lambda entry: not _is_byte(entry[0])):  # bytes give way
            byte = pieces and _is_byte(token)
            texts[bytes.fromhex(token[3:5]) if byte else token.replace("\u2581", " ").encode()] = i
    return {(False, text): i for text, i in texts.items()} | {(True, t.encode()): i for i, t in special.items()}


def _is_byte(token: str) -> bool:
    """SentencePiece's <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


@dataclass(slots=True)
class State:
    """A sequence: its text in both tokenizers, and what the draft model has read of it."""

    window: Window
    reading: Reading


@dataclass(frozen=True, slots=True)
class TextDrafter:
    """The draft model's likeliest text, in the target's tokens, offered one-hot. `max_draft`: tokens of either; where
    the likeliest next one has less probability than `confidence` it stops."""

    reader: Reader
    bridge: Bridge
    max_draft: int
    confidence: float = 0.0

    sources: ClassVar[tuple[str, ...]] = ("draft_model",)
    needs: ClassVar[Needs] = Needs(second_model=True)

    @property
    def gives(self) -> Gives:
        return Gives("chain", self.max_draft, self.max_draft)

    def start(self, requests: Sequence[Opened]) -> list[State]:
        windows, texts = zip(*(self.bridge.open(r.prompt) for r in requests), strict=True)
        longest = max(len(t) + LONGER * r.max_new_tokens for t, r in zip(texts, requests, strict=True))
        readings = self.reader.open(texts, MARGIN, longest + self.max_draft)
        return [State(window, reading) for window, reading in zip(windows, readings, strict=True)]

    def propose(self, states: Sequence[State], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        depth = [
            self.reader.depth(s.reading, self.max_draft if r.chain and s.window.whole else 0)
            for s, r in zip(states, room, strict=True)
        ]
        drafts = [EMPTY] * len(states)
        readings = [s.reading for s in states]
        for mine in by_cache(readings, [i for i, d in enumerate(depth) if d]):
            said = self._said([states[i] for i in mine], [depth[i] for i in mine], [room[i].chain for i in mine])
            for i, tokens in zip(mine, said, strict=True):
                drafts[i] = chain(tokens[: room[i].chain])
        return drafts

    def _said(self, states: list[State], depth: list[int], wanted: list[int]) -> list[list[int]]:
        """Draft side by side, until the text is one token longer than there is room for: then the last one that fits
        is complete. Where `depth` ends the draft first, its last token may be the beginning of a longer one of the
        target's; it is offered all the same, being right nearly as often as the others."""
        drafted: list[list[int]] = [[] for _ in states]
        said: list[list[int]] = [[] for _ in states]
        going = list(range(len(states)))
        while going:
            readings = [states[i].reading for i in going]
            fed = [(r.tokens + drafted[i])[r.cached :] for r, i in zip(readings, going, strict=True)]
            logits = self.reader.feed(readings, fed)[:, : len(self.bridge.draft)]
            best = logits.argmax(-1).tolist()
            on = []
            for row, i in enumerate(going):
                if drafted[i] and self._unsure(logits[row]):
                    continue
                if best[row] in self.bridge.ends and not self.bridge.ends[best[row]]:
                    continue
                drafted[i].append(best[row])
                said[i] = self.bridge.back(states[i].window, drafted[i])
                if best[row] not in self.bridge.ends and len(drafted[i]) < depth[i] and len(said[i]) <= wanted[i]:
                    on.append(i)
            going = on
        return said

    def _unsure(self, logits: Tensor) -> bool:
        return self.confidence > 0 and float(torch.softmax(logits.float(), -1).max()) < self.confidence

    def observe(self, states: Sequence[State], seen: Sequence[Seen]) -> list[State]:
        for state, news in zip(states, seen, strict=True):
            new = news.tokens[len(state.window.target) - news.position :]
            if new:
                state.reading.rewrite(*self.bridge.follow(state.window, new), MARGIN)
        self.reader.keep([s.reading for s in states])
        return list(states)

    def finish(self, state: State) -> None:
        self.reader.close(state.reading)
