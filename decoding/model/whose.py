"""Whose a trained part is: the note in the file of its tensors, and what that says of a target."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from .source import Source

NOTE = "decodelab"  # the key of our note in a file's metadata

# own: trained for the target; kin: one of the two is a quantised copy of the other, or both are of the same weights
Relation = Literal["own", "kin", "other", "unknown"]


def note_of(kind: str, target: Source, about: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file of ours."""
    whose = {"target": target.digest, "target_label": target.label}
    if target.origin is not None:
        whose["origin"] = target.origin
    return {NOTE: json.dumps({"kind": kind, **whose, **about})}


def relation(about: Mapping[str, Any], target: Source) -> Relation:
    """`about`: what is noted."""
    if (digest := about.get("target")) is None:
        return "unknown"
    if digest == target.digest:
        return "own"
    return "kin" if ({digest, about.get("origin")} - {None}) & {target.digest, target.origin} else "other"
