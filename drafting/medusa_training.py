"""How Medusa's heads are trained: Medusa-1 (arXiv:2401.10774), the target frozen, cross entropy on its own answers.

Head i reads the hidden state of row t and learns token t + 2 + i: the target's own unembedding says token t + 1. A
head's block begins with a weight of zero, so that at first it says what the target says.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from ..decoding.cost import DraftCost, Profile
from ..decoding.events import Step
from ..decoding.law import LawSettings
from ..decoding.model.decoder import Decoder, Tap
from ..decoding.model.source import Source
from ..decoding.model.storage import atomic_file
from ..decoding.training import Loss, Schedule, Teacher, Text, drawn
from ..errors import UserError
from .medusa import FILES, IDS, MedusaDrafter, MedusaHeads, bare, check_ids, check_shapes, count_heads, guessed, note
from .trained import open_trained
from .trees import TreeShape, fastest, measured
from .vocabulary import check_known, check_size, known, narrowed

MOST = 8  # heads, and blocks of one: a tree is guessed for so many
NONE = -100  # the label of a row behind which so many tokens do not stand


@dataclass(frozen=True, slots=True)
class TrainMedusa:
    """Settings. `heads`: how many, and `blocks` in each; `decay`: the weight of a head's loss against that of the one
    before it; `rows`: rows that a step learns from, drawn from those of its texts (None: all); `vocabulary`: how many
    tokens the heads know, the most frequent of the answers (None: all); `start`: heads to go on from."""

    heads: int = 3
    blocks: int = 1
    vocabulary: int | None = None
    decay: float = 0.8
    rows: int | None = 512
    start: str | None = None
    schedule: Schedule = field(default_factory=Schedule)

    kind: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        for name in ("heads", "blocks"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UserError(f"train.{name} must be 1 to {MOST}, got {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise UserError(f"train.decay must be above 0 and at most 1, got {self.decay}")
        if self.rows is not None and self.rows < 1:
            raise UserError(f"train.rows must be at least 1, or null for all, got {self.rows}")

    def check(self, target: Source) -> Mapping[str, Tensor] | None:
        """The heads of `start`. Refuses those of another target, or of other sizes than are asked for."""
        check_size(self.vocabulary, guessed(self.heads).width, target.config.vocab_size)
        if self.start is None:
            return None
        trained = open_trained(self.start, "medusa", FILES, "train.start")
        check_shapes(trained, target.label, target.config.hidden_size, target.config.vocab_size)
        for told in trained.check_target(target):
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        found = {bare(name): tensor for name, tensor in trained.tensors().items()}
        layers = [f"{i}.{j}.linear" for i in range(self.heads) for j in range(self.blocks)]
        if found.keys() - {IDS} != {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}:
            raise UserError(
                f"train.start={self.start} has {count_heads(trained)} heads, and not of train.heads={self.heads} "
                f"train.blocks={self.blocks}, or has unembeddings of its own, which are not trained"
            )
        if IDS in found:
            check_ids(trained.file, found[IDS], target.config.vocab_size)
        check_known(self.start, self.vocabulary, None if IDS not in found else len(found[IDS]))
        return found

    def learner(
        self,
        source: Source,
        target: Decoder,
        texts: Sequence[Text],
        seed: int,
        start: Mapping[str, Tensor] | None,
    ) -> "MedusaLearner":
        """`start`: heads to go on from, by the names of their file."""
        ids = known(self.vocabulary, texts, target.config.vocab, None if start is None else start.get(IDS))
        dim, parameters = target.config.dim, dict[str, Tensor]()
        for i in range(self.heads):
            for j in range(self.blocks):
                for name, size in ((f"{i}.{j}.linear.weight", (dim, dim)), (f"{i}.{j}.linear.bias", (dim,))):
                    begun = torch.zeros(size) if start is None else start[name].float()
                    parameters[name] = begun.to(target.device).requires_grad_()
        return MedusaLearner(MedusaObjective(self, target, parameters, ids), target)


class MedusaObjective:
    """The heads as they learn, in float32, beside a frozen target."""

    taps: ClassVar[tuple[Tap, ...]] = ("final",)

    def __init__(
        self, settings: TrainMedusa, target: Decoder, parameters: Mapping[str, Tensor], ids: Tensor | None = None
    ) -> None:
        self._settings, self._target, self.ids = settings, target, ids
        self.parameters = parameters
        self._teacher = Teacher(target, self.taps)
        self._unembedding = narrowed(target.unembedding, ids).dense()
        self._number = torch.arange(target.config.vocab)  # of a token, among those that are known
        if ids is not None:
            self._number = torch.full_like(self._number, NONE).index_copy(0, ids.cpu(), torch.arange(len(ids)))

    def loss(self, texts: Sequence[Text], done: float, draws: torch.Generator) -> Loss:
        hidden, labels = [], []
        for text, states in zip(texts, self._teacher(texts), strict=True):
            tokens = torch.tensor(text.tokens)
            # the first row that an answer's token was chosen from, and the last behind which two tokens stand
            rows = torch.arange(text.first - 1, len(tokens) - 2)
            behind = rows[:, None] + torch.arange(2, 2 + self._settings.heads)
            said = self._number[tokens[behind.clamp_max(len(tokens) - 1)]]
            labels.append(torch.where(behind < len(tokens), said, NONE))
            hidden.append(states["final"][rows])
        x, wanted = torch.cat(hidden).float(), torch.cat(labels).to(self._target.device)
        some = drawn(len(x), self._settings.rows, draws).to(x.device)
        x, wanted = x[some], wanted[some]
        total, parts = x.new_zeros(()), {}
        for i in range(self._settings.heads):
            logits = F.linear(self._head(i, x).to(self._unembedding.dtype), self._unembedding).float()
            # a sum over the labels there are: the mean of none is no number
            each = F.cross_entropy(logits, wanted[:, i], ignore_index=NONE, reduction="sum")
            each = each / (wanted[:, i] != NONE).sum().clamp_min(1)
            total = total + self._settings.decay**i * each
            parts[f"loss_{i + 1}"] = float(each.detach())
        return Loss(total, parts)

    def _head(self, i: int, x: Tensor) -> Tensor:
        for j in range(self._settings.blocks):
            at = f"{i}.{j}.linear."
            x = x + F.silu(F.linear(x, self.parameters[f"{at}weight"], self.parameters[f"{at}bias"]))
        return x


@dataclass(slots=True)
class MedusaLearner:
    """The heads as a drafter. They are judged with the tree that heads without one of their own get, and saved with the
    part of it, or another of the candidates that it tried, that is fastest by what was kept of them."""

    objective: MedusaObjective
    target: Decoder
    tree: TreeShape | None = None

    def drafter(self, law: LawSettings) -> MedusaDrafter:
        tensors = {name: tensor.detach() for name, tensor in self.objective.parameters.items()} | self._ids
        target = self.target
        heads = MedusaHeads.read(tensors, target.unembedding, target.dtype, target.device)
        return MedusaDrafter(heads, guessed(len(heads.blocks)))

    @property
    def _ids(self) -> dict[str, Tensor]:
        return {} if self.objective.ids is None else {IDS: self.objective.ids}

    def watch(self, steps: Sequence[Step], costs: tuple[Profile, DraftCost]) -> None:
        """`steps`: those of the drafter on prompts kept back."""
        tried = guessed(len({name.split(".")[0] for name in self.objective.parameters}))
        drafted = sum(bool(step.offered) for step in steps)
        best = fastest(measured(steps, tried), *costs, most=len(tried), share=drafted / len(steps))
        self.tree = best if len(best) else None

    def save(self, folder: Path, source: Source, about: Mapping[str, Any]) -> None:
        tensors = {name: t.detach().to(self.target.dtype).contiguous() for name, t in self.objective.parameters.items()}
        content = save(
            tensors | self._ids, note(source, **about, **({} if self.tree is None else {"tree": self.tree.paths}))
        )
        with atomic_file(folder / FILES[0], len(content)) as file:
            file.write(content)
