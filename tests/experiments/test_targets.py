"""Which kernel vLLM has, by the table of its own conditions."""

from dataclasses import replace

import pytest
import torch

from decodelab.decoding.model.source import ModelSpec, open_source
from decodelab.errors import UserError
from decodelab.experiments.cli import main
from decodelab.experiments.targets import Kernel, answer, vllm
from decodelab.quantization.codes import Scheme
from decodelab.quantization.formats import QuantisedLayers
from decodelab.quantization.formats.gguf import BLOCKS, GGUFBlocks, codes_of
from decodelab.tests.experiments.bench import Bench

LARGE = Scheme((4096, 4096), 4, 128, True)
MARLIN, BOTH = Kernel(True, "Marlin"), Kernel(True, "Marlin, or Machete on Hopper")


def kernel(form: str, scheme: Scheme) -> Kernel:
    (found,) = vllm(form, {"model.layers.0.mlp.down_proj": scheme}, []).values()
    return found


@pytest.mark.parametrize(
    ("form", "changes", "found", "told"),
    [
        ("gptq", {}, True, "Marlin, or Machete on Hopper"),
        ("gptq_v2", {"bits": 8, "group_size": 4096}, True, "Marlin, or Machete on Hopper"),
        ("gptq_v2", {"group_size": 32, "grouped": True}, True, "Marlin"),
        ("gptq_v2", {"symmetric": False}, False, "4 bits, asymmetric: of GPTQ it takes 4 and 8 bits, symmetric"),
        ("gptq", {"bits": 3}, False, "3 bits, symmetric: of GPTQ it takes 4 and 8 bits, symmetric"),
        ("gptq", {"group_size": 256}, False, "group_size=256: of GPTQ it takes -1, 32, 64, 128"),
        ("gptq", {"shape": (4096, 576), "group_size": 64}, True, "Exllama, in float16 alone, or Marlin where it pads"),
        ("gptq", {"shape": (4096, 576), "group_size": 576}, None, "Marlin in versions that pad 4096 rows and 576"),
        ("awq", {"symmetric": False}, True, "Marlin"),
        ("awq", {"shape": (4096, 576), "group_size": 64}, True, "AWQ's own, or Marlin where it pads"),
        ("awq", {"group_size": 16}, None, "group_size=16"),
        ("compressed_tensors", {"symmetric": False}, True, "Marlin, or Machete on Hopper"),
        ("compressed_tensors", {"bits": 8, "symmetric": False}, None, "Machete on Hopper, and none that is known else"),
        ("compressed_tensors", {"bits": 3}, None, "3 bits, symmetric: which kernel takes it is not said"),
        ("compressed_tensors", {"bits": 3, "symmetric": False}, False, "of asymmetric codes it takes 4 and 8 bits"),
        ("compressed_tensors", {"bits": 8, "activation_bits": 8}, True, "Cutlass, int8, up to Hopper"),
        ("native", {}, False, "vLLM does not read format=native"),
        ("gguf", {}, None, "format=gguf"),
    ],
)
def test_a_layer_s_kernel(form: str, changes: dict[str, object], found: bool | None, told: str) -> None:
    got = kernel(form, replace(LARGE, **changes))
    assert got.found is found
    assert told in got.told


def test_layers_that_read_the_same_input_are_one_product() -> None:
    at = "model.layers.0.self_attn."
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}  # 32 alone is no multiple of Marlin's 64
    layers = {at + name: replace(LARGE, shape=(N, 4096)) for name, N in rows.items()}
    assert vllm("gptq", layers, []) == {f"{at}q_proj": BOTH}
    layers[f"{at}v_proj"] = replace(layers[f"{at}v_proj"], bits=8)
    unlike = Kernel(False, "q_proj, k_proj, v_proj are one product, and are not quantised alike")
    assert vllm("compressed_tensors", layers, []) == {f"{at}q_proj": unlike}
    del layers[f"{at}v_proj"]
    assert vllm("awq", layers, [f"{at}v_proj"]) == {f"{at}q_proj": unlike}
    assert vllm("awq", {}, [f"{at}v_proj"]) == {}


def test_check_tells_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", f"model.path={bench.checkpoint}", "device=cpu", "target=vllm"]
    assert main([*words, "quantization=rtn", "quantization.group_size=32", "format=awq"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "vllm yes: AWQ's own, or Marlin where it pads (8 of 8 products, such as model.layers.0.self_attn.q_proj);"
        in out
    )
    assert "14 layers, of which those that read the same input are one product" in out
    assert out.endswith(" runs")
    symmetric = ["quantization=rtn", "quantization.group_size=32", "quantization.symmetric=true"]
    assert main([*words, *symmetric, "format=gptq"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vllm only if in a version that pads: Marlin in versions" in out
    assert main([*words, "quantization=rtn", "quantization.group_size=32"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "vllm no: no kernel: vLLM does not read format=native" in out
    assert "decodelab quantize … format=awq output=DIR" in out
    assert out.endswith(" refused, because vllm has no kernel for all of these layers")
    sweep = [*words, "-m", "quantization=rtn", "quantization.group_size=32", "format=awq,native"]
    assert main(sweep) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "2 cells, 1 refused"
    assert main(words) == 2
    assert (
        "is asked of what quantize would write, or of a folder that it wrote: name quantization=rtn"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match="target must be one of vllm, or null, got 'sglang'"):
        answer("sglang", None)


@pytest.mark.parametrize(
    ("form", "settings", "told"),
    [
        ("gptq_v2", ["symmetric=true"], "gptq: 4 bits, whole rows (11 layers); 4 bits, groups of 32 (2 layers); "),
        ("awq", [], "awq: 4 bits, "),
        ("compressed_tensors", ["bits=8"], "compressed-tensors: 8 bits, "),
        ("native", [], "vLLM does not read format=native"),
    ],
)
def test_check_reads_a_folder_as_it_reads_what_would_be_written(
    bench: Bench, form: str, settings: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["quantization=rtn", "quantization.group_size=32", *(f"quantization.{key}" for key in settings)]
    model, folder = f"model.path={bench.checkpoint}", bench.root / "made"
    overrides = "quantization.overrides={model.layers.1.self_attn.v_proj: none}"
    assert main(["quantize", model, "device=cpu", *given, overrides, f"format={form}", f"output={folder}"]) == 0
    codes = open_source(ModelSpec(path=str(folder))).codes
    assert isinstance(codes, QuantisedLayers)
    if form != "native":  # which does not note whether zero points stand in the middle
        assert codes.schemes == {name: one.scheme for name, one in codes.items()}
    capsys.readouterr()
    check = ["check", "device=cpu", "target=vllm"]
    assert main([*check, model, *given, overrides, f"format={form}"]) == 2  # q, k and v are not alike
    planned = _kernels(capsys.readouterr().out)
    assert main([*check, f"model.path={folder}"]) == 2
    out = capsys.readouterr().out
    assert planned.removeprefix("no: ") in _kernels(out)
    assert told in " ".join(out.split())


def _kernels(out: str) -> str:
    """What stands in the row of the target."""
    joined = " ".join(out.split())
    return joined.partition("vllm ")[2].partition(" drafting ")[0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_ggml_type_is_the_scheme_that_its_blocks_come_to(kind: str) -> None:
    columns, nbytes = BLOCKS[kind]
    found = codes_of(torch.zeros(1, nbytes, dtype=torch.uint8), kind).scheme
    assert GGUFBlocks().scheme("l", (1, columns), {"layers": {"l": kind}}) == found
