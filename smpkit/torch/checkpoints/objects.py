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
import enum
import functools
import importlib
import os
import pickle
import re
import site
import stat
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

import torch

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.agreement import go_on
from smpkit.torch.checkpoints.folder import PIECE_BYTES, as_checkpoint_error, atomic_write

_MAX_NAMED: Final = 5
_HINT: Final = (
    "import the module of the script that defines the class before you load; or, if you trust whoever can write the"
    " file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 or load it with weights_only=False (smp.load:"
    ' pickle_load_args={"weights_only": False})'
)


# --- writing and reading ----------------------------------------------------------------------------------------------


def dump(obj: Any, file: IO[bytes], pickle_module: Any = None, pickle_protocol: int = 2) -> None:
    """Write an object as `torch.save` does; raise CheckpointError if it cannot be pickled, or could not be read.

    What a `pickle_module` writes may need a reader that trusts the file.
    """
    try:
        torch.save(obj, file, pickle_module or _Pickle, pickle_protocol)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"what is to be saved holds something that cannot be pickled: {error}",
            hint="save a state_dict, or numbers, strings, lists and dicts, in its place",
        ) from error


class _Pickler(pickle.Pickler):
    """Refuses containers that `weights_only` cannot fill, and writes members of enums by their values."""

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol, fix_imports=False)  # or classes get their names of Python 2, in errors too

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, enum.Enum):  # as Python does from 3.11.4 on; before, it wrote a call of `getattr`
            return kind, (obj.value,)
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


def load(path: Path, map_location: Any = None, **options: Any) -> Any:
    """Read a file of `torch.save` with `weights_only=True`, and objects of allowed classes; `options` are torch's."""
    with torch.serialization.safe_globals([*_plain_types()]):
        try:
            return torch.load(path, map_location, weights_only=True, **options)
        except pickle.UnpicklingError as error:
            if not (wanted := _names_of_classes(path)):
                raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from error
    classes = {full: find_allowed(full) for full in wanted}
    if refused := sorted(f"`{full}`, and {reason}" for full, (_, reason) in classes.items() if reason):
        more = f", and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
        raise CheckpointError(f"{path} needs {', '.join(refused[:_MAX_NAMED])}{more}", hint=_HINT)
    with torch.serialization.safe_globals([*_plain_types(), *((kind, full) for full, (kind, _) in classes.items())]):
        try:
            return torch.load(path, map_location, weights_only=True, **options)
        except Exception as error:  # of a class that is built in a way that `weights_only` does not offer
            raise CheckpointError(f"{path} cannot be rebuilt: {_first_line(error)}", hint=_HINT) from error


def _names_of_classes(path: Path) -> list[str]:
    """Return what a file names and torch does not allow; nothing where that cannot be read."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
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


def _first_line(error: BaseException) -> str:
    """Return the most useful line of a message; torch puts advice before and after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (telling or lines or [type(error).__name__])[0]


# --- files ------------------------------------------------------------------------------------------------------------


def write_file(path: Path, obj: Any, pickle_module: ModuleType | None = None, pickle_protocol: int = 2) -> None:
    """Write a file of `dump` completely or not at all."""
    with as_checkpoint_error(f"{path} cannot be written"):
        atomic_write(path, lambda file: dump(obj, file, pickle_module, pickle_protocol))


def read_file(
    path: Path,
    map_location: Any = None,
    pickle_module: ModuleType | None = None,
    weights_only: bool | None = None,
    **options: Any,
) -> Any:
    """Read a file of `torch.save`, as `load` does unless told otherwise.

    Args:
        pickle_module: reads the file in torch's place, whatever it names.
        weights_only: False loads whatever the file names; None: True, unless the user has set torch's variable.
    """
    check_archive(path, reads_all=not options.get("mmap"))  # a file that is mapped is not read as a whole
    if weights_only is None:
        trusts_files = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower()
        weights_only = trusts_files not in {"1", "y", "yes", "true"}
    try:
        if weights_only and pickle_module is None:
            return load(path, map_location, **options)
        return torch.load(path, map_location, pickle_module, weights_only=False, **options)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise anything, such as a KeyError of the unpickler
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def check_archive(path: Path, *, reads_all: bool = True) -> None:
    """Raise CheckpointError unless a file's own description of its members is possible.

    The sizes of members are declared in the file, and torch allocates memory for them before it reads: a compressed
    member, or many that claim the same bytes, could ask for any amount. `torch.save` writes neither.

    Args:
        reads_all: compare the members with the checksums in the file too, which torch does not.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is a folder, a pipe or a device, not a file")
    except OSError:
        return  # the caller opens it, and says why that fails
    try:
        if not zipfile.is_zipfile(path):
            return  # a file from before 2020, or no file of torch's
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            room, total = file.seek(0, os.SEEK_END), 0
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise CheckpointError(
                        f"{path} has a compressed member, `{info.filename}`, which torch.save never writes",
                        hint="load it with torch and save it again with torch.save",
                    )
                total += info.file_size
                with archive.open(info) as member:  # compares what stands before the member with the directory
                    while reads_all and member.read(PIECE_BYTES):
                        go_on()
                if info.header_offset + info.file_size > room or total > room:
                    raise zipfile.BadZipFile(f"`{info.filename}` is not where the archive's directory says")
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError) as error:  # it may call itself encrypted
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


# --- the reader's list ------------------------------------------------------------------------------------------------

_REVIEWED: Final[Mapping[str, str]] = {
    "argparse": "Namespace",
    "builtins": "frozenset range slice",
    "collections": "ChainMap UserDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath PurePosixPath",
    "types": "SimpleNamespace",
    "uuid": "SafeUUID UUID",
    # the function is the factory of a GradScaler's table; it makes a dict
    "torch.amp.grad_scaler": "GradScaler OptState _refresh_per_optimizer_state",
    "torch.cuda.amp.grad_scaler": "GradScaler",
    "smpkit.torch.amp": "GradScaler",
    "torch.utils.data._utils.collate": "default_collate",  # a DataLoader's; stacks what it is given
    "torch.utils.data.dataloader": "DataLoader _DatasetKind _InfiniteConstantSampler",
    "torch.utils.data.dataset": "ConcatDataset Subset TensorDataset",
    "torch.utils.data.distributed": "DistributedSampler",
    "torch.utils.data.sampler": "BatchSampler RandomSampler SequentialSampler"
    " SubsetRandomSampler WeightedRandomSampler",
    "transformers.generation.configuration_utils": "GenerationConfig",
}
"""By module. Calling these with any arguments, and setting any attributes of what they make, runs no code of the file's
choice."""

_CONFIGURATION: Final = re.compile(r"transformers\.models\.(\w+)\.configuration_\w+\.\w+Config")
"""The names of Hugging Face's configurations, which keep their arguments."""


def find_allowed(name: str) -> tuple[Any, str]:
    """Return the class with a full name, or why objects of it may not be loaded."""
    module_name, _, attribute = name.rpartition(".")
    is_reviewed = attribute in _REVIEWED.get(module_name, "").split()
    if is_reviewed or _CONFIGURATION.fullmatch(name):
        with contextlib.suppress(ImportError):
            kind: Any = getattr(importlib.import_module(module_name), attribute, None)
            bases = {base.__name__ for base in getattr(kind, "__mro__", ())}
            if kind is not None and (is_reviewed or bases & {"PretrainedConfig", "PreTrainedConfig"}):
                return kind, ""
    module = sys.modules.get(module_name)
    if module is None:
        return None, "its module has not been imported"
    kind = getattr(module, attribute, None)
    if kind is None:
        return None, "its module has no such class"
    if not isinstance(kind, type):
        return None, "it is no class"
    # A class that a module of the job's source folder defines itself. What the module has only imported, such as
    # subprocess.Popen, is not its own.
    if kind.__module__ != module_name or not _is_own_source(module):
        return None, "it is neither a reviewed class nor one of the script's own source folder"
    return kind, ""


def _is_own_source(module: ModuleType) -> bool:
    """Return whether a module lies beside the script, or in the working directory (on SageMaker its archive)."""
    file = getattr(module, "__file__", None)
    if file is None:  # typed into an interpreter or a notebook
        return module.__name__ == "__main__"
    paths = sysconfig.get_paths()
    # Python, and what pip installs, may lie inside the source folder.
    installed = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    installed += [*site.getsitepackages(), site.getusersitepackages(), str(Path(os.__file__).parent)]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    sources = [os.path.realpath(folder) for folder in (Path(script).parent if script else Path.cwd(), Path.cwd())]
    path = Path(os.path.realpath(file))
    if any(path.is_relative_to(os.path.realpath(folder)) for folder in installed):
        return False
    # Of the root of the file system, everything would be a part.
    return any(path.is_relative_to(folder) for folder in sources if folder != Path(folder).anchor)
