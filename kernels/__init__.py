"""One folder an op: reference.py, triton.py, cpu.py where a faster CPU path exists."""

import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _hidden_package() -> ModuleSpec | None:
    """The package `kernels` that this folder hides where the repository's root is on `sys.path`."""
    root = Path(__file__).resolve().parents[1]
    spec = PathFinder.find_spec("kernels", [entry for entry in sys.path if Path(entry).resolve() != root])
    return spec if spec is not None and spec.origin is not None else None  # without origin: a folder, no package


def _give_way(hidden: ModuleSpec) -> None:
    """Put the hidden package in this one's place. Importers get what `sys.modules` holds when this module is done."""
    assert hidden.loader is not None
    warnings.warn(
        f"the folder {Path(__file__).parent} hides the Hugging Face package 'kernels', since the program runs with "
        f"decodelab's root on sys.path; {hidden.origin} was imported in its place (ours is 'decodelab.kernels'). "
        "To silence this, start the program in another folder",
        RuntimeWarning,
        stacklevel=3,
    )
    ours = sys.modules[__name__]
    sys.modules[__name__] = module = module_from_spec(hidden)
    try:
        hidden.loader.exec_module(module)
    except BaseException:
        sys.modules[__name__] = ours
        raise


# transformers imports Hugging Face's `kernels` by that name. In a script or notebook started in the repository's root
# it finds this folder first, and `import transformers` would fail for want of the names it looks for. Where the real
# package is not installed, transformers finds no version here and goes without.
if __name__ == "kernels" and (_hidden := _hidden_package()) is not None:
    _give_way(_hidden)
