"""Notice modules while they are made: what contexts around a model's construction stand on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["noting_created"]


@contextlib.contextmanager
def noting_created(note: Callable[[nn.Module], object]) -> Iterator[None]:
    """Call `note` with every module that is created in this block; that of an inner block is called last."""
    plain = nn.Module.__init__

    @functools.wraps(plain)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        note(self)

    nn.Module.__init__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
