"""EAGLE: what a head computes, the tree that it proposes, and which files are heads."""

import json
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from decodelab import testing
from decodelab.attention.rows import chains
from decodelab.decoding import loop, reference
from decodelab.decoding.acceptance import Greedy, Sampling
from decodelab.decoding.draft import Draft, Gives, Needs, Opened, Resources, Room, Seen
from decodelab.decoding.law import LawSettings
from decodelab.decoding.model.config import ModelConfig
from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.source import Source
from decodelab.decoding.noise import Noise
from decodelab.decoding.replay import needs_model
from decodelab.drafting.eagle import Eagle, EagleDrafter, State
from decodelab.drafting.eagle_head import EagleHead, HeadConfig, dense, note, three_taps
from decodelab.drafting.trees import cartesian, shape
from decodelab.errors import UserError
from decodelab.kernels.linear import Linear
from decodelab.tests.drafting.builders import beside_a_wrong_one
from decodelab.tests.drafting.eagles import WithRandomEagle, eagle
from decodelab.tests.rigged import PROMPTS, ask
from decodelab.tests.tiny import clockwork, tiny_decoder, tiny_tokenizer

DIM, V = 32, 61
QUIET = Noise(0, 0, 0)
CYCLE = [1, 2, 3, 4, 5, 6, 7, 0]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # angles are float32


def source(digest="digest", **changes):
    sizes = {"hidden_size": DIM, "vocab_size": V, "num_hidden_layers": 2, "max_position_embeddings": 512}
    return Source("tiny", SimpleNamespace(**(sizes | changes)), tiny_tokenizer(), (), digest, 0, lambda progress: {})


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x):
    """[T, D] by the angles of rows 0 to T − 1: the halves are the two coordinates of D / 2 points."""
    T, D = x.shape
    angle = torch.outer(torch.arange(T), 10000.0 ** -(torch.arange(0, D, 2) / D))
    points = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([points.real, points.imag], -1).to(x.dtype)


@dataclass
class Plain:
    """A head again: from the papers, of a whole text at once, without a cache."""

    target: Decoder
    tensors: dict
    fused: bool

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def fuse(self, hidden):
        """Of the target's hidden states, low to high."""
        return self.linear("fc", torch.cat(hidden, -1)) if self.fused else hidden[0]

    def __call__(self, features, tokens):
        at = "midlayer" if self.fused else "layers.0"
        named = {name.removeprefix(f"{at}."): t for name, t in self.tensors.items()}
        embedded = self.tensors.get("embed_tokens.weight", self.target.embedding)[tokens]
        if self.fused:
            x, first = features, normed(embedded, named["input_layernorm.weight"])
            seen = torch.cat([first, normed(features, named["hidden_norm.weight"])], -1)
        else:
            x = self.linear("fc", torch.cat([embedded, features], -1))
            weight = named.get("input_layernorm.weight")
            seen = x if weight is None else normed(x, weight)
        T, heads = len(tokens), []
        q, k, v = (self.linear(f"{at}.self_attn.{n}_proj", seen) for n in "qkv")
        D = q.shape[-1] // 4
        for h in range(4):
            mine, theirs = slice(h * D, h * D + D), slice(h // 2 * D, h // 2 * D + D)
            scores = turned(q[:, mine]) @ turned(k[:, theirs]).T / D**0.5
            ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v[:, theirs])
        x = x + self.linear(f"{at}.self_attn.o_proj", torch.cat(heads, -1))
        y = normed(x, named["post_attention_layernorm.weight"])
        gate, up = self.linear(f"{at}.mlp.gate_proj", y), self.linear(f"{at}.mlp.up_proj", y)
        return x + self.linear(f"{at}.mlp.down_proj", gate * gate.sigmoid() * up)

    def logits(self, features):
        """Over the target's vocabulary; −inf where the head knows no token."""
        x = normed(features, self.tensors["norm.weight"]) if self.fused else features
        own = self.tensors.get("lm_head.weight")
        logits = self.target.unembedding(x) if own is None else x @ own.T
        offsets = self.tensors.get("d2t")
        if offsets is None:
            return logits
        out = torch.full((len(x), V), -torch.inf, dtype=x.dtype)
        for i, offset in enumerate(offsets.tolist()):
            out[:, i + offset] = logits[:, i]
        return out

    def followers(self, features, tokens, path):
        """log p of the next token behind a text and a path, which is run behind it as a chain."""
        for token in path:
            features = torch.cat([features, self(features, tokens)[-1:]])
            tokens = torch.cat([tokens, torch.tensor([token])])
        return self.logits(self(features, tokens)[-1:])[0].log_softmax(-1)


def opened(text) -> Opened:
    cache = clockwork(CYCLE).open_cache(1, 8)  # the target's, which no head asks for
    return Opened(tuple(text), (), 4, ask(text, Greedy()).processors, cache.open(), cache)


@dataclass
class Bench:
    """A target, a random head, and two texts with the target's hidden states."""

    drafter: EagleDrafter
    plain: Plain
    texts: list
    hidden: list

    def opened(self) -> list[State]:
        return self.drafter.start([opened(text) for text in self.texts])

    def news(self, i, start, stop, prefill=False) -> Seen:
        """Rows [start, stop) of text i, and the tokens behind them."""
        committed = {tap: h[start:stop] for tap, h in self.hidden[i].items()}
        return Seen(tuple(self.texts[i][start + 1 : stop + 1]), start + 1, prefill=prefill, committed=committed)

    def read(self, i):
        """(features, tokens) of the rows that a text has before its last token."""
        taps = self.drafter.head.config.taps
        features = self.plain.fuse([self.hidden[i][tap] for tap in taps])
        return features[:-1], torch.tensor(self.texts[i][1:])


def bench(fused, settings=None, known=None, extra=(), tree=None) -> Bench:
    target = tiny_decoder(num_hidden_layers=7)
    config, tensors = eagle(target, fused=fused, known=known)
    draws = torch.Generator().manual_seed(1)
    more = config.more_shapes()
    tensors |= {n: torch.randn(more[n], generator=draws, dtype=torch.float64) for n in extra}
    head = EagleHead(config, tensors, target.embedding, target.unembedding)
    texts, hidden = [[7, 30, 12, 9, 41, 3, 17, 22, 8, 60, 33, 5], [11, 5, 6, 7, 44, 2, 20]], []
    for text in texts:
        cache = target.open_cache(1, 64)
        hidden.append(target(chains([text], [cache.open()]), cache, taps=config.taps).hidden)
    return Bench(EagleDrafter(settings or Eagle(), head, tree), Plain(target, tensors, fused), texts, hidden)


KINDS = [
    pytest.param(False, None, (), id="1"),
    pytest.param(
        False,
        None,
        ("fc.bias", "layers.0.input_layernorm.weight", "embed_tokens.weight", "lm_head.weight"),
        id="1-more",
    ),
    pytest.param(True, None, (), id="3"),
    pytest.param(True, 30, ("embed_tokens.weight", "midlayer.self_attn.k_proj.bias"), id="3-reduced"),
]


@pytest.mark.parametrize(("fused", "known", "extra"), KINDS)
def test_a_head_is_the_papers(fused, known, extra):
    """Two texts side by side, read in chunks; between them drafts, whose features the target's replace (vllm#14464)."""
    b = bench(fused, known=known, extra=extra)
    assert b.drafter.needs.taps == ((2, 3, 4) if fused else ("final",))
    assert b.drafter.needs.prefill_hidden
    states = b.opened()
    b.drafter.observe(states[:1], [b.news(0, 0, 5, prefill=True)])
    b.drafter.observe(states[1:], [b.news(1, 0, 3, prefill=True)])
    b.drafter.propose(states, [Room(5, 15)] * 2, [QUIET] * 2)
    b.drafter.observe(states, [b.news(0, 5, 10), b.news(1, 3, 4)])
    b.drafter.propose(states, [Room(5, 15), Room(0, 0)], [QUIET] * 2)
    b.drafter.observe(states, [b.news(0, 10, 11), b.news(1, 4, 6)])
    for i, state in enumerate(states):
        want = b.plain(*b.read(i))[-1]
        torch.testing.assert_close(state.hidden, want, **CLOSE)


def test_a_long_prompt_is_read_in_two_chunks():
    """More rows than attend with a mask of their own, behind none and behind others."""
    b = bench(True)
    b.texts[0] = [3 + i * i % 23 for i in range(201)]
    cache = b.plain.target.open_cache(1, 256)
    b.hidden[0] = b.plain.target(chains([b.texts[0]], [cache.open()], prompt=True), cache, taps=(2, 3, 4)).hidden
    states = b.opened()[:1]
    b.drafter.observe(states, [b.news(0, 0, 100, prefill=True)])
    b.drafter.observe(states, [b.news(0, 100, 200, prefill=True)])
    torch.testing.assert_close(states[0].hidden, b.plain(*b.read(0))[-1], **CLOSE)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def by_definition(b: Bench, i: int, nodes: int, depth: int, topk: int) -> list[tuple[int, ...]]:
    """EAGLE-2: nothing left out, each path run anew as a chain."""
    text = b.read(i)
    found, level = [], [((), 0.0)]
    for _ in range(depth):
        candidates = []
        for path, above in level:
            best = b.plain.followers(*text, path).topk(topk)
            followers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            candidates += [((*path, token), above + log_p) for token, log_p in followers]
        found += candidates
        level = sorted(candidates, key=lambda each: -each[1])[:topk]
    return [path for path, _ in sorted(found, key=lambda each: -each[1])[:nodes]]


@pytest.mark.parametrize(("fused", "known", "extra"), KINDS)
def test_the_likeliest_nodes_are_drafted(fused, known, extra):
    """A node of the tree foretells what it would at the end of its path alone (sglang#15360). Two texts at once, which
    were started apart."""
    b = bench(fused, Eagle(nodes=12, depth=4, topk=3), known, extra)
    states = [b.opened()[0], b.opened()[1]]
    for i in (0, 1):
        b.drafter.observe(states[i : i + 1], [b.news(i, 0, len(b.texts[i]) - 1, prefill=True)])
    drafts = b.drafter.propose(states, [Room(9, 12), Room(3, 7)], [QUIET] * 2)
    for i, (draft, nodes, depth) in enumerate(zip(drafts, (12, 7), (4, 3), strict=True)):
        want = by_definition(b, i, nodes, depth, 3)
        assert len(draft) == nodes
        assert sorted(paths(draft)) == sorted(want)
    assert max(draft.depth for draft in drafts) >= 3
    again = b.drafter.propose(states, [Room(9, 12), Room(3, 7)], [QUIET] * 2)
    assert again == drafts


@pytest.mark.parametrize("fused", [False, True])
def test_a_fixed_tree_is_filled_with_followers_of_those_ranks(fused):
    tree = shape([[0, 1, 0], [0, 0], [2, 0], [1]])
    b = bench(fused, tree=tree, known=30 if fused else None)
    states = b.opened()[:1]
    b.drafter.observe(states, [b.news(0, 0, 11, prefill=True)])
    (draft,) = b.drafter.propose(states, [Room(5, 15)], [QUIET])
    want: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for ranks in tree.paths:
        before = want[ranks[:-1]]
        best = b.plain.followers(*b.read(0), before).topk(3).indices.tolist()
        want[ranks] = (*before, best[ranks[-1]])
    assert paths(draft) == [want[ranks] for ranks in tree.paths]
    (cut,) = b.drafter.propose(states, [Room(2, 4)], [QUIET])
    assert paths(cut) == [want[ranks] for ranks in tree.paths if len(ranks) <= 2][:4]


def table(chances, tokens=8) -> EagleDrafter:
    """A head that knows from the last token alone what comes next, with these chances."""
    target = clockwork([*range(1, tokens), 0])
    config = HeadConfig(target.config, ("final",), tokens, tokens)
    tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in config.shapes().items()}
    log_p = torch.full((tokens, tokens), -50.0, dtype=torch.float64)
    for token, row in chances.items():
        for follower, chance in row.items():
            log_p[follower, token] = torch.tensor(chance).log()
    tensors["fc.weight"][:, :tokens] = log_p
    tensors["lm_head.weight"] = torch.eye(tokens, dtype=torch.float64)
    return EagleDrafter(Eagle(nodes=6, depth=3, topk=2), EagleHead(config, tensors, target.embedding, Linear(log_p)))


def drafted(drafter, text, room) -> Draft:
    states = drafter.start([opened(text)])
    rows = torch.zeros(len(text) - 1, 8, dtype=torch.float64)
    drafter.observe(states, [Seen(tuple(text[1:]), 1, prefill=True, committed={"final": rows})])
    return drafter.propose(states, [room], [QUIET])[0]


def test_a_tree_by_hand():
    """.6 · .7 · .9 goes before the second token of the text; what is behind a weak node comes last."""
    drafter = table(
        {0: {1: 0.6, 2: 0.3}, 1: {3: 0.7, 4: 0.2}, 2: {5: 0.5, 6: 0.5}, 3: {6: 0.9, 7: 0.1}, 4: {5: 1.0}, 5: {5: 1.0}}
    )
    # 1: .6  13: .42  136: .378  2: .3  25, 26: .15  14: .12  145: .12  137: .042
    draft = drafted(drafter, [4, 0], Room(9, 9))
    assert sorted(paths(draft)) == [(1,), (1, 3), (1, 3, 6), (2,), (2, 5), (2, 6)]
    assert draft.judged == (True,) * 6
    assert draft.q is None
    assert paths(drafted(drafter, [4, 0], Room(9, 3))) == [(1,), (1, 3), (1, 3, 6)]
    assert paths(drafted(drafter, [4, 0], Room(1, 9))) == [(1,), (2,)]
    assert paths(drafted(drafter, [0, 3], Room(2, 4)))[:2] == [(6,), (7,)]


def test_a_parent_goes_before_a_child_that_is_as_likely():
    certain = table({t: {(t + 1) % 8: 1.0} for t in range(8)})
    assert paths(drafted(certain, [3, 4], Room(9, 2))) == [(5,), (5, 6)]


def knowing(fused) -> tuple[Decoder, EagleHead]:
    """A clockwork target and a head that is right. EAGLE-1's goes by the token, EAGLE-3's turns the features on."""
    decoder = clockwork(CYCLE)
    layer = ModelConfig.from_hf(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
    )
    config = HeadConfig(layer, (0, 1) if fused else ("final",), 8, 8)
    tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in config.shapes().items()}
    one, at = torch.eye(8, dtype=torch.float64), config.at
    if not fused:  # the hidden state of a token, √8 times a unit vector, from its embedding
        tensors["fc.weight"][:, :8] = 8**0.5 * one
        return decoder, EagleHead(config, tensors, decoder.embedding, decoder.unembedding)
    tensors["fc.weight"][:, 8:] = one
    tensors[f"{at}post_attention_layernorm.weight"] += 1
    tensors["norm.weight"] += 1
    tensors[f"{at}mlp.gate_proj.weight"] = 20 * one
    tensors[f"{at}mlp.up_proj.weight"] = one
    normal = 8**0.5  # of the one coordinate that is not 0 behind a norm
    tensors[f"{at}mlp.down_proj.weight"] = (one[[7, *range(7)]] - one) / (20 * normal * normal)
    tensors["lm_head.weight"] = 20 * one[CYCLE].T @ one
    return decoder, EagleHead(config, tensors, decoder.embedding, decoder.unembedding)


@pytest.mark.parametrize("tree", [None, cartesian([1] * 5)], ids=["dynamic", "chain"])
@pytest.mark.parametrize("fused", [False, True], ids=["1", "3"])
def test_all_is_kept_of_a_head_that_is_right(fused, tree):
    """Alone, in a merge, and three at once."""
    decoder, head = knowing(fused)
    drafter = EagleDrafter(Eagle(), head, tree)
    for each in (drafter, beside_a_wrong_one(drafter)):
        requests = [ask([1, t], Greedy(), 13) for t in (2, 3, 4)]
        for group in (requests, requests[:1]):
            for got in loop.generate(decoder, group, each, Greedy()):
                assert [s.accepted for s in got.steps] == [5, 5]


@pytest.mark.parametrize("rule", [Greedy(), Sampling(temperature=0.8)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("fused", [False, True], ids=["1", "3"])
def test_what_is_emitted_is_plain_decoding(fused, rule):
    decoder = tiny_decoder()
    made = WithRandomEagle(Eagle(), fused, None).build(Resources(decoder, tiny_tokenizer(), LawSettings()))
    requests = [ask(p, rule, 20) for p in PROMPTS]
    got = loop.generate(decoder, requests, made, rule)
    assert [g.tokens for g in got] == [w.tokens for w in reference.generate(decoder, requests, rule.law())]
    assert all(s.drafted for g in got for s in g.steps if s.step < 10)


@pytest.mark.parametrize(
    ("check", "tree"),
    [(testing.drafts_follow_from_the_text, None), (testing.drafts_keep_to_their_room, cartesian([2, 1, 1]))],
    ids=["follow from the text", "keep to their room"],
)
def test_drafts_of_eagle_1(check, tree):
    check(lambda: WithRandomEagle(Eagle(nodes=6, depth=3, topk=2), False, None, shape=tree))


def test_past_the_heads_own_context_nothing_is_drafted():
    """vllm#5342, vllm#58080: a head of 24 positions, a prompt that fits and one that does not; it is said once."""
    target, rule = tiny_decoder(), Greedy()
    made = WithRandomEagle(Eagle(), known=None, max_positions=24).build(
        Resources(target, tiny_tokenizer(), LawSettings())
    )
    prompts = ([3 + i for i in range(18)], [3 + i for i in range(30)])
    requests = [ask(p, rule, 16) for p in prompts]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        short, long = loop.generate(target, requests, made, rule)
    assert [str(w.message) for w in told] == ["the EAGLE head's context of 24 tokens is full: no drafts past it"] * 2
    assert [g.tokens for g in (short, long)] == [w.tokens for w in reference.generate(target, requests, rule.law())]
    assert not any(s.drafted for s in long.steps)
    read = 18  # rows that the head has read when it drafts
    for step in short.steps:
        assert (step.depth > 0) == (read <= 24 and step is not short.steps[-1])
        assert step.depth <= max(0, 24 - read + 1)
        read += step.emitted


def test_a_state_that_is_broken_off_frees_its_slot():
    target = tiny_decoder()
    config, tensors = eagle(target, fused=False)
    calls: list[int] = []

    def interrupted(features):
        calls.append(len(features))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return target.unembedding(features)

    drafter = EagleDrafter(Eagle(), EagleHead(config, tensors, target.embedding, interrupted))
    states = drafter.start([opened([1, 2])])
    row = torch.ones(2, DIM, dtype=torch.float64)
    drafter.observe(states, [Seen((2, 3), 1, prefill=True, committed={"final": row})])
    with pytest.raises(KeyboardInterrupt):
        drafter.propose(states, [Room(5, 15)], [QUIET])
    assert states[0].cache.staged > 0
    drafter.finish(states[0])
    assert states[0].cache.staged == 0
    assert states[0].cache.open() == 0


@pytest.mark.parametrize("fused", [False, True], ids=["1", "3"])
def test_gradients_reach_every_tensor(fused):
    """A loop that trains a head takes the same arithmetic with products that let gradients through."""
    b = bench(fused, known=30 if fused else None)
    features, tokens = b.read(0)
    learnt = {n: t.clone().requires_grad_() for n, t in b.plain.tensors.items() if t.is_floating_point()}
    offsets = {n: t for n, t in b.plain.tensors.items() if n not in learnt}
    config, target = b.drafter.head.config, b.plain.target
    head = EagleHead(config, learnt | offsets, target.embedding, target.unembedding, dense)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(0, 1)
            .flatten(1)
        )

    hidden = [b.hidden[0][tap][:-1] for tap in config.taps]
    out = head(head.fuse(hidden), tokens, torch.arange(len(tokens)), attend)
    torch.testing.assert_close(out.detach(), b.plain(features, tokens), **CLOSE)
    head.logits(out).log_softmax(-1)[:, 0].sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in learnt.values())


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (1, (1, 1, 1)),
        (2, (1, 2, 2)),
        (3, (1, 2, 3)),
        (6, (2, 4, 6)),
        (7, (2, 3, 4)),
        (30, (2, 15, 27)),
        (32, (2, 16, 29)),
    ],
)
def test_which_hidden_states_are_fused(layers, taps):
    assert three_taps(layers) == taps


def test_what_a_draft_may_be():
    assert Eagle().gives == Gives("tree", 15, 5)
    assert Eagle(nodes=3).gives == Gives("tree", 3, 3)
    assert Eagle(topk=1).gives == Gives("chain", 5, 5)
    assert Eagle(nodes=9, depth=2, topk=2).gives == Gives("tree", 6, 2)
    assert Eagle(tree="chain", depth=4).gives == Gives("chain", 4, 4)
    assert Eagle(tree=(2, 2)).gives == Gives("tree", 6, 2)
    assert Eagle(tree=((0,), (0, 1))).gives == Gives("tree", 2, 2)


PUBLISHED = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0, "rms_norm_eps": 1e-5}


def saved(folder, fused=True, known=30, prefix="", config=PUBLISHED, metadata=None, without=(), **changes):
    """A head in the published layout, or ours where there is metadata. `changes`: tensors, with __ for a dot."""
    _, tensors = eagle(tiny_decoder(), fused=fused, known=known if fused else None)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items() if n not in without}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    file = folder / ("model.safetensors" if metadata is None else "eagle.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file, metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("fused", [False, True], ids=["1", "3"])
def test_published_heads(fused, prefix, tmp_path):
    """Their names, their config; maps and tables that are not needed may be there (EAGLE's t2d, old inv_freq)."""
    more = {"t2d": torch.zeros(V, dtype=torch.bool)} if fused else {"fc__bias": torch.ones(DIM)}
    more[("midlayer" if fused else "layers__0") + "__self_attn__rotary_emb__inv_freq"] = torch.ones(4)
    path = saved(tmp_path, fused, prefix=prefix, config=PUBLISHED | {"max_position_embeddings": 100}, **more)
    told, short = Eagle(path).check(source())
    assert "does not say which model it belongs to" in told
    assert short.endswith("holds 100 tokens, tiny 512: nothing is drafted past 100")
    target = tiny_decoder(dtype=torch.float32)
    made = Eagle(path).build(Resources(target, tiny_tokenizer(), LawSettings()))
    layer = made.head.config.layer
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.max_positions) == (4, 2, 8, 100)
    assert (layer.norm_eps, layer.vocab) == (1e-5, 30 if fused else V)
    assert layer.inv_freq[1] == pytest.approx(500.0**-0.25)
    assert made.head.ids.tolist() == ([2 * i for i in range(30)] if fused else list(range(V)))
    assert made.needs.taps == ((1, 2) if fused else ("final",))
    if not fused:
        assert torch.equal(made.head.fc(torch.zeros(1, 2 * DIM)), torch.ones(1, DIM))
    got = loop.generate(target, [ask(PROMPTS[0], Greedy(), 8)], made, Greedy())
    assert got[0].steps[0].drafted == 15


def test_ours(tmp_path):
    """The note says all that a config.json would."""
    about = note(source(), heads=4, kv_heads=2, rope_theta=500.0, norm_eps=1e-5, max_positions=77, taps=[0, 1])
    path = saved(tmp_path, config=None, metadata=about, fc__weight=torch.ones(DIM, 2 * DIM))
    told = Eagle(path).check(source())
    assert told == [f"{path}/eagle.safetensors holds 77 tokens, tiny 512: nothing is drafted past 77"]
    made = Eagle(path).build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))
    layer = made.head.config.layer
    assert (layer.heads, layer.kv_heads, layer.norm_eps, layer.max_positions) == (4, 2, 1e-5, 77)
    assert layer.inv_freq[1] == pytest.approx(500.0**-0.25)
    assert made.needs.taps == (0, 1)
    with pytest.raises(UserError, match=r"was trained for tiny \(weights digest\), not for tiny \(other\)"):
        Eagle(path).check(source("other"))


def test_a_narrower_head_with_its_own_embeddings(tmp_path):
    """EAGLE-3's `target_hidden_size`."""
    target, draws = tiny_decoder(dtype=torch.float32), torch.Generator().manual_seed(0)
    layer = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    config = HeadConfig(ModelConfig.from_hf(layer), three_taps(2), DIM, V)
    more = config.more_shapes()
    sizes = config.shapes() | {name: more[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    tensors = {name: torch.randn(size, generator=draws) for name, size in sizes.items()}
    save_file(tensors | {"d2t": torch.zeros(30, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    made = Eagle(str(tmp_path)).build(Resources(target, tiny_tokenizer(), LawSettings()))
    assert made.head.ids.tolist() == list(range(30))  # a d2t of zeros (EAGLE#222)
    requests = [ask(p, Greedy(), 12) for p in PROMPTS]
    got = loop.generate(target, requests, made, Greedy())
    assert [g.tokens for g in got] == [w.tokens for w in reference.generate(target, requests, LawSettings())]


def test_a_vocabulary_that_is_the_targets_needs_no_map(tmp_path):
    path = saved(tmp_path, known=V, without=("d2t",))
    made = Eagle(path).build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))
    assert made.head.ids.tolist() == list(range(V))


LAYER_0, IDS = "layers.0.mlp.up_proj.weight", "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        # NeMo-Automodel#2447, verl-SpeCo#66: acceptance collapses and nobody knows why
        ({"without": ("d2t",)}, r"foretells 30 tokens of tiny's 61, but has no d2t, which says which ones: save"),
        ({"without": ("fc.weight",)}, r"model.safetensors holds no EAGLE head: its tensors are d2t, lm_head.weight"),
        ({"without": ("norm.weight",)}, r"lacks norm.weight: it is incomplete, or no head of EAGLE-3"),
        ({"fused": False, "without": (LAYER_0,)}, rf"lacks {LAYER_0}: it is incomplete, or no head of EAGLE-1 or -2"),
        ({"fused": False, "layers__1__norm": torch.ones(2)}, r"holds layers.1.norm, which no head of EAGLE-1 or -2"),
        (
            {"embed_tokens__weight": torch.ones(V + 3, DIM)},
            r"embed_tokens.weight is \[64, 32\], but must be \[61, 32\] with 4 heads over 2, tiny's hidden size of 32 "
            r"and its vocabulary of 61: the head belongs to another model",
        ),
        ({"fc__weight": torch.ones(DIM, 2 * DIM)}, r"fc.weight is \[32, 64\], but must be \[32, 96\]"),
        ({"fc__weight": torch.ones(DIM)}, r"fc.weight is \[32\], but must be \[32, 96\]"),
        ({"d2t": torch.zeros(29, dtype=torch.long)}, r"d2t is \[29\], but must be \[30\]"),
        ({"heads": (4, 4)}, r"k_proj.weight is \[16, 64\], but must be \[32, 64\] with 4 heads over 4"),
        ({"heads": (32, 16)}, r"q_proj.weight is \[32, 64\], but must be \[64, 64\] with 32 heads over 16"),
        ({"heads": (4, 3)}, r"its config is no EAGLE head's \(llama: 4 attention heads are not a multiple of 3"),
        ({"config": None}, r"has None attention heads by a config.json beside it, but a number is needed: fetch it"),
        ({"said": {"hidden_act": "gelu"}}, r"its config is no EAGLE head's \(activation 'gelu' of llama is not"),
        ({"said": {"rms_norm_eps": "small"}}, r"its config is no EAGLE head's \(Validation error for field 'rms_norm"),
        (
            {"said": {"eagle_config": {IDS: [0, 1, 0]}}},
            r"was fed hidden states \[0, 1, 0\] by its config, but only those that enter layers 1, 2, 2 are fed here",
        ),
        ({"said": {IDS: 5}}, r"was fed hidden states 5 by its config, but only those that enter layers 1, 2, 2"),
        (
            {"metadata": note(source(), heads=4, kv_heads=2, taps=5)},
            r"reads hidden states 5, but the target's are 0 to 2",
        ),
        ({"config": [1]}, r"the config.json beside it is '\[1\]', but must be a mapping: fetch or train it again"),
        ({"metadata": note(source(), kv_heads=2)}, r"has None attention heads by its note"),
        (
            {"metadata": note(source(), heads=4, kv_heads=2, taps=[1, 5, 2])},
            r"reads hidden states \[1, 5, 2\], but the target's are 0 to 2",
        ),
    ],
)
def test_files_that_are_no_heads_of_the_target(changes, text, tmp_path):
    """`said`: in config.json, `heads` also."""
    heads, kv_heads = changes.pop("heads", (4, 2))
    said = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **changes.pop("said", {})}
    path = saved(tmp_path, **({"config": PUBLISHED | said} | changes))
    with pytest.raises(UserError, match=text) as refused:
        Eagle(path).check(source())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ids", [[1, 2, 2], [0, 1, 1]])
def test_the_usual_hidden_states_by_either_count(ids, tmp_path):
    """vLLM counts them by the layer that they enter, SGLang by the one that they leave."""
    path = saved(tmp_path, config=PUBLISHED | {"eagle_aux_hidden_state_layer_ids": ids})
    assert len(Eagle(path).check(source())) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"d2t": torch.full((30,), 32)}, r"d2t leads to tokens 32 to 61, but must lead to different ones from 0 to 60"),
        ({"d2t": -torch.arange(30)}, r"d2t leads to tokens 0 to 0, but must lead to different ones"),
        ({"norm__weight": torch.full((DIM,), torch.inf)}, r"norm.weight is not finite in torch.float64: corrupt"),
    ],
)
def test_numbers_that_cannot_be(changes, text, tmp_path):
    settings = Eagle(saved(tmp_path, **changes))
    settings.check(source())
    with pytest.raises(UserError, match=text):
        settings.build(Resources(tiny_decoder(), tiny_tokenizer(), LawSettings()))


def test_a_published_heads_config_is_one_of_its_files(tmp_path):
    """It says what the tensors mean: a run with another rope_theta has another key."""
    path = saved(tmp_path)
    assert Eagle(path).files == (tmp_path / "model.safetensors", tmp_path / "config.json")
    saved(tmp_path, metadata=note(source(), heads=4, kv_heads=2))
    assert Eagle(path).files == (tmp_path / "eagle.safetensors",)


def test_settings_do_not_say_which_hidden_states():
    """They depend on the head, and for EAGLE-3 on the target; that there is no replay without them is known."""
    assert Eagle().needs == Needs(prefill_hidden=True)
    assert "eagle needs one" in (needs_model(Eagle().needs, "eagle") or "")


def test_settings_that_are_refused(tmp_path):
    for name in ("nodes", "depth", "topk"):
        with pytest.raises(UserError, match=rf"drafting.{name} must be at least 1, got 0"):
            Eagle(**{name: 0})
    path = saved(tmp_path)
    with pytest.raises(
        UserError, match=r"drafting.topk tries 31 tokens behind each node, but the head knows 30 in all"
    ):
        Eagle(path, topk=31).check(source())
    (tmp_path / "tree.json").write_text("[[0], [30]]")
    with pytest.raises(UserError, match=r"drafting.tree tries 31 tokens behind each node, but the head knows 30"):
        Eagle(path, tree=str(tmp_path / "tree.json")).check(source())
    (tmp_path / "tree.json").write_text("[]")
    with pytest.raises(UserError, match=r"tree.json is no tree: widths of at least 1, or paths of ranks from 0 on"):
        Eagle(path, tree=str(tmp_path / "tree.json")).check(source())
    (tmp_path / "tree.json").write_text("[[0], [3]]")
    made = Eagle(path, tree=str(tmp_path / "tree.json")).build(
        Resources(tiny_decoder(), tiny_tokenizer(), LawSettings())
    )
    assert made.gives == Gives("tree", 2, 1)
