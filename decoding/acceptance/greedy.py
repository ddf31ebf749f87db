"""Keep the longest path on which every token is the target's argmax."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..draft import Draft, Shape
from ..law import BadWord, Law, LawSettings, law_of
from ..noise import Noise
from .rule import Guarantee, Verdict, walk


@dataclass(frozen=True, slots=True)
class Greedy:
    """Emits what plain greedy decoding emits, token for token, whatever is drafted. Penalties precede the argmax."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bad_words: tuple[BadWord, ...] = ()
    min_new_tokens: int = 0

    guarantee: ClassVar[Guarantee] = "same tokens"
    shapes: ClassVar[tuple[Shape, ...]] = ("chain", "tree", "forest")
    needs_q: ClassVar[bool] = False
    reads: ClassVar[Literal["path", "all rows"]] = "path"

    def __post_init__(self) -> None:
        self.law()

    def law(self) -> LawSettings:
        return law_of(self, sample=False)

    def judge(self, draft: Draft, law: Law, noise: Noise) -> Verdict:
        def decide(row: int, offset: int, candidates: list[int]) -> tuple[int | None, int]:
            token = law.choose(row, noise, offset)
            return next((c for c in candidates if draft.tokens[c] == token), None), token

        return walk(draft, decide)
