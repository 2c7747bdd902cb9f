"""Observe the constructors of modules, each from its beginning to its end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

__all__ = ["Around", "observe_construction"]

Around = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object]]
"""Makes what is entered around a constructor, from the module that is made and the arguments."""


def observe_construction(around: Around) -> None:
    """Enter `around` for every module that is made from now on.

    `nn.Module.__init__` knows only where a constructor begins, and `type.__call__` cannot be replaced. So each class
    gets an `__init__` that knows where it ends, too, when its first instance is allocated.
    """
    observed: set[type[nn.Module]] = set()

    def allocate(cls: type[nn.Module], *_: Any, **__: Any) -> nn.Module:
        if cls not in observed:
            observed.add(cls)
            cls.__init__ = _observed(cls, cls.__init__, around)  # type: ignore[method-assign]
        return object.__new__(cls)

    nn.Module.__new__ = allocate  # type: ignore[assignment]


def _observed(cls: type[nn.Module], plain: Callable[..., None], around: Around) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is not cls:  # the constructor of a subclass calls this one, and is observed itself
            plain(self, *args, **kwargs)
            return
        with around(self, args, kwargs):
            plain(self, *args, **kwargs)

    return init
