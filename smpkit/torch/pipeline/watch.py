"""Notice code that makes it wrong, or dear, to walk through its autograd graph in two goes.

What is saved for backward under hooks is computed again (activation checkpointing) or fetched (offloading) in every go.
A hook on an activation would run in both, and so would what `retain_grad` adds up. None of them can be seen from the
graph, so they are noticed while the forward runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["watching"]

_WATCHED: Final[tuple[tuple[type, str, int], ...]] = (
    (saved_tensors_hooks, "__enter__", 1),
    (saved_tensors_hooks, "__exit__", -1),
    (torch.Tensor, "register_hook", 0),
    (torch.Tensor, "retain_grad", 0),
)
"""What is called, and by how much it changes in how many hooks on saved tensors the code is."""


@contextlib.contextmanager
def watching(note: Callable[[int], object]) -> Iterator[None]:
    """Call `note` where code inside uses hooks: 1 and -1 around those on saved tensors, 0 for one on an activation."""
    with contextlib.ExitStack() as stack:
        for owner, name, change in _WATCHED:
            stack.enter_context(_replaced(owner, name, _noted(getattr(owner, name), note, change)))
        yield


def _noted(plain: Callable[..., Any], note: Callable[[int], object], change: int) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(change)
        return plain(self, *args, **kwargs)

    return noted


@contextlib.contextmanager
def _replaced(owner: type, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Put `new` in the place of a method; an inherited one is uncovered again afterwards."""
    inherited = name not in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
