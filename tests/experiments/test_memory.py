"""What fits into memory is known before anything is loaded; what does not is refused, or runs apart and says so."""

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodelab.decoding.model.decoder import Decoder
from decodelab.decoding.model.load import load_decoder
from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.drafting.draft_model import DraftModel, DraftSpec
from decodelab.drafting.none import Nothing
from decodelab.errors import UserError
from decodelab.experiments import memory, run
from decodelab.experiments.compare_hf import HfPeer
from decodelab.experiments.hardware import Peaks
from decodelab.experiments.lab import Warm
from decodelab.experiments.memory import MARGIN, Held, Plan
from decodelab.experiments.planning import Architecture, Setup
from decodelab.experiments.result import _memory
from decodelab.tests.decoding.model.checkpoints import save_folder, tiny_model
from decodelab.tests.experiments.bench import strict

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets the bytes that are free."""
    return lambda size: monkeypatch.setattr(memory, "available_memory", lambda device: size)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.hardware, "peaks", lambda *_: Peaks(1e10, 1e11))


@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_is_what_the_decoder_holds(tied: bool, private: Path):
    """On a CPU a tied table is packed for the unembedding and kept for the embedding."""
    source = open_source(ModelSpec(path=str(save_folder(private / "model", tiny_model(tie_word_embeddings=tied)))))
    decoder = load_decoder(source, dtype=torch.float32)
    held = Held.of(source, torch.float32, CPU)
    about = Architecture.of("model", source.config.to_dict())
    planned = Setup(about, about.layout, itemsize=4)
    assert planned.weight_bytes == held.bytes  # what is stored, a tied table once
    norms = [decoder.norm, *(norm for block in decoder.blocks for norm in (block.attention_norm, block.mlp_norm))]
    assert held.bytes + held.packed == decoder.weight_bytes + decoder.embedding.nbytes + sum(n.nbytes for n in norms)
    assert bool(held.packed) == tied
    in_memory = _memory(decoder, [], None)["weights_bytes"]
    assert in_memory == held.bytes + held.packed - sum(n.nbytes for n in norms)
    assert Held.of(source, torch.bfloat16, CUDA) == Held(source.label, held.bytes // 2, 0)


def plan(free: int | None, *models: int, loaded: int = 0, compares: bool = False) -> Plan:
    named = [Held(name, size, 0) for name, size in zip(("target", "draft"), models, strict=False)]
    return Plan(tuple(named), loaded, free, compares)


def test_models_that_must_be_together_and_do_not_fit_are_refused_with_their_sizes():
    plan(3 * 2**30, 2 * 2**30, 2**30).check()
    plan(None, 2**60).check()  # nothing is known, so nothing is refused
    whole = (
        "the weights of target with 2.0 GiB and draft with 512.0 MiB do not fit into the 1.0 GiB of memory that are "
        "free: take a smaller draft model, a dtype of fewer bytes, or another device"
    )
    with pytest.raises(UserError, match=f"^{re.escape(whole)}$"):
        plan(2**30, 2 * 2**30, 2**29).check()
    with pytest.raises(UserError, match=r"of target with 2\.0 GiB do not fit .*: take a smaller model"):
        plan(2**30, 2 * 2**30).check()


def test_what_is_loaded_already_needs_no_room():
    plan(2**30, 2 * 2**30, 2**29, loaded=2 * 2**30).check()


def test_transformers_waits_where_its_copies_do_not_fit_beside_ours():
    """The margin is for what runs beside the weights."""
    need = round(MARGIN * 2 * 1000)
    assert not plan(need, 1000, compares=True).apart
    assert plan(need - 1, 1000, compares=True).apart
    assert plan(2 * need - 1, 1000, 1000, compares=True).apart
    assert not plan(need - 1000, 1000, compares=True, loaded=1000).apart
    assert not plan(1, 1000).apart
    assert not plan(None, 2**60, compares=True).apart


def test_a_draft_counts_in_its_own_dtype(checkpoint: Path, free: Callable[[int], None]):
    free(10**9)
    source = open_source(ModelSpec(path=str(checkpoint)))
    sizes = []
    for dtype in (None, "float64"):
        drafting = DraftModel(DraftSpec(path=str(checkpoint), dtype=dtype))
        found = Plan.of(source, drafting, torch.float32, CPU, compares=False, held=False)
        assert [m.label for m in found.models] == [source.label] * 2
        sizes.append(found.models[1].bytes)
    assert sizes[1] == 2 * sizes[0]
    held = Plan.of(source, Nothing(), torch.float32, CPU, compares=False, held=True)
    assert held.loaded == held.models[0].bytes + held.models[0].packed


def test_a_draft_that_does_not_fit_is_refused_before_any_weight(
    bench: Any, capsys: Any, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    free(100)
    monkeypatch.setattr(Warm, "target", None)
    assert bench.run("drafting=draft_model", f"drafting.model.path={bench.checkpoint}") == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("decodelab")]
    assert "the weights of tiny with" in line
    assert "do not fit into the 100 B of memory that are free" in line
    assert not bench.folder.exists()


def test_side_by_side_says_so(bench: Any, quiet: None):
    assert bench.run("compare_hf=true") == 0
    assert {row["interleaved"] for row in bench.result["compare_hf"].values()} == {True}
    assert bench.result["warnings"] == []


def test_one_after_the_other(
    bench: Any, capsys: Any, free: Callable[[int], None], quiet: None, monkeypatch: pytest.MonkeyPatch
):
    """Our models are gone before transformers' are loaded; the row says that they did not take turns."""
    free(3 * 2**17)  # ours fits, twice does not
    ours: list[weakref.ref[Decoder]] = []
    honest, built = Warm.target, HfPeer.build

    def target(self: Warm, *args: Any) -> Decoder:
        found = honest(self, *args)
        ours.append(weakref.ref(found))
        return found

    def build(*args: Any, **options: Any) -> HfPeer:
        gc.collect()
        assert [ref() for ref in ours] == [None]
        return built(*args, **options)

    monkeypatch.setattr(Warm, "target", target)
    monkeypatch.setattr(HfPeer, "build", build)
    draft = ["drafting=draft_model", f"drafting.model.path={bench.checkpoint}"]
    assert bench.run("compare_hf=true", *draft) == 0
    assert ours
    found = bench.result["compare_hf"]
    assert list(found) == ["plain", "prompt_lookup", "assisted"]
    for row in found.values():
        assert row["interleaved"] is False
        assert row["identical"] == row["prompts"] == 6
    (warning,) = bench.result["warnings"]
    assert warning.startswith("transformers ran after us, not in turn with us: 2")
    assert "do not fit together into 384 KiB" in warning
    out = capsys.readouterr().out
    assert "transformers, after ours" in out
    assert "note: transformers ran after us" in out


def test_what_was_measured_is_not_lost_to_transformers(
    bench: Any, free: Callable[[int], None], quiet: None, monkeypatch: pytest.MonkeyPatch
):
    def fails(*args: Any, **options: Any) -> HfPeer:
        raise UserError("transformers finds no lm_head.weight")

    def interrupted(*args: Any, **options: Any) -> HfPeer:
        raise KeyboardInterrupt

    free(2**18)
    for build, code, status in ((fails, 0, "done"), (interrupted, 130, "interrupted")):
        monkeypatch.setattr(HfPeer, "build", build)
        output = bench.root / status
        assert bench.run("compare_hf=true", f"output={output}") == code
        result = strict((output / "result.json").read_text())
        assert (result["status"], result["prompts"], result["compare_hf"]) == (status, 6, None)
        told = ["transformers was not compared: transformers finds no lm_head.weight"] if build is fails else []
        assert result["warnings"] == told


def test_another_target_goes_before_the_next_is_weighed(checkpoint: Path, bench: Any, monkeypatch: pytest.MonkeyPatch):
    warm = Warm(("other", torch.float32, CPU), object())  # type: ignore[arg-type]
    seen: list[bool] = []

    def weighed(*args: Any, **options: Any) -> Plan:
        seen.append(options["held"] or warm.loaded is not None)
        raise UserError("enough")

    monkeypatch.setattr(Plan, "of", weighed)
    monkeypatch.setattr(run, "Warm", lambda: warm)
    assert bench.run() == 2
    assert seen == [False]
