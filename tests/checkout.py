"""The repository's own files, for the tests that guard its layout."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"attention", "configs", "decoding", "drafting", "experiments", "kernels", "quantization"}


def files() -> list[Path]:
    """Every file that git holds or would take, relative to the root; skips where the root is no git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("the root is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy(to: Path) -> Path:
    """A clone as git would make it, without the history."""
    for name in files():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to
