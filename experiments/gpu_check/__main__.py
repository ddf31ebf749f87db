"""`python -m decodelab.experiments.gpu_check [FILE]`: measures, writes one JSON, prints a line a bar."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .bars import BARS, Row, Verdict, judged
from .kernels import attention, correctness, products
from .lab import Lab, gpu_lab
from .models import prefill, real_model, whole_model

LIMIT_S = 470.0  # of all sections together: the whole stays under eight minutes
SECTIONS: Mapping[str, tuple[Callable[[Lab], Iterator[Row]], float]] = {  # with the most seconds that each may take
    "correctness": (correctness, 120.0),
    "model": (whole_model, 150.0),
    "attention": (attention, 90.0),
    "matmul": (products, 110.0),
    "prefill": (prefill, 60.0),
    "real": (real_model, 60.0),
}
_NO_GPU = "gpu-check: no GPU here that torch can use, so nothing was checked and nothing is written"
_FILE = Path("outputs/gpu-check.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """A section's rows, and why there are no more."""

    rows: list[dict[str, Any]]
    seconds: float
    failed: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """0: every bar holds, or there is no GPU; 1: one does not."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--section"]:
        section(words[1], Path(words[2]), gpu_lab())
        return 0
    if not torch.cuda.is_available():
        print(_NO_GPU)
        return 0
    file = Path(words[0]) if words else _FILE
    begin = time.perf_counter()
    found = {}
    for name, (_, limit) in SECTIONS.items():
        left = LIMIT_S - (time.perf_counter() - begin)
        print(f"{name} (at most {min(limit, left):.0f} s) …", file=sys.stderr, flush=True)
        found[name] = in_a_process(name, min(limit, left))
    verdicts = judge(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report(found, verdicts, time.perf_counter() - begin), indent=1, ensure_ascii=False))
    for verdict in verdicts:
        print(verdict.line)
    print(f"{sum(bool(v.passed) for v in verdicts)} of {len(verdicts)} bars hold; everything measured is in {file}")
    return 1 if any(verdict.passed is False for verdict in verdicts) else 0


def section(name: str, file: Path, lab: Lab) -> None:
    """Write its rows to `file`, a line each as soon as it is there."""
    with file.open("a", encoding="utf-8") as lines:
        for row in SECTIONS[name][0](lab):
            lines.write(json.dumps({**row, "copy_bytes_per_s": lab.bandwidth}, ensure_ascii=False) + "\n")
            lines.flush()


def in_a_process(name: str, limit: float) -> Measured:
    """Whatever becomes of it, here is what it measured until then."""
    begin, failed = time.perf_counter(), None
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        file.touch()
        command = [sys.executable, "-m", "decodelab.experiments.gpu_check", "--section", name, str(file)]
        if limit <= 0:
            return Measured([], 0.0, f"no time was left of {LIMIT_S:.0f} s")
        try:
            ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
            if ran.returncode:
                said = ran.stderr.strip().splitlines() or [f"ended with {ran.returncode}, without a word"]
                failed = said[-1][:300]
                sys.stderr.write(ran.stderr)
        except subprocess.TimeoutExpired:
            failed = f"took longer than {limit:.0f} s"
        whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    rows = [json.loads(line) for line in whole.splitlines()]
    return Measured(rows, time.perf_counter() - begin, failed)


def judge(found: Mapping[str, Measured]) -> list[Verdict]:
    return [judged(bar, found[bar.section].rows, found[bar.section].failed) for bar in BARS]


def report(found: Mapping[str, Measured], verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """Of the whole: what it ran on, each section's rows, each bar's verdict."""
    about = {"device": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {"device": "none"}
    return {
        **about,
        "torch": torch.__version__,
        "seconds": seconds,
        "bars": [asdict(verdict) for verdict in verdicts],
        "sections": {name: asdict(measured) for name, measured in found.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
