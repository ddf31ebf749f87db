"""The most memory that a model of ours takes while it decodes: `python -m …peers.resident JSON`, a process that does
nothing else.

It prints what `Resident` says as JSON. The peak counts what is mapped from files as long as it is resident.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from ...errors import UserError


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes. `before`: of the process with its libraries and the tokenizer, before a weight is read; `peak`: of all of
    it; `weights`: each stored once, as many bits as they have; `kv`: of the prompt and the answer, by the formula."""

    before: int
    peak: int
    weights: int
    kv: int


def measured(overrides: Sequence[str], config_dirs: Sequence[Path], threads: int) -> Resident | str:
    """In a new process. Why not, where the system does not tell or the process failed: that is no reason to stop."""
    asked = json.dumps([list(overrides), [str(folder) for folder in config_dirs], threads])
    done = subprocess.run([sys.executable, "-m", __name__, asked], capture_output=True, text=True, check=False)
    try:
        return Resident(**json.loads(done.stdout))
    except (ValueError, TypeError):
        return (done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]


def main(asked: str) -> int:
    from ...decoding.events import finish
    from ...decoding.model.load import load_decoder
    from ...decoding.model.weights import shapes_of
    from ...drafting.none import Nothing
    from ..compose import compose
    from ..hardware import forget_peak_memory, peak_memory_bytes, resident_bytes, torch_threads
    from ..identity import identify
    from ..lab import Lab
    from ..measure import request_of

    overrides, folders, threads = json.loads(asked)
    config = compose(overrides, [Path(folder) for folder in folders])
    with torch_threads(threads):
        what = identify(config)
        source = what.target()
        assert what.task is not None
        before = resident_bytes()
        forget_peak_memory()
        target = load_decoder(source, dtype=what.dtype, device=what.device)
        lab = Lab(source, target, Nothing(), config.acceptance)
        request = request_of(lab, what.task.items[0], (), config.task)
        (done,) = finish(lab.strategy([request]))
        peak = peak_memory_bytes(what.device)
    if before is None or peak is None:
        raise UserError("this system does not tell how much memory a process takes")
    shapes = shapes_of(target.config)
    quantised = {f"{name}.weight": codes.nbytes for name, codes in source.codes.items()}
    stored = {name: prod(shape) * target.dtype.itemsize for name, shape in shapes.items()}
    kv = target.config.layout.bytes_per_token(target.dtype.itemsize) * (len(request.prompt) + len(done.tokens))
    print(json.dumps(asdict(Resident(before, peak, sum((stored | quantised).values()), kv))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
