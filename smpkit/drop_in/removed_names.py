"""Names that libraries had when SMP v1's scripts were written, and have no longer. Nothing here imports torch."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

from smpkit.errors import UnsupportedError


def announce(package: str) -> None:
    """Log that a stand-in is imported. Its module does so: libraries only look whether a package is there."""
    if os.environ.get("RANK", "0") == "0":
        text = "`%s` is not installed: smpkit's stand-in has the names that public scripts of SMP v1 import"
        logging.getLogger("smpkit").warning(text, package)


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Return what transformers calls `is_torch_xla_available` now."""
    utils: Any = importlib.import_module("transformers.utils")
    return bool(utils.is_torch_xla_available(check_is_tpu=check_device))


def load_metric(path: str, *args: Any, **options: Any) -> Any:
    """Return `evaluate.load(path, ...)`, which `datasets.load_metric` has become."""
    try:
        evaluate = importlib.import_module("evaluate")
    except ModuleNotFoundError:
        raise UnsupportedError(f"datasets.load_metric({path!r}) is gone", hint="pip install evaluate") from None
    return evaluate.load(path, *args, **options)


def refusing(module: str, instead: str) -> Callable[[str], type]:
    """Return a module's `__getattr__`: any of its names can be imported, and refuses when it is called.

    Each name is a class, so that scripts can also use it in `isinstance` and derive from it.
    """

    @functools.cache
    def look_up(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedError(f"`{module}.{name}` is not here", hint=f"use {instead}, or install NVIDIA's Apex")

        return type(name, (), {"__module__": module, "__new__": refuse})

    return look_up
