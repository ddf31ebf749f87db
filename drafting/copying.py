"""Copying from a text: what followed the longest end of a sequence where that stood before."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..decoding.draft import EMPTY, Draft, Seen, chain
from .suffix_automaton import BORDER, START, Match, SuffixAutomaton

# So many tokens behind the last copy are searched for a place to go on, and for matches no longer than that.
NEAR = 64


@dataclass(slots=True)
class Copying:
    """One request: the text it copies from, and where the longest end of its sequence stands in that text.

    Of several such places the copy goes on in the first: the first within NEAR tokens behind the last token copied, if
    there is one, else the first in the text. A token was copied if it is the one that followed at the place. So what is
    proposed depends on the tokens alone, not on who proposed them.
    """

    text: SuffixAutomaton
    grows: bool  # whether prompt and output belong to the text
    limit: int | None  # the longest match that is looked for
    length: int = 0  # of the sequence: prompt and output
    match: Match = START
    place: int = -1  # where the match ends in the text
    copied: int | None = None  # where the last token copied stands

    def read(self, prompt: Sequence[int]) -> None:
        for token in prompt:
            self._follow(token)
        self.place = self.text.end(self.match)

    def observe(self, seen: Seen) -> None:
        assert seen.position <= self.length
        for token in seen.tokens[self.length - seen.position :]:
            copied = self.match.length > 0 and self.text.tokens[self.place + 1] == token
            self._follow(token)
            if copied:
                self.place += 1
                self.copied = self.place
            else:
                self.place = self._first()

    def draft(self, count: int, *, least: int, per_match: float | None) -> Draft:
        """At most `count` tokens and `per_match` for each token matched; none if fewer than `least` are matched."""
        if self.match.length < least:
            return EMPTY
        if per_match is not None:
            count = int(min(count, per_match * self.match.length))
        return chain(self._ahead(count))

    def _follow(self, token: int) -> None:
        self.match = self.text.follow(self.match, token, self.limit)  # before it is added: a match ends earlier
        if self.grows:
            self.text.add(token)
        self.length += 1

    def _first(self) -> int:
        first, length, tokens = self.text.end(self.match), self.match.length, self.text.tokens
        if self.copied is None or not 0 < length <= NEAR:
            return first
        matched = tokens[first - length + 1 : first + 1]
        for end in range(self.copied + 1, min(self.copied + 1 + NEAR, len(tokens) - 1)):
            if tokens[end] == matched[-1] and tokens[end - length + 1 : end + 1] == matched:
                return end
        return first

    def _ahead(self, count: int) -> list[int]:
        """What follows the place, up to a border; past the end of the text, the copy itself."""
        tokens, start = self.text.tokens, self.place + 1
        ahead: list[int] = []
        for at in range(start, start + count):
            token = tokens[at] if at < len(tokens) else ahead[at - len(tokens)]
            if token == BORDER:
                break
            ahead.append(token)
        return ahead
