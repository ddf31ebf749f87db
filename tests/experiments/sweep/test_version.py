"""Digests of the code that ran."""

from pathlib import Path

import pytest

from decodelab.experiments.sweep.version import code_digest, package_digest


def test_an_edited_package_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one that is not imported yet, and none is imported for it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ownlab" / "sub").mkdir(parents=True)
    file = tmp_path / "ownlab" / "sub" / "drafter.py"
    file.write_text("raise RuntimeError\n")
    (tmp_path / "single.py").write_text("x = 1\n")
    plain = code_digest("package")
    first = code_digest("package", ("ownlab",))
    assert first == code_digest("package", ("ownlab",))
    file.write_text("raise ValueError\n")
    second = code_digest("package", ("ownlab",))
    alone = code_digest("package", ("single",))
    (tmp_path / "single.py").write_text("x = 2\n")
    others = [code_digest("package", ("single",)), code_digest("package", ("not_there",)), code_digest("other")]
    assert len({plain, first, second, alone, *others}) == 7


def test_the_package_s_own_sources_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("decodelab.experiments.sweep.version._ROOT", tmp_path)
    (tmp_path / "decoding").mkdir()
    (tmp_path / "tests").mkdir()
    before = package_digest()
    (tmp_path / "tests" / "test_it.py").touch()
    assert package_digest() == before
    (tmp_path / "decoding" / "loop.py").touch()
    assert package_digest() != before
