"""What was resumed but is not read yet, because a model that is not partitioned does not know what is this rank's.

A rank reads its part when the model is partitioned. Should a script ask for the state before that, all of it is read.
"""

from __future__ import annotations

from collections.abc import Callable

from smpkit.torch.state import state

__all__ = ["forget_unread", "read_later", "read_now"]

_unread: list[Callable[[], object]] = []


def read_later(read: Callable[[], object]) -> None:
    """Keep `read` for `read_now`."""
    _unread.append(read)


def read_now() -> None:
    """Read what waits; nothing most of the time."""
    while _unread:
        _unread.pop(0)()


def forget_unread() -> None:
    """Let go of what waits: something else is loaded in its place."""
    _unread.clear()


state.reset_hooks.append(forget_unread)
