"""What a student came to, as a thing to use in its teacher's place: how large it is, how fast, and how good."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..attention.options import Native
from ..decoding.cost import measure_target
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.model.source import ModelSpec, Source, open_source
from ..errors import UserError
from .config import RunConfig
from .files import read_result, write_atomic
from .format import seconds, size
from .identity import identify
from .lab import Warm
from .quality.evaluate import check_quality
from .run import CODES, UNFINISHED, execute
from .table import comparison
from .tracking import Untracked

PRODUCT = "product.json"
_CONTEXT = 256  # tokens that a timed step has behind it, at most


def check_product(config: RunConfig, source: Source) -> None:
    """Refuses, before anything is trained, tasks that could not be asked at its end."""
    if not config.quality.tasks:
        return
    if config.train is None or config.train.kind not in ("student", "kv"):
        raise UserError(
            "quality.tasks are for a student, beside its teacher: train=student or train=kv, or leave them out"
        )
    check_quality(replace(config, against=None), source)


def product(config: RunConfig, source: Source, teacher: Decoder, folder: Path) -> int:
    """Prints and writes what the student in `folder` costs beside its teacher. With quality.tasks, both are evaluated,
    in folders of it, the student against the teacher: what is there already is not asked again. The command's code."""
    made = open_source(ModelSpec(path=str(folder)))
    student = load_decoder(made, dtype=teacher.dtype, device=teacher.device, kernels=teacher.kernels)
    context = min(_CONTEXT, *(model.config.max_positions // 2 for model in (student, teacher)))
    found = {
        name: {
            "bytes": model.weight_bytes,
            "step_s": measure_target(model, context=context, rows=(1,)).seconds[1],
        }
        for name, model in (("teacher", teacher), ("student", student))
    }
    del student
    write_atomic(folder / PRODUCT, json.dumps({"context": context, **found}, indent=1) + "\n")
    console = Console(highlight=False, markup=False)
    ours, theirs = found["student"], found["teacher"]
    console.print(
        f"weights that a step reads: {size(ours['bytes'])}, the teacher's {size(theirs['bytes'])} "
        f"({ours['bytes'] / theirs['bytes']:.2f})\n"
        f"a step that decodes: {seconds(ours['step_s'])}, the teacher's {seconds(theirs['step_s'])} "
        f"({theirs['step_s'] / ours['step_s']:.2f}× as fast, behind {context} tokens)",
        soft_wrap=True,
    )
    if not config.quality.tasks:
        return 0
    reference, mine = folder / "teacher", folder / "student"
    own = {"_target_": f"{Native.__module__}.{Native.__qualname__}"}
    resolved: dict[str, Any] = {**config.resolved, "attention": own}
    plain = replace(
        config, against=None, output=str(reference), tracking=Untracked(), attention=Native(), resolved=resolved
    )
    warm = Warm(((source.identity, teacher.dtype, teacher.device, None, teacher.kernels), teacher))
    if code := _examined(plain, warm, console):
        return code
    named = {"name": None, "path": str(folder), "revision": None, "adapter": None}
    another = replace(
        plain,
        model=ModelSpec(path=str(folder)),
        output=str(mine),
        against=str(reference),
        resolved={**resolved, "model": {**resolved["model"], **named}},
    )
    return _examined(another, Warm(), console)


def _examined(config: RunConfig, warm: Warm, console: Console) -> int:
    """`decodelab evaluate`, unless the same is there, whole."""
    result = Path(config.output or "") / "result.json"
    if result.exists():
        kept = read_result(result)
        if kept["status"] not in UNFINISHED and kept["key"] == identify(config, speed=False).key:
            for part in comparison(kept["quality"]["against"]) if kept["quality"]["against"] else ():
                console.print(part)
            return CODES[kept["status"]]
    return execute(config, speed=False, warm=warm).code
