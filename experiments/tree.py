"""The job `tree`: the static tree that is best by the acceptance which a run measured (Sequoia, arXiv:2402.12374)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..decoding.cost import DraftCost, Profile, gain
from ..decoding.draft import DrafterSettings
from ..drafting.trees import HasTree, TreeShape, expected, fastest, measured, optimal, write_tree
from ..errors import UserError
from .construct import Constructor
from .files import read_result, result_files
from .format import counted, percent, was_busy
from .metrics import acceptance
from .report.load import Run
from .report.log import Log
from .table import columns

USAGE = "decodelab tree RUN output=FILE [nodes=N]"
HELP = f"""decodelab tree: the best static tree by what a run accepted

  {USAGE}

Reads how often a candidate was kept at each depth by its rank, from the events of a run whose drafter fills a static
tree (medusa, token_recycling, eagle with a tree of its own), and writes the tree that keeps most of so many nodes:
drafting.tree=FILE takes it. A run with a wide cartesian tree, drafting.tree=[8,4,4,2], knows most ranks.

What is expected counts the steps that find nothing to draft, as many as the run had: they cost T(1) and emit one
token. A rank is taken to be right as often behind every path of its depth. A tree is chosen by the steps that judge it,
so that few of them flatter it: by some 4 % of τ for 60 steps, 1 % for 300. A run with it tells.

  output=FILE   a JSON of paths, with what it was measured on
  nodes=N       how many nodes it may have; without it the size that is fastest by the run's T(k), which profile=true
                measured"""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST = 64  # nodes of a tree whose size is chosen
_RANKS = 6  # shown of a depth
_NAMED = 20  # runs, of a folder that holds more
# What a file of paths says of the run that it was measured on, and where that stands in result.json.
_ORIGIN = {
    "run": "key",
    "weights": "digests.weights",
    "draft": "digests.draft",
    "task": "digests.task",
    "acceptance": "config.acceptance",
    "prompts": "prompts",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line says."""

    run: Path
    output: Path
    nodes: int | None = None


def main(words: Sequence[str]) -> int:
    """0 once the file is written."""
    if not words or any(word in ("-h", "--help") for word in words):
        print(HELP)
        return 0
    return tree(read(words))


def read(words: Sequence[str]) -> Asked:
    folders: list[Path] = []
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or Path(word).exists():
            folders.append(Path(word).expanduser())
        elif name not in ("output", "nodes"):
            raise UserError(f"{name}= is unknown: tree takes output=FILE and nodes=N")
        else:
            given[name] = value
    if len(folders) != 1:
        raise UserError(f"tree takes the folder of one run, got {len(folders)}: {USAGE}")
    if not given.get("output", "").strip():
        raise UserError("tree needs a file to write: output=FILE.json")
    nodes = given.get("nodes")
    if nodes is not None and (not nodes.isdecimal() or int(nodes) < 1):
        raise UserError(f"nodes={nodes}: a whole number of at least 1")
    return Asked(folders[0], Path(given["output"]).expanduser(), None if nodes is None else int(nodes))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run says of trees. `accept`: by depth and rank, of steps with a draft, which `share` of them are; `costs`:
    T(k) and the draft's, where the run measured them."""

    accept: Sequence[Sequence[float]]
    share: float
    costs: tuple[Profile, DraftCost] | None

    def tau(self, tree: TreeShape) -> float:
        """Tokens a step, the steps without a draft included."""
        return self.share * expected(self.accept, tree) + (1 - self.share)

    def speedup(self, tree: TreeShape) -> float | None:
        """Over plain decoding; None where T(k) is unknown."""
        return None if self.costs is None else gain(expected(self.accept, tree), len(tree), *self.costs, self.share)


def tree(asked: Asked) -> int:
    """Measure, choose, tell, write."""
    if asked.output.exists():
        raise UserError(f"output={asked.output} is there already; name another file or delete that one")
    if not (asked.run / "result.json").exists():
        raise UserError(_which(asked.run))
    run = Run(asked.run, read_result(asked.run / "result.json"))
    settings, costs = _settings(run), _costs(run)
    used = _shape(settings, run)
    steps = Log(run).steps
    if not steps:
        raise UserError(f"{asked.run / 'events.jsonl'} is not there or holds no step: run again, or name another run")
    if any(step.accepted and not step.ranks for step in steps):
        raise UserError(f"the events of {asked.run} tell no ranks, as those of an earlier version: run it again")
    accept = measured(steps, used)
    if not accept:
        raise UserError(f"nothing was drafted in {asked.run}, so nothing is known of any rank: run more prompts")
    fared = acceptance(steps)
    drafted = len(steps) - fared["steps_without_draft"]
    found = Measured(accept, drafted / len(steps), costs)
    chosen = _chosen(found, asked)
    tau, speedup = found.tau(chosen), found.speedup(chosen)
    notes = list(_notes(costs, run, smaller=len(chosen) < len(used), learns=settings.needs.topk > 0))

    console = Console(highlight=False, markup=False)
    drafter = str(run.at("config.drafting._target_"))
    title = f"{drafter.rpartition('.')[2]} on {counted(run.at('prompts'), 'prompt')} of {asked.run}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(_rates(accept))
    console.print()
    console.print(_sizes(found, len(chosen)))
    console.print(f"\n{drafted} of {len(steps)} steps had a draft; the others emit one token and cost T(1)")
    was = f"expected τ {found.tau(used):.2f}, measured {fared['tokens_per_step']:.2f}"
    was += f" ({fared['tokens_per_drafted_step']:.2f} where there was a draft)"
    console.print(f"the run's own tree of {len(used)} nodes: {was}", soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    if not len(chosen):
        raise UserError("no tree pays at these costs, so none is written: drafting=none, or nodes=N for the best of N")
    about = {
        "drafter": drafter,
        **{name: run.at(path) for name, path in _ORIGIN.items()},
        "steps": len(steps),
        "drafted_steps": drafted,
        "accept": [[round(rate, 4) for rate in rates] for rates in accept],
        "chosen": "the fastest by T(k)" if asked.nodes is None else f"the best of {asked.nodes} nodes",
        "expected_tokens_per_step": round(tau, 4),
        "predicted_speedup": None if speedup is None else round(speedup, 4),
        "notes": notes,
    }
    try:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_tree(asked.output, chosen, about)
    except OSError as error:
        raise UserError(f"output={asked.output} cannot be written ({error.strerror}); name another file") from error
    size = f"{len(chosen)} nodes, {chosen.depth} deep, expected τ {tau:.2f}"
    console.print(f"written to {asked.output}: {size}; drafting.tree={asked.output} takes it", soft_wrap=True)
    return 0


def _which(folder: Path) -> str:
    """What to name instead of a folder that is no run."""
    runs = [str(file.parent) for file in result_files(folder)]
    if not runs:
        return f"{folder} holds no result.json; name the folder of a run"
    more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
    return f"{folder} is not a run, but holds {len(runs)}; name one of them: {', '.join(runs[:_NAMED])}{more}"


def _notes(known: tuple[Profile, DraftCost] | None, run: Run, smaller: bool, learns: bool) -> Iterator[str]:
    """What makes a prediction unsure. `smaller`: than the run's is the tree that is written; `learns`: the drafter
    does, from the rows that are verified."""
    if known is not None and (doubt := known[0].doubt(was_busy(run.result))) is not None:
        yield doubt
    if smaller and learns:
        yield (
            "this drafter learns from the rows that are verified: a smaller tree teaches it less than the run's did, "
            "so τ will be lower than expected; run with it, and make a tree of that run"
        )


def _settings(run: Run) -> DrafterSettings:
    """Of the run's drafter."""
    trusted = tuple(run.at("config.trusted") or ())
    return Constructor(trusted).build(run.at("config.drafting"), DrafterSettings, "drafting")


def _shape(settings: DrafterSettings, run: Run) -> TreeShape:
    """The static tree of the run's drafter, if its events tell ranks."""
    shape = settings.shape if isinstance(settings, HasTree) else None
    if shape is None:
        name = type(settings).__name__
        raise UserError(f"{run.folder}: {name} filled no static tree; medusa, token_recycling and eagle.tree do")
    if not shape.dense:
        raise UserError(
            f"the tree of {run.folder} leaves out likelier ranks, so its events do not tell which was kept: measure "
            "with a cartesian one, such as drafting.tree=[8,4,4,2]"
        )
    return shape


def _costs(run: Run) -> tuple[Profile, DraftCost] | None:
    """As `profile=true` measured them."""
    if (known := run.at("profile")) is None:
        return None
    seconds = {int(k): float(s) for k, s in known["seconds"].items()}
    return Profile(known["context"], seconds), DraftCost(**known["draft"])


def _chosen(found: Measured, asked: Asked) -> TreeShape:
    if asked.nodes is not None:
        return optimal(found.accept, asked.nodes)
    if found.costs is None:
        raise UserError(f"{asked.run} measured no T(k), so no size is the fastest: nodes=N, or run with profile=true")
    return fastest(found.accept, *found.costs, most=MOST, share=found.share)


def _rates(accept: Sequence[Sequence[float]]) -> Table:
    """How often each rank is right at each depth."""
    most = min(_RANKS, max(map(len, accept)))
    table = columns("right at depth", *(f"rank {r}" for r in range(most)))
    for depth, rates in enumerate(accept, 1):
        table.add_row(str(depth), *(percent(rate) for rate in rates[:most]), *("–",) * (most - len(rates)))
    return table


def _sizes(found: Measured, chosen: int) -> Table:
    """What the best trees of a few sizes come to, the chosen one among them."""
    table = columns("nodes", "depth", "expected τ", *(("predicted speedup",) if found.costs else ()), "")
    for nodes in sorted({*SIZES, chosen} - {0}):
        best = optimal(found.accept, nodes)
        if len(best) < nodes:  # no more are known
            break
        speedup = found.speedup(best)
        predicted = () if speedup is None else (f"{speedup:.2f}×",)
        mark = "written" if nodes == chosen else ""
        table.add_row(str(nodes), str(best.depth), f"{found.tau(best):.2f}", *predicted, mark)
    return table
