"""Prepare modules of others once a process has imported them, and find stand-ins for packages that are gone.

Scripts ask `torch.cuda.is_available()` and import Apex before they import `smdistributed`, so `startup/` installs this
when Python starts. `import smdistributed.modelparallel.torch` installs it, too, for what is imported after that.
Nothing here imports torch, or asks for a GPU: processes that are forked later could not use it then.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, TracebackType
from typing import Any, Final

from smpkit.drop_in.removed_names import is_torch_tpu_available, load_metric

_STAND_INS: Final = Path(__file__).parent / "shims"


def install() -> None:
    """Begin, for the life of this process; once."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
        sys.meta_path.append(_StandIns())
        sys.excepthook = functools.partial(_explain, sys.excepthook)
        _name_rank_as_mpirun_does()


def _name_rank_as_mpirun_does() -> None:
    """Give a rank of torchrun mpirun's variables, which scripts read, because SMP v1 always ran under it."""
    theirs = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    is_mpirun = any(name in os.environ for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
    if not is_mpirun and all(name in os.environ for name in theirs):
        os.environ.update({f"OMPI_COMM_WORLD_{name}": os.environ[ours] for ours, name in theirs.items()})


def _prepare_torch(torch: Any) -> None:
    torch._six = importlib.import_module("torch._six")  # scripts use it without importing it
    if os.environ.get("SMPKIT_CUDA_ON_CPU") == "1":
        importlib.import_module("smpkit.torch.compat.cuda_on_cpu").install()


def _prepare_trainer(module: Any) -> None:
    if getattr(module, "is_sagemaker_mp_enabled", bool)():
        importlib.import_module("smpkit.torch.compat.trainer").replace_trainer(module)


def _add(function: Callable[..., Any], module: Any) -> None:
    """Add a function to a module that does not have it."""
    if not hasattr(module, function.__name__):
        setattr(module, function.__name__, function)


_AFTER: Final[dict[str, Callable[[Any], None]]] = {
    "torch": _prepare_torch,
    "datasets": functools.partial(_add, load_metric),
    "transformers": functools.partial(_add, is_torch_tpu_available),
    "transformers.file_utils": functools.partial(_add, is_torch_tpu_available),
    "transformers.utils": functools.partial(_add, is_torch_tpu_available),
    "transformers.trainer": _prepare_trainer,
}
"""Modules, and what is called with them once they have been imported."""


class _AfterImport:
    """Finds those modules as Python does, and has each prepared when it has been executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER or name in self._searching:
            return None
        self._searching.add(name)  # so that the search below does not come back here
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.remove(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_prepare(module: ModuleType) -> None:
                execute(module)
                _AFTER[name](sys.modules[name])  # a module may put another object in its place

            spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec


class _StandIns:
    """Finds our stand-in for a package that nothing else finds: it is asked last, so that a real one wins."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in ("amp_C", "apex", "apex_C", "flash_attn", "torch._six"):
            return None
        folder = _STAND_INS.joinpath(*name.split(".")[:-1])
        return importlib.machinery.PathFinder.find_spec(name, [str(folder)])


_FLAG: Final = (
    "the script asks for CUDA, which this machine does not have; `smpkit compat --cuda-on-cpu -- COMMAND`, or"
    " SMPKIT_CUDA_ON_CPU=1 in the environment, lets such scripts use the CPU"
)


def _explain(
    outer: Callable[..., object], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Show an exception; say what lets a script run on the CPU that ends for lack of CUDA.

    The message speaks of CUDA, or the line that failed does: `assert torch.cuda.is_available()`.
    """
    outer(kind, error, traceback)
    frames, torch = extract_tb(traceback), sys.modules.get("torch")
    if "cuda" in f"{error} {frames[-1].line if frames else ''}".lower() and torch and not torch.cuda.is_available():
        logging.getLogger("smpkit").error("note: %s", _FLAG)
