"""What public scripts use of NVIDIA's Apex, on torch; what has only CUDA kernels there says what to use instead."""

from __future__ import annotations

import importlib
from typing import Any, Final

__all__ = ["amp", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

_MODULES: Final = frozenset(__all__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
