"""What a drafter of one's own must pass, and tiny models to test with. Nothing here needs pytest:

    from decodelab.testing import drafter_suite
    drafter_suite(MyDrafter)  # an AssertionError names the promise that does not hold

A drafter that passes may still be useless: give it a test of what it proposes, and one in which all must be accepted.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .decoding import loop, reference
from .decoding.acceptance import Acceptance, Greedy, Sampling
from .decoding.draft import EMPTY, Draft, Drafter, Gives, Needs, Opened, Resources, Room, Seen
from .decoding.events import Generation
from .decoding.model.config import ModelConfig
from .decoding.model.decoder import Decoder
from .decoding.noise import Noise
from .decoding.request import Request, request

Make = Callable[[], Any]  # a drafter's settings, or a drafter that needs no weights
Tokens = tuple[int, ...]

_WINNER = "the other member"  # of a merge
_AT_ONCE = partial(print, flush=True)
_CHARACTERS = [" ", *string.ascii_lowercase, *string.digits, *string.ascii_uppercase[:21]]


def tiny_decoder(seed: int = 0, dtype: torch.dtype = torch.float64, *, scale: float = 16.0, **config: Any) -> Decoder:
    """A random Llama of 61 tokens, 2 layers, 4 heads over 2 KV heads; `config` overrides fields of LlamaConfig.

    Its matrices are scaled up, so that the gap between the two best tokens is wide and the output varied; a smaller
    `scale` gives more repetition.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    settings = LlamaConfig(**(sizes | config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    weights = {name: w * scale if w.dim() > 1 else w for name, w in model.state_dict().items()}
    return Decoder(ModelConfig.from_hf(settings), weights, dtype=dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, for `tiny_decoder`: <unk>, <s>, </s> and 58 characters."""
    tokens = ["<unk>", "<s>", "</s>", *_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def drafter_suite(make_drafter: Make, *, learns: bool = False, tell: Callable[[str], None] = _AT_ONCE) -> None:
    """Run every check of `DRAFTER_CHECKS`. `make_drafter()` gives settings (`build` loads) or a drafter.

    `learns`: its drafts depend on more than the text, such as what was verified in earlier steps. `tell` gets a line
    before each check, and an ok at the end.
    """
    checks = [check for check in DRAFTER_CHECKS if not (learns and check is drafts_follow_from_the_text)]
    for number, check in enumerate(checks, 1):
        tell(f"{number} of {len(checks)}: {check.__name__.replace('_', ' ')}")
        check(make_drafter)
    tell(f"ok: {getattr(make_drafter, '__name__', 'the drafter')} keeps all of them")


def greedy_is_plain_decoding(make: Make) -> None:
    """Token for token, alone and three at once, over MHA, GQA and MQA; with penalties too."""
    penalties = Greedy(repetition_penalty=1.3, no_repeat_ngram=3)
    for kv_heads, acceptance in ((4, Greedy()), (2, Greedy()), (1, Greedy()), (2, penalties)):
        trial = _Trial.of(make, acceptance, num_key_value_heads=kv_heads)
        what = f"{kv_heads} of 4 KV heads, {acceptance}"
        _equal(trial.run(), trial.plain, f"three prompts at once, {what}")
        if kv_heads == 2:
            _equal(trial.alone(), trial.plain, f"alone, {what}")


def sampling_is_plain_decoding(make: Make) -> None:
    """Token for token for one-hot candidates; the same output in any batch for candidates with a q."""
    warm, few = Sampling(temperature=0.8), Sampling(top_k=5, presence_penalty=0.5)
    for kv_heads, acceptance in ((4, warm), (2, warm), (1, warm), (2, few)):
        trial = _Trial.of(make, acceptance, num_key_value_heads=kv_heads)
        what = f"{kv_heads} of 4 KV heads, {acceptance}"
        together = trial.run()
        if trial.drafter.gives.q == "one-hot":
            _equal(together, trial.plain, f"three prompts at once, {what}")
        if kv_heads == 2:
            _equal(trial.alone(), together, f"alone against three at once, {what}")


def drafts_keep_to_their_room(make: Make) -> None:
    """Any budget, 0 included, any number of tokens left, and the end of the context; drafts are as `gives` says."""
    trial = _Trial.of(make, Greedy())
    for budget in (0, 1, 2):
        _equal(trial.run(budget=budget), trial.plain, f"a budget of {budget} rows")
    for count in (1, 2, 3):
        short = _Trial.of(make, Greedy(), max_new_tokens=count)
        _equal(short.run(), short.plain, f"max_new_tokens={count}")
    near_its_end = _Trial.of(make, Greedy(), max_position_embeddings=48)
    _equal(near_its_end.run(), near_its_end.plain, "a context of 48 tokens")


def drafts_of_3_0_3_0(make: Make) -> None:
    """A step without a draft leaves the state right: alone (propose is not called) and beside others (vllm#39273)."""
    trial = _Trial.of(make, Greedy())
    for rooms in ((3, 0), (0, 3)):
        stage = _Stage(trial.drafter, rooms=rooms)
        _equal(trial.alone(stage), trial.plain, f"room for {rooms} rows in turn")
        _equal(trial.run(drafter=stage), trial.plain, f"room for {rooms} rows in turn, three prompts at once")


def another_member_wins(make: Make) -> None:
    """In a merge whose other member is right at every step, or every other: 3, 0, 3, 0 of its tokens are accepted."""
    for acceptance in (Greedy(), Sampling(temperature=0.8)):
        trial = _Trial.of(make, acceptance)
        for wins in ((3,), (3, 0)):
            merge = trial.merge(wins)
            what = f"merged with a member that is right about {wins} tokens, {acceptance}"
            _equal(trial.alone(merge), trial.plain, what)
            got = trial.run(drafter=merge)
            _equal(got, trial.plain, f"{what}, three prompts at once")
            won = sum(source == _WINNER for g in got for step in g.steps for source in step.sources)
            assert won > 0, "the merge of this suite is broken: its other member never won"


def drafts_follow_from_the_text(make: Make) -> None:
    """The same text gets the same drafts: twice, beside other requests, after steps without a draft, and after tokens
    that another member of a merge brought (sglang#8726, TensorRT-LLM#2263). A drafter that learns from all rows of its
    drafts, kept or not, goes by those too: it only has to do the same twice and beside others."""
    trial = _Trial.of(make, Greedy())
    first = _Stage(trial.drafter)
    trial.alone(first)
    ways: dict[str, tuple[_Stage, bool]] = {
        "once more": (_Stage(trial.drafter), True),
        "beside other requests": (_Stage(trial.drafter), False),
    }
    needs = trial.drafter.needs
    learns = needs.argmax or needs.choices or needs.topk
    others: dict[str, tuple[_Stage, bool]] = {
        "every other step": (_Stage(trial.drafter, rooms=(0, 99)), True),
        "merged with a member that wins": (trial.merge((3,)), True),
        "merged with a member that wins every other step": (trial.merge((3, 0)), False),
    }
    for way, (stage, alone) in (ways if learns else ways | others).items():
        if alone:
            trial.alone(stage)
        else:
            trial.run(drafter=stage)
        first.log.compare(stage.log, way)


def ends_and_starts_again(make: Make) -> None:
    """A request that is broken off in mid-run and opened again with what it has ends as if nothing had been."""
    trial = _Trial.of(make, Greedy())
    for want, req in zip(trial.plain, trial.requests, strict=True):
        stage = _Stage(trial.drafter)
        steps = loop.decode(trial.target, [req], stage, trial.acceptance)
        for out in steps:
            done = tuple(out[0].tokens)
            if len(done) >= 8:
                break
        steps.close()  # type: ignore[attr-defined]  # the loop is a generator
        assert stage.open == 0, "the loop left a state unfinished"
        rest = trial.request(req.prompt + done, req.documents, len(want.tokens) - len(done))
        (got,) = trial.run([rest], stage)
        _equal([got], [want], f"broken off after {len(done)} tokens and opened again", skip=len(done))
        assert stage.open == 0, "the loop left a state unfinished"


def stops_inside_a_draft(make: Make) -> None:
    """Nothing is emitted behind the first EOS, wherever in an accepted run it stands (transformers#47912)."""
    trial = _Trial.of(make, Greedy())
    for at in (2, 4, 7):
        ends = _Trial.of(make, Greedy(), eos_ids=(trial.plain[2].tokens[at],))
        _equal(ends.run(), ends.plain, f"token {at} is an EOS")
        merge = ends.merge((3,))
        _equal(ends.run(drafter=merge), ends.plain, f"token {at} is an EOS, merged with a member that wins")


def reads_a_long_prompt(make: Make) -> None:
    """A prompt is read in chunks, each of which observe is told of."""
    length = reference.PREFILL_CHUNK + 9
    trial = _Trial.of(
        make, Greedy(), prompts=[[3 + i * i % 23 for i in range(length)]], max_position_embeddings=2 * length
    )
    _equal(trial.run(), trial.plain, f"a prompt of {length} tokens")


DRAFTER_CHECKS: tuple[Callable[[Make], None], ...] = (
    drafts_keep_to_their_room,
    greedy_is_plain_decoding,
    sampling_is_plain_decoding,
    drafts_of_3_0_3_0,
    another_member_wins,
    drafts_follow_from_the_text,
    ends_and_starts_again,
    stops_inside_a_draft,
    reads_a_long_prompt,
)


def _equal(got: Sequence[Generation], want: Sequence[Generation], what: str, skip: int = 0) -> None:
    for g, w in zip(got, want, strict=True):
        expected = w.tokens[skip:]
        if (g.tokens, g.reason) != (expected, w.reason):
            same = next((i for i, (a, b) in enumerate(zip(g.tokens, expected, strict=False)) if a != b), "the end")
            raise AssertionError(
                f"{what}: the output differs from plain decoding's at {same}: {g.tokens} ({g.reason}) "
                f"instead of {expected} ({w.reason})"
            )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A target, three requests of different lengths, and what plain decoding makes of them."""

    target: Decoder
    drafter: Drafter[Any]
    acceptance: Acceptance
    requests: list[Request]
    plain: list[Generation]
    eos_ids: Tokens = ()

    @staticmethod
    def of(
        make: Make,
        acceptance: Acceptance,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        max_new_tokens: int = 20,
        eos_ids: Tokens = (),
        **config: Any,
    ) -> "_Trial":
        """Each document says what plain decoding will, with two tokens changed."""
        target = tiny_decoder(scale=8.0, **config)
        made = make()
        if hasattr(made, "build"):
            made = made.build(Resources(target, tiny_tokenizer(), acceptance.law()))
        assert isinstance(made, Drafter), f"{type(made).__name__} lacks a method of decodelab.decoding.draft.Drafter"
        trial = _Trial(target, made, acceptance, [], [], eos_ids)
        if prompts is None:
            draws = torch.Generator().manual_seed(0)
            prompts = [[7, 8, 9], [5, 6, 7] * 3, torch.randint(3, 61, (40,), generator=draws).tolist()]
        bare = [trial.request(prompt, (), max_new_tokens) for prompt in prompts]
        trial.plain.extend(reference.generate(target, bare, acceptance.law()))
        for req, plain in zip(bare, trial.plain, strict=True):
            document = tuple(0 if at in (7, 11) else token for at, token in enumerate(plain.tokens))
            trial.requests.append(replace(req, documents=(req.prompt[::-1], document)))
        return trial

    def request(self, prompt: Sequence[int], documents: Sequence[Tokens], max_new_tokens: int) -> Request:
        config = self.target.config
        return request(
            prompt,
            law=self.acceptance.law(),
            max_new_tokens=max_new_tokens,
            vocab=config.vocab,
            context=config.max_positions,
            eos_ids=self.eos_ids,
            documents=documents,
        )

    def run(
        self, requests: Sequence[Request] | None = None, drafter: Drafter[Any] | None = None, budget: int | None = None
    ) -> list[Generation]:
        requests = self.requests if requests is None else requests
        return loop.generate(self.target, requests, drafter or _Stage(self.drafter), self.acceptance, budget=budget)

    def alone(self, drafter: Drafter[Any] | None = None) -> list[Generation]:
        return [self.run([req], drafter)[0] for req in self.requests]

    def merge(self, wins: tuple[int, ...]) -> "_Stage":
        right = {req.prompt: tuple(plain.tokens) for req, plain in zip(self.requests, self.plain, strict=True)}
        return _Stage(self.drafter, right=right, wins=wins)


@dataclass(slots=True)
class _Log:
    """What was drafted, by the text it follows."""

    drafts: dict[Tokens, tuple[Room, Draft]] = field(default_factory=dict)

    def compare(self, other: "_Log", way: str) -> None:
        """Chains of one text agree as far as both go; other shapes are equal where there was the same room."""
        shared = self.drafts.keys() & other.drafts.keys()
        assert shared or not self.drafts, f"{way}: no text in common; this suite is broken"
        for text in sorted(shared):
            (room, a), (other_room, b) = self.drafts[text], other.drafts[text]
            if a.is_chain and b.is_chain:
                length = min(len(a), len(b))
                same = a.tokens[:length] == b.tokens[:length] and bool(a) == bool(b)
            else:
                same = room != other_room or (a.tokens, a.parents) == (b.tokens, b.parents)
            assert same, f"{way}: behind ({len(text)} tokens) {text} it drafts {b.tokens}, and at first {a.tokens}"


@dataclass(slots=True)
class _Staged:
    inner: Any
    prompt: Tokens
    tokens: list[int]
    step: int = 0
    others: int = 0  # rows of the winner, which come before the drafter's own


@dataclass(slots=True)
class _Stage:
    """A drafter on trial: what it is asked and what it answers goes through here, and is checked.

    `rooms`, in turn, bound its rows. With `right`, it is one of two members of a merge: the other drafts the next
    `wins` tokens, in turn, of plain decoding, in front of the drafter's own rows; what it observes tells them apart.
    """

    drafter: Drafter[Any]
    log: _Log = field(default_factory=_Log)
    rooms: tuple[int, ...] = (99,)
    right: Mapping[Tokens, Tokens] | None = None
    wins: tuple[int, ...] = ()
    open: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.drafter.sources, _WINNER)

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    @property
    def gives(self) -> Gives:
        own = self.drafter.gives
        if self.right is None:
            return own
        return Gives("forest", own.rows + max(self.wins), max(own.depth, *self.wins))

    def start(self, requests: Sequence[Opened]) -> list[_Staged]:
        inner = self.drafter.start(requests)
        assert len(inner) == len(requests), f"start gave {len(inner)} states for {len(requests)} requests"
        self.open += len(inner)
        return [_Staged(state, r.prompt, list(r.prompt)) for state, r in zip(inner, requests, strict=True)]

    def propose(self, states: Sequence[_Staged], room: Sequence[Room], noise: Sequence[Noise]) -> list[Draft]:
        winners = [self._winner(s, r) for s, r in zip(states, room, strict=True)]
        own = []
        for s, r, winner in zip(states, room, winners, strict=True):
            rows = min(r.rows - len(winner), self.drafter.gives.rows, self.rooms[s.step % len(self.rooms)])
            own.append(Room(min(r.depth, self.drafter.gives.depth), max(0, rows)))
            s.others = len(winner)
        if not any(r.rows for r in own):  # as in the loop
            drafts = [EMPTY] * len(states)
        else:
            drafts = self.drafter.propose([s.inner for s in states], own, noise)
            assert len(drafts) == len(states), f"propose gave {len(drafts)} drafts for {len(states)} states"
        for s, r, draft in zip(states, own, drafts, strict=True):
            self._check(draft, r)
            if r.rows:
                self.log.drafts[tuple(s.tokens)] = r, draft
        if self.right is None:
            return drafts
        return [_merged(w, draft, len(self.drafter.sources)) for w, draft in zip(winners, drafts, strict=True)]

    def _winner(self, s: _Staged, room: Room) -> Tokens:
        if self.right is None:
            return ()
        done = len(s.tokens) - len(s.prompt)
        return self.right[s.prompt][done : done + min(self.wins[s.step % len(self.wins)], room.chain)]

    def _check(self, draft: Draft, room: Room) -> None:
        gives, name = self.drafter.gives, type(self.drafter).__name__
        assert isinstance(draft, Draft), f"{name} proposed a {type(draft).__name__} in place of a Draft"
        assert len(draft) <= room.rows, f"{name} drafted {len(draft)} rows where there was room for {room.rows}"
        assert draft.depth <= room.depth, f"{name} drafted {draft.depth} tokens on a path, with room for {room.depth}"
        if gives.shape != "forest":
            assert all(draft.judged), f"{name} gives a {gives.shape} and drafted rows that are no candidates"
        if gives.shape == "chain":
            assert draft.is_chain, f"{name} gives a chain and drafted a tree: parents {draft.parents}"
        wrong = [source for source in draft.source if not 0 <= source < len(self.drafter.sources)]
        assert not wrong, f"{name} has {len(self.drafter.sources)} sources and named number {wrong[:1]}"
        rows = {row for row in draft.q_row if row >= 0}
        assert not rows or gives.q == "sampled", f"{name} gives one-hot candidates and drafted some with a q"
        for row in rows:
            assert draft.q is not None
            q = draft.q[row].double()
            proper = bool((q >= 0).all()) and abs(float(q.sum()) - 1) < 1e-5
            assert proper, f"{name}: row {row} of q is no distribution: it sums to {float(q.sum())}"
        for i, row in enumerate(draft.q_row):
            if row >= 0 and draft.q is not None:
                assert draft.q[row][draft.tokens[i]] > 0, f"{name}: candidate {i} was drawn where its q is 0"

    def observe(self, states: Sequence[_Staged], seen: Sequence[Seen]) -> list[_Staged]:
        told = [
            news if news.prefill or not s.others else _own_view(news, s.others)
            for s, news in zip(states, seen, strict=True)
        ]
        inner = self.drafter.observe([s.inner for s in states], told)
        assert len(inner) == len(states), f"observe gave {len(inner)} states for {len(states)}"
        for s, state, news in zip(states, inner, seen, strict=True):
            s.inner, s.others = state, 0
            s.tokens += news.tokens[len(s.tokens) - news.position :]
            s.step += not news.prefill
        return list(states)

    def finish(self, state: _Staged) -> None:
        self.open -= 1
        self.drafter.finish(state.inner)


def _merged(winner: Tokens, own: Draft, source: int) -> Draft:
    """The winner's chain in front of the drafter's own rows. A merged forest is one-hot."""
    m = len(winner)
    return Draft(
        tokens=winner + own.tokens,
        parents=(*range(-1, m - 1), *(p + m if p >= 0 else -1 for p in own.parents)),
        q_row=(-1,) * (m + len(own)),
        judged=(True,) * m + own.judged,
        source=(source,) * m + own.source,
    )


def _own_view(seen: Seen, others: int) -> Seen:
    """What the drafter is told of a merge in which `others` rows come before its own."""

    def rows(values: Sequence[Any] | None) -> Any:
        return None if values is None else (values[0], *values[1 + others :])

    def states(values: Mapping[Any, Tensor] | None) -> Any:
        return None if values is None else {tap: torch.cat([h[:1], h[1 + others :]]) for tap, h in values.items()}

    return replace(
        seen,
        own_path=tuple(row - others for row in seen.own_path if row >= others),
        argmax=rows(seen.argmax),
        choices=rows(seen.choices),
        topk=rows(seen.topk),
        hidden=states(seen.hidden),
    )
