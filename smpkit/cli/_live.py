"""Lines that are repainted in place, on terminals that support it.

::

    if can_repaint():
        with live(lambda: [f"{seconds()} s so far"]):
            work()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["can_repaint", "live"]


def can_repaint() -> bool:
    """Tell whether stdout is a terminal with cursor control, and the user has not switched colours or animation off."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("SMPKIT_NO_PROGRESS")
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not unwanted


@contextmanager
def live(lines: Callable[[], Iterable[str]], console: Console | None = None) -> Iterator[None]:
    """Show what `lines` returns, asked again each second, until the block ends; then take it off the screen.

    Args:
        lines: may have colours; long ones are wrapped, so that a narrow terminal is repainted as well.
        console: another than stdout.
    """
    import rich.console
    import rich.live
    import rich.text

    def frame() -> rich.text.Text:
        return rich.text.Text.from_ansi("\n".join(lines()))

    shown = console or rich.console.Console(file=sys.stdout)
    with rich.live.Live(get_renderable=frame, console=shown, refresh_per_second=1, transient=True):
        yield
