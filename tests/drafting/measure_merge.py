"""A merge against each of its members, prompt by prompt in turn: `python tests/drafting/measure_merge.py TASK.jsonl`.

No test. What it prints of a strategy is the speedup over plain decoding, and the merge's over it, each with the 95 %
interval over prompts. Cells of a sweep run one after the other, and a machine may have changed between them.
"""

import sys
from itertools import cycle

import numpy as np

from decodelab.decoding.acceptance import Greedy
from decodelab.decoding.draft import DrafterSettings
from decodelab.decoding.events import Generation, finish
from decodelab.experiments.api import load, part
from decodelab.experiments.lab import build_lab
from decodelab.experiments.measure import request_of
from decodelab.experiments.metrics import decode_seconds
from decodelab.experiments.statistics import speedup_interval
from decodelab.experiments.tasks import TaskSettings, load_task

MEMBERS = ("suffix", "token_recycling")
PARTS = {"plain": "none"} | {name: name for name in MEMBERS}
MERGED = "merge, budget=auto"


def main(path: str, model: str = "smollm2-135m") -> None:
    lm, settings = load(model), TaskSettings(path=path)
    parts = PARTS | {MERGED: {"name": "merge", "members": list(MEMBERS), "budget": "auto"}}
    labs = {
        n: build_lab(lm.source, lm.target, part("drafting", p, DrafterSettings), Greedy()) for n, p in parts.items()
    }
    done: dict[str, list[Generation]] = {name: [] for name in labs}
    names = list(labs)
    for first, item in zip(cycle(range(len(names))), load_task(settings).items, strict=False):
        for name in names[first:] + names[:first]:
            lab = labs[name]
            done[name] += finish(lab.strategy([request_of(lab, item, (), settings)]))
        sys.stderr.write(f"\r{len(done[names[0]])} prompts")
    columns = {n: np.array([(decode_seconds([g]), len(g.tokens) - 1) for g in all_]) for n, all_ in done.items()}
    told = np.all([column[:, 1] > 0 for column in columns.values()], axis=0)
    for name in names:
        over = [_ratio(columns[slow][told], columns[fast][told]) for slow, fast in (("plain", name), (name, MERGED))]
        sys.stdout.write(f"{name:24} over plain {over[0]}   merge over it {over[1]}\n")


def _ratio(slow: np.ndarray, fast: np.ndarray) -> str:
    found = speedup_interval(slow[:, 0], slow[:, 1], fast[:, 0], fast[:, 1])
    return f"{found.value:.2f}× [{found.low:.2f}, {found.high:.2f}]"


if __name__ == "__main__":
    main(*sys.argv[1:])
