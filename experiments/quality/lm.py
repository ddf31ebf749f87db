"""decodelab as a model of lm-eval: it generates through the loop, as configured, and scores with the same weights."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...attention.cache import Cache
from ...attention.rows import Rows, chains
from ...decoding.events import finish
from ...decoding.model.decoder import Decoder
from ...decoding.reference import PREFILL_CHUNK
from ...errors import UserError
from ..lab import Lab, Progress
from .answers import Answer, Answers, request_digest

LOGITS = 128  # rows of float32 logits held at once
FOREST = 256  # rows of continuations behind one context; each holds a mask over all keys, which a prompt does not need
DRAWN = ("temperature", "top_k", "top_p", "min_p")  # keys of lm-eval's tasks that mean nothing to greedy decoding

Ask = Callable[[Sequence[Any]], list[Answer]]


class DecodelabLM(TemplateLM):
    """`generate_until` decodes with the lab's drafter and rule: the configured law wins over a task's `do_sample` and
    `temperature`, with a warning. Likelihoods are the weights' own, with the unembedding in float32 at least: in
    bfloat16 choices tie. `thinking`: the tags around what is not scored; stop strings then count behind them only.

    Prompts longer than the context lose their beginning, with a warning; generation leaves room for its answer.
    `max_length`: a shorter context of likelihoods, such as the 2048 tokens of many published perplexities.
    """

    def __init__(
        self,
        lab: Lab,
        *,
        seed: int = 0,
        batch: int = 1,
        max_new_tokens: int = 256,
        max_length: int | None = None,
        thinking: tuple[str, str] | None = None,
        template: str | None = None,
        answers: Answers | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.lab, self.seed, self.batch, self.max_new_tokens = lab, seed, batch, max_new_tokens
        self.thinking, self.template, self.progress = thinking, template, progress
        self.tokenizer, self._max_length = lab.tokenizer, max_length
        self.answers = Answers() if answers is None else answers
        self.asked: dict[int | None, list[Answer | None]] = {}
        self._head: torch.Tensor | None = None
        self.begin()

    def begin(self, task: str = "", repeat: int = 0, repeats: int = 1, *, replay: bool = False) -> None:
        """Before lm-eval asks: for which task, and which of how many draws this is. `asked` then holds the answers by
        document, once all are there, and None for those not known in a `replay`, which asks the model nothing."""
        self._task, self._repeat, self._repeats, self._replay = task, repeat, repeats, replay
        self.asked = {}

    def beside(self, target: Decoder) -> "DecodelabLM":
        """The same of other weights, for `foretold` alone."""
        return DecodelabLM(replace(self.lab, target=target), max_length=self._max_length)

    # What lm-eval knows a model by

    @property
    def eot_token_id(self) -> int:
        return self.lab.eos_ids[0] if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Tokens that a likelihood may look back on."""
        return self._max_length or self.lab.context

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # it is a program
            raise UserError(
                f"the chat template refuses a conversation ({error}); quality.template=FILE gives another"
            ) from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """With the special tokens that the tokenizer adds by itself, and no second BOS."""
        if add_special_tokens is None and string.startswith(self._text([self.prefix_token_id])):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # Answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if not self.lab.acceptance.law().sample:
            samples = [0] * len(requests)
        else:  # the n-th draw of one prompt, over all repeats
            times: Counter[str] = Counter()
            samples = []
            for r in requests:
                plain = request_digest(r.request_type, r.args, 0)
                samples.append(self._repeat + self._repeats * times[plain])
                times[plain] += 1
        for r in requests:
            self._warn_of_law(r.task_name, r.args[1])
        jobs = [(*r.args, sample) for r, sample in zip(requests, samples, strict=True)]
        return [a.value if a else "" for a in self._each(requests, samples, jobs, self._batches, self._generate)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        def by_context(jobs: Sequence[Any]) -> Iterator[list[Any]]:
            for _, same in groupby(jobs, lambda job: job[1][0]):
                yield list(same)

        def score(jobs: Sequence[tuple[str, str]]) -> list[Answer]:
            return self._score([(job, *self.pair(*job)) for job in jobs])

        jobs = [r.args for r in requests]
        return [a.value if a else (0.0, False) for a in self._each(requests, [0] * len(jobs), jobs, by_context, score)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        def roll(texts: Sequence[tuple[str]]) -> list[Answer]:
            return [self._roll(text) for (text,) in texts]

        jobs = [r.args for r in requests]
        return [a.value if a else 0.0 for a in self._each(requests, [0] * len(jobs), jobs, _singly, roll)]

    def _each(
        self,
        requests: Sequence[Instance],
        samples: Sequence[int],
        jobs: Sequence[Any],
        split: Callable[[Sequence[Any]], Iterable[list[Any]]],
        ask: Ask,
    ) -> list[Answer | None]:
        """An answer for each request; those not known are asked, equal ones once, and kept as they come."""
        digests = [request_digest(r.request_type, r.args, s) for r, s in zip(requests, samples, strict=True)]
        missing = {d: job for d, job in zip(digests, jobs, strict=True) if self.answers.get(d) is None}
        items: dict[str, set[Any]] = {}  # whose answers wait for a digest's
        waits = Counter[Any]()
        for request, digest in zip(requests, digests, strict=True):
            if digest in missing and request.doc_id not in items.setdefault(digest, set()):
                items[digest].add(request.doc_id)
                waits[request.doc_id] += 1
        total = len({request.doc_id for request in requests})
        done = total - len(waits)
        name = requests[0].task_name if requests else None
        if not self._replay:
            for batch in split(list(missing.items())):
                found = ask([job for _, job in batch])
                for (digest, _), answer in zip(batch, found, strict=True):
                    self.answers.add(digest, answer, self._task)
                    for item in items[digest]:
                        waits[item] -= 1
                        done += not waits[item]
                if self.progress is not None:
                    self.progress(f"asking {name}", done, total)
        answers = [self.answers.get(digest) for digest in digests]
        for request, known in zip(requests, answers, strict=True):
            self.asked.setdefault(request.doc_id, []).append(known)
        if cut := sum(1 for known in answers if known is not None and known.cut):
            _warn(f"{name}: {cut} of {len(answers)} prompts were longer than the context and lost their beginning")
        return answers

    # Generation

    def _batches(self, jobs: Sequence[Any]) -> Iterator[list[Any]]:
        for at in range(0, len(jobs), self.batch):
            yield list(jobs[at : at + self.batch])

    def _generate(self, jobs: Sequence[tuple[str, Mapping[str, Any], int]]) -> list[Answer]:
        requests, stops, cuts = [], [], []
        for prompt, options, sample in jobs:
            limit, stop = limits(options, self.max_new_tokens)
            if (eos := self.tokenizer.eos_token_id) is not None and eos not in self.lab.eos_ids:
                stop += (self._text([eos]),)
            if (room := self.lab.context - limit) < 1:
                raise UserError(f"an answer of {limit} tokens does not fit the context of {self.lab.context}; lower it")
            ids = self.tok_encode(prompt) or [self.prefix_token_id]
            spelled = () if self.thinking else stop  # within thoughts a stop string ends nothing
            requests.append(self.lab.request(ids[-room:], limit, stop=spelled, sample=sample))
            stops.append(stop)
            cuts.append(max(0, len(ids) - room))
        answers = []
        for (prompt, _, _), stop, cut, g in zip(
            jobs, stops, cuts, finish(self.lab.strategy(requests, seed=self.seed)), strict=True
        ):
            text, spoken = self.lab.text(g.tokens), self._spoken(prompt, g.tokens)
            value = before(spoken, stop)
            ended = g.reason in ("eos", "stop") or len(value) < len(spoken)
            answers.append(Answer(value, len(g.tokens), text, not ended, cut))
        return answers

    def _spoken(self, prompt: str, tokens: Sequence[int]) -> str:
        """The text without its thoughts, whose tags may be special tokens."""
        if self.thinking is None:
            return self.lab.text(tokens)
        text = without_thoughts(prompt, self._text(tokens), self.thinking)
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(str(special), "")
        return text

    def _warn_of_law(self, name: str | None, options: Mapping[str, Any]) -> None:
        law = self.lab.acceptance.law()
        asked = {key: options[key] for key in (*DRAWN, "repetition_penalty") if options.get(key) is not None}
        sample = options.get("do_sample")
        if sample is None and "temperature" in asked:
            sample = asked["temperature"] > 0
        if not sample:
            asked = {key: value for key, value in asked.items() if key not in DRAWN}
        other = [] if sample in (None, law.sample) else [f"do_sample={sample}"]
        if other := other + [f"{key}={value}" for key, value in asked.items() if value != getattr(law, key)]:
            rule = type(self.lab.acceptance).__name__.lower()
            _warn(f"{name} asks for {', '.join(other)}: acceptance={rule} decides, as configured")

    # Likelihoods

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval tokenises them: together, cut behind the context's tokens. Where that leaves nothing, since the
        continuation's text went into the context's last token, they are tokenised apart (lm-eval#1297, lm-eval#3336).
        """
        if not continuation:
            return self.tok_encode(context) or [self.prefix_token_id], []
        if context:
            ahead, behind = self._encode_pair(context, continuation)
            if ahead and behind:
                return ahead, behind
        return self.apart(context, continuation)

    def apart(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of each by itself, behind one token at least."""
        ahead = self.tok_encode(context) if context else []
        alone = self.tok_encode(continuation, add_special_tokens=False)
        if not ahead and alone[:1] == [self.prefix_token_id]:
            return alone[:1], alone[1:]
        return ahead or [self.prefix_token_id], alone

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [answer.value for answer in self._score(requests)]

    def _score(self, pairs: Sequence[tuple[tuple[str, str], list[int], list[int]]]) -> list[Answer]:
        """Continuations of one context share its forward."""
        found: dict[int, Answer] = {}
        same: dict[tuple[int, ...], list[int]] = {}
        cuts = []
        for i, (_, context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                holds = f"the context holds {self.max_length}; shorten it"
                if self._max_length is not None:
                    holds = f"quality.max_length={self._max_length} holds fewer; raise it"
                raise UserError(f"a continuation has {len(continuation)} tokens, {holds}")
            # the last token is scored, never read
            cut = max(0, len(context) + len(continuation) - self.max_length - 1)
            cuts.append(cut)
            same.setdefault(tuple(context[cut:]), []).append(i)
        for kept, members in same.items():
            scored = self.loglikelihoods(kept, [pairs[i][2] for i in members])
            for i, value in zip(members, scored, strict=True):
                found[i] = Answer(value, len(pairs[i][2]), cut=cuts[i])
        return [found[i] for i in range(len(pairs))]

    def _roll(self, text: str) -> Answer:
        """The whole text, window by window, as lm-eval cuts them: each token once, behind as much as fits."""
        pairs = [(("", text), *window) for window in self.windows(text)]
        return Answer(float(sum(a.value[0] for a in self._score(pairs))), sum(len(tokens) for *_, tokens in pairs))

    def windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Of a whole text: what is read, and what is scored behind it."""
        tokens = self.tok_encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def fitting(self, context: Sequence[int], answer: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """As much of an answer as the context holds, behind as much of what stands before it as there is room for."""
        kept = answer[: self.max_length]
        return context[max(0, len(context) + len(kept) - self.max_length - 1) :], kept

    def foretold(self, context: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
        """Logits of each token of an answer, in one pass over both, `LOGITS` rows at a time."""
        hidden, _ = self._read([*context, *answer[:-1]])
        return self._logits(hidden[len(context) - 1 :])

    @torch.inference_mode()
    def loglikelihoods(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """For each, Σ log p behind the context (at least one token), and whether it is what argmax would say.

        The context is read once; the short continuations behind it are one forest, a long one is read with the context.
        """
        hidden: dict[int, torch.Tensor] = {}
        short = [i for i, c in enumerate(continuations) if len(c) <= FOREST]
        for i in set(range(len(continuations))) - set(short):
            read, _ = self._read([*context, *continuations[i][:-1]])
            hidden[i] = read[len(context) - 1 :]
        if short:
            hidden |= self._forests(context, {i: continuations[i] for i in short})
        return [self._sum(hidden[i], c) for i, c in enumerate(continuations)]

    def _read(self, tokens: Sequence[int], more: int = 0) -> tuple[torch.Tensor, tuple[Cache, int]]:
        """What the unembedding reads of each row [T, dim], and the cache, with room for `more` rows, and its slot."""
        cache = self.lab.target.open_cache(1, len(tokens) + more)
        slot, hidden = cache.open(), []
        for at in range(0, len(tokens), PREFILL_CHUNK):
            piece = tokens[at : at + PREFILL_CHUNK]
            hidden.append(self._forward(chains([piece], [slot], prompt=True), cache))
            cache.commit({slot: range(len(piece))})
        return torch.cat(hidden), (cache, slot)

    def _forests(self, context: Sequence[int], continuations: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        packs: list[list[int]] = [[]]
        for i, c in continuations.items():
            if sum(len(continuations[j]) for j in packs[-1]) + len(c) > FOREST:
                packs.append([])
            packs[-1].append(i)
        read, (cache, slot) = self._read(context, FOREST)
        hidden = {}
        for pack in packs:
            tokens: list[int] = []
            parents: list[int] = []
            ends = []
            for i in pack:
                chain = continuations[i][:-1]
                parents += [-1, *range(len(tokens), len(tokens) + len(chain) - 1)][: len(chain)]
                tokens += chain
                ends.append(len(tokens))
            rows = read[:0]
            if tokens:
                forest = Rows(torch.tensor(tokens), torch.tensor(parents), torch.full((len(tokens),), slot), False)
                rows = self._forward(forest, cache)
                cache.drop()
            for i, a, b in zip(pack, [0, *ends], ends, strict=False):
                hidden[i] = torch.cat([read[-1:], rows[a:b]])
        return hidden

    def _forward(self, rows: Rows, cache: Cache) -> torch.Tensor:
        return self.lab.target(rows, cache, logits_of=torch.tensor([0]), taps=("final",)).hidden["final"]

    def _sum(self, hidden: torch.Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
        """Of `tokens`, row i of `hidden` being what token i is predicted from."""
        total, greedy = 0.0, True
        for at, logits in zip(range(0, len(tokens), LOGITS), self._logits(hidden), strict=False):
            wanted = torch.tensor(tokens[at : at + LOGITS], device=hidden.device)
            chosen = logits.gather(1, wanted[:, None])[:, 0]
            total += float((chosen - logits.logsumexp(-1)).double().sum())
            greedy = greedy and bool((logits.argmax(-1) == wanted).all())
        return total, greedy

    def _logits(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """`LOGITS` rows at a time, in float32 at least."""
        if self._head is None:
            weight = self.lab.target.unembedding.dense()
            self._head = weight.to(torch.promote_types(weight.dtype, torch.float32))
        for rows in hidden.split(LOGITS):
            yield rows.to(self._head) @ self._head.T


def limits(options: Mapping[str, Any], default: int) -> tuple[int, tuple[str, ...]]:
    """(most tokens, stop strings) of a task's `generation_kwargs`."""
    given = normalize_gen_kwargs(dict(options), default)
    return given["max_gen_toks"], tuple(stop for stop in given["until"] or () if stop)


def without_thoughts(prompt: str, text: str, tags: tuple[str, str]) -> str:
    """What is said outside of the tags. The prompt may have opened the first one; a thought that does not end leaves
    nothing behind it."""
    opening, closing = tags
    if prompt.rstrip().endswith(opening):
        text = opening + text
    text = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}", "", text, flags=re.DOTALL)
    return text.rpartition(closing)[2].partition(opening)[0].lstrip()


def before(text: str, stops: Iterable[str]) -> str:
    """The text up to the first stop string."""
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def _singly(jobs: Sequence[Any]) -> Iterator[list[Any]]:
    for job in jobs:
        yield [job]


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
