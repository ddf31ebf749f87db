"""The heads in drafting/heads: whose they are, how they were made, and that they are found where no path is given."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from decodelab.decoding.model.fetch import EMBEDDED
from decodelab.decoding.model.source import Source
from decodelab.drafting.eagle import Eagle
from decodelab.drafting.medusa import Medusa
from decodelab.drafting.trained import SHIPPED, open_trained
from decodelab.errors import UserError
from decodelab.tests.taught import taught_source

DEFAULT = "smollm2-135m"
SETTINGS: dict[str, Any] = {"medusa": Medusa(), "eagle": Eagle()}


def default_model() -> Source:
    """As far as a head looks at it before any weight is read."""
    config = taught_source().config
    sizes = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30, "max_position_embeddings": 8192}
    config = type(config).from_dict(config.to_dict() | sizes | {"num_attention_heads": 9, "num_key_value_heads": 3})
    return replace(taught_source(), label=DEFAULT, config=config, digest=EMBEDDED[DEFAULT].sha256)


@pytest.mark.parametrize("kind", SETTINGS)
def test_without_a_path_it_is_the_shipped_head(kind: str):
    settings = SETTINGS[kind]
    (file,) = settings.files
    assert file.parent == SHIPPED
    assert settings.check(default_model()) == []
    assert settings.gives.rows > 1
    copy = replace(default_model(), digest="1" * 64, origin=EMBEDDED[DEFAULT].sha256)
    (told,) = settings.check(copy)
    assert "has the same weights quantised otherwise" in told


@pytest.mark.parametrize("kind", SETTINGS)
def test_another_target_is_told_how_to_get_its_own(kind: str):
    """Of other sizes too: the line about those would not say what to do."""
    line = (
        f"drafting.path is not set, and what is shipped was trained for {DEFAULT}, not for another: train one "
        rf"\(decodelab train train={kind} model=…\), or name it with drafting.path="
    )
    for model in (default_model(), taught_source()):
        with pytest.raises(UserError, match=f"^{line}$"):
            SETTINGS[kind].check(replace(model, label="another", digest="2" * 64))


def test_they_are_small_and_say_what_they_were_made_of():
    files = {file.name: file for file in SHIPPED.iterdir()}
    assert files.keys() == {"medusa.safetensors", "eagle.safetensors", "README.md"}
    assert sum(file.stat().st_size for file in files.values()) < 16e6
    said = files["README.md"].read_text(encoding="utf-8")
    for word in ("decodelab train", "seed", "licence", "Dolly", "HH-RLHF", "GSM8K", "MBPP", "CC-BY-SA-3.0", "MIT"):
        assert word in said


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_command_is_the_one_that_made_it(kind: str):
    said = (SHIPPED / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = said.splitlines()
    own = next(line for line in lines if f"train train={kind} " in line)
    words = [*own.split(), *(word for line in lines if line.startswith("#  ") for word in line.split())]
    words += next(line for line in lines if line.startswith("# SAME: ")).split()
    given = {key: value for key, _, value in (word.partition("=") for word in words) if key.startswith("train.")}
    assert len(given) > 8
    settings = open_trained(None, kind, (f"{kind}.safetensors",)).about["settings"]
    for key, value in given.items():
        found: Any = settings
        for name in key.removeprefix("train.").split("."):
            found = found[name]
        assert found == yaml.safe_load(value), key
