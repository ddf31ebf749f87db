"""The job `layers`: which of the target's layers may be left out when it drafts for itself (`drafting=layer_skip`).

The target's own answers are the text. Every set of layers is tried at every token of them, each draft being followed as
far as it is right, so that acceptance is that of decoding, without decoding again; what that is worth follows from T(k)
and the time of a layer. The search climbs: it begins with early exits and with the layers that change their input
least, and then puts single layers in and out as long as the predicted speedup rises.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..attention.layout import Layout
from ..attention.rows import Rows, chains
from ..decoding import reference
from ..decoding.cost import DraftCost, Profile, measure_target, predict
from ..decoding.law import LawSettings, keyed_scores
from ..decoding.model.decoder import Decoder
from ..decoding.model.load import load_decoder
from ..decoding.noise import Noise
from ..decoding.reference import PREFILL_CHUNK
from ..decoding.request import Request
from ..drafting.layer_skip import KIND, kept
from ..drafting.none import Nothing
from ..errors import UserError
from . import hardware
from .composition import resolve_device, resolve_dtype
from .config import RunConfig
from .files import SCHEMA, write_atomic
from .format import BUSY
from .lab import Lab
from .load import load_of_others
from .measure import request_of
from .progress import Watch
from .quantise import target_of
from .tasks import load_task

Skip = frozenset[int]
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """T(k) of the target, and the seconds of one row through one layer, the unembedding included."""

    profile: Profile
    one_layer: float
    layers: int

    def draft(self, kept: int) -> DraftCost:
        """A token costs a forward of one row through so many layers."""
        each = max(0.0, self.profile.at(1) - self.one_layer) / (self.layers - 1)
        return DraftCost(0.0, self.one_layer + (kept - 1) * each, 0.0)


@dataclass(frozen=True, slots=True)
class Stride:
    """A step of the loop, as it would be."""

    verified: int
    drafted: int
    depth: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Tried:
    """`right[r][i]`: how many tokens behind token i of answer r the draft has right, up to the longest draft."""

    skip: Skip
    right: Sequence[Sequence[int]]
    max_draft: int
    steps: Sequence[Stride]
    speedup: float

    @property
    def tokens_per_step(self) -> float:
        return fmean(step.emitted for step in self.steps)

    @property
    def acceptance(self) -> list[float]:
        """By position: the chance that a token of the draft is right where those before it are, over all tokens."""
        chances = []
        for at in range(self.max_draft):
            reached = [n for counts in self.right for i, n in enumerate(counts) if n >= at and i + at < len(counts)]
            chances.append(sum(n > at for n in reached) / len(reached) if reached else 0.0)
        return chances


class Answers:
    """What the target says to some requests, and the stage on which layers are tried on it."""

    def __init__(self, target: Decoder, requests: Sequence[Request], law: LawSettings, longest: int, seed: int) -> None:
        """`longest`: the longest draft that is tried. Answers of one token are left out: nothing can be drafted."""
        said = reference.generate(target, requests, law, seed=seed)
        pairs = [(r, out.tokens) for r, out in zip(requests, said, strict=True) if len(out.tokens) > 1]
        if not pairs:
            raise UserError("no answer has a second token, so nothing could be drafted: give other prompts, or more")
        self.requests, self.tokens = [r for r, _ in pairs], [tokens for _, tokens in pairs]
        self.longest, self._target, self._law, self._seed = longest, target, law, seed
        most = max(len(r.prompt) + (1 + longest) * len(tokens) for r, tokens in pairs)
        self._cache = target.open_cache(len(pairs), most)
        self._slots = [self._cache.open() for _ in pairs]
        with torch.inference_mode():
            for slot, r in zip(self._slots, self.requests, strict=True):
                for at in range(0, len(r.prompt), PREFILL_CHUNK):
                    piece = r.prompt[at : at + PREFILL_CHUNK]
                    target(chains([piece], [slot], prompt=True), self._cache, logits_of=torch.tensor([len(piece) - 1]))
                    self._cache.commit({slot: range(len(piece))})

    @property
    def _whole(self) -> Rows:
        """The answers, less their last tokens, which nothing follows."""
        return chains([tokens[:-1] for tokens in self.tokens], self._slots)

    @torch.inference_mode()
    def influence(self) -> list[float]:
        """How much each layer turns the residual stream: 1 − cosine of what enters and what leaves it, averaged."""
        count = len(self._target.blocks)
        hidden = self._target(self._whole, self._cache, taps=range(count + 1), logits_of=torch.tensor([0])).hidden
        self._cache.drop()
        pairs = [(hidden[i].double(), hidden[i + 1].double()) for i in range(count)]
        return [1 - float(torch.cosine_similarity(x, y, dim=-1).mean()) for x, y in pairs]

    @torch.inference_mode()
    def right(self, layers: Sequence[int]) -> list[list[int]]:
        """How many tokens a draft of these layers has right behind each token but the last.

        All layers read the answers. Behind row i − 1 of them `layers` read token i, then the next ones, row by row, as
        long as what they say is the answer: what is staged is what a draft would stage there.
        """
        counts = [[0] * (len(tokens) - 1) for tokens in self.tokens]
        self._target(self._whole, self._cache, logits_of=torch.tensor([0]))
        above: dict[tuple[int, int], int] = {}
        first = 0
        for s, mine in enumerate(counts):
            above |= {(s, i): first + i - 1 if i else -1 for i in range(len(mine))}
            first += len(mine)
        going = list(above)
        for depth in range(self.longest):
            if not going:
                break
            first = self._cache.staged
            rows = Rows(
                tokens=torch.tensor([self.tokens[s][i + depth] for s, i in going]),
                parents=torch.tensor([above[start] for start in going]),
                sequence=torch.tensor([self._slots[s] for s, _ in going]),
                chain=False,
                first=first,
            )
            logits = self._target(rows, self._cache, layers=layers).logits
            said = logits.argmax(-1).tolist()
            on = []
            for row, (s, i) in enumerate(going):
                above[s, i] = first + row
                at = i + depth + 1
                token = said[row] if self._law.plain else self._choice(logits[row], s, at)
                if token == self.tokens[s][at]:
                    counts[s][i] += 1
                    if at + 1 < len(self.tokens[s]):
                        on.append((s, i))
            going = on
        self._cache.drop()
        return counts

    def _choice(self, logits: torch.Tensor, s: int, at: int) -> int:
        """What plain decoding would take as token `at` of an answer, were these its logits."""
        r = self.requests[s]
        scores = r.processors.scores(logits, [*r.prompt, *self.tokens[s][:at]] if self._law.reads_context else ())
        return int(keyed_scores(self._law, scores, Noise(self._seed, r.key, at).target()).argmax())

    def steps(self, right: Sequence[Sequence[int]], max_draft: int) -> list[Stride]:
        """The loop's steps with such drafts: the same room, the same cut."""
        steps = []
        for r, tokens, counts in zip(self.requests, self.tokens, right, strict=True):
            done = 1
            while done < len(tokens):
                drafted = min(max_draft, r.stop.limit - done - 1)
                accepted = min(drafted, counts[done - 1])
                emitted = min(accepted + 1, len(tokens) - done)  # an EOS that was drafted ends the answer
                steps.append(Stride(1 + drafted, drafted, drafted, accepted, emitted))
                done += emitted
        return steps

    def judged(self, skip: Skip, layout: Layout, costs: Costs) -> Tried:
        """A set of layers with the draft length that suits it best."""
        remain = kept(layout, sorted(skip))
        right = self.right(remain)
        tries = []
        for max_draft in range(1, self.longest + 1):
            steps = self.steps(right, max_draft)
            speedup = predict(costs.profile, costs.draft(len(remain)), steps)
            assert speedup is not None  # no answer is of one token
            tries.append(Tried(skip, right, max_draft, steps, speedup))
        return max(tries, key=lambda tried: tried.speedup)


def climb(
    judge: Callable[[Skip], Tried], order: Sequence[int], layout: Layout, tries: int, progress: Progress | None = None
) -> list[Tried]:
    """All sets that were tried, `tries` at most. `order`: the layers, those that matter least first."""
    count, tried = len(order), dict[Skip, Tried]()

    def score(skip: Skip) -> float:
        if skip not in tried:
            tried[skip] = judge(skip)
            if progress is not None:
                best = max(t.speedup for t in tried.values())
                progress("layers", len(tried), tries, f"predicted {best:.2f}× at best")
        return tried[skip].speedup

    def open_to(skip: Skip) -> bool:
        return skip in tried or (len(tried) < tries and _possible(skip, layout))

    starts = [frozenset({count - 1})]  # nobody reads the keys of the last layer, so that this is always possible
    starts += [frozenset(range(count * part // 4, count)) for part in (1, 2, 3)]
    starts += [frozenset(order[: count * part // 6]) for part in (1, 2, 3)]
    for start in starts:
        if open_to(start):
            score(start)
    here, climbs = max(tried, key=score), True
    while climbs:
        climbs = False
        for layer in order:
            if open_to(here ^ {layer}) and score(here ^ {layer}) > score(here):
                here, climbs = here ^ {layer}, True
    return list(tried.values())


def _possible(skip: Skip, layout: Layout) -> bool:
    """Whether something is left out, something remains, and whose keys are read remains too."""
    remain = set(range(len(layout.layers))) - skip
    return bool(skip and remain) and all(layout.layers[layer].owner in remain for layer in remain)


def measure_costs(target: Decoder, context: int, longest: int) -> Costs:
    """T(k) up to a draft's verification, and of one row through the first layer."""
    rows = sorted({1, 2, 1 + longest // 2, 1 + longest})
    whole = measure_target(target, context=context, rows=rows)
    least = measure_target(target, context=context, rows=(1,), layers=(0,))
    return Costs(whole, least.at(1), len(target.blocks))


def layers(config: RunConfig) -> int:
    """Search, write the file, print what was found."""
    if config.output is None or not config.output.strip():
        raise UserError("layers writes a file: name it with output=FILE.json")
    file = Path(config.output).expanduser()
    if file.exists():
        raise UserError(f"output={config.output} is there already: name another file, or delete that one")
    if not file.parent.is_dir():
        raise UserError(f"output={config.output} is in a folder that is not there: make {file.parent} first")
    device = resolve_device(config.device)
    dtype, _ = resolve_dtype(config.dtype, device)
    task = load_task(config.task)
    longest, tries = config.layers.max_draft, config.layers.tries
    busy = (load_of_others() or 0.0) > BUSY
    with hardware.torch_threads(config.threads), Watch() as watch:
        source = target_of(config, dtype, watch.step)
        target = load_decoder(source, dtype=dtype, device=device, kernels=config.kernels.kernels, progress=watch.step)
        layout = target.config.layout
        if len(layout.layers) < 2:
            raise UserError(f"{source.label} has one layer, and nothing drafts without layers: take a larger model")
        lab = Lab(source, target, Nothing(), config.acceptance)
        requests = [request_of(lab, item, (), config.task) for item in task.items]
        watch.step("answers", 0, 1)
        answers = Answers(target, requests, config.acceptance.law(), longest, config.seed)
        watch.step("answers", 1, 1)
        context = round(
            fmean(len(r.prompt) + len(t) / 2 for r, t in zip(answers.requests, answers.tokens, strict=True))
        )
        costs = measure_costs(target, max(1, min(context, target.config.max_positions - longest - 1)), longest)
        influence = answers.influence()
        order = sorted(range(len(influence)), key=influence.__getitem__)
        found = climb(lambda skip: answers.judged(skip, layout, costs), order, layout, tries, watch.step)
    best = max(found, key=lambda t: t.speedup)
    doubt = costs.profile.doubt(busy)
    written = {
        "schema": SCHEMA,
        "kind": KIND,
        "target": source.digest,
        "target_label": source.label,
        "layers": len(layout.layers),
        "skip": sorted(best.skip),
        "max_draft": best.max_draft,
        "acceptance": best.acceptance,
        "tokens_per_step": best.tokens_per_step,
        "predicted_speedup": best.speedup,
        "task": {"label": task.label, "digest": task.digest},
        "law": asdict(config.acceptance.law()),
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": len(answers.requests),
        "tokens": sum(map(len, answers.tokens)),
        "tried": len(found),
        "notes": [doubt] if doubt else [],
    }
    try:
        write_atomic(file, json.dumps(written, indent=1) + "\n")
    except OSError as error:  # what took minutes to find is not lost
        left_out = ",".join(map(str, sorted(best.skip)))
        told = f"drafting.skip=[{left_out}] drafting.max_draft={best.max_draft}"
        raise UserError(f"output={config.output} cannot be written ({error.strerror}); found was {told}") from error
    _show(found, len(layout.layers), answers, source.label, file, doubt)
    return 0


def _show(found: Sequence[Tried], count: int, answers: Answers, label: str, file: Path, doubt: str | None) -> None:
    best = max(found, key=lambda t: t.speedup)
    exits = [t for t in found if t.skip == frozenset(range(count - len(t.skip), count))]
    console = Console(highlight=False, markup=False)
    tokens = sum(map(len, answers.tokens))
    console.print(f"{label}: {len(found)} sets of layers on {len(answers.requests)} answers, {tokens} tokens\n")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("", "layers", "draft", "acceptance", "tokens/step", "predicted"):
        table.add_column(head, justify="left" if not head else "right")
    for name, tried in (("best set", best), ("best early exit", max(exits, key=lambda t: t.speedup))):
        chances = " ".join(f"{100 * chance:.0f} %" for chance in tried.acceptance)
        numbers = f"{tried.tokens_per_step:.2f}", f"{tried.speedup:.2f}×"
        table.add_row(name, f"{count - len(tried.skip)} of {count}", str(tried.max_draft), chances, *numbers)
    console.print(table)
    console.print(f"left out: {', '.join(map(str, sorted(best.skip)))}", soft_wrap=True)
    if best.speedup <= 1:
        now = " now" if doubt else ""
        console.print(f"none of them pays on this machine{now}: drafting so would be slower than plain decoding")
    if doubt:
        console.print(f"note: {doubt}", style="yellow", soft_wrap=True)
    use = f"drafting=layer_skip drafting.skip={file} drafting.max_draft={best.max_draft}"
    console.print(f"written to {file}; {use}", soft_wrap=True)
