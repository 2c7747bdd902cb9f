"""The status page of this process (`smpkit.observe.status`), if its launcher has given it a folder for one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from smpkit.observe.status import STATUS_DIR, StatusPage
from smpkit.observe.summary import KindBytes

__all__ = [
    "begin_action",
    "begin_layer",
    "checkpoints",
    "current_page",
    "note_checkpoint",
    "open_page",
    "plan_by",
    "planned",
]

_page: StatusPage | None = None
_planner: Callable[[], KindBytes | None] | None = None
checkpoints = False
"""Whether layers of this process have been checkpointed."""


def open_page(rank: int, environ: Mapping[str, str] | None = None) -> None:
    """Begin a page, where the environment names a folder; without one, or where it is gone, nothing is noted."""
    global _page  # noqa: PLW0603 - one per process
    folder = (os.environ if environ is None else environ).get(STATUS_DIR)
    if folder and _page is None:
        try:
            _page = StatusPage(Path(folder), rank)
        except OSError:
            _page = None


def current_page() -> StatusPage | None:
    """Return the page of this process."""
    return _page


def begin_action(kind: str, microbatch: int) -> None:
    """Note that an action begins."""
    if _page is not None:
        _page.begin_action(kind, microbatch)
        _page.end_layers()


def begin_layer(name: str) -> None:
    """Note that a layer begins."""
    if _page is not None:
        _page.begin_layer(name)


def note_checkpoint() -> None:
    """Note that a layer is checkpointed."""
    global checkpoints  # noqa: PLW0603
    checkpoints = True


def plan_by(planner: Callable[[], KindBytes | None]) -> None:
    """Let `planner` say what this rank was expected to hold."""
    global _planner  # noqa: PLW0603
    _planner = planner


def planned() -> KindBytes | None:
    """Return what this rank was expected to hold; None where nothing was planned."""
    return None if _planner is None else _planner()
