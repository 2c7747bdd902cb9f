"""Which classes a checkpoint may hold objects of: this reader's list, never the file's.

A pickle names what it wants to call. Whoever can write a checkpoint could name any function, so only two kinds of names
are looked up: those reviewed here, data types whose constructors do nothing but keep their arguments; and classes that
the job's own source files have defined, which the script has imported already. Nothing is imported because a file says
so but the modules of reviewed names.
"""

from __future__ import annotations

import importlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__all__ = ["find_allowed", "why_refused"]

_REVIEWED: Final = frozenset(
    {
        "argparse.Namespace",
        "builtins.frozenset",
        "builtins.range",
        "builtins.slice",
        "collections.ChainMap",
        "collections.UserDict",
        "collections.defaultdict",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "pathlib._local.PurePosixPath",
        "types.SimpleNamespace",
        "uuid.SafeUUID",
        "uuid.UUID",
        "torch.amp.grad_scaler.GradScaler",
        "torch.amp.grad_scaler.OptState",
        "torch.amp.grad_scaler._refresh_per_optimizer_state",  # the factory of a GradScaler's table; makes a dict
        "torch.cuda.amp.grad_scaler.GradScaler",
        "smpkit.torch.amp.GradScaler",
        "torch.utils.data._utils.collate.default_collate",  # a DataLoader's; stacks what it is given
        "torch.utils.data.dataloader.DataLoader",
        "torch.utils.data.dataloader._DatasetKind",
        "torch.utils.data.dataloader._InfiniteConstantSampler",
        "torch.utils.data.dataset.ConcatDataset",
        "torch.utils.data.dataset.Subset",
        "torch.utils.data.dataset.TensorDataset",
        "torch.utils.data.distributed.DistributedSampler",
        "torch.utils.data.sampler.BatchSampler",
        "torch.utils.data.sampler.RandomSampler",
        "torch.utils.data.sampler.SequentialSampler",
        "torch.utils.data.sampler.SubsetRandomSampler",
        "torch.utils.data.sampler.WeightedRandomSampler",
        "transformers.generation.configuration_utils.GenerationConfig",
    }
)
"""Calling these with any arguments, and setting any attributes of what they make, runs no code of the file's choice."""

_REVIEWED_FAMILIES: Final = (
    # A configuration of Hugging Face: keeps its arguments.
    (
        re.compile(r"transformers\.models\.(\w+)\.configuration_\w+\.\w+Config"),
        ("PretrainedConfig", "PreTrainedConfig"),
    ),
)
"""Patterns of names, and the names of classes one of which each must be derived from."""


def find_allowed(name: str) -> Any:
    """Return the class with a full name, if objects of it may be loaded; None if not."""
    if name in _REVIEWED:
        return _import(name)
    for pattern, bases in _REVIEWED_FAMILIES:
        if pattern.fullmatch(name):
            found = _import(name)
            if isinstance(found, type) and any(base.__name__ in bases for base in found.__mro__):
                return found
    return _of_the_job(name)


def why_refused(name: str) -> str:
    """Return why `find_allowed` returns None for this name, in a few words."""
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    if found is None and module not in sys.modules:
        return "its module has not been imported"
    if found is None:
        return "its module has no such class"
    if not isinstance(found, type):
        return "it is no class"
    return "it is neither a reviewed class nor one of the script's own source folder"


def _import(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def _of_the_job(name: str) -> type | None:
    """Return a class that a module of the job's source folder defines itself, if the module has been imported."""
    module_name, _, attribute = name.rpartition(".")
    module = sys.modules.get(module_name)
    found = getattr(module, attribute, None)
    # A class that the module has only imported, such as subprocess.Popen, is not its own.
    if module is None or not isinstance(found, type) or found.__module__ != module_name:
        return None
    return found if _is_own_source(module) else None


def _is_own_source(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # typed into an interpreter or a notebook
        return module.__name__ == "__main__"
    path = Path(os.path.realpath(file))
    if any(path.is_relative_to(folder) for folder in _installed()):
        return False
    return any(path.is_relative_to(folder) for folder in _source_folders())


def _source_folders() -> Iterator[Path]:
    """Yield the folder of the script, and the working directory (on SageMaker, where the source archive is)."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for folder in (Path(script).parent if script else None, Path.cwd()):
        path = Path(os.path.realpath(folder)) if folder is not None else None
        if path is not None and path != Path(path.anchor):  # everything would lie below it
            yield path


def _installed() -> Iterator[Path]:
    """Yield where Python, and what pip installs, lie; the source folder may contain them."""
    paths = sysconfig.get_paths()
    folders = [paths[each] for each in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(os.__file__).parent)]
    for folder in folders:
        yield Path(os.path.realpath(folder))
