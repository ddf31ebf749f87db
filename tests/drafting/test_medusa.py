import json
from types import SimpleNamespace

import pytest
import torch

from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import Gives, Resources, Room, Seen
from decodelab.decoding.law import LawSettings
from decodelab.decoding.model.source import Source
from decodelab.decoding.noise import Noise
from decodelab.drafting.medusa import Medusa, MedusaDrafter, MedusaHeads, State, note
from decodelab.drafting.trees import cartesian, shape
from decodelab.errors import UserError
from decodelab.kernels.linear import Linear
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.drafting.heads import DIM, V, random_heads, saved
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer


def source(digest="digest"):
    config = SimpleNamespace(hidden_size=DIM, vocab_size=V)
    return Source("tiny", config, tiny_tokenizer(), (), digest, 0, lambda progress: {})


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_heads_are_the_papers(own, blocks):
    """Residual blocks with SiLU one behind the other, each head with its own (Medusa#133), then an unembedding."""
    tensors = random_heads(2, blocks, own)
    target = torch.randn(V, DIM)
    heads = MedusaHeads.read(tensors, Linear(target), torch.float32, torch.device("cpu"))
    hidden = torch.randn(3, DIM)
    got = heads(hidden)
    assert got.shape == (2, 3, V)
    for i in range(2):
        x = hidden
        for j in range(blocks):
            x = x + torch.nn.functional.silu(x @ tensors[f"{i}.{j}.linear.weight"].T + tensors[f"{i}.{j}.linear.bias"])
        out = tensors[f"{i}.{blocks}.weight"] if own else target
        torch.testing.assert_close(got[i], x @ out.T, atol=1e-4, rtol=1e-4)


def test_a_tree_of_each_heads_likeliest_tokens():
    tensors = random_heads(2, own=True)
    heads = MedusaHeads.read(tensors, Linear(torch.zeros(V, DIM)), torch.float32, torch.device("cpu"))
    drafter = MedusaDrafter(heads, shape([[0, 0], [0, 1], [2]]))
    hidden = torch.randn(DIM)
    (draft,) = drafter.propose([State(3, hidden)], [Room(9, 9)], [Noise(0, 0, 0)])
    first, second = heads(hidden[None])[:, 0].topk(3).indices.tolist()
    assert draft.tokens == (first[0], first[2], second[0], second[1])
    assert draft.parents == (-1, -1, 0, 0)
    (cut,) = drafter.propose([State(3, hidden)], [Room(1, 9)], [Noise(0, 0, 0)])
    assert cut.tokens == (first[0], first[2])


def test_the_hidden_state_is_that_of_the_row_behind_which_the_last_token_was_chosen():
    drafter = MedusaDrafter(MedusaHeads((), ()), shape([[0]]))
    state = State(3)
    rows = torch.arange(4.0)[:, None]
    drafter.observe([state], [Seen((5,), 3, prefill=True, hidden={"final": rows[2:3]})])
    assert state.hidden.item() == 2
    drafter.observe([state], [Seen((6, 7), 4, (1,), hidden={"final": rows}, committed={"final": rows[[0, 2]]})])
    assert state.hidden.item() == 2
    assert state.length == 6


CYCLE = [1, 2, 3, 4, 5, 6, 7, 0]


def knowing():
    """Heads of a clockwork target that are right: head i knows what comes i + 2 steps behind a token."""
    decoder = clockwork(CYCLE)
    scale = 8**0.5  # the hidden state behind the norm is √dim times a unit vector
    blocks, out = [], []
    for i in range(3):
        weight = torch.zeros(8, 8, dtype=torch.float64)
        weight[[(t + i + 2) % 8 for t in range(8)], range(8)] = 1 / scale
        out.append(Linear(weight))
        blocks.append(())
    return decoder, MedusaHeads(tuple(blocks), tuple(out))


@pytest.mark.parametrize("tree", [cartesian([1, 1, 1]), cartesian([2, 2, 1])], ids=["chain", "tree"])
def test_all_is_kept_of_heads_that_are_right(tree):
    """Alone, in a merge and three at once."""
    decoder, heads = knowing()
    drafter = MedusaDrafter(heads, tree)
    for each in (drafter, beside_a_wrong_one(drafter)):
        requests = [ask([1, t], Greedy(), 13) for t in (2, 3, 4)]
        for got in loop.generate(decoder, requests, each, Greedy()):
            assert [s.accepted for s in got.steps] == [3, 3, 3]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
def test_what_is_emitted_is_plain_decoding(rule, tmp_path):
    decoder = tiny_decoder()
    path = saved(tmp_path / "medusa.safetensors", random_heads(3))
    settings = Medusa(str(tmp_path), tree=(3, 2, 1))
    assert settings.gives == Gives("tree", 3 + 6 + 6, 3)
    drafter = settings.build(Resources(decoder, tiny_tokenizer(), LawSettings()))
    requests = [ask(p, rule, 20) for p in PROMPTS]
    got = loop.generate(decoder, requests, drafter, rule)
    assert [g.tokens for g in got] == [w.tokens for w in reference.generate(decoder, requests, rule.law())]
    assert path.endswith("medusa.safetensors")


@pytest.mark.parametrize(("tree", "rows"), [("chain", 3), ((2, 2), 6), (((0,), (0, 1), (1,)), 3), (None, 15)], ids=str)
def test_ways_to_say_a_tree(tree, rows, tmp_path):
    path = saved(tmp_path / "heads.safetensors", random_heads(3))
    assert Medusa(path, tree).gives.rows == rows


def test_the_tree_that_the_heads_bring(tmp_path):
    about = note(source(), tree=[[0], [0, 0], [1]])
    path = saved(tmp_path / "heads.safetensors", random_heads(2), about)
    assert Medusa(path).shape.paths == ((0,), (1,), (0, 0))
    (tmp_path / "tree.json").write_text(json.dumps([[0], [3]]))
    assert Medusa(path, str(tmp_path / "tree.json")).shape.width == 4


def test_published_names(tmp_path):
    saved(tmp_path / "medusa_lm_head.safetensors", random_heads(2, own=True, prefix="medusa_head."))
    (warning,) = Medusa(str(tmp_path)).check(source())
    assert "does not say which model it belongs to" in warning


def test_a_tree_deeper_than_the_heads_is_refused(tmp_path):
    """Medusa#63: three heads and a tree of five."""
    path = saved(tmp_path / "heads.safetensors", random_heads(3))
    with pytest.raises(UserError, match=r"drafting.tree is 5 deep, and there are 3 heads: a tree of at most 3"):
        Medusa(path, (1, 1, 1, 1, 1)).check(source())
    with pytest.raises(UserError, match=r"drafting.tree tries 99 tokens of a head, but the heads know 61 in all"):
        Medusa(path, (99,)).check(source())


def test_heads_of_another_target_are_refused(tmp_path):
    path = saved(tmp_path / "heads.safetensors", random_heads(2), note(source("theirs")))
    with pytest.raises(UserError, match=r"was trained for tiny \(weights theirs\), not for tiny \(ours\)"):
        Medusa(path).check(source("ours"))
    assert Medusa(path).check(source("theirs")) == []
    other = source("theirs")
    other.config.hidden_size = 64
    with pytest.raises(UserError, match=r"is \[32\], but must be \[64\] with tiny's hidden size of 64 and its vocab"):
        Medusa(path).check(other)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"1.0.linear.weight": torch.ones(V, DIM)},
            r"1.0.linear.weight is \[61, 32\], but must be \[32, 32\] with tiny's",
        ),
        ({"1.0.linear.bias": torch.ones(7)}, r"1.0.linear.bias is \[7\], but must be \[32\]"),
        ({"1.1.weight": torch.ones(V + 3, DIM)}, r"1.1.weight is \[64, 32\], but must be \[61, 32\]"),
        ({"1.1.weight": None}, r"1 of 2 Medusa heads have an unembedding of their own: all or none may"),
        (
            {"0.0.linear.weight": None},
            r"holds 0.0.linear.bias, which has no place in Medusa's heads: one before it may",
        ),
        ({"0.2.linear.weight": torch.ones(DIM, DIM)}, r"holds 0.2.linear.weight, which has no place in Medusa's heads"),
        ({"junk": torch.ones(1)}, r"holds junk, which has no place in Medusa's heads"),
    ],
)
def test_heads_that_do_not_fit_together_are_refused(changes, text, tmp_path):
    """What was left out in silence drafts no token that is right."""
    tensors = {name: tensor for name, tensor in (random_heads(2, own=True) | changes).items() if tensor is not None}
    path = saved(tmp_path / "heads.safetensors", tensors)
    for refused in (
        lambda: Medusa(path).check(source()),
        lambda: Medusa(path).build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings())),
    ):
        with pytest.raises(UserError, match=text.replace("tiny's", ".*'s")):
            refused()


def test_numbers_that_are_none_are_refused(tmp_path):
    path = saved(tmp_path / "heads.safetensors", random_heads(1) | {"0.0.linear.bias": torch.full((DIM,), torch.nan)})
    with pytest.raises(UserError, match=r"0.0.linear.bias is not finite in torch.float64: corrupt, or too large for"):
        Medusa(path).build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))


@pytest.mark.parametrize("tree", [[[-1]], [["a"]], "chain", [3, 2], 5], ids=str)
def test_heads_that_bring_no_tree_but_say_so(tree, tmp_path):
    path = saved(tmp_path / "heads.safetensors", random_heads(2), note(source(), tree=tree))
    with pytest.raises(UserError, match=r"heads.safetensors: its tree must hold paths, lists of ranks from 0 on, such"):
        Medusa(path).check(source())


def test_a_note_that_is_no_mapping(tmp_path):
    path = saved(tmp_path / "heads.safetensors", random_heads(1), {"decodelab": "null"})
    with pytest.raises(
        UserError, match=r"heads.safetensors: its note is 'None', but must be a mapping: fetch or train"
    ):
        Medusa(path).check(source())
    path = saved(tmp_path / "heads.safetensors", random_heads(1))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"the config.json beside it is '\[\]', but must be a mapping"):
        Medusa(path).check(source())


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    path = saved(tmp_path / "medusa.safetensors", random_heads(3))
    assert Medusa(str(tmp_path), "chain").gives.depth == 3
    saved(path, random_heads(2))
    assert Medusa(str(tmp_path), "chain").gives.depth == 2


def test_files_that_are_no_heads(tmp_path):
    with pytest.raises(UserError, match=r"does not exist; it is a folder or a safetensors file"):
        Medusa(str(tmp_path / "none")).check(source())
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"medusa_lm_head.pt is pickled and not read: convert it to safetensors"):
        Medusa(str(tmp_path)).check(source())
    with pytest.raises(UserError, match=r"is no safetensors file; pickled files are not read"):
        Medusa(str(tmp_path / "medusa_lm_head.pt")).check(source())
    (tmp_path / "bad.safetensors").write_bytes(b"corrupt")
    with pytest.raises(UserError, match=r"bad.safetensors cannot be read"):
        Medusa(str(tmp_path / "bad.safetensors")).check(source())
    path = saved(tmp_path / "other.safetensors", {"weight": torch.zeros(2)})
    with pytest.raises(UserError, match=r"holds no Medusa heads: its tensors are weight"):
        Medusa(path).check(source())
    path = saved(tmp_path / "eagle.safetensors", random_heads(1), {"decodelab": json.dumps({"kind": "eagle"})})
    with pytest.raises(UserError, match=r"holds eagle, not medusa: choose drafting=eagle"):
        Medusa(path).check(source())
