"""How a head of EAGLE is trained: the target frozen, its own answers as text, its probabilities as what is foretold.

EAGLE-1 (arXiv:2401.15077): the head foretells the target's next hidden state as well (smooth L1), from hidden states
with some noise, since it will read its own. EAGLE-3 (arXiv:2503.01840): the training-time test. The head reads what it
foretold itself, several times over, each time beside the keys and values it would have beside it when it drafts; the
states may then be whatever foretells the tokens best. (Such unrolling serves EAGLE-1 too: HASS, arXiv:2408.15766.)
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig

from ..decoding.law import LawSettings
from ..decoding.model.config import ModelConfig
from ..decoding.model.decoder import Decoder, Tap
from ..decoding.model.source import Source
from ..decoding.model.storage import atomic_file
from ..decoding.training import Loss, Schedule, Teacher, Text, drawn
from ..errors import UserError
from .eagle import FILES, Eagle, EagleDrafter
from .eagle_head import (
    EagleHead,
    HeadConfig,
    dense,
    known_ids,
    note,
    read_config,
    read_tensors,
    three_taps,
    unembedding_of,
)
from .trained import open_trained
from .vocabulary import check_known, check_size, known, narrowed

_DRAWN = 0.02  # the deviation of weights that begin by chance


@dataclass(frozen=True, slots=True)
class TrainEagle:
    """Settings. `version`: 1, or 3 with three hidden states fused. `unrolled`: how often the head reads what it
    foretold, the first time included (None: 3 times with version 3, else once); `decay`: the weight of each time
    against the one before. `noise`: the largest that is added to a hidden state, reached halfway (version 1); `states`:
    the weight of the loss on hidden states, of which 1 − `states` is that on tokens (version 1). `rows`: rows that a
    step learns from (None: all of its texts). `mlp_dim`: None for the target's. `vocabulary`: how many tokens the head
    knows, the most frequent of the answers (None: all). `start`: a head to go on from."""

    version: Literal[1, 3] = 1
    unrolled: int | None = None
    decay: float = 0.8
    noise: float = 0.1
    states: float = 0.9
    rows: int | None = 512
    mlp_dim: int | None = None
    vocabulary: int | None = None
    start: str | None = None
    schedule: Schedule = field(default_factory=Schedule)

    kind: ClassVar[str] = "eagle"

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise UserError(f"train.version must be 1 or 3, got {self.version}")
        if self.unrolled is not None and self.unrolled < 1:
            raise UserError(f"train.unrolled must be at least 1, or null, got {self.unrolled}")
        if not 0 < self.decay <= 1:
            raise UserError(f"train.decay must be above 0 and at most 1, got {self.decay}")
        if not 0 <= self.noise < float("inf"):
            raise UserError(f"train.noise must be 0 or more, got {self.noise}")
        if not 0 <= self.states < 1:
            raise UserError(f"train.states is a share, from 0 to below 1, got {self.states}")
        for name in ("rows", "mlp_dim", "vocabulary"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"train.{name} must be at least 1, or null, got {value}")

    @property
    def turns(self) -> int:
        """How often the head reads what it foretold, the first time included."""
        return self.unrolled or (3 if self.version == 3 else 1)

    def check(self, target: Source) -> Mapping[str, Tensor] | None:
        """The head of `start`. Refuses one of another target, or of another make than is asked for."""
        check_size(self.vocabulary, Eagle().topk, target.config.vocab_size)
        if self.start is None:
            return None
        theirs, trained = target.config, open_trained(self.start, "eagle", FILES, "train.start")
        config = read_config(trained, target.label, theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers)
        for told in trained.check_target(target):
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        wanted = self.config(ModelConfig.from_hf(theirs))
        found = read_tensors(trained, config, torch.float32, torch.device("cpu"))
        offsets = found.pop("d2t", None)
        check_known(self.start, self.vocabulary, None if offsets is None else len(offsets))
        if config != wanted or found.keys() != wanted.shapes().keys():
            raise UserError(
                f"train.start={self.start} is a head of EAGLE-{3 if config.fused else 1} of other sizes, heads, RoPE "
                f"or eps, or with more tensors, than train.version={self.version} train.mlp_dim={wanted.layer.mlp_dim} "
                "makes: set these as they were, or train.start=null"
            )
        return found if offsets is None else found | {"d2t": offsets}

    def config(self, target: ModelConfig) -> HeadConfig:
        """A layer of the target's own sizes."""
        layer = LlamaConfig(
            vocab_size=self.vocabulary or target.vocab,
            hidden_size=target.dim,
            intermediate_size=self.mlp_dim or target.mlp_dim,
            num_hidden_layers=1,
            num_attention_heads=target.heads,
            num_key_value_heads=target.kv_heads,
            head_dim=target.head_dim,
            max_position_embeddings=target.max_positions,
            rms_norm_eps=target.norm_eps,
        )
        taps: tuple[Tap, ...] = three_taps(target.layers) if self.version == 3 else ("final",)
        return HeadConfig(ModelConfig.from_hf(layer), taps, target.dim, target.vocab)

    def learner(
        self,
        source: Source,
        target: Decoder,
        texts: Sequence[Text],
        seed: int,
        start: Mapping[str, Tensor] | None,
    ) -> "EagleLearner":
        config = self.config(target.config)
        ids = known(self.vocabulary, texts, target.config.vocab, None if start is None else known_ids(start))
        begun = first(config, seed) if start is None else {n: t.clone() for n, t in start.items() if n != "d2t"}
        parameters = {name: tensor.to(target.device).requires_grad_() for name, tensor in begun.items()}
        return EagleLearner(EagleObjective(self, config, target, parameters, ids), target)


def first(config: HeadConfig, seed: int) -> dict[str, Tensor]:
    """Weights to begin with: the layer hands on what it is given, which is the hidden state (EAGLE-1) or a mean of the
    three, so that at first it says again what the target said."""
    draws = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in config.shapes().items():
        if len(size) == 1:
            found[name] = torch.ones(size)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.zeros(size)
        else:
            found[name] = _DRAWN * torch.randn(size, generator=draws)
    wide, eye = found["fc.weight"], torch.eye(config.dim)
    if config.fused:
        wide += torch.cat([eye / len(config.taps)] * len(config.taps), 1)
    else:  # [embedding, hidden state]
        wide[:, config.dim :] += eye
    return found


class EagleObjective:
    """The head as it learns, in float32, beside a frozen target."""

    def __init__(
        self,
        settings: TrainEagle,
        config: HeadConfig,
        target: Decoder,
        parameters: Mapping[str, Tensor],
        ids: Int[Tensor, " V"] | None = None,
    ) -> None:
        self.parameters, self.config, self.ids = parameters, config, ids
        self._settings, self._target = settings, target
        self._teacher = Teacher(target, tuple({*config.taps, "final"}))
        self._unembedding = narrowed(target.unembedding, ids).dense()
        self._known = torch.full((target.config.vocab,), ids is None)
        if ids is not None:
            self._known[ids.cpu()] = True
        self._head = EagleHead(config, parameters, target.embedding.float(), self._logits, dense)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._unembedding.dtype), self._unembedding).float()

    def loss(self, texts: Sequence[Text], done: float, draws: torch.Generator) -> Loss:
        """Row t reads hidden state t and token t + 1, and foretells hidden state t + 1 and so token t + 2."""
        taught = self._teacher(texts)
        B, T = len(texts), max(len(text.tokens) for text in texts) - 1
        device = self._target.device
        tokens = torch.zeros(B, T, dtype=torch.long)
        learnt = torch.zeros(B, T, dtype=torch.bool)
        states = {tap: torch.zeros(B, T + 1, self.config.dim, device=device) for tap in taught[0]}
        for b, (text, hidden) in enumerate(zip(texts, taught, strict=True)):
            n = len(text.tokens)
            tokens[b, : n - 1] = torch.tensor(text.tokens[1:])
            said = torch.tensor(text.tokens[2:])  # rows of other tokens than are known have nothing to teach
            learnt[b, : n - 2] = self._known[said]
            learnt[b, : max(0, text.first - 2)] = False
            for tap, h in hidden.items():
                states[tap][b, :n] = h.float()
        rows = learnt.flatten().nonzero()[:, 0]
        rows = rows[drawn(len(rows), self._settings.rows, draws)].to(device)
        tokens = tokens.to(device)
        final = states["final"][:, 1:].flatten(0, 1)[rows]
        with torch.no_grad():
            wanted = torch.softmax(self._logits(final), -1)
        features = self._head.fuse([states[tap][:, :-1] for tap in self.config.taps])
        if not self.config.fused and self._settings.noise:
            largest = self._settings.noise * min(1.0, 2 * done)
            features = features + largest * (2 * torch.rand(features.shape, generator=draws).to(device) - 1)
        count = max(1, len(rows))  # the mean of none is no number
        total, parts = features.new_zeros(()), {}
        for turn, out in enumerate(self.foretold(features, tokens)):
            ours = out.flatten(0, 1)[rows]
            said = torch.log_softmax(self._head.logits(ours), -1)
            each = -(wanted * said).sum() / count
            parts[f"loss_{turn + 1}"] = float(each.detach())
            if not self.config.fused:
                share, apart = self._settings.states, F.smooth_l1_loss(ours, final, reduction="sum")
                each = (1 - share) * each + share * apart / (count * self.config.dim)
            total = total + self._settings.decay**turn * each
        return Loss(total, parts)

    def foretold(
        self, features: Float[Tensor, "B T d"], tokens: Int[Tensor, "B T"]
    ) -> Iterator[Float[Tensor, "B T d"]]:
        """The next features, turn by turn: from the target's, and then from those foretold the turn before."""
        B, T = tokens.shape
        positions = torch.arange(T, device=tokens.device).expand(B, T)
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(self._settings.turns):
            out = self._head(features, tokens, positions, partial(_attend, kept))
            yield out
            features = _later(out)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found = {name: tensor.detach().to(dtype).contiguous() for name, tensor in self.parameters.items()}
        return found if self.ids is None else found | {"d2t": self.ids - torch.arange(len(self.ids))}


def _later(x: Float[Tensor, "B T *F"], by: int = 1) -> Float[Tensor, "B T *F"]:
    """What stood `by` rows earlier; nothing before the first."""
    by = min(by, x.shape[1])
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], 1)


def _attend(kept: list[tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of turn number n = len(kept) over what each row would have beside it then: of rows n and more before it
    the keys of the first turn, of the others, itself included, those of turns 1 to n, one each."""
    groups = q.shape[2] // k.shape[2]
    kept.append((k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    turn, T, scale = len(kept) - 1, q.shape[1], q.shape[-1] ** -0.5
    keys, values = kept[0]
    scores = torch.einsum("bthd,bshd->bhts", q, keys) * scale
    row = torch.arange(T, device=q.device)
    scores = scores.masked_fill(row[None, :] > row[:, None] - turn, float("-inf"))
    beside = [_later(values, turn - n) for n, (_, values) in enumerate(kept) if n]
    own = [(q * _later(keys, turn - n)).sum(-1).transpose(1, 2) * scale for n, (keys, _) in enumerate(kept) if n]
    whole = torch.softmax(torch.cat([scores, *(each[..., None] for each in own)], -1), -1)
    out = torch.einsum("bhts,bshd->bthd", whole[..., :T], values)
    for n, value in enumerate(beside):
        out = out + whole[..., T + n].transpose(1, 2)[..., None] * value
    return out.flatten(2)


@dataclass(frozen=True)
class EagleLearner:
    """The head as a drafter."""

    objective: EagleObjective
    target: Decoder

    def drafter(self, law: LawSettings) -> EagleDrafter:
        target = self.target
        tensors = self.objective.tensors(target.dtype)
        unembedding = unembedding_of(target.unembedding, tensors)
        return EagleDrafter(Eagle(), EagleHead(self.objective.config, tensors, target.embedding, unembedding))

    def save(self, folder: Path, source: Source, about: Mapping[str, Any]) -> None:
        layer, config = self.objective.config.layer, self.objective.config
        said = {
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "max_positions": layer.max_positions,
            "norm_eps": layer.norm_eps,
            **({"taps": list(config.taps)} if config.fused else {}),
        }
        content = save(self.objective.tensors(self.target.dtype), note(source, **said, **about))
        with atomic_file(folder / FILES[0], len(content)) as file:
            file.write(content)
