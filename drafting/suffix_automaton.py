"""Where the end of one text stands in another, found online in constant time a token.

A suffix automaton (Blumer et al. 1985, doi:10.1016/0304-3975(85)90157-4) has a state for every set of end positions
that substrings of the text share. It grows by a token in amortised constant time, and so does a match that is carried
along, however long it is.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Match(NamedTuple):
    """A substring of the text: the one of `length` tokens among those of `state`."""

    state: int
    length: int


START = Match(0, 0)  # the empty one
BORDER = -1  # between documents


class SuffixAutomaton:
    """A growing text, and where each of its substrings ends first. A `BORDER` in it is matched by no token.

    Of substrings of up to `counted` tokens it also knows how often they stand in the text; a token then takes up to so
    many steps.

    Most states are followed by one token alone: numbers in arrays, and a dict only for a state that branches, take
    about a quarter of what a dict for each would (tests/drafting/measure_suffix_memory.py).
    """

    __slots__ = (
        "_branches", "_count", "_counted", "_end", "_last", "_length", "_link", "_tail", "_to", "_token", "tokens",
    )  # fmt: skip

    def __init__(self, tokens: Iterable[int] = (), counted: int = 0) -> None:
        self.tokens: list[int] = []
        self._counted = counted
        self._tail = START  # the text's last `counted` tokens
        # of each state; the first is the empty substring's
        self._count = array("i", [0])  # how often its substrings stand in the text, if they are counted
        self._link = array("i", [0])  # the state of the longest suffix that ends in more places
        self._length = array("i", [0])  # of its longest substring; all of them are longer than the link's
        self._end = array("i", [-1])  # the first place in which they end
        self._token = array("i", [BORDER])  # the one token that follows and
        self._to = array("i", [0])  # the state that it leads to, 0 where none does;
        self._branches: dict[int, dict[int, int]] = {0: {}}  # or, of a state that several follow, all of them
        self._last = 0  # the state of the whole text
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        link, length = self._link, self._length
        new = self._state(0, len(self.tokens), len(self.tokens) + 1)
        self.tokens.append(token)
        state, self._last = self._last, new
        while not (target := self._after(state, token)):
            self._lead(state, token, new)
            if state == 0:
                break
            state = link[state]
        else:
            if length[target] > length[state] + 1:  # only its shorter substrings end here as well
                target = self._split(state, token, target)
            link[new] = target
        if self._counted:
            self._tail = self.follow(self._tail, token, self._counted)
            for state in self.ends():
                self._count[state] += 1

    def _after(self, state: int, token: int) -> int:
        """The state that `token` leads to from a state; 0 if it does not follow, as nothing leads to the first."""
        if (following := self._branches.get(state)) is not None:
            return following.get(token, 0)
        return self._to[state] if self._token[state] == token else 0

    def _lead(self, state: int, token: int, to: int) -> None:
        if (following := self._branches.get(state)) is not None:
            following[token] = to
        elif self._to[state] and self._token[state] != token:
            self._branches[state] = {self._token[state]: self._to[state], token: to}
        else:
            self._token[state], self._to[state] = token, to

    def _split(self, state: int, token: int, longer: int) -> int:
        """Moves what `token` makes of the substrings of `state` out of a state with longer ones to a new state."""
        link = self._link
        shorter = self._state(link[longer], self._end[longer], self._length[state] + 1)
        if (following := self._branches.get(longer)) is not None:
            self._branches[shorter] = dict(following)
        self._token[shorter], self._to[shorter] = self._token[longer], self._to[longer]
        self._count[shorter] = self._count[longer]
        link[longer] = shorter
        while self._after(state, token) == longer:
            self._lead(state, token, shorter)
            state = link[state]
        return shorter

    def _state(self, link: int, end: int, length: int) -> int:
        self._link.append(link)
        self._end.append(end)
        self._length.append(length)
        self._count.append(0)
        self._token.append(BORDER)
        self._to.append(0)
        return len(self._link) - 1

    def follow(self, match: Match, token: int, limit: int | None = None) -> Match:
        """The longest suffix of `match` + `token` that the text holds, cut to its last `limit` tokens."""
        link, lengths = self._link, self._length
        state, length = match
        while state and length <= lengths[link[state]]:  # the text grew, and the match's substring moved
            state = link[state]
        while not (after := self._after(state, token)):
            if state == 0:
                return START
            state = link[state]
            length = lengths[state]
        state, length = after, length + 1
        if limit is not None and length > limit:
            length = limit
            if length <= lengths[link[state]]:
                state = link[state]
        return Match(state, length)

    def end(self, match: Match) -> int:
        """The first place in the text at which the match ends."""
        return self._end[match.state]

    def count(self, state: int) -> int:
        """How often a state's substrings stand in the text: exact for those of up to `counted` tokens."""
        return self._count[state]

    def following(self, state: int) -> Mapping[int, int]:
        """The state of the substring with one more token, for each token that follows one of this state."""
        if (following := self._branches.get(state)) is not None:
            return following
        return {self._token[state]: self._to[state]} if self._to[state] else {}

    def ends(self) -> Iterator[int]:
        """The states of the text's ends, up to that of `counted` tokens, longest first."""
        state = self._tail.state
        while state:
            yield state
            state = self._link[state]
