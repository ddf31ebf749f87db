"""How a draft model is trained: a small model is distilled from the target (arXiv:2310.08461), judged as it drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..decoding.distillation import Distance, Distillation, Origin
from ..decoding.law import LawSettings
from ..decoding.model.decoder import Decoder
from ..decoding.model.source import Source
from ..decoding.training import Schedule, Text
from ..errors import UserError
from .draft_model import DraftModel, ModelDrafter


@dataclass(frozen=True, slots=True)
class TrainDraft:
    """Settings. `max_draft`: of the drafts that it is judged by."""

    student: Origin
    loss: Distance = field(default_factory=Distance)
    max_draft: int = 4
    schedule: Schedule = field(default_factory=Schedule)

    kind: ClassVar[str] = "draft"

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise UserError(f"train.max_draft must be at least 1, got {self.max_draft}")

    def check(self, target: Source) -> Mapping[str, Tensor] | None:
        """The weights of `train.student.start`. Refuses a student that cannot be built."""
        return self.student.check(target, self.schedule.longest)

    def learner(
        self,
        source: Source,
        target: Decoder,
        texts: Sequence[Text],
        seed: int,
        start: Mapping[str, Tensor] | None,
    ) -> "DraftLearner":
        objective = Distillation(self.loss, target, self.student.build(source, target, seed, start))
        return DraftLearner(objective, DraftModel(max_draft=self.max_draft), target.config.vocab)


@dataclass(frozen=True)
class DraftLearner:
    """The student as a drafter. `vocab`: the target's."""

    objective: Distillation
    settings: DraftModel
    vocab: int

    def drafter(self, law: LawSettings) -> ModelDrafter:
        return ModelDrafter(self.settings, self.objective.decoder(), self.vocab, law)

    def save(self, folder: Path, source: Source, about: Mapping[str, Any]) -> None:
        self.objective.save(folder, source, TrainDraft.kind, about)
