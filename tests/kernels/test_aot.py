"""Every kernel compiles for GPUs that are not here, without spilling, within their memory and its allowance."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decodelab.kernels import aot
from decodelab.tests.checkout import ROOT

TARGETS = ("sm_80", "gfx90a")  # the least of each maker; `python -m decodelab.kernels.aot` compiles for all


def run(*words: str, code: str = "-m", **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"} | more
    return subprocess.run([sys.executable, code, *words], capture_output=True, text=True, env=env, check=False)


def test_every_kernel_compiles_and_keeps_to_its_allowance(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by triton")
    ran = run("decodelab.kernels.aot", "--json", *TARGETS, TRITON_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [aot.Compiled(**row) for row in json.loads(ran.stdout)]
    assert {row.op for row in rows} == set(aot.OPS) == {file.parent.name for file in ROOT.glob("kernels/*/triton.py")}
    assert {row.target for row in rows} == set(TARGETS)
    assert all(row.registers > 8 for row in rows)
    # the table in the documentation has these kernels
    table = (ROOT / "kernels" / "README.md").read_text().partition("| kernel |")[2]
    said = re.findall(r"^\| `(\w+)` ?(.*?) ?\|", table, re.MULTILINE)
    assert said == list(dict.fromkeys((row.op, row.name) for row in rows))


def test_what_is_broken_is_named() -> None:
    fine = aot.Compiled("op", "name", "gfx90a", registers=64, shared=65536, spilled=0, allowed=64)
    assert aot.broken(fine) is None
    assert aot.broken(replace(fine, spilled=4)) == "op name on gfx90a spills 4 B a thread"
    assert aot.broken(replace(fine, shared=65537)) == (
        "op name on gfx90a takes 65537 B of shared memory, but there are 64 KiB"
    )
    assert aot.broken(replace(fine, registers=65)) == "op name on gfx90a takes 65 registers, but 64 are allowed"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from decodelab.kernels.accept import accept
from decodelab.kernels.commit import commit, owners
from decodelab.kernels.matmul_w4.op import Weight, matmul
from decodelab.kernels.rms_norm import rms_norm
from decodelab.kernels.rope import rope
from decodelab.kernels.swiglu import swiglu
from decodelab.kernels.verify_attention.batch import verify_attention_batch
from decodelab.kernels.verify_attention.keys import Keys, Looks

def ints(*of):
    return torch.tensor(of, dtype=torch.int32)

x = torch.ones(2, 4)
print(rms_norm(x, x[0], 0.0, x)[1].tolist())
print(rope(x[:, None], ints(0, 0), x[0, :2]).tolist())
print(swiglu(torch.zeros(2, 4)).tolist())
print(matmul(x, Weight(torch.eye(4), 16)).tolist())
print([part.tolist() for part in accept(x, ints(0, 0), ints(-1, 0), ints(0, 2), 2)])
cache = torch.arange(4.0).view(1, 4, 1, 1)
commit(owners([cache]), ints(1), ints(2)[None], ints(1))
print(cache.flatten().tolist())
looks = Looks(ints(0, 1), ints(0), ints(1), ints(0), ints(0)[None], torch.tensor([[False]]), 1, 1)
print(verify_attention_batch(x[:1, None], Keys(x[None, :1, None], x[None, :1, None]), looks, 1.0).tolist())
"""


def test_without_triton_every_op_runs_on_torch() -> None:
    ran = run(WITHOUT_TRITON, code="-c", TRITON_INTERPRET="1")
    ones = "[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]"
    assert ran.stdout.splitlines() == [
        ones.replace("1.0", "2.0"),
        "[[[1.0, 1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]]",
        "[[0.0, 0.0], [0.0, 0.0]]",
        ones,
        "[[[0, 1]], [2], [0]]",
        "[0.0, 3.0, 2.0, 3.0]",
        "[[1.0, 1.0, 1.0, 1.0]]",
    ], ran.stderr[-2000:]
