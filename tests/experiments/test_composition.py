"""Which parts go together, on which device, in which dtype."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from decodelab.decoding.acceptance import Block, Greedy, Sampling
from decodelab.decoding.draft import Gives, Needs
from decodelab.decoding.law import LawSettings
from decodelab.decoding.model.source import ModelSpec, Source
from decodelab.drafting.draft_model import DraftModel, DraftSpec
from decodelab.drafting.lookahead import Lookahead
from decodelab.drafting.none import Nothing
from decodelab.drafting.suffix import Suffix
from decodelab.drafting.token_recycling import TokenRecycling
from decodelab.errors import UserError
from decodelab.experiments import composition
from decodelab.experiments.composition import Composition, draft_models, resolve_device, resolve_dtype, resolve_pair
from decodelab.experiments.composition import resolve as resolve_config
from decodelab.experiments.config import KernelSettings, RunConfig
from decodelab.experiments.items import Item, Message
from decodelab.experiments.tasks import Task, TaskSettings


@dataclass(frozen=True)
class Drafts:
    """Settings that give and need as told; `says`: what `check` of a target answers."""

    gives: Gives
    needs: Needs = field(default_factory=Needs)
    says: Any = ()

    def check(self, target: Any) -> list[str]:
        if isinstance(self.says, UserError):
            raise self.says
        return list(self.says)

    def build(self, resources: Any) -> Any:
        raise AssertionError("nothing is built")


@dataclass(frozen=True)
class OfAllRows:
    """A rule that reads all rows, of chains and trees."""

    penalty: float = 1.0
    words: tuple[str, ...] = ()

    guarantee: ClassVar = "lossy"
    shapes: ClassVar = ("chain", "tree")
    needs_q: ClassVar = True
    reads: ClassVar = "all rows"

    def law(self) -> LawSettings:
        return LawSettings(sample=True, repetition_penalty=self.penalty, bad_words=self.words)

    def judge(self, draft: Any, law: Any, noise: Any) -> Any:
        raise AssertionError("nothing is judged")


CHAIN = Drafts(Gives("chain", 4, 4))
SAMPLED = Drafts(Gives("chain", 4, 4, "sampled"))
FOREST = Drafts(Gives("forest", 8, 4))
TARGET = object.__new__(Source)  # nobody looks into it


def verdict(drafting: Any, acceptance: Any) -> tuple[str, str]:
    found = resolve_pair(drafting, acceptance)
    return str(found), found.exactness


@pytest.mark.parametrize(
    ("drafting", "acceptance", "exactness"),
    [
        (CHAIN, Greedy(repetition_penalty=1.1), "exact"),
        (FOREST, Greedy(), "exact"),
        (CHAIN, Sampling(repetition_penalty=1.1), "exact"),  # one-hot: the tokens of plain sampling
        (SAMPLED, Sampling(), "same law"),
        (SAMPLED, OfAllRows(), "lossy"),
        (Nothing(), OfAllRows(), "lossy"),  # what a lossy rule emits where nothing is drafted is its own affair
        (CHAIN, Sampling(), "exact"),
        (Nothing(), Block(), "same law"),  # of draws of its own
    ],
)
def test_pairs_that_run(drafting, acceptance, exactness):
    assert verdict(drafting, acceptance) == ("runs", exactness)
    assert resolve_pair(drafting, acceptance).notes() == []


def test_a_rule_that_reads_q_takes_one_hot_drafts_as_a_fallback():
    line = "acceptance=ofallrows reads q and this drafter has none: all of q is taken to be on the drafted token"
    assert verdict(CHAIN, OfAllRows()) == (f"runs, with this fallback: {line}", "lossy")
    assert resolve_pair(CHAIN, OfAllRows()).notes() == [line]


@pytest.mark.parametrize(
    ("drafting", "acceptance", "line"),
    [
        (
            FOREST, OfAllRows(),
            "acceptance=ofallrows judges chains and trees, and this drafter proposes a forest: "
            "choose acceptance=sampling",
        ),
        (
            SAMPLED, OfAllRows(penalty=1.1, words=("no",)),
            "acceptance=ofallrows reads all rows at once, and repetition_penalty, bad_words must be followed along "
            "a path: leave them out, or choose acceptance=sampling",
        ),
    ],
)  # fmt: skip
def test_pairs_that_are_refused(drafting, acceptance, line):
    found = resolve_pair(drafting, acceptance)
    assert str(found) == f"refused, because {line}"
    with pytest.raises(UserError, match=r"^refused, because "):
        found.notes()


@pytest.mark.parametrize(
    ("drafting", "form"),
    [(Suffix(), "drafting.tree=false or "), (TokenRecycling(), "drafting.tree=chain or "), (Lookahead(), "")],
)
def test_a_drafter_that_has_a_chain_form_is_told_it(drafting, form):
    (line,) = resolve_pair(drafting, Block()).reasons
    assert line.endswith(f": choose {form}acceptance=sampling")


def test_sampled_drafts_under_a_greedy_rule_are_chosen_as_it_chooses():
    found = resolve_pair(SAMPLED, Greedy())
    assert (found.verdict, found.exactness) == ("runs with a fallback", "exact")
    assert found.notes() == [
        "acceptance=greedy does not sample, so drafts are chosen as the target chooses, not sampled"
    ]


def test_every_reason_is_told():
    found = resolve_pair(FOREST, OfAllRows(penalty=2.0))
    assert len(found.reasons) == 2
    assert str(found) == f"refused, because {found.reasons[0]}; {found.reasons[1]}"


def test_the_settings_judge_the_target():
    other = Drafts(CHAIN.gives, says=UserError("their tokenizers differ"))
    assert str(resolve_pair(other, Greedy(), TARGET)) == "refused, because their tokenizers differ"
    assert str(resolve_pair(other, Greedy())) == "runs"  # not known yet
    warned = resolve_pair(Drafts(CHAIN.gives, says=["the draft's context is shorter"]), Greedy(), TARGET)
    assert warned == Composition("runs", "exact", warnings=("the draft's context is shorter",))
    assert warned.notes() == ["the draft's context is shorter"]


def test_a_drafter_of_documents_warns_where_there_are_none():
    copies = Drafts(CHAIN.gives, Needs(documents=True))
    bare, given = (Item("1", "c", (Message("user", "x"),), documents=documents) for documents in ((), ("text",)))
    warning = "no prompt of the task t has documents, from which this drafter copies"
    assert resolve_pair(copies, Greedy(), task=Task((bare, bare), "t", "")).warnings == (warning,)
    assert resolve_pair(copies, Greedy(), task=Task((bare, given), "t", "")).warnings == ()
    assert resolve_pair(CHAIN, Greedy(), task=Task((bare,), "t", "")).warnings == ()


def test_a_configuration_is_resolved_by_its_parts():
    config = RunConfig(ModelSpec("m"), FOREST, OfAllRows(), TaskSettings())
    assert resolve_config(config) == resolve_pair(FOREST, OfAllRows())


def test_the_models_that_draft():
    first, second = (DraftModel(DraftSpec(path=path)) for path in ("a", "b"))
    assert draft_models(first) == [ModelSpec(path="a")]
    assert draft_models(Drafts(CHAIN.gives, says=(first, [second]))) == [ModelSpec(path="a"), ModelSpec(path="b")]
    assert draft_models(Nothing()) == []
    with pytest.raises(UserError, match="drafting=draft_model has no model"):
        draft_models(DraftModel())


@pytest.fixture
def machine(monkeypatch):
    """Sets what torch says of the machine."""

    def become(*, gpus=0, cuda=None, hip=None, mkldnn=True, emulated=True, avx512_bf16=False, amx=False, arch="x86_64"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: emulated)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr("platform.machine", lambda: arch)

    return become


def test_auto_takes_the_gpu(machine):
    machine(gpus=2, cuda="12.8")
    assert [resolve_device(name) for name in ("auto", "cpu", "cuda:1")] == [
        torch.device("cuda"), torch.device("cpu"), torch.device("cuda:1"),
    ]  # fmt: skip
    machine()
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "have", "line"),
    [
        ("cuda", {}, "device=cuda, but torch 2.13.0 is a CPU build; device=cpu works"),
        ("cuda", {"cuda": "12.8"}, "device=cuda, but torch 2.13.0 is a GPU build that finds no GPU; device=cpu works"),
        ("cuda", {"hip": "6.4"}, "device=cuda, but torch 2.13.0 is a GPU build that finds no GPU; device=cpu works"),
        ("cuda:2", {"gpus": 2, "cuda": "12.8"}, "device=cuda:2, but the GPUs here are cuda:0 to cuda:1"),
        ("gpu", {}, "device=gpu is unknown; there are auto, cpu, cuda, and cuda:1 for the second GPU"),
        ("mps", {}, "device=mps is unknown; there are auto, cpu, cuda, and cuda:1 for the second GPU"),
    ],
)
def test_a_device_that_is_not_there(name, have, line, machine):
    machine(**have)
    with pytest.raises(UserError) as caught:  # noqa: PT011  # compared below
        resolve_device(name)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("have", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx": True}, torch.bfloat16),
        ({}, torch.float32),  # AVX-512 alone: oneDNN emulates bfloat16
        ({"avx512_bf16": True, "mkldnn": False}, torch.float32),
        ({"arch": "aarch64"}, torch.bfloat16),
        ({"arch": "arm64", "emulated": False}, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(have, dtype, machine):
    machine(**have)
    found, why = resolve_dtype("auto", torch.device("cpu"))
    assert found == dtype
    assert why == f"auto, this CPU {'multiplies' if dtype == torch.bfloat16 else 'does not multiply'} bfloat16 natively"


def test_dtype_on_a_gpu_and_as_asked(machine):
    machine(gpus=1)
    assert resolve_dtype("auto", torch.device("cuda")) == (torch.bfloat16, "auto, on a GPU")
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert resolve_dtype(name, torch.device("cuda")) == (getattr(torch, name), "as asked")


@pytest.mark.parametrize(
    ("settings", "gpus", "dtype", "line"),
    [
        (KernelSettings(), 0, "float32", None),
        (KernelSettings(row_invariant=False), 1, "bfloat16", None),
        (KernelSettings(False, False), 0, "float32", "kernels.row_invariant=false, kernels.graphs=false changes"),
        (KernelSettings(graphs=False), 1, "float64", "kernels.graphs=false changes nothing on cuda in float64"),
    ],
)
def test_keys_of_kernels_that_do_not_run_are_told(settings, gpus, dtype, line, machine):
    machine(gpus=gpus)
    found = resolve_config(RunConfig(ModelSpec("m"), CHAIN, Greedy(), TaskSettings(), dtype=dtype, kernels=settings))
    assert found.verdict == "runs"
    assert [warning.startswith(line or "") for warning in found.warnings] == [True] * (line is not None)


def test_a_gpu_that_torch_cannot_use_is_told(machine, monkeypatch, tmp_path):
    line = "this machine has an NVIDIA GPU, but torch 2.13.0 is a CPU build: install a CUDA build"
    monkeypatch.setattr(composition, "_NVIDIA", (tmp_path / "nvidiactl",))
    monkeypatch.setenv("PATH", str(tmp_path))
    machine()
    assert composition.unused_gpu() is None
    (tmp_path / "nvidiactl").touch()
    assert composition.unused_gpu() == line
    machine(cuda="12.8")
    assert composition.unused_gpu() is None
    machine()
    (tmp_path / "nvidiactl").rename(tmp_path / "nvidia-smi")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert composition.unused_gpu() == line
