"""Kernels in C++: compiled once, whole or not at all, and done without where they cannot be."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from decodelab.experiments.hardware import resident_bytes
from decodelab.kernels import native, step
from decodelab.kernels.linear import Linear
from decodelab.kernels.matmul_w4 import native as product


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    for each in (native.library, native.missing, native._path):
        each.cache_clear()
    yield
    for each in (native.library, native.missing, native._path):
        each.cache_clear()


def test_what_is_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    kept = native._path()
    assert kept.exists()
    native.missing.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.missing() is None


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("DECODELAB_NATIVE", "0", "DECODELAB_NATIVE=0"), ("CXX", "no-such-compiler", "install g\\+\\+ or set CXX")],
)
def test_without_them_it_says_why(name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cpu._is_vnni_supported():
        why = "no AVX-512"
    monkeypatch.delenv("DECODELAB_NATIVE", raising=False)
    monkeypatch.setenv(name, value)
    assert native.library() is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(native.missing())


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    failed = subprocess.CalledProcessError(1, "g++", stderr="fatal error: no\nsuch header")
    native.missing.cache_clear()
    native._path.cache_clear()
    monkeypatch.setenv("DECODELAB_NATIVE", str(tmp_path))
    run = subprocess.run

    def fails(parts: list[str], **options: object) -> object:
        if "-o" in parts:
            raise failed
        return run(parts, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", fails)
    assert "did not compile them (fatal error: no such header)" in str(native.missing())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    kept = native._path()
    (tmp_path / kept.name).symlink_to(kept.absolute())
    monkeypatch.chdir(tmp_path)
    for folder, why in ((".", None), ("~nobody-of-that-name/x", "home directory")):
        anew_from(folder, monkeypatch)
        assert native.missing() is None if why is None else why in str(native.missing())


def test_a_compiler_may_speak_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\necho 'en-t\xeate inconnu' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    anew_from(str(tmp_path), monkeypatch)
    assert "did not compile them (en-t\ufffdte inconnu)" in str(native.missing())


def test_a_compiler_that_takes_too_long_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-o*) echo warned >&2; exec sleep 9;; esac\necho 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "_SECONDS", 0.3)
    anew_from(str(tmp_path), monkeypatch)
    assert str(native.missing()).endswith("did not compile them in 0.3 s")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    (tmp_path / "file").touch()
    anew_from(str(tmp_path / "file"), monkeypatch)
    assert "cannot be kept" in str(native.missing())
    assert "DECODELAB_NATIVE may name another folder" in str(native.missing())


def test_structures_are_what_c_has() -> None:
    if (found := native.library()) is None:
        pytest.skip(str(native.missing()))
    each = (native.Product, step.Fused, step.Layer, step.Pool, step.Place, step.Part, step.Call)
    sizes = (ctypes.c_int * len(each))()
    found.sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(one) for one in each]


def test_products_are_the_same_without_instructions_for_bfloat16(
    tmp_path: Path, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-mno-avx512bf16"))
    anew_from(str(tmp_path), monkeypatch)
    weight, x = torch.randn(45, 352, generator=rng).bfloat16(), torch.randn(20, 352, generator=rng).bfloat16()
    layer = Linear(weight)
    assert layer.implementation == "native"
    got, want = layer(x), x.double() @ weight.double().T
    for each in (got, layer(x, prefill=True)):
        assert (each - want).norm() < 2**-8 * want.norm()
    for rows in (1, 2, 3, 5, 8):
        assert torch.equal(layer(x[:rows]), got[:rows])


def test_a_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    plain, (compiler, *_) = native._path(), native._compiler() or [""]
    monkeypatch.setenv("CXX", f"{compiler} -O2")
    native._path.cache_clear()
    assert native._compiler() == [compiler, "-O2"]
    assert native._path() != plain


def anew_from(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_NATIVE", folder)
    native.missing.cache_clear()
    native._path.cache_clear()


def test_what_a_thread_took_goes_with_it() -> None:
    if (why := native.missing()) is not None or (before := resident_bytes()) is None:
        pytest.skip(why or "the system does not tell how much memory a process has")
    multiply, x = Linear(torch.randn(32, 32).bfloat16()), torch.randn(1 << 15, 32).bfloat16()
    for _ in range(64):  # 4 MiB of sums each
        thread = Thread(target=multiply, args=(x, True))
        thread.start()
        thread.join()
    after = resident_bytes()
    assert after is not None
    assert after - before < 100 << 20


def test_a_row_that_is_not_finite_says_so_and_stays_alone(rng: torch.Generator) -> None:
    if (why := native.missing()) is not None:
        pytest.skip(why)
    codes = torch.randint(0, 16, (40, 64), generator=rng, dtype=torch.uint8)
    packed = product.pack(codes, torch.ones(40, 1), torch.full((40, 1), 8, dtype=torch.uint8), 64, 4)
    assert packed is not None
    multiply = packed.product(None)
    x = torch.randn(4, 64, generator=rng).bfloat16()
    for bad in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[1, 7] = bad
        got = multiply(spoiled)
        assert not got[1].isfinite().any()
        assert torch.equal(got[[0, 2, 3]], multiply(x)[[0, 2, 3]])
    assert torch.equal(multiply(torch.zeros_like(x)), torch.zeros(4, 40).bfloat16())


def test_scales_beyond_float16_are_not_taken() -> None:
    codes, zero = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)
    assert product.pack(codes, torch.full((16, 1), 70000.0), zero, 32, 4) is None
    assert product.pack(codes, torch.full((16, 1), 1e-9), zero, 32, 4) is None
