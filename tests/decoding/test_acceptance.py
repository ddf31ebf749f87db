"""The two rules on drafts small enough to judge by hand. What they do to the law is in test_laws.py."""

from dataclasses import fields

import pytest
import torch

from decodelab.decoding.acceptance import Acceptance, Greedy, Sampling, Verdict
from decodelab.decoding.draft import EMPTY, Draft, chain, tree
from decodelab.decoding.law import Law, Processors
from decodelab.decoding.noise import Noise

V = 10


def law(rule: Greedy | Sampling, draft: Draft, choices: list[int]) -> Law:
    """A target that is sure of `choices[i]` after row i (row 0: the last emitted token)."""
    logits = torch.full((1 + len(draft), V), -50.0)
    logits[range(1 + len(draft)), choices] = 50.0
    return Law(Processors.build(rule.law(), 1, ()), logits, [0], draft.tokens, draft.parents)


def judged(rule: Greedy | Sampling, draft: Draft, choices: list[int]) -> Verdict:
    return rule.judge(draft, law(rule, draft, choices), Noise(0, 0, 0))


RULES = pytest.mark.parametrize("rule", [Greedy(), Greedy(frequency_penalty=0.1), Sampling(), Sampling(top_k=3)])


@RULES
def test_no_draft(rule: Greedy | Sampling) -> None:
    assert judged(rule, EMPTY, [7]) == Verdict((), 7)


@RULES
def test_chains(rule: Greedy | Sampling) -> None:
    draft = chain([3, 4, 5])
    assert judged(rule, draft, [9, 4, 5, 6]) == Verdict((), 9)
    assert judged(rule, draft, [3, 9, 5, 6]) == Verdict((0,), 9)
    assert judged(rule, draft, [3, 4, 9, 6]) == Verdict((0, 1), 9)
    assert judged(rule, draft, [3, 4, 5, 6]) == Verdict((0, 1, 2), 6)  # all accepted: one more from the target


@RULES
def test_trees(rule: Greedy | Sampling) -> None:
    """sglang#8409, Medusa's zero padding: children are found by their parent; a leaf has none."""
    #        3 ─ 4, 5 ─ 0         6 ─ 4
    draft = tree([3, 4, 5, 0, 6, 4], [-1, 0, 0, 2, -1, 4])
    assert judged(rule, draft, [3, 5, 1, 0, 1, 1, 1]) == Verdict((0, 2, 3), 1)
    assert judged(rule, draft, [6, 1, 1, 1, 1, 4, 0]) == Verdict((4, 5), 0)
    assert judged(rule, draft, [6, 1, 1, 1, 1, 0, 1]) == Verdict((4,), 0)
    assert judged(rule, draft, [4, 1, 1, 1, 1, 1, 1]) == Verdict((), 4)


@RULES
def test_of_equal_siblings_the_first_is_kept(rule: Greedy | Sampling) -> None:
    draft = tree([3, 3, 5, 6], [-1, -1, 0, 1])
    assert judged(rule, draft, [3, 5, 6, 1, 1]) == Verdict((0, 2), 1)


@RULES
def test_rows_that_are_no_candidates_are_never_kept(rule: Greedy | Sampling) -> None:
    draft = Draft((3, 4, 4), (-1, 0, 0), None, (-1,) * 3, (True, False, True), (0,) * 3)
    assert judged(rule, draft, [3, 4, 1, 1]) == Verdict((0, 2), 1)
    draft = Draft((3, 4), (-1, 0), None, (-1,) * 2, (False, False), (0,) * 2)
    assert judged(rule, draft, [3, 4, 1]) == Verdict((), 3)


def test_drawn_candidates_come_before_one_hot_ones() -> None:
    """q(3) = 1 and p(3) = 1: accepted whatever u; then the one-hot sibling of the same token has lost."""
    q = torch.zeros(1, V)
    q[0, 3] = 1
    draft = Draft((3, 3), (-1, -1), q, (-1, 0), (True, True), (0, 0))
    assert judged(Sampling(), draft, [3, 1, 2]) == Verdict((1,), 2)


@RULES
def test_judging_changes_nothing(rule: Greedy | Sampling) -> None:
    """vllm-ascend#2881: target probabilities zeroed in place; here all rows even share one tensor of logits."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    q = torch.softmax(torch.randn(1, V, generator=torch.Generator().manual_seed(1)), -1)
    before = logits.clone(), q.clone()
    draft = Draft((3, 4, 5, 6), (-1, -1, 1, 1), q, (0, -1, 0, 0), (True,) * 4, (0,) * 4)
    law = Law(Processors.build(rule.law(), 1, ()), logits.expand(5, V), [0], draft.tokens, draft.parents)
    first = rule.judge(draft, law, Noise(0, 0, 0))
    assert rule.judge(draft, law, Noise(0, 0, 0)) == first
    assert torch.equal(logits, before[0])
    assert torch.equal(q, before[1])


@RULES
def test_rules_are_rules(rule: Greedy | Sampling) -> None:
    assert isinstance(rule, Acceptance)
    assert rule.guarantee == ("same tokens" if isinstance(rule, Greedy) else "same law")
    assert rule.law().sample == isinstance(rule, Sampling)
    assert not {"guarantee", "shapes", "needs_q", "reads"} & {field.name for field in fields(rule)}  # no settings
