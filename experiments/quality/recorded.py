"""What a reference run foretells of every token of the gold answers, kept, so that other weights are held against it.

A model is led through each item's answer, whatever it would have said itself (teacher forcing): the right choice, the
text of a perplexity, the gold text of a generation, where there is none the reference's own answer. Of each token the
likeliest 64 ids are kept with their log-probabilities and what all others have together: half a kilobyte a token, where
full logits are half a megabyte (llm-compressor#2031).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...decoding.model.storage import atomic_file
from ...errors import UserError
from .scores import KINDS, Item

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from .lm import DecodelabLM

RECORDED = "reference.safetensors"
TOP = 64
SCHEMA = "1"
_AGAIN = "run it again with quality.kl=true"

Passage = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Gold:
    """An item and the answer that models are led through. `about`: its task, id, category, doc_hash, which of equal
    documents it is (`copy`), and where the answer is from (`answer`: gold or own). `passages`: what is read and what is
    foretold behind it, in tokens; a long text has several."""

    about: Mapping[str, Any]
    passages: tuple[Passage, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.about["task"], self.about["doc_hash"], self.about["copy"]

    @property
    def tokens(self) -> int:
        return sum(len(answer) for _, answer in self.passages)

    @property
    def rows(self) -> int:
        """Tokens that are read, what stands before the answers among them."""
        return sum(len(context) + len(answer) - 1 for context, answer in self.passages)


@dataclass(frozen=True, slots=True)
class Top:
    """What is foretold of T tokens: the likeliest `ids` with `logp`, the logarithm of what all `others` have together
    (−inf where there are none), and the likeliest of all."""

    ids: Int[Tensor, "T k"]
    logp: Float[Tensor, "T k"]
    others: Float[Tensor, " T"]
    choice: Int[Tensor, " T"]

    @staticmethod
    def of(logits: Float[Tensor, "T V"], k: int = TOP) -> "Top":
        logp = logits.double().log_softmax(-1)
        ids = logp.topk(min(k, logp.shape[1])).indices
        return Top(ids.int(), logp.gather(-1, ids).float(), _others(logp, ids).float(), logits.argmax(-1).int())

    @staticmethod
    def room(tokens: int, k: int) -> "Top":
        """To be filled by `put`. Small results that are kept one by one between large logits that are not would hold
        the heap apart: gigabytes after a long text."""
        ids, choice = torch.zeros(tokens, k, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
        return Top(ids, torch.zeros(tokens, k), torch.zeros(tokens), choice)

    def put(self, at: int, rows: "Top") -> None:
        for name in Top.__slots__:
            getattr(self, name)[at : at + len(rows.choice)] = getattr(rows, name)

    def to(self, device: torch.device) -> "Top":
        return Top(*(getattr(self, name).to(device) for name in Top.__slots__))

    def __getitem__(self, rows: slice) -> "Top":
        return Top(*(getattr(self, name)[rows] for name in Top.__slots__))

    def kl(self, logits: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
        """KL(p‖q) of this p and the q of `logits`, in float64, all `others` taken as one token: never more than that of
        all tokens apart (data processing), and 0 where q is p."""
        logq = logits.double().log_softmax(-1)
        ids, logp, others = self.ids.long(), self.logp.double(), self.others.double()
        # rounded as p is kept, so that p against itself is 0 exactly
        found = (logp.exp() * (logp - logq.gather(-1, ids).float())).sum(-1)
        rest = others.exp() * (others - _others(logq, ids).float())
        return (found + torch.where(others.isneginf(), 0.0, rest)).clamp(min=0)


def _others(logp: Float[Tensor, "T V"], ids: Int[Tensor, "T k"]) -> Float[Tensor, " T"]:
    return logp.scatter(-1, ids, -torch.inf).logsumexp(-1)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's predictions of gold answers. `key`: the run's. `tokenizer`: the digest of its vocabulary. `floor`: what
    rounding alone does to the same weights, null where it was not measured. `skipped`: items without an answer."""

    key: str
    tokenizer: str
    vocab: int
    floor: Mapping[str, Any] | None
    skipped: int
    golds: tuple[Gold, ...]
    top: Top

    @property
    def longest(self) -> int:
        """Tokens of the longest passage that are read."""
        return max(len(context) + len(answer) - 1 for gold in self.golds for context, answer in gold.passages)


def tokenizer_digest(tokenizer: Any) -> str:
    return hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()[:16]


# What the answer is


def gold_of(lm: "DecodelabLM", task: "Task", item: Item, row: Mapping[str, Any], copy: int, chat: bool) -> Gold | None:
    """`row`: the item's line of quality.jsonl; `copy`: of equal documents, which it is. None where there is nothing to
    be led through."""
    about = {key: row[key] for key in ("task", "id", "category", "doc_hash")} | {"copy": copy, "answer": "gold"}
    sample = item.samples[0]
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        passages: list[tuple[Sequence[int], Sequence[int]]] = [*lm.windows(sample["arguments"][0][0])]
    else:
        generates = KINDS[task.OUTPUT_TYPE] == "generate"
        found = _generated(task, sample, chat) if generates else _chosen(task, sample)
        if found is None and generates:
            about["answer"] = "own"
            found = sample["arguments"][0][0], item.answers[0].text or ""
        if found is not None and generates:
            found = found[0], _unstopped(found[1], sample["arguments"][0][1].get("until") or ())
        if found is None or not found[1].strip():
            return None
        apart = generates and found[0][-1:].isspace()  # what is generated begins behind the blanks of its prompt
        passages = [lm.fitting(*(lm.apart if apart else lm.pair)(*found))]
    told = [(tuple(context), _answer(lm, answer)) for context, answer in passages]
    kept = tuple(passage for passage in told if lm.lab.text(passage[1]).strip())
    return Gold(about, kept) if kept else None


def _chosen(task: "Task", sample: Mapping[str, Any]) -> tuple[str, str] | None:
    """The right choice behind what it is scored behind."""
    asked = sample["arguments"]
    own = getattr(task, "own", None)
    right: Any = 0 if len(asked) == 1 else sample["target"] if own is None else own.question(sample["doc"]).gold
    if own is None and len(asked) > 1 and getattr(task, "multiple_input", False):
        right = task.doc_to_text(sample["doc"])  # of lm-eval's, where each choice has a context of its own
    if not isinstance(right, int) or not 0 <= right < len(asked):
        return None
    return asked[right][0], asked[right][1]


def _generated(task: "Task", sample: Mapping[str, Any], chat: bool) -> tuple[str, str] | None:
    """The row's `solution`, else what a solved example would show."""
    context, own = sample["arguments"][0][0], getattr(task, "own", None)
    if own is None:
        target = sample["target"]
        delimiter = "" if chat else str(task.config.target_delimiter)
        return (context, f"{delimiter}{target}") if isinstance(target, str) and target.strip() else None
    question = own.question(sample["doc"])
    solution = question.row.fields.get("solution")
    if isinstance(solution, str) and solution.strip():
        blank = "" if chat or context[-1:].isspace() else " "
        return context, f"{blank}{solution.strip()}"
    text = question.reply if chat else question.solved
    return None if text is None else (context, text)


def _unstopped(text: str, stops: str | Sequence[str]) -> str:
    """Without the stop string that it ends with, as a solved example does."""
    end = next((stop for stop in ([stops] if isinstance(stops, str) else stops) if stop and text.endswith(stop)), "")
    return text.removesuffix(end).rstrip() if end else text


def _answer(lm: "DecodelabLM", tokens: Sequence[int]) -> tuple[int, ...]:
    """Without the tokens that end a text, of which KL says whether the model stops, and nothing of the answer."""
    kept = list(tokens)
    while kept and kept[-1] in (*lm.lab.eos_ids, lm.eot_token_id):
        kept.pop()
    return tuple(kept)


# Its file


def write_recorded(folder: Path, made: Recorded) -> None:
    """Whole or not at all."""
    about = {
        "schema": SCHEMA,
        "key": made.key,
        "tokenizer": made.tokenizer,
        "vocab": str(made.vocab),
        "floor": json.dumps(made.floor),
        "skipped": str(made.skipped),
        "golds": json.dumps([dict(gold.about) for gold in made.golds]),
    }
    lengths = [
        (number, len(context), len(answer))
        for number, gold in enumerate(made.golds)
        for context, answer in gold.passages
    ]
    tokens = [token for gold in made.golds for context, answer in gold.passages for token in (*context, *answer)]
    tensors = {"passages": torch.tensor(lengths).int(), "tokens": torch.tensor(tokens).int()}
    content = save(tensors | {name: getattr(made.top, name).contiguous() for name in Top.__slots__}, about)
    with atomic_file(folder / RECORDED, len(content)) as file:
        file.write(content)


def read_recorded(folder: Path) -> Recorded:
    """A reference run's; UserError where it is missing, or not whole."""
    file = folder / RECORDED
    if not file.is_file():
        raise UserError(f"quality.kl=true, and {folder} holds no {RECORDED}: {_AGAIN} and without against")
    try:
        with safe_open(file, "pt") as stored:
            about = stored.metadata() or {}
            if about.get("schema") != SCHEMA:
                raise ValueError(f"schema {about.get('schema')}, and this version reads {SCHEMA}")
            found = {name: stored.get_tensor(name) for name in ("passages", "tokens", *Top.__slots__)}
        if found["passages"].is_floating_point() or bool((found["passages"] < 0).any()):
            raise ValueError("its passages have no lengths")
        made = Recorded(
            about["key"],
            about["tokenizer"],
            int(about["vocab"]),
            json.loads(about["floor"]),
            int(about["skipped"]),
            tuple(_golds(json.loads(about["golds"]), found["passages"].tolist(), found["tokens"].tolist())),
            Top(*(found[name] for name in Top.__slots__)),
        )
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({' '.join(str(error).split())[:80]}): {_AGAIN}") from error
    if (wrong := _wrong(made)) is not None:
        raise UserError(f"{file} cannot be read ({wrong}): {_AGAIN}")
    return made


def _wrong(made: Recorded) -> str | None:
    """What is not as it is written; numbers that are none would pass through all that is computed of them."""
    top, vocab = made.top, made.vocab
    T, k = sum(gold.tokens for gold in made.golds), min(TOP, vocab)
    sizes = {"ids": (T, k), "logp": (T, k), "others": (T,), "choice": (T,)}
    if not T or any(getattr(top, name).shape != size for name, size in sizes.items()):
        return "its answers and its predictions do not fit"
    read = torch.tensor(
        [token for gold in made.golds for passage in gold.passages for part in passage for token in part]
    )
    if any(
        ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < vocab
        for ids in (top.ids, top.choice, read)
    ):
        return f"its tokens are not all among the {vocab} of its vocabulary"
    if any(part.dtype != torch.float32 for part in (top.logp, top.others)):
        return "its probabilities are not in float32"
    total = top.logp.double().exp().sum(-1) + top.others.double().exp()
    if not bool(((total - 1).abs() < 1e-3).all()):  # nor is that of a NaN
        return "its probabilities do not sum to 1"
    return None


def _golds(
    about: Sequence[Mapping[str, Any]], passages: Sequence[Sequence[int]], tokens: Sequence[int]
) -> Iterator[Gold]:
    pieces: list[list[Passage]] = [[] for _ in about]
    at = 0
    for number, context, answer in passages:
        middle, end = at + context, at + context + answer
        pieces[number].append((tuple(tokens[at:middle]), tuple(tokens[middle:end])))
        at = end
    for one, some in zip(about, pieces, strict=True):
        yield Gold(one, tuple(some))
