"""`import smdistributed.modelparallel.torch as smp`: the API of `smpkit.torch`, the very same objects."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import smpkit.torch
from smpkit.drop_in import after_import
from smpkit.torch.compat import cuda_on_cpu
from smpkit.torch.recompute import api as recompute_api

__all__ = list(smpkit.torch.__all__)

_MODULES = {
    "amp": "smpkit.torch.amp",
    "exceptions": "smdistributed.modelparallel.backend.exceptions",
    "model": "smpkit.torch.model",
    "nn": "smpkit.torch.nn",
    "nn.huggingface": "smpkit.torch.nn.huggingface",
    "optimizers": "smpkit.torch.optimizers",
    "patches.checkpoint": recompute_api.__name__,
    "state_mod": "smpkit.torch.api",
    "step": "smpkit.torch.step",
    "utils": "smpkit.torch.compat.utils",
    **{
        f"nn.huggingface.{family}": f"smpkit.torch.nn.huggingface.{family}"
        for family in ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta")
    },
}
"""SMP v1's modules below this one, and ours that stand for them."""

for _name, _ours in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(_ours)
sys.modules["smdistributed.modelparallel.test.torch.utils"] = importlib.import_module(_MODULES["utils"])
for _package in (f"{__name__}.patches", "smdistributed.modelparallel.test", "smdistributed.modelparallel.test.torch"):
    sys.modules[_package] = ModuleType(_package)
setattr(sys.modules[f"{__name__}.patches"], "checkpoint", recompute_api)  # noqa: B010  a module declares no names

# `step` is a module, which has `StepOutput`, and a decorator. The package shows the decorator, and that has the class,
# too, because `import ....torch.step as step` binds the package's attribute.
step = smpkit.torch.step
setattr(step, "StepOutput", smpkit.torch.StepOutput)  # noqa: B010  functions have no such attribute, say type checkers


def __getattr__(name: str) -> Any:
    # Of both, `smpkit.torch` first: scripts may set names there.
    if not hasattr(smpkit.torch, name) and f"{__name__}.{name}" in sys.modules:
        return sys.modules[f"{__name__}.{name}"]
    return getattr(smpkit.torch, name)


def __dir__() -> list[str]:
    return sorted({*__all__, "patches", *(name for name in _MODULES if "." not in name)})


cuda_on_cpu.install()
after_import.install()
