"""Keyed noise: uniform, without a pattern between neighbours, and a function of its key."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from decodelab.decoding.law import perturbed
from decodelab.decoding.noise import Noise, gumbels, mix, uniforms
from decodelab.tests.enumeration import unchecked

# SplitMix64 from seed 1234567, as published with the generator's test programs
SPLITMIX = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
N = 40_000
LIKELY = 1e-4  # fixed seeds: a p-value below this is a pattern, not bad luck


def test_it_is_splitmix64() -> None:
    """Pinned: the same seed gives the same text in the next version and on another machine."""
    assert mix(1234567) == SPLITMIX[0]
    want = torch.tensor([((x >> 12) + 0.5) * 2.0**-52 for x in SPLITMIX], dtype=torch.float64)
    assert torch.equal(uniforms(1234567, torch.arange(1, 6)), want)


def undone(word: int, increment: int) -> int:
    """The id whose hash with key 0 is `word`: SplitMix64's finaliser backwards."""
    mask = (1 << 64) - 1

    def unshift(x: int, by: int) -> int:
        out = x
        for _ in range(64 // by):
            out = x ^ out >> by
        return out

    state = unshift(word, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    state = unshift(state, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    state = unshift(state, 30) * pow(increment, -1, 1 << 64) & mask
    return state - (1 << 64) if state >> 63 else state


def test_uniforms_lie_inside_0_and_1_at_both_ends() -> None:
    """vllm-ascend#13730: u = 0 would accept everything; u = 1 would make an infinite Gumbel."""
    ends = torch.tensor([undone(word, 0x9E3779B97F4A7C15) for word in (0, (1 << 64) - 1)])
    low, high = uniforms(0, ends).tolist()
    assert (low, high) == (2.0**-53, 1 - 2.0**-53)
    assert gumbels(0, ends).isfinite().all()


def even(bins: Tensor, count: int) -> bool:
    return bool(chisquare(torch.bincount(bins, minlength=count).numpy()).pvalue > LIKELY)


def test_uniforms_of_one_key_are_even_and_neighbours_unrelated() -> None:
    for key in (0, 1, 2**63, mix(3, 5)):
        u = uniforms(key, torch.arange(N))
        assert even((u * 64).long(), 64)
        assert even((u[:-1] * 16).long() * 16 + (u[1:] * 16).long(), 256)


STREAMS: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "positions": (lambda i: Noise(0, 0, i).target(), lambda i: Noise(0, 0, i + 1).target()),
    "seeds": (lambda i: Noise(i, 0, 0).target(), lambda i: Noise(i + 1, 0, 0).target()),
    "requests": (lambda i: Noise(0, i, 0).target(), lambda i: Noise(0, i + 1, 0).target()),
    "target and draft": (lambda i: Noise(0, 0, i).target(), lambda i: Noise(0, 0, i).draft()),
    "siblings": (lambda i: Noise(0, 0, i).draft(), lambda i: Noise(0, 0, i).draft(0, 1)),
    "seed and request": (lambda i: Noise(i, i + 1, 0).target(), lambda i: Noise(i + 1, i, 0).target()),
    "position and sibling": (lambda i: Noise(0, 0, i).draft(0, 1), lambda i: Noise(0, 0, i + 1).draft(0, 0)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_unrelated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    first, second = STREAMS[name]
    one = torch.tensor([7])
    a = torch.cat([uniforms(first(i), one) for i in range(4000)])
    b = torch.cat([uniforms(second(i), one) for i in range(4000)])
    assert even((a * 8).long() * 8 + (b * 8).long(), 64)


def test_accept_draws_are_even_and_unrelated_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One random number used twice, to draft and to accept, biases the law (design: by up to 0.05)."""
    unchecked(monkeypatch)
    one = torch.tensor([7])
    u = torch.tensor([Noise(1, 2, i).accept() for i in range(4000)], dtype=torch.float64)
    sibling = torch.tensor([Noise(1, 2, i).accept(0, 1) for i in range(4000)], dtype=torch.float64)
    assert u.min() > 0
    assert u.max() < 1
    assert even((u * 8).long() * 8 + (sibling * 8).long(), 64)
    for key in (Noise.target, Noise.draft):
        other = torch.cat([uniforms(key(Noise(1, 2, i)), one) for i in range(4000)])
        assert even((u * 8).long() * 8 + (other * 8).long(), 64)


def test_a_key_is_its_position_not_how_it_was_reached() -> None:
    """What makes a sampled text independent of drafts: offset 3 from position 2 is offset 0 from position 5."""
    assert Noise(1, 2, 2).target(3) == Noise(1, 2, 5).target()
    assert Noise(1, 2, 2).draft(3, 1) == Noise(1, 2, 5).draft(0, 1)
    assert Noise(1, 2, 2).accept(3, 1) == Noise(1, 2, 5).accept(0, 1)
    keys = {Noise(1, 2, 5).target(), Noise(1, 2, 5).draft(), Noise(2, 1, 5).target(), Noise(1, 2, 6).target()}
    assert len(keys) == 4


def test_the_largest_perturbed_log_p_is_a_draw_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch)
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    drawn = torch.tensor([int(perturbed(p.log(), Noise(9, 1, i).target()).argmax()) for i in range(4000)])
    counts = torch.bincount(drawn, minlength=5)
    assert counts[1] == 0
    kept = p > 0
    assert chisquare(counts[kept].numpy(), 4000 * p[kept].double().numpy() / float(p.double().sum())).pvalue > LIKELY


def test_a_token_draws_the_same_whatever_the_others_are() -> None:
    """A nucleus or a padded vocabulary changes which tokens compete, not their noise."""
    log_p = torch.randn(20, generator=torch.Generator().manual_seed(0))
    whole = perturbed(log_p, 5)
    part = perturbed(torch.where(torch.arange(20) < 7, log_p, -torch.inf), 5)
    assert torch.equal(part[:7], whole[:7])
    assert torch.isneginf(part[7:]).all()
