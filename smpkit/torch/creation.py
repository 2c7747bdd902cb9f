"""Notice modules while they are made: what contexts around a model's construction stand on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["on_module_created"]


@contextlib.contextmanager
def on_module_created(callback: Callable[[nn.Module], object]) -> Iterator[None]:
    """Call `callback` with every module that is created in this block; that of an inner block is called last."""
    original_init = nn.Module.__init__

    @functools.wraps(original_init)
    def observed_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        callback(self)

    nn.Module.__init__ = observed_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = original_init  # type: ignore[method-assign]
