"""Distillation: a smaller model learns from the target's answers to say what the target would say next.

A student is transformers' own model, so that what comes of it is a checkpoint like any other. It learns from the rows
that the tokens of an answer were chosen from, against the target's distribution there, which is computed when it is
wanted and kept nowhere. What a distance is good for: arXiv:2310.08461 (for drafts), arXiv:2306.08543.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor
from transformers import PretrainedConfig

from ..errors import UserError
from .model.config import LAYOUT, ModelConfig, content_of, states_layout
from .model.decoder import Decoder, Tap
from .model.differentiable import Passed
from .model.source import ModelSpec, Source, open_source
from .model.storage import atomic_file, explained
from .model.whose import note_of
from .training import Loss, Schedule, Score, Teacher, Text, drawn

if TYPE_CHECKING:  # its models cost every command two seconds
    import transformers

Divergence = Literal["forward", "reverse", "tv", "hard"]
FILE = "model.safetensors"
# What of a student from scratch may be other than the target's.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
_BY_LAYER = ("layer_types", "no_rope_layers")  # lists in a config with an entry a layer
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a student comes from; exactly one of three. `keep`: layers of the target, with its weights: so many of
    them, evenly spaced, or these. `config`: from scratch, of the target's architecture with these sizes. `start`: a
    model with the target's tokenizer, by a name, a hub id, a folder or a GGUF file. `freeze_embedding`: it stays as it
    was, and so does the unembedding."""

    keep: int | tuple[int, ...] | None = None
    config: dict[str, Any] | None = None
    start: str | None = None
    freeze_embedding: bool = False

    def __post_init__(self) -> None:
        at = "train.student."
        given = [name for name in ("keep", "config", "start") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(f"{at}{name}" for name in given) if given else "none of them"
            raise UserError(
                f"a student comes from one of {at}keep, {at}config and {at}start, got {told}: the others are null"
            )
        if isinstance(self.keep, int):
            fits = self.keep >= 1
        else:
            rising = list(self.keep or ())
            fits = self.keep is None or (rising == sorted(set(rising)) and bool(rising) and rising[0] >= 0)
        if not fits:
            raise UserError(
                f"{at}keep must be a number of layers from 1 on, or a rising list of them, got {self._kept}"
            )
        for name, value in (self.config or {}).items():
            if name == "tie_word_embeddings":
                if not isinstance(value, bool):
                    raise UserError(f"{at}config.{name} must be true or false, got {value!r}")
            elif name not in _SIZES:
                raise UserError(f"{at}config.{name} is unknown: it has {', '.join(_SIZES)}, tie_word_embeddings")
            elif type(value) is not int or value < 1:
                raise UserError(f"{at}config.{name} must be an integer from 1 on, got {value!r}")
        if self.config is not None and self.freeze_embedding:
            raise UserError(f"{at}freeze_embedding would freeze random numbers: it must be false with {at}config")

    @property
    def _kept(self) -> str:
        return str(self.keep) if isinstance(self.keep, int) else str(list(self.keep or ()))

    def check(self, target: Source, longest: int) -> Mapping[str, Tensor] | None:
        """The weights of `start`, each read when it is asked for. `longest`: tokens of a text. Refuses what cannot be
        built, or cannot be held against the target."""
        begun = self._opened(target)
        whose = target if begun is None else begun
        if self.config is None and states_layout(whose.config):
            raise UserError(
                f"transformers, by which students are trained, has no words for the {LAYOUT} of {whose.label}: give "
                "train.student.config, or another model"
            )
        model = ModelConfig.from_hf(self.shape(target) if begun is None else begun.config)
        most = min(longest, target.config.max_position_embeddings)
        if model.max_positions < most:
            raise UserError(
                f"the student holds {model.max_positions} tokens: lower train.schedule.longest={longest} to that"
            )
        return None if begun is None else begun.tensors()

    def _opened(self, target: Source) -> Source | None:
        """The model of `start`."""
        if self.start is None:
            return None
        known = Path(self.start).expanduser().exists() or "/" in self.start
        found = open_source(ModelSpec(path=self.start) if known else ModelSpec(self.start))
        if found.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise UserError(
                f"train.student.start={self.start} has another tokenizer than {target.label}: name a model with its own"
            )
        return found

    def layers(self, target: Source) -> tuple[int, ...]:
        """Of the target's layers, those that the student's are, or from scratch are like."""
        there = target.config.num_hidden_layers
        if self.keep is None:
            return _spread(self.config.get("num_hidden_layers", there) if self.config else there, there)
        if (self.keep if isinstance(self.keep, int) else self.keep[-1] + 1) > there:
            raise UserError(f"train.student.keep={self._kept}, but {target.label} has {there} layers, from 0 on")
        return _spread(self.keep, there) if isinstance(self.keep, int) else self.keep

    def shape(self, target: Source) -> PretrainedConfig:
        """The config of a student without `start`."""
        layers, given = self.layers(target), dict(self.config or {})
        content = {key: value for key, value in target.config.to_dict().items() if key != LAYOUT}
        if {"hidden_size", "num_attention_heads"} & given.keys() and "head_dim" not in given:
            dim, heads = (given.get(name, content[name]) for name in ("hidden_size", "num_attention_heads"))
            if dim % heads:
                raise UserError(
                    f"train.student.config: hidden_size={dim} is no multiple of num_attention_heads={heads}; give one "
                    "that is, or head_dim"
                )
            given["head_dim"] = dim // heads
        if given.get("head_dim", 2) % 2:
            raise UserError(f"train.student.config: a head_dim of {given['head_dim']} is odd, and RoPE turns pairs")
        given |= {name: [content[name][i] for i in layers] for name in _BY_LAYER if content.get(name)}
        config = type(target.config).from_dict(content | given | {"num_hidden_layers": len(layers)})
        try:
            ModelConfig.from_hf(config)
        except UserError as error:
            raise UserError(f"train.student.config: {error}") from None
        return config

    def build(self, target: Source, beside: Decoder, seed: int, start: Mapping[str, Tensor] | None) -> "Pretrained":
        """In float32, where the target is decoded `beside` it. `start`: what `check` returned."""
        from transformers import AutoModelForCausalLM

        begun = self._opened(target)
        config = self.shape(target) if begun is None else begun.config
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        layers = self.layers(target)
        tensors = target.tensors() if start is None else start
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self.config is None:
                    parameter.copy_(tensors[name if start is not None else _there(name, layers)])
                parameter.requires_grad_(not (self.freeze_embedding and name in _EMBEDDINGS))
        return Pretrained(model.to(beside.device))


def _spread(count: int, there: int) -> tuple[int, ...]:
    """`count` of `there` layers, the first and the last among them."""
    return tuple(round(i * (there - 1) / max(1, count - 1)) for i in range(count))


def _there(name: str, layers: Sequence[int]) -> str:
    """What a tensor of the student is called in a model whose `layers` it has."""
    parts = name.split(".")
    return ".".join(["model", "layers", str(layers[int(parts[2])]), *parts[3:]]) if parts[1] == "layers" else name


@dataclass(frozen=True, slots=True)
class Distance:
    """What is minimised at a row, over p (the target's) and q (the student's), both at `temperature`. forward:
    KL(p ‖ q); reverse: KL(q ‖ p); tv: ½ Σ |p − q|, which is 1 − the chance that a token drawn from q is accepted
    (arXiv:2211.17192); hard: −log q of the target's own token. `rows`: rows that a step learns from, drawn from those
    of its texts (None: all)."""

    divergence: Divergence = "forward"
    temperature: float = 1.0
    rows: int | None = 512

    def __post_init__(self) -> None:
        if self.divergence not in ("forward", "reverse", "tv", "hard"):
            raise UserError(f"train.loss.divergence must be forward, reverse, tv or hard, got {self.divergence!r}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"train.loss.temperature must be above 0 and finite, got {self.temperature}")
        if self.divergence == "hard" and self.temperature != 1:
            raise UserError(
                f"train.loss.temperature={self.temperature} is of distributions: it must be 1 with divergence=hard"
            )
        if self.rows is not None and self.rows < 1:
            raise UserError(f"train.loss.rows must be at least 1, or null for all, got {self.rows}")

    def __call__(self, p: Float[Tensor, "R V"], q: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
        """Of logits; not of `hard`, which has no p. A token of no chance in one of them adds nothing that is not
        finite: its logarithm is that of a softmax, and not of 0."""
        log_p, log_q = (F.log_softmax(logits / self.temperature, -1) for logits in (p, q))
        if self.divergence == "forward":
            return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        if self.divergence == "reverse":
            return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
        assert self.divergence == "tv"
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


Row = tuple[int, int]  # the number of a text, and that of a row in it
States = Sequence[Mapping[Tap, Tensor]]  # what the teacher's layers come to, of each text


@runtime_checkable
class Student(Protocol):
    """What learns, in float32. `tensors`: all of it, by transformers' names, what is tied once; `parameters`: those
    that learn. `config`: that it is saved with."""

    @property
    def config(self) -> PretrainedConfig: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def parameters(self) -> Mapping[str, Tensor]: ...
    def __call__(self, tokens: Int[Tensor, "B S"]) -> Passed: ...
    def logits(self, final: Float[Tensor, "R dim"]) -> Float[Tensor, "R V"]: ...


@dataclass(frozen=True)
class Pretrained:
    """A model of transformers as a student; its layers' states are not told."""

    model: "transformers.PreTrainedModel"

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}

    def __call__(self, tokens: Int[Tensor, "B S"]) -> Passed:
        return Passed((), self.model.model(input_ids=tokens, use_cache=False).last_hidden_state)

    def logits(self, final: Float[Tensor, "R dim"]) -> Float[Tensor, "R V"]:
        found: Tensor = self.model.lm_head(final)
        return found


class Distillation:
    """The student as it learns, in float32, beside a frozen target. Where that is in bfloat16, the student's products
    are as well. `hidden`: the weight of a second distance, of a student with the target's layers and width: the squared
    one of the residual streams behind each layer, as a share of the longer one's square, on average over all rows.
    """

    def __init__(self, distance: Distance, target: Decoder, student: Student, hidden: float = 0.0) -> None:
        self._distance, self._target, self._hidden = distance, target, hidden
        self.student = student
        self._layers = range(1, target.config.layers + 1) if hidden else range(0)
        last: tuple[Tap, ...] = ("final",)
        self._teacher, self._teacher_of_layers = Teacher(target, last), Teacher(target, (*last, *self._layers))
        self._unembedding = target.unembedding.dense()
        self._vocab = min(target.config.vocab, student.config.vocab_size)  # the rest of the larger one is padding

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self.student.parameters

    def loss(self, texts: Sequence[Text], done: float, draws: torch.Generator) -> Loss:
        rows = [(i, t) for i, text in enumerate(texts) for t in _answer(text)]
        rows = [rows[i] for i in drawn(len(rows), self._distance.rows, draws).tolist()]
        needed = self._hidden or self._distance.divergence != "hard"
        taught = self._teacher_of_layers(texts) if needed else []
        with self._precision:
            passed = self.student(self._padded(texts))
            q = self._logits(passed, rows)
            if self._distance.divergence == "hard":
                value = F.cross_entropy(q, self._said(texts, rows))
            else:
                value = self._distance(self._target_logits(taught, rows), q).mean()
            if not self._hidden:
                return Loss(value)
            apart = self._apart(taught, passed)
            parts = {"loss_output": float(value.detach()), "loss_hidden": float(apart.detach())}
            return Loss(value + self._hidden * apart, parts)

    def _apart(self, taught: States, passed: Passed) -> Tensor:
        found = []
        for layer in self._layers:
            for i, states in enumerate(taught):
                theirs = states[layer].float()
                ours = passed.states[layer - 1][i, : len(theirs)].float()
                longer = torch.maximum(*(one.detach().square().sum(-1) for one in (ours, theirs)))
                found.append((ours - theirs).square().sum(-1) / longer)  # at most 4, however far it is at first
        return torch.cat(found).mean()

    @torch.no_grad()
    def score(self, texts: Iterable[Text]) -> Score:
        """At each token of the answers: how far the student is from its teacher."""
        apart, alike, theirs, ours = [], [], [], []
        for text in texts:  # alone: logits of whole answers are large
            rows = [(0, t) for t in _answer(text)]
            with self._precision:
                q = self._logits(self.student(self._padded([text])), rows)
            p, said = self._target_logits(self._teacher([text]), rows), self._said([text], rows)
            apart.append(Distance("forward")(p, q))
            alike.append(p.argmax(-1) == q.argmax(-1))
            theirs.append(F.cross_entropy(p, said, reduction="none"))
            ours.append(F.cross_entropy(q, said, reduction="none"))
        kl = torch.cat(apart)
        mean = float(kl.mean())
        return Score(
            -mean,
            {
                "kl": mean,
                "kl_p99": float(torch.quantile(kl, 0.99)),
                "agreement": float(torch.cat(alike).float().mean()),
                "perplexity": float(torch.cat(ours).mean().exp()),
                "teacher_perplexity": float(torch.cat(theirs).mean().exp()),
            },
        )

    def _said(self, texts: Sequence[Text], rows: Sequence[Row]) -> Int[Tensor, " R"]:
        """The token that the target chose at each row."""
        return torch.tensor([texts[i].tokens[t + 1] for i, t in rows], device=self._target.device)

    @torch.no_grad()
    def _target_logits(self, taught: States, rows: Sequence[Row]) -> Float[Tensor, "R V"]:
        x = torch.stack([taught[i]["final"][t] for i, t in rows])
        return F.linear(x, self._unembedding)[:, : self._vocab].float()

    def _logits(self, passed: Passed, rows: Sequence[Row]) -> Float[Tensor, "R V"]:
        """The student's."""
        some, at = torch.tensor(rows, device=self._target.device).unbind(1)
        return self.student.logits(passed.final[some, at])[:, : self._vocab].float()

    def _padded(self, texts: Sequence[Text]) -> Int[Tensor, "B S"]:
        """Padding stands behind every text, where no row of it looks."""
        padded = torch.zeros(len(texts), max(len(text.tokens) for text in texts), dtype=torch.long)
        for i, text in enumerate(texts):
            padded[i, : len(text.tokens)] = torch.tensor(text.tokens)
        return padded.to(self._target.device)

    @property
    def _precision(self) -> torch.autocast:
        return torch.autocast(self._target.device.type, torch.bfloat16, enabled=self._target.dtype == torch.bfloat16)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By transformers' names, in the target's dtype; what is tied stands there once."""
        stored = self.student.tensors.items()
        return {name: tensor.detach().to(self._target.dtype).contiguous() for name, tensor in stored}

    def decoder(self) -> Decoder:
        """The student as it is now, as one that decodes."""
        config = ModelConfig.from_hf(self.student.config)
        return Decoder(config, self.tensors, dtype=self._target.dtype, device=self._target.device)

    def save(self, folder: Path, source: Source, kind: str, about: Mapping[str, Any]) -> None:
        """A folder as transformers writes it, with the target's tokenizer. The weights, in one file, come last."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        content = save(self.tensors, {"format": "pt", **note_of(kind, source, about)})
        config = self.student.config
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.dtype = self._target.dtype
        with explained(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".partial") as written:
            new = Path(written)
            config.save_pretrained(new)
            if states_layout(config):
                (new / "config.json").write_text(json.dumps(content_of(config), indent=1) + "\n", encoding="utf-8")
            source.tokenizer.save_pretrained(new)
            ends = json.dumps({"eos_token_id": list(source.eos_ids)})
            (new / "generation_config.json").write_text(ends, encoding="utf-8")
            for file in [file for file in new.rglob("*") if file.is_file()]:
                place = folder / file.relative_to(new)
                place.parent.mkdir(exist_ok=True)
                file.replace(place)
        with atomic_file(folder / FILE, len(content)) as weights:
            weights.write(content)


def _answer(text: Text) -> range:
    """The rows from which the tokens of the answer were chosen."""
    return range(text.first - 1, len(text.tokens) - 1)


@dataclass(frozen=True, slots=True)
class TrainStudent:
    """Settings: a student that is to stand in the target's place."""

    student: Origin
    loss: Distance = field(default_factory=Distance)
    schedule: Schedule = field(default_factory=Schedule)

    kind: ClassVar[str] = "student"

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
    ) -> "StudentLearner":
        built = self.student.build(source, target, seed, start)
        return StudentLearner(self.kind, Distillation(self.loss, target, built))


@dataclass(frozen=True)
class StudentLearner:
    """The student, judged by how far it is from its teacher. `kind`: of the training, for what is saved."""

    kind: str
    objective: Distillation

    def score(self, texts: Iterable[Text]) -> Score:
        return self.objective.score(texts)

    def save(self, folder: Path, source: Source, about: Mapping[str, Any]) -> None:
        self.objective.save(folder, source, self.kind, about)
