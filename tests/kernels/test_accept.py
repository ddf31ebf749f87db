"""The walk on the device against the rules' own, and its noise against theirs."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from decodelab.decoding import noise
from decodelab.decoding.acceptance import Sampling
from decodelab.decoding.draft import Draft
from decodelab.decoding.law import Law, LawSettings, Processors
from decodelab.decoding.noise import Noise
from decodelab.kernels.accept import Drawn, _op, accept, accept_reference, gumbels

pytest.importorskip("triton", reason="kernels are interpreted by triton")


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def test_noise_is_the_program_s() -> None:
    keys = [noise.mix(i) for i in range(4)]
    for key, mine in zip(keys, gumbels(torch.tensor(list(map(signed, keys))), 50), strict=True):
        assert torch.equal(mine, noise.gumbels(key, torch.arange(50)))


def forest(rng: torch.Generator, sizes: list[int], vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores, tokens, parents, starts): half of the rows say what row follows, so that paths are kept."""
    T = sum(sizes)
    scores = torch.randn(T, vocab, generator=rng)
    tokens = torch.randint(0, vocab, (T,), generator=rng)
    starts = torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    parents = torch.full((T,), -1)
    for first, size in zip(starts.tolist(), sizes, strict=False):
        for i in range(1, size):
            parents[first + i] = int(torch.randint(0, i, (1,), generator=rng))
            if torch.rand(1, generator=rng) < 0.6:
                scores[first + int(parents[first + i]), tokens[first + i]] = 50
    return scores, tokens, parents, starts


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("vocab", [7, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paths_of_many_trees(vocab: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    scores, tokens, parents, starts = forest(rng, [1, 6, 4, 8], vocab)
    keys = torch.randint(-(1 << 62), 1 << 62, (19,), generator=rng)
    scores = scores.to(dtype)
    for noisy in (None, keys):
        want = accept_reference(scores, tokens, parents, starts, noisy, 9)
        assert want[1].max() > 2  # something is kept
        same(accept(scores, tokens, parents, starts, 9, noisy), want)
    same(accept(scores.double(), tokens, parents, starts, 9, keys), want)  # torch's own


def test_a_path_by_hand() -> None:
    """Children 1 and 2 of the root, 3 of 1, 4 of 2: the root says 2's token, and 2 says 4's; of twins the first."""
    tokens, parents = torch.tensor([9, 3, 4, 4, 1]), torch.tensor([-1, 0, 0, 0, 2])
    scores = torch.zeros(5, 10)
    for row, said in enumerate([4, 7, 1, 7, 5]):
        scores[row, said] = 1
    path, count, following = accept(scores, tokens, parents, torch.tensor([0, 5]).int(), 6)
    assert path.tolist() == [[0, 2, 4, -1, -1, -1]]
    assert count.tolist() == [3]
    assert following.tolist() == [5]


def test_ties_nan_and_nothing_but_minus_infinity() -> None:
    """Of equal scores the lowest token, over slices too; NaN is never chosen."""
    scores = torch.full((3, 4200), -torch.inf)
    scores[0, [4100, 70]] = 2.0
    scores[1, 5], scores[1, 9] = torch.nan, -3.0
    one = torch.tensor([0, 0, 0])
    for wide in (scores, scores.double()):
        _, _, following = accept(wide, one, one - 1, torch.tensor([0, 1, 2, 3]).int(), 1)
        assert following.tolist() == [70, 9, 0]


def test_sampling_keeps_what_plain_sampling_would_have_drawn(rng: torch.Generator) -> None:
    log_p = torch.log_softmax(torch.randn(3, 6, generator=rng), -1)
    for seed in range(20):
        mine = [noise.Noise(seed, 0, i).target() for i in range(3)]
        drawn = [int((log_p[i].double() + noise.gumbels(mine[i], torch.arange(6))).argmax()) for i in range(3)]
        keys = torch.tensor(list(map(signed, mine)))
        tokens = torch.tensor([0, drawn[0], drawn[1]])
        path, _, following = accept(log_p, tokens, torch.tensor([-1, 0, 1]), torch.tensor([0, 3]).int(), 3, keys)
        assert path.tolist() == [[0, 1, 2]]
        assert following.tolist() == [drawn[2]]


def drafts(rng: torch.Generator, sizes: list[int], vocab: int) -> tuple[list[Draft], Tensor]:
    """Trees whose siblings were drawn, with and without replacement, beside one-hot ones, and rows that are no
    candidates; and the logits behind their rows."""
    out = []
    for size in sizes:
        q = torch.softmax(torch.randn(4, vocab, generator=rng), -1)
        q[1] = q[0].index_fill(0, q[0].argmax(), 0)
        q[1] /= q[1].sum()  # of a second sibling, once the first was taken out
        parents = [int(torch.randint(max(-1, i - 3), i, (1,), generator=rng)) for i in range(size)]
        judged = [True] * size
        for i, parent in enumerate(parents):
            judged[i] = bool(torch.rand(1, generator=rng) < 0.9) and (parent < 0 or judged[parent])
        of = [int(torch.randint(-1, 4, (1,), generator=rng)) for _ in range(size)]
        tokens = [
            int(torch.multinomial(q[row], 1, generator=rng))
            if row >= 0
            else int(torch.randint(vocab, (1,), generator=rng))
            for row in of
        ]
        out.append(Draft(tuple(tokens), tuple(parents), q, tuple(of), tuple(judged), (0,) * size))
    return out, torch.randn(sum(sizes) + len(sizes), vocab, generator=rng) * 0.3


def fed(some: list[Draft], logits: Tensor, noises: list[Noise]) -> tuple[Any, ...]:
    """The arguments of `accept` for drafts judged with these noises."""
    tokens, parents, keys, rows, chances, starts = [], [], [], [], [], [0]
    for number, (draft, noise_of) in enumerate(zip(some, noises, strict=True)):
        depths, ranks = [0, *draft.depths], {}
        tokens += [0, *(token if ok else -1 for token, ok in zip(draft.tokens, draft.judged, strict=True))]
        parents += [-1, *(parent + 1 for parent in draft.parents)]
        keys += [signed(noise_of.target(depth)) for depth in depths]
        rows.append(-1)
        chances.append(0.5)
        for parent, depth, of, ok in zip(draft.parents, draft.depths, draft.q_row, draft.judged, strict=True):
            drawn = of >= 0 and ok
            rank = ranks[parent] = ranks.get(parent, -1) + drawn
            rows.append(4 * number + of if drawn else -1)
            chances.append(noise_of.accept(depth - 1, rank) if drawn else 0.5)
        starts.append(len(tokens))
    most = max(Counter(p for p, of in zip(parents, rows, strict=True) if of >= 0).values(), default=0)
    laws = Drawn(torch.cat([d.q for d in some]), torch.tensor(rows), torch.tensor(chances).double(), most)
    of_all = (torch.tensor(tokens), torch.tensor(parents), torch.tensor(starts).int(), 9, torch.tensor(keys))
    return torch.log_softmax(logits, -1), *of_all, laws


@pytest.mark.parametrize(("vocab", "sizes", "seeds"), [(6, [5, 0, 7], 30), (4100, [5], 1)])
def test_drawn_candidates_are_judged_as_the_rule_does(
    vocab: int, sizes: list[int], seeds: int, rng: torch.Generator
) -> None:
    """Siblings by rejection, one after the other, then one-hot ones by what is left; the same noise, the same path."""
    some, logits = drafts(rng, sizes, vocab)
    law, lengths = Processors.build(LawSettings(sample=True), 1, ()), Counter[int]()
    for seed in range(seeds):
        noises = [Noise(seed, number, 5) for number in range(len(some))]
        scores, *given = fed(some, logits, noises)
        path, count, following = want = accept(scores.double(), *given)  # the definition
        if seed < 3:
            same(accept(scores, *given), want)
        first = 0
        for number, (draft, of) in enumerate(zip(some, noises, strict=True)):
            mine = logits[first : first + 1 + len(draft)]
            first += len(mine)
            verdict = Sampling().judge(draft, Law(law, mine, [0], draft.tokens, draft.parents), of)
            assert path[number, : count[number]].tolist() == [0, *(row + 1 for row in verdict.path)], (seed, number)
            assert following[number] == verdict.next
            lengths[len(verdict.path)] += 1
    assert seeds == 1 or len(lengths) > 2


def drawn_of(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor]:
    return drawn.q, drawn.rows, drawn.uniforms


def test_a_rejection_by_hand() -> None:
    """p = (½, ¼, ¼). x = 0 with q = (¾, ¼, 0) is kept if ¾ u < ½; else p becomes (0, 0, 1)."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]] * 3).log(), torch.tensor([[0.75, 0.25, 0], [0.5, 0.25, 0.25]])
    tokens, parents, keys = torch.tensor([0, 0, 2]), torch.tensor([-1, 0, 0]), torch.tensor([3, 4, 5])
    starts = torch.tensor([0, 3]).int()

    def judged(u: float, rows: list[int], siblings: int = 1) -> list[int]:
        chances = torch.tensor([0.5, u, 0.99]).double()
        drawn = Drawn(q, torch.tensor(rows), chances, siblings)
        got, want = (accept(of, tokens, parents, starts, 3, keys, drawn) for of in (p, p.double()))
        same(got, want)
        return got[0][0, : got[1][0]].tolist()

    assert judged(0.66, [-1, 0, -1]) == [0, 1]
    assert judged(0.67, [-1, 0, -1]) == [0, 2]  # token 2 is all that is left, and its one-hot candidate is kept
    assert judged(0.67, [-1, 0, 1], 2) == [0, 2]  # as is a drawn one: 0.99 · ¼ < 1
    tokens = torch.tensor([0, 2, 0])
    assert judged(0.5, [-1, -1, 0]) == [0, 1]  # ¾ · 0.99 > ½: token 2 again
    q = torch.tensor([[0.5, 0.5, 0]])
    assert judged(0.5, [-1, -1, 0]) == [0, 2]  # a drawn one is asked before a one-hot one that stands before it
    p, q = torch.tensor([[-torch.inf, -torch.inf, 0.0]] * 3), torch.tensor([[0.0, 0, 1]])
    tokens = torch.tensor([0, 2, 2])
    assert judged(1.0, [-1, 0, -1]) == [0, 2]  # as if by rounding: nothing is left of p, which stays


def test_drawn_candidates_keep_the_law(rng: torch.Generator) -> None:
    """What follows the root, over many draws of two siblings and their noise, has the law p."""
    n, p = 20000, torch.tensor([0.1, 0.5, 0.3, 0.1])
    q = torch.tensor([0.6, 0.1, 0.2, 0.1])
    first = torch.multinomial(q.expand(n, 4), 1, generator=rng)[:, 0]
    left = torch.nn.functional.one_hot(first, 4).logical_not() * q
    second = torch.multinomial(left, 1, generator=rng)[:, 0]
    tokens = torch.stack([torch.zeros_like(first), first, second], 1).flatten()
    rows = torch.stack([torch.full((n,), -1), torch.zeros(n).long(), 1 + first], 1).flatten()
    after = (1 - torch.eye(4)) * q
    laws = torch.cat([q[None], after / after.sum(1, keepdim=True)])
    drawn = Drawn(laws, rows, torch.rand(3 * n, generator=rng, dtype=torch.float64), 2)
    keys = torch.randint(-(1 << 62), 1 << 62, (3 * n,), generator=rng)
    given = (p.log().expand(3 * n, -1).double(), tokens, torch.tensor([-1, 0, 0]).repeat(n))
    path, count, following = accept(*given, (torch.arange(n + 1) * 3).int(), 3, keys, drawn)  # float64: the definition
    behind = torch.stack([torch.zeros_like(first), first, second], 1)
    emitted = torch.where(count > 1, behind[torch.arange(n), path[:, 1].clamp_min(0)], following)
    assert (torch.bincount(emitted, minlength=4) / n - p).abs().max() < 0.012


def test_it_is_an_op_for_torch_compile(rng: torch.Generator) -> None:
    scores, tokens, parents, starts = forest(rng, [2, 3], 11)
    torch.library.opcheck(_op, (scores, tokens, parents, starts, 4, None))
    torch.library.opcheck(_op, (scores, tokens, parents, starts, 4, tokens))
    some, logits = drafts(rng, [3, 2], 11)
    *given, drawn = fed(some, logits, [Noise(0, 0, 0)] * 2)
    torch.library.opcheck(_op, (*given, *drawn_of(drawn), drawn.siblings))
