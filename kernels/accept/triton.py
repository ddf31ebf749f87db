"""Each row's best token, over slices of the vocabulary; then one program a sequence walks from its root.

Whether a drawn candidate is kept depends on its parent's law and the siblings before it, not on the path to them. So
before that, for a first, second, … drawn sibling of all rows at once, what is left of the law is summed.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..aot import Specimen

_BLOCK = 1024
_SLICE = 4096  # tokens that one program looks at


@triton.jit
@no_type_check  # this one is no Python
def _next(parents_ptr, q_rows_ptr, first, last, parent, after, BLOCK: tl.constexpr):
    """The first drawn candidate behind row first + parent that comes later than `after`; `last` if there is none."""
    found = last
    start = after + 1
    while (start < last) & (found == last):
        row = start + tl.arange(0, BLOCK)
        behind = tl.load(parents_ptr + row, mask=row < last, other=-2).to(tl.int64) == parent
        behind = behind & (tl.load(q_rows_ptr + row, mask=row < last, other=-1) >= 0)
        found = tl.min(tl.where(behind, row, last), 0)
        start += BLOCK
    return found


@triton.jit
@no_type_check
def _folded(p, q, mass):
    """What is left of p once a candidate of q was rejected, `mass` before it is normed."""
    return tl.where(mass > 0, tl.maximum(p - q, 0.0) * (1.0 / tl.where(mass > 0, mass, 1.0)), p)


@triton.jit
@no_type_check
def _mass_of(mass_ptr, at, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(mass_ptr + at * parts + part, mask=part < parts, other=0.0), 0)


@triton.jit
@no_type_check
def _law(scores_ptr, row, stride, token, mask):
    """p, in float64; 0 where the score is NaN."""
    score = tl.load(scores_ptr + row * stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.exp(tl.where(score == score, score, float("-inf")).to(tl.float64))


@triton.jit
@no_type_check
def _mass(
    scores_ptr,
    parents_ptr,
    firsts_ptr,
    lasts_ptr,
    q_ptr,
    q_rows_ptr,
    mass_ptr,
    vocab,
    stride,
    stride_q,
    RANK: tl.constexpr,
    SIBLINGS: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    first = tl.load(firsts_ptr + row)
    last = tl.load(lasts_ptr + row)
    total = tl.full([], 0.0, tl.float64)
    mine = _next(parents_ptr, q_rows_ptr, first, last, row - first, row, CHILDREN)
    for _ in tl.static_range(RANK):
        if mine < last:
            mine = _next(parents_ptr, q_rows_ptr, first, last, row - first, mine, CHILDREN)
    if mine < last:
        token = part * SLICE + tl.arange(0, SLICE)
        there = token < vocab
        left = _law(scores_ptr, row, stride, token, there)
        child = row
        for rank in tl.static_range(RANK):
            child = _next(parents_ptr, q_rows_ptr, first, last, row - first, child, CHILDREN)
            of = tl.load(q_rows_ptr + child).to(tl.int64)
            q = tl.load(q_ptr + of * stride_q + token, mask=there, other=0.0).to(tl.float32).to(tl.float64)
            left = _folded(left, q, _mass_of(mass_ptr, row * SIBLINGS + rank, parts, PARTS))
        of = tl.load(q_rows_ptr + mine).to(tl.int64)
        q = tl.load(q_ptr + of * stride_q + token, mask=there, other=0.0).to(tl.float32).to(tl.float64)
        total = tl.sum(tl.maximum(left - q, 0.0), 0)
    tl.store(mass_ptr + (row * SIBLINGS + RANK) * parts + part, total)


@triton.jit
@no_type_check
def _best(
    scores_ptr,
    keys_ptr,
    parents_ptr,
    firsts_ptr,
    lasts_ptr,
    q_ptr,
    q_rows_ptr,
    mass_ptr,
    value_ptr,
    index_ptr,
    vocab,
    stride,
    stride_q,
    SIBLINGS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    first = row
    last = row
    eldest = row
    if SIBLINGS > 0:
        first = tl.load(firsts_ptr + row)
        last = tl.load(lasts_ptr + row)
        eldest = _next(parents_ptr, q_rows_ptr, first, last, row - first, row, CHILDREN)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(part * SLICE, part * SLICE + SLICE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + row * stride + token, mask=token < vocab, other=float("-inf"))
        score = score.to(tl.float32).to(tl.float64)
        if SIBLINGS > 0:  # noqa: SIM102 - this is known when it is compiled
            if eldest < last:
                left = _law(scores_ptr, row, stride, token, token < vocab)
                child = eldest
                rank = 0
                while (child < last) & (rank < SIBLINGS):
                    of = tl.load(q_rows_ptr + child).to(tl.int64)
                    q = tl.load(q_ptr + of * stride_q + token, mask=token < vocab, other=0.0)
                    mass = _mass_of(mass_ptr, row * SIBLINGS + rank, parts, PARTS)
                    left = _folded(left, q.to(tl.float32).to(tl.float64), mass)
                    child = _next(parents_ptr, q_rows_ptr, first, last, row - first, child, CHILDREN)
                    rank += 1
                score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), float("-inf"))
        if keys_ptr is not None:
            state = token.to(tl.int64) * -0x61C8864680B583EB + tl.load(keys_ptr + row)
            state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
            state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
            state = state ^ (state >> 31 & 0x1FFFFFFFF)
            uniform = ((state >> 12 & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
            score -= tl.log(-tl.log(uniform))
        # the first block's own tokens stand even where all is −∞
        better = (score > best) | ((where == 0x7FFFFFFF) & (token < vocab))
        best = tl.where(better, tl.where(score == score, score, float("-inf")), best)
        where = tl.where(better, token, where)
    highest = tl.max(best, 0)
    tl.store(value_ptr + row * parts + part, highest)
    tl.store(index_ptr + row * parts + part, tl.min(tl.where(best == highest, where, 0x7FFFFFFF), 0))


@triton.jit
@no_type_check
def _of_all(value_ptr, index_ptr, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    value = tl.load(value_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    return tl.min(tl.where(value == tl.max(value, 0), index, 0x7FFFFFFF), 0).to(tl.int64)


@triton.jit
@no_type_check
def _kept_of_drawn(
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    q_ptr,
    q_rows_ptr,
    uniforms_ptr,
    mass_ptr,
    first,
    last,
    node,
    stride,
    stride_q,
    parts,
    SIBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """The first drawn candidate behind row `node` that is kept; `last` if there is none."""
    kept = last
    mine = _next(parents_ptr, q_rows_ptr, first, last, node - first, node, CHILDREN)
    before = 0
    while (mine < last) & (kept == last) & (before < SIBLINGS):
        token = tl.load(tokens_ptr + mine).to(tl.int64)
        left = _law(scores_ptr, node, stride, token, token >= 0)
        child = node
        for rank in range(before):
            child = _next(parents_ptr, q_rows_ptr, first, last, node - first, child, CHILDREN)
            q = tl.load(q_ptr + tl.load(q_rows_ptr + child).to(tl.int64) * stride_q + token)
            mass = _mass_of(mass_ptr, node * SIBLINGS + rank, parts, PARTS)
            left = _folded(left, q.to(tl.float32).to(tl.float64), mass)
        q = tl.load(q_ptr + tl.load(q_rows_ptr + mine).to(tl.int64) * stride_q + token).to(tl.float32).to(tl.float64)
        kept = tl.where(tl.load(uniforms_ptr + mine) * q < left, mine, last)
        mine = _next(parents_ptr, q_rows_ptr, first, last, node - first, mine, CHILDREN)
        before += 1
    return kept


@triton.jit
@no_type_check
def _walk(
    value_ptr,
    index_ptr,
    tokens_ptr,
    parents_ptr,
    starts_ptr,
    scores_ptr,
    q_ptr,
    q_rows_ptr,
    uniforms_ptr,
    mass_ptr,
    path_ptr,
    count_ptr,
    next_ptr,
    parts,
    max_rows,
    stride,
    stride_q,
    SIBLINGS: tl.constexpr,
    PARTS: tl.constexpr,
    CHILDREN: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    last = tl.load(starts_ptr + sequence + 1).to(tl.int64)
    place = tl.arange(0, ROWS)
    path = tl.where(place == 0, 0, -1).to(tl.int64)
    node = first
    count = tl.full([], 1, tl.int32)
    choice = _of_all(value_ptr, index_ptr, node, parts, PARTS)
    drawn = last
    if SIBLINGS > 0:
        drawn = _kept_of_drawn(
            scores_ptr, tokens_ptr, parents_ptr, q_ptr, q_rows_ptr, uniforms_ptr, mass_ptr,
            first, last, node, stride, stride_q, parts, SIBLINGS, PARTS, CHILDREN,
        )  # fmt: skip
    for row in range(first + 1, last):  # parents come first, so that one pass finds the whole path
        parent = tl.load(parents_ptr + row).to(tl.int64) + first
        token = tl.load(tokens_ptr + row).to(tl.int64)
        kept = (drawn == last) & (token == choice)
        if SIBLINGS > 0:
            kept = (kept & (tl.load(q_rows_ptr + row) < 0)) | (row == drawn)
        if (parent == node) & kept:
            path = tl.where(place == count, row - first, path)
            count += 1
            node = row
            choice = _of_all(value_ptr, index_ptr, node, parts, PARTS)
            if SIBLINGS > 0:
                drawn = _kept_of_drawn(
                    scores_ptr, tokens_ptr, parents_ptr, q_ptr, q_rows_ptr, uniforms_ptr, mass_ptr,
                    first, last, node, stride, stride_q, parts, SIBLINGS, PARTS, CHILDREN,
                )  # fmt: skip
    tl.store(path_ptr + sequence * max_rows + place, path, mask=place < max_rows)
    tl.store(count_ptr + sequence, count)
    tl.store(next_ptr + sequence, choice)


def walked(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    starts: Tensor,
    max_rows: int,
    keys: Tensor | None,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
    siblings: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    q = q if q is None or q.stride(-1) == 1 else q.contiguous()
    (T, vocab), N, on = scores.shape, len(starts) - 1, scores.device
    parts = triton.cdiv(vocab, _SLICE)
    value = torch.empty(T, parts, dtype=torch.float64, device=on)
    index = torch.empty(T, parts, dtype=torch.int32, device=on)
    path = torch.empty(N, max_rows, dtype=torch.int32, device=on)
    count = torch.empty(N, dtype=torch.int32, device=on)
    following = torch.empty(N, dtype=torch.int64, device=on)
    if not N:
        return path, count, following
    tokens, parents = tokens.contiguous(), parents.contiguous()
    keys, q_rows, uniforms = (None if part is None else part.contiguous() for part in (keys, q_rows, uniforms))
    first = last = mass = None
    strides = scores.stride(0), 0 if q is None else q.stride(0)
    sizes = {"PARTS": triton.next_power_of_2(parts), "CHILDREN": max(16, min(1024, triton.next_power_of_2(max_rows)))}
    sizes |= {"SIBLINGS": siblings}
    if siblings:
        sequence = torch.searchsorted(starts, torch.arange(T, dtype=starts.dtype, device=on), right=True) - 1
        first, last = starts[sequence].long(), starts[sequence + 1].long()
        mass = torch.empty(T, siblings, parts, dtype=torch.float64, device=on)
        for rank in range(siblings):
            _mass[(T, parts)](
                *(scores, parents, first, last, q, q_rows, mass, vocab, *strides),
                RANK=rank,
                SLICE=_SLICE,
                num_warps=8,
                enable_fp_fusion=True,
                **sizes,
            )
    _best[(T, parts)](
        *(scores, keys, parents, first, last, q, q_rows, mass, value, index, vocab, *strides),
        SLICE=_SLICE,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
        **sizes,
    )
    _walk[(N,)](
        *(value, index, tokens, parents, starts, scores, q, q_rows, uniforms, mass, path, count, following),
        *(parts, max_rows, *strides),
        ROWS=triton.next_power_of_2(max_rows),
        num_warps=1,
        **sizes,
    )
    return path, count, following


def specimens() -> list[Specimen]:
    """Greedy, noisy, and with three drawn siblings behind a row."""
    found = []
    for name, siblings in (("greedy", 0), ("noisy", 0), ("drawn", 3)):
        drawn: dict[str, str | None] = {"parents_ptr": "*i64"}
        drawn |= dict.fromkeys(("firsts_ptr", "lasts_ptr", "q_rows_ptr"), "*i64" if siblings else None)
        drawn |= {"q_ptr": "*fp32" if siblings else None, "mass_ptr": "*fp64" if siblings else None}
        strides = {"stride": "i32:16", "stride_q": "i32:16" if siblings else "i32"}
        sizes = {"SIBLINGS": siblings, "PARTS": 64, "CHILDREN": 64}
        slices = sizes | {"SLICE": _SLICE}
        best = drawn | strides | {"scores_ptr": "*fp32", "keys_ptr": None if name == "greedy" else "*i64"}
        most = 96 if name == "greedy" else 160
        best |= {"value_ptr": "*fp64", "index_ptr": "*i32", "vocab": "i32"}
        found.append(Specimen(f"best, {name}", _best, best, slices | {"BLOCK": _BLOCK}, registers=most))
        if name == "noisy":
            continue
        walk = {k: v for k, v in drawn.items() if k not in ("firsts_ptr", "lasts_ptr")} | strides
        walk |= {"scores_ptr": "*fp32", "value_ptr": "*fp64", "index_ptr": "*i32", "tokens_ptr": "*i64"}
        walk |= dict.fromkeys(("starts_ptr", "path_ptr", "count_ptr"), "*i32") | {"next_ptr": "*i64"}
        walk |= {"uniforms_ptr": "*fp64" if siblings else None} | dict.fromkeys(("parts", "max_rows"), "i32")
        said = "walk" if not siblings else "walk, drawn"
        found.append(Specimen(said, _walk, walk, sizes | {"ROWS": 64}, num_warps=1, registers=96 + 32 * bool(siblings)))
        if siblings:
            mass = drawn | strides | {"scores_ptr": "*fp32", "vocab": "i32"}
            found.append(Specimen("mass", _mass, mass, slices | {"RANK": 1}, num_warps=8, registers=128))
    return found
