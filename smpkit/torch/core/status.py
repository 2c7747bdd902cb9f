"""The status page of this process (`smpkit.observe.status`), if its launcher has given it a folder for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from smpkit.observe.status import ACTION_CELL, LAYER_CELL, STATUS_DIR, StatusPage
from smpkit.observe.summary import KindBytes

_page: StatusPage | None = None
_cells: memoryview | None = None
_layer_numbers: Mapping[str, int] = {}
"""These two are the page's: every layer is noted, so writing to them here saves the call of a method."""
planner: Callable[[], KindBytes | None] | None = None
"""Returns what this rank was expected to hold, None where nothing was planned; set by the code that plans."""
checkpoints = False
"""Whether layers of this process have been checkpointed; set by the code that checkpoints them."""


def open_page(rank: int, degrees: tuple[int, int, int], environ: Mapping[str, str]) -> None:
    """Begin a page, where the environment names a folder; without one, or where it is gone, nothing is noted."""
    if folder := environ.get(STATUS_DIR):
        try:
            use_page(StatusPage(Path(folder), rank, degrees))
        except OSError:
            use_page(None)


def use_page(page: StatusPage | None) -> None:
    """Note on this page from now on; None: nowhere."""
    global _page, _cells, _layer_numbers
    _page, _cells, _layer_numbers = page, None, {}
    if page is not None:
        _cells, _layer_numbers = page.cells, page.layer_numbers


def current_page() -> StatusPage | None:
    return _page


def begin_action(kind: str, microbatch: int) -> None:
    """Note that an action begins, and that no layer runs."""
    if _cells is not None:
        _cells[ACTION_CELL] = microbatch * 256 + ord(kind[0])
        _cells[LAYER_CELL] = 0


def begin_layer(name: str) -> None:
    """Note that a layer begins."""
    if _cells is not None:
        _cells[LAYER_CELL] = _layer_numbers[name]
