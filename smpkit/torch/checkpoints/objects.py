"""Objects in checkpoints: saved apart from tensors and plain values, and loaded if the reader allows their classes.

Scripts put all kinds of objects into checkpoints: configurations, namespaces, dataclasses, loss scalers, even a
DataLoader. In a pickle, one object of a class that may not be loaded would make all of the file unreadable. So `dump`
writes each object as an archive of its own inside the file, and `load` opens each with `weights_only=True` and the
classes of `allowed_classes`. An object that the reader refuses becomes a `RefusedObject`; the rest is loaded.

Plain `torch.load(..., weights_only=False)` returns the objects themselves.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import contextlib
import contextvars
import copyreg
import functools
import io
import pickle
import types
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import nn

from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints.allowed_classes import find_allowed, why_refused
from smpkit.torch.checkpoints.integrity import check_open_archive
from smpkit.torch.core.warn import warn_user

__all__ = ["RefusedObject", "dump", "first_line", "load"]

_MAX_NAMED: Final = 5
_PLAIN: Final = frozenset(
    {
        *(torch.Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
        *(bytes, bytearray, complex, set, collections.OrderedDict, collections.Counter, argparse.Namespace),
    }
)
"""Types that stay among the tensors and plain values: torch loads them, or `_plain_types` says so."""
_REBUILDERS: Final = frozenset({"torch._utils", "torch._tensor", "torch.serialization", "copyreg", "_codecs"})
"""Modules of the functions that pickles of `_PLAIN` types call."""


class _RefusedError(UsageError, AttributeError):
    """`hasattr` and `getattr` with a default take it for a missing attribute."""


class RefusedObject:
    """Stands for an object that was saved and that this job may not load.

    It can be saved again, and then loaded by a job that may.

    Args:
        kind: the full name of the object's class.
        why: the reason, in a few words.
        data: an archive of `torch.save`, uint8 of any length.
    """

    def __init__(self, kind: str, why: str, data: torch.Tensor) -> None:
        self._kind = kind if kind.isprintable() else ascii(kind)
        self._why = why
        self._data = data

    def __repr__(self) -> str:
        return f"<an object of class {self._kind} that was not loaded: {self._why}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_object, (self._kind, self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _RefusedError(f"`{name}` was asked of {self!r}", hint=_HINT)


_HINT: Final = (
    "import the module of the script that defines the class before you load; or, if you trust whoever can write the"
    " file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 or load it with weights_only=False (smp.load:"
    ' pickle_load_args={"weights_only": False})'
)


# --- saving -----------------------------------------------------------------------------------------------------------


def dump(obj: Any, file: IO[bytes], pickle_protocol: int = 2) -> None:
    """Write an object as `torch.save` does, with the objects in it apart.

    Raises:
        CheckpointError: a part of it cannot be pickled.
    """
    try:
        torch.save(obj, file, _OuterPickle, pickle_protocol)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"what is to be saved holds something that cannot be pickled: {error}",
            hint="save a state_dict, or numbers, strings, lists and dicts, in its place",
        ) from error


class _InnerPickler(pickle.Pickler):
    """Pickles one object with all that is in it."""

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol, fix_imports=False)  # or classes get their names of Python 2, which none allows

    def reducer_override(self, obj: Any) -> Any:
        # `weights_only` fills no containers but plain ones: a function of ours makes the others.
        if isinstance(obj, dict | list | collections.deque) and type(obj) not in (
            collections.OrderedDict,
            collections.Counter,
        ):
            return _with_items(obj.__reduce_ex__(2))
        return NotImplemented


class _OuterPickler(pickle.Pickler):
    """Pickles tensors and plain values, and each object apart."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN or kind.__module__ == "numpy" or kind is RefusedObject or _is_rebuilder(obj):
            return NotImplemented
        if torch.is_storage(obj):
            return NotImplemented
        buffer = io.BytesIO()
        torch.save(obj, buffer, _InnerPickle)
        data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        return restore_object, (f"{kind.__module__}.{kind.__qualname__}", data)


class _InnerPickle:
    """What `torch.save` takes for the pickle module."""

    Pickler = _InnerPickler


class _OuterPickle:
    Pickler = _OuterPickler


def _is_rebuilder(obj: Any) -> bool:
    if not isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    if obj in _PLAIN or obj in (restore_object, rebuild_container):
        return True
    if isinstance(obj, type) and issubclass(obj, torch.TypedStorage | torch.UntypedStorage):
        return True
    module = obj.__module__ or ""
    return module in _REBUILDERS or module.split(".")[0] == "numpy"


def _with_items(reduced: Any) -> Any:
    function, args, state, *items = reduced
    listed, mapped = [list(each) if each is not None else [] for each in (*items, None, None)[:2]]
    if function is copyreg.__newobj__ or isinstance(function, type):  # type: ignore[attr-defined]
        kind, *args = args if function is copyreg.__newobj__ else (function, *args)  # type: ignore[attr-defined]
        return rebuild_container, (kind, tuple(args), listed, mapped), state
    return reduced


# --- loading ----------------------------------------------------------------------------------------------------------


def restore_object(kind: str, data: torch.Tensor) -> Any:
    """Return an object that was saved apart; for readers that trust the file (`weights_only=False`)."""
    del kind  # for readers that refuse it
    return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=False)


def rebuild_container(kind: type, args: tuple[Any, ...], listed: list[Any], mapped: list[tuple[Any, Any]]) -> Any:
    """Return a container of a class with these items."""
    made: Any = kind(*args) if kind in (collections.defaultdict, collections.deque) else kind.__new__(kind, *args)
    for item in listed:
        made.append(item)
    for key, value in mapped:
        made[key] = value
    return made


class _Reading:
    """One call of `load`."""

    def __init__(self, map_location: Any) -> None:
        self.map_location = map_location
        self.refused: list[RefusedObject] = []


_reading: contextvars.ContextVar[_Reading] = contextvars.ContextVar("smpkit_reading")


def load(source: Path | IO[bytes], map_location: Any = None, *, quiet: bool = False, **options: Any) -> Any:
    """Read what `dump` or `torch.save` wrote with `weights_only=True`, and the objects in it whose classes are allowed.

    Those that are refused are `RefusedObject`s in the result, and one warning names them.

    Args:
        map_location, options: torch.load's.
        quiet: do not warn.

    Raises:
        CheckpointError: it is damaged; or it is a plain file of `torch.save`, in which objects do not lie apart, and
            holds one that is refused.
    """
    reading = _Reading(map_location)
    token = _reading.set(reading)
    try:
        with torch.serialization.safe_globals([*_plain_types(), *_OURS]):
            found = _load(source, str(source) if isinstance(source, Path) else "it", map_location, **options)
    finally:
        _reading.reset(token)
    if reading.refused and not quiet:
        told = sorted({f"{each._kind} ({each._why})" for each in reading.refused})
        more = f", and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
        warn_user(
            f"{source} holds objects that were not loaded: {', '.join(told[:_MAX_NAMED])}{more}; to load them, {_HINT}"
        )
    return found


def _open_apart(kind: str, data: torch.Tensor) -> Any:
    """Return an object that was saved apart, or what stands for it."""
    reading = _reading.get()
    try:
        archive = io.BytesIO(data.cpu().numpy().tobytes())
        check_open_archive(archive, f"an object of class {kind}")
        return _load(archive, "it", reading.map_location)
    except CheckpointError as error:
        refused = RefusedObject(str(kind), error.message, data)
        reading.refused.append(refused)
        return refused


def _load(source: Path | IO[bytes], name: str, map_location: Any, **options: Any) -> Any:
    """Read an archive whose objects are allowed, or raise a CheckpointError that says why not."""
    try:
        return torch.load(source, map_location, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        wanted = _names_of_classes(source)
        if not wanted:
            raise CheckpointError(f"{name} is damaged: {first_line(error)}") from error
    found = {each: find_allowed(each) for each in wanted}
    if refused := sorted(each for each, allowed in found.items() if allowed is None):
        reasons = ", ".join(f"`{each}`, and {why_refused(each)}" for each in refused[:_MAX_NAMED])
        raise CheckpointError(f"{name} needs {reasons}", hint=_HINT)
    if not isinstance(source, Path):
        source.seek(0)
    # Those of `load` must not be named again: the end of this context would take them away from the rest of the file.
    with torch.serialization.safe_globals([(each, full_name) for full_name, each in found.items()]):
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


_OURS: Final[tuple[Any, ...]] = (
    rebuild_container,
    # Whatever reads a file with `weights_only` gets this function under the other's name.
    (_open_apart, f"{restore_object.__module__}.{restore_object.__qualname__}"),
)


@functools.cache
def _plain_types() -> tuple[Any, ...]:
    """Return types that stay among the plain values but that torch alone does not allow."""
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
