"""Every drafter of configs/drafting keeps the promises of the seam; and drafters that break one are caught."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from decodelab import testing
from decodelab.experiments.construct import Constructor

FOLDER = Path(testing.__file__).parent / "configs" / "drafting"
# What a drafter needs beside its YAML, such as a second model: settings whose `build` uses a tiny one.
BUILDERS: dict[str, Callable[[], object]] = {}


def _configured(name: str) -> Callable[[], object]:
    if name in BUILDERS:
        return BUILDERS[name]
    config = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    return lambda: Constructor().build(config, object, "drafting")


@pytest.mark.parametrize("check", testing.DRAFTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_drafter(name, check):
    check(_configured(name))
