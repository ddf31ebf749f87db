"""`decodelab plan`: what it prints, whose sizes it finds, and what it refuses; nothing is loaded or fetched."""

import json
import re
from pathlib import Path

import pytest

from decodelab.decoding.model.decoder import Decoder
from decodelab.experiments import hardware
from decodelab.experiments.architectures import architectures
from decodelab.experiments.cli import main
from decodelab.experiments.hardware import Peaks
from decodelab.tests.enumeration import unchecked

RECIPE = 'attention.layers="5*(window=1024) 1*full | kv_heads=1 share=2 bits=8"'


@pytest.fixture(autouse=True)
def on_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(Decoder, "__init__", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    monkeypatch.setattr(
        "decodelab.decoding.model.source.fetch_packaged", lambda *args: pytest.fail("a model was fetched")
    )
    monkeypatch.setattr(hardware, "_measure", lambda device, dtype, threads: Peaks(5e10, 1e12))
    monkeypatch.setattr(hardware, "available_memory", lambda device: 10**10)
    unchecked(monkeypatch)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> str:
        assert main(["plan", *words]) == 0
        return capsys.readouterr().out

    return run


def row(text: str, name: str) -> list[str]:
    """The cells of the first row that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    return [cell for cell in line.removeprefix(name).split("  ") if cell.strip()]


def test_a_published_model(plan):
    """Llama-2-13B, 32 sequences of 2,048 tokens: 53.7 GB of keys and values."""
    told = plan("model=llama-2-13b", "batch=32", "context=2048", "hardware=h100")
    assert told.startswith(
        "llama-2-13b: 32 sequences of 2,048 tokens, computed in bfloat16\n3,350 GB/s, 989 TFLOP/s, 80.0 GB"
    )
    assert "KV a token          2 × 40 × 40 × 128 × 2 = 819,200 B (800.0 KiB)" in told
    assert "KV of 32            53.7 GB (50.0 GiB)" in told
    assert "textbook" not in told  # its attention is MHA
    assert "27, so that batch=32 does not fit: 1.68 GB a sequence in pages of 16, and 12.3 MB for 15 draft" in told
    assert "13, so that batch=32 does not fit: 4,096 slots reserved for each, 50 % of them unused (in" in told
    assert "note: batch=32 does not fit: 27 do" in told


def test_lines_fit_into_a_terminal(plan, monkeypatch):
    """Lines end with words there, and a number stays with its unit; so it is in a file."""
    known = "model=llama-2-13b", "batch=32", "hardware=h100", "attention=layout", RECIPE
    for columns in ("80", "87", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        told = plan(*known)
        assert "…" not in told
        lines = told.splitlines()
        assert max(map(len, lines)) <= int(columns)
        assert all(line == line.rstrip() for line in lines)
        assert not [line for line in lines if re.match(r" +(GB|MB|KiB|%|ms)[ ,.)]", line)]
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        assert re.sub(r"\x1b\[[0-9;]*m", "", plan(*known)) == told
        monkeypatch.delenv("TTY_COMPATIBLE")


def test_the_textbooks_formula_is_of_mha(plan):
    told = plan("model=llama-3-8b", "hardware=h100", "drafting=none")
    assert "2 × 32 × 8 × 128 × 2 = 131,072 B (128.0 KiB)" in told
    assert "the textbook's formula, with all 32 attention heads in all 32 layers, is 512.0 KiB: MHA" in told
    assert "T(k)" not in told


def test_layouts_and_bits(plan):
    """In a table, and what is asked for marked in it."""
    told = plan("model=llama-3-8b", "hardware=h100", "batch=8", "context=8192", "attention=layout", RECIPE)
    assert "2 × 17 × 1 × (128 × 8 ÷ 8 + 2) = 4,420 B" in told
    assert "layer  0  AaAaABaAaA abAaAaABaA aAabAaAaAB aA" in told
    lines = {line[:22].strip(): line[22:].split() for line in told.splitlines()}
    assert lines["native"][:1] == ["128.0"]
    assert lines["mha"][0] == "512.0"
    assert lines["mqa"][0] == "16.0"
    assert lines["cross_layer, share=2"][0] == "64.0"
    assert lines["kv_int8"][0] == "65.0"
    assert lines["kv_int4"][0] == "33.0"
    assert row(told, "mqa, hybrid, CLA, int8 *")[0].strip() == "4.3"
    assert "bytes; + 2: the float16 scale" in told
    assert "note: a windowed layer keeps window + sinks tokens where slots are reserved" in told


def test_windows_save_memory_where_slots_are_reserved(plan):
    """28 layers of 1,024 of 8,192 tokens, at 57,344 bytes a token; 6.37 GB of headroom."""
    windows = "model=qwen2.5-7b", "hardware=l4", "batch=20", "context=8192", "attention=window", "drafting=none"
    told = plan(*windows)
    assert "57,344 B (56.0 KiB), in windowed layers only while inside the window" in told
    assert "KV a sequence       58.7 MB; in pages, where windows are masks, 469.8 MB" in told
    assert "13, so that batch=20 does not fit: 469.8 MB a sequence in pages of 16" in told
    assert "contiguous          108: 1,024 slots reserved for each, 0 % of them unused (in pages: 0 %)" in told
    cells = [cell.strip() for cell in row(told, "window, size=1024 *")]
    assert cells[1:5] == ["469.8 MB", "13", "58.7 MB", "108"]
    assert "note: batch" not in told


def test_weights_that_do_not_fit(plan):
    """Nothing is gained by drafts then, and nothing costs anything; of two models, the last stands."""
    words = "model=qwen2.5-7b", "model=llama-3-70b", "hardware=l4", "hardware.price_per_hour=1"
    told = plan(*words)
    assert told.startswith("llama-3-70b: ")
    assert "sequences that fit  none: the weights alone take 141.1 GB, and 21.6 GB are there for them\n" in told
    assert not [what for what in ("T(k)", "contiguous   ", "a million tokens") if f"\n{what}" in told]


def test_another_layout_and_quantiser_are_rows_of_their_own(plan):
    told = plan(
        "model=llama-3-8b",
        "hardware=l4",
        "attention=window",
        "attention.size=64",
        "quantization=rtn",
        "quantization.bits=3",
    )
    assert row(told, "asked for *")[0].strip() == "128.0"
    assert row(told, "asked for, rtn *")
    assert "weights stored      5.0 GB (8.03 B parameters, rtn)" in told


def test_times_are_a_rooflines(plan):
    told = plan("model=llama-3-8b", "hardware=h100", "hardware.mbu=[0.5,1.0]", "drafting=none")
    # 14.99 GB of weights and 0.27 GB of KV at 3,350 GB/s
    assert [cell.strip() for cell in row(told, "tpot, batch 1")] == [
        "4.6 ms",
        "4.6 ms – 9.1 ms",
        "bandwidth",
        "0.36 %",
        "100 %",
    ]
    assert [cell.strip() for cell in row(told, "ttft of 2,048")][2:4] == ["products", "100 %"]
    assert "usual: 40–60 % of the products' peak (MFU), 50–100 % of the bandwidth (MBU)" in told
    assert "reads 15.0 GB of weights and 268.4 MB of KV" in told


def test_experts(plan):
    told = plan("model=mixtral-8x7b", "hardware=h100", "hardware.devices=2", "batch=4", "drafting=none")
    assert "a row goes through 2 of 8 experts a layer: 12.88 B of 46.70 B parameters are active" in told
    assert row(told, "4    ")[0].strip() == "5.5"  # 8 × (1 − 0.75⁴)
    assert "on each device    536.9 MB: max(1, KV heads ÷ 2) = 4 a layer" in told  # half of 4 × 2,048 × 128 KiB
    assert "note: what devices tell each other is not counted" in told


def test_a_draft_model_takes_room_and_time(plan):
    told = plan(
        "model=llama-3-70b",
        "hardware=h200",
        "hardware.devices=4",
        "drafting=draft_model",
        "drafting.model.name=llama-3.2-1b",
    )
    assert "GB of draft models" in " ".join(told.split())
    assert "MB for 4 draft rows, 67.1 MB for its drafter's keys and values" in " ".join(told.split())
    assert row(told, "of T(1)")[0].strip() == "1.00"
    assert "a drafted token takes 0.5 ms" in told


def test_prices(plan):
    """At 2 an hour: 2 ÷ 3600 s × 4.56 ms a token × 1e6 = 2.53."""
    told = plan("model=llama-3-8b", "hardware=h100", "hardware.price_per_hour=2", "drafting=none")
    assert row(told, "decoded, batch 1")[0].strip() == "2.53"
    assert "in the unit of hardware.price_per_hour, at 2 an hour" in told
    assert "a million tokens" not in plan("model=llama-3-8b", "hardware=h100")


def test_this_machine_is_measured(plan):
    """The default model's sizes are known before it is here."""
    told = plan("device=cpu", "dtype=float32", "threads=1", "hardware.memory=4")
    assert told.startswith(
        "smollm2-135m: 1 sequence of 2,048 tokens, computed in float32\n50 GB/s, 1 TFLOP/s, 4.0 GB; "
        "bandwidth and flops are this machine's (cpu, 1 thread)\n"
    )
    assert "2 × 30 × 3 × 64 × 4 = 46,080 B" in told
    assert "10.0 GB, this machine" in plan("device=cpu", "dtype=float32", "threads=1")


def test_a_config_of_ones_own(plan, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 4096,
    }  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "config.json"):
        assert "2 × 2 × 1 × 16 × 2 = 128 B" in plan(f"model.path={path}", "hardware=l4")
    assert plan(f"model.path={folder}", "hardware=l4").startswith("mine: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=llama-2-13"], "model=llama-2-13 is unknown: did you mean llama-2-13b? sizes are known of"),
        (
            ["model.path=owner/name"],
            "owner/name (from the hub) is not here, and its sizes are not known: give model.path=",
        ),
        (["model.path=FILE"], "cannot be read as a config"),
        (["model.path=LIST"], "is no config: it holds a list"),
        (["model=llama-3-8b", "pages.size=8"], "pages.size is of a run: plan counts pages of plan.page=8 tokens"),
        (["model=llama-3-8b", "output=p"], "output=p is of jobs that write files, and plan prints: leave it out"),
        (["model=llama-3-8b", "attention.window=5"], "window is an option: attention=window attention.size=…"),
        (["model=llama-3-8b", "context=0"], "context must be at least 1, got 0"),
        (
            ["model=llama-3-8b", "context=9000"],
            "context=9000 is longer than the model's 8,192; plan.max_length=9000 plans beyond it",
        ),
        (["model=llama-3-8b", "hardware.devices=3"], "hardware.devices=3 does not divide the 32 attention heads"),
        (["model=llama-3-8b", "attention=gqa"], "attention=gqa needs a number of KV heads: attention.kv_heads=2"),
        (["model=llama-3-8b", "attention=gqa", "attention.kv_heads=5"], "32 attention heads cannot share 5 KV heads"),
        (["model=llama-3-8b", "hardware=h1000"], "hardware=h1000 is unknown: did you mean h100?"),
        (["model=llama-3-8b", "quantization=rtn", "quantization.overrides=auto"], "plan reads none: give them as keys"),
        (["-m", "model=llama-3-8b", "batch=1,2"], "plan is of one configuration: leave out the sweep"),
    ],
)
def test_what_it_refuses(words, message, capsys, tmp_path):
    (tmp_path / "FILE.json").write_text("{")
    (tmp_path / "LIST.json").write_text("[]")
    named = [
        w.replace("=FILE", f"={tmp_path / 'FILE.json'}").replace("=LIST", f"={tmp_path / 'LIST.json'}") for w in words
    ]
    given = [] if any("hardware=" in w for w in words) else ["hardware=h100"]
    assert main(["plan", *named, *given]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_help_lists_the_models(capsys):
    assert main(["plan", "--help"]) == 0
    assert set(architectures()) <= set(re.findall(r"[^\s,]+", capsys.readouterr().out.partition("MODEL: ")[2]))


def test_a_run_does_not_know_what_is_only_a_size(capsys):
    assert main(["run", "model=llama-2-13b"]) == 2
    assert "model=llama-2-13b is unknown" in capsys.readouterr().err
