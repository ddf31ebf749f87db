"""The suites catch what they are for: drafters that break one promise each."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from decodelab import testing
from decodelab.decoding.draft import Draft, Gives, Needs, chain


@dataclass
class _State:
    text: list[int]
    drafted: tuple[int, ...] = ()


@dataclass
class Repeater:
    """Proposes what followed the last token where it stood last. `fault` names the promise that it breaks."""

    fault: str = ""
    kept: list[int] = field(default_factory=list)

    sources: ClassVar[tuple[str, ...]] = ("repeater",)
    needs: ClassVar[Needs] = Needs()
    gives: ClassVar[Gives] = Gives("chain", rows=4, depth=4)

    def start(self, requests):
        if self.fault == "remembers other requests":
            return [_State(self.kept + list(r.prompt)) for r in requests]
        if self.fault == "one state for all":
            state = _State(list(requests[0].prompt))
            return [state] * len(requests)
        return [_State(list(r.prompt)) for r in requests]

    def propose(self, states, room, noise):
        drafts = []
        for state, r in zip(states, room, strict=True):
            text, rows = state.text, 4 if self.fault == "ignores its room" else r.chain
            at = len(text) - 2
            while at >= 0 and text[at] != text[-1]:
                at -= 1
            tokens = tuple(text[at + 1 :][:rows]) if at >= 0 else (text[0],) * min(rows, 1)
            state.drafted = tokens
            drafts.append(self._draft(tokens))
        return drafts

    def _draft(self, tokens):
        K = len(tokens)
        if self.fault == "a tree":
            return Draft(tokens, (-1,) * K, None, (-1,) * K, (True,) * K, (0,) * K)
        if self.fault == "an unknown source":
            return chain(tokens, source=1)
        if self.fault == "a q that was not promised" and K:
            return chain(tokens, torch.nn.functional.one_hot(torch.tensor(tokens), 61).double())
        return chain(tokens)

    def observe(self, states, seen):
        for state, news in zip(states, seen, strict=True):
            tokens = news.tokens[len(state.text) - news.position :] if news.prefill else news.tokens
            if self.fault == "counts on its own acceptance" and not news.prefill:
                tokens = (*state.drafted[: len(news.own_path)], news.tokens[-1])
            if self.fault == "forgets steps without a draft" and not (news.prefill or state.drafted):
                tokens = ()
            state.text += tokens
            state.drafted = ()
            if self.fault == "remembers other requests":
                self.kept += tokens
        return list(states)

    def finish(self, state):
        pass


def test_a_sound_drafter_passes(capsys):
    testing.drafter_suite(Repeater)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"1 of {len(testing.DRAFTER_CHECKS)}: drafts keep to their room"
    assert last == "ok: Repeater keeps all of them"


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("ignores its room", testing.drafts_keep_to_their_room, "Repeater drafted 4 rows where there was room for 1"),
        ("a tree", testing.drafts_keep_to_their_room, "Repeater gives a chain and drafted a tree"),
        ("an unknown source", testing.drafts_keep_to_their_room, r"Repeater has 1 sources and named number \[1\]"),
        (
            "a q that was not promised",
            testing.drafts_keep_to_their_room,
            "Repeater gives one-hot candidates and drafted",
        ),
        ("counts on its own acceptance", testing.drafts_follow_from_the_text, "merged with a member that wins: behind"),
        ("forgets steps without a draft", testing.drafts_follow_from_the_text, "every other step: behind"),
        ("remembers other requests", testing.drafts_follow_from_the_text, "once more: behind"),
        ("one state for all", testing.drafts_follow_from_the_text, "beside other requests: behind"),
    ],
)
def test_a_broken_promise_is_found(fault, check, message):
    with pytest.raises(AssertionError, match=message):
        check(lambda: Repeater(fault))
    assert check in testing.DRAFTER_CHECKS


def test_an_object_that_is_no_drafter_is_named():
    with pytest.raises(AssertionError, match=r"object lacks a method of decodelab\.decoding\.draft\.Drafter"):
        testing.drafter_suite(object)
