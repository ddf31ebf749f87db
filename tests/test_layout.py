"""The root is the package: nothing is loaded twice, imports stay where they belong, names say what is in a file."""

import ast
import importlib
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import decodelab
from decodelab.tests.checkout import FOLDERS, ROOT, files

KERNELS_MAY_IMPORT = {"torch", "triton", "jaxtyping"} | set(sys.stdlib_module_names)


def _source(name: Path) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), str(name))


def test_the_package_is_this_checkout():
    assert [Path(entry).resolve() for entry in decodelab.__path__] == [ROOT]


def test_no_file_but_the_root_is_loaded_under_two_names():
    names = defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(ROOT) and ".venv" not in Path(file).parts:
            names[Path(file).resolve().relative_to(ROOT).as_posix()].add(name)
    # pytest imports tests under the clone's name (or `tests`), on the way to which it imports these three
    own = {"__init__.py", "tests/__init__.py", "tests/conftest.py"}
    twice = {file: sorted(loaded) for file, loaded in names.items() if len(loaded) > 1 and file not in own}
    assert twice == {}


def test_the_root_imports_nothing_and_names_what_is_public():
    imports = [node for node in _source(Path("__init__.py")).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imports if isinstance(node, ast.ImportFrom)] == ["typing"]
    assert len(imports) == 1
    assert {"load", "generate", "compare", "evaluate", "load_runs", "__version__"} == set(dir(decodelab))
    with pytest.raises(AttributeError, match="module 'decodelab' has no attribute 'generates'"):
        decodelab.generates  # noqa: B018


@pytest.mark.parametrize("name", ["load", "generate", "compare", "evaluate", "load_runs"])
def test_public_names_come_from_the_api(name):
    assert getattr(decodelab, name) is getattr(importlib.import_module("decodelab.experiments.api"), name)


def test_shapes_are_checked_in_tests():
    loaded = importlib.import_module("decodelab.attention.rows")
    assert type(loaded.__loader__).__module__ == "jaxtyping._import_hook"


def test_fresh_memory_is_poisoned():
    for fresh in (torch.empty(2), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(2), torch.empty(2).half()):
        assert fresh.isnan().all()
    assert torch.empty(2, dtype=torch.int64).tolist() == [torch.iinfo(torch.int64).max] * 2


def test_every_folder_is_one_of_the_design():
    packages = {name.parts[0] for name in files() if len(name.parts) > 1 and not name.parts[0].startswith(".")}
    assert packages == FOLDERS | {"tests"}


def test_no_file_is_called_after_nothing():
    vague = {"util", "utils", "helper", "helpers", "common", "misc"}
    assert [str(name) for name in files() if vague & set(name.with_suffix("").parts)] == []


def test_kernels_import_torch_and_triton_alone():
    foreign = []
    for name in files():
        if name.parts[0] != "kernels" or name.suffix != ".py":
            continue
        for node in ast.walk(_source(name)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            foreign += [f"{name}: {module}" for module in modules if module.split(".")[0] not in KERNELS_MAY_IMPORT]
    assert foreign == []


def test_the_package_imports_itself_by_relative_names():
    absolute = []
    for name in files():
        if name.suffix != ".py" or name.parts[0] not in FOLDERS:
            continue
        for node in ast.walk(_source(name)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOLDERS | {"decodelab"}:
                absolute += [f"{name}: from {node.module}"] if node.level == 0 else []
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                absolute += [f"{name}: from __future__ hides shapes from jaxtyping"]
    assert absolute == []


def _targets(node) -> list[str]:
    if isinstance(node, dict):
        return [value for key, value in node.items() if key == "_target_"] + _targets(list(node.values()))
    return [target for entry in node for target in _targets(entry)] if isinstance(node, list) else []


def test_every_target_in_yaml_is_ours_and_there():
    configs = [OmegaConf.to_container(OmegaConf.load(ROOT / name)) for name in files() if name.suffix == ".yaml"]
    for target in _targets(configs):
        module, _, attribute = target.rpartition(".")
        assert module.startswith("decodelab."), target
        assert hasattr(importlib.import_module(module), attribute), target
