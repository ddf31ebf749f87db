from itertools import combinations, product

import pytest

from decodelab.decoding.cost import DraftCost, Profile
from decodelab.decoding.errors import UserError
from decodelab.drafting.trees import TreeShape, cartesian, expected, fastest, optimal, read_tree, shape, write_tree


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


def test_expected_tokens_by_hand():
    assert expected([[0.5, 0.25], [0.4]], shape([[0, 0], [1]])) == pytest.approx(1 + 0.5 + 0.25 + 0.2)


def test_the_size_follows_from_what_rows_cost():
    accept = [[0.7, 0.1]] * 6
    free = DraftCost(0.0, 0.0, 0.0)
    assert len(fastest(accept, Profile(8, {1: 1.0, 64: 1.0}), free, most=20)) == 20
    assert len(fastest(accept, Profile(8, {1: 1.0, 2: 2.0, 64: 64.0}), free)) == 0
    some = fastest(accept, Profile(8, {1: 1.0, 8: 1.1, 16: 2.0, 64: 8.0}), free)
    assert 0 < len(some) < 16


def test_a_tree_is_written_and_read(tmp_path):
    tree = optimal([[0.5, 0.2], [0.4, 0.1]], 4)
    write_tree(tmp_path / "tree.json", tree, {"nodes": 4})
    assert read_tree(tmp_path / "tree.json") == tree
    (tmp_path / "choices.json").write_text("[[0], [0, 1], [1]]")
    assert read_tree(tmp_path / "choices.json").paths == ((0,), (1,), (0, 1))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ('{"a": 1}', "must hold paths, lists of ranks from 0 on"),
        ("[[0, -1]]", "must hold paths"),
        ("[[]]", "must hold paths"),
    ],
)
def test_a_file_that_holds_no_tree(tmp_path, content, line):
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(UserError, match=line):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_tree(tmp_path / "none.json")


def test_parents_come_first():
    with pytest.raises(ValueError, match="stands before its parent"):
        TreeShape(((0, 0), (0,)))
