"""How far this run's predictions are from the reference's, token by token, on the user's own prompts and gold answers.

KL(p‖q) of the reference's p and this run's q, and whether both hold the same token likeliest. p is kept as its
likeliest ids and one rest, so the figure is a lower bound of that over all tokens, and a close one: what is missed
lies within the rest. Intervals are bootstraps by item: tokens of one answer are alike.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...decoding.model.load import load_decoder
from ...errors import UserError
from ..files import write_atomic
from ..lab import Progress
from ..statistics import Column, holm, ratio_interval, share_interval, worst_slice, worst_step
from .recorded import TOP, Gold, Recorded, Top, tokenizer_digest

if TYPE_CHECKING:
    from .lm import DecodelabLM

ROWS = 32  # of logits in float64 at once
FLOOR = 2048  # tokens on which the noise of rounding is measured
READING = "reading tokens of gold answers"
BEFORE = 24  # tokens shown before the worst one

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Token:
    """The token of an answer at which two models differ most."""

    kl: float
    step: int
    passage: int
    place: int
    reference: tuple[int, float]  # its choice, and how likely it is there
    here: tuple[int, float]


@dataclass(frozen=True, slots=True)
class Led:
    """An item that both were led through: of each token the KL, and whether the likeliest token is another one."""

    gold: Gold
    kl: Column
    flips: Column
    worst: Token


# The reference


@torch.inference_mode()
def record(lm: "DecodelabLM", golds: Sequence[Gold], key: str, skipped: int, progress: Progress) -> Recorded | None:
    """One pass over each passage. None where no item has an answer."""
    vocab, at = lm.lab.target.config.vocab, 0
    top = Top.room(sum(gold.tokens for gold in golds), min(TOP, vocab))
    total, read = sum(gold.rows for gold in golds), 0
    for gold in golds:
        progress(READING, read, total)
        read += gold.rows
        for context, answer in gold.passages:
            for rows in _foretold(lm, context, answer):
                top.put(at, Top.of(rows))
                at += len(rows)
    if not golds:
        return None
    progress(READING, total, total)
    made = Recorded(key, tokenizer_digest(lm.tokenizer), vocab, None, skipped, tuple(golds), top)
    return replace(made, floor=_floor(lm, made, progress))


def _foretold(lm: "DecodelabLM", context: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
    for logits in lm.foretold(context, answer):
        yield from logits.split(ROWS)


def _floor(lm: "DecodelabLM", made: Recorded, progress: Progress) -> dict[str, Any] | None:
    """What rounding alone does: the same weights in bfloat16 against float32, or the other way round, on about `FLOOR`
    tokens from all over the items."""
    from ..hardware import available_memory
    from ..memory import Held

    lab = lm.lab
    mine, device = lab.target.dtype, lab.target.device
    other = torch.bfloat16 if mine == torch.float32 else torch.float32
    needed, free = Held.of(lab.source, other, device), available_memory(device)
    if free is not None and needed.bytes + needed.packed > free:
        warnings.warn(
            f"no noise floor of KL: the weights in {_name(other)} do not fit beside", RuntimeWarning, stacklevel=2
        )
        return None
    every = -(-sum(gold.tokens for gold in made.golds) // FLOOR)
    layout, kernels = lab.target.config.layout, lab.target.kernels
    twin = load_decoder(lab.source, dtype=other, device=device, layout=layout, kernels=kernels, progress=progress)
    led = lead(lm.beside(twin), made, {gold.key for gold in made.golds[::every]}, progress)
    kl, flips = (np.concatenate([getattr(one, name) for one in led]) for name in ("kl", "flips"))
    return {
        "dtypes": [_name(other), _name(mine)],
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "agreement": float(1 - flips.mean()),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# This run


def refuse_recorded(made: Recorded, folder: Path, key: str, tokenizer: Any, vocab: int, context: int) -> None:
    """UserError where this run's predictions cannot be held against those. `key`: of the reference's result.json."""
    beside = "or leave quality.kl out"
    if made.key != key:
        raise UserError(
            f"{folder} holds the predictions of another run ({made.key}, not {key}): run it again, {beside}"
        )
    if made.tokenizer != tokenizer_digest(tokenizer) or made.vocab != vocab:
        raise UserError(
            f"not comparable with {folder} token by token: its tokenizer is another one ({made.vocab} tokens there, "
            f"{vocab} here); take a reference of the same tokenizer, {beside}"
        )
    if made.longest > context:
        raise UserError(
            f"not comparable with {folder} token by token: it has answers of {made.longest} tokens with their prompts, "
            f"and the context here is {context}; lower quality.max_length there, {beside}"
        )


@torch.inference_mode()
def lead(lm: "DecodelabLM", made: Recorded, asked: set[Key], progress: Progress) -> list[Led]:
    """Through the answers of the items that are asked for, as the reference was."""
    found, at, read = [], 0, 0
    total = sum(gold.rows for gold in made.golds if gold.key in asked)
    for gold in made.golds:
        rows = slice(at, at + gold.tokens)
        at = rows.stop
        if gold.key in asked:
            progress(READING, read, total)
            read += gold.rows
            found.append(_led(lm, gold, made.top[rows]))
    progress(READING, total, total)
    return found


def _led(lm: "DecodelabLM", gold: Gold, top: Top) -> Led:
    losses, sure, here = (np.empty(gold.tokens, dtype) for dtype in (float, float, int))  # filled, as Top.room says why
    at = 0
    for context, answer in gold.passages:
        for rows in _foretold(lm, context, answer):
            of = slice(at, at + len(rows))
            losses[of] = top[of].to(rows.device).kl(rows).cpu().numpy()
            here[of] = rows.argmax(-1).cpu().numpy()
            sure[of] = rows.softmax(-1).amax(-1).float().cpu().numpy()
            at = of.stop
    step = int(losses.argmax())
    p = top.logp[step].exp().max()
    token = Token(
        float(losses[step]),
        step,
        *_place(gold, step),
        (int(top.choice[step]), float(p)),
        (int(here[step]), float(sure[step])),
    )
    return Led(gold, losses, (here != top.choice.numpy()).astype(float), token)


def _place(gold: Gold, step: int) -> tuple[int, int]:
    """The passage that a token of the answer stands in, and where in it."""
    for number, (_, answer) in enumerate(gold.passages):
        if step < len(answer):
            return number, step
        step -= len(answer)
    raise AssertionError


# What it comes to


def summarise(made: Recorded, folder: Path, led: Sequence[Led]) -> dict[str, Any]:
    """What stands in a result under `quality.divergence`."""
    tasks = dict.fromkeys(one.gold.key[0] for one in led)
    of = {name: [one for one in led if one.gold.key[0] == name] for name in tasks}
    return {
        "reference": {"folder": str(folder), "key": made.key},
        "top": TOP,
        "floor": made.floor,
        "skipped": made.skipped,
        "unpaired": len(made.golds) - len(led),
        **_figures(led),
        "tasks": {name: _figures(some) for name, some in of.items()},
        "where": where(led),
    }


def _figures(led: Sequence[Led]) -> dict[str, Any]:
    kl, flips = (np.concatenate([getattr(one, name) for one in led]) for name in ("kl", "flips"))
    sizes = np.array([len(one.kl) for one in led], dtype=float)
    same = ratio_interval(np.array([len(one.kl) - one.flips.sum() for one in led]), sizes)
    if not flips.any():  # a bootstrap of what never happened has no width
        same = share_interval(np.ones(len(led)))
    quantiles = dict(zip(("p50", "p99", "max"), map(float, np.quantile(kl, (0.5, 0.99, 1))), strict=True))
    return {
        "items": len(led),
        "tokens": len(kl),
        "own": sum(one.gold.about["answer"] == "own" for one in led),
        "kl": asdict(ratio_interval(np.array([one.kl.sum() for one in led]), sizes)) | quantiles,
        "agreement": asdict(same),
    }


def where(led: Sequence[Led]) -> list[dict[str, Any]]:
    """The worst slice by task, category (of items that have one), length and step of the answer, with its share of KL
    and of the tokens; p is corrected for the slicings (Holm). Of what has two slices at least."""
    several = len({one.gold.key[0] for one in led}) > 1
    named = [one for one in led if one.gold.about["category"] is not None]
    slicings = {
        "task": (led, [one.gold.key[0] for one in led]),
        "category": (named, [_category(one.gold, several) for one in named]),
        "length": (led, [_doubling(len(one.kl)) for one in led]),
    }
    rows = []
    for by, (some, labels) in slicings.items():
        sizes = [len(one.kl) for one in some]
        losses = np.array([one.kl.sum() for one in some])
        worst = worst_slice(losses, np.array(sizes, dtype=float), labels)
        rows.append((by, worst, some, np.repeat(labels, sizes)))
    steps = [_doubling(step + 1) for one in led for step in range(len(one.kl))]
    items = np.repeat(np.arange(len(led)), [len(one.kl) for one in led])
    worst = worst_step(np.concatenate([one.kl for one in led]), items, steps)
    rows.append(("step", worst, led, np.array(steps)))
    found = []
    for by, worst, some, names in rows:
        if worst is not None:
            flips = np.concatenate([one.flips for one in some])
            share = float(flips[names == worst.name].sum() / flips.sum()) if flips.any() else None
            found.append({"by": by, **asdict(worst), "flips": share})
    corrected = holm([row["p"] for row in found])
    return [row | {"p_holm": p} for row, p in zip(found, corrected, strict=True)]


def _category(gold: Gold, several: bool) -> str:
    name = str(gold.about["category"])
    return f"{gold.key[0]}: {name}" if several else name


def _doubling(n: int) -> str:
    """1, 2–3, 4–7, 8–15, …"""
    low = 1 << (n.bit_length() - 1)
    return "1" if low == 1 else f"{low}–{2 * low - 1}"


def ranked(led: Sequence[Led], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A line an item, the most KL a token first, each with its worst token."""

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def side(choice: tuple[int, float]) -> dict[str, Any]:
        return {"token": text([choice[0]]), "p": choice[1]}

    for one in sorted(led, key=lambda one: -one.kl.mean()):
        context, answer = one.gold.passages[one.worst.passage]
        before = [*context, *answer[: one.worst.place]][-BEFORE:]
        yield {
            **one.gold.about,
            "tokens": len(one.kl),
            "kl": float(one.kl.mean()),
            "flips": int(one.flips.sum()),
            "worst": {
                "step": one.worst.step + 1,
                "kl": one.worst.kl,
                "before": text(before),
                "token": text([answer[one.worst.place]]),
                "reference": side(one.worst.reference),
                "here": side(one.worst.here),
            },
        }


def write_ranked(folder: Path, led: Sequence[Led], tokenizer: Any) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in ranked(led, tokenizer)]
    write_atomic(folder / "divergence.jsonl", "".join(lines))
