"""Names of layers in state dicts of OffloadModels that were cut into other slices.

FairScale numbers layers from 0 in each slice (`_model.1.model_shard.0.weight`), and cuts worse; so the same layer has
another name there. The order of layers is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["rename_layers"]

_LAYER: Final = re.compile(r"(\d+)\.model_shard\.(\d+)\.")


def rename_layers(state: dict[str, Any], prefix: str, wanted: Iterable[str]) -> None:
    """Rename, in place, the layers of `state` to those of `wanted`, if they differ only in how they are sliced.

    Args:
        state: a state dict; other entries than the model's are left alone.
        prefix: of the OffloadModel in it.
        wanted: the names of the model at hand, from below `_model`.
    """
    start = f"{prefix}_model."
    given = _layers(key.removeprefix(start) for key in state if key.startswith(start))
    here = _layers(wanted)
    if given == here or len(given) != len(here):
        return  # equal, or another model: then torch's own message about missing and unexpected keys is the best
    moved = {}
    for old, new in zip(given, here, strict=True):
        for key in [key for key in state if key.startswith(start + old)]:
            moved[start + new + key.removeprefix(start + old)] = state.pop(key)
    state.update(moved)


def _layers(names: Iterable[str]) -> list[str]:
    """Return the distinct beginnings that name a layer, in the order of the layers."""
    found = {match.group(): (int(match[1]), int(match[2])) for name in names if (match := _LAYER.match(name))}
    return sorted(found, key=lambda name: found[name])
