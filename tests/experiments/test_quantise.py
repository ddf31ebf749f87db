"""The job quantize, the copy that a run makes, and what is known of both."""

import errno
import hashlib
import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from decodelab.decoding.model.source import ModelSpec, Source, open_source
from decodelab.errors import UserError
from decodelab.experiments import quantised_folder
from decodelab.experiments.calibration import draw, load_calibration
from decodelab.experiments.cli import main
from decodelab.experiments.overlap import Marks, check_overlap, judging
from decodelab.experiments.quantised_folder import INDEX, READ, REPORT, STATE, copy_of, read_record, write
from decodelab.experiments.quantising import plan
from decodelab.quantization.formats import NATIVE
from decodelab.quantization.gptq import GPTQ
from decodelab.quantization.quantiser import Calibration
from decodelab.quantization.rtn import RTN
from decodelab.tests.experiments.bench import Bench
from decodelab.tests.experiments.quantised import quantize, sentence, told


@pytest.fixture
def calibration(private: Path) -> Path:
    file = private / "calibration.jsonl"
    file.write_text("".join(json.dumps({"prompt": sentence(i), "answer": "yes"}) + "\n" for i in range(60)))
    return file


@pytest.fixture
def source(bench: Bench) -> Source:
    return open_source(ModelSpec(path=str(bench.checkpoint)))


def calibrated(calibration: Path, **more: object) -> list[str]:
    keys = {"path": calibration, "length": 32, "tokens": 256} | more
    return ["quantization=gptq", "quantization.group_size=16"] + [
        f"quantization.calibration.{key}={value}" for key, value in keys.items()
    ]


def damage(file: Path) -> None:
    """A bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != REPORT}


def test_what_it_prints_and_writes(bench, capsys):
    """Layers that are quantised and skipped, and why (executorch#22044), time and memory."""
    overrides = "quantization.overrides={*.0.mlp.up_proj: none, *.v_proj: {bits: 8}}"
    assert quantize(bench, "quantization=rtn", "quantization.group_size=32", overrides, "quantize.least=0.8") == 0
    out = capsys.readouterr().out
    assert "13 layers quantised, 1 left as they are: 88.9% of the weights in the blocks\n" in out
    assert "skipped, 1 layers: overrides: *.0.mlp.up_proj\n" in out
    assert "error: what is lost of the layers' weights, squared, as a share of 1: the mean and the worst" in out
    assert "peak memory of the process " in out
    whole = sum(file.stat().st_size for file in (bench.root / "copy").glob("*.safetensors")) / 1e6
    assert f"\n{whole:.2f} MB of weights, " in out
    assert out.endswith(f"written to {bench.root / 'copy'}; model.path={bench.root / 'copy'}\n")
    record = json.loads((bench.root / "copy" / REPORT).read_text())
    assert record["skipped"] == {"model.layers.0.mlp.up_proj": "overrides: *.0.mlp.up_proj"}
    assert (record["resumed"], record["warnings"], record["calibration"]) == (0, [], None)
    assert {layer["bits"] for layer in record["layers"]} == {4, 8}
    assert bench.run(f"model.path={bench.root / 'copy'}") == 0
    assert bench.result["exactness"]["verdict"] == "exact"


def test_too_few_layers_are_refused(bench, capsys):
    assert quantize(bench, "quantization=rtn", "quantization.overrides={*.mlp.*: none}") == 2
    assert told(capsys) == (
        "decodelab: error: 33.3% of the weights in the blocks would be quantised, and quantize.least=0.9 is the least: "
        "6 of 14 layers stay (overrides: *.mlp.*); change the overrides, or that key"
    )
    assert not (bench.root / "copy").exists()


@pytest.mark.parametrize("settings", ["rtn", "gptq"])
def test_what_is_killed_goes_on_to_the_same_bytes(bench, source, calibration, settings, monkeypatch):
    """Killed while the second block is written: the first is read back, and the next reads the same hidden states."""
    text = Calibration(str(calibration), tokens=256, length=32)
    q = RTN(group_size=16) if settings == "rtn" else GPTQ(group_size=16, calibration=text)
    made = plan(q, source, torch.float32, NATIVE)
    write(made, bench.root / "whole")
    real = quantised_folder._write

    def killed(file, *rest):
        if file.name == "block-00001.safetensors":
            raise KeyboardInterrupt
        real(file, *rest)

    monkeypatch.setattr(quantised_folder, "_write", killed)
    with pytest.raises(KeyboardInterrupt, match="interrupted; 1 of 2 blocks are kept, and the same command goes on"):
        write(made, bench.root / "broken")
    assert sorted(f.name for f in (bench.root / "broken").iterdir()) == ["block-00000.safetensors", STATE]
    monkeypatch.setattr(quantised_folder, "_write", real)
    other = plan(RTN(bits=5, group_size=16), source, torch.float32, NATIVE)
    with pytest.raises(UserError, match="holds the beginning of another quantisation: name another output, or delete"):
        write(other, bench.root / "broken")
    with pytest.raises(
        UserError, match=r"broken holds a quantisation that was broken off: the `decodelab quantize` .*"
    ):
        open_source(ModelSpec(path=str(bench.root / "broken")))
    torn = shutil.copytree(bench.root / "broken", bench.root / "torn")
    damage(torn / "block-00000.safetensors")
    again = ("1 block kept of 2, passed through again", 0, 1)
    for name, resumed in (("broken", 1), ("torn", 0)):
        steps = []
        write(made, bench.root / name, lambda *step, steps=steps: steps.append(step))
        assert [step for step in steps if "block" in step[0]] == [again][:resumed]
        assert [step[1] for step in steps if step[0] == "quantising"] == [0, 1, 2][resumed:]
        assert weights(bench.root / name) == weights(bench.root / "whole")
        assert json.loads((bench.root / name / REPORT).read_text())["resumed"] == resumed


def test_a_folder_with_something_in_it_is_refused(bench, capsys):
    (bench.root / "copy").mkdir()
    (bench.root / "copy" / "mine.txt").write_text("x")
    assert quantize(bench, "quantization=rtn") == 2
    assert "is not empty (it holds mine.txt): name another output" in told(capsys)
    assert [f.name for f in (bench.root / "copy").iterdir()] == ["mine.txt"]
    assert quantize(bench, "quantization=rtn", output="good") == 0
    assert quantize(bench, "quantization=rtn", output="good") == 2
    assert "holds a finished model already: load it with model.path=" in told(capsys)


def test_a_run_makes_its_copy_once(bench, monkeypatch):
    assert bench.run("quantization=rtn", "quantization.group_size=16") == 0
    assert bench.result["exactness"]["verdict"] == "exact"
    assert bench.result["provenance"]["quantised"]["settings"]["group_size"] == 16
    (copy,) = (bench.root / "cache" / "quantised").iterdir()
    assert (copy / INDEX).is_file()
    record = json.loads((copy / REPORT).read_text())
    record["layers"][0]["notes"] = ["rounded to nearest"]
    record["skipped"] = {"model.layers.0.mlp.up_proj": "overrides"}
    (copy / REPORT).write_text(json.dumps(record))
    monkeypatch.setattr(quantised_folder, "write", lambda *_: pytest.fail("made again"))
    assert bench.run("quantization=rtn", "quantization.group_size=16", f"output={bench.root / 'again'}") == 0
    again = json.loads((bench.root / "again" / "result.json").read_text())  # keras#23512: only rounded, and not said
    said = again["provenance"]["quantised"]["warnings"]
    assert said[-2:] == ["of 1 quantised layers: rounded to nearest", "1 layers are not quantised (overrides)"]


@pytest.mark.parametrize("name", ["block-00001.safetensors", "tokenizer.json", REPORT, INDEX, STATE])
@pytest.mark.parametrize("how", ["cut", "bit", "gone"])
def test_a_damaged_copy_is_made_whole(bench, source, name, how):
    """One that is whole, or the beginning of one."""
    made = plan(RTN(group_size=16), source, torch.float32, NATIVE)
    folder = Path(copy_of(made).path)
    whole, file = weights(folder), folder / name
    if name == STATE:
        (folder / INDEX).unlink()
        file.write_text(json.dumps({"key": made.key, "files": {}}))
    match how:
        case "cut":
            file.write_bytes(file.read_bytes()[:-9])
        case "bit" if file.suffix == ".json":
            file.write_text(file.read_text().replace('"', "'", 1))
        case "bit":
            damage(file)
        case "gone":
            file.unlink()
    if how == "gone" and name == INDEX:  # as a copy that was never whole, and says so
        (folder / STATE).write_text(json.dumps({"key": made.key}))
        copy_of(made)
    else:
        with pytest.warns(RuntimeWarning, match=f"{name} is damaged or gone: what is not as it was written is quant"):
            copy_of(made)
    assert weights(folder) == whole
    assert open_source(copy_of(made)).label == "tiny-rtn-4g16"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (STATE, "{"),
        (STATE, "[" * 100_000),
        (STATE, '{"key": [1]}'),
        (STATE, '{"key": "k", "files": {"a": null}}'),
        (REPORT, "null"),
        (REPORT, '{"kind": NaN}'),
        (REPORT, {"layers": {"a": 1}}),
        (REPORT, {"layers": [{"notes": "text"}]}),
        (REPORT, {"skipped": {"a": ["b"]}}),
        (REPORT, {"source": None}),
        (READ, '{"overlap": "maybe", "marks": {}}'),
        (READ, '{"overlap": "warn", "marks": ["a"]}'),
        (READ, "\udc80"),
    ],
)
def test_a_damaged_record_is_a_line(tmp_path, name, content):
    if not isinstance(content, str):
        whole = {"kind": "rtn", "settings": {}, "calibration": None, "source": {"label": "a", "digest": "b"}}
        content = json.dumps(whole | {"layers": [{"notes": []}], "skipped": {}} | content)
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"^[^\n]*(is damaged|is not JSON|holds a JSON)[^\n]*$"):
        read_record(tmp_path, name)


def test_a_run_of_a_damaged_folder_is_a_line(bench, calibration, capsys):
    assert quantize(bench, *calibrated(calibration)) == 0
    for name in (REPORT, READ):
        kept = (bench.root / "copy" / name).read_text()
        (bench.root / "copy" / name).write_text("{}")
        assert bench.run(f"model.path={bench.root / 'copy'}") == 2
        assert f"{name} is damaged (it has no " in told(capsys)
        (bench.root / "copy" / name).write_text(kept)


def test_a_write_error_leaves_no_model(bench, monkeypatch, capsys):
    """A line; the folder is known to be unfinished, and the same command goes on."""

    def full(path, text):
        if path.name == "config.json":
            raise OSError(errno.ENOSPC, "no space")
        written(path, text)

    written = quantised_folder.write_atomic
    monkeypatch.setattr(quantised_folder, "write_atomic", full)
    assert quantize(bench, "quantization=rtn") == 2
    assert "the disk is full: " in told(capsys)
    assert bench.run(f"model.path={bench.root / 'copy'}") == 2
    assert "copy holds a quantisation that was broken off" in told(capsys)
    monkeypatch.setattr(quantised_folder, "write_atomic", written)
    assert quantize(bench, "quantization=rtn") == 0


@pytest.mark.parametrize("there", ["mine.txt", None])
def test_the_output_is_looked_at_before_the_work(bench, calibration, there, monkeypatch, capsys):
    monkeypatch.setattr("decodelab.experiments.overrides.search", lambda *_: pytest.fail("searched"))
    (bench.root / "file").write_text("x")
    if there is not None:
        (bench.root / "copy").mkdir()
        (bench.root / "copy" / there).write_text("x")
    output = "file/copy" if there is None else "copy"
    assert quantize(bench, *calibrated(calibration), "quantization.overrides=auto", output=output) == 2
    assert ("is not empty (it holds mine.txt)" if there else "cannot be written (Not a directory)") in told(capsys)


def test_a_key_is_of_all_that_the_bytes_depend_on(bench, source, calibration):
    text = Calibration(str(calibration), tokens=256, length=32)

    def key(settings, dtype=torch.float32):
        return plan(settings, source, dtype, NATIVE).key

    keys = [key(RTN()), key(RTN(bits=5)), key(RTN(), torch.bfloat16), key(GPTQ(calibration=text))]
    for change in ({"seed": 1}, {"tokens": 128}, {"length": 16}):
        fields = {"path": str(calibration), "tokens": 256, "length": 32} | change
        keys.append(key(GPTQ(calibration=Calibration(**fields))))
    assert len(set(keys)) == len(keys)
    warn = Calibration(str(calibration), tokens=256, length=32, overlap="warn")
    assert key(GPTQ(calibration=warn)) == keys[3]  # the weights are the same


def test_overlap_with_what_is_asked_is_refused(bench, calibration, capsys):
    """In a run that quantises, before anything is made; and later, by the folder; a warning is asked for."""
    rows = [{"prompt": f"please say this: {sentence(i).upper()}!"} for i in range(60)]
    assert bench.run(*calibrated(calibration), rows=rows) == 2
    line = told(capsys)
    assert "has a text that the model was calibrated on, calibration.jsonl:" in line
    assert "quantise with quantization.calibration.overlap=warn" in line
    assert not (bench.root / "cache" / "quantised").exists()
    asked = bench.root / "asked.jsonl"
    asked.write_text("".join(json.dumps({"question": row["prompt"], "answer": "yes"}) + "\n" for row in rows))
    check = ["check", f"model.path={bench.checkpoint}", "device=cpu", f"tasks=[{asked}]", "quality.max_new_tokens=2"]
    assert main([*check, *calibrated(calibration)]) == 2
    assert "has a text that the model was calibrated on, calibration.jsonl:" in told(capsys)
    assert main([*check, *calibrated(calibration, overlap="warn")]) == 0
    out = capsys.readouterr().out
    assert "warning: asked " in out
    assert "has a text that the model was calibrated on" in " ".join(out.split())
    assert main([*check, *calibrated(calibration), "format=gptq_v2"]) == 0  # of quantize, which judges nothing
    assert quantize(bench, *calibrated(calibration)) == 0
    assert bench.run(f"model.path={bench.root / 'copy'}", rows=rows) == 2
    assert "was calibrated on" in told(capsys)
    assert bench.run(f"model.path={bench.root / 'copy'}", "task.max_new_tokens=2") == 0  # other rows
    warned = [*calibrated(calibration, overlap="warn"), "task.max_new_tokens=2", f"output={bench.root / 'b'}"]
    assert bench.run(*warned, rows=rows) == 0


def test_texts_are_the_same_by_thirteen_words_or_as_a_whole():
    a = Marks.of([("a", ["x y " + sentence(1)]), ("b", ["What is the capital of France?"])])
    shared = Marks.of([("long", [f"{sentence(1).upper()}, and more"]), ("short", ["what is  the capital of FRANCE"])])
    assert sorted(a.shared(shared)) == [("a", "long"), ("b", "short")]
    assert not list(a.shared(Marks.of([("c", [sentence(1, 12) + " x"]), ("d", ["the capital of France"])])))
    many = Marks.of([(f"r{i}", [f"{sentence(7)} {i}"]) for i in range(3)])
    assert not list(many.shared(Marks.of([("x", [sentence(7)])])))  # an instruction that all have
    rest = [(f"o{i}", [sentence(100 + i)]) for i in range(40)]
    passage = Marks.of(
        [*((f"r{i}", [f"{sentence(7)} {i}"]) for i in range(3)), *rest]
    )  # that three questions are about
    assert [pair[1] for pair in passage.shared(Marks.of([("x", [sentence(7)])]))] == ["x"]
    assert check_overlap(a, Marks.of([]), "refuse") == []


CHINESE = "数据集中的每一行都由一个问题和它的答案组成而模型只会看到其中的问题"
THAI = "แมวสีดำตัวหนึ่งนอนหลับอยู่บนหลังคาบ้านไม้หลังเก่าริมแม่น้ำสายใหญ่"


@pytest.mark.parametrize(
    ("read", "asked", "found"),
    [
        (f"said: {sentence(1)}. {sentence(2)}", sentence(1, words=7), True),  # a short one inside a longer text
        (f"said: {sentence(1)}. {sentence(2)}", f"{sentence(1, words=7)} now", False),
        (f"{sentence(1)}. {sentence(2)}", f"{sentence(1, words=12)} {sentence(2)[:20]}", False),
        (f"前言，{CHINESE}。后记", CHINESE[2:30] + "吗？", True),  # without spaces
        (f"前言，{CHINESE}。后记", CHINESE[2:27] + "吗？", False),  # 25 characters are less than 13 words
        (f"前言，{CHINESE}。后记", CHINESE[3:15], True),
        (f"前言，{CHINESE}。后记", CHINESE[3:14], False),
        (f"ก {THAI} ข", f"นก {THAI[2:-2]} ปลา", True),
        (f"ก {THAI} ข", f"นก {THAI[2:50]} ปลา", False),
    ],
)
def test_texts_are_the_same_inside_of_others_and_without_spaces(read, asked, found):
    pairs = list(Marks.of([("read", [read])]).shared(Marks.of([("asked", [asked])])))
    assert pairs == [("read", "asked")] * found


def test_marks_of_earlier_versions_are_read():
    """Of 13 words in a row, and of a shorter text as a whole."""
    words = sentence(1).split()
    texts = [" ".join(words[:13]), "what is the capital of the north of france"]
    old = Marks({hashlib.blake2b(text.encode(), digest_size=8).hexdigest(): "old" for text in texts})
    for text in (f"x {sentence(1)}", "What is the capital of the north of France?"):
        assert list(old.shared(Marks.of([("asked", [text])]))) == [("old", "asked")]
    instruction = Marks.of([(f"r{i}", [f"{sentence(1)} {i}"]) for i in range(3)])
    assert not list(old.shared(instruction))


@pytest.mark.parametrize("name", ["few.jsonl", "few.txt"])
def test_rows_that_fill_the_tokens_again_and_again_are_no_instruction(source, tmp_path, name):
    texts = [sentence(i) for i in range(8)]
    lines = texts if name.endswith("txt") else [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines * 20))
    settings = Calibration(str(tmp_path / name), tokens=8192, length=128)
    read = Marks.of_pieces(load_calibration(settings, "gptq", source.tokenizer, 128))
    judged = Marks.of([(str(i), [text]) for i, text in enumerate(texts)])
    assert {asked for _, asked in read.shared(judged)} == set("01234567")


def test_short_questions_of_a_file_are_known(tmp_path):
    """lm-eval is handed a row as one text, in which a short question is no whole."""
    pytest.importorskip("lm_eval")
    from decodelab.experiments.quality.settings import QualitySettings, TaskSpec
    from decodelab.experiments.quality.tasks import build_tasks

    question = "What is the capital of France?"
    (tmp_path / "my.jsonl").write_text(json.dumps({"question": question, "answer": "Paris"}) + "\n")
    tasks = build_tasks(QualitySettings(tasks=(TaskSpec(str(tmp_path / "my.jsonl")),)), None, ())
    calibrated = Marks.of([("calibration.jsonl:1", [question])])
    assert [pair[1] for pair in calibrated.shared(judging([], tasks))] == ["my 0"]


def test_rows_that_were_not_drawn_are_not_counted(source, calibration):
    pieces = load_calibration(Calibration(str(calibration), tokens=64, length=32), "gptq", source.tokenizer, 128)
    assert (pieces.tokens, len(pieces.pieces)) == (64, 2)
    assert 2 <= len(pieces.read) <= 6
    rest = draw(Calibration(str(calibration), tokens=640, length=32), source.tokenizer, 128, without=pieces.pieces)
    assert not set(rest.pieces) & set(pieces.pieces)


def test_the_tokenizers_own_template_is_called_chat(source, calibration):
    def tokens(template):
        settings = Calibration(str(calibration), template, tokens=512, length=32)
        return load_calibration(settings, "gptq", source.tokenizer, 128)

    start = source.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert any(start in piece for piece in tokens("chat").pieces)
    assert not any(start in piece for piece in tokens(None).pieces)
    assert tokens("chat").digest != tokens(None).digest


def test_a_dequantised_source_is_told(bench, source, capsys):
    """And that settings which suit its grid say little."""
    write(plan(RTN(4, 32), source, torch.float32, NATIVE), bench.root / "first")
    copy = open_source(ModelSpec(path=str(bench.root / "first")))
    plain = bench.root / "plain"
    plain.mkdir()
    save_file({n: copy.tensors()[n].contiguous() for n in copy.tensors()}, plain / "model.safetensors")
    config = json.loads((bench.root / "first" / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    copy.tokenizer.save_pretrained(plain)
    assert quantize(bench, f"model.path={plain}", "quantization=rtn", "quantization.group_size=32") == 0
    out = capsys.readouterr().out
    assert (
        "warning: plain is itself dequantised: 14 of 14 layers looked at lie on grids of 4 bits in groups of 32" in out
    )
    assert "these settings are as fine" in out
    assert quantize(bench, f"model.path={plain}", "quantization=rtn", "quantization.bits=3", output="b") == 0
    out = capsys.readouterr().out
    assert "is itself dequantised" in out
    assert "these settings are as fine" not in out


def test_overrides_are_found(bench, calibration, capsys):
    """By what they recover per byte, within the budget; measured as a whole; given back as a file."""
    auto = ["quantization.overrides=auto", "quantize.tokens=128", "quantize.parts=2", "quantization.bits=3"]
    assert quantize(bench, *calibrated(calibration), *auto) == 0
    out = capsys.readouterr().out
    assert "chosen" in out
    assert re.search(r"^\S.* of it for the weights; peak memory", out, re.MULTILINE)
    folder = bench.root / "copy"
    found = json.loads((folder / "overrides.json").read_text())
    gains = [unit["recovered"] / unit["more"] for unit in found["units"]]
    assert gains == sorted(gains, reverse=True)
    assert len(found["units"]) == 14
    uniform, finer, chosen = found["trials"]
    assert uniform["nbytes"] < chosen["nbytes"] <= finer["nbytes"]
    assert chosen["kl"] < uniform["kl"] == found["kl"]
    assert chosen["nbytes"] == uniform["nbytes"] + sum(unit["more"] for unit in found["taken"])
    overrides = yaml.safe_load((folder / "overrides.yaml").read_text())
    taken = {name for unit in found["taken"] for name in unit["layers"]}
    assert all(sum(fnmatch(name, pattern) for pattern in overrides) == 1 for name in taken)
    assert any(pattern.startswith("*.") for pattern in overrides)
    again = [f"quantization.overrides={folder / 'overrides.yaml'}", "quantization.bits=3"]
    assert quantize(bench, *calibrated(calibration), *again, output="again") == 0
    blocks = [f"block-{i:05d}.safetensors" for i in range(2)]
    assert all((folder / name).read_bytes() == (bench.root / "again" / name).read_bytes() for name in blocks)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["quantization=rtn", "quantization.overrides=auto"],
            "=auto compares outputs on a text: name it with",
        ),
        (["quantization=int8", "quantization.overrides=auto"], "gives layers 8 bits: take a quantiser with bits below"),
        (["quantization=rtn", "quantization.overrides=nothing.yaml"], "quantization.overrides=nothing.yaml cannot be"),
        (["quantization=none"], "name how, such as quantization=rtn"),
    ],
)
def test_a_mistake_is_a_line(bench, words, line, capsys):
    assert quantize(bench, *words) == 2
    assert line in told(capsys)


def test_a_budget_below_all_layers_is_refused(bench, calibration, capsys):
    auto = ["quantization.overrides=auto", "quantize.tokens=128", "quantize.budget=4.1"]
    assert quantize(bench, *calibrated(calibration), *auto) == 2
    assert "quantize.budget=4.1 is less than the 5.500 bits a weight" in told(capsys)
