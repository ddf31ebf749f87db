"""Where fetched models, quantised copies and compiled kernels are kept."""

import os
from pathlib import Path

from .errors import UserError


def cache_dir() -> Path:
    """`DECODELAB_CACHE`, by default ~/.cache/decodelab. Read at every call; made by the first write."""
    given = os.environ.get("DECODELAB_CACHE") or "~/.cache/decodelab"
    try:
        return Path(given).expanduser()
    except RuntimeError:  # a user id without a name, as in containers
        raise UserError(
            f"{given} is in no home directory known here: set DECODELAB_CACHE to a folder of yours"
        ) from None
