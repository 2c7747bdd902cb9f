"""Walk nested containers of tensors: lists, tuples, mappings, sets and dataclasses.

`children` returns what a container holds, and `rebuild` makes one of the same type: a `ModelOutput`, a `BatchEncoding`,
a named tuple or an `OrderedDict` keeps its type. `pickled` also pickles named tuples that hold other values than their
constructor accepts.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import io
import operator
import pickle
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import torch

_LEAVES: Final = (torch.Tensor, torch.Size, str, bytes, torch.nn.Module)
_SEQUENCES: Final = (list, tuple, set, frozenset)


def children(value: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, position or field name; None for a leaf."""
    if isinstance(value, _LEAVES):
        return None
    # Mappings first: a Hugging Face ModelOutput is both a dict and a dataclass, and callers index it as a dict.
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, _SEQUENCES):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuild(container: Any, values: dict[Any, Any]) -> Any:
    """Make a container of the same type as `container` that holds `values` under the keys that `children` gave."""
    if type(container) is dict:
        return values
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return type(container)(values)  # type: ignore[call-arg]
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        kind: Any = type(container)
        return kind._make(values.values())  # not the class itself: PackedSequence checks its arguments
    if isinstance(container, _SEQUENCES):
        return type(container)(values.values())
    copied = copy.copy(container)  # keeps a subclass's other attributes (a default factory, an encoding)
    for key, value in values.items():
        if isinstance(container, MutableMapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # the dataclass may be frozen
    return copied


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to every leaf of a nested container; containers keep their types."""
    parts = children(value)
    if parts is None:
        return function(value)
    mapped = {key: map_leaves(function, part) for key, part in parts.items()}
    return value if all(mapped[key] is part for key, part in parts.items()) else rebuild(value, mapped)


def pickled(value: Any) -> bytes:
    """Pickle a value; named tuples in it are unpickled with any items, as `rebuild` makes them."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kind: Any = type(value)
            if _has_name(kind):
                return kind._make, (tuple(value),)
            return _make_named_tuple, (kind.__name__, kind._fields, tuple(value))
        return NotImplemented


def _has_name(kind: type) -> bool:
    """Return whether pickle finds a class by its name; it does not if a forward makes it each time (public VGGs)."""
    with contextlib.suppress(AttributeError, KeyError):
        return operator.attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    return False


def _make_named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    # Its fields are known only here.
    kind: Any = collections.namedtuple(name, fields)  # type: ignore[misc]  # noqa: PYI024
    return kind._make(values)
