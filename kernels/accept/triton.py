"""Each row's best token, over slices of the vocabulary; then one program a sequence walks from its root."""

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
def _best(scores_ptr, keys_ptr, value_ptr, index_ptr, vocab, stride, SLICE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(part * SLICE, part * SLICE + SLICE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + row * stride + token, mask=token < vocab, other=float("-inf"))
        score = score.to(tl.float32).to(tl.float64)
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
    parts = tl.num_programs(1)
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
def _walk(
    value_ptr,
    index_ptr,
    tokens_ptr,
    parents_ptr,
    starts_ptr,
    path_ptr,
    count_ptr,
    next_ptr,
    parts,
    max_rows,
    PARTS: tl.constexpr,
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
    for row in range(first + 1, last):  # parents come first, so that one pass finds the whole path
        parent = tl.load(parents_ptr + row).to(tl.int64) + first
        token = tl.load(tokens_ptr + row).to(tl.int64)
        if (parent == node) & (token == choice):
            path = tl.where(place == count, row - first, path)
            count += 1
            node = row
            choice = _of_all(value_ptr, index_ptr, node, parts, PARTS)
    tl.store(path_ptr + sequence * max_rows + place, path, mask=place < max_rows)
    tl.store(count_ptr + sequence, count)
    tl.store(next_ptr + sequence, choice)


def walked(
    scores: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_rows: int, keys: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    (T, vocab), N = scores.shape, len(starts) - 1
    parts = triton.cdiv(vocab, _SLICE)
    value = torch.empty(T, parts, dtype=torch.float64, device=scores.device)
    index = torch.empty(T, parts, dtype=torch.int32, device=scores.device)
    path = torch.empty(N, max_rows, dtype=torch.int32, device=scores.device)
    count = torch.empty(N, dtype=torch.int32, device=scores.device)
    following = torch.empty(N, dtype=torch.int64, device=scores.device)
    if N:
        _best[(T, parts)](
            *(scores, keys, value, index, vocab, scores.stride(0)),
            SLICE=_SLICE,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
        _walk[(N,)](
            *(value, index, tokens.contiguous(), parents.contiguous(), starts, path, count, following, parts, max_rows),
            PARTS=triton.next_power_of_2(parts),
            ROWS=triton.next_power_of_2(max_rows),
            num_warps=1,
        )
    return path, count, following


def specimens() -> list[Specimen]:
    slices = {"scores_ptr": "*fp32", "value_ptr": "*fp64", "index_ptr": "*i32", "vocab": "i32", "stride": "i32:16"}
    constants = {"SLICE": _SLICE, "BLOCK": _BLOCK}
    walk = {"value_ptr": "*fp64", "index_ptr": "*i32"} | dict.fromkeys(("tokens_ptr", "parents_ptr"), "*i64")
    walk |= dict.fromkeys(("starts_ptr", "path_ptr", "count_ptr"), "*i32") | {"next_ptr": "*i64"}
    walk |= dict.fromkeys(("parts", "max_rows"), "i32")
    return [
        Specimen("best, greedy", _best, slices | {"keys_ptr": None}, constants, registers=96),
        Specimen("best, noisy", _best, slices | {"keys_ptr": "*i64"}, constants, registers=160),
        Specimen("walk", _walk, walk, {"PARTS": 64, "ROWS": 64}, num_warps=1, registers=96),
    ]
