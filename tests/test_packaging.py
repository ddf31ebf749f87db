"""What is installed, and that it works beside Hugging Face's package `kernels`, without triton, and from a wheel.

Subprocesses are slow, so each test of one asks several questions of it.
"""

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from transformers.utils import import_utils
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from decodelab.tests.checkout import FOLDERS, ROOT, copy, files

# what transformers 5.24 takes from kernels 0.18.2, the lowest version that it accepts
STAND_IN = """
class Part:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return Part()

CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = Mode = ROCMProperties = Part

def get_kernel(*args, **kwargs): return None
kernelize = register_kernel_mapping = replace_kernel_forward_from_hub = use_kernel_mapping = get_kernel
def use_kernel_forward_from_hub(name): return lambda layer: layer
def use_kernelized_func(*functions): return lambda layer: layer
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder for `sys.path` with a stand-in for Hugging Face's package `kernels`, which imports itself by name."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "layer.py").write_text(STAND_IN)
    (site / "kernels" / "__init__.py").write_text("from kernels.layer import *\n")
    record = site / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return site


def _run(*command: object, cwd: Path, **variables: object) -> str:
    """Standard output and standard error of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_direct_dependency_is_pinned_within_its_range():
    project = _project()["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    asked = [line for line in asked if not line.startswith("decodelab[")]  # an extra that takes in another
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {name: version for name, _, version in (line.partition("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    requirements = {requirement.name: requirement for requirement in map(Requirement, asked)}
    assert str(requirements.pop("triton").marker) == 'sys_platform == "linux"'
    assert pins.keys() == requirements.keys()
    for name, version in pins.items():
        assert version in requirements[name].specifier, name


def _imported(folders: set[str]) -> set[str]:
    """The top-level modules of others that files in these folders import."""
    found = set()
    for name in files():
        if name.suffix == ".py" and name.parts[0] in folders:
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                found |= {module.split(".")[0] for module in modules}
    return found - set(sys.stdlib_module_names) - {"decodelab", "kernels"}


def test_every_import_is_of_a_direct_dependency():
    project = _project()["project"]
    extras = project["optional-dependencies"]
    installed = {"peers", "quality", "search", "tracking"} & extras.keys()  # imported where they are asked for
    declared = project["dependencies"] + [line for extra in installed for line in extras[extra]]
    known = {"llama_cpp": ["llama-cpp-python"]}  # need not be installed
    distributions = known | importlib.metadata.packages_distributions()
    for folders, lines in [(FOLDERS, declared), ({"tests"}, declared + extras["test"])]:
        names = {Requirement(line).name.lower() for line in lines}
        undeclared = {
            module
            for module in _imported(folders)
            if not {name.lower().replace("_", "-") for name in distributions.get(module, [module])} & names
        }
        assert undeclared == set()


def test_no_file_of_the_setup_names_a_registry():
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text()), name


START = """
import sys
from importlib.metadata import entry_points
import decodelab
print(decodelab.__file__)
(command,) = entry_points(group="console_scripts", name="decodelab")
sys.argv = ["decodelab", "run", "--cfg", "job"]
sys.exit(command.load()())
"""


def test_the_wheel_holds_what_git_holds_and_works_from_any_folder(tmp_path):
    clone, site, elsewhere = copy(tmp_path / "clone"), tmp_path / "site", tmp_path / "elsewhere"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run(*pip, "--wheel-dir", tmp_path, clone, cwd=tmp_path)
    (wheel,) = tmp_path.glob("decodelab-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {name for name in files() if name.parts[0] in FOLDERS or name.name == "py.typed"}
    ours |= {name for name in files() if len(name.parts) == 1 and name.suffix == ".py"}
    assert packed == {f"decodelab/{name.as_posix()}" for name in ours}, "tool.setuptools in pyproject.toml lists files"

    elsewhere.mkdir()
    said = _run(sys.executable, "-c", START, cwd=elsewhere, PYTHONPATH=site)
    assert said.startswith(str(site / "decodelab"))
    assert "drafting:" in said


def test_clones_of_any_name_load_no_file_twice(tmp_path):
    guards = "two_names or this_checkout or shapes_are_checked"
    pytest_script = Path(sys.executable).with_name("pytest")
    for name in ("fresh", "my-clone"):  # one can be a package's name, the other cannot
        clone, site = copy(tmp_path / name), tmp_path / f"site of {name}"
        site.mkdir()
        (site / "decodelab").symlink_to(clone)
        said = _run(pytest_script, "tests/test_layout.py", "-k", guards, cwd=clone, PYTHONPATH=site)
        assert re.match(r"=+ 3 passed", said.strip().splitlines()[-1]), said


SCRIPT = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {first}
    {second}
import kernels, decodelab.kernels.verify_attention
from transformers.integrations import hub_kernels
assert hub_kernels.is_kernels_available() and hub_kernels.LayerRepository is kernels.layer.Part, kernels
print([str(warning.message) for warning in caught if "hides" in str(warning.message)])
"""


def test_a_script_in_the_root_finds_hugging_face_kernels(stand_in):
    ours, theirs = "from decodelab import load", "from transformers import LlamaForCausalLM"
    for first, second in [(ours, theirs), (theirs, ours)]:
        said = _run(sys.executable, "-c", SCRIPT.format(first=first, second=second), cwd=ROOT, PYTHONPATH=stand_in)
        assert said.count("hides the Hugging Face package 'kernels'") == 1
        assert str(stand_in) in said


AT_EXIT = """
import atexit, importlib.util
atexit.register(lambda: print("found", importlib.util.find_spec("kernels").origin))
"""


def test_the_command_in_the_root_finds_hugging_face_kernels(stand_in):
    (stand_in / "sitecustomize.py").write_text(AT_EXIT)  # what transformers would find, whether or not it is imported
    said = _run(Path(sys.executable).with_name("decodelab"), "run", "--cfg", "job", cwd=ROOT, PYTHONPATH=stand_in)
    assert "drafting:" in said
    assert f"found {stand_in / 'kernels' / '__init__.py'}" in said


WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import decodelab
for module in pkgutil.walk_packages(decodelab.__path__, "decodelab."):
    if not module.name.startswith("decodelab.tests") and not module.name.endswith(".triton"):
        importlib.import_module(module.name)
        print(module.name)
"""


def test_without_triton_everything_imports(tmp_path):
    said = _run(sys.executable, "-c", WITHOUT_TRITON, cwd=tmp_path)
    assert {f"decodelab.{folder}" for folder in FOLDERS} <= set(said.split())


def test_the_folder_gives_way_to_the_package_it_hides(stand_in, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path, str(stand_in)])
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    with pytest.warns(RuntimeWarning, match=r"hides the Hugging Face package 'kernels'.*start the program in another"):
        found = importlib.import_module("kernels")
    assert found.__file__ == str(stand_in / "kernels" / "__init__.py")
    assert found.kernelize is importlib.import_module("kernels.layer").kernelize
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module("kernels") is found
    monkeypatch.delitem(sys.modules, "kernels.layer")


def test_without_hugging_face_kernels_transformers_goes_without(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_utils.is_kernels_available.__wrapped__() is False
    assert sys.modules["kernels"].__file__ == str(ROOT / "kernels" / "__init__.py")
