"""Whether torchvision and timm are here, and torchvision imported where its operators do not load.

A wheel of torchvision that was built for CUDA cannot load its operators beside a torch for CPUs. Models that classify
need none of them, but importing the package gives two of them fake implementations, for which they must be declared.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Final

import torch

__all__ = ["MISSING", "import_torchvision"]

MISSING: Final = [name for name in ("torchvision", "timm") if find_spec(name) is None]

_declared: list[torch.library.Library] = []


def import_torchvision() -> Any:
    """Import torchvision, which must be installed."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _declared or "torchvision::nms" not in str(error):
            raise
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in ("nms", "qnms"):
        _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")
