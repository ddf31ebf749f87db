"""What the loop promises to a drafter, to the cache and to whoever reads the events."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from decodelab.attention.cache import DenseCache
from decodelab.attention.rows import chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.acceptance.rule import children
from decodelab.decoding.draft import EMPTY, Draft, Gives, Needs, Opened, Room, Seen, chain
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.noise import Noise
from decodelab.errors import UserError
from decodelab.testing import tiny_decoder
from decodelab.tests.rigged import PROMPTS, Answers, Plan, Rigged, State, ask, oracle, thicket

RULE = Greedy()
N = 20


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def answers(decoder: Decoder) -> Answers:
    plain = reference.generate(decoder, [ask(p, RULE, N) for p in PROMPTS], RULE.law())
    return {tuple(p): g.tokens for p, g in zip(PROMPTS, plain, strict=True)}


def run(
    decoder: Decoder, drafter: Any, tokens: int = N, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> Any:
    return loop.generate(decoder, [ask(p, RULE, tokens) for p in prompts], drafter, RULE, **options)


def told(drafter: Rigged, sequence: int) -> list[tuple[Draft, Seen]]:
    """Draft and report of each step of one sequence."""
    drafts = [x for kind, s, *x in drafter.log if s == sequence and kind == "draft"]
    reports = [x for kind, s, *x in drafter.log if s == sequence and kind == "seen"]
    steps = [r for (r,) in reports if not r.prefill]
    return [(draft, report) for (draft,), report in zip(drafts, steps, strict=False)]


def logits_after(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    cache = decoder.open_cache(1, len(tokens))
    return decoder(chains([list(tokens)], [cache.open()]), cache).logits[-1]


def sequences(drafter: Rigged) -> dict[int, int]:
    """The cache's sequence of each prompt, in the order in which they were opened."""
    return dict(enumerate(dict.fromkeys(s for kind, s, *_ in drafter.log if kind == "seen")))


@pytest.mark.parametrize("seed", [0, 1])
def test_reports_add_up_to_the_text(decoder: Decoder, answers: Answers, seed: int) -> None:
    """Positions, tokens and own paths. (That each report continues the last is asserted by the drafter itself.)"""
    drafter = Rigged(thicket(answers, seed))
    out = run(decoder, drafter)
    for i, sequence in sequences(drafter).items():
        text = [*PROMPTS[i], *out[i].tokens]
        at = 1
        for kind, s, *what in drafter.log:
            if kind == "seen" and s == sequence:
                assert what[0].position == at
                assert list(what[0].tokens) == text[at : at + len(what[0].tokens)]
                at += len(what[0].tokens)
        assert at == len(text)
        for draft, seen in told(drafter, sequence):
            kept = [draft.tokens[row] for row in seen.own_path]
            assert kept == list(seen.tokens[: len(kept)])
            assert [-1, *seen.own_path[:-1]] == [draft.parents[row] for row in seen.own_path] or not seen.own_path
            assert len(seen.tokens) - len(kept) in (0, 1)


def test_argmax_and_top_k_are_of_the_drafters_own_rows(decoder: Decoder, answers: Answers) -> None:
    drafter = Rigged(thicket(answers, 3), needs=Needs(argmax=True, topk=3))
    run(decoder, drafter)
    for i, sequence in sequences(drafter).items():
        first = next(x[0] for kind, s, *x in drafter.log if s == sequence and kind == "seen")
        want = logits_after(decoder, PROMPTS[i])
        assert first.argmax == (int(want.argmax()),)
        assert first.topk == (tuple(want.topk(3).indices.tolist()),)
        text = [*PROMPTS[i], first.tokens[-1]]
        for draft, seen in told(drafter, sequence):
            paths = [text]
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                paths.append([*paths[parent + 1], token])
            want = torch.stack([logits_after(decoder, path) for path in paths])
            assert seen.argmax == tuple(want.argmax(-1).tolist())
            assert seen.topk == tuple(map(tuple, want.topk(3).indices.tolist()))
            text = [*text, *seen.tokens]


def test_hidden_states_are_of_own_rows_and_of_committed_rows(decoder: Decoder, answers: Answers) -> None:
    """Each committed row's final state predicts the token that follows it, the last one the last emitted."""
    drafter = Rigged(thicket(answers, 4), needs=Needs(taps=(1, "final"), argmax=True))
    run(decoder, drafter)
    rows = 0
    for sequence in sequences(drafter).values():
        for draft, seen in told(drafter, sequence):
            assert seen.hidden is not None
            assert seen.committed is not None
            assert set(seen.hidden) == set(seen.committed) == {1, "final"}
            assert seen.hidden[1].shape == (1 + len(draft), 32)
            assert decoder.unembedding(seen.hidden["final"]).argmax(-1).tolist() == list(seen.argmax or ())
            assert decoder.unembedding(seen.committed["final"]).argmax(-1).tolist() == list(seen.tokens)
            kept = [0, *(1 + row for row in seen.own_path)][: len(seen.tokens)]
            assert torch.equal(seen.committed[1], seen.hidden[1][kept])
            rows += len(seen.tokens)
    assert rows >= 3 * (N - 2)  # the last step may have no room and no draft


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [4, 100])
def test_the_prompt_is_reported_chunk_by_chunk(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, size: int, whole: bool
) -> None:
    monkeypatch.setattr(loop, "PREFILL_CHUNK", size)
    drafter = Rigged(lambda *_: EMPTY, needs=Needs(taps=(1, "final"), prefill_hidden=whole, argmax=True))
    prompt = PROMPTS[1]
    (out,) = run(decoder, drafter, tokens=1, prompts=[prompt])
    reports = [x[0] for kind, _, *x in drafter.log if kind == "seen"]
    starts = list(range(0, 9, size))
    assert [r.position for r in reports] == [at + 1 for at in starts]
    assert [r.prefill for r in reports] == [True] * len(starts)
    assert [t for r in reports for t in r.tokens] == [*prompt[1:], out.tokens[0]]
    cache = decoder.open_cache(1, 9)
    want = decoder(chains([prompt], [cache.open()]), cache, taps=(1, "final")).hidden
    for at, report in zip(starts, reports, strict=True):
        last = at == starts[-1]
        assert (report.argmax is not None) == last
        assert (report.hidden is not None) == last
        if whole:
            for tap in (1, "final"):
                torch.testing.assert_close(report.committed[tap], want[tap][at : at + size], rtol=0, atol=1e-11)
        else:
            assert report.committed is None
    assert decoder.unembedding(reports[-1].hidden["final"]).argmax(-1).tolist() == [out.tokens[0]]


def test_what_a_drafter_did_not_ask_for_it_is_not_given(decoder: Decoder, answers: Answers) -> None:
    drafter = Rigged(oracle(answers))
    run(decoder, drafter, tokens=6)
    for kind, _, *what in drafter.log:
        if kind == "seen":
            assert (what[0].argmax, what[0].topk, what[0].hidden, what[0].committed) == (None,) * 4


def test_what_a_drafter_is_opened_with(decoder: Decoder) -> None:
    """No answer, no gold: the prompt, the documents, how many tokens may come, and where the target keeps it."""
    given: list[Opened] = []

    @dataclass(frozen=True, slots=True)
    class Curious:
        sources: ClassVar[tuple[str, ...]] = ("curious",)
        needs: ClassVar[Needs] = Needs()
        gives: ClassVar[Gives] = Gives("chain", 0, 0)

        def start(self, requests: Sequence[Opened]) -> list[None]:
            given.extend(requests)
            return [None] * len(requests)

        def propose(self, states: Sequence[None], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
            raise AssertionError("there is no room")

        def observe(self, states: Sequence[None], seen: Sequence[Seen]) -> list[None]:
            return list(states)

        def finish(self, state: None) -> None:
            given.pop()

    asked = [ask(p, RULE, 50, context=20, documents=[[5, 6], [7]]) for p in PROMPTS[:2]]
    steps = loop.decode(decoder, asked, Curious(), RULE)
    next(steps)
    assert [(o.prompt, o.documents, o.max_new_tokens) for o in given] == [
        (tuple(PROMPTS[0]), ((5, 6), (7,)), 17),
        (tuple(PROMPTS[1]), ((5, 6), (7,)), 11),
    ]
    assert [o.cache.length(o.sequence) for o in given] == [3, 9]
    assert given[0].cache is given[1].cache
    assert given[0].processors is asked[0].processors
    for _ in steps:
        pass
    assert not given  # finished, though its states are None


@pytest.fixture
def opened(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[DenseCache]:
    caches: list[DenseCache] = []

    def open_cache(self: Decoder, sequences: int, capacity: int, pages: None) -> DenseCache:
        caches.append(original(self, sequences, capacity))
        return caches[-1]

    original = Decoder.open_cache
    monkeypatch.setattr(Decoder, "open_cache", open_cache)
    return caches


def test_the_cache_holds_prompt_and_output_less_the_last(
    decoder: Decoder, answers: Answers, opened: list[DenseCache]
) -> None:
    """After every commit, for every sequence; and nothing stays staged, whatever was drafted and rejected."""
    for plan in (oracle(answers, (6,)), oracle(answers, (4, 0)), thicket(answers, 5)):
        drafter = Rigged(plan, needs=Needs(taps=(1,)))
        # the second ends by length, the others by an EOS inside what is drafted
        ends: list[tuple[int, ...]] = [(answers[tuple(PROMPTS[0])][12],), (), (answers[tuple(PROMPTS[2])][7],)]
        requests = [ask(p, RULE, n, eos_ids=e) for p, n, e in zip(PROMPTS, (20, 9, 14), ends, strict=True)]
        for out in loop.decode(decoder, requests, drafter, RULE):
            cache = opened[-1]
            assert cache.staged == 0
            for i, sequence in sequences(drafter).items():
                if sequence in cache._book._length:
                    assert cache.length(sequence) == len(PROMPTS[i]) + len(out[i].tokens) - 1
                    text = [*PROMPTS[i], *out[i].tokens]
                    reports = [x[0] for kind, s, *x in drafter.log if kind == "seen" and s == sequence]
                    assert sum(len(r.tokens) for r in reports) == len(text) - 1
                    assert reports[-1].committed is None or len(reports[-1].committed[1]) == len(reports[-1].tokens)
        assert not cache._book._length  # all were freed


def test_the_cached_keys_are_those_of_the_text(decoder: Decoder, answers: Answers, opened: list[DenseCache]) -> None:
    """Keys and values after random forests equal those of the accepted text read at once."""
    steps = loop.decode(decoder, [ask(PROMPTS[1], RULE, N)], Rigged(thicket(answers, 6)), RULE)
    for out in steps:
        text = [*PROMPTS[1], *out[0].tokens][:-1]
        cache = opened[0]
        if not cache._book._length:
            break
        fresh = DenseCache(cache.layout, sequences=1, capacity=64, dtype=torch.float64, device="cpu")
        decoder(chains([text], [fresh.open()]), fresh)
        for layer in range(2):
            for mine, theirs in ((cache._k, fresh._k), (cache._v, fresh._v)):
                torch.testing.assert_close(
                    mine[layer][0, :, : len(text)], theirs[layer][0, :, : len(text)], rtol=0, atol=1e-11
                )


def test_a_drafter_may_stage_rows_in_the_targets_cache(decoder: Decoder, answers: Answers) -> None:
    """As a layer-skipping drafter does: rows of its own behind the prefix, dropped before it returns."""
    caches: list[DenseCache] = []

    @dataclass(frozen=True, slots=True)
    class Skipping:
        sources: ClassVar[tuple[str, ...]] = ("skipping",)
        needs: ClassVar[Needs] = Needs(target_cache=True)
        gives: ClassVar[Gives] = Gives("chain", 3, 3)

        def start(self, requests: Sequence[Opened]) -> list[Any]:
            caches.append(requests[0].cache)
            return [[*r.prompt, r.sequence] for r in requests]

        def propose(self, states: Sequence[Any], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
            cache, drafts = caches[0], []
            for state, r in zip(states, room, strict=True):
                tokens: list[int] = []
                token = state[-2]
                while len(tokens) < r.chain:
                    at = len(tokens) - 1
                    rows = chains([[token]], [state[-1]], last=[at], first=cache.staged)
                    token = int(decoder(rows, cache, layers=[0]).logits[0].argmax())
                    tokens.append(token)
                cache.drop()
                drafts.append(chain(tokens))
            return drafts

        def observe(self, states: Sequence[Any], seen: Sequence[Seen]) -> list[Any]:
            for state, news in zip(states, seen, strict=True):
                state[-1:-1] = news.tokens[len(state) - 1 - news.position :]
            return list(states)

        def finish(self, state: Any) -> None: ...

    out = run(decoder, Skipping())
    assert [g.tokens for g in out] == [list(answers[tuple(p)]) for p in PROMPTS]
    assert sum(s.drafted for g in out for s in g.steps) > 50


def finished(drafter: Rigged) -> list[int]:
    return sorted(s for kind, s, *_ in drafter.log if kind == "finish")


def test_finish_is_called_once_at_the_end(decoder: Decoder, answers: Answers) -> None:
    drafter = Rigged(oracle(answers))
    requests = [ask(p, RULE, n) for p, n in zip(PROMPTS, (1, 5, 20), strict=True)]
    loop.generate(decoder, requests, drafter, RULE)
    assert finished(drafter) == [0, 1, 2]


@pytest.mark.parametrize("after", [1, 2, 4])
def test_finish_is_called_once_when_nobody_listens_any_more(decoder: Decoder, answers: Answers, after: int) -> None:
    """The generator is closed after the first token, in the middle, and when one sequence is already done."""
    drafter = Rigged(oracle(answers, (1,)))
    requests = [ask(p, RULE, n) for p, n in zip(PROMPTS, (3, 20, 20), strict=True)]
    steps = loop.decode(decoder, requests, drafter, RULE)
    for _ in range(after):
        out = next(steps)
    steps.close()
    assert finished(drafter) == [0, 1, 2]
    assert all(g.prefill is not None for g in out)  # what was measured is filled in all the same
    assert all(s.verify_s > 0 for g in out for s in g.steps)


class PlannedError(RuntimeError): ...


def fails(at: int) -> Plan:
    def plan(state: State, room: Room, noise: Noise) -> Draft:
        if state.step == at:
            raise PlannedError
        return EMPTY

    return plan


@pytest.mark.parametrize("at", [0, 3])
def test_finish_is_called_once_when_a_drafter_fails(decoder: Decoder, at: int) -> None:
    drafter = Rigged(fails(at))
    with pytest.raises(PlannedError):
        run(decoder, drafter)
    assert finished(drafter) == [0, 1, 2]


@pytest.mark.parametrize("forward", [1, 2, 5])
def test_finish_is_called_once_when_the_target_fails(
    decoder: Decoder, answers: Answers, monkeypatch: pytest.MonkeyPatch, forward: int
) -> None:
    """In the second prompt's prefill, in the third's, in a verification."""
    drafter, calls = Rigged(oracle(answers)), 0
    original = Decoder.forward

    def failing(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > forward:
            raise PlannedError
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", failing)
    with pytest.raises(PlannedError):
        run(decoder, drafter)
    assert finished(drafter) == [0, 1, 2]


def too_many(state: State, room: Room, noise: Noise) -> Draft:
    return chain([5] * (room.chain + 1))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (too_many, "rigged drafted 7 rows of depth 7, but there is room for 12 of depth 6; keep to the room that"),
        (lambda *_: chain([5, 61]), "rigged drafted token id 61, but the target's vocabulary is 0 to 60"),
        (lambda *_: chain([-1, 5]), "rigged drafted token id -1, but the target's vocabulary is 0 to 60"),
        (
            lambda *_: Draft((5,) * 13, (-1,) * 13, None, (-1,) * 13, (True,) * 13, (0,) * 13),
            "rigged drafted 13 rows of depth 1, but there is room for 12",
        ),
    ],
)
def test_a_drafter_that_errs_is_told_so_in_one_line(decoder: Decoder, plan: Plan, message: str) -> None:
    drafter = Rigged(plan)
    with pytest.raises(UserError, match=message) as caught:
        run(decoder, drafter)
    assert "\n" not in str(caught.value)
    assert finished(drafter) == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "found", "message"),
    [
        ("start", None, "rigged: start returned a NoneType for 3 sequences; it returns a list with one for each"),
        ("propose", [], "rigged: propose returned 0 things for 3 sequences; it returns a list with one for each"),
        ("propose", [[5]] * 3, "rigged proposed a list; propose returns a Draft for each state"),
    ],
)
def test_a_method_that_returns_something_else_is_named(
    decoder: Decoder, method: str, found: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Rigged(lambda *_: chain([5]))
    monkeypatch.setattr(Rigged, method, lambda *_: found)
    with pytest.raises(UserError, match=message):
        run(decoder, drafter)


def test_room_at_the_end_of_a_text(decoder: Decoder) -> None:
    """A step emits one token more than it accepts: depth is one less than what is left. At 0 nobody is asked."""
    rooms: list[Room] = []

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        rooms.append(room)
        return EMPTY

    out = run(decoder, Rigged(plan), tokens=9, prompts=PROMPTS[:1])
    assert [r.depth for r in rooms] == [6, 6, 5, 4, 3, 2, 1]
    assert [r.rows for r in rooms] == [12] * 7
    assert len(out[0].steps) == 8
    rooms.clear()
    run(decoder, Rigged(plan), tokens=4, prompts=PROMPTS[:1], budget=2)
    assert rooms == [Room(2, 2), Room(1, 2)]
    rooms.clear()
    run(decoder, Rigged(plan), tokens=4, budget=0)
    assert not rooms


def test_a_step_without_propose_is_observed_too(decoder: Decoder) -> None:
    drafter = Rigged(lambda *_: EMPTY)
    run(decoder, drafter, tokens=5, budget=0, prompts=PROMPTS[:1])
    assert [kind for kind, *_ in drafter.log] == ["seen"] * 5 + ["finish"]


def test_events_count_what_happened(decoder: Decoder, answers: Answers) -> None:
    """llama.cpp#3919, EAGLE#132: drafted, verified, deepest path, accepted and emitted, each under its own name."""
    drafter = Rigged(thicket(answers, 7))
    out = run(decoder, drafter)
    for i, sequence in sequences(drafter).items():
        steps = out[i].steps
        assert 1 + sum(s.emitted for s in steps) == len(out[i].tokens) == N
        assert [s.step for s in steps] == list(range(len(steps)))
        for step, (draft, seen) in zip(steps, told(drafter, sequence), strict=False):
            assert step.drafted == sum(draft.judged)
            assert step.verified == 1 + len(draft)
            assert step.depth == draft.depth
            assert step.accepted == len(seen.own_path) == len(step.sources)
            assert step.emitted == len(seen.tokens)
            siblings = [children(draft).get(row, []) for row in (-1, *seen.own_path)]
            assert tuple(some[rank] for some, rank in zip(siblings, step.ranks, strict=False)) == seen.own_path
            assert step.offered == (tuple(map(len, siblings))[: step.emitted] if len(draft) else ())
            assert step.request == i
            assert step.kv_bytes > 0
            assert step.total_s > 0
        assert [n for _, n in out[i].delivered] == [1, *(s.emitted for s in steps)]
        assert out[i].prompt_tokens == len(PROMPTS[i])


def test_a_token_is_credited_to_the_first_that_offered_it(decoder: Decoder, answers: Answers) -> None:
    prompt = PROMPTS[0]
    right = list(answers[tuple(prompt)])

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        a, b = right[state.emitted : state.emitted + 2] if room.depth > 1 else (60, 60)
        wrong = (a + 1) % 61
        # c: wrong; a: a ─ b; b: a; a: a; c: a; d: a, but not as a candidate
        judged = (True,) * 6 + (False,)
        return Draft(
            (wrong, a, b, a, a, a, a), (-1, -1, 1, -1, -1, -1, -1), None, (-1,) * 7, judged, (2, 0, 0, 1, 0, 2, 3)
        )

    drafter = Rigged(plan, sources=("a", "b", "c", "d"))
    (out,) = run(decoder, drafter, tokens=4, prompts=[prompt])
    assert out.steps[0].sources == ("a", "a")
    assert out.steps[0].also_proposed == (("b", "c"), ())
    assert (out.steps[0].ranks, out.steps[0].offered) == ((1, 0), (5, 1, 0))  # d's is no candidate


def test_propose_is_asked_for_the_live_sequences_alone(decoder: Decoder) -> None:
    sizes: list[int] = []

    def plan(state: State, room: Room, noise: Noise) -> Draft:
        sizes.append(state.sequence)
        return EMPTY

    requests = [ask(p, RULE, n) for p, n in zip(PROMPTS, (3, 8, 5), strict=True)]
    loop.generate(decoder, requests, Rigged(plan), RULE)
    assert [sizes.count(s) for s in (0, 1, 2)] == [1, 6, 3]
