"""Prepare a process for scripts that expect CUDA once it has imported torch; `smpkit compat` puts this on the path.

Python imports the first module of this name when it starts. A script may ask `torch.cuda.is_available()` before it
imports `smdistributed`, so that import would come too late.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _run_the_next_one() -> None:
    """Run the module of this name that this one hides, such as that of the operating system."""
    here = Path(__file__).resolve().parent
    path = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as Python does, and prepares it when it has been imported."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        importlib.import_module("smpkit.torch.compat.cuda_on_cpu").prepare_process()


_run_the_next_one()
sys.meta_path.insert(0, _AfterTorch())
