"""Place modules by hand: `smp.partition(index)` where they are made, `smp.set_partition(module, index)` afterwards."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.state import state

__all__ = ["partition", "pinned_modules", "set_partition"]

_chosen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Partition by module, as the user said."""


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Put the modules that are created in this block on pipeline rank `index`; the innermost block wins.

    Acts only with `auto_partition: false`. Modules created in no block go to `default_partition`.

    Raises:
        UsageError: `index` is no pipeline rank.
    """
    _check(index)
    plain = nn.Module.__init__

    @functools.wraps(plain)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        _chosen[self] = index

    nn.Module.__init__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]


def set_partition(module: nn.Module, index: int) -> None:
    """Put a module that exists, and everything in it, on pipeline rank `index`, before the first step.

    Raises:
        UsageError: `index` is no pipeline rank, or the model has been partitioned.
    """
    _check(index)
    if state.model is not None and state.model.partitioned and state.pp_size > 1:
        raise UsageError("the model has been partitioned", hint="call smp.set_partition before the first step")
    for each in module.modules():
        _chosen[each] = index


def pinned_modules(root: nn.Module) -> dict[str, int]:
    """Return the chosen partitions by module name.

    A module that was created in a block but holds others that were created in other blocks is left out: what matters is
    where its parts are.
    """
    names = {name: _chosen[module] for name, module in root.named_modules() if module in _chosen}
    mixed = {
        name
        for name, index in names.items()
        if any(other != index for inner, other in names.items() if inner.startswith(f"{name}." if name else ""))
    }
    return {name: index for name, index in names.items() if name not in mixed}


def _check(index: int) -> None:
    if type(index) is not int or not 0 <= index < state.pp_size:  # not a bool, which Python takes for an int
        raise UsageError(
            f"partition {index!r} is no pipeline rank; pipeline_parallel_degree is {state.pp_size}",
            hint=f"valid are 0 to {state.pp_size - 1}",
        )
