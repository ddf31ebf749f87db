import random
from itertools import combinations, product

import pytest

from decodelab.decoding.cost import DraftCost, Profile
from decodelab.decoding.events import Step
from decodelab.drafting.trees import (
    MOST,
    TreeShape,
    asked,
    cartesian,
    expected,
    fastest,
    measured,
    optimal,
    read_tree,
    shape,
    write_tree,
)
from decodelab.errors import UserError


def test_nodes_breadth_first_with_their_parents():
    tree = shape([[1, 0], [0, 0, 1]])
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0), (0, 0, 1))
    assert tree.parents == (-1, -1, 0, 1, 2)
    assert (tree.depth, tree.width, len(tree)) == (3, 2, 5)


def test_cartesian_trees_and_chains():
    assert cartesian([1, 1, 1]).paths == ((0,), (0, 0), (0, 0, 0))
    assert len(cartesian([2, 3])) == 2 + 6
    assert len(cartesian([])) == 0


def test_a_cut_keeps_whole_paths():
    tree = cartesian([2, 2, 2])
    assert tree.cut(99, 2) == cartesian([2, 2])
    assert tree.cut(3, 9).paths == ((0,), (1,), (0, 0))
    assert tree.cut(0, 9).paths == ()


def _all_trees(depth, width, nodes):
    every = [path for d in range(1, depth + 1) for path in product(range(width), repeat=d)]
    for chosen in combinations(every, nodes):
        kept = set(chosen)
        if all(len(path) == 1 or path[:-1] in kept for path in kept):
            yield shape([list(path) for path in chosen])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_tree_of_its_size_keeps_more(nodes):
    """Against every tree: what Sequoia's dynamic programme finds, found by taking the likeliest node that is left."""
    accept = [[0.6, 0.3], [0.5, 0.2], [0.9, 0.05]]
    best = max(expected(accept, tree) for tree in _all_trees(3, 2, nodes))
    assert expected(accept, optimal(accept, nodes)) == pytest.approx(best)


def walked(accept, tree, steps, seed=0):
    """Steps of a target that takes rank r behind d kept tokens with probability `accept[d][r]`."""
    rng = random.Random(seed)
    below = {path: sum(len(p) == len(path) + 1 and p[: len(path)] == path for p in tree.paths) for path in tree.paths}
    below[()] = sum(len(p) == 1 for p in tree.paths)
    for _ in range(steps):
        path, offered = (), []
        while True:
            offered.append(below[path])
            u, rank = rng.random(), 0
            while rank < below[path] and u >= accept[len(path)][rank]:
                u, rank = u - accept[len(path)][rank], rank + 1
            if rank == below[path]:
                break
            path = (*path, rank)
        n = len(path)
        yield Step(0, 0, 1, len(tree), 1 + len(tree), tree.depth, n, n + 1, (), (), ranks=path, offered=tuple(offered))


def test_rates_measured_from_steps():
    """Of known chances, within three standard errors; the best tree by them is the best by the chances."""
    accept = [[0.5, 0.2, 0.1], [0.6, 0.15], [0.3, 0.25]]
    steps = list(walked(accept, cartesian([3, 2, 2]), 20_000))
    found = measured(steps)
    assert [len(rates) for rates in found] == [3, 2, 2]
    reached = 20_000
    for rates, chances in zip(found, accept, strict=True):
        for rate, chance in zip(rates, chances, strict=True):
            assert rate == pytest.approx(chance, abs=3 * (chance * (1 - chance) / reached) ** 0.5)
        reached *= sum(chances)
    for nodes in (3, 5, 8):
        assert optimal(found, nodes) == optimal(accept, nodes)
    tau = sum(s.emitted for s in steps) / len(steps)
    assert expected(found, cartesian([3, 2, 2])) == pytest.approx(tau, rel=0.01)


def test_what_a_tree_wanted_and_a_step_had_not_was_not_kept():
    """A drafter that knows no follower of half of the tokens: the tree's expected tokens are those that came."""
    tree, rng = cartesian([2, 1]), random.Random(0)
    steps = []
    for number in range(4000):
        ranks = (0, 0)[: rng.choice([0, 0, 1, 2])]
        offered = rng.choice([[2, 1, 0], [2]])[: len(ranks) + 1] if len(ranks) < 2 else [2, 1, 0]
        steps.append(Step(0, number, 1, 3, 4, 2, len(ranks), len(ranks) + 1, (), (), ranks=ranks, offered=(*offered,)))
    tau = sum(s.emitted for s in steps) / len(steps)
    found = measured(steps, tree)
    assert expected(found, tree) == pytest.approx(tau, rel=0.01)
    assert expected(measured(steps), tree) > tau + 0.05
    idle = [Step(0, number, 1, 0, 1, 0, 0, 1, (), ()) for number in range(-900, 0)]
    assert measured([*idle, *steps], tree) == found  # steps without a draft say nothing of ranks
    last = Step(0, 0, 1, 0, 1, 0, 0, 1, (), ())  # alone of its request: there was no room
    assert measured([last], tree) == []
    assert measured([last, last], tree) == []  # of two requests, one after the other
    (first, *_) = measured([last, Step(0, 1, 1, 2, 3, 1, 0, 1, (), (), ranks=(), offered=(2,))], tree)
    assert first == [0.0, 0.0]


def test_rates_of_few_steps():
    """What is rarely reached is judged by its rank over all depths, and no rank is better than a likelier one."""
    assert measured([]) == []
    assert measured([Step(0, 0, 1, 0, 1, 0, 0, 1, (), ())]) == []  # nothing was drafted
    one = Step(0, 0, 1, 6, 7, 2, 1, 2, (), (), ranks=(1,), offered=(2, 2))
    (first, second) = measured([one])
    # at depth 1: 0 of 1 and 1 of 1, with 4 trials of the pooled 0 of 2 and 1 of 2: (0, 0.6), made even
    assert first == pytest.approx([0.3, 0.3])
    assert second == pytest.approx([0.2, 0.2])  # 0 of 1 each, so (0, 0.4)
    # a path that was cut says nothing of what stood behind it
    cut = Step(0, 0, 1, 6, 7, 2, 1, 1, (), (), ranks=(0,), offered=(2,))
    assert len(measured([cut])) == 1


def test_a_dense_tree_leaves_out_no_likelier_rank():
    assert cartesian([3, 2]).dense
    assert optimal([[0.5, 0.2], [0.4, 0.1]], 4).dense
    assert not shape([[0], [0, 1]]).dense


def test_expected_tokens_by_hand():
    assert expected([[0.5, 0.25], [0.4]], shape([[0, 0], [1]])) == pytest.approx(1 + 0.5 + 0.25 + 0.2)


def test_the_size_follows_from_what_rows_cost():
    accept = [[0.7, 0.1]] * 6
    free = DraftCost(0.0, 0.0, 0.0)
    assert len(fastest(accept, Profile(8, {1: 1.0, 64: 1.0}), free, most=20)) == 20
    assert len(fastest(accept, Profile(8, {1: 1.0, 2: 2.0, 64: 64.0}), free)) == 0
    some = fastest(accept, Profile(8, {1: 1.0, 8: 1.1, 16: 2.0, 64: 8.0}), free)
    assert 0 < len(some) < 16
    # where few steps draft, what a row costs is weighed against plain decoding, not against what drafts gain
    even = Profile(8, {1: 1.0, 64: 10.0})
    assert 0 < len(fastest(accept, even, free)) < len(fastest(accept, even, free, share=0.1)) < 16


def test_a_tree_is_written_and_read(tmp_path):
    tree = optimal([[0.5, 0.2], [0.4, 0.1]], 4)
    write_tree(tmp_path / "tree.json", tree, {"run": "key", "accept": [[0.5, 0.2], [0.4]]})
    assert read_tree(tmp_path / "tree.json") == tree
    lines = (tmp_path / "tree.json").read_text().splitlines()
    assert lines[1:4] == [' "run": "key",', ' "accept": [[0.5, 0.2], [0.4]],', ' "paths": [[0], [1], [0, 0], [1, 0]]']
    (tmp_path / "choices.json").write_text("[[0], [0, 1], [1]]")
    assert read_tree(tmp_path / "choices.json").paths == ((0,), (1,), (0, 1))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ('{"a": 1}', "must hold paths, lists of ranks from 0 on"),
        ("[[0, -1]]", "must hold paths"),
        ("[[]]", "must hold paths"),
        ("[[0], [true]]", "must hold paths"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_holds_no_tree(tmp_path, content, line):
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(UserError, match=line):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_tree(tmp_path / "none.json")


def test_widths_and_paths_are_not_mixed():
    """Half of what was asked for would be left out."""
    for wanted in ((2, (0,)), ((0,), 2)):
        with pytest.raises(UserError, match=r"is no tree: widths of at least 1, or paths of ranks from 0 on"):
            asked(wanted, 3)


def test_widths_of_more_nodes_than_anybody_verifies():
    """A thousand thousands would fill the memory before anything is refused."""
    with pytest.raises(UserError, match=r"drafting.tree has 1001001000 nodes, but widths may come to 4096: smaller"):
        asked((1000, 1000, 1000), 3)
    assert len(cartesian([MOST])) == MOST


def test_parents_come_first():
    with pytest.raises(ValueError, match="stands before its parent"):
        TreeShape(((0, 0), (0,)))
