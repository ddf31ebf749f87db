"""Kernels compiled ahead of time for GPUs that are not here: `python -m decodelab.kernels.aot` prints the table.

For each kernel and target: registers a thread, bytes of shared memory a program, bytes spilled, as the compilers say.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

# What a program of each target may use of shared memory, in KiB (CUDA C++ programming guide, compute capabilities 8.0,
# 9.0 and 10.0; CDNA's local data share), and the registers a thread can have.
TARGETS = {
    "sm_80": ("cuda", 80, 32, 163, 255),
    "sm_90": ("cuda", 90, 32, 227, 255),
    "sm_100": ("cuda", 100, 32, 227, 255),
    "gfx942": ("hip", "gfx942", 64, 64, 512),
    "gfx90a": ("hip", "gfx90a", 64, 64, 512),
}
OPS = ("verify_attention", "linear", "matmul_w4", "matmul_w8", "rms_norm", "rope", "swiglu", "accept", "commit")


@dataclass(frozen=True, slots=True)
class Specimen:
    """A kernel with the types of its arguments (as triton writes them; `:16` is a number divisible by 16; None: no
    tensor) and its constants. `registers`: the most that a thread of it may take (255: all that the
    target has)."""

    name: str
    kernel: Any
    types: Mapping[str, str | None]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    registers: int = 255


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes on one target; `allowed` of registers."""

    op: str
    name: str
    target: str
    registers: int
    shared: int
    spilled: int
    allowed: int


def compiled(targets: tuple[str, ...] = tuple(TARGETS), ops: tuple[str, ...] = OPS) -> Iterator[Compiled]:
    """Every kernel on every target. Needs triton, not interpreted; no GPU."""
    for op in ops:
        for specimen in import_module(f".{op}.triton", __package__).specimens():
            for target in targets:
                yield _compiled(op, specimen, target)


def _compiled(op: str, specimen: Specimen, target: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp, _, most = TARGETS[target]
    names = specimen.kernel.arg_names
    none = {name: None for name, kind in specimen.types.items() if kind is None}
    constants = {**specimen.constants, **none}
    assert set(names) == set(specimen.types) | set(constants), set(names) ^ (set(specimen.types) | set(constants))
    signature = {n: "constexpr" if n in constants else str(specimen.types[n]).removesuffix(":16") for n in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in constants and (signature[n][0] == "*" or str(specimen.types[n]).endswith(":16"))
    }
    source = ASTSource(specimen.kernel, signature, {(names.index(n),): v for n, v in constants.items()}, divisible)
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages, "enable_fp_fusion": True}
    if backend == "hip":
        options["num_stages"] = min(2, specimen.num_stages)
    kernel = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    registers, spilled = _of_nvidia(kernel.asm["cubin"]) if backend == "cuda" else _of_amd(kernel.asm["amdgcn"])
    allowed = specimen.registers if specimen.registers < 255 else most
    return Compiled(op, specimen.name, target, registers, kernel.metadata.shared, spilled, allowed)


def _of_nvidia(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes a thread keeps in memory for want of them), as the cubin says."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said.stdout)
    assert found, said.stdout
    return int(found[1]), int(found[2]) + int(found[3])


def _of_amd(assembly: str) -> tuple[int, int]:
    """(vector registers, accumulation ones included; bytes of private memory), as the kernel's metadata says."""
    counts = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", assembly)}
    return counts["vgpr_count"], counts["private_segment_fixed_size"]


def table(rows: list[Compiled]) -> str:
    """Markdown: a line a kernel, `registers / KiB of shared memory` a target, and what is spilled if anything is."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines = ["| kernel | " + " | ".join(targets) + " |", "| --- |" + " --- |" * len(targets)]
    by_name: dict[tuple[str, str], dict[str, Compiled]] = {}
    for row in rows:
        by_name.setdefault((row.op, row.name), {})[row.target] = row
    for (op, name), found in by_name.items():
        cells = []
        for target in targets:
            row = found[target]
            spilled = f", spills {row.spilled} B" if row.spilled else ""
            cells.append(f"{row.registers} / {row.shared / 1024:.3g}{spilled}")
        lines.append(f"| {f'`{op}` {name}'.strip()} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def broken(row: Compiled) -> str | None:
    """What is wrong with it: it spills, or takes more than the target has or its specimen allows."""
    named, (_, _, _, shared, _) = f"{row.op} {row.name} on {row.target}", TARGETS[row.target]
    if row.spilled:
        return f"{named} spills {row.spilled} B a thread"
    if row.shared > shared * 1024:
        return f"{named} takes {row.shared} B of shared memory, but there are {shared} KiB"
    if row.registers > row.allowed:
        return f"{named} takes {row.registers} registers, but {row.allowed} are allowed"
    return None


def main() -> None:
    """`--json`: a JSON list, not the table; other words name ops and targets. Fails where a kernel is `broken`."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("kernels are interpreted here and not compiled: unset TRITON_INTERPRET")
    words = sys.argv[1:]
    targets = tuple(word for word in words if word in TARGETS) or tuple(TARGETS)
    rows = list(compiled(targets, tuple(word for word in words if word in OPS) or OPS))
    sys.stdout.write(json.dumps([asdict(row) for row in rows]) if "--json" in words else table(rows))
    if wrong := [said for row in rows if (said := broken(row))]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
