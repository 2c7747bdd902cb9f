"""`import smdistributed.modelparallel.torch as smp`: the API of `smpkit.torch`, the very same objects."""

from __future__ import annotations

import importlib
from typing import Any

import smpkit.torch
from smpkit.torch.compat import prepare

# `step` is a module, which has `StepOutput`, and a decorator. Importing the module binds its name here, so the
# decorator is bound afterwards. It has the class, too, because `import ....torch.step as step` yields the decorator.
from . import model as model
from . import step as _step_module

step = _step_module.step
setattr(step, "StepOutput", _step_module.StepOutput)  # noqa: B010  functions have no such attribute, say type checkers
__all__ = list(smpkit.torch.__all__)

_MODULES = (
    "amp",
    "exceptions",
    "nn",
    "optimizers",
    "patches",
    "sharded_data_parallel_checkpoint",
    "state_mod",
    "utils",
)


def __getattr__(name: str) -> Any:
    if hasattr(smpkit.torch, name):
        return getattr(smpkit.torch, name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(smpkit.torch, name)  # for its error


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "model"})


prepare()
