"""Quality of a run: lm-eval's tasks on the decoding path, item by item."""

from pathlib import Path
from typing import Any

from ...decoding.errors import UserError
from ..config import RunConfig
from ..lab import Lab, Progress


def quality_digest(config: RunConfig) -> str | None:
    """Of the tasks' files and scorers; part of a run's key. None without tasks."""
    if not config.quality.tasks:
        return None
    raise UserError("quality.tasks is not there yet")


def measure_quality(lab: Lab, config: RunConfig, folder: Path, key: str, progress: Progress) -> dict[str, Any]:
    """What result.json holds under `quality`. Writes `quality.jsonl`, a line an item, as it goes; items that a broken
    off run of the same key left there are not asked again."""
    raise UserError("quality.tasks is not there yet")
