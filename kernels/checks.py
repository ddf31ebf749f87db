"""Every kernel against its definition, on any device: a GPU's own answer, or the interpreter's in tiny shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from . import cases
from .accept import Drawn, accept, accept_reference
from .commit import commit, commit_reference, owners
from .linear.reference import relative_error
from .matmul_w4.op import Weight, matmul
from .rms_norm import rms_norm, rms_norm_reference
from .rope import rope, rope_reference
from .swiglu import swiglu, swiglu_reference
from .verify_attention.batch import verify_attention_batch
from .verify_attention.batch_reference import verify_attention_batch_reference
from .verify_attention.keys import Keys

# Root mean square: sums are of float32; factors and results are rounded to the dtype.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True, slots=True)
class Checked:
    """`error` is relative, or 0 or 1 where bits must be equal."""

    op: str
    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def checked(device: torch.device, large: bool, ops: tuple[str, ...] | None = None) -> Iterator[Checked]:
    """`large`: shapes of real models beside the tiny ones."""
    for op in CHECKS if ops is None else ops:
        for size in (False, True) if large else (False,):
            rng = torch.Generator().manual_seed(0)
            for what, error, bound in CHECKS[op](device, size, rng):
                yield Checked(op, f"{'large' if size else 'tiny'}, {what}", error, bound)


Found = Iterator[tuple[str, float, float]]


def _near(what: str, got: Tensor, want: Tensor) -> tuple[str, float, float]:
    return what, relative_error(got, want), TOLERANCE[got.dtype]


def _same(what: str, got: Tensor, want: Tensor) -> tuple[str, float, float]:
    return what, float(not torch.equal(got, want)), 0.0


def _on(device: torch.device, of: Any) -> Any:
    """A dataclass of tensors and numbers, there."""
    moved = {f.name: getattr(of, f.name) for f in fields(of)}
    return replace(of, **{name: x.to(device) for name, x in moved.items() if isinstance(x, Tensor)})


def _attention(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    heads, kv_heads, D = (32, 8, 128) if large else (2, 1, 32)
    prefixes, parents = ([4000, 33, 900], [cases.tree(24), [-1], [-1, *range(7)]]) if large else ([40], [cases.tree(5)])
    ring, sinks, slots = (500, 4, 4096) if large else (12, 2, 48)
    some = cases.looks(prefixes, parents)
    rows = len(some.positions)
    here = _on(device, some)
    for dtype in (torch.bfloat16, torch.float16) if large else (torch.float32,):
        q = torch.randn(rows, heads, D, generator=rng).to(device, dtype)
        k, v = (torch.randn(len(prefixes), slots, kv_heads, D, generator=rng).to(dtype) for _ in range(2))
        for bits in (16, 8, 4) if dtype != torch.float16 else (16,):
            keys = Keys(k, v) if bits == 16 else cases.quantised(Keys(k, v), bits)
            for window, sink in ((None, 0), (ring, sinks)):
                kinds = {"dense": keys, "paged": cases.paged(keys, 16, rng)}
                if window is not None:
                    kinds["ring"] = cases.ringed(keys, prefixes, some.max_rows, window, sink)
                first = None
                for kind, kept in kinds.items():
                    what = f"{dtype}, {bits} bits, {kind}, window {window}"
                    kept = _on(device, kept)
                    got = verify_attention_batch(q, kept, here, 0.1, window, sink)
                    if first is None:
                        yield _near(
                            what, got, verify_attention_batch_reference(q.double(), kept, here, 0.1, window, sink)
                        )
                        fast = verify_attention_batch(q, kept, here, 0.1, window, sink, row_invariant=False)
                        yield _near(f"{what}, any order", fast, got)
                        lone = replace(cases.looks(prefixes[:1], [[-1]]), max_keys=some.max_keys)
                        alone = verify_attention_batch(q[:1], kept, _on(device, lone), 0.1, window, sink)
                        yield _same(f"{what}, a row alone", alone, got[:1])
                    else:
                        yield _same(what, got, first)
                    first = got if first is None else first


def _product(bits: int) -> Callable[[torch.device, bool, torch.Generator], Found]:
    def found(device: torch.device, large: bool, rng: torch.Generator) -> Found:
        shapes = [(4096, 4096, 128), (1000, 14336, 64), (6144, 2048, 96)] if large else [(33, 160, 32)]
        for N, K, group in shapes:
            for kind in ("dense",) if bits == 16 else ("zero", "shift", "any"):
                made: Weight = _on(device, cases.weight(N, K, bits, group, kind, rng))
                for dtype in (torch.bfloat16, torch.float16) if large else (torch.float32,):
                    w = made if bits < 16 else Weight(made.codes.to(dtype), 16)
                    x = torch.randn(64 if large else 18, K, generator=rng).to(device, dtype)
                    want = x.double() @ w.dense(K).T
                    got = matmul(x, w)
                    yield _near(f"{N} × {K}, {kind}, {dtype}", got, want)
                    yield _near(f"{N} × {K}, {kind}, {dtype}, any order", matmul(x, w, row_invariant=False), want)
                    yield _same(f"{N} × {K}, {kind}, {dtype}, a row alone", matmul(x[:1], w), got[:1])
                    if device.type == "cuda":  # numpy, which the interpreter multiplies with, sums by a row's place
                        yield _same(f"{N} × {K}, {kind}, {dtype}, elsewhere in its tile", matmul(x[9:], w), got[9:])

    return found


def _norm(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    for dtype, (T, D) in _small(large, (64, 4096), (3, 60)):
        x, residual = (torch.randn(T, D, generator=rng).to(device, dtype) for _ in range(2))
        weight = torch.rand(D, generator=rng).to(device, dtype)
        y, total = rms_norm(x, weight, 1e-5, residual)
        yield _near(f"{dtype}, residual", total, x.double() + residual.double())
        yield _near(f"{dtype}, norm", y, rms_norm_reference(total.double(), weight.double(), 1e-5)[0])


def _rope(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    for dtype, (T, D) in _small(large, (64, 128), (3, 20)):
        x = torch.randn(T, 7, D, generator=rng).to(device, dtype)[:, :5]
        positions = torch.randint(0, 100_000, (T,), generator=rng).to(device)
        inv_freq = (10000.0 ** -(torch.arange(D // 2) / (D // 2))).to(device)
        want = rope_reference(x.double(), positions, inv_freq)
        yield f"{dtype}", relative_error(rope(x, positions, inv_freq), want), max(1e-5, TOLERANCE[dtype])


def _gate(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    for dtype, (T, D) in _small(large, (64, 14336), (3, 100)):
        x = torch.randn(T, 2 * D, generator=rng).to(device, dtype)
        yield _near(f"{dtype}", swiglu(x), swiglu_reference(x.double()))


def _small(large: bool, big: tuple[int, int], tiny: tuple[int, int]) -> list[tuple[torch.dtype, tuple[int, int]]]:
    return [(torch.bfloat16, big), (torch.float16, big)] if large else [(torch.float32, tiny), (torch.float16, tiny)]


def _accept(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    vocab, sizes = (128_256, [33, 1, 17]) if large else (300, [4, 1])
    T, most = sum(sizes), max(sizes)
    starts = torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    parents = torch.tensor([parent for size in sizes for parent in cases.tree(size)])
    scores = torch.log_softmax(torch.randn(T, vocab, generator=rng), -1)
    tokens = torch.randint(0, vocab, (T,), generator=rng)
    keys = torch.randint(-(1 << 62), 1 << 62, (T,), generator=rng)
    sharp = scores.clone()
    for first, size in zip(starts.tolist(), sizes, strict=False):
        for i in range(1, size, 2):  # eldest children are what their parents say
            sharp[first + int(parents[first + i]), tokens[first + i]] = 30
    q = torch.softmax(sharp + torch.randn(T, vocab, generator=rng), -1)
    drawn = torch.multinomial(q, 1, generator=rng)[:, 0]
    drawn[starts[:-1].long()] = 0
    rows = torch.arange(T).where(torch.rand(T, generator=rng) < 0.8, -1)
    uniforms = torch.rand(T, generator=rng, dtype=torch.float64)
    p, tokens, drawn, parents, starts, keys, q, rows, uniforms = (
        x.to(device) for x in (torch.log_softmax(sharp, -1), tokens, drawn, parents, starts, keys, q, rows, uniforms)
    )
    for what, theirs, keyed, judged in (
        ("greedy", tokens, None, False),
        ("noisy", tokens, keys, False),
        ("drawn", drawn, keys, True),
    ):
        law = Drawn(q, rows, uniforms, 2) if judged else None
        got = accept(p, theirs, parents, starts, most, keyed, law)
        laws = (q, rows, uniforms) if judged else (None, None, None)
        want = accept_reference(p, theirs, parents, starts, keyed, most, *laws)
        yield what, float(not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))), 0.0


def _commit(device: torch.device, large: bool, rng: torch.Generator) -> Found:
    slots, heads, D, layers = (512, 8, 128, 32) if large else (16, 2, 8, 2)
    kept, count = torch.tensor([[0, 3, 4, 6], [5, 4, 0, 1]]).int().to(device), torch.tensor([4, 3]).int().to(device)
    prefix = torch.tensor([3, slots - 8]).int().to(device)
    for kind, tables in (("dense", None), ("paged", torch.randperm(8, generator=rng).view(2, 4).int().to(device))):
        shape = (2, slots) if tables is None else (8, slots // 4)
        mine = [torch.randn(*shape, heads, D, generator=rng).bfloat16().to(device) for _ in range(layers)]
        mine.append(torch.randint(-9, 9, (*shape, heads, D), generator=rng, dtype=torch.int8).to(device))
        mine.append(torch.randn(*shape, heads, generator=rng).half().to(device))
        want = [cache.clone() for cache in mine]
        commit_reference(want, tables, prefix, kept, count)
        commit(owners(mine), prefix, kept, count, tables)
        yield kind, float(not all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))), 0.0


CHECKS: dict[str, Callable[[torch.device, bool, torch.Generator], Found]] = {
    "verify_attention": _attention,
    "linear": _product(16),
    "matmul_w4": _product(4),
    "matmul_w8": _product(8),
    "rms_norm": _norm,
    "rope": _rope,
    "swiglu": _gate,
    "accept": _accept,
    "commit": _commit,
}
