"""Files of `torch.save`: written as torch does, read with `weights_only=True` and the classes that the reader allows.

Scripts put all kinds of objects into checkpoints: configurations, namespaces, dataclasses, loss scalers, even a
DataLoader. A pickle names what it wants to call, and whoever can write a checkpoint could name any function. So two
kinds of names are looked up, of this reader's list and never the file's: those reviewed here, data types whose
constructors do nothing but keep their arguments; and classes that the job's own source files have defined, which the
script has imported already. Nothing is imported because a file says so but the modules of reviewed names. Any other
name makes the file an error.

torch fills no containers but plain ones then, so `dump` refuses the others while the script can still change them.
Plain `torch.load(..., weights_only=False)` reads every file.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import contextlib
import functools
import importlib
import os
import pickle
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

import torch

from smpkit.errors import CheckpointError

__all__ = ["dump", "find_allowed", "first_line", "load", "why_refused"]

_MAX_NAMED: Final = 5
_HINT: Final = (
    "import the module of the script that defines the class before you load; or, if you trust whoever can write the"
    " file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 or load it with weights_only=False (smp.load:"
    ' pickle_load_args={"weights_only": False})'
)


# --- writing and reading ----------------------------------------------------------------------------------------------


def dump(obj: Any, file: IO[bytes], pickle_protocol: int = 2) -> None:
    """Write an object as `torch.save` does.

    Raises:
        CheckpointError: a part of it cannot be pickled, or would be refused by whoever reads it.
    """
    try:
        torch.save(obj, file, _Pickle, pickle_protocol)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"what is to be saved holds something that cannot be pickled: {error}",
            hint="save a state_dict, or numbers, strings, lists and dicts, in its place",
        ) from error


class _Pickler(pickle.Pickler):
    """Refuses containers that `weights_only` cannot fill."""

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol, fix_imports=False)  # or classes get their names of Python 2, in errors too

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, dict | list | collections.deque) and len(obj) and kind not in _FILLED:
            raise CheckpointError(
                f"what is to be saved holds a {kind.__module__}.{kind.__qualname__} with items, which could be loaded"
                " only by running code of the file",
                hint="save a plain dict or list of them; of an optimizer or a scheduler save its state_dict()",
            )
        return NotImplemented


_FILLED: Final = (dict, list, collections.OrderedDict, collections.Counter)


class _Pickle:
    """What `torch.save` takes for the pickle module."""

    Pickler = _Pickler


def load(source: Path | IO[bytes], map_location: Any = None, **options: Any) -> Any:
    """Read a file of `torch.save` with `weights_only=True`, and objects of allowed classes.

    Args:
        map_location, options: torch.load's.

    Raises:
        CheckpointError: it is damaged, or holds an object of a class that is refused.
    """
    name = str(source) if isinstance(source, Path) else "it"
    with torch.serialization.safe_globals([*_plain_types()]):
        try:
            return torch.load(source, map_location, weights_only=True, **options)
        except pickle.UnpicklingError as error:
            wanted = _names_of_classes(source)
            if not wanted:
                raise CheckpointError(f"{name} is damaged: {first_line(error)}") from error
    allowed = {each: find_allowed(each) for each in wanted}
    if refused := sorted(each for each, kind in allowed.items() if kind is None):
        reasons = ", ".join(f"`{each}`, and {why_refused(each)}" for each in refused[:_MAX_NAMED])
        more = f", and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
        raise CheckpointError(f"{name} needs {reasons}{more}", hint=_HINT)
    if not isinstance(source, Path):
        source.seek(0)
    with torch.serialization.safe_globals([*_plain_types(), *((kind, full) for full, kind in allowed.items())]):
        try:
            return torch.load(source, map_location, weights_only=True, **options)
        except Exception as error:  # of a class that is built in a way that `weights_only` does not offer
            raise CheckpointError(f"{name} cannot be rebuilt: {first_line(error)}", hint=_HINT) from error


def _names_of_classes(source: Path | IO[bytes]) -> list[str]:
    """Return what a file names and torch does not allow; nothing where that cannot be read."""
    if not isinstance(source, Path):
        source.seek(0)
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception:  # a file from before 2020, or damaged
        return []


@functools.cache
def _plain_types() -> tuple[Any, ...]:
    """Return plain data types that torch alone does not allow."""
    types: list[Any] = [argparse.Namespace, codecs.encode, frozenset]
    with contextlib.suppress(ImportError):
        import numpy as np

        # Taken from values, because numpy has moved these functions between modules.
        rebuild = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
        types += [np.ndarray, np.dtype, *rebuild, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDUS"}]
    return tuple(types)


def first_line(error: BaseException) -> str:
    """Return the most useful line of a message; torch puts advice before and after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (telling or lines or [type(error).__name__])[0]


# --- the reader's list ------------------------------------------------------------------------------------------------

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
