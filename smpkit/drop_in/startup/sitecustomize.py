"""Prepare a process for scripts of SMP v1's time; `smpkit compat` puts this on the path.

Python imports the first module of this name when it starts. Scripts ask `torch.cuda.is_available()` and import packages
that are gone before they import `smdistributed`, so that import would come too late.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_AFTER = {
    "torch": ("smpkit.torch.compat.cuda_on_cpu", "prepare_process"),
    "transformers": ("smpkit.drop_in.removed_names", "add_to_transformers"),
    "transformers.file_utils": ("smpkit.drop_in.removed_names", "add_to_transformers"),
    "transformers.utils": ("smpkit.drop_in.removed_names", "add_to_transformers"),
    "datasets": ("smpkit.drop_in.removed_names", "add_to_datasets"),
}
"""Modules, and what is called with them once they have been imported."""

_SHIMS = Path(__file__).resolve().parent.parent / "shims"


def _run_the_next_one() -> None:
    """Run the module of this name that this one hides, such as that of the operating system."""
    here = Path(__file__).resolve().parent
    path = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterImports(importlib.abc.MetaPathFinder):
    """Finds those modules as Python does, and prepares each when it has been imported."""

    def __init__(self) -> None:
        self._waiting = dict(_AFTER)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        after = self._waiting.pop(name, None)  # so that the search below does not come back here
        if after is None:
            return None
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._waiting[name] = after  # a library may look whether a package is there long before it imports it
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self._imported(name))
        return spec

    def _imported(self, name: str) -> None:
        if name in self._waiting:
            module, function = self._waiting.pop(name)
            getattr(importlib.import_module(module), function)(sys.modules[name])


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, and calls a function afterwards."""

    def __init__(self, loader: Any, then: Any) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()


class _Shims(importlib.abc.MetaPathFinder):
    """Finds our stand-in for a package that nothing else finds: after all folders, so that a real one wins.

    Only for imports. A library that looks whether Apex is installed shall go its way without it: transformers, for one,
    would replace parts of models.
    """

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in ("amp_C", "apex", "apex_C", "flash_attn", "torch._six") or _is_looked_for_only():
            return None
        place = _SHIMS.joinpath(*name.split("."))
        folders = [str(place)] if place.is_dir() else None
        file = place / "__init__.py" if folders else place.with_suffix(".py")
        if name != "torch._six" and os.environ.get("RANK", "0") == "0":
            text = "`%s` is not installed: smpkit's stand-in for it is used, which computes with torch's operations"
            logging.getLogger("smpkit").warning(text, name)
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)


def _is_looked_for_only() -> bool:
    """Return whether `importlib.util.find_spec` asks, and not an import."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "importlib.util"


_run_the_next_one()
sys.meta_path.insert(0, _AfterImports())
sys.meta_path.append(_Shims())
