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

_WATCHED: Final[tuple[tuple[type, str], ...]] = (
    (saved_tensors_hooks, "__enter__"),
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "retain_grad"),
)


@contextlib.contextmanager
def watching(note: Callable[[], object]) -> Iterator[None]:
    """Call `note` whenever code inside uses hooks on saved tensors or on activations."""
    with contextlib.ExitStack() as stack:
        for owner, name in _WATCHED:
            stack.enter_context(_replaced(owner, name, _noted(getattr(owner, name), note)))
        yield


def _noted(plain: Callable[..., Any], note: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note()
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
