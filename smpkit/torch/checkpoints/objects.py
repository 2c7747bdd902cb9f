"""Files of `torch.save`: written as torch does, read with `weights_only=True` and the classes that the reader allows.

Scripts put all kinds of objects into checkpoints: configurations, namespaces, dataclasses, loss scalers, even a
DataLoader. `load` reads those whose classes `allowed_classes` knows; any other makes the file an error that names the
class. torch fills no containers but plain ones then, so `dump` refuses the others while the script can still change
them. Plain `torch.load(..., weights_only=False)` reads every file.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import contextlib
import functools
import pickle
from pathlib import Path
from typing import IO, Any, Final

import torch

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.allowed_classes import find_allowed, why_refused

__all__ = ["dump", "first_line", "load"]

_MAX_NAMED: Final = 5
_HINT: Final = (
    "import the module of the script that defines the class before you load; or, if you trust whoever can write the"
    " file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 or load it with weights_only=False (smp.load:"
    ' pickle_load_args={"weights_only": False})'
)


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
