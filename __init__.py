"""decodelab: decoding strategies for language models, composed in a config and measured against plain decoding.

Nothing is imported here: pytest may import this file a second time under the clone's name, and `decodelab --help`
should not wait for torch. The public names come on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiments.api import compare, evaluate, generate, load, load_runs

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "evaluate", "generate", "load", "load_runs"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .experiments import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
